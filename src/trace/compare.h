// A simulated step beside the same steps as they were run: the same operations in the same order, and how long.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "trace/trace.h"

namespace disagmoe {

// Times of one kind of activity of one worker in a step; measured: the median over the traced steps.
struct KindTimes {
  std::string kind;   // "attention forward", "head backward", "optimizer", "exposed", ...
  int64_t count = 0;  // operations in the simulated step
  int64_t simulated_ns = 0;
  int64_t measured_ns = 0;
};

struct WorkerComparison {
  int rank = 0;
  // The first operation that is not the same on both sides, with its stream and step; empty: all are.
  std::string difference;
  std::vector<KindTimes> kinds;
};

struct StepComparison {
  int64_t simulated_ns = 0;
  // A step takes as long as its slowest worker's; of the traced steps.
  int64_t measured_ns = 0, fastest_ns = 0, slowest_ns = 0;  // measured: the median
  int64_t steps = 0;
  std::vector<WorkerComparison> workers;
  bool same_order() const;
  double ratio() const { return static_cast<double>(simulated_ns) / static_cast<double>(measured_ns); }
};

// simulated: one step, of every worker. head_stage: 2L, to tell the head from attention.
//
// Streams compared: computations as they are interleaved; sends to, and receives from, each group, those of activations
// and of gradients, by when their messages were posted or began to move (which of two groups' messages comes first is a
// matter of time, and gradients overtake activations at a NIC). Several messages of one transfer, to or from several
// workers of a group, count as one.
StepComparison CompareSteps(const std::vector<TraceEvent>& simulated, const std::vector<TraceEvent>& measured,
                            const std::vector<int>& group_of_rank, int head_stage);

}  // namespace disagmoe
