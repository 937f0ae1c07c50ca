#include "schedule/colocated.h"

#include "base/error.h"

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

void AppendStage(Schedule* s, bool backward, int stage, int micro_batch) {
  const auto append = [&](OpKind kind) {
    for (int part = 0; part < s->parts(stage); ++part) {
      s->groups[s->group(stage, micro_batch)].compute.push_back({kind, stage, micro_batch, part});
    }
  };
  append(backward ? OpKind::kBackward : OpKind::kForward);
  if (backward && s->split_backward) append(OpKind::kWeight);
}

void AppendSpan(Schedule* s, bool backward, const LayerSpan& span) {
  const int head = 2 * s->num_layers;
  if (backward && HasHead(*s, span)) AppendStage(s, true, head, span.micro_batch);
  for (int i = 0; i < 2 * (span.last - span.first); ++i) {
    AppendStage(s, backward, backward ? 2 * span.last - 1 - i : 2 * span.first + i, span.micro_batch);
  }
  if (!backward && HasHead(*s, span)) AppendStage(s, false, head, span.micro_batch);
}

void CutStages(Schedule* s, int attention_parts, int ffn_parts) {
  if (attention_parts == 1 && ffn_parts == 1) return;
  s->stage_parts.assign(s->num_stages(), 1);
  for (int l = 0; l < s->num_layers; ++l) {
    s->stage_parts[2 * l] = attention_parts;
    s->stage_parts[2 * l + 1] = ffn_parts;
  }
}

}  // namespace

LayerSpan Chunks::Span(int position, const Unit& unit) const {
  const int u = unit.chunk * ring.positions + position;
  if (u + 1 >= static_cast<int>(begin.size())) return {0, 0, unit.micro_batch};
  return {begin[u], begin[u + 1], unit.micro_batch};
}

Chunks ChunksOf(const Schedule& placed, const PlacementSpec& placement, const GenerateOptions& options) {
  Chunks chunks;
  chunks.begin = UnitLayers(placement);
  if (!HeadIsFused(placed)) chunks.begin.push_back(placed.num_layers);
  GenerateOptions with_round = options;
  if (placement.p_a == 1 && options.round == 0) with_round.round = 1;  // nothing to fill: the least memory
  chunks.ring = MakeRing(placement.p_a, static_cast<int>(chunks.begin.size()) - 1, with_round);
  return chunks;
}

Schedule BuildInterleaved(const ColocatedStyle& style, const PlacementSpec& placement, const GenerateOptions& options) {
  Schedule s = PlaceStages(placement, options);
  s.name = style.name;
  s.sync_exchange = style.sync_exchange;
  s.split_backward = style.split_backward && s.backward;
  CutStages(&s, style.attention_parts, style.ffn_parts);
  const Chunks chunks = ChunksOf(s, placement, options);
  const Ring& ring = chunks.ring;
  s.round = ring.round;
  for (int r = 0; r < ring.positions; ++r) {
    const auto order = ring.positions == 1 ? OneGroupOrder(ring, s.backward) : PositionOrder(ring, r, s.backward);
    for (const Unit& unit : order) AppendSpan(&s, unit.backward, chunks.Span(r, unit));
  }
  FinishColocated(&s, ring);
  return s;
}

Schedule GenerateInterleaved(const ColocatedStyle& style, const PlacementSpec& placement,
                             const GenerateOptions& options) {
  RequirePlacement(placement, true, style.name);
  Schedule s = BuildInterleaved(style, placement, options);
  const Ring ring{placement.p_a, 1, s.num_micro_batches, s.round, s.slope};
  if (ring.positions > 1 && !ProvablyFree(ring)) RequireFree(s, ring);
  return s;
}

int PartsOf(const GenerateOptions& options, int standard, int most, const std::string& name) {
  const int parts = options.parts == 0 ? standard : options.parts;
  if (parts >= 1 && parts <= most) return parts;
  throw Error({most == 1 ? name + " cuts nothing" : "value out of range", "parts", std::to_string(options.parts),
               most == 1 ? "0 or 1" : "0 (" + std::to_string(standard) + ") or 1 to " + std::to_string(most), ""});
}

void FinishColocated(Schedule* s, const Ring& ring) {
  FinishSchedule(s, [&](int boundary, bool) {
    const int src = s->stage_group[boundary];
    const bool wraps = src == ring.positions - 1 && s->stage_group[boundary + 1] == 0 && ring.positions > 1;
    return wraps ? WrapSlots(ring) : 2;
  });
}

void RequireFree(const Schedule& schedule, const Ring& ring) {
  try {
    ValidateSchedule(schedule);
  } catch (const Error&) {
    ThrowDeadlock(ring);
  }
}

}  // namespace disagmoe
