#include "plan/lengths.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "base/error.h"
#include "base/rng.h"

namespace disagmoe {
namespace {

TEST(Lengths, SharesAreNormalisedAndSorted) {
  const Lengths l = ParseLengths("32k:2, 4k:5,8192:1,8k:2");
  ASSERT_EQ(l.buckets.size(), 3u);
  EXPECT_EQ(l.buckets[0].tokens, 4096);
  EXPECT_EQ(l.buckets[2].tokens, 32768);
  EXPECT_DOUBLE_EQ(l.buckets[0].share, 0.5);
  EXPECT_DOUBLE_EQ(l.buckets[1].share, 0.3);
  EXPECT_EQ(l.longest, 32768);
  // By hand: 0.5 * 4 + 0.3 * 8 + 0.2 * 32 = 10.8 k; 8 + 19.2 + 204.8 = 232 k^2.
  EXPECT_DOUBLE_EQ(l.Mean(), 10.8 * 1024);
  EXPECT_DOUBLE_EQ(l.MeanSquare(), 232.0 * 1024 * 1024);
  // Steps of equal tokens: 6.4 of 10.8 tokens are in sequences of 32k.
  EXPECT_NEAR(l.StepShare(2), 6.4 / 10.8, 1e-12);
  EXPECT_NEAR(l.StepShare(0) + l.StepShare(1) + l.StepShare(2), 1, 1e-12);
}

TEST(Lengths, WithoutWeightsAllCountAlike) {
  const Lengths l = ParseLengths("4k,8k");
  EXPECT_DOUBLE_EQ(l.buckets[1].share, 0.5);
}

void ExpectRefused(const std::function<void()>& fn, const std::string& word) {
  try {
    fn();
    ADD_FAILURE() << "not refused: " << word;
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
  }
}

TEST(Lengths, WhatIsWrongIsSaid) {
  for (const char* text :
       {"", "4k:", "4k:x", "4k:-1", "4k:0.5,8k", "4k:nan", "4k:inf", "0:1", "4q:1", "17000000k:1", ","}) {
    EXPECT_THROW(ParseLengths(text), Error) << text;
  }
  ExpectRefused([] { ParseLengths("4k:0,8k:0"); }, "share nothing out");
  ExpectRefused([] { ParseLengths("1,2,3,4,5,6,7,8,9"); }, "too many lengths");
  ExpectRefused([] { ReadLengths("128\n\nx7\n", "f.txt"); }, "f.txt:3");
  ExpectRefused([] { ReadLengths("128\n0\n", "f.txt"); }, "f.txt:2");
  ExpectRefused([] { ReadLengths("[1, 2", "f.json"); }, "JSON");
  ExpectRefused([] { ReadLengths("[1, \"2\"]", "f.json"); }, "number");
  ExpectRefused([] { ReadLengths("[1.5]", "f.json"); }, "1.5");
  ExpectRefused([] { ReadLengths("# nothing\n", "f.txt"); }, "no lengths");
  ExpectRefused([] { LoadLengths("/no/such/file.txt"); }, "no such file");
  for (const char* text : {"", "4k", "4k:0", "4k:1.5", "4k:-3", "x:3", "4k:3,"}) {
    EXPECT_THROW(ParsePhases(text), Error) << text;
  }
}

TEST(Lengths, FilesOfBothForms) {
  const Lengths lines = ReadLengths("# rollouts\n100\n 300\r\n\n100\n", "f");
  const Lengths array = ReadLengths(" [100, 300, 100]\n", "f");
  for (const Lengths& l : {lines, array}) {
    ASSERT_EQ(l.buckets.size(), 2u);
    EXPECT_EQ(l.recorded, 3);
    EXPECT_EQ(l.buckets[0].tokens, 100);
    EXPECT_NEAR(l.buckets[0].share, 2.0 / 3, 1e-12);
    EXPECT_NEAR(l.square_error, 0, 1e-12);
  }
  const std::string path = testing::TempDir() + "/lengths_test.txt";
  std::ofstream(path) << "512\n2048\n";
  EXPECT_EQ(LoadLengths(path).longest, 2048);
}

// The loss of every way to cut, one by one.
double LeastLoss(const std::vector<int64_t>& sorted, size_t first, int buckets) {
  const auto loss = [&](size_t i, size_t j) {
    double mean = 0, out = 0;
    for (size_t k = i; k < j; ++k) mean += static_cast<double>(sorted[k]) / static_cast<double>(j - i);
    for (size_t k = i; k < j; ++k) out += std::pow(static_cast<double>(sorted[k]) - mean, 2);
    return out;
  };
  if (buckets == 1) return loss(first, sorted.size());
  double best = 1e300;
  for (size_t cut = first + 1; cut + static_cast<size_t>(buckets) - 1 <= sorted.size(); ++cut) {
    best = std::min(best, loss(first, cut) + LeastLoss(sorted, cut, buckets - 1));
  }
  return best;
}

TEST(Lengths, BucketsLoseLeast) {
  Rng random(7);
  for (int round = 0; round < 30; ++round) {
    std::vector<int64_t> all;
    const int count = 4 + static_cast<int>(random.Below(9));
    for (int i = 0; i < count; ++i) all.push_back(int64_t{1000} * (1 + static_cast<int64_t>(random.Below(40))));
    std::sort(all.begin(), all.end());
    const int buckets = 2 + static_cast<int>(random.Below(3));
    const Lengths l = BucketsOf(all, buckets);
    double sum = 0, square = 0;
    for (int64_t s : all) sum += static_cast<double>(s), square += std::pow(static_cast<double>(s), 2);
    EXPECT_NEAR(l.Mean() * count / sum, 1, 1e-3);  // of means rounded to a token
    const double lost = l.square_error * square;
    EXPECT_NEAR(lost, LeastLoss(all, 0, buckets), 2e-3 * square) << round;
    EXPECT_EQ(l.longest, all.back());
  }
}

TEST(Lengths, ThousandsAreQuick) {
  Rng random(3);
  std::vector<int64_t> all;
  double sum = 0, square = 0;
  for (int i = 0; i < 50000; ++i) {
    all.push_back(1 + static_cast<int64_t>(std::exp(5 + 6 * random.Uniform())));
    sum += static_cast<double>(all.back()), square += std::pow(static_cast<double>(all.back()), 2);
  }
  const Lengths l = BucketsOf(all);
  ASSERT_EQ(l.buckets.size(), 8u);
  EXPECT_NEAR(l.Mean() / (sum / 50000), 1, 1e-3);
  EXPECT_GT(l.square_error, 0);
  EXPECT_LT(l.square_error, 0.02);
  EXPECT_NEAR(l.MeanSquare() / (square / 50000), 1 - l.square_error, 1e-9);
}

// Attention of packed sequences goes by E[s^2] / E[s].
TEST(Lengths, AsDocuments) {
  const Lengths l = ParseLengths("32k:2,4k:5,8k:3");
  EXPECT_NEAR(MeanKeys(Sequence(65536, DocumentsOf(l)), 0), (l.MeanSquare() / l.Mean() + 1) / 2, 1e-6);
}

TEST(Phases, InOrder) {
  const std::vector<Phase> phases = ParsePhases("4k:2000, 16k:500,4k:10");
  EXPECT_EQ(phases, (std::vector<Phase>{{4096, 2000}, {16384, 500}, {4096, 10}}));
}

}  // namespace
}  // namespace disagmoe
