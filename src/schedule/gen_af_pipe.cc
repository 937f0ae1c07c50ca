// AF-Pipe with p_a = p_f = p: a ring of 2p positions, position 2g being A-group g and 2g + 1 F-group g.
#include "base/error.h"
#include "schedule/order.h"

namespace disagmoe {

Schedule BuildAfPipeRing(const PlacementSpec& placement, const GenerateOptions& options) {
  Schedule s = PlaceStages(placement, options);
  s.name = "af-pipe";
  const int stages = 2 * s.num_layers + (placement.head_on_attention ? 1 : 0);
  const Ring ring = MakeRing(2 * placement.p_a, stages, options);
  s.round = ring.round;
  for (int r = 0; r < ring.positions; ++r) {
    for (const Unit& unit : PositionOrder(ring, r, s.backward)) {
      // The order is made for chunks * positions stages; those that do not exist drop out.
      const int stage = unit.chunk * ring.positions + r;
      if (stage < stages) AppendCompute(&s, unit.backward ? OpKind::kBackward : OpKind::kForward, stage, unit.micro_batch);
    }
  }
  FinishSchedule(&s, [&](int boundary, bool) {
    const bool wraps = boundary % ring.positions == ring.positions - 1 && boundary + 1 < stages;
    return wraps ? WrapSlots(ring) : 2;
  });
  return s;
}

Schedule GenerateAfPipe(const PlacementSpec& placement, const GenerateOptions& options) {
  RequirePlacement(placement, false, "af-pipe");
  if (placement.p_a != placement.p_f) return BuildAfPipeList(placement, options);
  Schedule s = BuildAfPipeRing(placement, options);
  const Ring ring{2 * placement.p_a, 1, s.num_micro_batches, s.round, s.slope};
  if (!ProvablyFree(ring)) {
    try {
      ValidateSchedule(s);
    } catch (const Error&) {
      ThrowDeadlock(ring);
    }
  }
  return s;
}

}  // namespace disagmoe
