// Interleaved 1F1B over colocated groups: attention and FFN of a layer are one unit of a ring of p positions.
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

void AppendUnit(Schedule* s, const Unit& unit, int layer) {
  const int attention = 2 * layer;
  const int ffn = attention + 1;
  const bool is_head = layer == s->num_layers;
  if (is_head) {
    AppendCompute(s, unit.backward, attention, unit.micro_batch);
  } else {
    AppendCompute(s, unit.backward, unit.backward ? ffn : attention, unit.micro_batch);
    AppendCompute(s, unit.backward, unit.backward ? attention : ffn, unit.micro_batch);
  }
}

}  // namespace

Schedule BuildColocated(const PlacementSpec& placement, const GenerateOptions& options) {
  Schedule s = PlaceStages(placement, options);
  s.name = "colocated-1f1b";
  // A head beside the last layer goes with that layer's unit, else it is a unit of its own.
  const int units = s.num_layers + (HeadIsFused(s) ? 0 : 1);
  GenerateOptions with_round = options;
  if (placement.p_a == 1 && options.round == 0) with_round.round = 1;  // nothing to fill: the least memory
  const Ring ring = MakeRing(placement.p_a, units, with_round);
  s.round = ring.round;
  for (int r = 0; r < ring.positions; ++r) {
    const auto order = ring.positions == 1 ? OneGroupOrder(ring, s.backward) : PositionOrder(ring, r, s.backward);
    for (const Unit& unit : order) {
      const int layer = unit.chunk * ring.positions + r;
      if (layer < units) AppendUnit(&s, unit, layer);
    }
  }
  FinishSchedule(&s, [&](int boundary, bool) {
    const int layer = boundary / 2;
    const bool wraps = boundary % 2 == 1 && layer % ring.positions == ring.positions - 1 && layer + 1 < units;
    return wraps ? WrapSlots(ring) : 2;
  });
  return s;
}

Schedule GenerateColocated(const PlacementSpec& placement, const GenerateOptions& options) {
  if (!placement.colocated) {
    throw Error({"colocated-1f1b needs groups that hold both parts", "layout", "two pools", "", "use af-pipe"});
  }
  Schedule s = BuildColocated(placement, options);
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
