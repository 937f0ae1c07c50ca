// megatron-1f1b: interleaved 1F1B over colocated groups. A chunk of consecutive layers is one unit of a ring of p
// positions; its all-to-alls hold the computation.
#include "base/error.h"
#include "schedule/order.h"

namespace disagmoe {
namespace {

// One group: round by round, all forwards, then all backwards.
std::vector<Unit> OneGroupOrder(const Ring& ring, bool backward) {
  std::vector<Unit> order;
  const std::vector<Unit> forward = ForwardList(ring);
  const std::vector<Unit> back = BackwardList(ring);
  const size_t round = static_cast<size_t>(ring.round) * ring.chunks;
  for (size_t k = 0; k < forward.size(); k += round) {
    order.insert(order.end(), forward.begin() + k, forward.begin() + k + round);
    if (backward) order.insert(order.end(), back.begin() + k, back.begin() + k + round);
  }
  return order;
}

// Layers [first, last) and, if they are none, the head alone.
void AppendUnit(Schedule* s, const Unit& unit, int first, int last) {
  const OpKind kind = unit.backward ? OpKind::kBackward : OpKind::kForward;
  if (first == last) return AppendCompute(s, kind, 2 * s->num_layers, unit.micro_batch);
  for (int i = 0; i < 2 * (last - first); ++i) {
    AppendCompute(s, kind, unit.backward ? 2 * last - 1 - i : 2 * first + i, unit.micro_batch);
  }
}

}  // namespace

Schedule BuildMegatron(const PlacementSpec& placement, const GenerateOptions& options) {
  Schedule s = PlaceStages(placement, options);
  s.name = "megatron-1f1b";
  s.sync_exchange = true;
  std::vector<int> begin = UnitLayers(placement);
  // A head beside the last layer goes with that layer's unit, else it is a unit of its own.
  if (!HeadIsFused(s)) begin.push_back(s.num_layers);
  const int units = static_cast<int>(begin.size()) - 1;
  GenerateOptions with_round = options;
  if (placement.p_a == 1 && options.round == 0) with_round.round = 1;  // nothing to fill: the least memory
  const Ring ring = MakeRing(placement.p_a, units, with_round);
  s.round = ring.round;
  for (int r = 0; r < ring.positions; ++r) {
    const auto order = ring.positions == 1 ? OneGroupOrder(ring, s.backward) : PositionOrder(ring, r, s.backward);
    for (const Unit& unit : order) {
      const int u = unit.chunk * ring.positions + r;
      if (u < units) AppendUnit(&s, unit, begin[u], begin[u + 1]);
    }
  }
  FinishSchedule(&s, [&](int boundary, bool) {
    const int src = s.stage_group[boundary];
    const bool wraps = src == ring.positions - 1 && s.stage_group[boundary + 1] == 0 && ring.positions > 1;
    return wraps ? WrapSlots(ring) : 2;
  });
  return s;
}

Schedule GenerateMegatron(const PlacementSpec& placement, const GenerateOptions& options) {
  RequirePlacement(placement, true, "megatron-1f1b");
  Schedule s = BuildMegatron(placement, options);
  const Ring ring{placement.p_a, 1, s.num_micro_batches, s.round, s.slope};
  if (ring.positions > 1 && !ProvablyFree(ring)) {
    try {
      ValidateSchedule(s);
    } catch (const Error&) {
      ThrowDeadlock(ring);
    }
  }
  return s;
}

}  // namespace disagmoe
