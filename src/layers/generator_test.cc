// One token at a time, with cached keys and values, gives the logits of the whole forward at every position.
#include "layers/generator.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "base/rng.h"
#include "layers/layers_for_tests.h"
#include "layers/reference.h"

namespace disagmoe {
namespace {

struct Case {
  std::string name;
  void (*change)(ModelConfig&);
};

RunConfig Tiny() {
  RunConfig config;
  ModelConfig& m = config.model;
  m.vocab_size = 23;
  m.hidden_size = 24;
  m.num_hidden_layers = 3;
  m.head_dim = 8;
  m.num_experts = 6;
  m.moe_intermediate_size = 20;
  m.initializer_range = 0.3;
  config.train.seq_length = 30;
  return config;
}

void Latent(ModelConfig& m) {
  m.kv_lora_rank = 12;
  m.qk_nope_head_dim = 10;
  m.qk_rope_head_dim = 6;
  m.v_head_dim = 8;
}

class Generators : public testing::TestWithParam<Case> {};

TEST_P(Generators, EveryStepIsTheWholeForward) {
  at::set_num_threads(1);
  RunConfig config = Tiny();
  GetParam().change(config.model);
  Generator generator(config, at::kCPU);
  Reference whole(config, at::kCPU);
  RandomWeights(generator.store(), 5);
  RandomWeights(whole.store(), 5);
  Rng rng(2);
  std::vector<int64_t> tokens;
  for (int i = 0; i < 30; ++i) tokens.push_back(static_cast<int64_t>(rng.Below(23)));
  const auto expect = [&](const Tensor& logits, int64_t n) {
    const Tensor want = whole.LastLogits(at::tensor(std::vector<int64_t>(tokens.begin(), tokens.begin() + n)).view({1, n}));
    EXPECT_LT((logits - want).abs().max().item<double>(), 1e-5 * std::max(1.0, want.abs().max().item<double>())) << n;
  };
  // Prompts shorter and longer than the window of 4; the second forgets the first.
  for (int64_t prompt : {11, 2}) {
    expect(generator.Prefill({tokens.begin(), tokens.begin() + prompt}), prompt);
    for (int64_t n = prompt + 1; n <= 30; ++n) expect(generator.Step(tokens[n - 1]), n);
    EXPECT_EQ(generator.length(), 30);
    EXPECT_THROW(generator.Step(0), InternalError);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, Generators,
    testing::Values(Case{"grouped", [](ModelConfig&) {}}, Case{"qk_norm", [](ModelConfig& m) { m.qk_norm = true; }},
                    Case{"norm_of_all_heads_tied",
                         [](ModelConfig& m) { m.qk_norm = m.qk_norm_all_heads = m.tie_word_embeddings = true; }},
                    Case{"windows_sinks_biases_yarn",
                         [](ModelConfig& m) {
                           m.attention_bias = m.output_bias = m.attention_sinks = true;
                           m.sliding_window = 4;
                           m.layer_types = {"sliding_attention", "full_attention", "sliding_attention"};
                           m.rope_type = "yarn";
                           m.rope_factor = 4;
                           m.rope_original_length = 64;
                           m.rope_attention_factor = 1.14;
                         }},
                    Case{"latent",
                         [](ModelConfig& m) {
                           Latent(m);
                           m.attention_scale_factor = 1.3;
                         }},
                    Case{"latent_narrow_queries_dense_first",
                         [](ModelConfig& m) {
                           Latent(m);
                           m.q_lora_rank = 14;
                           m.first_k_dense_replace = 1;
                         }}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace disagmoe
