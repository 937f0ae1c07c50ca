// T tokens = B sequences of s; other shapes as in attention.h.
#include <ATen/ATen.h>

#include <cmath>

#include "layers/attention_core.h"
#include "layers/blocks.h"
#include "layers/projections.h"

namespace disagmoe {
namespace {

AttentionShape Shape(const AttentionParams& p, const AttentionSaved& saved) {
  return {p.window, p.scale, p.sinks.value, saved.documents};
}

AttentionInputs Inputs(const ModelConfig& c, const AttentionParams& p, const AttentionSaved& saved) {
  return c.latent() ? LatentInputs(c, p, saved) : PlainInputs(c, p.s(), saved);
}

// [T, nh dv] -> [B, s, nh, dv].
Tensor AsHeads(const ModelConfig& c, int64_t s, const Tensor& o) {
  return o.view({o.size(0) / s, s, c.num_attention_heads, c.value_dim()});
}

// Everything up to h; `saved` holds x.
void Run(const ModelConfig& c, const AttentionParams& p, AttentionSaved& saved) {
  ProjectInputs(c, p, saved);
  const int64_t T = saved.x.size(0);
  saved.o = EmptyLike({T, c.num_attention_heads * c.value_dim()}, saved.x);
  Tensor o = AsHeads(c, p.s(), saved.o);
  if (T > 0) saved.lse = CausalAttention(Inputs(c, p, saved), Shape(p, saved), o);
  ProjectOutput(p, saved);
}

}  // namespace

AttentionParams::AttentionParams(const ParamStore& store, const ModelConfig& model, int64_t layer, const Rotary& rotary)
    : rotary(rotary), window(model.window(layer)) {
  const std::string name = "layers." + std::to_string(layer) + ".";
  const auto get = [&](const char* part) { return store.Get(name + part); };
  const auto get_if = [&](bool has, const char* part) { return has ? get(part) : Param(); };
  norm1 = get("norm1");
  const bool latent = model.latent(), narrow_q = latent && model.q_lora_rank > 0;
  qkv = get_if(!latent, "qkv");
  qkv_bias = get_if(!latent && model.attention_bias, "qkv_bias");
  q_norm = get_if(!latent && model.qk_norm, "q_norm");
  k_norm = get_if(!latent && model.qk_norm, "k_norm");
  q = get_if(latent && !narrow_q, "q");
  q_a = get_if(narrow_q, "q_a");
  q_a_norm = get_if(narrow_q, "q_a_norm");
  q_b = get_if(narrow_q, "q_b");
  kv_a = get_if(latent, "kv_a");
  kv_a_norm = get_if(latent, "kv_a_norm");
  kv_b = get_if(latent, "kv_b");
  sinks = get_if(model.attention_sinks, "sinks");
  out = get("out");
  out_bias = get_if(model.output_bias, "out_bias");
  if (!model.is_dense(layer)) router = RouterParams(store, model, name);
  if (model.attention_scale_factor != 1) {
    scale = model.attention_scale_factor / std::sqrt(static_cast<double>(model.qk_dim()));
  }
}

void ProjectInputs(const ModelConfig& c, const AttentionParams& p, AttentionSaved& saved) {
  const Tensor& x = saved.x;
  Tensor n1 = at::empty_like(x);
  saved.rstd1 = EmptyFp32({x.size(0)}, x);
  RmsNorm(x, p.norm1.value, c.rms_norm_eps, n1, saved.rstd1);
  if (c.latent()) {
    LatentProject(c, p, n1, saved);
  } else {
    PlainProject(c, p, n1, saved);
  }
}

void ProjectOutput(const AttentionParams& p, AttentionSaved& saved) {
  saved.h = at::empty_like(saved.x);
  at::addmm_out(saved.h, saved.x, saved.o, p.out.value.t());
  if (p.out_bias.defined()) saved.h.add_(p.out_bias.value);
}

AttentionOutput RouteOutput(const ModelConfig& c, const AttentionParams& p, AttentionSaved& saved) {
  if (!p.router.defined()) return {saved.h, {}, {}};
  const Tensor gates = RouterForward(c, p.router, saved.h, saved.router);
  return {saved.h, saved.router.ids, gates};
}

AttentionOutput AttentionForward(const ModelConfig& c, const AttentionParams& p, const Tensor& x, AttentionSaved& saved) {
  saved.x = x;
  Run(c, p, saved);
  return RouteOutput(c, p, saved);
}

void AttentionForget(AttentionSaved& saved) {
  AttentionSaved kept;
  kept.x = saved.x;
  kept.documents = std::move(saved.documents);
  kept.router.ids = saved.router.ids;
  saved = std::move(kept);
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
  const int64_t T = dh.size(0), s = p.s();
  if (T == 0) return;
  if (p.router.defined()) RouterPartBackward(c, p.router, saved.h, s, saved.router, dh, d_gates, aux);
  if (p.out_bias.defined()) AddColumnSums(p.out_bias.grad, dh);
  AttentionSaved kept;
  kept.x = saved.x;
  kept.o = saved.o;
  kept.d_h = dh;
  AttentionInputs d = c.latent() ? LatentRoom(c, s, saved, kept) : PlainRoom(c, s, dh, kept);
  {
    const Tensor d_o = at::mm(dh, p.out.value);
    CausalAttentionBackward(AsHeads(c, s, d_o), Inputs(c, p, saved), Shape(p, saved), AsHeads(c, s, saved.o), saved.lse, d,
                            p.sinks.grad);
  }
  Tensor d_n1 = at::empty_like(dh), dw = p.norm1.grad;
  if (c.latent()) {
    LatentBackward(c, p, kept, d_n1);
  } else {
    PlainBackward(c, p, saved, d, kept, d_n1);
  }
  dh = dh.clone();  // the weights of `out` need it as it is
  RmsNormBackward(d_n1, saved.x, p.norm1.value, saved.rstd1, dh, /*add_dx=*/true, dw);
  saved = std::move(kept);
}

void AttentionBackwardWeights(const ModelConfig& c, const AttentionParams& p, AttentionSaved& saved) {
  const int64_t T = saved.x.size(0);
  if (T == 0) return;
  AddGrad(p.out.grad, saved.d_h, saved.o);
  Tensor n1 = at::empty_like(saved.x), rstd = EmptyFp32({T}, saved.x);
  RmsNorm(saved.x, p.norm1.value, c.rms_norm_eps, n1, rstd);
  if (c.latent()) {
    LatentBackwardWeights(c, p, saved, n1);
  } else {
    AddGrad(p.qkv.grad, saved.d_qkv, n1);
  }
  saved = {};
}

}  // namespace disagmoe
