// Router and FFN of one layer, every family's, against slow obvious ones: fp64, autograd, every expert on every token. The
// attention before them is reference_test's business.
// T tokens in two sequences of s, H hidden, E experts, K a token.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <cmath>
#include <map>

#include "layers/blocks.h"
#include "layers/layers_for_tests.h"

namespace disagmoe {
namespace {

constexpr int64_t kSequence = 17, kTokens = 34;

ModelConfig Model() {
  ModelConfig m;
  m.vocab_size = 8;
  m.hidden_size = 24;
  m.num_hidden_layers = 2;
  m.num_experts = 8;
  m.num_experts_per_tok = 3;
  m.moe_intermediate_size = 20;
  m.intermediate_size = 36;
  m.initializer_range = 0.5;  // far from linear
  return m;
}

Tensor Norm(const Tensor& x, const Tensor& w, double eps) { return x * (x.square().mean(-1, true) + eps).rsqrt() * w; }

// Of one expert: x [T, H] -> [T, H].
Tensor NaiveFfn(const ModelConfig& c, const Tensor& x, const Tensor& gate_up, const Tensor& bias, const Tensor& down,
                const Tensor& down_bias) {
  Tensor gu = at::matmul(x, gate_up.t());
  if (bias.defined()) gu = gu + bias;
  const auto half = gu.chunk(2, -1);
  Tensor act;
  if (bias.defined() && c.swiglu_limit > 0) {
    const Tensor gate = half[0].clamp_max(c.swiglu_limit), up = half[1].clamp(-c.swiglu_limit, c.swiglu_limit);
    act = (up + 1) * gate * at::sigmoid(gate * 1.702);
  } else {
    act = at::silu(half[0]) * half[1];
  }
  const Tensor y = at::matmul(act, down.t());
  return down_bias.defined() ? y + down_bias : y;
}

struct Naive {
  Tensor out, loss, chosen;  // chosen [T, E]: 1 or 0
};

// With d: loss = sum(out d) + the auxiliary loss.
Naive RunNaive(const ModelConfig& c, std::map<std::string, Tensor>& w, const Tensor& h, const Tensor& d, bool global,
               double aux_weight) {
  const int64_t E = c.num_experts, K = c.num_experts_per_tok;
  const Tensor u = Norm(h, w["norm2"], c.rms_norm_eps);
  Tensor logits = at::matmul(u, w["router"].t());
  if (c.router_bias) logits = logits + w["router_bias"];
  const Tensor scores = c.scoring_func == "sigmoid" ? at::sigmoid(logits) : at::softmax(logits, -1);
  Tensor values = scores.detach();
  if (c.corrected_router()) values = values + w["router_correction"].detach();
  if (c.n_group > 1) {
    const Tensor grouped = values.view({kTokens, c.n_group, E / c.n_group});
    const Tensor best = std::get<0>(grouped.topk(c.corrected_router() ? 2 : 1, -1)).sum(-1);
    const Tensor groups = std::get<1>(best.topk(c.topk_group, -1));
    const Tensor keep = at::zeros_like(best).scatter(1, groups, 1).unsqueeze(2).expand(grouped.sizes()).reshape({kTokens, E});
    values = values.masked_fill(keep == 0, -INFINITY);
  }
  const Tensor chosen = at::zeros_like(values).scatter(1, std::get<1>(values.topk(K, -1)), 1);
  Tensor gates = scores * chosen;
  if (c.norm_topk_prob) gates = gates / gates.sum(-1, true);
  gates = gates * c.routed_scaling_factor;
  Tensor y = h;
  for (int64_t e = 0; e < E; ++e) {
    const Tensor bias = c.expert_bias ? w["experts.gate_up_bias"][e] : Tensor();
    const Tensor down_bias = c.expert_bias ? w["experts.down_bias"][e] : Tensor();
    y = y + gates.narrow(1, e, 1) * NaiveFfn(c, u, w["experts.gate_up"][e], bias, w["experts.down"][e], down_bias);
  }
  if (c.shared_intermediate() > 0) {
    Tensor shared = NaiveFfn(c, u, w["shared.gate_up"], {}, w["shared.down"], {});
    if (c.shared_expert_gate) shared = shared * at::sigmoid(at::matmul(u, w["shared.gate"].t()));
    y = y + shared;
  }
  const int64_t parts = global ? 1 : kTokens / kSequence, n = kTokens / parts;
  const Tensor f = chosen.view({parts, n, E}).sum(1) * (double(E) / double(K * n));
  const Tensor p = (scores / scores.sum(-1, true)).view({parts, n, E}).mean(1);
  return {y, (y * d).sum() + aux_weight * (f * p).sum(), chosen};
}

struct Case {
  std::string name;
  void (*change)(ModelConfig&);
};

void GptOss(ModelConfig& m) {
  m.router_bias = m.expert_bias = true;
  m.swiglu_limit = 1.5;
}
void DeepseekV2(ModelConfig& m) {
  m.topk_method = "group_limited_greedy";
  m.n_group = 4;
  m.topk_group = 2;
  m.norm_topk_prob = false;
  m.routed_scaling_factor = 16;
  m.n_shared_experts = 2;
}
void DeepseekV3(ModelConfig& m) {
  m.scoring_func = "sigmoid";
  m.topk_method = "noaux_tc";
  m.n_group = 4;
  m.topk_group = 2;
  m.routed_scaling_factor = 2.5;
  m.n_shared_experts = 1;
}
void Qwen2(ModelConfig& m) {
  m.norm_topk_prob = false;
  m.shared_expert_intermediate_size = 29;
  m.shared_expert_gate = true;
}
void SigmoidAlone(ModelConfig& m) {
  m.scoring_func = "sigmoid";
  m.norm_topk_prob = false;
}
void Everything(ModelConfig& m) {
  Qwen2(m);
  DeepseekV3(m);
  GptOss(m);
  m.n_shared_experts = 0;
}

class Layer : public testing::TestWithParam<std::tuple<Case, at::ScalarType, bool>> {};

TEST_P(Layer, OutputChoiceAndGradients) {
  const auto& [which, dtype, global] = GetParam();
  ModelConfig m = Model();
  which.change(m);
  if (dtype == at::kBFloat16) {  // rounding would change a choice, and which values are clamped
    m.num_experts_per_tok = 8;
    m.topk_group = m.n_group;
    if (m.swiglu_limit > 0) m.swiglu_limit = 50;
  }
  ParamStore store(HoldAll(m), dtype, at::kCPU);
  RandomWeights(store, 5);
  at::manual_seed(4);
  const Tensor h = at::randn({kTokens, m.hidden_size}).to(dtype), d = at::randn({kTokens, m.hidden_size}).to(dtype);
  const double aux_weight = 3;

  const std::string layer = "layers.1.";
  const RouterParams router(store, m, layer);
  const FfnParams ffn(store, m, 1);
  RouterSaved routed;
  FfnSaved saved;
  Tensor out = at::empty_like(h), dh = d.clone(), d_gates = at::empty({kTokens, m.num_experts_per_tok});
  const Tensor gates = RouterForward(m, router, h, routed);
  FfnForward(m, ffn, h, AllPairs(routed.ids, gates, kTokens), saved, out);
  std::vector<float> of_pairs;
  FfnBackward(m, ffn, saved, dh, of_pairs);
  std::copy(of_pairs.begin(), of_pairs.end(), d_gates.data_ptr<float>());
  AuxLoss aux;
  aux.weight = aux_weight;
  if (global) {
    aux.counts = CountExperts(routed.ids, m.num_experts);
    aux.tokens = kTokens;
  }
  RouterPartBackward(m, router, h, kSequence, routed, dh, d_gates, &aux);

  std::map<std::string, Tensor> weights;
  std::vector<std::string> names;
  std::vector<Tensor> leaves{h.to(at::kDouble).requires_grad_()};
  for (const auto& held : store.held()) {
    if (!held.spec.name.starts_with(layer)) continue;
    const std::string name = held.spec.name.substr(layer.size());
    if (name == "norm1" || name == "qkv" || name == "out") continue;
    const Param& p = store.Get(held.spec.name);
    weights[name] = p.value.to(at::kDouble).clone().requires_grad_();
    if (held.spec.counts_load) continue;
    names.push_back(name);
    leaves.push_back(weights[name]);
  }
  at::AutoGradMode enable(true);
  const Naive naive = RunNaive(m, weights, leaves[0], d.to(at::kDouble), global, aux_weight);
  const auto grads = torch::autograd::grad({naive.loss}, leaves);
  const bool bf16 = dtype == at::kBFloat16;
  const double tolerance = bf16 ? 0.03 : 1e-5;
  const auto error = [](const Tensor& got, const Tensor& want) {
    return ((got.to(at::kDouble) - want).norm() / (want.norm() + 1e-12)).item<double>();
  };
  EXPECT_TRUE(at::equal(at::zeros({kTokens, m.num_experts}).scatter(1, routed.ids.to(at::kLong), 1), naive.chosen.to(at::kFloat)));
  EXPECT_LT(error(out, naive.out.detach()), tolerance);
  EXPECT_LT(error(dh, grads[0]), tolerance);
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_LT(error(store.Get(layer + names[i]).grad, grads[i + 1]), tolerance) << names[i];
    EXPECT_GT(grads[i + 1].norm().item<double>(), 1e-3) << names[i];
  }
  EXPECT_NEAR(aux.value + (naive.out * d).sum().item<double>(), naive.loss.item<double>(), bf16 ? 0.1 : 1e-5);
  if (m.corrected_router()) {
    EXPECT_TRUE(at::equal(router.correction.grad, CountExperts(routed.ids, m.num_experts)));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Families, Layer,
    testing::Combine(testing::Values(Case{"plain", [](ModelConfig&) {}}, Case{"gpt_oss", GptOss},
                                     Case{"deepseek_v2", DeepseekV2}, Case{"deepseek_v3", DeepseekV3},
                                     Case{"qwen2", Qwen2}, Case{"sigmoid", SigmoidAlone}, Case{"everything", Everything}),
                     testing::Values(at::kFloat, at::kBFloat16), testing::Bool()),
    [](const auto& info) {
      return std::get<0>(info.param).name + at::toString(std::get<1>(info.param)) + (std::get<2>(info.param) ? "Global" : "");
    });

// The auxiliary loss with sigmoids: central differences along the gradient by the router's weights.
TEST(Router, AuxiliaryLossOfSigmoidsFiniteDifferences) {
  ModelConfig m = Model();
  DeepseekV3(m);
  ParamStore store(HoldAll(m), at::kFloat, at::kCPU);
  RandomWeights(store, 5);
  at::manual_seed(4);
  const Tensor h = at::randn({kTokens, m.hidden_size}), d_gates = at::zeros({kTokens, m.num_experts_per_tok});
  const RouterParams router(store, m, "layers.0.");
  const auto value = [&](RouterSaved& saved) {
    AuxLoss aux;
    aux.weight = 1;
    Tensor dh = at::zeros_like(h);
    RouterRecompute(m, router, h, saved);  // the same choice
    RouterPartBackward(m, router, h, kSequence, saved, dh, d_gates, &aux);
    return aux.value;
  };
  RouterSaved saved;
  RouterForward(m, router, h, saved);
  value(saved);
  const Tensor gradient = router.weight.grad.clone(), before = router.weight.master.clone();
  const double norm = gradient.norm().item<double>();
  EXPECT_GT(norm, 1e-2);
  const double step = 1e-2;
  router.weight.master.copy_(before + gradient * (step / norm));
  const double plus = value(saved);
  router.weight.master.copy_(before - gradient * (step / norm));
  EXPECT_NEAR((plus - value(saved)) / (2 * step) / norm, 1, 1e-2);
}

// A worker that holds some of the experts, at home for some rows: the parts add up to the whole.
TEST(Ffn, PartsOfExpertsAddUp) {
  ModelConfig m = Model();
  Everything(m);
  ParamStore whole(HoldAll(m), at::kFloat, at::kCPU);
  RandomWeights(whole, 5);
  at::manual_seed(4);
  const Tensor h = at::randn({kTokens, m.hidden_size}), d = at::randn({kTokens, m.hidden_size});
  const RouterParams router(whole, m, "layers.0.");
  const FfnParams all(whole, m, 0);
  RouterSaved routed;
  FfnSaved saved;
  const Tensor gates = RouterForward(m, router, h, routed);
  const RowPairs pairs = AllPairs(routed.ids, gates, kTokens);
  Tensor out = at::empty_like(h), dh = d.clone(), sum = at::zeros_like(h), d_sum = at::zeros_like(h);
  std::vector<float> d_gates, d_of_parts(pairs.expert.size());
  FfnForward(m, all, h, pairs, saved, out);
  FfnBackward(m, all, saved, dh, d_gates);
  for (const auto& [first, last] : std::vector<std::pair<int32_t, int32_t>>{{0, 3}, {3, 3}, {3, 8}}) {
    std::vector<HeldParam> held = HoldAll(m);
    for (HeldParam& p : held) {
      if (!p.spec.per_expert) continue;
      p.first = first;
      p.count = last - first;
    }
    ParamStore store(held, at::kFloat, at::kCPU);
    for (const HeldParam& p : held) {
      const Tensor from = whole.Get(p.spec.name).master;
      store.Get(p.spec.name).master.copy_(p.spec.per_expert ? from.narrow(0, first, last - first) : from);
    }
    const FfnParams part(store, m, 0);
    RowPairs here;
    here.offsets = {0};
    std::vector<size_t> slot;
    for (int64_t r = 0; r < kTokens; ++r) {
      for (int32_t j = pairs.offsets[r]; j < pairs.offsets[r + 1]; ++j) {
        if (pairs.expert[j] < first || pairs.expert[j] >= last) continue;
        here.expert.push_back(pairs.expert[j] - first);
        here.gate.push_back(pairs.gate[j]);
        slot.push_back(j);
      }
      here.offsets.push_back(static_cast<int32_t>(here.expert.size()));
      if (first != last && (r % 3 == 0) == (first == 0)) here.home.push_back(static_cast<int32_t>(r));
    }
    FfnSaved of_part;
    Tensor y = at::empty_like(h), dy = d.clone();
    std::vector<float> dg;
    FfnForward(m, part, h, here, of_part, y);
    FfnForget(of_part);
    FfnRecompute(m, part, of_part);
    FfnBackward(m, part, of_part, dy, dg);
    sum.add_(y);
    d_sum.add_(dy);
    for (size_t i = 0; i < dg.size(); ++i) d_of_parts[slot[i]] = dg[i];
    for (const char* name : {"layers.0.experts.gate_up_bias", "layers.0.experts.down_bias"}) {
      const Tensor expected = whole.Get(name).grad.narrow(0, first, last - first);
      EXPECT_TRUE(at::allclose(store.Get(name).grad, expected, 1e-5, 1e-5)) << name;
    }
  }
  EXPECT_TRUE(at::allclose(sum, out, 1e-5, 1e-4));
  EXPECT_TRUE(at::allclose(d_sum, dh, 1e-5, 1e-4));
  for (size_t i = 0; i < d_gates.size(); ++i) EXPECT_NEAR(d_of_parts[i], d_gates[i], 1e-4) << i;
}

}  // namespace
}  // namespace disagmoe
