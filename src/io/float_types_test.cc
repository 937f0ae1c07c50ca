// The formats' definitions, in double arithmetic from the bit fields, against the conversions; rounding against a search
// for the nearest of all values that the format has.
#include "io/float_types.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/rng.h"

namespace disagmoe {
namespace {

struct Format {
  int exponent_bits, mantissa_bits;
  bool infinities;  // the largest exponent is kept for infinity and NaN
};

constexpr Format kF16Format = {5, 10, true}, kBF16Format = {8, 7, true}, kE4M3Format = {4, 3, false}, kE2M1Format = {2, 1, false};

// NaN for all patterns of an exponent that is kept, but infinity for mantissa 0.
double ByDefinition(const Format& f, uint32_t pattern) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const uint32_t mantissa = pattern & ((1u << f.mantissa_bits) - 1);
  const int exponent = static_cast<int>(pattern >> f.mantissa_bits) & ((1 << f.exponent_bits) - 1);
  const double sign = pattern >> (f.exponent_bits + f.mantissa_bits) & 1 ? -1 : 1;
  if (f.infinities && exponent == (1 << f.exponent_bits) - 1) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
  }
  const double fraction = std::ldexp(mantissa, -f.mantissa_bits);
  return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias));
}

void ExpectSame(float got, double expected, uint32_t pattern) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(got)) << pattern;
  } else {
    EXPECT_EQ(static_cast<double>(got), expected) << pattern;
    EXPECT_EQ(std::signbit(got), std::signbit(expected)) << pattern;
  }
}

TEST(FloatTypes, EveryPatternOf16Bits) {
  for (uint32_t pattern = 0; pattern < 65536; ++pattern) {
    const uint16_t bits = static_cast<uint16_t>(pattern);
    ExpectSame(FromF16(bits), ByDefinition(kF16Format, pattern), pattern);
    ExpectSame(FromBF16(bits), ByDefinition(kBF16Format, pattern), pattern);
    ASSERT_EQ(ToF16(FromF16(bits)), bits);
    ASSERT_EQ(ToBF16(FromBF16(bits)), bits);
  }
}

TEST(FloatTypes, EveryPatternOf8And4Bits) {
  for (uint32_t pattern = 0; pattern < 256; ++pattern) {
    const bool nan = (pattern & 127) == 127;
    ExpectSame(FromE4M3(static_cast<uint8_t>(pattern)), nan ? std::nan("") : ByDefinition(kE4M3Format, pattern), pattern);
    const double power = pattern == 255 ? std::nan("") : std::ldexp(1.0, static_cast<int>(pattern) - 127);
    ExpectSame(FromE8M0(static_cast<uint8_t>(pattern)), power, pattern);
    ExpectSame(FromE2M1(static_cast<uint8_t>(pattern)), ByDefinition(kE2M1Format, pattern & 15), pattern);
  }
  EXPECT_EQ(FromE4M3(0x7e), 448.f);  // the largest, as published
}

// The pattern of the value of the format that is nearest, ties to the even pattern.
class SlowRounding {
 public:
  explicit SlowRounding(const Format& format) : format_(format) {
    const uint32_t infinity = ((1u << format.exponent_bits) - 1) << format.mantissa_bits;
    for (uint32_t pattern = 0; pattern < infinity; ++pattern) values_.push_back(ByDefinition(format, pattern));
    // Infinity stands for the next number that would be there: from half way on it is nearer.
    values_.push_back(2 * values_.back() - values_[values_.size() - 2]);
  }

  uint16_t operator()(float value) const {
    const uint32_t sign = std::signbit(value) ? 1u << (format_.exponent_bits + format_.mantissa_bits) : 0;
    const double magnitude = std::fabs(static_cast<double>(value));
    const size_t last = values_.size() - 1;
    const size_t above = static_cast<size_t>(std::lower_bound(values_.begin(), values_.end(), magnitude) - values_.begin());
    if (above > last) return static_cast<uint16_t>(sign | last);
    if (values_[above] == magnitude) return static_cast<uint16_t>(sign | above);
    const double to_above = values_[above] - magnitude, to_below = magnitude - values_[above - 1];
    const bool up = to_above < to_below || (to_above == to_below && above % 2 == 0);
    return static_cast<uint16_t>(sign | (up ? above : above - 1));
  }

  const std::vector<double>& values() const { return values_; }

 private:
  Format format_;
  std::vector<double> values_;  // by pattern, sign 0
};

