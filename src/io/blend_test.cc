#include "io/blend.h"

#include <algorithm>
#include <cmath>

#include "base/rng.h"
#include "io/test_util.h"

namespace disagmoe {
namespace {

// The derivation is in blend.h: half the sum of the reciprocals of Fibonacci's numbers, rounded up.
constexpr double kBound = 1.68;

std::vector<int64_t> RandomWeights(Rng& rng, size_t datasets, bool steep) {
  std::vector<int64_t> weights;
  for (size_t i = 0; i < datasets; ++i) {
    weights.push_back(1 + static_cast<int64_t>(rng.Below(steep ? uint64_t{1} << rng.Below(40) : 1000000)));
  }
  return weights;
}

std::vector<std::vector<int64_t>> Cases() {
  Rng rng(11);
  std::vector<std::vector<int64_t>> cases = {
      {1}, {1, 1}, {700000, 300000}, {1, 2, 3}, {1, 1, 1, 1, 1, 1, 1}, {980000, 10000, 10000}, {1, 999999},
      {1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144},  // the deepest tree
  };
  for (size_t datasets : {3, 5, 10, 64, 200}) {
    for (bool steep : {false, true}) cases.push_back(RandomWeights(rng, datasets, steep));
  }
  return cases;
}

// The largest distance of a data set's count from its share in the first n samples, over n and data sets, of what next(n)
// picks; next sees the counts so far.
template <typename Next>
double LargestDeviation(const std::vector<int64_t>& weights, int64_t samples, Next next) {
  double total = 0, worst = 0;
  for (int64_t w : weights) total += static_cast<double>(w);
  std::vector<int64_t> counts(weights.size());
  for (int64_t n = 0; n < samples; ++n) {
    ++counts[next(n, counts)];
    for (size_t i = 0; i < weights.size(); ++i) {
      const double share = static_cast<double>(n + 1) * static_cast<double>(weights[i]) / total;
      worst = std::max(worst, std::abs(static_cast<double>(counts[i]) - share));
    }
  }
  return worst;
}

// Megatron's rule: always the data set that is furthest behind its share.
size_t Greedy(const std::vector<int64_t>& weights, int64_t n, const std::vector<int64_t>& counts) {
  double total = 0, most = -1e300;
  for (int64_t w : weights) total += static_cast<double>(w);
  size_t next = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const double behind = static_cast<double>(std::max<int64_t>(n, 1)) * static_cast<double>(weights[i]) / total - static_cast<double>(counts[i]);
    if (behind > most) most = behind, next = i;
  }
  return next;
}

TEST(Blend, CountsStayNearTheirSharesAsMegatronsDo) {
  double ours_worst = 0, theirs_worst = 0;
  for (const auto& weights : Cases()) {
    const Blend blend(weights);
    const int64_t samples = weights.size() > 20 ? 4000 : 20000;
    const double ours = LargestDeviation(weights, samples, [&](int64_t n, const std::vector<int64_t>& counts) {
      const Blend::Place place = blend.Find(n);
      EXPECT_EQ(place.sample, counts[place.dataset]) << n;  // each data set's samples in order, none left out
      return place.dataset;
    });
    const double theirs = LargestDeviation(weights, samples, [&](int64_t n, const std::vector<int64_t>& counts) {
      return Greedy(weights, n, counts);
    });
    EXPECT_LT(ours, kBound) << weights.size();
    ours_worst = std::max(ours_worst, ours);
    theirs_worst = std::max(theirs_worst, theirs);
  }
  RecordProperty("ours", std::to_string(ours_worst));
  RecordProperty("megatron", std::to_string(theirs_worst));
  std::printf("largest deviation from a share: %.3f, of Megatron's rule %.3f\n", ours_worst, theirs_worst);
  EXPECT_LT(ours_worst, theirs_worst + 0.68);
}

// By hand: of two data sets with shares 1/4 and 3/4 the first n samples have floor(n/4 + 1/2) of the first.
TEST(Blend, TwoDataSetsByHand) {
  const Blend blend({1, 3});
  std::string order;
  for (int64_t n = 0; n < 12; ++n) order += static_cast<char>('a' + blend.Find(n).dataset);
  EXPECT_EQ(order, "babbbabbbabb");
}

TEST(Blend, OnlyTheRatiosOfWeightsCount) {
  Rng rng(5);
  for (size_t datasets : {2, 3, 7}) {
    std::vector<int64_t> weights;
    for (size_t i = 0; i < datasets; ++i) weights.push_back(1 + static_cast<int64_t>(rng.Below(9)));
    for (int64_t factor : {2, 3, 1000000}) {
      std::vector<int64_t> scaled = weights;
      for (int64_t& w : scaled) w *= factor;
      const Blend a(weights), b(scaled);
      for (int64_t n = 0; n < 3000; ++n) {
        ASSERT_EQ(a.Find(n).dataset, b.Find(n).dataset) << n;
        ASSERT_EQ(a.Find(n).sample, b.Find(n).sample) << n;
      }
    }
  }
}

// Far out, and with the largest weights: nothing overflows, and neighbours are still consecutive.
TEST(Blend, FarOutItIsExactToo) {
  const std::vector<int64_t> weights = {999999999999999, 1, 500000000000001, 999999999999998};
  const Blend blend(weights);
  const int64_t far = int64_t{1} << 60;
  std::vector<int64_t> next(weights.size(), -1);
  double total = 0;
  for (int64_t w : weights) total += static_cast<double>(w);
  for (int64_t n = far; n < far + 1000; ++n) {
    const Blend::Place place = blend.Find(n);
    const double share = static_cast<double>(n) * (static_cast<double>(weights[place.dataset]) / total);
    EXPECT_NEAR(static_cast<double>(place.sample), share, 1e-13 * static_cast<double>(n));  // what doubles can tell
    if (next[place.dataset] >= 0) {
      EXPECT_EQ(place.sample, next[place.dataset]);
    }
    next[place.dataset] = place.sample + 1;
  }
}

TEST(Blend, Parses) {
  const auto entries = ParseBlend({"0.7 data/a", "  12.25\tb "});
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[0].weight, 700000);
  EXPECT_EQ(entries[0].prefix, "data/a");
  EXPECT_EQ(entries[1].weight, 12250000);
  EXPECT_EQ(entries[1].prefix, "b");
  const auto flat = ParseBlend({"0.7 data/a 0.3 data/b"});
  ASSERT_EQ(flat.size(), 2u);
  EXPECT_EQ(flat[1].weight, 300000);
  EXPECT_EQ(flat[1].prefix, "data/b");

  const std::pair<std::vector<std::string>, const char*> bad[] = {
      {{}, "got nothing"},
      {{" "}, "got nothing"},
      {{"data/a 0.7"}, "got \"data/a\", expected weights"},
      {{"0.7 a", "b"}, "got \"b\", expected weights"},
      {{"0.7"}, "got \"0.7\" at the end of \"0.7\""},
      {{"-1 a"}, "got \"-1\""},
      {{"1e3 a"}, "got \"1e3\""},
      {{"0.1234567 a"}, "got \"0.1234567\""},
      {{"1 a", "0 b"}, "weight 0 of b"},
      {std::vector<std::string>(3000, "999999999 a"), "too large"},
  };
  for (const auto& [blend, part] : bad) {
    const std::string error = ErrorOf([&] { ParseBlend(blend); });
    EXPECT_NE(error.find("wrong blend of data sets (data.blend)"), std::string::npos) << error;
    EXPECT_NE(error.find(part), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace disagmoe
