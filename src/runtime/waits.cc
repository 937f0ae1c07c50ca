#include "runtime/waits.h"

#include <algorithm>

#include "base/time.h"

namespace disagmoe {

std::string DescribeOp(const Op& op, int num_layers) {
  const std::string direction = op.kind == OpKind::kForward    ? "forward of "
                                : op.kind == OpKind::kBackward ? "backward of "
                                                               : "weight gradients of ";
  std::string what = "the head";
  if (op.stage < 2 * num_layers) {
    what = (op.stage % 2 == 0 ? "attention layer " : "experts layer ") + std::to_string(op.stage / 2);
  }
  return direction + what + " micro-batch " + std::to_string(op.micro_batch);
}

void Status::Doing(const std::string& what) {
  std::lock_guard lock(mutex_);
  doing_ = what;
  awaiting_.clear();
  step_ = -1;
}

void Status::Computing(const Op& op, int num_layers, int64_t step) {
  std::lock_guard lock(mutex_);
  op_ = op;
  num_layers_ = num_layers;
  step_ = step;
  awaiting_.clear();
}

void Status::Awaiting(const Request& request) {
  const std::string what = request.Describe();
  std::lock_guard lock(mutex_);
  awaiting_ = what;
}

std::string Status::Line() const {
  std::lock_guard lock(mutex_);
  std::string line = step_ >= 0 ? "in " + DescribeOp(op_, num_layers_) + " step " + std::to_string(step_) : doing_;
  if (!awaiting_.empty()) line += ", awaiting " + awaiting_;
  return line;
}

void Waits::Await(Request& request) {
  try {
    request.Wait(timeout_ns_);
  } catch (const Error& e) {
    throw WaitFailed(e.what());
  }
}

void Waits::Wait(Request& request) {
  if (!request.done()) {
    status_.Awaiting(request);
    const int64_t begin = NowNs();
    Await(request);
    const int64_t end = NowNs();
    // A send that is awaited is on its way: its own post counts.
    const int64_t posted = request.is_send() ? request.posted_ns() : SenderClock(request) - (Clock(0));
    const int64_t from = std::clamp(posted, begin, end);
    bubble_ns_ += from - begin;
    exposed_ns_ += end - from;
    if (events_ != nullptr) {
      if (from > begin) Record(Stream::kWait, "bubble", begin, from);
      if (end > from) Record(Stream::kWait, "exposed", from, end);
    }
  } else {
    Await(request);  // throws what a failed request failed of
  }
}

void Waits::Record(Stream stream, const std::string& name, int64_t begin_ns, int64_t end_ns, int64_t bytes, int peer) {
  if (events_ == nullptr) return;
  events_->push_back({rank_, stream, name, Clock(begin_ns), Clock(end_ns), step_, bytes, peer});
}

}  // namespace disagmoe
