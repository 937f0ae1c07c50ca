// The sizing program's columns, for the solver of mixed-integer programs (solve_highs.cc) or for what takes its place
// (solve_enumeration.cc).
#pragma once

#include <vector>

#include "plan/sizing_choices.h"

namespace disagmoe {

// Of one frame. Times are those of SizingModel: lines over what the other pool decides.
struct SizingColumns {
  SizingFrame frame;
  struct Attention {
    int m = 0, b = 0;
    SizingModel::Lines ns, nic;  // over rows
  };
  struct Ffn {
    int n = 0;
    double rows = 0;
    int64_t most_sequences = 0;  // m * b, by its memory
    SizingModel::Lines ns;       // over 1 / (m b)
    double nic = 0;
  };
  std::vector<Attention> attention;
  std::vector<Ffn> ffn;
};
// Those that are as fast as `limit` by their own times: of m, for each n and b the largest.
SizingColumns ColumnsOf(const SizingChoices& choices, const SizingFrame& frame, SizingBounds::Smallest smallest,
                        double limit);

// Adds the fastest pools of these frames to `ties`, if they are as fast as its best. False: the time was up, or what
// was found is not what the program promised; then nothing is proven. Counts in `count`.
bool SolveColumns(const SizingChoices& choices, const std::vector<SizingColumns>& frames, double seconds,
                  SizingTies* ties, SizingAnswer* count);

}  // namespace disagmoe
