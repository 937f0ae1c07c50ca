// The kernels as plain ATen calls: any device, and fp64 too. Correct first; the CPU loops are compared with these.
#include <ATen/ATen.h>

#include "layers/kernels.h"

namespace disagmoe::generic {
namespace {

// The type that sums are taken in.
at::ScalarType WideType(const Tensor& t) { return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }
Tensor Wide(const Tensor& t) { return t.to(WideType(t)); }

// y, or y + out if add, rounded once.
void Put(Tensor& out, const Tensor& y, bool add) {
  if (add) {
    out.copy_(Wide(out) + y);
  } else {
    out.copy_(y);
  }
}

}  // namespace

void RmsNorm(const Tensor& x, const Tensor& w, double eps, Tensor& y, Tensor& rstd) {
  const Tensor wide = Wide(x);
  const Tensor r = at::rsqrt(wide.square().mean(-1) + eps);
  rstd.copy_(r);
  y.copy_(wide * r.unsqueeze(-1) * Wide(w));
}

void RmsNormBackward(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& rstd, Tensor& dx, bool add_dx,
                     Tensor& dw) {
  const Tensor r = rstd.unsqueeze(-1);
  const Tensor xhat = Wide(x) * r;
  const Tensor wide_dy = Wide(dy);
  const Tensor g = wide_dy * Wide(w);
  const Tensor d = r * (g - xhat * (g * xhat).mean(-1, true));
  dw.add_((wide_dy * xhat).sum(0));
  Put(dx, d, add_dx);
}

void Rope(Tensor x, const Tensor& cos, const Tensor& sin, bool inverse) {
  const int64_t half = x.size(2) / 2;
  const int64_t s = cos.size(0);
  // [b, s, n, d] against [s, 1, d/2]; a row stride splits into (s stride, stride), so that this stays a view.
  Tensor rows = x.view({x.size(0) / s, s, x.size(1), x.size(2)});
  Tensor low = rows.narrow(3, 0, half);
  Tensor high = rows.narrow(3, half, half);
  const Tensor a = Wide(low);
  const Tensor b = Wide(high);
  const Tensor c = cos.unsqueeze(1);
  const Tensor signed_sin = (inverse ? sin.neg() : sin).unsqueeze(1);
  const Tensor new_low = a * c - b * signed_sin;
  const Tensor new_high = b * c + a * signed_sin;
  low.copy_(new_low);
  high.copy_(new_high);
}

namespace {

constexpr double kAlpha = 1.702;  // of gpt-oss

// a = glu * factor, by columns: slope = d glu / d gate, passes = d factor / d up (undefined: 1).
struct Activation {
  Activation(const Tensor& gate_up, double limit) {
    const int64_t d = gate_up.size(1) / 2;
    const Tensor gate = Wide(gate_up.narrow(1, 0, d)), up = Wide(gate_up.narrow(1, d, d));
    if (limit == 0) {
      const Tensor sigmoid = at::sigmoid(gate);
      glu = gate * sigmoid;
      slope = sigmoid + glu * (1 - sigmoid);
      factor = up;
      return;
    }
    const Tensor g = gate.clamp_max(limit), sigmoid = at::sigmoid(g * kAlpha);
    glu = g * sigmoid;
    slope = (sigmoid + kAlpha * glu * (1 - sigmoid)) * (gate <= limit);
    factor = up.clamp(-limit, limit) + 1;
    passes = up.abs() <= limit;
  }
  Tensor glu, slope, factor, passes;
};

}  // namespace

void SwiGlu(const Tensor& gate_up, const Tensor& scale, double limit, Tensor& act) {
  const Activation a(gate_up, limit);
  const Tensor product = a.glu * a.factor;
  act.copy_(scale.defined() ? product * scale.unsqueeze(1) : product);
}

void SwiGluBackward(const Tensor& d_act, const Tensor& gate_up, const Tensor& scale, double limit, Tensor& d_gate_up,
                    Tensor& act, Tensor& d_scale) {
  const int64_t d = gate_up.size(1) / 2;
  const Activation in(gate_up, limit);
  Tensor a = in.glu * in.factor;
  Tensor da = Wide(d_act);
  if (scale.defined()) {
    d_scale.copy_((da * a).sum(1));
    da = da * scale.unsqueeze(1);
    a = a * scale.unsqueeze(1);
  }
  const Tensor d_gate = da * in.factor * in.slope;
  const Tensor d_up = in.passes.defined() ? da * in.glu * in.passes : da * in.glu;
  act.copy_(a);
  d_gate_up.narrow(1, 0, d).copy_(d_gate);
  d_gate_up.narrow(1, d, d).copy_(d_up);
}

namespace {

constexpr double kTiny = 1e-20;

// 1 where an expert is in one of the best groups of its row.
Tensor Eligible(const RouterRule& rule, const Tensor& values, bool two_best) {
  const Tensor grouped = values.view({values.size(0), rule.groups, values.size(1) / rule.groups});
  const Tensor sorted = std::get<0>(at::sort(grouped, /*dim=*/-1, /*descending=*/true));
  Tensor best = sorted.select(2, 0);
  if (two_best) best = best + sorted.select(2, 1);
  const Tensor order = std::get<1>(at::sort(best, /*stable=*/true, /*dim=*/-1, /*descending=*/true));
  const Tensor chosen = at::zeros_like(order).scatter_(1, order.narrow(1, 0, rule.top_groups), 1);
  return chosen.unsqueeze(2).expand(grouped.sizes()).reshape(values.sizes());
}

}  // namespace

void ScoreTopK(const RouterRule& rule, const Tensor& logits, const Tensor& correction, Tensor& scores, Tensor& ids) {
  scores.copy_(rule.sigmoid ? at::sigmoid(logits) : at::softmax(logits, -1));
  const Tensor values = correction.defined() ? scores + correction : logits;
  Tensor order = std::get<1>(at::sort(values, /*stable=*/true, /*dim=*/-1, /*descending=*/true));
  if (rule.top_groups < rule.groups) {  // first those that can be chosen, each part in its order
    const Tensor eligible = Eligible(rule, values, correction.defined()).gather(1, order);
    order = order.gather(1, std::get<1>(at::sort(eligible, /*stable=*/true, /*dim=*/-1, /*descending=*/true)));
  }
  ids.copy_(order.narrow(1, 0, ids.size(1)));
}

void Gates(const RouterRule& rule, const Tensor& scores, const Tensor& ids, Tensor& gates) {
  const Tensor picked = scores.gather(1, ids.to(at::kLong));
  gates.copy_((rule.renormalise ? picked / (picked.sum(1, true) + kTiny) : picked) * rule.scale);
}

// With p the scores, c the chosen ones and s = sum c: gate = scale c or scale c / s.
//   dc = scale d_gates or scale (d_gates - sum(d_gates c) / s) / s;  dp = d_scores + scatter(dc)
//   softmax: d_logits = p (dp - sum(dp p));  sigmoid: d_logits = dp p (1 - p)
void RouterBackward(const RouterRule& rule, const Tensor& d_gates, const Tensor& d_scores, const Tensor& scores,
                    const Tensor& ids, Tensor& d_logits) {
  const Tensor index = ids.to(at::kLong);
  Tensor dc = d_gates;
  if (rule.renormalise) {
    const Tensor picked = scores.gather(1, index);
    const Tensor sum = picked.sum(1, true) + kTiny;
    dc = (d_gates - (d_gates * picked).sum(1, true) / sum) / sum;
  }
  const Tensor dp = (d_scores.defined() ? d_scores : at::zeros_like(scores)).scatter_add(1, index, dc * rule.scale);
  d_logits.copy_(rule.sigmoid ? dp * scores * (1 - scores) : scores * (dp - (dp * scores).sum(1, true)));
}

void GatherRows(const Tensor& src, const Tensor& index, Tensor& out) { at::index_select_out(out, src, 0, index); }

void SumRows(const Tensor& src, const Tensor& position, const Tensor& offsets, Tensor& out, bool add,
             const Tensor& weight) {
  // index_add_ would be shorter, but adds in no fixed order on a GPU.
  Tensor rows = Wide(src.index_select(0, position));
  if (weight.defined()) rows = rows * weight.unsqueeze(1);
  const Tensor sum = at::segment_reduce(rows, "sum", /*lengths=*/{}, /*indices=*/{}, offsets, /*axis=*/0,
                                        /*unsafe=*/true, /*initial=*/0);
  Put(out, sum, add);
}

void AddRowDots(const Tensor& d_out, const Tensor& src, const Tensor& position, const Tensor& offsets,
                Tensor& d_weight) {
  const Tensor counts = offsets.narrow(0, 1, d_out.size(0)) - offsets.narrow(0, 0, d_out.size(0));
  const Tensor row = at::repeat_interleave(counts.to(at::kLong));
  d_weight.add_((Wide(d_out.index_select(0, row)) * Wide(src.index_select(0, position))).sum(1));
}

void AddSegments(const Tensor& src, const Tensor& weight, const std::vector<int64_t>& begin, Tensor& sums) {
  for (size_t e = 0; e + 1 < begin.size(); ++e) {
    const int64_t n = begin[e + 1] - begin[e];
    if (n == 0) continue;
    Tensor rows = Wide(src.narrow(0, begin[e], n));
    if (weight.defined()) rows = rows * weight.narrow(0, begin[e], n).unsqueeze(1);
    sums.select(0, static_cast<int64_t>(e)).add_(rows.sum(0));
  }
}

double CrossEntropy(Tensor& logits, const Tensor& labels, double scale, bool gradient) {
  const Tensor wide = Wide(logits);
  const Tensor skipped = labels.eq(kNoLabel).unsqueeze(1);
  const Tensor index = labels.unsqueeze(1).masked_fill(skipped, 0);
  const Tensor lse = at::logsumexp(wide, -1, true);
  const double loss = (lse - wide.gather(1, index)).masked_fill(skipped, 0).sum(at::kDouble).item<double>();
  if (gradient) {
    Tensor d = (wide - lse).exp_();
    d.scatter_add_(1, index, at::full_like(index, -1, d.options()));
    logits.copy_(d.mul_(scale).masked_fill_(skipped, 0));
  }
  return loss;
}

}  // namespace disagmoe::generic
