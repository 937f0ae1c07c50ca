// Who holds what: from the placement in a schedule to ranks, parameters, experts and tokens. The schedule is that of one
// replica; stages, partitions and experts are alike in all (spec/layout.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layers/param_store.h"
#include "schedule/schedule.h"
#include "spec/layout.h"

namespace disagmoe {

// Contiguous shares of the tokens of a micro-batch among the workers of a stage: worker i has
// [begin[i], begin[i + 1]). Attention stages cut between sequences, the head between any two tokens.
using Partition = std::vector<int64_t>;

class Topology {
 public:
  Topology(const RunConfig& config, const Schedule& schedule);

  int world() const { return world_; }
  int num_stages() const { return static_cast<int>(stage_ranks_[0].size()); }
  int replica_of_rank(int rank) const { return rank / pipeline_; }
  int group_of_rank(int rank) const { return group_[rank % pipeline_]; }
  int index_in_group(int rank) const { return index_[rank % pipeline_]; }
  const std::vector<int>& ranks_of_stage(int stage, int replica) const { return stage_ranks_[replica][stage]; }
  // As WorkerNames.
  const std::string& worker_name(int rank) const { return names_[rank]; }

  // Tokens of each worker of an attention stage, or of the head.
  const Partition& partition(int stage) const;
  // First expert of each worker of the FFN stage of a layer; one more entry than workers.
  const Partition& experts(int64_t layer) const { return experts_[RowOf(layer)]; }
  // By expert: index in the group of the worker that holds it.
  const std::vector<int>& expert_owners(int64_t layer) const { return expert_owner_[RowOf(layer)]; }
  // A dense layer has no router: worker i of its group is home to these tokens of a micro-batch.
  int dense_home(int64_t token) const;

  // All ranks that hold a copy of a parameter, ascending (of a per-expert one: its group's, in all replicas).
  std::vector<int> holders(const ParamSpec& spec) const;
  // What `rank` holds, in buckets of equal holders: neighbours in `params`. A bucket has the same id at all its ranks.
  // Per-expert parameters are a bucket of their own, of the worker and of its like in the other replicas.
  struct HeldBucket {
    int id = 0;
    std::vector<int> ranks;
    size_t begin = 0, end = 0;  // in params
  };
  struct Held {
    std::vector<HeldParam> params;
    std::vector<HeldBucket> buckets;
  };
  Held held(int rank) const;

 private:
  size_t RowOf(int64_t layer) const { return experts_.size() == 1 ? 0 : static_cast<size_t>(layer); }

  const RunConfig& config_;
  int world_ = 0, pipeline_ = 0;  // ranks in all, and of a replica
  std::vector<int> group_, index_;  // by rank in the pipeline
  std::vector<std::string> names_;
  std::vector<std::vector<std::vector<int>>> stage_ranks_;  // by replica and stage
  Partition attention_, head_;
  std::vector<Partition> experts_;  // for all layers, or by layer
  std::vector<std::vector<int>> expert_owner_;
};

}  // namespace disagmoe
