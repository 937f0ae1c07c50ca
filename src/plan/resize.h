// When to change the layout as sequence lengths change: the cheapest way through the phases of a run, exactly, and how
// long a phase must be for a change to pay.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "plan/lengths.h"

namespace disagmoe {

inline constexpr double kCannot = std::numeric_limits<double>::infinity();

// Of layouts, by number. Seconds.
struct LayoutCosts {
  std::vector<std::vector<double>> step;  // [layout][length] of a step; kCannot where it does not run or fit
  std::vector<std::vector<double>> move;  // [from][to]; 0 on the diagonal
  int count() const { return static_cast<int>(step.size()); }
};

struct ResizePlan {
  std::vector<int> layout;  // by phase
  double seconds = 0;       // steps and changes; the first layout is free
  double moving = 0;        // of it, changes
  int changes = 0;
  int single = -1;          // the best layout that stays; -1: none runs all phases
  double single_seconds = kCannot;
};
// length_of: of each phase, its column in costs.step. Of equal ways one that stays, then lower numbers. Throws Error
// where a phase has no layout. Phases x layouts^2.
ResizePlan PlanResizes(const LayoutCosts& costs, const std::vector<Phase>& phases, const std::vector<int>& length_of);

// From a layout, where steps of a length follow: the fewest steps after which a change has paid, and to which layout.
struct BreakEven {
  int from = -1;
  int to = -1;             // -1: nothing is faster
  double gain = 0;         // seconds a step; kCannot where `from` cannot run the length
  double move_seconds = 0, back_seconds = 0;
  int64_t steps = 0;       // that pay the change
  int64_t steps_back = 0;  // and the change back
};
// `back`: the target is that with the fewest steps_back, else with the fewest steps.
BreakEven BreakEvenOf(const LayoutCosts& costs, int from, int length, bool back);

}  // namespace disagmoe
