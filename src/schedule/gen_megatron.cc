// megatron-1f1b: interleaved 1F1B over colocated groups. A chunk of consecutive layers is one unit of a ring of p
// positions; its all-to-alls hold the computation.
#include "schedule/colocated.h"

namespace disagmoe {

Schedule BuildMegatron(const PlacementSpec& placement, const GenerateOptions& options) {
  PartsOf(options, 1, 1, "megatron-1f1b");
  return BuildInterleaved({.name = "megatron-1f1b"}, placement, options);
}

Schedule GenerateMegatron(const PlacementSpec& placement, const GenerateOptions& options) {
  PartsOf(options, 1, 1, "megatron-1f1b");
  return GenerateInterleaved({.name = "megatron-1f1b"}, placement, options);
}

}  // namespace disagmoe
