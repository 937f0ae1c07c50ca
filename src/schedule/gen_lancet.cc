// lancet: whole-graph overlap (Jiang et al., MLSys 2024, arXiv 2404.19429), a compiler pass over the training graph.
//
// Forward: not only the experts but the computations around them are cut along the batch (options.parts, standard 2)
// and pipelined: A(l)/0 A(l)/1 F(l)/0 F(l)/1 A(l+1)/0 ... Part 0's dispatch lies under part 1's attention, its combine
// under part 1's experts, part 1's combine under part 0 of the next layer. Backward: weight gradients, on which nothing
// waits, are moved under the all-to-alls. Lancet places them there one by one by a cost model; all layers being alike,
// here those of a stage follow the input gradients of all its parts, whose exchanges they cover together with the
// other parts. The head is whole. A micro-batch must have as many sequences as parts, for attention cannot be cut along
// the batch otherwise. The pipeline around it is interleaved 1F1B, as megatron-1f1b; exchanges hold nothing.
#include "schedule/colocated.h"

namespace disagmoe {

Schedule GenerateLancet(const PlacementSpec& placement, const GenerateOptions& options) {
  const int parts = PartsOf(options, 2, 64, "lancet");
  const ColocatedStyle style{.name = "lancet", .attention_parts = parts, .ffn_parts = parts, .split_backward = true,
                             .sync_exchange = false};
  return GenerateInterleaved(style, placement, options);
}

}  // namespace disagmoe
