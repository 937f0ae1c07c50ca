// The one-process model against Hugging Face transformers: tiny random models that scripts/make_hf_fixtures.py ran in
// fp64 and wrote to testdata/hf/CASE (docs/formats.md). Weights and gradients there have the names of published checkpoints.
//
// E experts, K a token, b sequences of s tokens, V vocabulary.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "layers/optimizer.h"
#include "layers/reference.h"
#include "spec/hf_config.h"
#include "spec/hf_tensors.h"

namespace disagmoe {
namespace {

using Json = nlohmann::json;

std::string ReadText(const std::string& path) {
  std::ifstream in(path);
  EXPECT_TRUE(in.good()) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}

Tensor TensorOf(const NamedArray& array) {
  const std::map<std::string, at::ScalarType> types = {{"F32", at::kFloat}, {"BF16", at::kBFloat16}, {"F16", at::kHalf},
                                                       {"I32", at::kInt},   {"I64", at::kLong}};
  Tensor t = at::empty(array.shape, types.at(array.dtype));
  EXPECT_EQ(t.nbytes(), array.bytes) << array.name;
  std::memcpy(t.data_ptr(), array.data, array.bytes);
  return t;
}

// All of the safetensors files in `folder` with "model" in front, in fp32.
std::map<std::string, Tensor> ReadModel(const std::string& folder) {
  std::map<std::string, Tensor> tensors;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors" || !entry.path().filename().string().starts_with("model")) continue;
    const SafetensorsFile file(entry.path().string());
    for (const auto& array : file.arrays()) {
      EXPECT_TRUE(tensors.emplace(array.name, TensorOf(array).to(at::kFloat)).second) << array.name;
    }
  }
  return tensors;
}

RunConfig ConfigOf(const std::string& folder, const Json& adam) {
  const std::string text = ReadText(folder + "/config.json");
  RunConfig config;
  config.model = ReadHfModel(text, folder + "/config.json").model;
  // Only one case has the auxiliary loss, with one layer, where theirs is K times ours: E / n sum_e c_e mean p_e.
  const Json hf = Json::parse(text);
  if (hf.value("output_router_logits", false)) {
    config.model.router_aux_loss = "global";
    config.model.router_aux_loss_coef = hf.at("router_aux_loss_coef").get<double>() * static_cast<double>(config.model.num_experts_per_tok);
  } else {
    config.model.router_aux_loss = "none";
  }
  config.model.router_bias_update_rate = 0;  // theirs is not trained
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
      : folder_(std::string(DISAGMOE_TESTDATA "/hf/") + GetParam()),
        file_(folder_ + "/expected.safetensors"),
        facts_(Json::parse(file_.metadata().at("facts"))),
        config_(ConfigOf(folder_, facts_.at("adam"))),
        tokens_(Load("tokens")) {
    at::set_num_threads(1);  // several would mostly wait for each other
    config_.train.micro_batch_size = tokens_.size(0);
    config_.train.seq_length = tokens_.size(1) - 1;
    model_ = std::make_unique<Reference>(config_, at::kCPU);
    const auto weights = ReadModel(folder_);
    std::set<std::string> used;
    for (const auto& held : model_->store().held()) {
      Assemble(held.spec, model_->store().Get(held.spec.name).master, [&](const std::string& name) {
        used.insert(name);
        return weights.at(name);
      });
    }
    EXPECT_EQ(used.size(), weights.size()) << "nothing of theirs is left out";
    model_->store().Refresh(0, model_->store().numel());
  }

  // One of our parameters, put together from the published tensors that `get` knows by name.
  void Assemble(const ParamSpec& spec, Tensor out, const std::function<Tensor(const std::string&)>& get) {
    const int64_t experts = spec.per_expert ? spec.shape[0] : 1, each = out.numel() / experts;
    for (int64_t e = 0; e < experts; ++e) {
      for (const HfPiece& piece : HfPieces(config_.model, spec, e)) {
        const Tensor part = get(piece.tensor).as_strided({piece.rows, piece.columns}, {piece.row_stride, piece.column_stride}, piece.begin);
        out.flatten().narrow(0, e * each + piece.offset, piece.rows * piece.columns).copy_(part.flatten());
      }
    }
  }

  Tensor Load(const std::string& name) { return TensorOf(file_.Find(name)); }

  // The same of one group of expected values. The router's correction has no gradient there.
  Tensor Load(const std::string& group, const ParamSpec& spec) {
    Tensor out = at::empty(spec.shape);
    Assemble(spec, out, [&](const std::string& name) {
      used_.insert(group + "." + name);
      return Load(group + "." + name);
    });
    return out;
  }

  // Gradients of the weights as they are; the loss with the auxiliary one.
  double Loss() {
    model_->store().ZeroGrad();
    const auto losses = model_->Run(tokens_, true);
    EXPECT_EQ(losses.bad_stage, -1);
    aux_ = losses.aux;
    return losses.tokens / static_cast<double>(config_.train.micro_batch_size * config_.train.seq_length) + losses.aux;
  }

  double GradNorm() { return std::sqrt(GradSquares(model_->store(), {0, model_->store().numel()})); }

  std::string folder_;
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
  const double loss = expected.at("loss"), norm = expected.at("grad_norms").at(0), got = Loss();
  EXPECT_NEAR(got, loss, 1e-5);
  if (config_.model.router_aux_loss != "none") {
    const double coefficient = config_.model.router_aux_loss_coef / static_cast<double>(config_.model.num_experts_per_tok);
    EXPECT_NEAR(aux_, coefficient * expected.at("aux_loss").get<double>(), 1e-6);
  }
  EXPECT_NEAR(GradNorm() / norm, 1, 1e-5);
  double largest = 0;
  for (const auto& held : model_->store().held()) {
    if (held.spec.counts_load) continue;
    const double error = RelativeError(model_->store().Get(held.spec.name).grad, Load("gradients", held.spec));
    EXPECT_LT(error, 5e-5) << held.spec.name;
    largest = std::max(largest, error);
  }
  Record("loss", std::abs(got - loss));
  Record("grad_norm", std::abs(GradNorm() / norm - 1));
  Record("gradient", largest);
  for (const auto& array : file_.arrays()) {  // nothing of theirs was left out
    EXPECT_TRUE(!array.name.starts_with("gradients.") || used_.contains(array.name)) << array.name;
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
      const Tensor ids = a.ids.gather(1, std::get<1>(a.gates.sort(1, /*descending=*/true)));  // theirs are in this order
      EXPECT_TRUE(at::equal(ids, Load("choice." + std::to_string(l)))) << "layer " << l;
    }
    x = at::empty_like(x);
    FfnForward(m, FfnParams(model_->store(), m, l), a.h, AllPairs(a.ids, a.gates, T), ffn, x);
  }
}

