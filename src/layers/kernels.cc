// Checks the arguments, then takes the fused CPU loop where it applies and plain ATen calls elsewhere.
#include "layers/kernels.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "base/error.h"
#include "layers/kernels_cpu.h"

namespace disagmoe {
namespace {

using List = std::initializer_list<const Tensor*>;

// All (those that are defined) on the CPU, contiguous and of the type.
bool Plain(at::ScalarType type, List tensors) {
  for (const Tensor* t : tensors) {
    if (t->defined() && !(t->is_cpu() && t->scalar_type() == type && t->is_contiguous())) return false;
  }
  return true;
}

bool Fusable(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16; }

bool Shaped(const Tensor& t, at::IntArrayRef sizes) { return t.defined() && t.sizes() == sizes; }

}  // namespace

std::vector<double> RopeFrequencies(int64_t d, double theta) {
  DM_CHECK(d > 0 && d % 2 == 0, "rotary embedding of width " + std::to_string(d));
  std::vector<double> frequencies;
  for (int64_t i = 0; i < d / 2; ++i) {
    frequencies.push_back(std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(d)));
  }
  return frequencies;
}

void RopeTable(int64_t seq, const std::vector<double>& frequencies, double factor, Tensor& cos, Tensor& sin) {
  const int64_t half = std::ssize(frequencies);
  DM_CHECK(seq > 0 && half > 0, "rope table " + std::to_string(seq) + " x " + std::to_string(half));
  cos = at::empty({seq, half}, at::kFloat);
  sin = at::empty({seq, half}, at::kFloat);
  float* c = cos.mutable_data_ptr<float>();
  float* s = sin.mutable_data_ptr<float>();
  for (int64_t i = 0; i < half; ++i) {
    for (int64_t p = 0; p < seq; ++p) {
      const double angle = static_cast<double>(p) * frequencies[i];
      c[p * half + i] = static_cast<float>(factor * std::cos(angle));
      s[p * half + i] = static_cast<float>(factor * std::sin(angle));
    }
  }
}

void RmsNorm(const Tensor& x, const Tensor& w, double eps, Tensor& y, Tensor& rstd) {
  DM_CHECK(x.dim() == 2 && Shaped(w, {x.size(1)}) && Shaped(y, x.sizes()) && Shaped(rstd, {x.size(0)}), "shapes");
  const at::ScalarType type = x.scalar_type();
  if (Fusable(type) && Plain(type, {&x, &w, &y}) && Plain(at::kFloat, {&rstd})) return cpu::RmsNorm(x, w, eps, y, rstd);
  generic::RmsNorm(x, w, eps, y, rstd);
}

void RmsNormBackward(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& rstd, Tensor& dx, bool add_dx,
                     Tensor& dw) {
  DM_CHECK(x.dim() == 2 && Shaped(dy, x.sizes()) && Shaped(w, {x.size(1)}) && Shaped(rstd, {x.size(0)}), "inputs");
  DM_CHECK(Shaped(dx, x.sizes()) && Shaped(dw, {x.size(1)}), "outputs");
  const at::ScalarType type = x.scalar_type();
  if (Fusable(type) && Plain(type, {&dy, &x, &w, &dx}) && Plain(at::kFloat, {&rstd, &dw})) {
    return cpu::RmsNormBackward(dy, x, w, rstd, dx, add_dx, dw);
  }
  generic::RmsNormBackward(dy, x, w, rstd, dx, add_dx, dw);
}

void Rope(Tensor x, const Tensor& cos, const Tensor& sin, bool inverse) {
  DM_CHECK(x.dim() == 3 && x.size(2) % 2 == 0 && cos.dim() == 2 && cos.size(1) == x.size(2) / 2, "shapes");
  DM_CHECK(Shaped(sin, cos.sizes()), "sin unlike cos");
  if (x.numel() == 0) return;
  DM_CHECK(cos.size(0) > 0 && x.size(0) % cos.size(0) == 0,
           std::to_string(x.size(0)) + " rows, sequences of " + std::to_string(cos.size(0)));
  if (x.is_cpu() && Fusable(x.scalar_type()) && x.stride(2) == 1 && Plain(at::kFloat, {&cos, &sin})) {
    return cpu::Rope(x, cos, sin, inverse);
  }
  generic::Rope(x, cos, sin, inverse);
}

