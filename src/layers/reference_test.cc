// The one-process model against a slow, obvious one: fp64, autograd, an s x s attention matrix, every expert on every
// token. Also finite differences, bf16 and recomputation.
#include "layers/reference.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <map>

#include "base/rng.h"
#include "layers/attention_core.h"

namespace disagmoe {
namespace {

using Weights = std::map<std::string, Tensor>;

Tensor Norm(const Tensor& x, const Tensor& w, double eps) {
  return x * (x.square().mean(-1, true) + eps).rsqrt() * w;
}

// x [B, s, n, d]: complex rotation of pairs (i, i + d/2) by position * theta^(-2i/d).
Tensor Rotate(const Tensor& x, double theta) {
  const int64_t s = x.size(1), d = x.size(3);
  const Tensor inverse = at::pow(theta, at::arange(0, d, 2, at::kDouble) / -static_cast<double>(d));
  const Tensor angle = at::outer(at::arange(s, at::kDouble), inverse).view({1, s, 1, d / 2});
  const auto half = x.chunk(2, -1);
  return at::cat({half[0] * angle.cos() - half[1] * angle.sin(), half[1] * angle.cos() + half[0] * angle.sin()}, -1);
}

Tensor Swiglu(const Tensor& x, const Tensor& gate_up, const Tensor& down) {
  const auto gu = at::matmul(x, gate_up.t()).chunk(2, -1);
  return at::matmul(at::silu(gu[0]) * gu[1], down.t());
}

// Mean token loss plus the auxiliary loss, of tokens [B, s + 1].
Tensor NaiveLoss(const ModelConfig& c, Weights& w, const Tensor& tokens) {
  const int64_t B = tokens.size(0), s = tokens.size(1) - 1, nh = c.num_attention_heads, nkv = c.num_key_value_heads,
                d = c.head_dim, E = c.num_experts, K = c.num_experts_per_tok;
  Tensor x = w["embed"].index_select(0, tokens.narrow(1, 0, s).reshape({-1})), aux = at::zeros({}, at::kDouble);
  const Tensor mask = at::ones({s, s}, at::kBool).triu(1);
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    const std::string n = "layers." + std::to_string(l) + ".";
    const Tensor qkv = at::matmul(Norm(x, w[n + "norm1"], c.rms_norm_eps), w[n + "qkv"].t()).view({B, s, nh + 2 * nkv, d});
    Tensor q = qkv.narrow(2, 0, nh), k = qkv.narrow(2, nh, nkv), v = qkv.narrow(2, nh + nkv, nkv);
    if (c.qk_norm) {
      q = Norm(q, w[n + "q_norm"], c.rms_norm_eps);
      k = Norm(k, w[n + "k_norm"], c.rms_norm_eps);
    }
    q = Rotate(q, c.rope_theta).transpose(1, 2);
    k = Rotate(k, c.rope_theta).repeat_interleave(nh / nkv, 2).transpose(1, 2);
    v = v.repeat_interleave(nh / nkv, 2).transpose(1, 2);
    const Tensor scores = (at::matmul(q, k.transpose(2, 3)) / std::sqrt(double(d))).masked_fill(mask, -INFINITY);
    const Tensor o = at::matmul(scores.softmax(-1), v).transpose(1, 2).reshape({B * s, nh * d});
    const Tensor h = x + at::matmul(o, w[n + "out"].t());
    const Tensor u = Norm(h, w[n + "norm2"], c.rms_norm_eps);
    if (c.is_dense(l)) {
      x = h + Swiglu(u, w[n + "dense.gate_up"], w[n + "dense.down"]);
      continue;
    }
    const Tensor probs = at::matmul(u, w[n + "router"].t()).softmax(-1);
    auto [top, ids] = probs.topk(K, -1);
    const Tensor gates = c.norm_topk_prob ? top / top.sum(-1, true) : top;
    const Tensor chosen = at::zeros_like(probs).scatter(1, ids, 1.0);
    const Tensor dense_gates = at::zeros_like(probs).scatter(1, ids, gates);
    Tensor y = h;
    for (int64_t e = 0; e < E; ++e) {
      y = y + dense_gates.narrow(1, e, 1) * Swiglu(u, w[n + "experts.gate_up"][e], w[n + "experts.down"][e]);
    }
    if (c.n_shared_experts > 0) y = y + Swiglu(u, w[n + "shared.gate_up"], w[n + "shared.down"]);
    x = y;
    // Groups of tokens: sequences, or all.
    const int64_t groups = c.router_aux_loss == "global" ? 1 : B, size = B * s / groups;
    const Tensor f = chosen.view({groups, size, E}).sum(1) * (double(E) / (K * size));
    const Tensor p = probs.view({groups, size, E}).mean(1);
    if (c.router_aux_loss != "none") aux = aux + c.router_aux_loss_coef * (f * p).sum(-1).mean();
  }
  const Tensor logits = at::matmul(Norm(x, w["final_norm"], c.rms_norm_eps), w["head"].t());
  const Tensor picked = logits.log_softmax(-1).gather(1, tokens.narrow(1, 1, s).reshape({-1, 1}));
  return aux - picked.mean();
}

RunConfig TinyConfig() {
  RunConfig config;
  ModelConfig& m = config.model;
  m.vocab_size = 23;
  m.hidden_size = 24;
  m.num_hidden_layers = 3;
  m.num_attention_heads = 4;
  m.num_key_value_heads = 2;
  m.head_dim = 8;
  m.num_experts = 6;
  m.num_experts_per_tok = 2;
  m.moe_intermediate_size = 20;
  m.intermediate_size = 36;
  m.initializer_range = 0.3;  // far from linear
  m.router_aux_loss_coef = 0.1;
  config.train.seq_length = 17;
  config.train.micro_batch_size = 3;
  config.train.micro_batches = 1;
  return config;
}

Tensor RandomTokens(const RunConfig& c, uint64_t seed) {
  Rng rng(seed);
  Tensor t = at::empty({c.train.micro_batch_size, c.train.seq_length + 1}, at::kLong);
  for (int64_t i = 0; i < t.numel(); ++i) t.data_ptr<int64_t>()[i] = static_cast<int64_t>(rng.Below(c.model.vocab_size));
  return t;
}

struct Case {
  std::string name;
  void (*change)(RunConfig&);
};

class AgainstNaive : public testing::TestWithParam<Case> {};

TEST_P(AgainstNaive, LossAndGradients) {
  RunConfig config = TinyConfig();
  GetParam().change(config);
  Reference model(config, at::kCPU);
  model.store().Initialise(5);
  // Norm weights away from one, so that they matter.
  for (const auto& p : model.store().held()) {
    if (p.spec.norm_weight) model.store().Get(p.spec.name).master.mul_(at::linspace(0.5, 1.5, p.spec.shape[0]));
  }
  model.store().Refresh(0, model.store().numel());
  const Tensor tokens = RandomTokens(config, 7);
  const auto got = model.Run(tokens, true);

  Weights weights;
  std::vector<Tensor> leaves;
  for (const auto& p : model.store().held()) {
    weights[p.spec.name] = model.store().Get(p.spec.name).master.to(at::kDouble).requires_grad_();
    leaves.push_back(weights[p.spec.name]);
  }
  at::AutoGradMode enable(true);
  const Tensor loss = NaiveLoss(config.model, weights, tokens);
  const auto grads = torch::autograd::grad({loss}, leaves);
  const double tokens_in_step = static_cast<double>(config.train.micro_batch_size * config.train.seq_length);
  const bool bf16 = config.train.dtype == "bf16";
  EXPECT_NEAR(got.tokens / tokens_in_step + got.aux, loss.item<double>(), (bf16 ? 2e-2 : 1e-6) * loss.item<double>());
  EXPECT_EQ(got.bad_stage, kAllFinite);
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto& name = model.store().held()[i].spec.name;
    const Tensor mine = model.store().Get(name).grad.to(at::kDouble);
    const double error = (mine - grads[i]).norm().item<double>() / (grads[i].norm().item<double>() + 1e-12);
    EXPECT_LT(error, bf16 ? 0.04 : 1e-5) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, AgainstNaive,
    testing::Values(Case{"plain", [](RunConfig&) {}}, Case{"qk_norm", [](RunConfig& c) { c.model.qk_norm = true; }},
                    Case{"no_renorm", [](RunConfig& c) { c.model.norm_topk_prob = false; }},
                    Case{"global_aux", [](RunConfig& c) { c.model.router_aux_loss = "global"; }},
                    Case{"no_aux", [](RunConfig& c) { c.model.router_aux_loss = "none"; }},
                    Case{"shared_dense",
                         [](RunConfig& c) {
                           c.model.n_shared_experts = 2;
                           c.model.first_k_dense_replace = 1;
                         }},
                    Case{"all_experts", [](RunConfig& c) { c.model.num_experts_per_tok = 6; }},
                    Case{"top1", [](RunConfig& c) { c.model.num_experts_per_tok = 1; }},
                    Case{"mha", [](RunConfig& c) { c.model.num_key_value_heads = 4; }},
                    Case{"recompute",
                         [](RunConfig& c) {
                           c.train.recompute = "layer";
                           c.model.qk_norm = true;
                           c.model.n_shared_experts = 1;
                         }},
                    Case{"bf16",
                         [](RunConfig& c) {
                           c.train.dtype = "bf16";
                           c.model.initializer_range = 0.1;
                           c.model.num_experts_per_tok = 6;  // rounding would change a choice
                         }}),
    [](const auto& info) { return info.param.name; });

// Central differences of the loss along one random direction of each parameter.
TEST(Reference, FiniteDifferences) {
  RunConfig config = TinyConfig();
  config.model.qk_norm = true;
  config.model.n_shared_experts = 1;
  config.model.num_experts_per_tok = 6;  // no jumps of the router's choice
  Reference model(config, at::kCPU);
  model.store().Initialise(11);
  const Tensor tokens = RandomTokens(config, 3);
  const double n = static_cast<double>(config.train.micro_batch_size * config.train.seq_length);
  model.Run(tokens, true);
  auto loss = [&] {  // the auxiliary loss is only valued on the way back
    const Tensor kept = model.store().flat_grad().clone();
    const auto l = model.Run(tokens, true);
    model.store().flat_grad().copy_(kept);
    return l.tokens / n + l.aux;
  };
  for (const auto& held : model.store().held()) {
    const Param& p = model.store().Get(held.spec.name);
    // Along the gradient itself: the largest signal against fp32 rounding.
    const double norm = p.grad.norm().item<double>();
    const Tensor direction = p.grad / norm, before = p.master.clone();
    const double step = std::min(2e-2, 2e-3 / norm);
    p.master.copy_(before + step * direction);
    const double plus = loss();
    p.master.copy_(before - step * direction);
    const double minus = loss();
    p.master.copy_(before);
    EXPECT_NEAR((plus - minus) / (2 * step) / norm, 1, 1e-2) << held.spec.name;
  }
}

TEST(Reference, RecomputeGivesTheSameBits) {
  RunConfig config = TinyConfig();
  const Tensor tokens = RandomTokens(config, 3);
  Tensor grads[2];
  for (int i = 0; i < 2; ++i) {
    config.train.recompute = i == 0 ? "none" : "layer";
    Reference model(config, at::kCPU);
    model.store().Initialise(11);
    model.Run(tokens, true);
    grads[i] = model.store().flat_grad().clone();
  }
  EXPECT_TRUE(at::equal(grads[0], grads[1]));
}

TEST(Reference, FindsTheStageThatBroke) {
  RunConfig config = TinyConfig();
  Reference model(config, at::kCPU);
  model.store().Initialise(11);
  model.store().Get("layers.1.experts.down").master.select(0, 2).fill_(NAN);
  EXPECT_EQ(model.Run(RandomTokens(config, 3), false).bad_stage, 1 + 3);  // stage 3: the experts of layer 1
  model.store().Initialise(11);
  model.store().Get("embed").master.fill_(NAN);
  EXPECT_EQ(model.Run(RandomTokens(config, 3), false).bad_stage, 0);
  model.store().Initialise(11);
  model.store().Get("head").master.fill_(INFINITY);
  EXPECT_EQ(model.Run(RandomTokens(config, 3), false).bad_stage, 1 + 6);
}

TEST(CausalAttention, GenericAgreesWithCpu) {
  at::manual_seed(1);
  const Tensor q = at::randn({2, 33, 6, 16}), k = at::randn({2, 33, 2, 16}), v = at::randn({2, 33, 2, 16}), go = at::randn({2, 33, 6, 16});
  Tensor o = at::empty_like(q), o2 = at::empty_like(q);
  const Tensor lse = CausalAttention(q, k, v, o);
  generic::CausalAttention(q, k, v, o2);
  EXPECT_TRUE(at::allclose(o, o2, 1e-5, 1e-5));
  Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v), dq2 = dq.clone(), dk2 = dk.clone(), dv2 = dv.clone();
  CausalAttentionBackward(go, q, k, v, o, lse, dq, dk, dv);
  generic::CausalAttentionBackward(go, q, k, v, dq2, dk2, dv2);
  EXPECT_TRUE(at::allclose(dq, dq2, 1e-4, 1e-5));
  EXPECT_TRUE(at::allclose(dk, dk2, 1e-4, 1e-5));
  EXPECT_TRUE(at::allclose(dv, dv2, 1e-4, 1e-5));
}

}  // namespace
}  // namespace disagmoe
