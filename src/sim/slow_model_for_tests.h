// What the engine must do, written the obvious way: at each moment all that there is is looked through until nothing
// changes, and times are added up afterwards from the intervals. Shares nothing with the engine. For tests.
#pragma once

#include <vector>

#include "cost/step_costs.h"
#include "schedule/schedule.h"
#include "sim/simulate.h"

namespace disagmoe {

struct Interval {
  int64_t begin = 0, end = 0;
  friend bool operator==(const Interval&, const Interval&) = default;
};

struct SlowClass {
  std::vector<Interval> computations;  // in the order of its group's list
  ClassTimes times;
  int64_t peak_bytes = 0, peak_at_ns = 0, over_at_ns = -1;
  std::vector<MemoryPoint> timeline;
};

struct SlowResult {
  bool deadlock = false;
  int64_t step_ns = 0;
  std::vector<SlowClass> classes;
};

SlowResult RunSlowModel(const Schedule& schedule, const StepCosts& costs, const SimOptions& options);

}  // namespace disagmoe
