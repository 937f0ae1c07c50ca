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

void SwiGlu(const Tensor& gate_up, const Tensor& scale, Tensor& act) {
  const int64_t d = gate_up.size(1) / 2;
  Tensor a = at::silu(Wide(gate_up.narrow(1, 0, d))) * Wide(gate_up.narrow(1, d, d));
  act.copy_(scale.defined() ? a * scale.unsqueeze(1) : a);
}

void SwiGluBackward(const Tensor& d_act, const Tensor& gate_up, const Tensor& scale, Tensor& d_gate_up, Tensor& act,
                    Tensor& d_scale) {
  const int64_t d = gate_up.size(1) / 2;
  const Tensor gate = Wide(gate_up.narrow(1, 0, d));
  const Tensor up = Wide(gate_up.narrow(1, d, d));
  const Tensor sigmoid = at::sigmoid(gate);
  const Tensor silu = gate * sigmoid;
  Tensor a = silu * up;
  Tensor da = Wide(d_act);
  if (scale.defined()) {
    d_scale.copy_((da * a).sum(1));
    da = da * scale.unsqueeze(1);
    a = a * scale.unsqueeze(1);
  }
  const Tensor d_gate = da * up * (sigmoid + silu * (1 - sigmoid));
  const Tensor d_up = da * silu;
  act.copy_(a);
  d_gate_up.narrow(1, 0, d).copy_(d_gate);
  d_gate_up.narrow(1, d, d).copy_(d_up);
}

void SoftmaxTopK(const Tensor& logits, Tensor& probs, Tensor& ids) {
  const Tensor order = std::get<1>(at::sort(logits, /*stable=*/true, /*dim=*/-1, /*descending=*/true));
  probs.copy_(at::softmax(logits, -1));
  ids.copy_(order.narrow(1, 0, ids.size(1)));
}

void Gates(const Tensor& probs, const Tensor& ids, bool renormalise, Tensor& gates) {
  const Tensor picked = probs.gather(1, ids.to(at::kLong));
  gates.copy_(renormalise ? picked / picked.sum(1, true) : picked);
}

// With p the probabilities, c the chosen ones and s = sum c: gate = c or c / s.
//   dc = d_gates or (d_gates - sum(d_gates gate)) / s;  dp = d_probs + scatter(dc);  d_logits = p (dp - sum(dp p))
void RouterBackward(const Tensor& d_gates, const Tensor& d_probs, const Tensor& probs, const Tensor& ids,
                    bool renormalise, Tensor& d_logits) {
  const Tensor index = ids.to(at::kLong);
  Tensor dc = d_gates;
  if (renormalise) {
    const Tensor picked = probs.gather(1, index);
    const Tensor sum = picked.sum(1, true);
    dc = (d_gates - (d_gates * picked).sum(1, true) / sum) / sum;
  }
  const Tensor dp = (d_probs.defined() ? d_probs : at::zeros_like(probs)).scatter_add(1, index, dc);
  d_logits.copy_(probs * (dp - (dp * probs).sum(1, true)));
}

void GatherRows(const Tensor& src, const Tensor& index, Tensor& out) { at::index_select_out(out, src, 0, index); }

void SumRows(const Tensor& src, const Tensor& position, const Tensor& offsets, Tensor& out, bool add) {
  // index_add_ would be shorter, but adds in no fixed order on a GPU.
  const Tensor rows = Wide(src.index_select(0, position));
  const Tensor sum = at::segment_reduce(rows, "sum", /*lengths=*/{}, /*indices=*/{}, offsets, /*axis=*/0,
                                        /*unsafe=*/true, /*initial=*/0);
  Put(out, sum, add);
}

double CrossEntropy(Tensor& logits, const Tensor& labels, double scale, bool gradient) {
  const Tensor wide = Wide(logits);
  const Tensor index = labels.unsqueeze(1);
  const Tensor lse = at::logsumexp(wide, -1, true);
  const double loss = (lse - wide.gather(1, index)).sum(at::kDouble).item<double>();
  if (gradient) {
    Tensor d = (wide - lse).exp_();
    d.scatter_add_(1, index, at::full_like(index, -1, d.options()));
    logits.copy_(d.mul_(scale));
  }
  return loss;
}

}  // namespace disagmoe::generic
