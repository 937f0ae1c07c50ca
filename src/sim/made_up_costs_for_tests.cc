#include "sim/made_up_costs_for_tests.h"

#include <cstdio>
#include <set>
#include <tuple>

#include "schedule/ready.h"

namespace disagmoe {

std::vector<Op> Ops(const std::string& text) {
  std::vector<Op> ops;
  const char* at = text.c_str();
  while (*at != 0) {
    Op op;
    int used = 0;
    op.kind = *at == 'F' ? OpKind::kForward : *at == 'B' ? OpKind::kBackward : OpKind::kWeight;
    std::sscanf(at + 1, "%d.%d%n", &op.stage, &op.micro_batch, &used);
    at += 1 + used;
    if (*at == '/') {
      std::sscanf(at + 1, "%d%n", &op.part, &used);
      at += 1 + used;
    }
    while (*at == ' ') ++at;
    ops.push_back(op);
  }
  return ops;
}

void AddLinks(Schedule* s, int slots) {
  std::set<std::tuple<int, int, bool>> pairs;
  for (const GroupSchedule& group : s->groups) {
    for (const Op& op : group.compute) {
      const TransferRange sends = SendsAfter(*s, op);
      for (int i = 0; i < sends.count; ++i) {
        pairs.insert({SenderOf(*s, sends[i]), ReceiverOf(*s, sends[i]), IsBackward(op.kind)});
      }
    }
  }
  for (const auto& [src, dst, backward] : pairs) s->links.push_back({src, dst, backward, slots});
}

Schedule HandSchedule(int micro_batches, std::vector<int> stage_group, const std::vector<HandGroup>& groups, int slots,
                      std::vector<int> stage_parts) {
  Schedule s;
  s.name = "hand";
  s.num_layers = static_cast<int>(stage_group.size() / 2);
  s.num_micro_batches = micro_batches;
  s.stage_group = std::move(stage_group);
  s.stage_parts = std::move(stage_parts);
  s.backward = false;
  int rank = 0;
  for (const HandGroup& g : groups) {
    GroupSchedule group;
    group.name = g.name;
    for (int i = 0; i < g.workers; ++i) group.ranks.push_back(rank++);
    group.compute = Ops(g.compute);
    s.groups.push_back(group);
    s.backward |= g.compute.find('B') != std::string::npos;
    s.split_backward |= g.compute.find('W') != std::string::npos;
  }
  AddLinks(&s, slots);
  return s;
}

}  // namespace disagmoe
