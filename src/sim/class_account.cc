#include "sim/class_account.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace disagmoe {

void ClassAccount::Begin(int rank, const StaticMemory& parts, int64_t limit_bytes, std::vector<TraceEvent>* events) {
  rank_ = rank;
  events_ = events;
  memory_.parts = parts;
  memory_.static_bytes = memory_.peak_bytes = parts.total();
  memory_.limit_bytes = limit_bytes;
  if (limit_bytes > 0 && memory_.static_bytes > limit_bytes) memory_.over_at_ns = 0;
  if (events != nullptr) memory_.timeline.push_back({});
}

void ClassAccount::Record(Stream stream, const std::string& name, int64_t begin, int64_t end, int64_t bytes, int peer) {
  if (events_ != nullptr) events_->push_back({rank_, stream, name, begin, end, 1, bytes, peer});
}

void ClassAccount::Change(int64_t now, int* counter, int by) {
  if (computing_ > 0 && links_ > 0) times_.overlapped_ns += now - since_;
  since_ = now;
  *counter += by;
}

void ClassAccount::EndComputing(int64_t begin, int64_t now, const Op& op) {
  Change(now, &computing_, -1);
  busy_ += now - begin;
  if (events_ == nullptr) return;
  Record(op.kind == OpKind::kForward ? Stream::kForward : Stream::kBackward, PrintOp(op), begin, now);
}

void ClassAccount::StartLink(int64_t now, bool nvlink, bool receive, int64_t ns) {
  Change(now, &links_, 1);
  if (nvlink) {
    (receive ? times_.nvlink_receive_ns : times_.nvlink_send_ns) += ns;
  } else {
    (receive ? times_.nic_receive_ns : times_.nic_send_ns) += ns;
  }
}

void ClassAccount::Wait(int64_t from, int64_t to, bool exposed) {
  if (from >= to) return;
  (exposed ? times_.exposed_ns : times_.bubble_ns) += to - from;
  Record(Stream::kWait, exposed ? "exposed" : "bubble", from, to);
}

void ClassAccount::Waited(int64_t from, int64_t held, int64_t posted, int64_t to) {
  posted = std::min(posted, to);
  if (posted <= held) return Wait(from, to, true);
  Wait(from, held, true);
  Wait(held, posted, false);
  Wait(posted, to, true);
}

void ClassAccount::EndStep(int64_t now, const StepEndCost& cost) {
  DM_CHECK(cost.reduce_ns >= 0 && cost.optimizer_ns >= 0, "a negative time");
  times_.reduce_ns = cost.reduce_ns;
  times_.optimizer_ns = cost.optimizer_ns;
  const int64_t reduced = now + cost.reduce_ns;
  end_ = reduced + cost.optimizer_ns;
  Wait(now, reduced, true);
  if (cost.reduce_ns > 0) Record(Stream::kStep, "reduce", now, reduced);
  if (cost.optimizer_ns > 0) Record(Stream::kStep, "optimizer", reduced, end_);
}

void ClassAccount::Transferred(Stream stream, const std::string& name, int64_t begin, int64_t end, int64_t bytes,
                               int peer) {
  Record(stream, name, begin, end, bytes, peer);
}

void ClassAccount::CountBytes(int64_t nic, int64_t nvlink) {
  times_.nic_bytes_sent += nic;
  times_.nvlink_bytes_sent += nvlink;
}

ClassTimes ClassAccount::Finish(int64_t step_ns) {
  Wait(end_, step_ns, false);
  Record(Stream::kStep, "step", 0, step_ns);
  times_.compute_ns = busy_ - times_.overlapped_ns + times_.optimizer_ns;
  DM_CHECK(times_.compute_ns + times_.overlapped_ns + times_.exposed_ns + times_.bubble_ns == step_ns,
           "rank " + std::to_string(rank_) + ": the parts do not add up to " + std::to_string(step_ns) + " ns");
  return times_;
}

bool ClassAccount::Take(MemoryUse use, int64_t bytes, const Op& op) {
  bytes_[static_cast<int>(use)] += bytes;
  if (bytes <= 0 || changed_) return false;
  changed_ = true;
  changed_by_ = op;
  return true;
}

void ClassAccount::Look(int64_t now) {
  changed_ = false;
  const int64_t used = memory_.static_bytes + bytes_in_use();
  if (used > memory_.peak_bytes) {
    memory_.peak_bytes = used;
    memory_.peak_at_ns = now;
    peak_by_ = changed_by_;
    memory_.peak_activation_bytes = bytes_[static_cast<int>(MemoryUse::kActivation)];
    memory_.peak_message_bytes = bytes_[static_cast<int>(MemoryUse::kMessage)];
  }
  if (memory_.limit_bytes > 0 && used > memory_.limit_bytes && memory_.over_at_ns < 0) {
    memory_.over_at_ns = now;
    over_by_ = changed_by_;
  }
  if (events_ != nullptr) RecordMemory(now);
}

void ClassAccount::RecordMemory(int64_t now) {
  MemoryPoint& last = memory_.timeline.back();
  const auto of = [&](MemoryUse use) { return bytes_[static_cast<int>(use)]; };
  const MemoryPoint point{now, of(MemoryUse::kActivation), of(MemoryUse::kMessage), of(MemoryUse::kWorkspace)};
  if (last.ns == now) {
    last = point;
  } else if (last.activation_bytes != point.activation_bytes || last.message_bytes != point.message_bytes ||
             last.workspace_bytes != point.workspace_bytes) {
    memory_.timeline.push_back(point);
  }
}

ClassMemory ClassAccount::TakeMemory() {
  ClassMemory memory = std::move(memory_);
  memory.peak_op = peak_by_ ? PrintOp(*peak_by_) : "static";
  if (!memory.fits()) memory.over_op = over_by_ ? PrintOp(*over_by_) : "static";
  return memory;
}

}  // namespace disagmoe
