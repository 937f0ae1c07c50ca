// The router of a layer: which experts a token visits and with which gate, from norm2(h); its way back, and the auxiliary
// loss that balances experts. Part of the attention stage (see blocks.h for shapes and for the two steps of a backward:
// all of this belongs to the first).
#pragma once

#include <cstdint>
#include <string>

#include "layers/kernels.h"
#include "layers/param_store.h"

namespace disagmoe {

// Logits are sums in fp32 of norm2(h) times `weight`, plus `bias`. Scores, choice and gates: see RouterRule and ScoreTopK
// in kernels.h, which do as transformers 5.24 does, except that
//   - with softmax and no correction experts are chosen by their logits, not by the rounded probabilities;
//   - experts outside the best groups are never chosen (there, DeepSeek-V2's get probability 0, and could tie with others);
//   - gpt-oss's softmax over the chosen logits is softmax over all, renormalised: the largest logit is among the chosen.
// The correction ("noaux_tc") only chooses. It has no gradient; AdamW moves it by the loads (see optimizer.h).
struct RouterParams {
  RouterParams() = default;
  // Of "layers.3." and so on.
  RouterParams(const ParamStore& store, const ModelConfig& model, const std::string& layer);
  Param norm2, weight;
  Param bias, correction;  // undefined without
  bool defined() const { return weight.defined(); }  // not in a dense layer
};

struct RouterSaved {
  Tensor ids;           // [T, K] int32: the choice, never made again
  Tensor rstd2, scores; // scores [T, E]
};

// The auxiliary loss of one layer and micro-batch, with p the scores (with sigmoids: divided by their sum; arXiv
// 2412.19437, equations 17 to 20) and c the choice as made. loss = coef * E / (K n) * sum_e c_e * mean_t p_te with counts c over
// n tokens: of each sequence, averaged over sequences ("sequence"), or of the whole micro-batch ("global").
struct AuxLoss {
  double weight = 0;       // coef / (sequences or micro-batches in a step)
  Tensor counts;           // "global": [E] fp32, over the tokens of all slices; undefined: per sequence
  int64_t tokens = 0;      // "global": tokens of all slices
  double value = 0;        // out: this slice's share of the weighted loss
};

// h [T, H]. Sets saved.ids [T, K]; returns the gates [T, K] fp32.
Tensor RouterForward(const ModelConfig& model, const RouterParams& p, const Tensor& h, RouterSaved& saved);
// Rebuilds the rest of `saved` from h and ids.
void RouterRecompute(const ModelConfig& model, const RouterParams& p, const Tensor& h, RouterSaved& saved);
// Adds the gradient that comes through the router to dh [T, H], and the pairs of each expert to the load in
// correction.grad: this runs once for each forward of training. s: length of a sequence; aux may be null.
void RouterPartBackward(const ModelConfig& model, const RouterParams& p, const Tensor& h, int64_t s, RouterSaved& saved,
                        Tensor& dh, const Tensor& d_gates, AuxLoss* aux);
// Counts of the router's choice, [E] fp32 on the host.
Tensor CountExperts(const Tensor& ids, int64_t num_experts);

}  // namespace disagmoe
