// The attention part of a layer: h = x + attention(norm1(x)), then the router on norm2(h). blocks.h has the shapes and
// the two steps of a backward.
//
// nh/nkv query/KV heads; d width of a query and a key, dv of a value. With latent attention (arXiv 2405.04434, section 2.1)
// rq, rk ranks of queries and of keys and values, dn/dr widths of a query and a key without and with RoPE, d = dn + dr.
#pragma once

#include <cstdint>
#include <vector>

#include "layers/param_store.h"
#include "layers/rotary.h"
#include "layers/router.h"

namespace disagmoe {

struct AttentionParams {
  AttentionParams(const ParamStore& store, const ModelConfig& model, int64_t layer, const Rotary& rotary);
  // Undefined where the model has none.
  Param norm1, qkv, qkv_bias, q_norm, k_norm;
  Param q, q_a, q_a_norm, q_b, kv_a, kv_a_norm, kv_b;  // latent attention, instead of qkv
  Param sinks, out, out_bias;
  RouterParams router;  // undefined in a dense layer
  Rotary rotary;
  int64_t window = 0;   // of this layer
  double scale = 0;     // of the logits
  int64_t s() const { return rotary.cos.size(0); }
};

struct AttentionSaved {
  Tensor x;                    // [T, H]
  // First rows of documents among the T tokens, ascending, as AttentionShape has them; set by the caller before the forward.
  std::vector<int64_t> documents;
  Tensor rstd1, qkv;           // qkv [T, (nh + 2 nkv) d]: rotated in place, unless
  Tensor q, k, q_rstd, k_rstd; // with QK-norm: q, k [T, n d] normed and rotated, qkv as projected
  // Latent attention, instead: kv_a [T, rk + dr], its last part rotated, and q_a [T, rq] (without q_a q [T, nh d], rotated).
  // Norms and the projections up from these are made again in the backward.
  Tensor q_a, kv_a;
  Tensor o, lse;               // o [T, nh dv]
  Tensor h;                    // [T, H]
  RouterSaved router;
  Tensor d_h, d_qkv;           // between the two steps of a backward, with x, o and, of latent attention, q_a, kv_a and
  Tensor d_q, d_q_a, d_kv, d_kv_a;  // d_q [T, nh d], d_kv [T, nh (dn + dv)] and d_q_a, d_kv_a instead of d_qkv
};

struct AttentionOutput {
  Tensor h;      // [T, H]: to the experts, residual included
  Tensor ids;    // [T, K] int32; undefined in a dense layer
  Tensor gates;  // [T, K] fp32
};

AttentionOutput AttentionForward(const ModelConfig& model, const AttentionParams& p, const Tensor& x,
                                 AttentionSaved& saved);
// Drops what AttentionRecompute can rebuild from x, ids and documents.
void AttentionForget(AttentionSaved& saved);
void AttentionRecompute(const ModelConfig& model, const AttentionParams& p, AttentionSaved& saved);

// dh [T, H]: gradient of h, becomes that of x (another tensor). d_gates [T, K] (undefined in a dense layer).
void AttentionBackward(const ModelConfig& model, const AttentionParams& p, AttentionSaved& saved, Tensor& dh,
                       const Tensor& d_gates, AuxLoss* aux);
void AttentionBackwardInputs(const ModelConfig& model, const AttentionParams& p, AttentionSaved& saved, Tensor& dh,
                             const Tensor& d_gates, AuxLoss* aux);
void AttentionBackwardWeights(const ModelConfig& model, const AttentionParams& p, AttentionSaved& saved);

}  // namespace disagmoe
