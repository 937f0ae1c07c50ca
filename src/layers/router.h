// The router of a layer: which experts a token visits and with which gate, from norm2(h); its way back, and the auxiliary
// loss that balances experts. Part of the attention stage (see blocks.h for shapes and for the two steps of a backward:
// all of this belongs to the first).
#pragma once

#include <cstdint>
#include <string>

#include "layers/kernels.h"
#include "layers/param_store.h"

namespace disagmoe {

struct RouterParams {
  RouterParams() = default;
  // Of "layers.3." and so on.
  RouterParams(const ParamStore& store, const ModelConfig& model, const std::string& layer);
  Param norm2, weight;
  bool defined() const { return weight.defined(); }  // not in a dense layer
};

struct RouterSaved {
  Tensor ids;           // [T, K] int32: the choice, never made again
  Tensor rstd2, probs;  // probs [T, E]
};

// The auxiliary loss of one layer and micro-batch. loss = coef * E / (K n) * sum_e c_e * mean_t p_te with counts c over
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
// Adds the gradient that comes through the router to dh [T, H]. s: length of a sequence; aux may be null.
void RouterPartBackward(const ModelConfig& model, const RouterParams& p, const Tensor& h, int64_t s, RouterSaved& saved,
                        Tensor& dh, const Tensor& d_gates, AuxLoss* aux);
// Counts of the router's choice, [E] fp32 on the host.
Tensor CountExperts(const Tensor& ids, int64_t num_experts);

}  // namespace disagmoe
