// Who holds what: from the placement in a schedule to ranks, parameters, experts and tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layers/param_store.h"
#include "schedule/schedule.h"
#include "spec/config.h"

namespace disagmoe {

// Contiguous shares of the tokens of a micro-batch among the workers of a stage: worker i has
// [begin[i], begin[i + 1]). Attention stages cut between sequences, the head between any two tokens.
using Partition = std::vector<int64_t>;

class Topology {
 public:
  Topology(const RunConfig& config, const Schedule& schedule);

  int world() const { return world_; }
  int num_stages() const { return static_cast<int>(stage_ranks_.size()); }
  int group_of_rank(int rank) const { return group_[rank]; }
  int index_in_group(int rank) const { return index_[rank]; }
  const std::vector<int>& ranks_of_stage(int stage) const { return stage_ranks_[stage]; }
  // "A0.1": worker 1 of A-group 0.
  std::string worker_name(int rank) const { return names_[rank]; }

  // Tokens of each worker of an attention stage, or of the head.
  const Partition& partition(int stage) const;
  // First expert of each worker of an FFN stage; one more entry than workers.
  const Partition& experts() const { return experts_; }
  int expert_owner(int64_t expert) const { return expert_owner_[expert]; }  // index in the group
  // A dense layer has no router: worker i of its group is home to these tokens of a micro-batch.
  int dense_home(int64_t token) const;

  // All ranks that hold a copy of a parameter, ascending (of a per-expert one: those that hold any of it).
  std::vector<int> holders(const ParamSpec& spec) const;
  // What `rank` holds, in buckets of equal holders: neighbours in `params`. A bucket has the same id at all its ranks;
  // per-expert parameters are their worker's alone and have id -1.
  struct HeldBucket {
    int id = -1;
    std::vector<int> ranks;
    size_t begin = 0, end = 0;  // in params
  };
  struct Held {
    std::vector<HeldParam> params;
    std::vector<HeldBucket> buckets;
  };
  Held held(int rank) const;

 private:
  const RunConfig& config_;
  int world_ = 0;
  std::vector<int> group_, index_;
  std::vector<std::string> names_;
  std::vector<std::vector<int>> stage_ranks_;
  Partition attention_, head_, experts_;
  std::vector<int> expert_owner_;
};

}  // namespace disagmoe
