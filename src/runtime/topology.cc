#include "runtime/topology.h"

#include <algorithm>
#include <map>

#include "base/error.h"

namespace disagmoe {

Topology::Topology(const RunConfig& config, const Schedule& schedule) : config_(config), names_(WorkerNames(config)) {
  pipeline_ = config.layout.pipeline_workers();
  world_ = config.layout.workers();
  group_.assign(pipeline_, -1);
  index_.assign(pipeline_, -1);
  for (size_t g = 0; g < schedule.groups.size(); ++g) {
    const auto& group = schedule.groups[g];
    for (size_t i = 0; i < group.ranks.size(); ++i) {
      const int rank = group.ranks[i];
      DM_CHECK(rank >= 0 && rank < pipeline_ && group_[rank] < 0, "ranks of the groups are not those of a pipeline");
      group_[rank] = static_cast<int>(g);
      index_[rank] = static_cast<int>(i);
      DM_CHECK(names_[rank] == group.name + "." + std::to_string(i), "names of workers");
    }
  }
  for (int replica = 0; replica < config.layout.replicas; ++replica) {
    auto& stages = stage_ranks_.emplace_back();
    for (int g : schedule.stage_group) {
      auto& ranks = stages.emplace_back(schedule.groups[g].ranks);
      for (int& rank : ranks) rank += replica * pipeline_;
    }
  }

  const int64_t b = config.train.micro_batch_size, s = config.train.seq_length;
  const int64_t slices = std::ssize(stage_ranks_[0][0]);
  for (int64_t i = 0; i <= slices; ++i) attention_.push_back(PartBegin(b, slices, i) * s);
  const int64_t heads = std::ssize(stage_ranks_[0].back());
  for (int64_t i = 0; i <= heads; ++i) head_.push_back(PartBegin(b * s, heads, i));
  const int64_t rows = std::max<int64_t>(1, std::ssize(config.layout.expert_counts));
  for (int64_t row = 0; row < rows; ++row) {
    const Partition& begin = experts_.emplace_back(ExpertBegins(config, row));
    DM_CHECK(begin.size() == stage_ranks_[0][1].size() + 1, "workers that hold experts");
    auto& owner = expert_owner_.emplace_back();
    for (int i = 0; i + 1 < std::ssize(begin); ++i) owner.insert(owner.end(), begin[i + 1] - begin[i], i);
  }
}

const Partition& Topology::partition(int stage) const {
  DM_CHECK(stage % 2 == 0, "tokens of an FFN stage follow the router");
  return stage + 1 == num_stages() ? head_ : attention_;
}

int Topology::dense_home(int64_t token) const {
  const int64_t tokens = config_.train.micro_batch_size * config_.train.seq_length;
  const int64_t workers = static_cast<int64_t>(experts_[0].size()) - 1;
  // The inverse of PartBegin(tokens, workers, i).
  return static_cast<int>(((token + 1) * workers - 1) / tokens);
}

std::vector<int> Topology::holders(const ParamSpec& spec) const {
  std::vector<int> ranks;
  for (const auto& stages : stage_ranks_) {
    ranks.insert(ranks.end(), stages[spec.stage].begin(), stages[spec.stage].end());
    if (spec.also_stage < 0) continue;
    ranks.insert(ranks.end(), stages[spec.also_stage].begin(), stages[spec.also_stage].end());
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

Topology::Held Topology::held(int rank) const {
  std::map<std::vector<int>, std::vector<HeldParam>> buckets;  // all ranks see the same keys, hence the same ids
  std::vector<HeldParam> held_experts;
  for (const auto& spec : ParamTable(config_.model)) {
    const std::vector<int> ranks = holders(spec);
    const bool here = std::binary_search(ranks.begin(), ranks.end(), rank);
    if (!spec.per_expert) {
      auto& bucket = buckets[ranks];
      if (here) bucket.push_back({spec, 0, 0});
    } else if (here) {
      const Partition& begin = experts(spec.stage / 2);
      const int i = index_in_group(rank);
      held_experts.push_back({spec, begin[i], begin[i + 1] - begin[i]});
    }
  }
  Held out;
  auto add = [&](int id, std::vector<int> ranks, const std::vector<HeldParam>& params) {
    if (params.empty()) return;
    const size_t begin = out.params.size();
    out.params.insert(out.params.end(), params.begin(), params.end());
    out.buckets.push_back({id, std::move(ranks), begin, out.params.size()});
  };
  int id = 0;
  for (const auto& [ranks, params] : buckets) add(id++, ranks, params);
  std::vector<int> alike;
  for (int r = rank % pipeline_; r < world_; r += pipeline_) alike.push_back(r);
  add(id, std::move(alike), held_experts);
  return out;
}

}  // namespace disagmoe
