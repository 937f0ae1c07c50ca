// Parts of MakePlan.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace disagmoe {

void AddChanges(const SearchControl& control, Plan* plan);
void AddReliefs(const PlanRequest& request, const SearchControl& control, Plan* plan);
int64_t GpusOf(const PlanRequest& request);
std::string LayoutText(const Job& job);  // whose round and parts are given

}  // namespace disagmoe
