// B sequences of s tokens, T = B s, H hidden, E experts.
#include "layers/reference.h"

#include <ATen/ATen.h>

#include <cmath>

namespace disagmoe {

LossScale::LossScale(const RunConfig& config) {
  const auto& t = config.train;
  const double sequences = static_cast<double>(t.micro_batch_size * t.micro_batches);
  token = 1 / (sequences * static_cast<double>(t.seq_length));
  global_aux = config.model.router_aux_loss == "global";
  if (config.model.router_aux_loss != "none") {
    aux = config.model.router_aux_loss_coef / (global_aux ? static_cast<double>(t.micro_batches) : sequences);
  }
}

Reference::Reference(const RunConfig& config, at::Device device)
    : model_(config.model),
      scale_(config),
      recompute_(config.train.recompute == "layer"),
      store_(HoldAll(config.model), config.train.dtype == "bf16" ? at::kBFloat16 : at::kFloat, device),
      rotary_(config.model, config.train.seq_length, device) {
  for (int64_t l = 0; l < model_.num_hidden_layers; ++l) {
    attention_.emplace_back(store_, model_, l, rotary_);
    ffn_.emplace_back(store_, model_, l);
  }
  head_ = std::make_unique<HeadParams>(store_);
}

Reference::Losses Reference::Run(const Tensor& tokens, bool backward) {
  const int64_t s = tokens.size(1) - 1;
  return Run(Batch{tokens.narrow(1, 0, s), tokens.narrow(1, 1, s), {}, 0}, backward);
}

Reference::Losses Reference::Run(const Batch& batch, bool backward) {
  const int64_t L = model_.num_hidden_layers, T = batch.tokens.numel();
  const Tensor ids = batch.tokens.reshape({T}), labels = batch.labels.reshape({T});
  const double token_scale = batch.step_labels > 0 ? 1 / static_cast<double>(batch.step_labels) : scale_.token;
  const Param& embed = store_.Get("embed");
  const auto rows = [&] { return at::empty({T, model_.hidden_size}, embed.value.options()); };
  std::vector<AttentionSaved> attention(L);
  std::vector<FfnSaved> ffn(L);
  Losses losses;
  auto check = [&](const Tensor& rstd, int64_t stage) {
    if (losses.bad_stage == kAllFinite && !AllFinite(rstd)) losses.bad_stage = stage + 1;
  };
  Tensor x = rows();
  EmbedForward(embed, ids, x);
  for (int64_t l = 0; l < L; ++l) {
    attention[l].documents = batch.documents;
    const AttentionOutput a = AttentionForward(model_, attention_[l], x, attention[l]);
    check(attention[l].rstd1, 2 * l - 1);
    x = rows();
    FfnForward(model_, ffn_[l], a.h, AllPairs(a.ids, a.gates, T), ffn[l], x);
    check(ffn[l].rstd, 2 * l);
    if (!backward) {
      attention[l] = {};
      ffn[l] = {};
    } else if (recompute_) {
      AttentionForget(attention[l]);
      FfnForget(ffn[l]);
    }
  }
  Tensor d = rows();
  bool finite = true;
  losses.tokens = HeadForwardBackward(model_, *head_, x, labels, token_scale, backward ? &d : nullptr, &finite);
  if (losses.bad_stage == kAllFinite && !finite) losses.bad_stage = 2 * L;
  if (losses.bad_stage == kAllFinite && !std::isfinite(losses.tokens)) losses.bad_stage = 2 * L + 1;
  if (!backward) return losses;
  for (int64_t l = L - 1; l >= 0; --l) {
    if (recompute_) {
      AttentionRecompute(model_, attention_[l], attention[l]);
      FfnRecompute(model_, ffn_[l], ffn[l]);
    }
    std::vector<float> d_gates;
    FfnBackward(model_, ffn_[l], ffn[l], d, d_gates);
    ffn[l] = {};
    Tensor dg;
    AuxLoss aux;
    aux.weight = scale_.aux;
    aux.tokens = T;
    if (attention[l].router.ids.defined()) {
      dg = at::empty({T, model_.num_experts_per_tok}, at::kFloat);
      std::copy(d_gates.begin(), d_gates.end(), dg.data_ptr<float>());
      dg = dg.to(d.device());
      if (scale_.global_aux) aux.counts = CountExperts(attention[l].router.ids, model_.num_experts);
    }
    AttentionBackward(model_, attention_[l], attention[l], d, dg, &aux);
    losses.aux += aux.value;
    attention[l] = {};
  }
  EmbedBackward(embed, ids, d);
  return losses;
}

Tensor Reference::LastLogits(const Tensor& tokens) {
  const int64_t t = tokens.size(1), H = model_.hidden_size;
  const Rotary rotary(model_, t, tokens.device());
  Tensor x = at::empty({t, H}, store_.Get("embed").value.options());
  EmbedForward(store_.Get("embed"), tokens.view({t}), x);
  for (int64_t l = 0; l < model_.num_hidden_layers; ++l) {
    AttentionParams p = attention_[l];
    p.rotary = rotary;
    AttentionSaved attention;
    FfnSaved ffn;
    const AttentionOutput a = AttentionForward(model_, p, x, attention);
    x = at::empty_like(x);
    FfnForward(model_, ffn_[l], a.h, AllPairs(a.ids, a.gates, t), ffn, x);
  }
  Tensor last = x.narrow(0, t - 1, 1), u = at::empty_like(last), rstd = at::empty({1}, x.options().dtype(at::kFloat));
  RmsNorm(last, head_->norm.value, model_.rms_norm_eps, u, rstd);
  return at::mm(u, head_->head.value.t()).view({-1}).to(at::kFloat).cpu();
}

}  // namespace disagmoe