TEST_P(AgainstTransformers, ClippedAdamWSteps) {
  const Json& expected = facts_.at("expected");
  ParamStore& store = model_->store();
  AdamW adam(store, {{0, store.numel()}}, config_.train, &config_.model);
  const int64_t steps = facts_.at("adam").at("steps");
  // gpt_oss (gradient norm 26, clamps) magnifies rounding: weights that differ by 6e-8 give, after three steps, losses that
  // differ by up to 3e-4 and norms by up to 3e-3.
  const bool steep = config_.model.model_type == "gpt_oss";
  double worst_loss = 0, worst_norm = 0, worst_change = 0;
  const Tensor before = store.flat_master().clone();
  Loss();
  for (int64_t step = 1; step <= steps; ++step) {
    const double norm = GradNorm(), want_norm = expected.at("grad_norms").at(step - 1),
                 want_loss = expected.at("losses_after").at(step - 1);
    EXPECT_NEAR(norm / want_norm, 1, steep && step > 1 ? 1e-2 : 2e-5) << "step " << step;
    adam.Step(step, facts_.at("adam").at("lr"), ClipCoefficient(config_.train.clip_grad, norm));
    for (size_t i = 0; step == 1 && i < store.held().size(); ++i) {
      const ParamSpec& spec = store.held()[i].spec;
      if (spec.counts_load) continue;
      const Tensor old = before.narrow(0, store.offset(i), store.held()[i].numel()).view(spec.shape);
      const double error = RelativeError(store.Get(spec.name).master - old, Load("one_step", spec) - old);
      EXPECT_LT(error, 1e-4) << spec.name;
      worst_change = std::max(worst_change, error);
    }
    const double loss = Loss();
    EXPECT_NEAR(loss, want_loss, steep ? 1e-3 : 1e-5) << "after step " << step;
    worst_loss = std::max(worst_loss, std::abs(loss - want_loss));
    worst_norm = std::max(worst_norm, std::abs(norm / want_norm - 1));
  }
  Record("one_step", worst_change);
  Record("step_loss", worst_loss);
  Record("step_grad_norm", worst_norm);
}

INSTANTIATE_TEST_SUITE_P(Models, AgainstTransformers,
                         testing::Values("qwen3_moe", "qwen3_moe_dense_middle", "qwen3_moe_aux_one_layer", "qwen3_moe_tied",
                                         "qwen2_moe", "gpt_oss", "deepseek", "deepseek_v2_lite", "deepseek_v2",
                                         "deepseek_v3", "mixtral", "mixtral_window", "olmoe"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace disagmoe
