#include "spec/layout.h"

#include "spec/params.h"

namespace disagmoe {

std::vector<int64_t> ExpertBegins(const RunConfig& config, int64_t layer) {
  const auto& rows = config.layout.expert_counts;
  const int64_t workers = config.layout.expert_workers();
  std::vector<int64_t> begin{0};
  for (int64_t i = 0; i < workers; ++i) {
    begin.push_back(rows.empty() ? PartBegin(config.model.num_experts, workers, i + 1)
                                 : begin.back() + rows[rows.size() == 1 ? 0 : layer][i]);
  }
  return begin;
}

int64_t ReplicaBegin(const RunConfig& config, int64_t micro_batches, int replica) {
  return PartBegin(micro_batches, config.layout.replicas, replica);
}

Schedule TrainingSchedule(const RunConfig& config) {
  return ScheduleOf(config, config.train.micro_batches / config.layout.replicas, true);
}

}  // namespace disagmoe
