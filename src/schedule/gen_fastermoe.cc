// fastermoe: FasterMoE's smart schedule and expert shadowing (He et al., PPoPP 2022; laekov/fastmoe,
// cuda/fastermoe/smart_schedule.h and doc/fastermoe).
//
// The workers of an all-to-all form groups (four workers by default), and a layer's exchange is cut by group
// distance: part i is what goes to and comes from the workers i groups away, part 0 what stays in the own group. Its
// communication stream sends all parts out, S0 S1 ..., and then all results back, R0 R1 ...; the experts work on part i
// as soon as it is there, C0 C1 ... That is an order of parts within one layer and micro-batch, the same forward and
// backward: options.parts is the number of worker groups (standard 4: 16 workers). FasterMoE's parts are not equal (part
// 0 stays on a node where groups are nodes); ClusterCosts cuts them evenly. The pipeline around it is megatron-1f1b.
//
// Shadowing changes no order. A hot expert's weights are sent to every worker, its tokens stay where they are, and its
// gradients are summed afterwards: the loads and the bytes of the costs follow from it.
#include "schedule/colocated.h"

namespace disagmoe {

Schedule GenerateFasterMoe(const PlacementSpec& placement, const GenerateOptions& options) {
  const int groups = PartsOf(options, 4, 64, "fastermoe");
  return GenerateInterleaved({.name = "fastermoe", .ffn_parts = groups}, placement, options);
}

}  // namespace disagmoe
