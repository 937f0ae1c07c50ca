// A pass over any schedule with whole backwards: splits each into B (input gradients) and W (weight gradients), and
// puts W where its group would otherwise wait for an input, as zero-bubble pipelines do (arXiv 2401.10241). The order
// of F and B stays, W feeds nothing, so what could not deadlock still cannot.
//
// Where a group would wait is found with an event model of relative times: a transfer holds its sender's send side and
// its receiver's receive side, backward ones first. Of a few rules for gaps shorter than a W the one with the shortest
// step is taken. If each makes the step longer than whole backwards do (gradients that leave earlier can hold up
// activations where transfers take as long as computing), the backward stays whole. So in that model it never gets
// longer.
#pragma once

#include <vector>

#include "schedule/schedule.h"

namespace disagmoe {

struct FillTimes {
  double attention = 1;  // forward of a whole stage; the head and what goes to and from it take no time
  double ffn = 1;
  double weight_share = 0.5;  // of W in the backward, which takes twice a forward
  double transfer = 0;        // of a boundary between two groups, in the same unit
};

// limit[g]: how many activations group g may hold, those waiting for their W included; where a forward would exceed
// it, a W comes first. At least the group's max_in_flight. Throws Error on a schedule that is forward only, split
// already or cannot run, and on times that cannot be. Transfers and links stay; max_in_flight is counted anew. Returns
// whether it split.
bool FillWithWeightGradients(Schedule* schedule, const FillTimes& times, const std::vector<int>& limit);

}  // namespace disagmoe
