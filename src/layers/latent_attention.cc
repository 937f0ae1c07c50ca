#include "layers/blocks.h"
#include "layers/projections.h"

namespace disagmoe {
namespace {

Tensor Latent(const ModelConfig& c, const Tensor& kv_a) { return kv_a.narrow(1, 0, c.kv_lora_rank).contiguous(); }

// The part with RoPE of each head's query [T, nh, dr], and of the keys [T, 1, dr].
Tensor QueryTails(const ModelConfig& c, const Tensor& q) {
  return q.view({q.size(0), c.num_attention_heads, c.qk_dim()}).narrow(2, c.qk_nope_head_dim, c.qk_rope_head_dim);
}
Tensor KeyTail(const ModelConfig& c, const Tensor& kv_a) {
  return kv_a.narrow(1, c.kv_lora_rank, c.qk_rope_head_dim).unsqueeze(1);
}

Tensor Normed(const ModelConfig& c, const Tensor& x, const Param& w) {
  Tensor y = at::empty_like(x), rstd = EmptyFp32({x.size(0)}, x);
  RmsNorm(x, w.value, c.latent_norm_eps, y, rstd);
  return y;
}

// Gradient of x from that of Normed(c, x).
Tensor NormedBackward(const ModelConfig& c, const Tensor& dy, const Tensor& x, const Param& w) {
  Tensor dx = at::empty_like(x), rstd = EmptyFp32({x.size(0)}, x), dw = w.grad;
  RmsNorm(x, w.value, c.latent_norm_eps, dx, rstd);
  RmsNormBackward(dy, x, w.value, rstd, dx, /*add_dx=*/false, dw);
  return dx;
}

// [T, nh d], rotated.
Tensor Queries(const ModelConfig& c, const AttentionParams& p, const AttentionSaved& saved) {
  if (!p.q_a.defined()) return saved.q;
  const Tensor q = Project(Normed(c, saved.q_a, p.q_a_norm), p.q_b);
  Rope(QueryTails(c, q), p.rotary.cos, p.rotary.sin, false);
  return q;
}

// kv_b's rows that make keys [nh, dn, rk], and values [nh, dv, rk].
Tensor KeyRows(const ModelConfig& c, const AttentionParams& p) {
  return p.kv_b.value.view({c.num_attention_heads, -1, c.kv_lora_rank}).narrow(1, 0, c.qk_nope_head_dim);
}
Tensor ValueRows(const ModelConfig& c, const AttentionParams& p) {
  return p.kv_b.value.view({c.num_attention_heads, -1, c.kv_lora_rank}).narrow(1, c.qk_nope_head_dim, c.v_head_dim);
}

// q [T, nh d], kv [T, nh (dn + dv)], kv_a [T, rk + dr] as inputs of attention, all views.
AttentionInputs Views(const ModelConfig& c, int64_t s, const Tensor& q, const Tensor& kv, const Tensor& kv_a) {
  const int64_t B = q.size(0) / s, nh = c.num_attention_heads, dn = c.qk_nope_head_dim, dv = c.v_head_dim;
  const Tensor heads = kv.view({B, s, nh, dn + dv});
  return {q.view({B, s, nh, c.qk_dim()}), heads.narrow(3, 0, dn), heads.narrow(3, dn, dv),
          KeyTail(c, kv_a).unflatten(0, {B, s})};
}

}  // namespace

void LatentProject(const ModelConfig& c, const AttentionParams& p, const Tensor& n1, AttentionSaved& saved) {
  saved.kv_a = Project(n1, p.kv_a);
  Rope(KeyTail(c, saved.kv_a), p.rotary.cos, p.rotary.sin, false);
  if (p.q_a.defined()) {
    saved.q_a = Project(n1, p.q_a);
  } else {
    saved.q = Project(n1, p.q);
    Rope(QueryTails(c, saved.q), p.rotary.cos, p.rotary.sin, false);
  }
}

AttentionInputs LatentInputs(const ModelConfig& c, const AttentionParams& p, const AttentionSaved& saved) {
  return Views(c, p.s(), Queries(c, p, saved), Project(Normed(c, Latent(c, saved.kv_a), p.kv_a_norm), p.kv_b), saved.kv_a);
}

AttentionInputs LatentRoom(const ModelConfig& c, int64_t s, const AttentionSaved& saved, AttentionSaved& kept) {
  const int64_t T = saved.x.size(0), nh = c.num_attention_heads;
  kept.q_a = saved.q_a;
  kept.kv_a = saved.kv_a;
  kept.d_q = EmptyLike({T, nh * c.qk_dim()}, saved.x);
  kept.d_kv = EmptyLike({T, nh * (c.qk_nope_head_dim + c.v_head_dim)}, saved.x);
  kept.d_kv_a = at::empty_like(saved.kv_a);
  return Views(c, s, kept.d_q, kept.d_kv, kept.d_kv_a);
}

void LatentBackward(const ModelConfig& c, const AttentionParams& p, AttentionSaved& kept, Tensor& d_n1) {
  Rope(QueryTails(c, kept.d_q), p.rotary.cos, p.rotary.sin, true);
  Rope(KeyTail(c, kept.d_kv_a), p.rotary.cos, p.rotary.sin, true);
  const Tensor d_latent = NormedBackward(c, at::mm(kept.d_kv, p.kv_b.value), Latent(c, kept.kv_a), p.kv_a_norm);
  kept.d_kv_a.narrow(1, 0, c.kv_lora_rank).copy_(d_latent);
  at::mm_out(d_n1, kept.d_kv_a, p.kv_a.value);
  if (!p.q_a.defined()) {
    d_n1.addmm_(kept.d_q, p.q.value);
    return;
  }
  kept.d_q_a = NormedBackward(c, at::mm(kept.d_q, p.q_b.value), kept.q_a, p.q_a_norm);
  d_n1.addmm_(kept.d_q_a, p.q_a.value);
}

void LatentBackwardWeights(const ModelConfig& c, const AttentionParams& p, const AttentionSaved& kept,
                           const Tensor& n1) {
  AddGrad(p.kv_b.grad, kept.d_kv, Normed(c, Latent(c, kept.kv_a), p.kv_a_norm));
  AddGrad(p.kv_a.grad, kept.d_kv_a, n1);
  if (!p.q_a.defined()) return AddGrad(p.q.grad, kept.d_q, n1);
  AddGrad(p.q_b.grad, kept.d_q, Normed(c, kept.q_a, p.q_a_norm));
  AddGrad(p.q_a.grad, kept.d_q_a, n1);
}

Tensor LatentKeys(const ModelConfig& c, const AttentionParams& p, const AttentionSaved& saved) {
  return at::cat({Normed(c, Latent(c, saved.kv_a), p.kv_a_norm), KeyTail(c, saved.kv_a).squeeze(1)}, 1);
}

Tensor LatentQueries(const ModelConfig& c, const AttentionParams& p, const AttentionSaved& saved) {
  const Tensor q = Queries(c, p, saved).view({c.num_attention_heads, 1, c.qk_dim()});
  const Tensor latent = at::bmm(q.narrow(2, 0, c.qk_nope_head_dim), KeyRows(c, p)).squeeze(1);
  return at::cat({latent, q.squeeze(1).narrow(1, c.qk_nope_head_dim, c.qk_rope_head_dim)}, 1);
}

Tensor LatentValues(const ModelConfig& c, const AttentionParams& p, const Tensor& means) {
  return at::bmm(ValueRows(c, p), means.unsqueeze(2)).view({1, c.num_attention_heads * c.v_head_dim});
}

}  // namespace disagmoe
