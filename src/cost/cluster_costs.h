// Times, bytes and memory of a schedule's operations on a modelled cluster: work.h, traffic.h and memory put together.
// A group's workers are one class unless routing is uneven, computations jitter, or one of them is slow.
//
// Assumed: a replica's workers stand side by side on nodes (NodesOf); of a group whose workers see different neighbours,
// the one that moves most counts; gradient sums and the optimizer come after the last computation; the embedding
// costs nothing; a colocated pipeline's send follows its combine.
#pragma once

#include <memory>

#include "cost/job.h"
#include "cost/step_costs.h"

namespace disagmoe {

class ClusterCosts : public StepCosts {
 public:
  // Both must outlive it. The schedule is that of the job (ScheduleOf), or one over the same groups.
  ClusterCosts(const Job& job, const Schedule& schedule);
  ~ClusterCosts() override;

  const std::vector<WorkerClass>& classes() const override;
  int64_t ComputeNs(const Op& op, int worker_class) const override;
  TransferCost Transfer(const Op& send, int worker_class, bool sending) const override;
  bool HasLocalPhase(const Op& send) const override;
  TransferCost LocalPhase(const Op& send, int worker_class, bool sending) const override;
  StepEndCost StepEnd(int worker_class) const override;
  int64_t StaticBytes(int worker_class) const override;
  int64_t ActivationBytes(const Op& forward, int worker_class, bool after_backward) const override;
  int64_t WorkspaceBytes(const Op& compute, int worker_class) const override;
  int64_t MessageBytes(const Op& send, int worker_class) const override;
  int64_t MemoryLimit(int worker_class) const override;

 private:
  struct Tables;
  std::unique_ptr<Tables> t_;
};

}  // namespace disagmoe
