// How many experts each worker of a group should hold, where some have more load than others.
#pragma once

#include <vector>

#include "cost/job.h"

namespace disagmoe {

// For job.expert_counts: of each layer the contiguous shares of its experts over a group's workers whose largest load
// is least (a shadowed expert has none), and among those the ones that are nearest to equal (least sum of squares).
// max_experts > 0: at most so many a worker. One row of equal shares where routing is even; a dense layer has equal
// shares. Throws Error where the workers may not hold all experts. Nothing for a model without experts.
std::vector<std::vector<int>> BalancedCounts(const Job& job, int max_experts = 0);

}  // namespace disagmoe
