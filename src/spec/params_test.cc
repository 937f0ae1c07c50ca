#include "spec/params.h"

#include <gtest/gtest.h>

namespace disagmoe {
namespace {

int64_t Count(const std::vector<ParamSpec>& table) {
  int64_t n = 0;
  for (const auto& p : table) {
    int64_t k = 1;
    for (auto s : p.shape) k *= s;
    n += k;
  }
  return n;
}

// Qwen3-30B-A3B as published (config.json; 30.5 B parameters in all): 30,532,122,624.
TEST(Params, CountOfQwen3_30B) {
  ModelConfig c;
  c.vocab_size = 151936;
  c.hidden_size = 2048;
  c.num_hidden_layers = 48;
  c.num_attention_heads = 32;
  c.num_key_value_heads = 4;
  c.head_dim = 128;
  c.qk_norm = true;
  c.num_experts = 128;
  c.num_experts_per_tok = 8;
  c.moe_intermediate_size = 768;
  EXPECT_EQ(Count(ParamTable(c)), 30532122624);
}

// By hand: V=10, H=4, one dense layer of D=6 and one MoE layer of E=3, De=5, two shared experts; nh=2, nkv=1, d=2.
TEST(Params, CountByHand) {
  ModelConfig c;
  c.vocab_size = 10;
  c.hidden_size = 4;
  c.num_hidden_layers = 2;
  c.num_attention_heads = 2;
  c.num_key_value_heads = 1;
  c.head_dim = 2;
  c.num_experts = 3;
  c.num_experts_per_tok = 1;
  c.moe_intermediate_size = 5;
  c.n_shared_experts = 2;
  c.first_k_dense_replace = 1;
  c.intermediate_size = 6;
  const int64_t attention = 4 + 8 * 4 + 4 * 4 + 4;        // norm1, qkv, out, norm2
  const int64_t dense = 3 * 4 * 6;
  const int64_t moe = 3 * 4 + 3 * (3 * 4 * 5) + 3 * 4 * 10;  // router, experts, shared
  EXPECT_EQ(Count(ParamTable(c)), 10 * 4 + 2 * attention + dense + moe + 4 + 10 * 4);
}

// Forward FLOPs of one token by hand: H=4, q=4, kv=2, s=3: projections 2*4*(8+4)=96, attention 4*4*2=32.
TEST(Params, StepFlops) {
  ModelConfig c;
  c.vocab_size = 10;
  c.hidden_size = 4;
  c.num_hidden_layers = 1;
  c.num_attention_heads = 2;
  c.num_key_value_heads = 1;
  c.head_dim = 2;
  c.num_experts = 3;
  c.num_experts_per_tok = 2;
  c.moe_intermediate_size = 5;
  TrainConfig t;
  t.seq_length = 3;
  t.micro_batch_size = 2;
  t.micro_batches = 5;
  EXPECT_DOUBLE_EQ(StepFlops(c, t), 3.0 * 30 * (80 + 96 + 32 + 24 + 240));
}

}  // namespace
}  // namespace disagmoe
