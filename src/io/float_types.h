// The number formats of weight files, converted one by one and by the row.
//
// To fp32 every conversion is exact except from F64. From fp32 values are rounded to the nearest, ties to even; what is
// too large becomes infinite; the upper bits of a NaN's payload stay. So any BF16 or F16 pattern comes back as it was.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string>

namespace disagmoe {

enum class FloatType { kF64, kF32, kF16, kBF16, kE4M3, kE8M0 };

// By the name in safetensors: "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E8M0". Nothing for what holds no such numbers.
std::optional<FloatType> FindFloatType(const std::string& dtype);
int64_t FloatBytes(FloatType type);

inline float FromBF16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Written without branches, so that loops become vector code.
inline float FromF16(uint16_t bits) {
  const uint32_t sign = (uint32_t{bits} & 0x8000u) << 16, rest = uint32_t{bits} & 0x7fffu;
  // A subnormal is rest * 2^-24: put under an exponent where a bit is worth that, and take the exponent's one off.
  const float small = std::bit_cast<float>((uint32_t{127 - 14} << 23) + (rest << 13)) - 0x1p-14f;
  const uint32_t normal = (rest << 13) + (uint32_t{127 - 15} << 23);
  const uint32_t special = (rest << 13) | 0x7f800000u;
  const uint32_t finite = rest < 0x0400u ? std::bit_cast<uint32_t>(small) : normal;
  return std::bit_cast<float>(sign | (rest >= 0x7c00u ? special : finite));
}

inline uint16_t ToBF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  // A NaN whose payload lies in the lower bits alone must not become infinite.
  const uint32_t nan = (bits >> 16) | ((bits & 0x007f0000u) == 0 ? 0x40u : 0u);
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

inline uint16_t ToF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), rest = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
  // Below 2^-14 the result counts in units of 2^-24, which is what a bit is worth to a float in [0.5, 1): the addition rounds.
  const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(rest) + 0.5f) - (uint32_t{126} << 23);
  const uint32_t normal = (rest - (uint32_t{127 - 15} << 23) + 0xfffu + ((rest >> 13) & 1)) >> 13;
  const uint32_t payload = (rest >> 13) & 0x3ffu;
  const uint32_t nan = 0x7c00u | (payload == 0 ? 0x200u : payload);
  uint32_t result = rest < (uint32_t{127 - 14} << 23) ? small : normal;
  result = rest >= 0x477ff000u ? 0x7c00u : result;  // 65520, half way between the largest number and the next step
  result = rest > 0x7f800000u ? nan : result;
  return static_cast<uint16_t>(sign | result);
}

// 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, NaN is all ones (OCP 8-bit floating point, "E4M3").
float FromE4M3(uint8_t bits);
// A power of two, 2^(bits - 127); 255 is NaN.
float FromE8M0(uint8_t bits);
// The lower 4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and from 8 on the same negative (OCP microscaling formats).
inline float FromE2M1(uint8_t bits) {
  constexpr float kValues[16] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
  return kValues[bits & 15];
}

// What did not survive a conversion.
struct ConversionLosses {
  int64_t inexact = 0;     // finite values that changed, those that overflowed included
  int64_t overflowed = 0;  // finite values that became infinite
  int64_t non_finite = 0;  // NaN and infinities that were there before
  void Add(const ConversionLosses& other) {
    inexact += other.inexact;
    overflowed += other.overflowed;
    non_finite += other.non_finite;
  }
};

// n values whose stored elements are `stride` elements apart, to or from n adjacent floats. `stored` need not be aligned.
void ToFloats(FloatType type, const void* stored, int64_t stride, int64_t n, float* values);
// Not for kE4M3 and kE8M0. Adds to *losses.
void FromFloats(FloatType type, const float* values, int64_t n, void* stored, int64_t stride, ConversionLosses* losses);

}  // namespace disagmoe
