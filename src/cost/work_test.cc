#include "cost/work.h"

#include <gtest/gtest.h>

#include "spec/params.h"

namespace disagmoe {
namespace {

// Query i (from 0) of s sees itself and those before it, the last `window` of them.
double CountKeys(int64_t s, int64_t window) {
  int64_t keys = 0;
  for (int64_t query = 0; query < s; ++query) {
    for (int64_t key = 0; key <= query; ++key) keys += window == 0 || query - key < window;
  }
  return static_cast<double>(keys) / static_cast<double>(s);
}

TEST(Work, KeysByCounting) {
  for (int64_t s : {1, 2, 7, 64, 129}) {
    for (int64_t window : {0, 1, 2, 6, 7, 8, 64, 128, 200}) {
      EXPECT_NEAR(MeanKeys(s, window), CountKeys(s, window), 1e-9) << s << ", window " << window;
    }
  }
}

// system.md section 6: 4 H n_h d (1 + 1/g) for the projections, 2 s n_h d for scores and values (there s / 2 keys a
// query; counted exactly, with itself, it is (s + 1) / 2: 2 n_h d FLOPs more), router 2 H E, experts 6 k H De.
TEST(Work, Qwen3ByFormula) {
  const ModelShape m = LoadModelShape("qwen3-235b-a22b");
  const double h = 4096, heads = 64, d = 128, g = 16, experts = 128, k = 8, de = 1536, s = 4096;
  const Work a = AttentionWork(m, 10, 4096, 8);
  EXPECT_DOUBLE_EQ(a.gemm_flops, 4 * h * heads * d * (1 + 1 / g) + 2 * h * experts);
  EXPECT_DOUBLE_EQ(a.attention_flops, 2 * s * heads * d + 2 * heads * d);
  EXPECT_EQ(a.expert_flops, 0);
  // Norms 2 (2 H), RoPE and QK-norm 2 (2 (64 + 4) d), residual 3 H, rows out and back 2 (1 + 8) H, two bytes each.
  EXPECT_DOUBLE_EQ(a.memory_bytes, 2 * (4 * h + 4 * 68 * d + 3 * h + 18 * h));
  EXPECT_DOUBLE_EQ(k * ExpertPairWork(m).expert_flops, 6 * k * h * de);
  EXPECT_EQ(CommonFfnWork(m, 10).gemm_flops, 0);
  EXPECT_DOUBLE_EQ(HeadWork(m).gemm_flops, 2 * h * 151936);
}

// gpt-oss-120b: 64 heads of 64 and 8 KV heads at hidden size 2880, so n_h d is not H; every other layer has a window of
// 128: 128 * 129 / 2 keys for the first 128 queries, then 128 each.
TEST(Work, GptOssByFormula) {
  const ModelShape m = LoadModelShape("gpt-oss-120b");
  const double h = 2880, q = 64 * 64;
  int windows = 0;
  for (int64_t l = 0; l < 36; ++l) {
    const Work a = AttentionWork(m, l, 8192, 4);
    EXPECT_DOUBLE_EQ(a.gemm_flops, 4 * h * q * (1 + 1.0 / 8) + 2 * h * 128);
    const double keys = m.window[l] > 0 ? (128.0 * 129 / 2 + (8192 - 128) * 128.0) / 8192 : 8193 / 2.0;
    EXPECT_DOUBLE_EQ(a.attention_flops, 4 * keys * q);
    windows += m.window[l] == 128;
  }
  EXPECT_EQ(windows, 18);
  EXPECT_DOUBLE_EQ(4 * ExpertPairWork(m).expert_flops, 6.0 * 4 * 2880 * 2880);
}

// DeepSeek-V3 (arXiv 2412.19437, section 4.2): hidden 7168, 128 heads, 128 + 64 dimensions a query, values 128, ranks
// 1536 and 512. Weights of one layer's products:
//   queries down 7168 * 1536, up 1536 * 128 * 192; keys and values down 7168 * (512 + 64), up 512 * 128 * (128 + 128);
//   output 128 * 128 * 7168
TEST(Work, LatentAttentionByHand) {
  const ModelShape m = LoadModelShape("deepseek-v3");
  const double weights = 11010048 + 37748736 + 4128768 + 16777216 + 117440512;
  EXPECT_DOUBLE_EQ(AttentionWork(m, 0, 4096, 1).gemm_flops, 2 * weights);  // a dense layer
  EXPECT_DOUBLE_EQ(AttentionWork(m, 5, 4096, 8).gemm_flops, 2 * weights + 2.0 * 7168 * 256);
  EXPECT_DOUBLE_EQ(AttentionWork(m, 5, 4096, 8).attention_flops, 2 * 2048.5 * 128 * (192 + 128));
  EXPECT_DOUBLE_EQ(CommonFfnWork(m, 0).gemm_flops, 6.0 * 7168 * 18432);
  EXPECT_DOUBLE_EQ(CommonFfnWork(m, 5).gemm_flops, 6.0 * 7168 * 2048);
}

// "250 GFLOPS/token" of DeepSeek-V3 and 155 of DeepSeek-V2 at 4096 tokens (arXiv 2505.09343, table 2).
TEST(Work, DeepseekV3TrainsAsPublished) {
  EXPECT_NEAR(TrainFlopsPerToken(LoadModelShape("deepseek-v3"), 4096) / 1e9, 250, 1.5);
}

// 6 N, N the parameters in a token's products (no embedding, no norm), and beside it attention's
// 3 * 2 * n_h d * (s + 1) a layer.
TEST(Work, SixTimesActiveParametersAndAttention) {
  for (const char* name : {"qwen3-235b-a22b", "qwen3-30b-a3b", "mixtral-8x7b", "olmoe-1b-7b", "deepseek-moe-16b"}) {
    const ModelShape m = LoadModelShape(name);
    for (int64_t s : {4096, 32768}) {
      const int64_t normed = m.qk_norm_all_heads ? m.num_heads + m.num_kv_heads : 2;
      const int64_t qk = m.qk_norm ? normed * m.head_dim : 0;
      const int64_t norms = m.num_layers * (2 * m.hidden_size + qk) + m.hidden_size;
      const int64_t n = m.ActiveParams() - m.EmbeddingParams() - norms;
      const int64_t attention = 6 * m.num_layers * m.num_heads * m.head_dim * (s + 1);
      EXPECT_NEAR(TrainFlopsPerToken(m, s) / static_cast<double>(6 * n + attention), 1, 1e-12) << name;
    }
  }
}

// Megatron-LM (arXiv 2104.04473, equation 3, here without the recomputation that makes 72 to 96):
// 72 B s l h^2 (1 + s / (6 h) + V / (12 l h)) for a dense model of four-fold width, all keys counted. A causal query
// sees (s + 1) / 2 of them; a SwiGLU of width 8 h / 3 has the products of a plain MLP of width 4 h.
TEST(Work, MegatronsFormula) {
  ModelShape m;
  m.vocab_size = 51200;
  m.hidden_size = 3072;
  m.num_layers = 30;
  m.num_heads = m.num_kv_heads = 32;
  m.head_dim = m.value_dim = 96;
  m.window.assign(30, 0);
  m.dense.assign(30, true);
  m.dense_hidden = 8192;
  const double h = 3072, l = 30, s = 2048, v = 51200;
  const double expected = 72 * l * h * h * (1 + (s + 1) / 2 / (6 * h) + v / (12 * l * h));
  EXPECT_NEAR(TrainFlopsPerToken(m, 2048) / expected, 1, 1e-12);
}

// The count that the runtime's log goes by.
TEST(Work, AgreesWithTheRuntime) {
  ModelConfig c;
  c.vocab_size = 1000;
  c.hidden_size = 96;
  c.num_hidden_layers = 5;
  c.num_attention_heads = 6;
  c.num_key_value_heads = 3;
  c.head_dim = 20;
  c.num_experts = 12;
  c.num_experts_per_tok = 3;
  c.moe_intermediate_size = 44;
  c.n_shared_experts = 2;
  c.first_k_dense_replace = 2;
  c.intermediate_size = 160;
  TrainConfig t;
  t.seq_length = 333;
  t.micro_batch_size = 2;
  t.micro_batches = 7;
  const double tokens = 333 * 2 * 7;
  EXPECT_NEAR(StepFlops(c, t) / (tokens * TrainFlopsPerToken(ShapeOf(c, "x"), 333)), 1, 1e-12);
}

// Qwen3 at 4096: printed (4096 (2 + 2/16) + 4 * 4096) / (2 * 8) = 1568 and 2 * 1536. Exact, a row for each of the
// 8 experts, 8 * 4096 * 2 = 65536 bytes: attention 142606336 + 1048576 + 2 * 4097 * 8192 = 210780160 FLOPs, experts
// 6 * 8 * 4096 * 1536 = 301989888, which is 3 De a byte. With half the rows both are twice that.
TEST(Work, Intensities) {
  const ModelShape m = LoadModelShape("qwen3-235b-a22b");
  EXPECT_DOUBLE_EQ(PrintedIntensities(m, 4096).attention, 1568);
  EXPECT_DOUBLE_EQ(PrintedIntensities(m, 4096).ffn, 3072);
  EXPECT_DOUBLE_EQ(ExactIntensities(m, 10, 4096, 8).attention, 210780160.0 / 65536);
  EXPECT_DOUBLE_EQ(ExactIntensities(m, 10, 4096, 8).ffn, 4608);
  EXPECT_DOUBLE_EQ(ExactIntensities(m, 10, 4096, 4).ffn, 9216);
  EXPECT_DOUBLE_EQ(ExactIntensities(m, 10, 4096, 4).attention, 210780160.0 / 32768);
}

// A peak of 1000 FLOPs and memory of 100 bytes a nanosecond:
//   forward   attention 900 / (1000 * 0.9) = 1, GEMM 1600 / 800 = 2, memory 240 / (100 * 0.8) = 3,
//             experts 2400 / (1000 * 0.6 * 100 / (100 + 50)) = 6
//   input gradient   attention 2.5 * 900 / (1000 * 0.5) = 4.5, 2, 6, memory twice
//   weight gradient  2, 6
TEST(Work, TimesByHand) {
  ClusterSpec c;
  c.gpu.peak_tflops = 1;
  c.gpu.memory_gbytes_s = 100;
  c.efficiency.attention_forward = 0.9;
  c.efficiency.attention_backward = 0.5;
  c.efficiency.gemm = 0.8;
  c.efficiency.grouped_gemm = 0.6;
  c.efficiency.grouped_gemm_half_rows = 50;
  c.efficiency.memory = 0.8;
  const Work w{900, 1600, 2400, 240};
  EXPECT_DOUBLE_EQ(TimeNs(w, {.forward = true}, c, 100), 12);
  EXPECT_DOUBLE_EQ(TimeNs(w, {.input_gradient = true}, c, 100), 18.5);
  EXPECT_DOUBLE_EQ(TimeNs(w, {.weight_gradient = true}, c, 100), 8);
  EXPECT_DOUBLE_EQ(TimeNs(w, {.input_gradient = true, .weight_gradient = true}, c, 100), 26.5);
  EXPECT_DOUBLE_EQ(TimeNs({0, 0, 0, 0}, {.forward = true}, c, 0), 0);
  EXPECT_DOUBLE_EQ(TimeNs(FfnRecomputeWork({0, 1200, 900, 240}), {.forward = true}, c, 100), 1 + 1.5 + 3);
}

}  // namespace
}  // namespace disagmoe
