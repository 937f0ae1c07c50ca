// T tokens = B sequences of s, H hidden, E experts, K a token.
#include "layers/router.h"

#include <ATen/ATen.h>

#include "layers/blocks.h"
#include "layers/router_logits.h"

namespace disagmoe {
namespace {

Tensor EmptyFp32(std::vector<int64_t> shape, const Tensor& like) {
  return at::empty(shape, like.options().dtype(at::kFloat));
}

// norm2(h); rstd2 as saved or made.
Tensor Input(const ModelConfig& c, const RouterParams& p, const Tensor& h, RouterSaved& saved) {
  Tensor u = at::empty_like(h);
  saved.rstd2 = EmptyFp32({h.size(0)}, h);
  RmsNorm(h, p.norm2.value, c.rms_norm_eps, u, saved.rstd2);
  return u;
}

RouterRule RuleOf(const ModelConfig& c) {
  return {c.scoring_func == "sigmoid", c.n_group, c.topk_group, c.norm_topk_prob, c.routed_scaling_factor};
}

// Fills `saved` but for ids, which become the choice.
void Choose(const ModelConfig& c, const RouterParams& p, const Tensor& h, RouterSaved& saved, Tensor& ids) {
  Tensor logits = EmptyFp32({h.size(0), c.num_experts}, h);
  RouterLogits(Input(c, p, h, saved), p.weight.value, logits);
  if (p.bias.defined()) logits.add_(p.bias.value);
  saved.scores = at::empty_like(logits);
  ScoreTopK(RuleOf(c), logits, p.correction.value, saved.scores, ids);
}

// Gradient of the auxiliary loss by the scores [T, E]; its value into aux.
Tensor AuxBackward(const ModelConfig& c, const RouterSaved& saved, int64_t s, AuxLoss& aux) {
  const int64_t T = saved.scores.size(0), E = c.num_experts, K = c.num_experts_per_tok;
  const bool global = aux.counts.defined();
  const int64_t n = global ? aux.tokens : s, parts = global ? 1 : T / s;
  Tensor sum, probs = saved.scores, d_probs = EmptyFp32({T, E}, saved.scores);
  if (c.scoring_func == "sigmoid") {
    sum = saved.scores.sum(1, true) + 1e-20;
    probs = saved.scores / sum;
  }
  aux.value = 0;
  for (int64_t b = 0; b < parts; ++b) {
    const int64_t rows = T / parts;
    const Tensor counts = global ? aux.counts.to(d_probs.device())
                                 : CountExperts(saved.ids.narrow(0, b * s, s), E).to(d_probs.device());
    const Tensor d = counts * (aux.weight * E / (static_cast<double>(K) * n * n));
    d_probs.narrow(0, b * rows, rows).copy_(d.expand({rows, E}));
    aux.value += at::dot(probs.narrow(0, b * rows, rows).sum(0), d).item<double>();
  }
  if (!sum.defined()) return d_probs;
  return (d_probs - (d_probs * probs).sum(1, true)) / sum;
}

}  // namespace

RouterParams::RouterParams(const ParamStore& store, const ModelConfig& model, const std::string& layer)
    : norm2(store.Get(layer + "norm2")), weight(store.Get(layer + "router")) {
  if (model.router_bias) bias = store.Get(layer + "router_bias");
  if (model.corrected_router()) correction = store.Get(layer + "router_correction");
}

Tensor RouterForward(const ModelConfig& c, const RouterParams& p, const Tensor& h, RouterSaved& saved) {
  saved.ids = at::empty({h.size(0), c.num_experts_per_tok}, h.options().dtype(at::kInt));
  Choose(c, p, h, saved, saved.ids);
  Tensor gates = EmptyFp32({h.size(0), c.num_experts_per_tok}, h);
  Gates(RuleOf(c), saved.scores, saved.ids, gates);
  return gates;
}

void RouterRecompute(const ModelConfig& c, const RouterParams& p, const Tensor& h, RouterSaved& saved) {
  Tensor again = at::empty_like(saved.ids);
  Choose(c, p, h, saved, again);  // the choice of the forward stays; `again` is dropped
}

void RouterPartBackward(const ModelConfig& c, const RouterParams& p, const Tensor& h, int64_t s, RouterSaved& saved,
                        Tensor& dh, const Tensor& d_gates, AuxLoss* aux) {
  const int64_t T = dh.size(0);
  Tensor d_scores, d_logits = EmptyFp32({T, c.num_experts}, dh);
  if (aux != nullptr && aux->weight != 0 && T > 0) d_scores = AuxBackward(c, saved, s, *aux);
  RouterBackward(RuleOf(c), d_gates, d_scores, saved.scores, saved.ids, d_logits);
  if (p.bias.defined()) {
    Tensor d_bias = p.bias.grad.unsqueeze(0);
    AddSegments(d_logits, {}, {0, T}, d_bias);
  }
  if (p.correction.defined()) {
    Tensor load = p.correction.grad;
    load.add_(CountExperts(saved.ids, c.num_experts).to(load.device()));
  }
  AddGrad(p.weight.grad, d_logits, Input(c, p, h, saved).to(at::kFloat));
  const Tensor du = at::mm(d_logits, p.weight.value).to(dh.scalar_type());
  Tensor dw = p.norm2.grad;
  RmsNormBackward(du, h, p.norm2.value, saved.rstd2, dh, /*add_dx=*/true, dw);
}

Tensor CountExperts(const Tensor& ids, int64_t num_experts) {
  Tensor host = ids.cpu(), counts = at::zeros({num_experts}, at::kFloat);
  const int32_t* id = host.data_ptr<int32_t>();
  float* count = counts.data_ptr<float>();
  for (int64_t i = 0; i < host.numel(); ++i) count[id[i]] += 1;
  return counts;
}

}  // namespace disagmoe
