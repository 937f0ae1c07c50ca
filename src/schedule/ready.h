// What an operation waits for and what it feeds, beside its place in its group's order.
//
//   F(i, b) needs the receive of boundary i - 1 (i > 0)
//   B(i, b) needs F(i, b) and the receive of boundary i (i < 2L)
//   W(i, b) needs B(i, b)
//   a send needs the computation that produces its message; a receive needs its send
//   a part needs and feeds its own part of a message, a whole stage all parts
//   a receive also needs a free slot: see Link
#pragma once

#include <cstdint>

#include "schedule/schedule.h"

namespace disagmoe {

inline bool IsSend(OpKind k) { return k == OpKind::kSendForward || k == OpKind::kSendBackward; }
inline bool IsReceive(OpKind k) { return k == OpKind::kRecvForward || k == OpKind::kRecvBackward; }
inline bool IsBackward(OpKind k) {
  return k == OpKind::kBackward || k == OpKind::kSendBackward || k == OpKind::kRecvBackward;
}

// `first` and the next count - 1 parts of the same transfer; count 0: none, at the chain's ends and for W.
struct TransferRange {
  Op first;
  int count = 0;
  Op operator[](int i) const { return {first.kind, first.stage, first.micro_batch, first.part + i}; }
};
// The receives that bring a computation's input, and the sends that take its result on.
TransferRange ReceivesFor(const Schedule& schedule, const Op& compute);
TransferRange SendsAfter(const Schedule& schedule, const Op& compute);
// The computation that makes a transfer's message, and the one that uses it. Both hold for sends and receives.
Op ProducerOf(const Schedule& schedule, const Op& transfer);
Op ConsumerOf(const Schedule& schedule, const Op& transfer);
// The computation of the same stage, micro-batch and part that comes before: F of B, B of W. (Of F: F itself.)
inline Op FormerOf(const Op& op) {
  return {op.kind == OpKind::kWeight ? OpKind::kBackward : OpKind::kForward, op.stage, op.micro_batch, op.part};
}
// The other end of a transfer: the receive of a send, the send of a receive.
Op PeerOf(const Op& transfer);

// The groups at the two ends of a transfer.
int SenderOf(const Schedule& schedule, const Op& transfer);
int ReceiverOf(const Schedule& schedule, const Op& transfer);
// The group that executes an operation.
int GroupOf(const Schedule& schedule, const Op& op);

// Stage (of a computation) or boundary (of a transfer), micro-batch and part exist in this schedule.
bool InRange(const Schedule& schedule, const Op& op);
// Dense ids of operations in range: [0, NumOpIds).
class OpIds {
 public:
  explicit OpIds(const Schedule& s) : stages_(s.num_stages()), micro_batches_(s.num_micro_batches), parts_(s.max_parts()) {}
  int64_t size() const { return int64_t{kKinds} * stages_ * micro_batches_ * parts_; }
  int64_t operator()(const Op& op) const {
    return ((int64_t{static_cast<int>(op.kind)} * stages_ + op.stage) * micro_batches_ + op.micro_batch) * parts_ + op.part;
  }
  Op at(int64_t id) const {
    const int64_t row = id / parts_ / micro_batches_;
    return {static_cast<OpKind>(row / stages_), static_cast<int32_t>(row % stages_),
            static_cast<int32_t>(id / parts_ % micro_batches_), static_cast<int32_t>(id % parts_)};
  }

 private:
  static constexpr int kKinds = 7;
  int stages_, micro_batches_, parts_;
};

// The link of a transfer, as an index into schedule.links; -1 if there is none.
int LinkOf(const Schedule& schedule, const Op& transfer);

}  // namespace disagmoe
