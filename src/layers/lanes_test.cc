#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "layers/lanes_math.h"

namespace disagmoe::cpu {
namespace {

using c10::BFloat16;

std::vector<float> Apply(const std::vector<float>& x, Lanes (*f)(Lanes)) {
  std::vector<float> y(x.size());
  ForLanes(static_cast<int64_t>(x.size()),
           [&](int64_t i, auto span) { Store(y.data() + i, f(Load(x.data() + i, span)), span); });
  return y;
}

TEST(Lanes, ExpIsAccurateOverItsRange) {
  std::vector<float> x;
  for (double v = -87.3; v < 88; v += 0.00137) x.push_back(static_cast<float>(v));
  const std::vector<float> y = Apply(x, Exp);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = std::exp(static_cast<double>(x[i]));
    worst = std::max(worst, std::abs(y[i] - expected) / expected);
  }
  EXPECT_LT(worst, 3e-7);
}

TEST(Lanes, ExpAtTheEnds) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> y = Apply({-inf, -1000, -88, 0, 100, inf, NAN}, Exp);
  EXPECT_EQ(y[0], 0);
  EXPECT_EQ(y[1], 0);
  EXPECT_EQ(y[2], 0);
  EXPECT_EQ(y[3], 1);
  EXPECT_NEAR(y[4] / std::exp(88.0), 1, 1e-6);
  EXPECT_NEAR(y[5] / std::exp(88.0), 1, 1e-6);
  EXPECT_TRUE(std::isnan(y[6]));
}

TEST(Lanes, SigmoidIsAccurate) {
  std::vector<float> x = {-1000, -100, 100, 1000, NAN};
  for (double v = -80; v < 80; v += 0.013) x.push_back(static_cast<float>(v));
  const std::vector<float> y = Apply(x, Sigmoid);
  EXPECT_NEAR(y[0], 0, 1e-37);
  EXPECT_NEAR(y[1], 0, 1e-37);
  EXPECT_EQ(y[2], 1);
  EXPECT_EQ(y[3], 1);
  EXPECT_TRUE(std::isnan(y[4]));
  for (size_t i = 5; i < x.size(); ++i) {
    const double expected = 1 / (1 + std::exp(-static_cast<double>(x[i])));
    ASSERT_NEAR(y[i] / expected, 1, 5e-7) << x[i];
  }
}

TEST(Lanes, Bf16RoundsToNearestEven) {
  // Units of the last place are 1/128 at 1: 1 + 1/256 is half way and goes down to even, 1 + 3/256 up.
  std::vector<float> x = {1.0f + 1.0f / 256, 1.0f + 3.0f / 256, -1.0f - 3.0f / 256, 1.0f + 1.0f / 255, 3.4e38f, -0.0f};
  const std::vector<float> expected = {1.0f, 1.0f + 2.0f / 128, -1.0f - 2.0f / 128, 1.0f + 1.0f / 128, INFINITY, -0.0f};
  std::mt19937 random(3);
  for (int i = 0; i < 10000; ++i) x.push_back(std::ldexp(static_cast<float>(random()) - 2e9f, i % 150 - 100));
  x.push_back(NAN);
  std::vector<BFloat16> y(x.size());
  ForLanes(static_cast<int64_t>(x.size()),
           [&](int64_t i, auto span) { Store(y.data() + i, Load(x.data() + i, span), span); });
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(static_cast<float>(y[i]), expected[i]) << i;
  for (size_t i = 0; i + 1 < x.size(); ++i) ASSERT_EQ(y[i].x, BFloat16(x[i]).x) << x[i];
  EXPECT_TRUE(std::isnan(static_cast<float>(y.back())));
}

TEST(Lanes, SumsAndMaximaOfEveryLength) {
  for (int64_t n = 0; n <= 5 * kLanes; ++n) {
    std::vector<BFloat16> x;
    for (int64_t i = 0; i < n; ++i) x.push_back(BFloat16(static_cast<float>(i + 1)));
    x.push_back(BFloat16(1e6f));  // beyond the row: must not be read into the sum
    const float sum = SumLanes(n, [&](int64_t i, auto span) { return Load(x.data() + i, span); });
    EXPECT_EQ(sum, static_cast<float>(n * (n + 1) / 2)) << n;
  }
  for (int64_t at = 0; at < kLanes; ++at) {
    Lanes v = Splat(-3);
    v[at] = 5;
    EXPECT_EQ(Max(v), 5);
    EXPECT_EQ(Sum(v), 5 - 3.0f * (kLanes - 1));
  }
}

TEST(Lanes, StoresOfAPartStayInside) {
  for (int64_t n = 1; n < kLanes; ++n) {
    std::vector<float> f(kLanes + 1, 7.0f);
    std::vector<BFloat16> b(kLanes + 1, BFloat16(7.0f));
    Store(f.data(), Splat(1), Part{n});
    Store(b.data(), Splat(1), Part{n});
    for (int64_t i = 0; i <= kLanes; ++i) {
      EXPECT_EQ(f[i], i < n ? 1 : 7);
      EXPECT_EQ(static_cast<float>(b[i]), i < n ? 1 : 7);
    }
  }
}

}  // namespace
}  // namespace disagmoe::cpu
