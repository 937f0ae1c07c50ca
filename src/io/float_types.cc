#include "io/float_types.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.h"

namespace disagmoe {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// 2^exponent, exponent >= -127 (which is subnormal).
constexpr float PowerOfTwo(int exponent) {
  return exponent == -127 ? 0x1p-127f : std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

constexpr std::array<float, 256> MakeE4M3() {
  std::array<float, 256> table{};
  for (int i = 0; i < 256; ++i) {
    const int exponent = (i >> 3) & 15, mantissa = i & 7;
    float value = exponent == 0 ? static_cast<float>(mantissa) * PowerOfTwo(-9)
                                : static_cast<float>(8 + mantissa) * PowerOfTwo(exponent - 10);
    if ((i & 127) == 127) value = kNan;
    table[static_cast<size_t>(i)] = i & 128 ? -value : value;
  }
  return table;
}

constexpr std::array<float, 256> MakeE8M0() {
  std::array<float, 256> table{};
  for (int i = 0; i < 255; ++i) table[static_cast<size_t>(i)] = PowerOfTwo(i - 127);
  table[255] = kNan;
  return table;
}

constexpr std::array<float, 256> kE4M3 = MakeE4M3();
constexpr std::array<float, 256> kE8M0 = MakeE8M0();

float ToFloat(double value) { return static_cast<float>(value); }

template <typename T, typename F>
void Decode(const void* stored, int64_t stride, int64_t n, float* values, F from) {
  const char* p = static_cast<const char*>(stored);
  const auto load = [p](int64_t i) {
    T element;
    std::memcpy(&element, p + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return element;
  };
  if (stride == 1) {  // a loop of its own, which becomes vector code
    for (int64_t i = 0; i < n; ++i) values[i] = from(load(i));
  } else if (stride == 2) {
    for (int64_t i = 0; i < n; ++i) values[i] = from(load(2 * i));
  } else {
    for (int64_t i = 0; i < n; ++i) values[i] = from(load(i * stride));
  }
}

template <typename T, typename F>
void Encode(const float* values, int64_t n, void* stored, int64_t stride, F to) {
  char* p = static_cast<char*>(stored);
  const auto store = [p](int64_t i, T element) { std::memcpy(p + i * static_cast<int64_t>(sizeof(T)), &element, sizeof(T)); };
  if (stride == 1) {
    for (int64_t i = 0; i < n; ++i) store(i, to(values[i]));
  } else {
    for (int64_t i = 0; i < n; ++i) store(i * stride, to(values[i]));
  }
}

constexpr uint32_t kInfinity = 0x7f800000u;

// `back` gives a value as it is after the conversion. Counts in 32 bits, in runs that cannot overflow them.
template <typename F>
void CountLosses(const float* values, int64_t n, ConversionLosses* losses, F back) {
  constexpr int64_t kRun = 1 << 20;
  for (int64_t begin = 0; begin < n; begin += kRun) {
    const int64_t end = begin + kRun < n ? begin + kRun : n;
    uint32_t inexact = 0, overflowed = 0, non_finite = 0;
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t bits = std::bit_cast<uint32_t>(values[i]), after = std::bit_cast<uint32_t>(back(values[i]));
      const uint32_t bad = (bits & kInfinity) == kInfinity;
      non_finite += bad;
      inexact += static_cast<uint32_t>(bits != after) & (bad ^ 1u);
      overflowed += static_cast<uint32_t>((after & 0x7fffffffu) == kInfinity) & (bad ^ 1u);
    }
    losses->Add({inexact, overflowed, non_finite});
  }
}

}  // namespace

std::optional<FloatType> FindFloatType(const std::string& dtype) {
  if (dtype == "F64") return FloatType::kF64;
  if (dtype == "F32") return FloatType::kF32;
  if (dtype == "F16") return FloatType::kF16;
  if (dtype == "BF16") return FloatType::kBF16;
  if (dtype == "F8_E4M3") return FloatType::kE4M3;
  if (dtype == "F8_E8M0") return FloatType::kE8M0;
  return std::nullopt;
}

int64_t FloatBytes(FloatType type) {
  switch (type) {
    case FloatType::kF64: return 8;
    case FloatType::kF32: return 4;
    case FloatType::kF16:
    case FloatType::kBF16: return 2;
    case FloatType::kE4M3:
    case FloatType::kE8M0: return 1;
  }
  return 0;
}

float FromE4M3(uint8_t bits) { return kE4M3[bits]; }
float FromE8M0(uint8_t bits) { return kE8M0[bits]; }

void ToFloats(FloatType type, const void* stored, int64_t stride, int64_t n, float* values) {
  switch (type) {
    case FloatType::kF64: return Decode<double>(stored, stride, n, values, ToFloat);
    case FloatType::kF32: return Decode<float>(stored, stride, n, values, [](float v) { return v; });
    case FloatType::kF16: return Decode<uint16_t>(stored, stride, n, values, FromF16);
    case FloatType::kBF16: return Decode<uint16_t>(stored, stride, n, values, FromBF16);
    case FloatType::kE4M3: return Decode<uint8_t>(stored, stride, n, values, FromE4M3);
    case FloatType::kE8M0: return Decode<uint8_t>(stored, stride, n, values, FromE8M0);
  }
}

void FromFloats(FloatType type, const float* values, int64_t n, void* stored, int64_t stride, ConversionLosses* losses) {
  switch (type) {
    case FloatType::kF64:
      CountLosses(values, n, losses, [](float v) { return v; });
      return Encode<double>(values, n, stored, stride, [](float v) { return static_cast<double>(v); });
    case FloatType::kF32:
      CountLosses(values, n, losses, [](float v) { return v; });
      return Encode<float>(values, n, stored, stride, [](float v) { return v; });
    case FloatType::kF16:
      CountLosses(values, n, losses, [](float v) { return FromF16(ToF16(v)); });
      return Encode<uint16_t>(values, n, stored, stride, ToF16);
    case FloatType::kBF16:
      CountLosses(values, n, losses, [](float v) { return FromBF16(ToBF16(v)); });
      return Encode<uint16_t>(values, n, stored, stride, ToBF16);
    case FloatType::kE4M3:
    case FloatType::kE8M0: break;
  }
  DM_CHECK(false, "values are not written in 8 bits");
}

}  // namespace disagmoe
