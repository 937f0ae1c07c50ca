// B sequences, s positions, nh query heads, nkv key/value heads, g = nh / nkv, d head size.
#include "layers/attention_core.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

namespace disagmoe {
namespace {

// [B, s, n, d] -> [B, n, s, d], the order libtorch's kernels take; a view.
Tensor Heads(const Tensor& x, int64_t first, int64_t count) { return x.narrow(2, first, count).transpose(1, 2); }

}  // namespace

Tensor CausalAttention(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& o) {
  if (!q.is_cpu()) {
    generic::CausalAttention(q, k, v, o);
    return {};
  }
  const int64_t B = q.size(0), s = q.size(1), nh = q.size(2), nkv = k.size(2), g = nh / nkv;
  Tensor lse = at::empty({B, nh, s}, q.options().dtype(at::kFloat));
  // One call a group of query heads: the kernel does not know of grouped queries, and a stride of 0 needs no copy.
  for (int64_t i = 0; i < nkv; ++i) {
    const Tensor qi = Heads(q, i * g, g);
    auto [oi, li] = at::_scaled_dot_product_flash_attention_for_cpu(
        qi, Heads(k, i, 1).expand_as(qi), Heads(v, i, 1).expand_as(qi), 0.0, /*is_causal=*/true);
    Heads(o, i * g, g).copy_(oi);
    lse.narrow(1, i * g, g).copy_(li);
  }
  return lse;
}

void CausalAttentionBackward(const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                             const Tensor& lse, Tensor& dq, Tensor& dk, Tensor& dv) {
  if (!q.is_cpu()) return generic::CausalAttentionBackward(d_o, q, k, v, dq, dk, dv);
  const int64_t nkv = k.size(2), g = q.size(2) / nkv;
  for (int64_t i = 0; i < nkv; ++i) {
    const Tensor qi = Heads(q, i * g, g);
    auto [dqi, dki, dvi] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        Heads(d_o, i * g, g), qi, Heads(k, i, 1).expand_as(qi), Heads(v, i, 1).expand_as(qi), Heads(o, i * g, g),
        lse.narrow(1, i * g, g), 0.0, /*is_causal=*/true);
    Heads(dq, i * g, g).copy_(dqi);
    // Summed over the group in fp32: in bf16 this alone doubles the error.
    Heads(dk, i, 1).copy_(g == 1 ? dki : dki.sum(1, /*keepdim=*/true, at::kFloat));
    Heads(dv, i, 1).copy_(g == 1 ? dvi : dvi.sum(1, /*keepdim=*/true, at::kFloat));
  }
}

namespace generic {
namespace {

Tensor Sdpa(const Tensor& q, const Tensor& k, const Tensor& v) {
  const int64_t g = q.size(2) / k.size(2);
  auto widen = [&](const Tensor& x) { return (g == 1 ? x : x.repeat_interleave(g, 2)).transpose(1, 2); };
  return at::scaled_dot_product_attention(q.transpose(1, 2), widen(k), widen(v), {}, 0.0, /*is_causal=*/true)
      .transpose(1, 2);
}

}  // namespace

void CausalAttention(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& o) { o.copy_(Sdpa(q, k, v)); }

void CausalAttentionBackward(const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v, Tensor& dq,
                             Tensor& dk, Tensor& dv) {
  at::AutoGradMode enable(true);
  auto leaf = [](const Tensor& x) { return x.detach().requires_grad_(); };
  const Tensor q1 = leaf(q), k1 = leaf(k), v1 = leaf(v);
  const auto grads = torch::autograd::grad({Sdpa(q1, k1, v1)}, {q1, k1, v1}, {d_o});
  at::NoGradGuard no_grad;
  dq.copy_(grads[0]);
  dk.copy_(grads[1]);
  dv.copy_(grads[2]);
}

}  // namespace generic
}  // namespace disagmoe
