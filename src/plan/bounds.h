// What no order of a job's operations can go below: how the search of layouts decides what to simulate.
#pragma once

#include <cstdint>
#include <optional>

#include "cost/job.h"

namespace disagmoe {

struct JobBounds {
  double step_ns = 0;
  int64_t peak_bytes = 0;  // of the fullest worker
  bool may_fit = true;     // each worker's into its GPU's memory
};
// Step: the busiest worker's computations (and its exchanges, where they hold it), sends or receives; before them the
// way of a micro-batch to its first stage, after them that of its gradients back; the end of the step. Exact for an
// interleaved pipeline of equal stages: (M v + R - 1)(F + B). With jitter, of the mean times.
// Memory: state, and where the order is a ring the activations of its warm-up (schedule.md section 2).
// Nothing where the job has fewer micro-batches than its schedule takes. Throws Error as the generators do.
std::optional<JobBounds> BoundsOf(const Job& job);

}  // namespace disagmoe
