// Costs of a run on the machine of a profile: what the runtime would take for this configuration.
//
// Every worker is a class of its own, with its exact share of tokens and experts. Routing is taken to be uniform: an
// FFN worker with e of E experts sees a token with probability 1 - C(E - e, k) / C(E, k), and k e / E of its pairs.
// Times are interpolated between the profile's points. Not modelled: workers that share a core, and memory (0).
#pragma once

#include <string>
#include <vector>

#include "cost/profile.h"
#include "cost/step_costs.h"

namespace disagmoe {

class ProfileCosts : public StepCosts {
 public:
  // The schedule is that of one replica (all are alike). All three must outlive it. Throws Error where the profile is of another model, dtype or number of threads, or does
  // not reach the configuration's sizes. where: the profile's file.
  ProfileCosts(const Profile& profile, const RunConfig& config, const Schedule& schedule, const std::string& where);

  const std::vector<WorkerClass>& classes() const override { return classes_; }
  int64_t ComputeNs(const Op& op, int worker_class) const override;
  TransferCost Transfer(const Op& send, int worker_class, bool sending) const override;
  StepEndCost StepEnd(int worker_class) const override { return ends_[worker_class]; }

  // Of the message between worker `lower` of the group of stage `boundary` and worker `upper` of that of the stage
  // after it, as the runtime packs it; 0 if they are the same worker.
  int64_t BytesBetween(int boundary, bool backward, int lower, int upper) const;

 private:
  struct Load {  // of an FFN worker, by one micro-batch
    double rows = 0, pairs = 0, experts = 0;
  };
  const std::vector<int>& Ranks(int stage) const { return schedule_.groups[schedule_.group(stage, 0)].ranks; }
  int64_t Experts(int layer, int worker) const;
  double Visits(int layer, int worker) const;  // probability that a token visits an FFN worker
  Load ExpertLoad(int layer, int worker) const;
  // Tokens of a worker: of its slice, at the head, or (a dense FFN) at home there.
  int64_t TokenBegin(int stage, int worker) const;
  int64_t Tokens(int stage, int worker) const { return TokenBegin(stage, worker + 1) - TokenBegin(stage, worker); }
  double Rows(int boundary, int lower, int upper) const;
  double StageNs(int stage, int worker, bool backward) const;
  double AttentionNs(StageKind kind, double tokens, bool backward) const;
  double ExpertsNs(const Load& load, bool backward) const;
  std::vector<const StageTimes*> Tables(StageKind kind) const;  // of this configuration's recompute; throws if none
  void CheckModel() const;
  void CheckSizes() const;
  void MakeEnds();

  const Profile& profile_;
  const RunConfig& config_;
  const Schedule& schedule_;
  const std::string where_;
  std::vector<std::vector<int64_t>> expert_begins_;  // one for all layers, or by layer
  std::vector<WorkerClass> classes_;
  std::vector<StepEndCost> ends_;                  // by class
  std::vector<std::vector<int64_t>> stage_ns_[2];  // [backward][stage][worker]
};

}  // namespace disagmoe
