// Costs that a test makes up, and schedules written by hand.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cost/step_costs.h"
#include "schedule/schedule.h"

namespace disagmoe {

class MadeUpCosts : public StepCosts {
 public:
  // One class a group, unless `classes_made` is set otherwise.
  explicit MadeUpCosts(const Schedule& schedule) {
    for (size_t g = 0; g < schedule.groups.size(); ++g) {
      made_classes.push_back({static_cast<int>(g), static_cast<int>(schedule.groups[g].ranks.size()), 0});
    }
  }
  std::vector<WorkerClass> made_classes;
  std::function<int64_t(const Op&, int)> compute = [](const Op&, int) { return 0; };
  std::function<TransferCost(const Op&, int, bool)> transfer = [](const Op&, int, bool) { return TransferCost{}; };
  std::function<bool(const Op&)> has_local = [](const Op&) { return false; };
  std::function<TransferCost(const Op&, int, bool)> local = [](const Op&, int, bool) { return TransferCost{}; };
  std::function<StepEndCost(int)> step_end = [](int) { return StepEndCost{}; };
  std::function<int64_t(const Op&, int, bool)> activation = [](const Op&, int, bool) { return 0; };
  std::function<int64_t(const Op&, int)> workspace = [](const Op&, int) { return 0; };
  std::function<int64_t(const Op&, int)> message = [](const Op&, int) { return 0; };
  StaticMemory static_parts;
  int64_t limit = 0;

  const std::vector<WorkerClass>& classes() const override { return made_classes; }
  int64_t ComputeNs(const Op& op, int c) const override { return compute(op, c); }
  TransferCost Transfer(const Op& op, int c, bool sending) const override { return transfer(op, c, sending); }
  bool HasLocalPhase(const Op& op) const override { return has_local(op); }
  TransferCost LocalPhase(const Op& op, int c, bool sending) const override { return local(op, c, sending); }
  StepEndCost StepEnd(int c) const override { return step_end(c); }
  StaticMemory StaticParts(int) const override { return static_parts; }
  int64_t ActivationBytes(const Op& op, int c, bool after) const override { return activation(op, c, after); }
  int64_t WorkspaceBytes(const Op& op, int c) const override { return workspace(op, c); }
  int64_t MessageBytes(const Op& op, int c) const override { return message(op, c); }
  int64_t MemoryLimit(int) const override { return limit; }
};

// "F0.0 B3.1 W3.1 F1.0/2" as operations.
std::vector<Op> Ops(const std::string& text);

struct HandGroup {
  std::string name;
  std::string compute;
  int workers = 1;
};
// The group of each stage, and the order of each group. Backward and split as the orders say; every link has so many
// slots. Transfers are left out: the simulator derives them.
Schedule HandSchedule(int micro_batches, std::vector<int> stage_group, const std::vector<HandGroup>& groups,
                      int slots = 8, std::vector<int> stage_parts = {});
// A link for each pair of groups with a boundary between them.
void AddLinks(Schedule* schedule, int slots);

}  // namespace disagmoe
