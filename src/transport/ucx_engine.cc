#include "transport/ucx_engine.h"

#include <algorithm>
#include <cstring>

#include "base/time.h"

namespace disagmoe {
namespace {

// Progress calls in a row before commands get their turn: an endless drain beside a streaming peer starves our sends.
constexpr int kProgressBurst = 16;
constexpr int64_t kSuspectPollNs = 5'000'000;
constexpr int64_t kLongestSleepNs = 1'000'000'000;

}  // namespace

// --- Any thread ---------------------------------------------------------------------------------------------------

UcxTransport::Engine::Engine(UcxOptions options) : options_(std::move(options)) {
  DM_CHECK(options_.rank >= 0 && options_.rank < options_.size, "rank " + std::to_string(options_.rank));
  context_ = std::make_unique<UcxContext>(options_);
  for (ucp_worker_h worker : {context_->tx(), context_->rx()}) {
    ucp_am_handler_param_t param{};
    param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    param.id = UcxContext::kAmId;
    param.flags = UCP_AM_FLAG_WHOLE_MSG;
    param.cb = OnMessage;
    param.arg = this;
    const ucs_status_t status = ucp_worker_set_am_recv_handler(worker, &param);
    if (status != UCS_OK) throw Error(std::string("UCX cannot receive active messages: ") + ucs_status_string(status));
  }
  address_ = context_->address();
}

UcxTransport::Engine::~Engine() {
  if (thread_.joinable()) {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    context_->Wake();
    thread_.join();
  }
  context_.reset();  // may still call OnSent and OnPulled
  for (Op* op : ops_) delete op;
}

void UcxTransport::Engine::Connect(const std::vector<std::string>& addresses) {
  DM_CHECK(!thread_.joinable(), "Connect was called twice");
  DM_CHECK(addresses.size() == static_cast<size_t>(options_.size), std::to_string(addresses.size()) + " addresses");
  peers_.resize(addresses.size());
  for (int r = 0; r < options_.size; ++r) {
    peers_[r].engine = this;
    peers_[r].rank = r;
    peers_[r].address = ParseUcxAddress(addresses[r], r);
  }
  {
    std::lock_guard lock(mutex_);
    connected_ = true;
  }
  thread_ = std::thread([this] { Run(); });
}

RequestPtr UcxTransport::Engine::Post(RequestPtr request, Buffer buffer, const SendStamps& stamps) {
  if (request->is_send()) {
    counters_.bytes_sent += buffer.size;
    counters_.messages_sent += 1;
  }
  std::unique_lock lock(mutex_);
  DM_CHECK(connected_, "posted before Connect");
  if (aborted_) {
    const std::string reason = abort_reason_;
    lock.unlock();
    request->Fail(reason);
    return request;
  }
  commands_.push_back({request, std::move(buffer), stamps});
  if (std::exchange(sleeping_, false)) context_->Wake();
  return request;
}

void UcxTransport::Engine::Abort(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (aborted_) return;
  abort_reason_ = reason;
  aborted_ = true;
  if (std::exchange(sleeping_, false)) context_->Wake();
}

// --- Called by UCX inside progress --------------------------------------------------------------------------------

ucs_status_t UcxTransport::Engine::OnMessage(void* self, const void* header, size_t header_size, void* data,
                                             size_t size, const ucp_am_recv_param_t* param) {
  auto* engine = static_cast<Engine*>(self);
  WireHeader h;
  if (header_size != sizeof h) return UCS_OK;
  std::memcpy(&h, header, sizeof h);
  if (h.token != engine->options_.token || h.src < 0 || h.src >= engine->options_.size ||
      h.src == engine->options_.rank) {
    return UCS_OK;  // of another run: dropped
  }
  Arrival arrival;
  arrival.what = h.what;
  arrival.key = {h.src, {h.step, static_cast<MessageKind>(h.kind), h.stage, h.micro_batch}};
  arrival.parcel.size = size;
  arrival.parcel.stamps = h.stamps;
  const bool large = param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV;
  if (large) {
    arrival.parcel.desc = data;
  } else if (size > 0) {
    arrival.parcel.buffer = engine->pool_.Allocate(size);
    std::memcpy(arrival.parcel.buffer.data, data, size);
  }
  engine->arrivals_.push_back(std::move(arrival));
  return large ? UCS_INPROGRESS : UCS_OK;
}

void UcxTransport::Engine::OnSent(void* request, ucs_status_t status, void* op) {
  ucp_request_free(request);
  static_cast<Op*>(op)->engine->Finish(static_cast<Op*>(op), status);
}

void UcxTransport::Engine::OnPulled(void* request, ucs_status_t status, size_t, void* op) {
  OnSent(request, status, op);
}

void UcxTransport::Engine::OnClosed(void* request, ucs_status_t, void* engine) {
  ucp_request_free(request);
  --static_cast<Engine*>(engine)->closing_;
}

void UcxTransport::Engine::OnError(void* peer, ucp_ep_h, ucs_status_t status) {
  Peer& p = *static_cast<Peer*>(peer);
  p.engine->Suspect(p, status);
}

// --- The thread ---------------------------------------------------------------------------------------------------

void UcxTransport::Engine::Run() {
  try {
    for (bool stop = false; !stop;) {
      Turn(NowNs() + kLongestSleepNs);
      std::lock_guard lock(mutex_);
      stop = stop_;
    }
  } catch (const std::exception& e) {
    Abort(std::string("the transport's thread failed: ") + e.what());
  }
  try {
    Close();
  } catch (const std::exception& e) {
    FailAll(std::string("closing the transport failed: ") + e.what());
  }
}

void UcxTransport::Engine::Turn(int64_t until_ns) {
  bool busy = RunCommands();
  for (int i = 0; i < kProgressBurst; ++i) {
    const unsigned events = ucp_worker_progress(context_->tx()) + ucp_worker_progress(context_->rx());
    if (events == 0) break;
    busy = true;
  }
  busy |= HandleArrivals();
  SweepAbort();
  if (!suspects_.empty()) {
    ResolveSuspects();
    until_ns = std::min(until_ns, NowNs() + kSuspectPollNs);
  }
  if (busy || !Idle()) return;
  context_->Sleep(std::max<int64_t>(0, until_ns - NowNs()));
  std::lock_guard lock(mutex_);
  sleeping_ = false;
}

// Whether nothing came from other threads; from then on they wake us.
bool UcxTransport::Engine::Idle() {
  std::lock_guard lock(mutex_);
  if (!commands_.empty() || (aborted_ && !abort_seen_) || (stop_ && !ending_)) return false;
  sleeping_ = true;
  return true;
}

bool UcxTransport::Engine::RunCommands() {
  std::vector<Command> commands;
  {
    std::lock_guard lock(mutex_);
    if (commands_.empty()) return false;
    commands.swap(commands_);
  }
  for (Command& command : commands) {
    if (command.request->is_send()) {
      Send(std::move(command));
    } else {
      Receive(std::move(command.request));
    }
  }
  return true;
}

void UcxTransport::Engine::Send(Command command) {
  Peer& peer = peers_[command.request->peer()];
  if (peer.state != PeerState::kHere) {
    command.request->Fail(peer.reason);
    return;
  }
  const MessageKey& key = command.request->key();
  auto* op = new Op{this, &peer, command.request, std::move(command.buffer), {}, true};
  op->header = {options_.token, options_.rank, key.step, key.stage, key.micro_batch,
                static_cast<uint32_t>(key.kind), What::kData, command.stamps};
  ops_.insert(op);
  ucp_ep_h ep = Endpoint(peer, true);
  if (!ep) return Finish(op, peer.error);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = op->buffer.size <= options_.eager_bytes ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV;
  param.cb.send = OnSent;
  param.user_data = op;
  // The header is read until the send is done, so it lives in the op.
  ucs_status_ptr_t status = ucp_am_send_nbx(ep, UcxContext::kAmId, &op->header, sizeof op->header,
                                            op->buffer.data, op->buffer.size, &param);
  if (!UCS_PTR_IS_PTR(status)) Finish(op, UCS_PTR_STATUS(status));
}

void UcxTransport::Engine::Receive(RequestPtr request) {
  Peer& peer = peers_[request->peer()];
  const SourceKey key{peer.rank, request->key()};
  if (auto parcel = table_.TakeArrived(key)) {
    if (!parcel->desc) unexpected_bytes_ -= parcel->size;
    Accept(request, std::move(*parcel), peer);
  } else if (peer.state != PeerState::kHere) {
    request->Fail(peer.reason);
  } else if (!table_.StorePosted(key, request)) {
    request->Fail("a receive for it is already posted");
  }
  if (peer.state == PeerState::kHere) Endpoint(peer, false);
}

bool UcxTransport::Engine::HandleArrivals() {
  if (arrivals_.empty()) return false;
  std::vector<Arrival> arrivals;
  arrivals.swap(arrivals_);
  for (Arrival& arrival : arrivals) Arrive(arrival);
  return true;
}

void UcxTransport::Engine::Arrive(Arrival& arrival) {
  Peer& peer = peers_[arrival.key.src];
  const bool data = arrival.what == What::kData;
  // The connection is there already; an endpoint of ours makes its loss known here, and carries our farewell.
  if (peer.state == PeerState::kHere && (data || arrival.what == What::kHello)) {
    Endpoint(peer, !data);
    if (farewell_) SayFarewell(peer);
  }
  if (data) {
    ArriveData(arrival.key, std::move(arrival.parcel), peer);
  } else {
    ArriveControl(arrival.what, peer);
  }
}

void UcxTransport::Engine::ArriveData(SourceKey key, Parcel parcel, Peer& peer) {
  if (peer.state == PeerState::kLost || abort_seen_) return Drop(parcel);
  if (RequestPtr request = table_.TakePosted(key)) return Accept(request, std::move(parcel), peer);
  const bool small = !parcel.desc;
  const size_t size = parcel.size;
  if (!table_.StoreArrived(key, std::move(parcel))) {
    Drop(parcel);
    Abort("rank " + std::to_string(peer.rank) + " sent " + key.key.Describe() + " twice");
  } else if (small && (unexpected_bytes_ += size) > options_.max_unexpected_bytes) {
    Abort("more than " + std::to_string(options_.max_unexpected_bytes) +
          " bytes of small messages that nobody receives; the last is " + key.key.Describe() + " from rank " +
          std::to_string(peer.rank));
  }
}

void UcxTransport::Engine::ArriveControl(What what, Peer& peer) {
  if (what == What::kHello) return;
  peer.answered = true;
  if (what == What::kByeAck || peer.state != PeerState::kHere) return;
  const std::string who = "rank " + std::to_string(peer.rank);
  if (what == What::kAbort) return Lose(peer, who + " has aborted");
  peer.state = PeerState::kLeft;
  peer.reason = who + " has closed its transport";
  SendControl(peer, What::kByeAck);
  FailPeer(peer, false);
}

void UcxTransport::Engine::Accept(const RequestPtr& request, Parcel parcel, Peer& peer) {
  if (parcel.desc) return Pull(request, std::move(parcel), peer);
  counters_.bytes_received += parcel.size;
  counters_.messages_received += 1;
  request->Complete(std::move(parcel.buffer), parcel.stamps);
}

void UcxTransport::Engine::Pull(const RequestPtr& request, Parcel parcel, Peer& peer) {
  auto* op = new Op{this, &peer, request, pool_.Allocate(parcel.size), {}, false};
  op->header.stamps = parcel.stamps;
  ops_.insert(op);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.recv_am = OnPulled;
  param.user_data = op;
  ucs_status_ptr_t status =
      ucp_am_recv_data_nbx(context_->rx(), parcel.desc, op->buffer.data, op->buffer.size, &param);
  if (!UCS_PTR_IS_PTR(status)) Finish(op, UCS_PTR_STATUS(status));
}

void UcxTransport::Engine::Finish(Op* op, ucs_status_t status) {
  std::unique_ptr<Op> owned(op);
  ops_.erase(op);
  if (!op->request) return;
  if (status != UCS_OK) {
    op->peer->orphans.push_back(std::move(op->request));
    Suspect(*op->peer, status);
  } else if (op->is_send) {
    op->buffer = {};
    op->request->Complete({}, op->header.stamps);
  } else {
    counters_.bytes_received += op->buffer.size;
    counters_.messages_received += 1;
    op->request->Complete(std::move(op->buffer), op->header.stamps);
  }
}

}  // namespace disagmoe
