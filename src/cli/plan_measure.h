// disagmoe plan --measure: the plan's layouts and what is near them, run for real on this machine.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cli/measure.h"
#include "plan/plan.h"

namespace disagmoe {

struct MeasurePlanOptions {
  int samples = 6;    // layouts beside the best of each schedule
  int radius = 1;     // steps of the search from the plan (Grid::Neighbours)
  uint64_t seed = 1;  // of which ones are taken
  int rounds = 2;
  std::string model, cluster;  // as given, for the plan files
  MeasureOptions run;
};

struct MeasuredLayout {
  Evaluation e;
  MeasuredStep step;
};
// The fastest first; those that failed last; at least one. Of schedules that the runtime executes.
std::vector<MeasuredLayout> MeasurePlan(const Plan& plan, const MeasurePlanOptions& options);
nlohmann::ordered_json MeasuredJson(const std::vector<MeasuredLayout>& layouts);
std::string MeasuredText(const std::vector<MeasuredLayout>& layouts);

}  // namespace disagmoe
