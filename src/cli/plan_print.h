// What `disagmoe plan` says of a plan.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "plan/plan.h"

namespace disagmoe {

std::string PlanText(const PlanRequest& request, const Plan& plan);
nlohmann::ordered_json PlanJson(const PlanRequest& request, const Plan& plan);

}  // namespace disagmoe
