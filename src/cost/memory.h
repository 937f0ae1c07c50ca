// Bytes that training keeps, by stage, for bf16 activations and mixed-precision state.
//
// Two pools keep the rows h that came and make normed and permuted rows again, as the runtime does. A colocated worker
// norms before the exchange and keeps the permuted rows, one for each (token, expert) pair. All keep gate, up and their
// product. (The runtime makes the product again as well: 2 De bytes a pair less.)
#pragma once

#include <cstdint>

#include "cost/job.h"
#include "cost/step_costs.h"

namespace disagmoe {

// Kept per token between forward and backward of an attention stage: input, both normed rows, queries, keys, values,
// attention's output and log-sums, h, the router's probabilities. With recomputation only the input and the choice.
double AttentionActivationBytes(const Job& job, int64_t layer);
// Per received row, and per (token, expert) pair, of an FFN stage. With recomputation only received rows.
double FfnRowBytes(const Job& job);
double FfnPairBytes(const Job& job);
// Per token of shared experts or a dense layer.
double CommonFfnBytes(const Job& job, int64_t layer);
// Per token of the head between its forward and its backward (normed row, gradient of the logits in bf16), and while it
// runs (logits in fp32).
double HeadActivationBytes(const Job& job);
double HeadWorkspaceBytes(const Job& job);

// Kept between input-gradient and weight-gradient pass: inputs of the products and gradients of their outputs. The
// gradients alone are what a backward holds beside the activations while it runs.
double AttentionGradientBytes(const Job& job, int64_t layer);
double AttentionWeightBytes(const Job& job, int64_t layer);
double FfnPairGradientBytes(const Job& job);
double FfnPairWeightBytes(const Job& job);
double CommonFfnGradientBytes(const Job& job, int64_t layer);
double CommonFfnWeightBytes(const Job& job, int64_t layer);

// Of a worker that holds so many parameters and updates so many: with a sharded optimizer only its share of them.
StaticMemory StaticMemoryOf(const Job& job, double params, double updated);

}  // namespace disagmoe
