// Which token is drawn, and what a generator is given.
#include "runtime/generate.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

namespace disagmoe {
namespace {

// Shares of 20,000 draws from probabilities 0.1, 0.4, 0.3, 0.2.
std::map<int64_t, double> Shares(const Sampling& sampling) {
  const Tensor logits = at::tensor({0.1, 0.4, 0.3, 0.2}).log().to(at::kFloat);
  Rng rng(3);
  std::map<int64_t, double> shares;
  for (int i = 0; i < 20000; ++i) shares[Sample(logits, sampling, rng)] += 1.0 / 20000;
  return shares;
}

void ExpectShares(const Sampling& sampling, const std::map<int64_t, double>& expected) {
  const auto got = Shares(sampling);
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [token, share] : expected) EXPECT_NEAR(got.at(token), share, 0.015) << token;  // four deviations
}

TEST(Sample, FollowsTheDistribution) {
  ExpectShares({.temperature = 1}, {{0, 0.1}, {1, 0.4}, {2, 0.3}, {3, 0.2}});
  // p^2 / sum p^2, with sum 0.3.
  ExpectShares({.temperature = 0.5}, {{0, 0.1 / 3}, {1, 1.6 / 3}, {2, 0.9 / 3}, {3, 0.4 / 3}});
  ExpectShares({.temperature = 0}, {{1, 1}});
}

TEST(Sample, OfTheMostLikely) {
  ExpectShares({.temperature = 1, .top_k = 2}, {{1, 4.0 / 7}, {2, 3.0 / 7}});
  ExpectShares({.temperature = 1, .top_k = 9}, {{0, 0.1}, {1, 0.4}, {2, 0.3}, {3, 0.2}});
  ExpectShares({.temperature = 1, .top_p = 0.5}, {{1, 4.0 / 7}, {2, 3.0 / 7}});  // 0.4 is less than 0.5, 0.7 is not
  ExpectShares({.temperature = 1, .top_p = 0.3}, {{1, 1}});
  ExpectShares({.temperature = 1, .top_k = 3, .top_p = 0.85}, {{1, 4.0 / 9}, {2, 3.0 / 9}, {3, 2.0 / 9}});
}

RunConfig Tiny() {
  at::set_num_threads(1);  // two would mostly wait for each other
  RunConfig config;
  config.model.vocab_size = 19;
  config.model.hidden_size = 24;
  config.model.head_dim = 8;
  config.model.initializer_range = 0.3;
  config.train.seq_length = 10;
  return config;
}

// Greedy: every token is the most likely one after what the generator has read, also when it was full.
TEST(GenerateTokens, GoesOnWhenTheGeneratorIsFull) {
  Generator generator(Tiny(), at::kCPU), check(Tiny(), at::kCPU);
  generator.store().Initialise(5);
  check.store().Initialise(5);
  std::vector<int64_t> text = {1, 2, 3}, seen;
  const auto got = GenerateTokens(generator, text, 25, -1, {.temperature = 0}, [&](int64_t t) { seen.push_back(t); });
  EXPECT_EQ(got, seen);
  ASSERT_EQ(got.size(), 25u);
  int64_t first = 0;  // of what has been read
  for (int64_t next : got) {
    if (std::ssize(text) - first > 10) first = std::ssize(text) - 5;
    EXPECT_EQ(check.Prefill({text.begin() + first, text.end()}).argmax().item<int64_t>(), next);
    text.push_back(next);
  }
}

TEST(GenerateTokens, StopsAtTheEnd) {
  Generator generator(Tiny(), at::kCPU);
  generator.store().Initialise(5);
  const auto all = GenerateTokens(generator, {4}, 8, -1, {.temperature = 0});
  const auto some = GenerateTokens(generator, {4}, 8, all[2], {.temperature = 0});
  EXPECT_EQ(some.back(), all[2]);
  EXPECT_LE(some.size(), 3u);
  EXPECT_TRUE(GenerateTokens(generator, {4}, 0, -1, {}).empty());
  // A prompt longer than there is room for: its end.
  EXPECT_EQ(GenerateTokens(generator, std::vector<int64_t>(30, 7), 1, -1, {.temperature = 0}),
            GenerateTokens(generator, std::vector<int64_t>(10, 7), 1, -1, {.temperature = 0}));
}

}  // namespace
}  // namespace disagmoe
