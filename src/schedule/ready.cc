#include "schedule/ready.h"

#include "base/error.h"

namespace disagmoe {

std::optional<Op> ReceiveFor(const Schedule& schedule, const Op& compute) {
  if (compute.kind == OpKind::kForward) {
    if (compute.stage == 0) return std::nullopt;
    return Op{OpKind::kRecvForward, compute.stage - 1, compute.micro_batch};
  }
  DM_CHECK(compute.kind == OpKind::kBackward, PrintOp(compute));
  if (compute.stage == schedule.num_stages() - 1) return std::nullopt;
  return Op{OpKind::kRecvBackward, compute.stage, compute.micro_batch};
}

std::optional<Op> SendAfter(const Schedule& schedule, const Op& compute) {
  if (compute.kind == OpKind::kForward) {
    if (compute.stage == schedule.num_stages() - 1) return std::nullopt;
    return Op{OpKind::kSendForward, compute.stage, compute.micro_batch};
  }
  DM_CHECK(compute.kind == OpKind::kBackward, PrintOp(compute));
  if (compute.stage == 0) return std::nullopt;
  return Op{OpKind::kSendBackward, compute.stage - 1, compute.micro_batch};
}

Op ProducerOf(const Op& transfer) {
  DM_CHECK(!IsCompute(transfer.kind), PrintOp(transfer));
  if (IsBackward(transfer.kind)) return {OpKind::kBackward, transfer.stage + 1, transfer.micro_batch};
  return {OpKind::kForward, transfer.stage, transfer.micro_batch};
}

Op ConsumerOf(const Op& transfer) {
  DM_CHECK(!IsCompute(transfer.kind), PrintOp(transfer));
  if (IsBackward(transfer.kind)) return {OpKind::kBackward, transfer.stage, transfer.micro_batch};
  return {OpKind::kForward, transfer.stage + 1, transfer.micro_batch};
}

Op PeerOf(const Op& transfer) {
  Op peer = transfer;
  switch (transfer.kind) {
    case OpKind::kSendForward: peer.kind = OpKind::kRecvForward; break;
    case OpKind::kRecvForward: peer.kind = OpKind::kSendForward; break;
    case OpKind::kSendBackward: peer.kind = OpKind::kRecvBackward; break;
    case OpKind::kRecvBackward: peer.kind = OpKind::kSendBackward; break;
    default: DM_CHECK(false, PrintOp(transfer));
  }
  return peer;
}

int SenderOf(const Schedule& schedule, const Op& transfer) {
  return schedule.stage_group[ProducerOf(transfer).stage];
}

int ReceiverOf(const Schedule& schedule, const Op& transfer) {
  return schedule.stage_group[ConsumerOf(transfer).stage];
}

int GroupOf(const Schedule& schedule, const Op& op) {
  if (IsCompute(op.kind)) return schedule.stage_group[op.stage];
  return IsSend(op.kind) ? SenderOf(schedule, op) : ReceiverOf(schedule, op);
}

bool InRange(const Schedule& schedule, const Op& op) {
  const int stages = IsCompute(op.kind) ? schedule.num_stages() : schedule.num_stages() - 1;
  return op.stage >= 0 && op.stage < stages && op.micro_batch >= 0 && op.micro_batch < schedule.num_micro_batches;
}

int LinkOf(const Schedule& schedule, const Op& transfer) {
  const int src = SenderOf(schedule, transfer);
  const int dst = ReceiverOf(schedule, transfer);
  for (size_t i = 0; i < schedule.links.size(); ++i) {
    const Link& link = schedule.links[i];
    if (link.src_group == src && link.dst_group == dst && link.backward == IsBackward(transfer.kind)) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

}  // namespace disagmoe
