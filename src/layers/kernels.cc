#include "layers/kernels.h"

#include <ATen/ATen.h>

#include <cmath>

#include "base/error.h"

namespace disagmoe {

void RopeTable(int64_t seq, int64_t d, double theta, Tensor& cos, Tensor& sin) {
  DM_CHECK(seq > 0 && d > 0 && d % 2 == 0, "rope table " + std::to_string(seq) + " x " + std::to_string(d));
  cos = at::empty({seq, d / 2}, at::kFloat);
  sin = at::empty({seq, d / 2}, at::kFloat);
  float* c = cos.mutable_data_ptr<float>();
  float* s = sin.mutable_data_ptr<float>();
  for (int64_t i = 0; i < d / 2; ++i) {
    const double frequency = std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(d));
    for (int64_t p = 0; p < seq; ++p) {
      const double angle = static_cast<double>(p) * frequency;
      c[p * (d / 2) + i] = static_cast<float>(std::cos(angle));
      s[p * (d / 2) + i] = static_cast<float>(std::sin(angle));
    }
  }
}

void RmsNorm(const Tensor& x, const Tensor& w, double eps, Tensor& y, Tensor& rstd) {
  generic::RmsNorm(x, w, eps, y, rstd);
}

void RmsNormBackward(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& rstd, Tensor& dx, bool add_dx,
                     Tensor& dw) {
  generic::RmsNormBackward(dy, x, w, rstd, dx, add_dx, dw);
}

void Rope(Tensor x, const Tensor& cos, const Tensor& sin, bool inverse) { generic::Rope(x, cos, sin, inverse); }

void SwiGlu(const Tensor& gate_up, const Tensor& scale, Tensor& act) { generic::SwiGlu(gate_up, scale, act); }

void SwiGluBackward(const Tensor& d_act, const Tensor& gate_up, const Tensor& scale, Tensor& d_gate_up, Tensor& act,
                    Tensor& d_scale) {
  generic::SwiGluBackward(d_act, gate_up, scale, d_gate_up, act, d_scale);
}

void SoftmaxTopK(const Tensor& logits, Tensor& probs, Tensor& ids) { generic::SoftmaxTopK(logits, probs, ids); }

void Gates(const Tensor& probs, const Tensor& ids, bool renormalise, Tensor& gates) {
  generic::Gates(probs, ids, renormalise, gates);
}

void RouterBackward(const Tensor& d_gates, const Tensor& d_probs, const Tensor& probs, const Tensor& ids,
                    bool renormalise, Tensor& d_logits) {
  generic::RouterBackward(d_gates, d_probs, probs, ids, renormalise, d_logits);
}

void GatherRows(const Tensor& src, const Tensor& index, Tensor& out) { generic::GatherRows(src, index, out); }

void SumRows(const Tensor& src, const Tensor& position, const Tensor& offsets, Tensor& out, bool add) {
  generic::SumRows(src, position, offsets, out, add);
}

double CrossEntropy(Tensor& logits, const Tensor& labels, double scale, bool gradient) {
  return generic::CrossEntropy(logits, labels, scale, gradient);
}

}  // namespace disagmoe
