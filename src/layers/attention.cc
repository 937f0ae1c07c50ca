// T tokens = B sequences of s, H hidden, nh/nkv query/KV heads of size d, R = (nh + 2 nkv) d, E experts, K a token.
#include <ATen/ATen.h>

#include "layers/attention_core.h"
#include "layers/blocks.h"

namespace disagmoe {
namespace {

Tensor Empty(std::vector<int64_t> shape, const Tensor& like) { return at::empty(shape, like.options()); }
Tensor EmptyFp32(std::vector<int64_t> shape, const Tensor& like) {
  return at::empty(shape, like.options().dtype(at::kFloat));
}

// y = x W^T.
Tensor Project(const Tensor& x, const Tensor& w) {
  Tensor y = Empty({x.size(0), w.size(0)}, x);
  at::mm_out(y, x, w.t());
  return y;
}

struct Qkv {
  Tensor q, k, v;  // [B, s, n, d]
};

// Views of queries, keys and values: of the fused rows, or of the normed copies.
Qkv Split(const ModelConfig& c, int64_t s, const Tensor& qkv, const Tensor& q, const Tensor& k) {
  const int64_t d = c.head_dim, nh = c.num_attention_heads, nkv = c.num_key_value_heads, B = qkv.size(0) / s;
  auto part = [&](int64_t first, int64_t n) { return qkv.narrow(1, first * d, n * d).unflatten(1, {n, d}).unflatten(0, {B, s}); };
  if (!q.defined()) return {part(0, nh), part(nh, nkv), part(nh + nkv, nkv)};
  return {q.view({B, s, nh, d}), k.view({B, s, nkv, d}), part(nh + nkv, nkv)};
}

// Norm of each head: x [T, n d] as rows of d.
Tensor HeadNorm(const Tensor& x, const Tensor& w, double eps, Tensor& rstd) {
  Tensor rows = x.contiguous().view({-1, w.size(0)});
  Tensor y = Empty({rows.size(0), w.size(0)}, x);
  rstd = EmptyFp32({rows.size(0)}, x);
  RmsNorm(rows, w, eps, y, rstd);
  return y.view({x.size(0), x.size(1)});
}

void HeadNormBackward(Tensor dy, const Tensor& x, const Param& w, const Tensor& rstd, Tensor out) {
  const int64_t d = w.value.size(0);
  Tensor dx = Empty({rstd.size(0), d}, x), dw = w.grad;
  RmsNormBackward(dy.view({-1, d}), x.contiguous().view({-1, d}), w.value, rstd, dx, false, dw);
  out.copy_(dx.view({x.size(0), -1}));
}

// Everything up to h; `saved` holds x.
void Run(const ModelConfig& c, const AttentionParams& p, AttentionSaved& saved) {
  const Tensor& x = saved.x;
  const int64_t T = x.size(0), s = p.s(), d = c.head_dim, nh = c.num_attention_heads, nkv = c.num_key_value_heads;
  Tensor n1 = Empty({T, x.size(1)}, x);
  saved.rstd1 = EmptyFp32({T}, x);
  RmsNorm(x, p.norm1.value, c.rms_norm_eps, n1, saved.rstd1);
  saved.qkv = Project(n1, p.qkv.value);
  if (c.qk_norm) {
    saved.q = HeadNorm(saved.qkv.narrow(1, 0, nh * d), p.q_norm.value, c.rms_norm_eps, saved.q_rstd);
    saved.k = HeadNorm(saved.qkv.narrow(1, nh * d, nkv * d), p.k_norm.value, c.rms_norm_eps, saved.k_rstd);
    Rope(saved.q.view({T, nh, d}), p.rotary.cos, p.rotary.sin, false);
    Rope(saved.k.view({T, nkv, d}), p.rotary.cos, p.rotary.sin, false);
  } else {  // queries and keys are neighbours: one pass
    Rope(saved.qkv.narrow(1, 0, (nh + nkv) * d).unflatten(1, {nh + nkv, d}), p.rotary.cos, p.rotary.sin, false);
  }
  saved.o = Empty({T, nh * d}, x);
  const Qkv in = Split(c, s, saved.qkv, saved.q, saved.k);
  Tensor o = saved.o.view({T / s, s, nh, d});
  if (T > 0) saved.lse = CausalAttention(in.q, in.k, in.v, o);
  saved.h = Empty({T, x.size(1)}, x);
  at::addmm_out(saved.h, x, saved.o, p.out.value.t());
}

}  // namespace

Rotary::Rotary(const ModelConfig& model, int64_t s, at::Device device) {
  RopeTable(s, model.head_dim, model.rope_theta, cos, sin);
  cos = cos.to(device);
  sin = sin.to(device);
}

AttentionParams::AttentionParams(const ParamStore& store, const ModelConfig& model, int64_t layer, const Rotary& rotary)
    : rotary(rotary) {
  const std::string name = "layers." + std::to_string(layer) + ".";
  norm1 = store.Get(name + "norm1");
  qkv = store.Get(name + "qkv");
  if (model.qk_norm) {
    q_norm = store.Get(name + "q_norm");
    k_norm = store.Get(name + "k_norm");
  }
  out = store.Get(name + "out");
  if (!model.is_dense(layer)) router = RouterParams(store, model, name);
}

AttentionOutput AttentionForward(const ModelConfig& c, const AttentionParams& p, const Tensor& x, AttentionSaved& saved) {
  saved.x = x;
  Run(c, p, saved);
  if (!p.router.defined()) return {saved.h, {}, {}};
  const Tensor gates = RouterForward(c, p.router, saved.h, saved.router);
  return {saved.h, saved.router.ids, gates};
}

void AttentionForget(AttentionSaved& saved) {
  const Tensor x = saved.x, ids = saved.router.ids;
  saved = {};
  saved.x = x;
  saved.router.ids = ids;
}

void AttentionRecompute(const ModelConfig& c, const AttentionParams& p, AttentionSaved& saved) {
  Run(c, p, saved);
  if (p.router.defined()) RouterRecompute(c, p.router, saved.h, saved.router);
}

void AttentionBackward(const ModelConfig& c, const AttentionParams& p, AttentionSaved& saved, Tensor& dh,
                       const Tensor& d_gates, AuxLoss* aux) {
  AttentionBackwardInputs(c, p, saved, dh, d_gates, aux);
  AttentionBackwardWeights(c, p, saved);
}

void AttentionBackwardInputs(const ModelConfig& c, const AttentionParams& p, AttentionSaved& saved, Tensor& dh,
                             const Tensor& d_gates, AuxLoss* aux) {
  const int64_t T = dh.size(0), s = p.s(), d = c.head_dim, nh = c.num_attention_heads, nkv = c.num_key_value_heads;
  if (T == 0) return;
  if (p.router.defined()) RouterPartBackward(c, p.router, saved.h, s, saved.router, dh, d_gates, aux);
  Tensor d_o = Empty({T, nh * d}, dh);
  at::mm_out(d_o, dh, p.out.value);
  Tensor d_qkv = Empty({T, (nh + 2 * nkv) * d}, dh), dq, dk;
  if (c.qk_norm) {
    dq = Empty({T, nh * d}, dh);
    dk = Empty({T, nkv * d}, dh);
  }
  const Qkv in = Split(c, s, saved.qkv, saved.q, saved.k);
  Qkv din = Split(c, s, d_qkv, dq, dk);
  CausalAttentionBackward(d_o.view({T / s, s, nh, d}), in.q, in.k, in.v, saved.o.view({T / s, s, nh, d}), saved.lse,
                          din.q, din.k, din.v);
  if (c.qk_norm) {
    Rope(dq.view({T, nh, d}), p.rotary.cos, p.rotary.sin, true);
    Rope(dk.view({T, nkv, d}), p.rotary.cos, p.rotary.sin, true);
    HeadNormBackward(dq, saved.qkv.narrow(1, 0, nh * d), p.q_norm, saved.q_rstd, d_qkv.narrow(1, 0, nh * d));
    HeadNormBackward(dk, saved.qkv.narrow(1, nh * d, nkv * d), p.k_norm, saved.k_rstd, d_qkv.narrow(1, nh * d, nkv * d));
  } else {
    Rope(d_qkv.narrow(1, 0, (nh + nkv) * d).unflatten(1, {nh + nkv, d}), p.rotary.cos, p.rotary.sin, true);
  }
  Tensor d_n1 = Empty({T, dh.size(1)}, dh), dw = p.norm1.grad;
  at::mm_out(d_n1, d_qkv, p.qkv.value);
  AttentionSaved kept;
  kept.x = saved.x;
  kept.o = saved.o;
  kept.d_h = dh;
  kept.d_qkv = d_qkv;
  dh = dh.clone();  // the weights of `out` need it as it is
  RmsNormBackward(d_n1, saved.x, p.norm1.value, saved.rstd1, dh, /*add_dx=*/true, dw);
  saved = std::move(kept);
}

void AttentionBackwardWeights(const ModelConfig& c, const AttentionParams& p, AttentionSaved& saved) {
  const int64_t T = saved.x.size(0);
  if (T == 0) return;
  AddGrad(p.out.grad, saved.d_h, saved.o);
  Tensor n1 = Empty({T, saved.x.size(1)}, saved.x), rstd = EmptyFp32({T}, saved.x);
  RmsNorm(saved.x, p.norm1.value, c.rms_norm_eps, n1, rstd);
  AddGrad(p.qkv.grad, saved.d_qkv, n1);
  saved = {};
}

}  // namespace disagmoe
