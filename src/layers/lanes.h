// A vector register of floats at a time, for the CPU loops: compiler vectors, with the few instructions that the
// compiler does not find by itself. Loads widen bf16, stores round it to nearest even.
// The last block of a row is a Part: missing lanes load as 0 and are not stored.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace disagmoe::cpu {

// Wider vectors than the processor's registers would work, ten times slower.
#if defined(__AVX512F__)
inline constexpr int64_t kLanes = 16;
inline constexpr __mmask16 kAll = 0xffff;  // the unmasked intrinsics warn in g++ 12
#elif defined(__AVX2__)
inline constexpr int64_t kLanes = 8;
#else
inline constexpr int64_t kLanes = 4;
#endif
using Lanes = float __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));

struct Full {
  static constexpr int64_t n = kLanes;
};
struct Part {
  int64_t n;  // from 1 to kLanes - 1
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

template <int64_t kN>
struct VectorOf {
  using Type [[gnu::vector_size(4 * kN)]] = float;
};

// f over all lanes, pairwise.
template <int64_t kN = kLanes, class F>
inline float Reduce(typename VectorOf<kN>::Type v, F f) {
  if constexpr (kN == 4) {
    return f(f(v[0], v[2]), f(v[1], v[3]));
  } else {
    typename VectorOf<kN / 2>::Type half[2];
    std::memcpy(half, &v, sizeof v);
    return Reduce<kN / 2>(f(half[0], half[1]), f);
  }
}

inline float Sum(Lanes v) {
  return Reduce(v, [](auto a, auto b) { return a + b; });
}
inline float Max(Lanes v) {
  return Reduce(v, [](auto a, auto b) { return a > b ? a : b; });
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

}  // namespace disagmoe::cpu
