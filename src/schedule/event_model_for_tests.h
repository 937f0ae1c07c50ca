// A small discrete event model, for tests only and sharing nothing with the generators or the validator. Each group
// computes one operation at a time in its order. A transfer needs the sender's send side and the receiver's receive
// side at once; where several are ready, backward first, then the one that was ready first. The head and transfers
// to or from it take no time, nor do transfers of a group with itself.
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
};

struct ModelResult {
  bool deadlock = false;
  double step = 0;
  std::vector<int> peak;   // per group: most activations held, without a head
  std::vector<double> busy;  // per group: time computed
};

// For the messages of GoogleTest.
inline void PrintTo(const Op& op, std::ostream* out) { *out << PrintOp(op); }

ModelResult RunModel(const Schedule& schedule, const ModelTimes& times);

}  // namespace disagmoe
