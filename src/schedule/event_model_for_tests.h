// A small discrete event model, for tests only and sharing nothing with the generators or the validator. Each group
// computes one operation at a time in its order. A transfer needs the sender's send side and the receiver's receive
// side at once; where several are ready, backward first, then the one that was ready first. The head takes no time, nor
// do transfers to or from it or of a group with itself, unless there are all-to-alls. A part of a stage or of a message
// takes its share of the whole.
#pragma once

#include <ostream>
#include <vector>

#include "schedule/schedule.h"

namespace disagmoe {

struct ModelTimes {
  double attention = 1;  // forward; backward takes twice as long
  double ffn = 1;
  double transfer = 0;
  bool bounded = false;  // a transfer also needs a receive slot
  double exchange = 0;   // of a transfer of a group with itself, to or from the head as well
  double weight_share = 0.5;  // of a split backward
};

struct ModelResult {
  bool deadlock = false;
  double step = 0;
  std::vector<int> peak;   // per group: most activations (parts count as one) held, without a head
  std::vector<double> busy;  // per group: time computed
};

// For the messages of GoogleTest.
inline void PrintTo(const Op& op, std::ostream* out) { *out << PrintOp(op); }

ModelResult RunModel(const Schedule& schedule, const ModelTimes& times);

}  // namespace disagmoe
