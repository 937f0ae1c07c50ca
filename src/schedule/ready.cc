#include "schedule/ready.h"

#include "base/error.h"

namespace disagmoe {

namespace {

// The parts of a boundary that a computation needs or feeds.
TransferRange Range(const Schedule& schedule, OpKind kind, int boundary, const Op& compute) {
  if (boundary < 0 || boundary >= schedule.num_stages() - 1) return {};
  const int parts = schedule.boundary_parts(boundary);
  if (schedule.parts(compute.stage) == parts) return {{kind, boundary, compute.micro_batch, compute.part}, 1};
  return {{kind, boundary, compute.micro_batch, 0}, parts};
}

Op ComputeAt(const Schedule& schedule, OpKind kind, int stage, const Op& transfer) {
  return {kind, stage, transfer.micro_batch, schedule.parts(stage) > 1 ? transfer.part : 0};
}

}  // namespace

TransferRange ReceivesFor(const Schedule& schedule, const Op& compute) {
  switch (compute.kind) {
    case OpKind::kForward: return Range(schedule, OpKind::kRecvForward, compute.stage - 1, compute);
    case OpKind::kBackward: return Range(schedule, OpKind::kRecvBackward, compute.stage, compute);
    default: DM_CHECK(compute.kind == OpKind::kWeight, PrintOp(compute)); return {};
  }
}

TransferRange SendsAfter(const Schedule& schedule, const Op& compute) {
  switch (compute.kind) {
    case OpKind::kForward: return Range(schedule, OpKind::kSendForward, compute.stage, compute);
    case OpKind::kBackward: return Range(schedule, OpKind::kSendBackward, compute.stage - 1, compute);
    default: DM_CHECK(compute.kind == OpKind::kWeight, PrintOp(compute)); return {};
  }
}

Op ProducerOf(const Schedule& schedule, const Op& transfer) {
  DM_CHECK(!IsCompute(transfer.kind), PrintOp(transfer));
  if (IsBackward(transfer.kind)) return ComputeAt(schedule, OpKind::kBackward, transfer.stage + 1, transfer);
  return ComputeAt(schedule, OpKind::kForward, transfer.stage, transfer);
}

Op ConsumerOf(const Schedule& schedule, const Op& transfer) {
  DM_CHECK(!IsCompute(transfer.kind), PrintOp(transfer));
  if (IsBackward(transfer.kind)) return ComputeAt(schedule, OpKind::kBackward, transfer.stage, transfer);
  return ComputeAt(schedule, OpKind::kForward, transfer.stage + 1, transfer);
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

int SenderOf(const Schedule& schedule, const Op& transfer) { return GroupOf(schedule, ProducerOf(schedule, transfer)); }

int ReceiverOf(const Schedule& schedule, const Op& transfer) { return GroupOf(schedule, ConsumerOf(schedule, transfer)); }

int GroupOf(const Schedule& schedule, const Op& op) {
  if (IsCompute(op.kind)) return schedule.group(op.stage, op.micro_batch, op.part);
  return IsSend(op.kind) ? SenderOf(schedule, op) : ReceiverOf(schedule, op);
}

bool InRange(const Schedule& schedule, const Op& op) {
  const int stages = IsCompute(op.kind) ? schedule.num_stages() : schedule.num_stages() - 1;
  if (op.stage < 0 || op.stage >= stages || op.micro_batch < 0 || op.micro_batch >= schedule.num_micro_batches) return false;
  return op.part >= 0 && op.part < (IsCompute(op.kind) ? schedule.parts(op.stage) : schedule.boundary_parts(op.stage));
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
