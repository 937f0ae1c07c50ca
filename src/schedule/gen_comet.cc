// comet: Comet (arXiv 2502.19811), fused kernels in which some thread blocks move tokens while the others multiply.
//
// The same overlap as tutel's, within one MoE layer, at the grain of tiles instead of chunks of capacity. Into the
// first GEMM: rows are sorted so that tiles of tokens that are at home come first, and a tile starts as soon as its
// remote rows have arrived. Out of the second: tiles are computed column by column over all experts, so that output can
// be reduced and sent while later columns are multiplied. Here that is a finer cut than tutel's (options.parts,
// standard 8): what is exposed at the ends falls with it, to 2C - T where T < 2C. That a fused kernel loses no
// efficiency to the cut, but gives blocks to communication, is a matter of the costs of a part. The pipeline around it
// is megatron-1f1b.
#include "schedule/colocated.h"

namespace disagmoe {

Schedule GenerateComet(const PlacementSpec& placement, const GenerateOptions& options) {
  const int parts = PartsOf(options, 8, 64, "comet");
  return GenerateInterleaved({.name = "comet", .ffn_parts = parts}, placement, options);
}

}  // namespace disagmoe