void SwiGlu(const Tensor& gate_up, const Tensor& scale, double limit, Tensor& act) {
  DM_CHECK(act.dim() == 2 && Shaped(gate_up, {act.size(0), 2 * act.size(1)}), "shapes");
  DM_CHECK(!scale.defined() || Shaped(scale, {act.size(0)}), "scale");
  const at::ScalarType type = act.scalar_type();
  if (Fusable(type) && Plain(type, {&gate_up, &act}) && Plain(at::kFloat, {&scale})) {
    return cpu::SwiGlu(gate_up, scale, limit, act);
  }
  generic::SwiGlu(gate_up, scale, limit, act);
}

void SwiGluBackward(const Tensor& d_act, const Tensor& gate_up, const Tensor& scale, double limit, Tensor& d_gate_up,
                    Tensor& act, Tensor& d_scale) {
  DM_CHECK(act.dim() == 2 && Shaped(d_act, act.sizes()) && Shaped(gate_up, {act.size(0), 2 * act.size(1)}), "shapes");
  DM_CHECK(Shaped(d_gate_up, gate_up.sizes()), "d_gate_up");
  DM_CHECK(scale.defined() == d_scale.defined(), "scale and d_scale go together");
  DM_CHECK(!scale.defined() || (Shaped(scale, {act.size(0)}) && Shaped(d_scale, {act.size(0)})), "scale");
  const at::ScalarType type = act.scalar_type();
  if (Fusable(type) && Plain(type, {&d_act, &gate_up, &d_gate_up, &act}) && Plain(at::kFloat, {&scale, &d_scale})) {
    return cpu::SwiGluBackward(d_act, gate_up, scale, limit, d_gate_up, act, d_scale);
  }
  generic::SwiGluBackward(d_act, gate_up, scale, limit, d_gate_up, act, d_scale);
}

void ScoreTopK(const RouterRule& rule, const Tensor& logits, const Tensor& correction, Tensor& scores, Tensor& ids) {
  DM_CHECK(logits.dim() == 2 && Shaped(scores, logits.sizes()), "shapes");
  const int64_t experts = logits.size(1);
  DM_CHECK(rule.groups > 0 && experts % rule.groups == 0 && rule.top_groups <= rule.groups, "groups");
  DM_CHECK(ids.dim() == 2 && ids.size(0) == logits.size(0) && ids.size(1) <= experts / rule.groups * rule.top_groups, "ids");
  DM_CHECK(!correction.defined() || Shaped(correction, {experts}), "correction");
  DM_CHECK(!correction.defined() || rule.top_groups == rule.groups || experts >= 2 * rule.groups, "groups of one");
  if (Plain(at::kFloat, {&logits, &correction, &scores}) && Plain(at::kInt, {&ids})) {
    return cpu::ScoreTopK(rule, logits, correction, scores, ids);
  }
  generic::ScoreTopK(rule, logits, correction, scores, ids);
}

void Gates(const RouterRule& rule, const Tensor& scores, const Tensor& ids, Tensor& gates) {
  DM_CHECK(scores.dim() == 2 && ids.dim() == 2 && ids.size(0) == scores.size(0) && Shaped(gates, ids.sizes()), "shapes");
  if (Plain(at::kFloat, {&scores, &gates}) && Plain(at::kInt, {&ids})) return cpu::Gates(rule, scores, ids, gates);
  generic::Gates(rule, scores, ids, gates);
}