// Every value, every middle between two, and their neighbours; then any floats.
std::vector<float> HardValues(const SlowRounding& slow) {
  std::vector<float> values;
  const auto add = [&](double v) {
    const float f = static_cast<float>(v), inf = std::numeric_limits<float>::infinity();
    for (float g : {f, std::nextafter(f, inf), std::nextafter(f, -inf)}) values.insert(values.end(), {g, -g});
  };
  for (size_t i = 0; i + 1 < slow.values().size(); ++i) {
    add(slow.values()[i]);
    add((slow.values()[i] + slow.values()[i + 1]) / 2);
  }
  Rng rng(11);
  for (int i = 0; i < 200000; ++i) {
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(rng.Next())));
    values.push_back(static_cast<float>(std::ldexp(rng.Uniform(), static_cast<int>(rng.Below(45)) - 28)));  // F16's range
  }
  values.insert(values.end(), {65519.99f, 65520.f, 3.39e38f, std::numeric_limits<float>::max(), 1e-45f, 0.f, -0.f});
  return values;
}

TEST(FloatTypes, RoundsToTheNearestAndTiesToEven) {
  const SlowRounding f16(kF16Format), bf16(kBF16Format);
  for (float v : HardValues(f16)) {
    if (std::isnan(v)) continue;
    ASSERT_EQ(ToF16(v), f16(v)) << std::bit_cast<uint32_t>(v);
  }
  for (float v : HardValues(bf16)) {
    if (std::isnan(v)) continue;
    ASSERT_EQ(ToBF16(v), bf16(v)) << std::bit_cast<uint32_t>(v);
  }
}

TEST(FloatTypes, NanStaysNan) {
  for (uint32_t payload : {1u, 2u, 0xfffu, 0x1fffu, 0x2000u, 0xffffu, 0x10000u, 0x400000u, 0x7fffffu}) {
    for (uint32_t sign : {0u, 0x80000000u}) {
      const float nan = std::bit_cast<float>(sign | 0x7f800000u | payload);
      EXPECT_TRUE(std::isnan(FromF16(ToF16(nan)))) << payload;
      EXPECT_TRUE(std::isnan(FromBF16(ToBF16(nan)))) << payload;
      EXPECT_EQ(ToF16(nan) >> 15, sign >> 31);
      EXPECT_EQ(ToBF16(nan) >> 15, sign >> 31);
    }
  }
}

// Rows equal single conversions, for any stride and alignment, and count what was lost.
TEST(FloatTypes, RowsEqualSingleConversions) {
  Rng rng(12);
  for (int64_t stride : {1, 2, 3, 5}) {
    for (int64_t n : {0, 1, 7, 64, 333}) {
      std::vector<float> values(static_cast<size_t>(n)), back(values.size());
      for (float& v : values) v = std::bit_cast<float>(static_cast<uint32_t>(rng.Next()));
      std::vector<char> stored(static_cast<size_t>(n * stride * 8 + 9), 'x');
      char* p = stored.data() + 1;
      for (FloatType type : {FloatType::kF64, FloatType::kF32, FloatType::kF16, FloatType::kBF16}) {
        std::fill(stored.begin(), stored.end(), 'x');
        ConversionLosses losses, expected;
        FromFloats(type, values.data(), n, p, stride, &losses);
        ToFloats(type, p, stride, n, back.data());
        for (size_t i = 0; i < values.size(); ++i) {
          const float v = values[i];
          const float once = type == FloatType::kF16 ? FromF16(ToF16(v)) : type == FloatType::kBF16 ? FromBF16(ToBF16(v)) : v;
          EXPECT_TRUE(std::isnan(v) ? std::isnan(back[i]) : back[i] == once) << v;
          if (!std::isfinite(v)) ++expected.non_finite;
          if (std::isfinite(v) && v != once) ++expected.inexact;
          if (std::isfinite(v) && std::isinf(once)) ++expected.overflowed;
        }
        EXPECT_EQ(losses.inexact, expected.inexact);
        EXPECT_EQ(losses.overflowed, expected.overflowed);
        EXPECT_EQ(losses.non_finite, expected.non_finite);
        if (stride > 1 && n > 1) {
          EXPECT_EQ(p[FloatBytes(type)], 'x');
        }
      }
    }
  }
  const uint8_t bytes[] = {0x38, 9, 0xb8, 9, 0x7e};
  float values[3];
  ToFloats(FloatType::kE4M3, bytes, 2, 3, values);
  EXPECT_EQ(std::vector<float>(values, values + 3), (std::vector<float>{1, -1, 448}));
  ToFloats(FloatType::kE8M0, bytes, 1, 1, values);
  EXPECT_EQ(values[0], std::ldexp(1.f, 0x38 - 127));
  EXPECT_THROW(FromFloats(FloatType::kE4M3, values, 0, values, 1, nullptr), InternalError);
}

TEST(FloatTypes, DoublesAreRounded) {
  const double stored[] = {1 + 0x1p-24, 1 + 0x1p-24 + 0x1p-50, -1e300, 0.1};
  float values[4];
  ToFloats(FloatType::kF64, stored, 1, 4, values);
  EXPECT_EQ(values[0], 1.f);
  EXPECT_EQ(values[1], 1 + 0x1p-23f);
  EXPECT_EQ(values[2], -std::numeric_limits<float>::infinity());
  EXPECT_EQ(values[3], 0.1f);
}

}  // namespace
}  // namespace disagmoe
