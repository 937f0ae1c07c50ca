// Waiting for messages, with the time divided by cause, and what the worker does now (for reports of hangs).
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "schedule/schedule.h"
#include "trace/trace.h"
#include "transport/transport.h"

namespace disagmoe {

// What a worker does or awaits, to be read after "while". Thread-safe.
class Status {
 public:
  void Doing(const std::string& what);
  void Computing(const Op& op, int num_layers, int64_t step);
  void Awaiting(const Request& request);
  std::string Line() const;

 private:
  mutable std::mutex mutex_;
  std::string doing_, awaiting_;
  Op op_;
  int num_layers_ = 0;
  int64_t step_ = -1;  // >= 0: op_ is being done
};

// "forward of experts layer 3 micro-batch 2"
std::string DescribeOp(const Op& op, int num_layers);

// A wait that failed or timed out: a symptom where another rank's failure is the cause.
class WaitFailed : public Error {
 public:
  using Error::Error;
};

// Used by one thread. Waiting before the sender has posted is bubble, after it exposed communication.
class Waits {
 public:
  // offsets: per rank, to add to its clock to get the run's one clock.
  Waits(int rank, std::vector<int64_t> offsets, int64_t timeout_ns, Status& status)
      : rank_(rank), offsets_(std::move(offsets)), timeout_ns_(timeout_ns), status_(status) {}
  void Wait(Request& request);  // throws WaitFailed
  int64_t exposed_ns() const { return exposed_ns_; }
  int64_t bubble_ns() const { return bubble_ns_; }
  int64_t Clock(int64_t local_ns) const { return local_ns + offsets_[rank_]; }
  int64_t SenderClock(const Request& r) const { return r.sender_posted_ns() + offsets_[r.peer()]; }

  // Events go here while it is set.
  void Trace(std::vector<TraceEvent>* events, int64_t step) {
    events_ = events;
    step_ = step;
  }
  void Record(Stream stream, const std::string& name, int64_t begin_ns, int64_t end_ns, int64_t bytes = 0, int peer = -1);
  bool tracing() const { return events_ != nullptr; }

 private:
  void Await(Request& request);
  int rank_;
  std::vector<int64_t> offsets_;
  int64_t timeout_ns_;
  Status& status_;
  int64_t exposed_ns_ = 0, bubble_ns_ = 0;
  std::vector<TraceEvent>* events_ = nullptr;
  int64_t step_ = 0;
};

}  // namespace disagmoe
