// RMS norm and rotary embedding on the CPU.
#include <ATen/ATen.h>

#include <cmath>
#include <memory>

#include "layers/kernels_cpu.h"
#include "layers/lanes.h"

namespace disagmoe::cpu {
namespace {

template <class T>
void NormRow(const T* x, const T* w, int64_t h, double eps, T* y, float* rstd) {
  const float square = SumLanes(h, [&](int64_t i, auto span) {
    const Lanes v = Load(x + i, span);
    return v * v;
  });
  const float r = static_cast<float>(1.0 / std::sqrt(static_cast<double>(square) / static_cast<double>(h) + eps));
  *rstd = r;
  ForLanes(h, [&](int64_t i, auto span) { Store(y + i, Load(x + i, span) * r * Load(w + i, span), span); });
}

// dw is this block's own sum.
template <bool kAdd, class T>
void NormRowBackward(const T* dy, const T* x, const T* w, float r, int64_t h, T* dx, float* dw) {
  const float dot =
      SumLanes(h, [&](int64_t i, auto span) { return Load(dy + i, span) * Load(w + i, span) * Load(x + i, span); });
  const float mean = dot * r / static_cast<float>(h);  // of g xhat
  ForLanes(h, [&](int64_t i, auto span) {
    const Lanes d = Load(dy + i, span);
    const Lanes xhat = Load(x + i, span) * r;
    Lanes v = (d * Load(w + i, span) - xhat * mean) * r;
    if (kAdd) v += Load(dx + i, span);
    Store(dx + i, v, span);
    Store(dw + i, Load(dw + i, span) + d * xhat, span);
  });
}

template <class T>
void RopeHead(T* x, const float* cos, const float* sin, int64_t half, float sign) {
  T* y = x + half;
  ForLanes(half, [&](int64_t i, auto span) {
    const Lanes a = Load(x + i, span);
    const Lanes b = Load(y + i, span);
    const Lanes c = Load(cos + i, span);
    const Lanes s = Load(sin + i, span) * sign;
    Store(x + i, a * c - b * s, span);
    Store(y + i, b * c + a * s, span);
  });
}

}  // namespace

void RmsNorm(const Tensor& x, const Tensor& w, double eps, Tensor& y, Tensor& rstd) {
  const int64_t h = x.size(1);
  ForType(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* xp = x.const_data_ptr<T>();
    const T* wp = w.const_data_ptr<T>();
    T* yp = y.mutable_data_ptr<T>();
    float* rp = rstd.mutable_data_ptr<float>();
    at::parallel_for(0, x.size(0), Grain(h), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) NormRow(xp + t * h, wp, h, eps, yp + t * h, rp + t);
    });
  });
}

void RmsNormBackward(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& rstd, Tensor& dx, bool add_dx,
                     Tensor& dw) {
  const int64_t rows = x.size(0);
  const int64_t h = x.size(1);
  if (rows == 0) return;
  // dw: at most 64 blocks of rows, each summed on its own, then the blocks in order: the same for any thread count.
  const int64_t block = std::max<int64_t>(16, at::divup(rows, 64));
  const int64_t blocks = at::divup(rows, block);
  const std::unique_ptr<float[]> sums(new float[static_cast<size_t>(blocks * h)]);
  ForType(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* dyp = dy.const_data_ptr<T>();
    const T* xp = x.const_data_ptr<T>();
    const T* wp = w.const_data_ptr<T>();
    const float* rp = rstd.const_data_ptr<float>();
    T* dxp = dx.mutable_data_ptr<T>();
    at::parallel_for(0, blocks, Grain(block * h), [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        float* sum = sums.get() + b * h;
        std::fill_n(sum, h, 0.0f);
        for (int64_t t = b * block; t < std::min(rows, (b + 1) * block); ++t) {
          const int64_t at = t * h;
          (add_dx ? NormRowBackward<true, T> : NormRowBackward<false, T>)(dyp + at, xp + at, wp, rp[t], h, dxp + at,
                                                                          sum);
        }
      }
    });
  });
  float* dwp = dw.mutable_data_ptr<float>();
  ForLanes(h, [&](int64_t i, auto span) {
    Lanes sum{};
    for (int64_t b = 0; b < blocks; ++b) sum += Load(sums.get() + b * h + i, span);
    Store(dwp + i, Load(dwp + i, span) + sum, span);
  });
}

void Rope(Tensor& x, const Tensor& cos, const Tensor& sin, bool inverse) {
  const int64_t heads = x.size(1);
  const int64_t d = x.size(2);
  const int64_t half = d / 2;
  const int64_t stride = x.stride(0), head = x.stride(1);
  const int64_t seq = cos.size(0);
  const float* c = cos.const_data_ptr<float>();
  const float* s = sin.const_data_ptr<float>();
  ForType(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    T* p = x.mutable_data_ptr<T>();
    at::parallel_for(0, x.size(0), Grain(heads * d), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t at = t % seq * half;
        for (int64_t n = 0; n < heads; ++n) RopeHead(p + t * stride + n * head, c + at, s + at, half, inverse ? -1.f : 1.f);
      }
    });
  });
}

}  // namespace disagmoe::cpu
