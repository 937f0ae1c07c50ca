// An event model of any schedule (W, parts, routes), for tests only; it shares nothing with generators, the filling
// pass or the validator. Each group computes one operation at a time, in its order. A transfer between two groups needs
// the sender's send side and the receiver's receive side at once, backward first, then the one that was ready first;
// with `queues` off it needs neither. The head takes no time, nor do transfers to or from it, nor within a group.
#pragma once

#include <vector>

#include "schedule/schedule.h"

namespace disagmoe {

struct SplitTimes {
  double attention = 1;  // of a whole stage, by kind: forward; a whole backward takes twice as long
  double ffn = 1;
  double weight_share = 0.5;  // of the backward, with a split one
  double transfer = 0;        // of a boundary, all its parts together
  bool queues = true;
  bool within_groups = false;  // transfers within a group take time as well, without holding a side
};

struct SplitResult {
  bool deadlock = false;
  double step = 0;
  std::vector<double> busy;   // by group
  std::vector<double> first;  // by group: start of its first computation
  std::vector<int> peak;      // by group: most activations held, head aside
};

SplitResult RunSplitModel(const Schedule& schedule, const SplitTimes& times);

}  // namespace disagmoe
