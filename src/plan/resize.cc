#include "plan/resize.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace disagmoe {
namespace {

double OfPhase(const LayoutCosts& costs, int layout, int length, const Phase& phase) {
  return costs.step[layout][length] * static_cast<double>(phase.steps);
}

// The first whole number of steps that gain at least `cost`.
int64_t StepsFor(double cost, double gain) {
  if (gain == kCannot || cost <= 0) return 1;
  return static_cast<int64_t>(std::clamp(std::ceil(cost / gain * (1 - 1e-12)), 1.0, 1e15));
}

}  // namespace

ResizePlan PlanResizes(const LayoutCosts& costs, const std::vector<Phase>& phases, const std::vector<int>& length_of) {
  DM_CHECK(!phases.empty() && phases.size() == length_of.size(), "phases with their lengths");
  const int layouts = costs.count();
  std::vector<double> best(layouts, 0);           // to the end of a phase, in each layout
  std::vector<std::vector<int>> from(phases.size(), std::vector<int>(layouts, -1));
  for (size_t k = 0; k < phases.size(); ++k) {
    std::vector<double> next(layouts, kCannot);
    for (int to = 0; to < layouts; ++to) {
      double before = k == 0 ? 0 : best[to];
      int at = to;
      for (int other = 0; k > 0 && other < layouts; ++other) {
        const double x = best[other] + costs.move[other][to];
        if (x < before) before = x, at = other;
      }
      from[k][to] = at;
      next[to] = before + OfPhase(costs, to, length_of[k], phases[k]);
    }
    best = std::move(next);
    if (*std::min_element(best.begin(), best.end()) == kCannot) {
      throw Error({"no layout runs a phase", "phase " + std::to_string(k + 1),
                   std::to_string(phases[k].tokens) + " tokens a sequence",
                   "memory for it, and enough sequences a step", ""});
    }
  }
  ResizePlan out;
  int at = static_cast<int>(std::min_element(best.begin(), best.end()) - best.begin());
  out.seconds = best[at];
  out.layout.resize(phases.size());
  for (size_t k = phases.size(); k-- > 0;) {
    out.layout[k] = at;
    const int before = from[k][at];
    if (k > 0 && before != at) out.moving += costs.move[before][at], ++out.changes;
    at = before;
  }
  for (int i = 0; i < layouts; ++i) {
    double seconds = 0;
    for (size_t k = 0; k < phases.size(); ++k) seconds += OfPhase(costs, i, length_of[k], phases[k]);
    if (seconds < out.single_seconds) out.single_seconds = seconds, out.single = i;
  }
  return out;
}

BreakEven BreakEvenOf(const LayoutCosts& costs, int from, int length, bool back) {
  BreakEven best;
  best.from = from;
  const double stay = costs.step[from][length];
  for (int to = 0; to < costs.count(); ++to) {
    const double gain = stay - costs.step[to][length];
    if (to == from || costs.step[to][length] == kCannot || !(gain > 0)) continue;
    BreakEven x{from, to, gain, costs.move[from][to], costs.move[to][from], 0, 0};
    x.steps = StepsFor(x.move_seconds, gain);
    x.steps_back = StepsFor(x.move_seconds + x.back_seconds, gain);
    const auto key = [&](const BreakEven& b) { return back ? b.steps_back : b.steps; };
    const bool same = best.to >= 0 && key(x) == key(best);
    // What must be left gains without end: then the faster step.
    const double step = costs.step[to][length];
    if (best.to < 0 || key(x) < key(best) || (same && step < costs.step[best.to][length])) best = x;
  }
  return best;
}

}  // namespace disagmoe
