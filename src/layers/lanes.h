// Sixteen floats at a time, for the CPU loops: compiler vectors, so that the same source serves every instruction set
// and sums run in the same order everywhere. Loads widen bf16, stores round it to nearest even.
// The last block of a row is a Part: missing lanes load as 0 and are not stored.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace disagmoe::cpu {

inline constexpr int64_t kLanes = 16;
using Lanes = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));

#ifdef __AVX512F__
inline constexpr __mmask16 kAll = 0xffff;  // the unmasked intrinsics warn in g++ 12
#endif

struct Full {
  static constexpr int64_t n = kLanes;
};
struct Part {
  int64_t n;  // 1 .. kLanes - 1
};

// Calls f(i, Full or Part) for the blocks of a row of n elements.
template <class F>
inline void ForLanes(int64_t n, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, Full{});
  if (i < n) f(i, Part{n - i});
}

inline Lanes Splat(float v) { return Lanes{} + v; }

template <class Span>
inline Lanes Load(const float* p, Span span) {
  Lanes v{};
  std::memcpy(&v, p, static_cast<size_t>(span.n) * sizeof(float));
  return v;
}

template <class Span>
inline Lanes Load(const c10::BFloat16* p, Span span) {
  Halves h{};
  std::memcpy(&h, p, static_cast<size_t>(span.n) * sizeof(uint16_t));
#ifdef __AVX512F__  // g++ 12 makes five instructions of the conversion
  const Words wide = reinterpret_cast<Words>(_mm512_maskz_cvtepu16_epi32(kAll, reinterpret_cast<__m256i>(h)));
#else
  const Words wide = __builtin_convertvector(h, Words);
#endif
  return reinterpret_cast<Lanes>(wide << 16);
}

template <class Span>
inline void Store(float* p, Lanes v, Span span) {
  std::memcpy(p, &v, static_cast<size_t>(span.n) * sizeof(float));
}

template <class Span>
inline void Store(c10::BFloat16* p, Lanes v, Span span) {
#ifdef __AVX512BF16__
  const auto h = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v));
#else
  const Words bits = reinterpret_cast<Words>(v);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words quiet = Words{} + 0x7fc0u;  // rounding a NaN could make an infinity of it
  const Halves h = __builtin_convertvector(v == v ? rounded : quiet, Halves);
#endif
  std::memcpy(p, &h, static_cast<size_t>(span.n) * sizeof(uint16_t));
}

namespace detail {
using Lanes8 = float __attribute__((vector_size(32)));
using Lanes4 = float __attribute__((vector_size(16)));

template <class Half, class Whole, class F>
inline Half Fold(Whole v, F f) {
  Half part[2];
  std::memcpy(part, &v, sizeof v);
  return f(part[0], part[1]);
}
template <class F>
inline float Reduce(Lanes v, F f) {
  const Lanes4 r = Fold<Lanes4>(Fold<Lanes8>(v, f), f);
  return f(f(r[0], r[2]), f(r[1], r[3]));
}
}  // namespace detail

inline float Sum(Lanes v) {
  return detail::Reduce(v, [](auto a, auto b) { return a + b; });
}
inline float Max(Lanes v) {
  return detail::Reduce(v, [](auto a, auto b) { return a > b ? a : b; });
}

// The sum of f(i, span) over a row; missing lanes must come out as 0.
template <class F>
inline float SumLanes(int64_t n, F f) {
  Lanes even{};
  Lanes odd{};  // two chains hide the latency of the addition
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    even += f(i, Full{});
    odd += f(i + kLanes, Full{});
  }
  ForLanes(n - i, [&](int64_t j, auto span) { even += f(i + j, span); });
  return Sum(even + odd);
}

// e^x, relative error below 3e-7; 0 below e^-87.33 (the end of the normal range), e^88 above that; NaN stays.
//   n = round(x / ln 2), r = x - n ln 2 in [-ln 2 / 2, ln 2 / 2], e^x = 2^n e^r
//   e^r = 1 + r q(r), the q of degree 4 with the least maximum relative error (9.2e-8)
inline Lanes Exp(Lanes x) {
  const Lanes low = Splat(-87.33f);
  const Lanes high = Splat(88.0f);
  Lanes v = x < low ? low : x;
  v = v > high ? high : v;
  const float round = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
  const Lanes shifted = v * 1.44269504f + round;
  const Lanes n = shifted - round;
  const Lanes r = (v - n * 0.693145751953125f) - n * 1.42860677e-6f;  // ln 2 in two parts, the first product exact
  Lanes q = r * 0.00829022937f + 0.0418983921f;
  q = q * r + 0.166676402f;
  q = q * r + 0.499991447f;
  q = q * r + 0.999999702f;
  const Lanes p = q * r + 1.0f;
  const Words power = (reinterpret_cast<Words>(shifted) + 127u) << 23;
  return x < low ? Lanes{} : p * reinterpret_cast<Lanes>(power);
}

// 1 / x for x >= 1, within 1e-7.
inline Lanes Reciprocal(Lanes x) {
#ifdef __AVX512F__
  const Lanes y = reinterpret_cast<Lanes>(_mm512_maskz_rcp14_ps(kAll, reinterpret_cast<__m512>(x)));
  return y * (2.0f - x * y);  // one Newton step: half the cost of a division
#else
  return 1.0f / x;
#endif
}

inline Lanes Sigmoid(Lanes x) { return Reciprocal(1.0f + Exp(-x)); }

}  // namespace disagmoe::cpu
