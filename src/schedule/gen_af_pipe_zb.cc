// af-pipe-zb: AF-Pipe's order with the backward split; weight gradients fill the waits (fill_weights.h).
//
// Memory: no group holds more than AF-Pipe's fullest group of the same pool, whose workers are all provisioned alike.
// Later positions hold fewer activations in AF-Pipe (w_r falls along the ring), so they have room for W that wait; the
// first has none until its last forward, where its bubble is. (The zero-bubble pipeline ZB-H1 does the same.)
#include <algorithm>

#include "schedule/fill_weights.h"
#include "schedule/order.h"

namespace disagmoe {

Schedule GenerateAfPipeZb(const PlacementSpec& placement, const GenerateOptions& options) {
  RequirePlacement(placement, false, "af-pipe-zb");
  Schedule s = GenerateAfPipe(placement, options);
  s.name = "af-pipe-zb";
  if (!s.backward) return s;
  int fullest[2] = {0, 0};
  for (size_t g = 0; g < s.groups.size(); ++g) {
    int& peak = fullest[static_cast<int>(g) >= placement.p_a];
    peak = std::max(peak, s.groups[g].max_in_flight);
  }
  std::vector<int> limit;
  for (size_t g = 0; g < s.groups.size(); ++g) limit.push_back(fullest[static_cast<int>(g) >= placement.p_a]);
  const double longest = std::max(options.attention_time, options.ffn_time);
  FillWithWeightGradients(&s,
                          {.attention = options.attention_time,
                           .ffn = options.ffn_time,
                           .weight_share = options.weight_share,
                           .transfer = options.transfer_ratio * longest},
                          limit);
  return s;
}

}  // namespace disagmoe
