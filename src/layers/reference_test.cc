// The one-process model against a slow, obvious one: fp64, autograd, an s x s attention matrix, every expert on every
// token. Also finite differences, bf16 and recomputation.
#include "layers/reference.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <map>

#include "base/rng.h"
#include "layers/layers_for_tests.h"
#include "layers/rotary.h"

namespace disagmoe {
namespace {

using Weights = std::map<std::string, Tensor>;

Tensor Norm(const Tensor& x, const Tensor& w, double eps) {
  return x * (x.square().mean(-1, true) + eps).rsqrt() * w;
}

// x [B, s, n, d]: complex rotation of pairs (i, i + d/2) by position * frequency; rotary_test is about frequencies.
Tensor Rotate(const ModelConfig& c, const Tensor& x) {
  const int64_t s = x.size(1), half = x.size(3) / 2;
  const Tensor angle = at::outer(at::arange(s, at::kDouble), at::tensor(RopeFrequencies(c), at::kDouble)).view({1, s, 1, half});
  const Tensor cos = angle.cos() * c.rope_attention_factor, sin = angle.sin() * c.rope_attention_factor;
  const auto part = x.chunk(2, -1);
  return at::cat({part[0] * cos - part[1] * sin, part[1] * cos + part[0] * sin}, -1);
}

struct Heads {
  Tensor q, k, v;  // [B, s, n, width]
};

Heads PlainHeads(const ModelConfig& c, Weights& w, const std::string& n, const Tensor& x, int64_t B, int64_t s) {
  const int64_t nh = c.num_attention_heads, nkv = c.num_key_value_heads, d = c.head_dim;
  Tensor qkv = at::matmul(x, w[n + "qkv"].t());
  if (c.attention_bias) qkv = qkv + w[n + "qkv_bias"];
  Tensor q = qkv.narrow(1, 0, nh * d), k = qkv.narrow(1, nh * d, nkv * d);
  if (c.qk_norm_all_heads) {
    q = Norm(q, w[n + "q_norm"], c.rms_norm_eps);
    k = Norm(k, w[n + "k_norm"], c.rms_norm_eps);
  }
  q = q.reshape({B, s, nh, d});
  k = k.reshape({B, s, nkv, d});
  if (c.qk_norm && !c.qk_norm_all_heads) {
    q = Norm(q, w[n + "q_norm"], c.rms_norm_eps);
    k = Norm(k, w[n + "k_norm"], c.rms_norm_eps);
  }
  return {Rotate(c, q), Rotate(c, k), qkv.narrow(1, (nh + nkv) * d, nkv * d).reshape({B, s, nkv, d})};
}

Heads LatentHeads(const ModelConfig& c, Weights& w, const std::string& n, const Tensor& x, int64_t B, int64_t s) {
  const int64_t nh = c.num_attention_heads, dn = c.qk_nope_head_dim, dr = c.qk_rope_head_dim, rk = c.kv_lora_rank;
  const Tensor narrow_q = c.q_lora_rank == 0 ? x : Norm(at::matmul(x, w[n + "q_a"].t()), w[n + "q_a_norm"], 1e-6);
  const Tensor q = at::matmul(narrow_q, w[n + (c.q_lora_rank == 0 ? "q" : "q_b")].t()).view({B, s, nh, dn + dr});
  const Tensor kv_a = at::matmul(x, w[n + "kv_a"].t());
  const Tensor latent = Norm(kv_a.narrow(1, 0, rk), w[n + "kv_a_norm"], 1e-6);
  const Tensor kv = at::matmul(latent, w[n + "kv_b"].t()).view({B, s, nh, dn + c.v_head_dim});
  const Tensor k_rope = Rotate(c, kv_a.narrow(1, rk, dr).reshape({B, s, 1, dr})).expand({B, s, nh, dr});
  return {at::cat({q.narrow(3, 0, dn), Rotate(c, q.narrow(3, dn, dr))}, 3), at::cat({kv.narrow(3, 0, dn), k_rope}, 3),
          kv.narrow(3, dn, c.v_head_dim)};
}

// Of x = norm1(rows) [B s, H], without the residual.
Tensor NaiveAttention(const ModelConfig& c, Weights& w, int64_t layer, const Tensor& x, int64_t B, int64_t s) {
  const std::string n = "layers." + std::to_string(layer) + ".";
  const int64_t nh = c.num_attention_heads, group = nh / c.kv_heads();
  const Heads heads = c.latent() ? LatentHeads(c, w, n, x, B, s) : PlainHeads(c, w, n, x, B, s);
  const Tensor q = heads.q.transpose(1, 2), k = heads.k.repeat_interleave(group, 2).transpose(1, 2),
               v = heads.v.repeat_interleave(group, 2).transpose(1, 2);
  const Tensor distance = at::arange(s).view({s, 1}) - at::arange(s).view({1, s});
  Tensor hidden = distance.lt(0);
  if (c.window(layer) > 0) hidden = hidden.logical_or(distance.ge(c.window(layer)));
  const double scale = c.attention_scale_factor / std::sqrt(static_cast<double>(c.qk_dim()));
  Tensor scores = (at::matmul(q, k.transpose(2, 3)) * scale).masked_fill(hidden, -INFINITY);
  if (c.attention_sinks) scores = at::cat({scores, w[n + "sinks"].view({1, nh, 1, 1}).expand({B, nh, s, 1})}, 3);
  const Tensor o = at::matmul(scores.softmax(-1).narrow(3, 0, s), v).transpose(1, 2).reshape({B * s, nh * c.value_dim()});
  const Tensor y = at::matmul(o, w[n + "out"].t());
  return c.output_bias ? y + w[n + "out_bias"] : y;
}

Tensor Swiglu(const Tensor& x, const Tensor& gate_up, const Tensor& down) {
  const auto gu = at::matmul(x, gate_up.t()).chunk(2, -1);
  return at::matmul(at::silu(gu[0]) * gu[1], down.t());
}

// Mean token loss plus the auxiliary loss, of tokens [B, s + 1].
Tensor NaiveLoss(const ModelConfig& c, Weights& w, const Tensor& tokens) {
  const int64_t B = tokens.size(0), s = tokens.size(1) - 1, E = c.num_experts, K = c.num_experts_per_tok;
  Tensor x = w["embed"].index_select(0, tokens.narrow(1, 0, s).reshape({-1})), aux = at::zeros({}, at::kDouble);
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    const std::string n = "layers." + std::to_string(l) + ".";
    const Tensor h = x + NaiveAttention(c, w, l, Norm(x, w[n + "norm1"], c.rms_norm_eps), B, s);
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
  const Tensor logits = at::matmul(Norm(x, w["final_norm"], c.rms_norm_eps), w[c.tie_word_embeddings ? "embed" : "head"].t());
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

// Biases, sinks, alternating windows, YaRN.
void GptOssAttention(RunConfig& c) {
  ModelConfig& m = c.model;
  m.attention_bias = m.output_bias = m.attention_sinks = true;
  m.sliding_window = 5;
  m.layer_types = {"sliding_attention", "full_attention", "sliding_attention"};
  m.rope_type = "yarn";
  m.rope_factor = 4;
  m.rope_original_length = 64;
  m.rope_truncate = false;
  m.rope_attention_factor = 1.14;
}

void Latent(RunConfig& c) {
  ModelConfig& m = c.model;
  m.kv_lora_rank = 12;
  m.qk_nope_head_dim = 10;
  m.qk_rope_head_dim = 6;
  m.v_head_dim = 8;
  m.rope_type = "yarn";
  m.rope_factor = 4;
  m.rope_original_length = 64;
  m.attention_scale_factor = 1.3;
}

void LatentNarrowQueries(RunConfig& c) {
  Latent(c);
  c.model.q_lora_rank = 14;
  c.model.v_head_dim = 20;  // wider than queries
}

class AgainstNaive : public testing::TestWithParam<Case> {};

TEST_P(AgainstNaive, LossAndGradients) {
  RunConfig config = TinyConfig();
  GetParam().change(config);
  Reference model(config, at::kCPU);
  RandomWeights(model.store(), 5);
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
                    Case{"norm_of_all_heads", [](RunConfig& c) { c.model.qk_norm = c.model.qk_norm_all_heads = true; }},
                    Case{"tied", [](RunConfig& c) { c.model.tie_word_embeddings = true; }},
                    Case{"gpt_oss_attention", GptOssAttention},
                    Case{"window_everywhere", [](RunConfig& c) { c.model.sliding_window = 4; }},
                    Case{"linear_rope",
                         [](RunConfig& c) {
                           c.model.rope_type = "linear";
                           c.model.rope_factor = 3;
                         }},
                    Case{"latent", Latent},
                    Case{"latent_narrow_queries", LatentNarrowQueries},
                    Case{"latent_recompute",
                         [](RunConfig& c) {
                           LatentNarrowQueries(c);
                           c.train.recompute = "layer";
                         }},
                    Case{"latent_bf16",
                         [](RunConfig& c) {
                           LatentNarrowQueries(c);
                           c.train.dtype = "bf16";
                           c.model.initializer_range = 0.1;
                           c.model.num_experts_per_tok = 6;
                         }},
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

}  // namespace
}  // namespace disagmoe
