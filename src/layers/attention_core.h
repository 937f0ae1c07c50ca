// Softmax attention itself: causal, grouped queries, memory linear in the sequence length.
//
// B sequences of s rows, nh query and nkv key/value heads, d width of a query and a key, dv of a value.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace disagmoe {

using at::Tensor;

struct AttentionShape {
  int64_t window = 0;  // a query sees itself and the window - 1 rows before it; 0: all before it
  double scale = 0;    // of the logits; 0: 1 / sqrt(d)
  Tensor sinks;        // [nh] fp32, or undefined: a logit a head that takes its share of the softmax and has no value
  // First rows of documents among the B s rows, ascending; queries see keys of their own document only. The first row of
  // a sequence always begins one.
  std::vector<int64_t> documents;
};

// Last dimensions contiguous, others strided at will.
struct AttentionInputs {
  Tensor q;     // [B, s, nh, d]
  Tensor k;     // [B, s, nkv, d]
  Tensor v;     // [B, s, nkv, dv]
  Tensor tail;  // [B, s, 1, dr], or undefined: the last part of every head's key; k is then [B, s, nkv, d - dr]
};

// o [B, s, nh, dv] written; returns, for the backward, the logarithms of the softmax's denominators, [B, nh, s] fp32
// (on other devices than the CPU: undefined).
Tensor CausalAttention(const AttentionInputs& in, const AttentionShape& shape, Tensor& o);
// The tensors of d, shaped as those of `in`, are written. d_sinks [nh] fp32: adds to; undefined without sinks.
void CausalAttentionBackward(const Tensor& d_o, const AttentionInputs& in, const AttentionShape& shape, const Tensor& o,
                             const Tensor& lse, AttentionInputs& d, Tensor d_sinks);

namespace generic {
// Any device and dtype: libtorch's scaled_dot_product_attention or, where it does not do, its formula by blocks of
// queries, with autograd; the backward runs the forward again.
void CausalAttention(const AttentionInputs& in, const AttentionShape& shape, Tensor& o);
void CausalAttentionBackward(const Tensor& d_o, const AttentionInputs& in, const AttentionShape& shape,
                             AttentionInputs& d, Tensor d_sinks);
}  // namespace generic

}  // namespace disagmoe
