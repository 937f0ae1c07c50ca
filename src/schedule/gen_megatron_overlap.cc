// megatron-overlap: Megatron-Core's combined 1F1B (`--overlap-moe-expert-parallel-comm --delay-wgrad-compute`; its user
// guide "Combined 1F1B", core/pipeline_parallel/{schedules,combined_1f1b}.py and
// core/models/common/model_chunk_schedule_plan.py).
//
// Interleaved 1F1B in which a forward chunk and the backward chunk that follows it run as one, layer by layer:
//
//   computation  attention F | experts B, experts W, experts F | attention B, attention W
//   all-to-alls  combine B   | dispatch F, dispatch B          | combine F
//
// Forward and backward of a pair must not need each other. In plain 1F1B they do at the last position, whose backward
// is that of the forward just done; so every position runs one forward more before its first pair. The weight gradients
// of a stage come after its input gradients have been posted; those of a chunk's first attention cover the send to the
// position before. With one group, which needs no chunks: F0, (F1|B0), (F2|B1), ..., the last B. Not hidden are the
// all-to-alls of the forwards before the first pair, and behind the last what weight gradients do not cover.
#include <algorithm>

#include "base/error.h"
#include "schedule/colocated.h"

namespace disagmoe {
namespace {

void AppendPosition(Schedule* s, const Chunks& chunks, int position) {
  const std::vector<Unit> forward = ForwardList(chunks.ring);
  const std::vector<Unit> back = BackwardList(chunks.ring);
  const auto span = [&](const Unit& unit) { return chunks.Span(position, unit); };
  const size_t all = forward.size();
  const size_t ahead = s->backward ? std::min<size_t>(WarmUp(chunks.ring, position) + 1, all) : all;
  for (size_t k = 0; k < ahead; ++k) AppendPair(s, span(forward[k]), {}, false);
  if (!s->backward) return;
  for (size_t k = 0; k < back.size(); ++k) {
    AppendPair(s, ahead + k < all ? span(forward[ahead + k]) : LayerSpan{}, span(back[k]), s->split_backward);
  }
}

}  // namespace

Schedule GenerateMegatronOverlap(const PlacementSpec& placement, const GenerateOptions& options) {
  const std::string name = "megatron-overlap";
  RequirePlacement(placement, true, name);
  PartsOf(options, 1, 1, name);
  Schedule s = PlaceStages(placement, options);
  s.name = name;
  s.split_backward = s.backward && options.delay_weights;
  Chunks chunks = ChunksOf(s, placement, options);
  if (placement.p_a == 1) {
    if (options.round > 1) {
      throw Error({"one group has no rounds", "round", std::to_string(options.round), "0 or 1", ""});
    }
    chunks.begin = {0, s.num_layers};
    chunks.ring.chunks = 1;
  }
  s.round = chunks.ring.round;
  for (int r = 0; r < chunks.ring.positions; ++r) AppendPosition(&s, chunks, r);
  FinishColocated(&s, chunks.ring);
  if (chunks.ring.positions > 1) RequireFree(s, chunks.ring);
  return s;
}

}  // namespace disagmoe
