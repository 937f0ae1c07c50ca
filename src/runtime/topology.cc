#include "runtime/topology.h"

#include <algorithm>
#include <map>

#include "base/error.h"

namespace disagmoe {

Topology::Topology(const RunConfig& config, const Schedule& schedule) : config_(config) {
  for (const auto& g : schedule.groups) world_ += static_cast<int>(g.ranks.size());
  group_.assign(world_, -1);
  index_.assign(world_, -1);
  names_.resize(world_);
  for (size_t g = 0; g < schedule.groups.size(); ++g) {
    const auto& group = schedule.groups[g];
    for (size_t i = 0; i < group.ranks.size(); ++i) {
      const int rank = group.ranks[i];
      DM_CHECK(rank >= 0 && rank < world_ && group_[rank] < 0, "ranks of the groups are not 0..world-1");
      group_[rank] = static_cast<int>(g);
      index_[rank] = static_cast<int>(i);
      names_[rank] = group.name + "." + std::to_string(i);
    }
  }
  for (int g : schedule.stage_group) stage_ranks_.push_back(schedule.groups[g].ranks);

  const int64_t b = config.train.micro_batch_size, s = config.train.seq_length;
  const int64_t slices = static_cast<int64_t>(stage_ranks_[0].size());
  for (int64_t i = 0; i <= slices; ++i) attention_.push_back(PartBegin(b, slices, i) * s);
  const int64_t heads = static_cast<int64_t>(stage_ranks_.back().size());
  for (int64_t i = 0; i <= heads; ++i) head_.push_back(PartBegin(b * s, heads, i));
  const int64_t owners = static_cast<int64_t>(stage_ranks_[1].size());
  for (int64_t i = 0; i <= owners; ++i) experts_.push_back(PartBegin(config.model.num_experts, owners, i));
  for (int64_t i = 0; i < owners; ++i) expert_owner_.insert(expert_owner_.end(), experts_[i + 1] - experts_[i], static_cast<int>(i));
}

const Partition& Topology::partition(int stage) const {
  DM_CHECK(stage % 2 == 0, "tokens of an FFN stage follow the router");
  return stage + 1 == num_stages() ? head_ : attention_;
}

int Topology::dense_home(int64_t token) const {
  const int64_t tokens = config_.train.micro_batch_size * config_.train.seq_length;
  const int64_t workers = static_cast<int64_t>(experts_.size()) - 1;
  // The inverse of PartBegin(tokens, workers, i).
  return static_cast<int>(((token + 1) * workers - 1) / tokens);
}

std::vector<int> Topology::holders(const ParamSpec& spec) const {
  std::vector<int> ranks = stage_ranks_[spec.stage];
  if (spec.also_ffn) {
    const auto& more = stage_ranks_[spec.stage + 1];
    ranks.insert(ranks.end(), more.begin(), more.end());
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

Topology::Held Topology::held(int rank) const {
  std::map<std::vector<int>, std::vector<HeldParam>> buckets;  // all ranks see the same keys, hence the same ids
  std::vector<HeldParam> experts;
  for (const auto& spec : ParamTable(config_.model)) {
    const std::vector<int> ranks = holders(spec);
    const bool here = std::binary_search(ranks.begin(), ranks.end(), rank);
    if (!spec.per_expert) {
      auto& bucket = buckets[ranks];
      if (here) bucket.push_back({spec, 0, 0});
    } else if (here) {
      const int64_t first = experts_[index_[rank]];
      experts.push_back({spec, first, experts_[index_[rank] + 1] - first});
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
  add(-1, {rank}, experts);
  return out;
}

}  // namespace disagmoe
