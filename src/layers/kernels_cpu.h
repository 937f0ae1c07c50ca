// Fused CPU loops behind kernels.h, for contiguous fp32 and bf16 tensors. kernels.cc checks the arguments.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "base/error.h"
#include "layers/kernels.h"

namespace disagmoe::cpu {

using at::Tensor;

// Rows of n elements a thread should have at least, so that small tensors stay on one thread.
inline int64_t Grain(int64_t n) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, n)); }

// Calls f with a value of the element type: float or bf16.
template <class F>
void ForType(at::ScalarType type, F f) {
  if (type == at::kFloat) {
    f(float{});
  } else {
    DM_CHECK(type == at::kBFloat16, "fp32 or bf16");
    f(at::BFloat16{});
  }
}

void RmsNorm(const Tensor& x, const Tensor& w, double eps, Tensor& y, Tensor& rstd);
void RmsNormBackward(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& rstd, Tensor& dx, bool add_dx,
                     Tensor& dw);
void Rope(Tensor& x, const Tensor& cos, const Tensor& sin, bool inverse);
void SwiGlu(const Tensor& gate_up, const Tensor& scale, double limit, Tensor& act);
void SwiGluBackward(const Tensor& d_act, const Tensor& gate_up, const Tensor& scale, double limit, Tensor& d_gate_up,
                    Tensor& act, Tensor& d_scale);
void ScoreTopK(const RouterRule& rule, const Tensor& logits, const Tensor& correction, Tensor& scores, Tensor& ids);
void Gates(const RouterRule& rule, const Tensor& scores, const Tensor& ids, Tensor& gates);
void RouterBackward(const RouterRule& rule, const Tensor& d_gates, const Tensor& d_scores, const Tensor& scores,
                    const Tensor& ids, Tensor& d_logits);
void GatherRows(const Tensor& src, const Tensor& index, Tensor& out);
void SumRows(const Tensor& src, const Tensor& position, const Tensor& offsets, Tensor& out, bool add,
             const Tensor& weight);
void AddRowDots(const Tensor& d_out, const Tensor& src, const Tensor& position, const Tensor& offsets, Tensor& d_weight);
void AddSegments(const Tensor& src, const Tensor& weight, const std::vector<int64_t>& begin, Tensor& sums);
double CrossEntropy(Tensor& logits, const Tensor& labels, double scale, bool gradient);

}  // namespace disagmoe::cpu