void RouterBackward(const RouterRule& rule, const Tensor& d_gates, const Tensor& d_scores, const Tensor& scores,
                    const Tensor& ids, Tensor& d_logits) {
  DM_CHECK(scores.dim() == 2 && ids.dim() == 2 && ids.size(0) == scores.size(0) && Shaped(d_gates, ids.sizes()),
           "shapes");
  DM_CHECK(!d_scores.defined() || Shaped(d_scores, scores.sizes()), "d_scores");
  DM_CHECK(Shaped(d_logits, scores.sizes()), "d_logits");
  if (Plain(at::kFloat, {&d_gates, &d_scores, &scores, &d_logits}) && Plain(at::kInt, {&ids})) {
    return cpu::RouterBackward(rule, d_gates, d_scores, scores, ids, d_logits);
  }
  generic::RouterBackward(rule, d_gates, d_scores, scores, ids, d_logits);
}

void GatherRows(const Tensor& src, const Tensor& index, Tensor& out) {
  DM_CHECK(src.dim() == 2 && index.dim() == 1 && Shaped(out, {index.size(0), src.size(1)}), "shapes");
  if (Plain(src.scalar_type(), {&src, &out}) && Plain(at::kInt, {&index})) return cpu::GatherRows(src, index, out);
  generic::GatherRows(src, index, out);
}

void SumRows(const Tensor& src, const Tensor& position, const Tensor& offsets, Tensor& out, bool add,
             const Tensor& weight) {
  DM_CHECK(src.dim() == 2 && position.dim() == 1 && out.dim() == 2 && out.size(1) == src.size(1), "shapes");
  DM_CHECK(Shaped(offsets, {out.size(0) + 1}), "offsets");
  DM_CHECK(!weight.defined() || Shaped(weight, position.sizes()), "weight");
  const at::ScalarType type = src.scalar_type();
  if (Fusable(type) && Plain(type, {&src, &out}) && Plain(at::kInt, {&position, &offsets}) &&
      Plain(at::kFloat, {&weight})) {
    return cpu::SumRows(src, position, offsets, out, add, weight);
  }
  generic::SumRows(src, position, offsets, out, add, weight);
}

void AddRowDots(const Tensor& d_out, const Tensor& src, const Tensor& position, const Tensor& offsets,
                Tensor& d_weight) {
  DM_CHECK(src.dim() == 2 && position.dim() == 1 && d_out.dim() == 2 && d_out.size(1) == src.size(1), "shapes");
  DM_CHECK(Shaped(offsets, {d_out.size(0) + 1}) && Shaped(d_weight, position.sizes()), "offsets");
  const at::ScalarType type = src.scalar_type();
  if (Fusable(type) && Plain(type, {&src, &d_out}) && Plain(at::kInt, {&position, &offsets}) &&
      Plain(at::kFloat, {&d_weight})) {
    return cpu::AddRowDots(d_out, src, position, offsets, d_weight);
  }
  generic::AddRowDots(d_out, src, position, offsets, d_weight);
}

void AddSegments(const Tensor& src, const Tensor& weight, const std::vector<int64_t>& begin, Tensor& sums) {
  DM_CHECK(src.dim() == 2 && Shaped(sums, {static_cast<int64_t>(begin.size()) - 1, src.size(1)}), "shapes");
  DM_CHECK(!weight.defined() || Shaped(weight, {src.size(0)}), "weight");
  DM_CHECK(std::is_sorted(begin.begin(), begin.end()) && begin.front() >= 0 && begin.back() <= src.size(0), "segments");
  const at::ScalarType type = src.scalar_type();
  if (Fusable(type) && Plain(type, {&src}) && Plain(at::kFloat, {&weight, &sums})) {
    return cpu::AddSegments(src, weight, begin, sums);
  }
  generic::AddSegments(src, weight, begin, sums);
}

double CrossEntropy(Tensor& logits, const Tensor& labels, double scale, bool gradient) {
  DM_CHECK(logits.dim() == 2 && Shaped(labels, {logits.size(0)}), "shapes");
  const at::ScalarType type = logits.scalar_type();
  if (Fusable(type) && Plain(type, {&logits}) && Plain(at::kLong, {&labels})) {
    return cpu::CrossEntropy(logits, labels, scale, gradient);
  }
  return generic::CrossEntropy(logits, labels, scale, gradient);
}

}  // namespace disagmoe
