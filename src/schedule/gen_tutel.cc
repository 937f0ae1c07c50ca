// tutel: Tutel's adaptive pipelining (arXiv 2206.03382, section 3.3; `a2a_ffn_overlap_degree` of its MoE layer).
//
// The tokens of an MoE layer are cut into `degree` chunks of capacity (options.parts: 1, 2, 4, 8; it tries these and
// keeps the fastest). A chunk's dispatch runs on a second stream while the chunk before it is at the experts, and so
// does its combine; all dispatches are queued before any combine. Attention starts when the last combine is there, so
// nothing is hidden but under the expert GEMM of the same layer and micro-batch: the exposed part of a layer's two
// all-to-alls of C each is max(2C - T, 2C / degree), T the GEMM (derived in colocated_test.cc). Backward in the same
// way. The pipeline around it is megatron-1f1b, which degree 1 is.
#include "base/error.h"
#include "schedule/colocated.h"

namespace disagmoe {

Schedule GenerateTutel(const PlacementSpec& placement, const GenerateOptions& options) {
  const int degree = PartsOf(options, 2, 8, "tutel");
  if ((degree & (degree - 1)) != 0) {
    throw Error({"not a degree of tutel", "parts", std::to_string(degree), "1, 2, 4 or 8", ""});
  }
  return GenerateInterleaved({.name = "tutel", .ffn_parts = degree}, placement, options);
}

}  // namespace disagmoe
