// UcxTransport::Engine, second half: endpoints, losses, farewells, the end. All in the engine's thread.
#include <algorithm>

#include "base/time.h"
#include "transport/ucx_engine.h"

namespace disagmoe {
namespace {

// After an error of UCX, wait so long for a farewell that may still be on its way: the peer may have closed in order.
constexpr int64_t kSuspectNs = 20'000'000;
constexpr int64_t kFarewellNs = 1'000'000'000;
constexpr int64_t kAbortNs = 50'000'000;  // nobody needs to answer; only let it out
constexpr int64_t kCloseEndpointsNs = 1'000'000'000;

}  // namespace

void UcxTransport::Engine::SendControl(Peer& peer, What what) {
  ucp_ep_h ep = peer.tx && what != What::kHello ? peer.tx : peer.rx;
  if (!ep) return;
  auto* op = new Op{this, &peer, nullptr, {}, {}, true};
  op->header.token = options_.token;
  op->header.src = options_.rank;
  op->header.what = what;
  ops_.insert(op);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.cb.send = OnSent;
  param.user_data = op;
  ucs_status_ptr_t status =
      ucp_am_send_nbx(ep, UcxContext::kAmId, &op->header, sizeof op->header, nullptr, 0, &param);
  if (!UCS_PTR_IS_PTR(status)) Finish(op, UCS_PTR_STATUS(status));
}

// --- Peers --------------------------------------------------------------------------------------------------------

// Null where it cannot be made; the peer is then a suspect.
ucp_ep_h UcxTransport::Engine::Endpoint(Peer& peer, bool tx) {
  ucp_ep_h& ep = tx ? peer.tx : peer.rx;
  if (ep) return ep;
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  const std::string& address = tx ? peer.address.rx : peer.address.tx;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {OnError, &peer};
  const ucs_status_t status = ucp_ep_create(tx ? context_->tx() : context_->rx(), &params, &ep);
  if (status != UCS_OK) {
    ep = nullptr;
    Suspect(peer, status);
  } else if (!tx) {
    SendControl(peer, What::kHello);
  }
  return ep;
}

void UcxTransport::Engine::CloseEndpoints(Peer& peer, bool force) {
  for (ucp_ep_h ep : {std::exchange(peer.tx, nullptr), std::exchange(peer.rx, nullptr)}) {
    if (!ep) continue;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.flags = force ? UCP_EP_CLOSE_FLAG_FORCE : 0;
    param.cb.send = OnClosed;
    param.user_data = this;
    ++closing_;
    if (!UCS_PTR_IS_PTR(ucp_ep_close_nbx(ep, &param))) --closing_;
  }
}

void UcxTransport::Engine::Suspect(Peer& peer, ucs_status_t status) {
  if (peer.suspect_ns) return;
  peer.suspect_ns = NowNs();
  peer.error = status;
  suspects_.push_back(&peer);
}

void UcxTransport::Engine::ResolveSuspects() {
  std::vector<Peer*> still;
  for (Peer* peer : std::exchange(suspects_, {})) {
    if (peer->state == PeerState::kHere && !ending_ && NowNs() - peer->suspect_ns < kSuspectNs) {
      still.push_back(peer);
      continue;
    }
    peer->suspect_ns = 0;
    peer->answered = true;  // nothing more to expect
    if (peer->state == PeerState::kHere) {
      Lose(*peer, "rank " + std::to_string(peer->rank) + " was lost (" + ucs_status_string(peer->error) + ")");
    } else {
      CloseEndpoints(*peer, true);
      FailPeer(*peer, peer->state == PeerState::kLost);
    }
  }
  suspects_.insert(suspects_.end(), still.begin(), still.end());
}

void UcxTransport::Engine::Lose(Peer& peer, const std::string& reason) {
  peer.state = PeerState::kLost;
  peer.reason = reason;
  CloseEndpoints(peer, true);
  FailPeer(peer, true);
  if (!quiet_ && !abort_seen_ && !ending_ && options_.on_peer_lost) options_.on_peer_lost(peer.rank, reason);
}

void UcxTransport::Engine::FailPeer(Peer& peer, bool drop_arrived) {
  std::vector<RequestPtr> failed = std::exchange(peer.orphans, {});
  for (Op* op : ops_) {
    if (op->peer == &peer && op->request) failed.push_back(std::exchange(op->request, nullptr));
  }
  table_.SweepPosted([&](const SourceKey& key, RequestPtr& request) {
    if (key.src == peer.rank) failed.push_back(request);
    return key.src == peer.rank;
  });
  // What a peer that has left sent before in small messages is whole; a large one cannot be pulled any more.
  table_.SweepArrived([&](const SourceKey& key, Parcel& parcel) {
    if (key.src != peer.rank || !(drop_arrived || parcel.desc)) return false;
    if (!parcel.desc) unexpected_bytes_ -= parcel.size;
    Drop(parcel);
    return true;
  });
  for (auto& request : failed) request->Fail(peer.reason);
}

void UcxTransport::Engine::Drop(Parcel& parcel) {
  if (parcel.desc) ucp_am_data_release(context_->rx(), std::exchange(parcel.desc, nullptr));
}

// --- The end ------------------------------------------------------------------------------------------------------

void UcxTransport::Engine::FailAll(const std::string& reason) {
  std::vector<RequestPtr> failed;
  for (Op* op : ops_) {
    if (op->request) failed.push_back(std::exchange(op->request, nullptr));
  }
  for (Peer& peer : peers_) {
    for (auto& request : std::exchange(peer.orphans, {})) failed.push_back(request);
  }
  table_.SweepPosted([&](const SourceKey&, RequestPtr& request) {
    failed.push_back(request);
    return true;
  });
  for (auto& request : failed) request->Fail(reason);
}

void UcxTransport::Engine::SweepAbort() {
  std::string reason;
  std::vector<Command> commands;
  {
    std::lock_guard lock(mutex_);
    if (!aborted_ || abort_seen_) return;
    abort_seen_ = true;
    reason = abort_reason_;
    commands.swap(commands_);
  }
  for (Command& command : commands) command.request->Fail(reason);
  FailAll(reason);
}

void UcxTransport::Engine::SayFarewell(Peer& peer) {
  if (peer.state != PeerState::kHere || !(peer.tx || peer.rx) || std::exchange(peer.told, true)) return;
  SendControl(peer, abort_seen_ ? What::kAbort : What::kBye);
}

void UcxTransport::Engine::Close() {
  ending_ = true;
  RunCommands();
  SweepAbort();
  auto wait = [this](int64_t for_ns, auto pending) {
    const int64_t deadline = NowNs() + for_ns;
    while (pending() && NowNs() < deadline) Turn(deadline);
  };
  auto sending = [this] {
    return std::any_of(ops_.begin(), ops_.end(), [](Op* op) { return op->is_send && op->request; });
  };
  if (!abort_seen_) wait(options_.close_timeout_ns, sending);
  FailAll("the transport was closed");
  farewell_ = true;
  for (Peer& peer : peers_) SayFarewell(peer);
  wait(abort_seen_ ? kAbortNs : kFarewellNs, [this] {
    return std::any_of(peers_.begin(), peers_.end(), [](Peer& p) { return (p.tx || p.rx) && !p.answered; });
  });
  table_.SweepArrived([this](const SourceKey&, Parcel& parcel) {
    Drop(parcel);
    return true;
  });
  for (Peer& peer : peers_) CloseEndpoints(peer, abort_seen_);
  wait(kCloseEndpointsNs, [this] { return closing_ > 0 || !ops_.empty(); });
}

}  // namespace disagmoe
