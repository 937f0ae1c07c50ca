// Built without HiGHS: frames one by one, of each n and b the largest m.
#include "plan/sizing_solver.h"

namespace disagmoe {

bool SizingUsesHighs() { return false; }

bool SolveColumns(const SizingChoices&, const std::vector<SizingColumns>&, double, SizingTies*, SizingAnswer*) {
  return true;
}

}  // namespace disagmoe
