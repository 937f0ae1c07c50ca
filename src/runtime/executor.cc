// The order of things: receives, sends, the pass. What each stage computes is in executor_stages.cc.
#include <ATen/ATen.h>

#include "base/error.h"
#include "base/time.h"
#include "runtime/executor_state.h"
#include "schedule/ready.h"

namespace disagmoe {

Executor::Executor(const RunConfig& config, const Topology& topology, const ParamStore& store, const Batches& batches,
                   Transport* transport, int rank, at::Device device, Waits& waits, Status& status)
    : config_(config),
      model_(config.model),
      topology_(topology),
      store_(store),
      batches_(batches),
      transport_(transport),
      rank_(rank),
      replica_(topology.replica_of_rank(rank)),
      device_(device),
      dtype_(config.train.dtype == "bf16" ? at::kBFloat16 : at::kFloat),
      waits_(waits),
      status_(status),
      scale_(config),
      rotary_(config.model, config.train.seq_length, device) {
  const int64_t L = model_.num_hidden_layers;
  attention_params_.resize(L);
  ffn_params_.resize(L);
  auto here = [&](int stage) {
    for (int r : topology.ranks_of_stage(stage, replica_)) {
      if (r == rank) return true;
    }
    return false;
  };
  for (int64_t l = 0; l < L; ++l) {
    if (here(static_cast<int>(2 * l))) attention_params_[l] = std::make_unique<AttentionParams>(store, model_, l, rotary_);
    if (here(static_cast<int>(2 * l + 1))) ffn_params_[l] = std::make_unique<FfnParams>(store, model_, l);
  }
  if (here(static_cast<int>(2 * L))) head_params_ = std::make_unique<HeadParams>(store);
}

Executor::~Executor() = default;

AllocateFn Executor::allocator() {
  return [this](size_t n) { return transport_ != nullptr ? transport_->Allocate(n) : pool_.Allocate(n); };
}

const std::vector<int>& Executor::PeersOut(int boundary, bool backward) const {
  return topology_.ranks_of_stage(backward ? boundary : boundary + 1, replica_);
}
const std::vector<int>& Executor::PeersIn(int boundary, bool backward) const {
  return topology_.ranks_of_stage(backward ? boundary + 1 : boundary, replica_);
}

void Executor::StartReceives() {
  links_.clear();
  links_.resize(schedule_->links.size());
  for (size_t i = 0; i < links_.size(); ++i) links_[i].slots = schedule_->links[i].slots;
  for (const Op& op : schedule_->groups[topology_.group_of_rank(rank_)].comm) {
    if (!IsReceive(op.kind)) continue;
    const int link = LinkOf(*schedule_, op);
    DM_CHECK(link >= 0, "a transfer without a link");
    links_[link].ops.push_back(op);
  }
  for (auto& queue : links_) PostReceives(queue);
}

void Executor::PostReceives(LinkQueue& queue) {
  while (queue.posted < queue.ops.size() && queue.posted - queue.consumed < static_cast<size_t>(queue.slots)) {
    const Op& op = queue.ops[queue.posted++];
    const bool backward = op.kind == OpKind::kRecvBackward;
    auto& requests = receives_[OpIds(*schedule_)(op)];
    for (int peer : PeersIn(op.stage, backward)) {
      if (peer == rank_) {
        requests.push_back(nullptr);
        continue;
      }
      const MessageKey key{pass_.id, backward ? MessageKind::kBackward : MessageKind::kForward, op.stage, op.micro_batch};
      requests.push_back(transport_->PostRecv(peer, key));
    }
  }
}

// The computation that used a received message has ended: its slot is free.
void Executor::Consumed(const Op& op) {
  const TransferRange receive = ReceivesFor(*schedule_, op);
  if (receive.count == 0) return;
  receives_.erase(OpIds(*schedule_)(receive.first));
  LinkQueue& queue = links_[LinkOf(*schedule_, receive.first)];
  ++queue.consumed;
  PostReceives(queue);
}

void Executor::Post(int boundary, int mb, bool backward, size_t peer_index, Buffer message, int64_t rows) {
  const Op op{backward ? OpKind::kSendBackward : OpKind::kSendForward, boundary, mb};
  const int peer = PeersOut(boundary, backward)[peer_index];
  if (peer == rank_) {
    local_[OpIds(*schedule_)(op)] = std::move(message);
    return;
  }
  result_.row_bytes_sent += RowBytes(rows, model_.hidden_size, dtype_);
  const MessageKey key{pass_.id, backward ? MessageKind::kBackward : MessageKind::kForward, boundary, mb};
  while (!sends_.empty() && sends_.front().second->done()) {
    FinishSend(sends_.front().first, *sends_.front().second, waits_);
    sends_.pop_front();
  }
  sends_.emplace_back(waits_.tracing() ? PrintOp(op) : std::string(), transport_->PostSend(peer, key, std::move(message)));
}

Buffer Executor::Take(int boundary, int mb, bool backward, size_t peer_index) {
  const Op op{backward ? OpKind::kRecvBackward : OpKind::kRecvForward, boundary, mb};
  if (PeersIn(boundary, backward)[peer_index] == rank_) {
    auto it = local_.find(OpIds(*schedule_)(PeerOf(op)));
    DM_CHECK(it != local_.end(), "a message to oneself is used before it is made: " + PrintOp(op));
    Buffer out = std::move(it->second);
    local_.erase(it);
    return out;
  }
  auto it = receives_.find(OpIds(*schedule_)(op));
  DM_CHECK(it != receives_.end(), "a message is used before its receive is posted: " + PrintOp(op));
  Request& request = *it->second[peer_index];
  waits_.Wait(request);
  if (waits_.tracing()) {
    waits_.Record(Stream::kReceive, PrintOp(op), waits_.SenderClock(request) - waits_.Clock(0), request.done_ns(),
                  static_cast<int64_t>(request.buffer().size), request.peer());
  }
  return std::move(request.buffer());
}

void Executor::SeeRstd(const Tensor& rstd, int stage, int mb) {
  if (!AllFinite(rstd)) SeeBad(stage, mb);
}

void Executor::SeeBad(int stage, int mb) {
  const int64_t key = BadKey(pass_.first_micro_batch + mb, stage, schedule_->num_layers);
  if (result_.bad == kAllFinite || key < result_.bad) result_.bad = key;
}

PassResult Executor::Run(const Schedule& schedule, const PassSpec& pass) {
  schedule_ = &schedule;
  pass_ = pass;
  if (pass.labels > 0) scale_.token = 1 / static_cast<double>(pass.labels);
  result_ = {};
  result_.expert_tokens.assign(model_.num_hidden_layers * model_.num_experts, 0);
  DM_CHECK(schedule.executable(), "the runtime executes whole stages and one route");
  StartReceives();
  for (const Op& op : schedule.groups[topology_.group_of_rank(rank_)].compute) {
    status_.Computing(op, schedule.num_layers, pass.step);
    Compute(op);
    Consumed(op);
  }
  for (auto& [name, request] : sends_) FinishSend(name, *request, waits_);
  sends_.clear();
  DM_CHECK(attention_.empty() && ffn_.empty() && head_.empty() && weights_.empty() && local_.empty() &&
               receives_.empty(),
           "a pass left something behind");
  return result_;
}

void Executor::Compute(const Op& op) {
  const bool forward = op.kind == OpKind::kForward;
  const int64_t begin = waits_.tracing() ? NowNs() : 0;
  const int64_t waited = waits_.exposed_ns() + waits_.bubble_ns();
  const int layer = op.stage / 2;
  if (op.kind == OpKind::kWeight) {
    Weights(op.stage, op.micro_batch);
  } else if (op.stage == 2 * schedule_->num_layers) {
    forward ? ForwardHead(op.micro_batch) : BackwardHead(op.micro_batch);
  } else if (op.stage % 2 == 0) {
    forward ? ForwardAttention(layer, op.micro_batch) : BackwardAttention(layer, op.micro_batch);
  } else {
    forward ? ForwardFfn(layer, op.micro_batch) : BackwardFfn(layer, op.micro_batch);
  }
  if (waits_.tracing()) {
    // All waiting is for inputs, so it lies at the front.
    const int64_t in_wait = waits_.exposed_ns() + waits_.bubble_ns() - waited;
    waits_.Record(forward ? Stream::kForward : Stream::kBackward, PrintOp(op), begin + in_wait, NowNs());
  }
}

}  // namespace disagmoe
