// What an operation waits for and what it feeds, beside its place in its group's order.
//
//   F(i, b) needs the receive of boundary i - 1 (i > 0)
//   B(i, b) needs F(i, b) and the receive of boundary i (i < 2L)
//   a send needs the computation that produces its message; a receive needs its send
//   a receive also needs a free slot: see Link
#pragma once

#include <cstdint>
#include <optional>

#include "schedule/schedule.h"

namespace disagmoe {

inline bool IsSend(OpKind k) { return k == OpKind::kSendForward || k == OpKind::kSendBackward; }
inline bool IsReceive(OpKind k) { return k == OpKind::kRecvForward || k == OpKind::kRecvBackward; }
inline bool IsBackward(OpKind k) {
  return k == OpKind::kBackward || k == OpKind::kSendBackward || k == OpKind::kRecvBackward;
}

// The receive that brings a computation's input, and the send that takes its result on; none at the chain's ends.
std::optional<Op> ReceiveFor(const Schedule& schedule, const Op& compute);
std::optional<Op> SendAfter(const Schedule& schedule, const Op& compute);
// The computation that makes a transfer's message, and the one that uses it. Both hold for sends and receives.
Op ProducerOf(const Op& transfer);
Op ConsumerOf(const Op& transfer);
// The other end of a transfer: the receive of a send, the send of a receive.
Op PeerOf(const Op& transfer);

// The groups at the two ends of a transfer.
int SenderOf(const Schedule& schedule, const Op& transfer);
int ReceiverOf(const Schedule& schedule, const Op& transfer);
// The group that executes an operation.
int GroupOf(const Schedule& schedule, const Op& op);

// Stage (of a computation) or boundary (of a transfer) and micro-batch exist in this schedule.
bool InRange(const Schedule& schedule, const Op& op);
// Dense ids of operations in range: [0, NumOpIds).
inline int64_t NumOpIds(const Schedule& s) { return int64_t{6} * s.num_stages() * s.num_micro_batches; }
inline int64_t OpId(const Schedule& s, const Op& op) {
  return (int64_t{static_cast<int>(op.kind)} * s.num_stages() + op.stage) * s.num_micro_batches + op.micro_batch;
}
inline Op OpOfId(const Schedule& s, int64_t id) {
  const int64_t row = id / s.num_micro_batches;
  return {static_cast<OpKind>(row / s.num_stages()), static_cast<int32_t>(row % s.num_stages()),
          static_cast<int32_t>(id % s.num_micro_batches)};
}

// The link of a transfer, as an index into schedule.links; -1 if there is none.
int LinkOf(const Schedule& schedule, const Op& transfer);

}  // namespace disagmoe
