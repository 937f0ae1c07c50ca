// What the operations of a schedule cost: the seam between the simulator and everything that knows or measures times.
// The simulator asks by operation and worker class; implementations are the modelled cluster, a measured profile, and
// made-up times in tests.
//
// A worker class is one or more workers of a group that behave the same (all of them, unless routing is uneven or
// one is slow); times and bytes are those of each of its workers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/schedule.h"

namespace disagmoe {

struct WorkerClass {
  int group = 0;
  int count = 1;
  int first_worker = 0;  // index in the group of its first worker
};

// One side of one message of a boundary: how long it holds this worker's part of a fabric, in nanoseconds, and what
// it moves. Sending and receiving are separate (full duplex). A side that moves nothing holds nothing.
struct TransferCost {
  int64_t nic_ns = 0;
  int64_t nvlink_ns = 0;
  int64_t latency_ns = 0;  // after the longer of sending and receiving
  int64_t nic_bytes = 0;
  int64_t nvlink_bytes = 0;
};

// After the last computation of a step.
struct StepEndCost {
  int64_t reduce_ns = 0;     // gradient sums (and gathering of sharded weights) that nothing hides
  int64_t optimizer_ns = 0;
};

// What a worker holds for the whole step, bytes.
struct StaticMemory {
  int64_t weights = 0;
  int64_t gradients = 0;  // of whole micro-batches, summed
  int64_t optimizer = 0;  // its state: with sharding, this worker's part
  int64_t reserved = 0;   // context, communication library, fragmentation
  int64_t total() const { return weights + gradients + optimizer + reserved; }
};

class StepCosts {
 public:
  virtual ~StepCosts() = default;

  // In order of group, then worker; every group of the schedule has at least one.
  virtual const std::vector<WorkerClass>& classes() const = 0;

  // Of a computation (F, B, W) on a class of its group.
  virtual int64_t ComputeNs(const Op& op, int worker_class) const = 0;

  // Of a transfer (the send's Op; both ends use it): what it costs a class of the sending group (sending = true) or of
  // the receiving one. A boundary inside one group is an all-to-all: its class has both sides.
  virtual TransferCost Transfer(const Op& send, int worker_class, bool sending) const = 0;
  // Whether a transfer first goes through an all-to-all inside the sending group (the combine of a colocated pipeline,
  // before the point-to-point send), and what that costs a class of that group. The transfer proper follows it.
  virtual bool HasLocalPhase(const Op&) const { return false; }
  virtual TransferCost LocalPhase(const Op&, int /*worker_class*/, bool /*sending*/) const { return {}; }

  virtual StepEndCost StepEnd(int /*worker_class*/) const { return {}; }

  // Memory of a worker, bytes.
  virtual StaticMemory StaticParts(int /*worker_class*/) const { return {}; }
  int64_t StaticBytes(int worker_class) const { return StaticParts(worker_class).total(); }
  // Kept from F(stage, part) on until its B ends (until its W ends, where the backward is split; the share
  // kept between B and W is `after_backward`).
  virtual int64_t ActivationBytes(const Op& forward, int worker_class, bool after_backward) const {
    (void)forward, (void)worker_class, (void)after_backward;
    return 0;
  }
  // Used only while an operation runs.
  virtual int64_t WorkspaceBytes(const Op& /*compute*/, int /*worker_class*/) const { return 0; }
  // What a received message takes, from the start of its receipt until the computation that uses it ends.
  virtual int64_t MessageBytes(const Op& /*send*/, int /*worker_class of the receiver*/) const { return 0; }
  virtual int64_t MemoryLimit(int /*worker_class*/) const { return 0; }  // 0 = unknown
};

}  // namespace disagmoe
