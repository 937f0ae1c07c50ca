// e^x and its kin on Lanes.
#pragma once

#include "layers/lanes.h"

namespace disagmoe::cpu {

// x within [low, high]; NaN stays.
inline Lanes Clamp(Lanes x, float low, float high) {
#ifdef __AVX512F__
  const auto v = _mm512_maskz_max_ps(kAll, _mm512_set1_ps(low), reinterpret_cast<__m512>(x));
  return reinterpret_cast<Lanes>(_mm512_maskz_min_ps(kAll, _mm512_set1_ps(high), v));
#else
  const Lanes v = x < low ? Splat(low) : x;
  return v > high ? Splat(high) : v;
#endif
}

// e^x, relative error below 3e-7; 0 below e^-87.7 (where the normal range ends), e^88 above that; NaN stays.
//   n = round(x / ln 2), r = x - n ln 2 in [-ln 2 / 2, ln 2 / 2], e^x = 2^n e^r
//   e^r = 1 + r q(r), the q of degree 4 with the least maximum relative error (9.2e-8)
inline Lanes Exp(Lanes x) {
  const Lanes v = Clamp(x, -88.0f, 88.0f);  // n from -127 to 127; the exponent bits of -127 mean 0
  const float round = 12582912.0f;          // 1.5 * 2^23: adding it leaves the integer in the low bits
  const Lanes shifted = v * 1.44269504f + round;
  const Lanes n = shifted - round;
  const Lanes r = (v - n * 0.693145751953125f) - n * 1.42860677e-6f;  // ln 2 in two parts, the first product exact
  Lanes q = r * 0.00829022937f + 0.0418983921f;
  q = q * r + 0.166676402f;
  q = q * r + 0.499991447f;
  q = q * r + 0.999999702f;
  const Lanes p = q * r + 1.0f;
  const Words power = (reinterpret_cast<Words>(shifted) + 127u) << 23;
  return p * reinterpret_cast<Lanes>(power);
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
