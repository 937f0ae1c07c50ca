// Angles of rope types. Expected: what transformers 5.24.0's ROPE_INIT_FUNCTIONS return for these configurations.
#include "layers/rotary.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

namespace disagmoe {
namespace {

ModelConfig Yarn(int64_t d, double theta, double factor, double fast, double slow, int64_t length, bool truncate) {
  ModelConfig m;
  m.head_dim = d;
  m.rope_theta = theta;
  m.rope_type = "yarn";
  m.rope_factor = factor;
  m.rope_beta_fast = fast;
  m.rope_beta_slow = slow;
  m.rope_original_length = length;
  m.rope_truncate = truncate;
  return m;
}

void ExpectFrequencies(const ModelConfig& m, const std::vector<double>& expected) {
  const auto got = RopeFrequencies(m);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 2e-6 * expected[i]) << i;  // theirs are fp32
}

TEST(RopeFrequencies, OfGptOss) {
  ExpectFrequencies(Yarn(16, 150000, 32, 32, 1, 4096, false),
                    {1.0, 0.225418001, 0.0508132726, 0.00679495931, 0.000456483918, 1.8188337e-05, 4.09997847e-06,
                     9.24208962e-07});
}

TEST(RopeFrequencies, OfYarnWithWholeEnds) {
  ExpectFrequencies(Yarn(16, 150000, 32, 32, 1, 4096, true),
                    {1.0, 0.225418001, 0.0508132726, 0.00775546534, 0.000914454344, 1.8188337e-05, 4.09997847e-06,
                     9.24208962e-07});
  ExpectFrequencies(Yarn(16, 10000, 40, 32, 1, 4096, true),
                    {1.0, 0.316227764, 0.100000001, 0.0239147246, 0.00512499968, 0.000849862176, 2.49999994e-05,
                     7.90569447e-06});
}

// Both ends at or below pair 0: only that one stays.
TEST(RopeFrequencies, OfShortOriginals) {
  ExpectFrequencies(Yarn(8, 10000, 4, 8, 2, 32, true), {1.0, 0.0250000004, 0.00249999994, 0.000250000012});
  ExpectFrequencies(Yarn(8, 10000, 4, 8, 8, 16, true), {1.0, 0.0250000004, 0.00249999994, 0.000250000012});
}

TEST(RopeFrequencies, OfLinearAndDefault) {
  ModelConfig m = Yarn(8, 10000, 4, 32, 1, 0, true);
  m.rope_type = "linear";
  ExpectFrequencies(m, {0.25, 0.0250000004, 0.00249999994, 0.000250000012});
  m.rope_type = "default";
  ExpectFrequencies(m, {1, 0.1, 0.01, 0.001});
}

TEST(Rotary, IsAsWideAsTheRotatedPartAndScaled) {
  ModelConfig m = Yarn(64, 10000, 4, 8, 2, 32, true);
  m.kv_lora_rank = 4;
  m.qk_nope_head_dim = 10;
  m.qk_rope_head_dim = 8;
  m.rope_attention_factor = 1.138629436111989;
  const Rotary r(m, 7, at::kCPU);
  ASSERT_EQ(r.cos.sizes(), (at::IntArrayRef{7, 4}));
  EXPECT_FLOAT_EQ(r.cos[6][1].item<float>(), 1.138629436111989 * std::cos(6 * 0.025));
  EXPECT_FLOAT_EQ(r.sin[6][0].item<float>(), 1.138629436111989 * std::sin(6.0));
}

}  // namespace
}  // namespace disagmoe
