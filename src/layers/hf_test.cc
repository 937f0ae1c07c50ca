// The one-process model against Hugging Face transformers: tiny random models that scripts/make_hf_fixtures.py ran in
// fp64 and wrote to testdata/ (docs/formats.md). Weights and gradients there have the names of published checkpoints.
//
// E experts, K a token, b sequences of s tokens, V vocabulary.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "layers/optimizer.h"
#include "layers/reference.h"

namespace disagmoe {
namespace {

using Json = nlohmann::json;

// The arrays whose rows, one below the other, make our parameter `name` (without "layers.l.").
std::vector<std::string> PublishedParts(const std::string& name, int64_t experts, bool mixtral) {
  if (name == "norm1") return {"input_layernorm"};
  if (name == "norm2") return {"post_attention_layernorm"};
  if (name == "qkv") return {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"};
  if (name == "q_norm" || name == "k_norm") return {"self_attn." + name};
  if (name == "out") return {"self_attn.o_proj"};
  if (name == "dense.gate_up") return {"mlp.gate_proj", "mlp.up_proj"};
  if (name == "dense.down") return {"mlp.down_proj"};
  const std::string moe = mixtral ? "block_sparse_moe." : "mlp.";
  if (name == "router") return {moe + "gate"};
  std::vector<std::string> parts;
  for (int64_t e = 0; e < experts; ++e) {
    const std::string expert = moe + "experts." + std::to_string(e) + ".";
    if (name == "experts.gate_up") {
      parts.push_back(expert + (mixtral ? "w1" : "gate_proj"));
      parts.push_back(expert + (mixtral ? "w3" : "up_proj"));
    } else {
      EXPECT_EQ(name, "experts.down");
      parts.push_back(expert + (mixtral ? "w2" : "down_proj"));
    }
  }
  return parts;
}

std::vector<std::string> PublishedNames(const std::string& name, int64_t experts, bool mixtral) {
  if (name == "embed") return {"model.embed_tokens.weight"};
  if (name == "final_norm") return {"model.norm.weight"};
  if (name == "head") return {"lm_head.weight"};
  const size_t dot = name.find('.', std::strlen("layers."));
  auto parts = PublishedParts(name.substr(dot + 1), experts, mixtral);
  for (auto& part : parts) part = "model." + name.substr(0, dot + 1) + part + ".weight";
  return parts;
}

RunConfig ConfigOf(const Json& hf, const Json& adam) {
  RunConfig config;
  ModelConfig& m = config.model;
  const bool mixtral = hf.at("model_type") == "mixtral";
  m.vocab_size = hf.at("vocab_size");
  m.hidden_size = hf.at("hidden_size");
  m.num_hidden_layers = hf.at("num_hidden_layers");
  m.num_attention_heads = hf.at("num_attention_heads");
  m.num_key_value_heads = hf.at("num_key_value_heads");
  m.head_dim = hf.at("head_dim").is_null() ? m.hidden_size / m.num_attention_heads : hf.at("head_dim").get<int64_t>();
  m.qk_norm = !mixtral;
  m.rope_theta = hf.at("rope_parameters").at("rope_theta");
  m.rms_norm_eps = hf.at("rms_norm_eps");
  m.num_experts = hf.at("num_local_experts");
  m.num_experts_per_tok = hf.at("num_experts_per_tok");
  m.intermediate_size = hf.at("intermediate_size");
  m.moe_intermediate_size = mixtral ? m.intermediate_size : hf.at("moe_intermediate_size").get<int64_t>();
  m.norm_topk_prob = mixtral || hf.at("norm_topk_prob").get<bool>();
  m.first_k_dense_replace = mixtral ? 0 : static_cast<int64_t>(hf.at("mlp_only_layers").size());
  // With one layer, theirs is K times ours: E / n sum_e c_e mean p_e.
  const double aux = hf.at("router_aux_loss_coef");
  m.router_aux_loss = aux == 0 ? "none" : "global";
  m.router_aux_loss_coef = aux * static_cast<double>(m.num_experts_per_tok);
  TrainConfig& t = config.train;
  t.micro_batches = 1;
  t.adam_beta1 = adam.at("betas").at(0);
  t.adam_beta2 = adam.at("betas").at(1);
  t.adam_eps = adam.at("eps");
  t.weight_decay = adam.at("weight_decay");
  t.clip_grad = adam.at("clip_grad");
  return config;
}

double RelativeError(const Tensor& got, const Tensor& want) {
  return (got.to(at::kDouble) - want.to(at::kDouble)).norm().item<double>() / want.to(at::kDouble).norm().item<double>();
}

class AgainstTransformers : public testing::TestWithParam<const char*> {
 protected:
  AgainstTransformers()
      : file_(std::string(DISAGMOE_TESTDATA "/hf_") + GetParam() + ".safetensors"),
        facts_(Json::parse(file_.metadata().at("facts"))),
        config_(ConfigOf(facts_.at("config"), facts_.at("adam"))),
        tokens_(Load("tokens")) {
    at::set_num_threads(1);  // several would mostly wait for each other
    config_.train.micro_batch_size = tokens_.size(0);
    config_.train.seq_length = tokens_.size(1) - 1;
    model_ = std::make_unique<Reference>(config_, at::kCPU);
    for (const auto& held : model_->store().held()) {
      model_->store().Get(held.spec.name).master.copy_(Load("weights", held.spec));
    }
    model_->store().Refresh(0, model_->store().numel());
  }

  Tensor Load(const std::string& name) {
    const NamedArray& array = file_.Find(name);
    const std::map<std::string, at::ScalarType> types = {{"F32", at::kFloat}, {"I32", at::kInt}, {"I64", at::kLong}};
    Tensor t = at::empty(array.shape, types.at(array.dtype));
    EXPECT_EQ(t.nbytes(), array.bytes) << name;
    std::memcpy(t.data_ptr(), array.data, array.bytes);
    used_.insert(name);
    return t;
  }

  // One of our parameters, put together from the arrays of `group`.
  Tensor Load(const std::string& group, const ParamSpec& spec) {
    std::vector<Tensor> parts;
    const bool mixtral = facts_.at("config").at("model_type") == "mixtral";
    for (const auto& name : PublishedNames(spec.name, config_.model.num_experts, mixtral)) {
      parts.push_back(Load(group + "." + name).flatten());
    }
    return at::cat(parts).view(spec.shape);
  }

  // Gradients of the weights as they are; the loss with the auxiliary one.
  double Loss() {
    model_->store().ZeroGrad();
    const auto losses = model_->Run(tokens_, true);
    EXPECT_EQ(losses.bad_stage, -1);
    aux_ = losses.aux;
    return losses.tokens / static_cast<double>(config_.train.micro_batch_size * config_.train.seq_length) + losses.aux;
  }

  double GradNorm() { return std::sqrt(SumOfSquares(model_->store().flat_grad())); }

  // `group` holds some parameters after steps: how far is our change of them from theirs?
  double ErrorOfChange(const std::string& group, const std::string& ours, const std::string& theirs) {
    const Tensor before = Load("weights." + theirs);
    return RelativeError(model_->store().Get(ours).master - before, Load(group + "." + theirs) - before);
  }

  SafetensorsFile file_;
  Json facts_;
  RunConfig config_;
  std::set<std::string> used_;
  Tensor tokens_;  // [b, s + 1]
  std::unique_ptr<Reference> model_;
  double aux_ = 0;
};

// The sizes of errors, for --gtest_output.
void Record(const std::string& name, double value) {
  testing::Test::RecordProperty(name, std::to_string(value * 1e9) + "e-9");
}

TEST_P(AgainstTransformers, LossAndGradients) {
  const Json& expected = facts_.at("expected");
  const double loss = expected.at("loss"), norm = expected.at("grad_norms").at(0);
  const double got = Loss(), coefficient = facts_.at("config").at("router_aux_loss_coef");
  EXPECT_NEAR(got, loss, 1e-5);
  EXPECT_NEAR(aux_, coefficient * expected.at("aux_loss").get<double>(), 1e-6);
  EXPECT_NEAR(GradNorm() / norm, 1, 1e-5);
  double largest = 0;
  for (const auto& held : model_->store().held()) {
    const double error = RelativeError(model_->store().Get(held.spec.name).grad, Load("gradients", held.spec));
    EXPECT_LT(error, 5e-5) << held.spec.name;
    largest = std::max(largest, error);
  }
  Record("loss", std::abs(got - loss));
  Record("grad_norm", std::abs(GradNorm() / norm - 1));
  Record("gradient", largest);
  // Nothing of theirs was left out.
  for (const auto& array : file_.arrays()) {
    if (array.name.starts_with("weights.") || array.name.starts_with("gradients.")) {
      EXPECT_TRUE(used_.contains(array.name)) << array.name;
    }
  }
}

// Each position as the last of its prefix, so a look ahead would show too.
TEST_P(AgainstTransformers, Logits) {
  const Tensor logits = Load("logits");  // [b, s, V]
  ASSERT_EQ(logits.size(1), config_.train.seq_length);
  double largest = 0;
  for (int64_t i = 0; i < logits.size(0); ++i) {
    for (int64_t t = 0; t < logits.size(1); ++t) {
      const Tensor got = model_->LastLogits(tokens_.narrow(0, i, 1).narrow(1, 0, t + 1).contiguous());
      const double error = (got - logits[i][t]).abs().max().item<double>();
      ASSERT_LT(error, 1e-4) << "sequence " << i << ", position " << t;
      largest = std::max(largest, error);
    }
  }
  Record("logits", largest);
}

TEST_P(AgainstTransformers, RouterChoices) {
  const ModelConfig& m = config_.model;
  const int64_t s = config_.train.seq_length, T = tokens_.size(0) * s;
  const Rotary rotary(m, s, at::kCPU);
  Tensor x = at::empty({T, m.hidden_size});
  EmbedForward(model_->store().Get("embed"), tokens_.narrow(1, 0, s).reshape({T}), x);
  for (int64_t l = 0; l < m.num_hidden_layers; ++l) {
    AttentionSaved attention;
    FfnSaved ffn;
    const auto a = AttentionForward(m, AttentionParams(model_->store(), m, l, rotary), x, attention);
    if (!m.is_dense(l)) {
      EXPECT_TRUE(at::equal(a.ids, Load("choice." + std::to_string(l)))) << "layer " << l;
    }
    x = at::empty_like(x);
    FfnForward(m, FfnParams(model_->store(), m, l), a.h, AllPairs(a.ids, a.gates, T), ffn, x);
  }
}

TEST_P(AgainstTransformers, ClippedAdamWSteps) {
  const Json& expected = facts_.at("expected");
  ParamStore& store = model_->store();
  AdamW adam(store, {{0, store.numel()}}, config_.train);
  const int64_t steps = facts_.at("adam").at("steps");
  double worst_loss = 0, worst_norm = 0;
  Loss();
  for (int64_t step = 1; step <= steps; ++step) {
    const double norm = GradNorm(), want_norm = expected.at("grad_norms").at(step - 1),
                 want_loss = expected.at("losses_after").at(step - 1);
    EXPECT_NEAR(norm / want_norm, 1, 2e-5) << "step " << step;
    adam.Step(step, facts_.at("adam").at("lr"), ClipCoefficient(config_.train.clip_grad, norm));
    if (step == 1) {
      EXPECT_LT(ErrorOfChange("one_step", "head", "lm_head.weight"), 5e-5);
      EXPECT_LT(ErrorOfChange("one_step", "final_norm", "model.norm.weight"), 5e-5);
      Record("head_one_step", ErrorOfChange("one_step", "head", "lm_head.weight"));
    }
    const double loss = Loss();
    EXPECT_NEAR(loss, want_loss, 1e-5) << "after step " << step;
    worst_loss = std::max(worst_loss, std::abs(loss - want_loss));
    worst_norm = std::max(worst_norm, std::abs(norm / want_norm - 1));
  }
  EXPECT_LT(ErrorOfChange("all_steps", "head", "lm_head.weight"), 5e-5);
  EXPECT_LT(ErrorOfChange("all_steps", "final_norm", "model.norm.weight"), 5e-5);
  Record("head_all_steps", ErrorOfChange("all_steps", "head", "lm_head.weight"));
  Record("norm_all_steps", ErrorOfChange("all_steps", "final_norm", "model.norm.weight"));
  Record("step_loss", worst_loss);
  Record("step_grad_norm", worst_norm);
}

INSTANTIATE_TEST_SUITE_P(Models, AgainstTransformers,
                         testing::Values("qwen3_moe_renormalised", "qwen3_moe_plain_dense_first", "mixtral",
                                         "qwen3_moe_aux_one_layer"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace disagmoe
