// A simulated layout as JSON: what `simulate` and `plan` both say of it.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "plan/evaluate.h"

namespace disagmoe {

nlohmann::ordered_json EvaluationJson(const Evaluation& e);

}  // namespace disagmoe
