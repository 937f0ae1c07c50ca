// Softmax attention itself: causal, grouped queries, memory linear in the sequence length.
#pragma once

#include <ATen/core/Tensor.h>

namespace disagmoe {

using at::Tensor;

// q [B, s, nh, d], k, v [B, s, nkv, d] (last dimension contiguous, others strided at will), o [B, s, nh, d] written,
// lse [B, nh, s] fp32 returned for the backward (on other devices than the CPU: undefined).
Tensor CausalAttention(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& o);
// dq, dk, dv written; same shapes as q, k, v.
void CausalAttentionBackward(const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                             const Tensor& lse, Tensor& dq, Tensor& dk, Tensor& dv);

namespace generic {
// Any device: libtorch's scaled_dot_product_attention with autograd; the backward runs its forward again.
void CausalAttention(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& o);
void CausalAttentionBackward(const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v, Tensor& dq,
                             Tensor& dk, Tensor& dv);
}  // namespace generic

}  // namespace disagmoe
