// Times, bytes and memory of a schedule's operations on a modelled cluster: work.h, traffic.h and memory put together.
// A group's workers are one class unless routing is uneven, their experts are counted, computations jitter, one of
// them is slow, or sequences are packed with documents: then each slice has its own, and attention's scores and values
// take as long as these see keys (replicas all draw the same; the mean over a step's slices is that of the documents).
//
// Where the FFN pool has machines of its own, each worker's times, NICs and memory are those of its pool's; a message
// between the pools takes each side its own time, and the larger latency of the two.
//
// Assumed: a replica's workers stand side by side on nodes (NodesOf); of a group whose workers see different
// neighbours or hold different numbers of experts, the one that has most counts; gradient sums and the optimizer come
// after the last computation, are in nobody's way on the spine, and are hidden by nothing; the embedding costs nothing;
// a colocated pipeline's send follows its combine; shared experts and dense layers are computed at a token's home (two
// pools: by the share of the experts' tokens; colocated: by its owner).
//
// Memory leaves out what a worker has sent and its NIC not yet delivered, and the rows of a colocated combine before
// they are summed and sent on.
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
  StaticMemory StaticParts(int worker_class) const override;
  int64_t ActivationBytes(const Op& forward, int worker_class, bool after_backward) const override;
  int64_t WorkspaceBytes(const Op& compute, int worker_class) const override;
  int64_t MessageBytes(const Op& send, int worker_class) const override;
  int64_t MemoryLimit(int worker_class) const override;

 private:
  struct Tables;
  std::unique_ptr<Tables> t_;
};

}  // namespace disagmoe
