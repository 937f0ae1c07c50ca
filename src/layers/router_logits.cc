#include "layers/router_logits.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "layers/kernels_cpu.h"
#include "layers/lanes.h"

namespace disagmoe {
namespace {

using cpu::ForLanes;
using cpu::Lanes;
using cpu::Load;

constexpr int kTokens = 4;  // so many tokens a pass over an expert's row: five loads feed four multiply-adds

// N dot products with one expert's row. The order of the sum is that of the lanes, whatever N is.
template <int N>
void Dots(const float* const* x, const float* w, int64_t h, float* out) {
  Lanes sum[N] = {};
  ForLanes(h, [&](int64_t i, auto span) {
    const Lanes weight = Load(w + i, span);
    for (int t = 0; t < N; ++t) sum[t] += Load(x[t] + i, span) * weight;
  });
  for (int t = 0; t < N; ++t) {
    float total = 0;
    for (int64_t j = 0; j < cpu::kLanes; ++j) total += sum[t][j];
    out[t] = total;
  }
}

}  // namespace

void RouterLogits(const at::Tensor& u, const at::Tensor& w, at::Tensor& logits) {
  if (!u.is_cpu()) {
    at::mm_out(logits, u.to(at::kFloat), w.t());
    return;
  }
  const at::Tensor x = u.to(at::kFloat).contiguous(), rows = w.contiguous();
  const int64_t T = x.size(0), H = x.size(1), E = rows.size(0);
  const float* from = x.const_data_ptr<float>();
  const float* weight = rows.const_data_ptr<float>();
  float* out = logits.data_ptr<float>();
  at::parallel_for(0, (T + kTokens - 1) / kTokens, cpu::Grain(kTokens * E * H / 8), [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const int64_t t0 = block * kTokens, n = std::min<int64_t>(kTokens, T - t0);
      // The last block repeats its last token, so that there is one loop and one order.
      const float* rows_of[kTokens];
      float values[kTokens];
      for (int64_t t = 0; t < kTokens; ++t) rows_of[t] = from + (t0 + std::min(t, n - 1)) * H;
      for (int64_t e = 0; e < E; ++e) {
        Dots<kTokens>(rows_of, weight + e * H, H, values);
        for (int64_t t = 0; t < n; ++t) out[(t0 + t) * E + e] = values[t];
      }
    }
  });
}

}  // namespace disagmoe
