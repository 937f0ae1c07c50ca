#include "layers/projections.h"

#include "layers/kernels.h"

namespace disagmoe {
namespace {

// Views of queries, keys and values: of the fused rows, or of the normed copies.
AttentionInputs Split(const ModelConfig& c, int64_t s, const Tensor& qkv, const Tensor& q, const Tensor& k) {
  const int64_t d = c.head_dim, nh = c.num_attention_heads, nkv = c.num_key_value_heads, B = qkv.size(0) / s;
  auto part = [&](int64_t first, int64_t n) {
    return qkv.narrow(1, first * d, n * d).unflatten(1, {n, d}).unflatten(0, {B, s});
  };
  if (!q.defined()) return {part(0, nh), part(nh, nkv), part(nh + nkv, nkv), {}};
  return {q.view({B, s, nh, d}), k.view({B, s, nkv, d}), part(nh + nkv, nkv), {}};
}

// Norm of each head, x [T, n d] as rows of d; or of all heads together, if w is as wide as x.
Tensor HeadNorm(const Tensor& x, const Tensor& w, double eps, Tensor& rstd) {
  Tensor rows = x.contiguous().view({-1, w.size(0)});
  Tensor y = EmptyLike({rows.size(0), w.size(0)}, x);
  rstd = EmptyFp32({rows.size(0)}, x);
  RmsNorm(rows, w, eps, y, rstd);
  return y.view({x.size(0), x.size(1)});
}

void HeadNormBackward(Tensor dy, const Tensor& x, const Param& w, const Tensor& rstd, Tensor out) {
  const int64_t d = w.value.size(0);
  Tensor dx = EmptyLike({rstd.size(0), d}, x), dw = w.grad;
  RmsNormBackward(dy.view({-1, d}), x.contiguous().view({-1, d}), w.value, rstd, dx, false, dw);
  out.copy_(dx.view({x.size(0), -1}));
}

// Queries and keys are neighbours: one pass. [T, nh + nkv, d].
Tensor QueriesAndKeys(const ModelConfig& c, const Tensor& qkv) {
  const int64_t n = c.num_attention_heads + c.num_key_value_heads;
  return qkv.narrow(1, 0, n * c.head_dim).unflatten(1, {n, c.head_dim});
}

}  // namespace

Tensor Project(const Tensor& x, const Param& w, const Param& bias) {
  Tensor y = EmptyLike({x.size(0), w.value.size(0)}, x);
  if (bias.defined()) {
    at::addmm_out(y, bias.value, x, w.value.t());
  } else {
    at::mm_out(y, x, w.value.t());
  }
  return y;
}

void AddColumnSums(Tensor grad, const Tensor& rows) { grad.add_(rows.sum(0, /*keepdim=*/false, at::kFloat)); }

void PlainProject(const ModelConfig& c, const AttentionParams& p, const Tensor& n1, AttentionSaved& saved) {
  const int64_t T = n1.size(0), d = c.head_dim, nh = c.num_attention_heads, nkv = c.num_key_value_heads;
  saved.qkv = Project(n1, p.qkv, p.qkv_bias);
  if (!c.qk_norm) return Rope(QueriesAndKeys(c, saved.qkv), p.rotary.cos, p.rotary.sin, false);
  saved.q = HeadNorm(saved.qkv.narrow(1, 0, nh * d), p.q_norm.value, c.rms_norm_eps, saved.q_rstd);
  saved.k = HeadNorm(saved.qkv.narrow(1, nh * d, nkv * d), p.k_norm.value, c.rms_norm_eps, saved.k_rstd);
  Rope(saved.q.view({T, nh, d}), p.rotary.cos, p.rotary.sin, false);
  Rope(saved.k.view({T, nkv, d}), p.rotary.cos, p.rotary.sin, false);
}

AttentionInputs PlainInputs(const ModelConfig& c, int64_t s, const AttentionSaved& saved) {
  return Split(c, s, saved.qkv, saved.q, saved.k);
}

AttentionInputs PlainRoom(const ModelConfig& c, int64_t s, const Tensor& like, AttentionSaved& kept) {
  const int64_t T = like.size(0), d = c.head_dim, nh = c.num_attention_heads, nkv = c.num_key_value_heads;
  kept.d_qkv = EmptyLike({T, (nh + 2 * nkv) * d}, like);
  if (!c.qk_norm) return Split(c, s, kept.d_qkv, {}, {});
  return Split(c, s, kept.d_qkv, EmptyLike({T, nh * d}, like), EmptyLike({T, nkv * d}, like));
}

void PlainBackward(const ModelConfig& c, const AttentionParams& p, const AttentionSaved& saved, AttentionInputs& d,
                   AttentionSaved& kept, Tensor& d_n1) {
  const int64_t T = d_n1.size(0), q = c.num_attention_heads * c.head_dim, k = c.num_key_value_heads * c.head_dim;
  if (c.qk_norm) {
    Rope(d.q.flatten(0, 1), p.rotary.cos, p.rotary.sin, true);
    Rope(d.k.flatten(0, 1), p.rotary.cos, p.rotary.sin, true);
    HeadNormBackward(d.q.view({T, q}), saved.qkv.narrow(1, 0, q), p.q_norm, saved.q_rstd, kept.d_qkv.narrow(1, 0, q));
    HeadNormBackward(d.k.view({T, k}), saved.qkv.narrow(1, q, k), p.k_norm, saved.k_rstd, kept.d_qkv.narrow(1, q, k));
  } else {
    Rope(QueriesAndKeys(c, kept.d_qkv), p.rotary.cos, p.rotary.sin, true);
  }
  if (p.qkv_bias.defined()) AddColumnSums(p.qkv_bias.grad, kept.d_qkv);
  at::mm_out(d_n1, kept.d_qkv, p.qkv.value);
}

}  // namespace disagmoe
