// A job as a file: a run's configuration, which `train` takes, with a table [plan] of what only the cost model knows
// (docs/formats.md). Each fact is in one place: the model in [model]; layout, schedule and batch in their tables; the rest
// is the settings of plan.settings.
#pragma once

#include <string>
#include <vector>

#include "cost/job.h"
#include "spec/config.h"

namespace disagmoe {

// The arguments are those that `job` was made of: LoadModelShape's and LoadClusters'. `made_by`: a comment, may have
// lines. Give a round that the schedule chose as `job.round`, for a run to have the same.
std::string PlanFile(const Job& job, const std::string& model_argument, const std::string& cluster_argument,
                     const std::string& made_by);
// Reads it back: the same but for the model's name and source. Overrides as for LoadConfig. Throws Error as LoadConfig
// and CheckJob do, where there is no cluster, and where plan.settings and another table disagree.
Job ReadPlanFile(const std::string& path, const std::vector<std::string>& overrides);
// The same for a configuration read from `path`.
Job JobOf(const RunConfig& config, const std::string& path);

}  // namespace disagmoe
