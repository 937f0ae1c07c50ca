// T tokens, H hidden, V vocabulary.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "layers/blocks.h"

namespace disagmoe {

// Logits of so many elements at once: bounds memory with large vocabularies.
constexpr int64_t kLogitsAtOnce = 1 << 24;

void AddGrad(Tensor grad, const Tensor& a, const Tensor& b) {
  if (a.size(0) == 0) return;
  if (a.scalar_type() == at::kFloat) {
    grad.addmm_(a.t(), b);
  } else {
    grad.add_(at::mm(a.t(), b));
  }
}

bool AllFinite(const Tensor& rstd) {
  const Tensor host = rstd.cpu();
  const float* r = host.const_data_ptr<float>();
  return std::all_of(r, r + host.numel(), [](float v) { return v > 0 && std::isfinite(v); });
}

void EmbedForward(const Param& embed, const Tensor& tokens, Tensor& x) {
  at::index_select_out(x, embed.value, 0, tokens);
}

void EmbedBackward(const Param& embed, const Tensor& tokens, const Tensor& dx) {
  Tensor grad = embed.grad;
  grad.index_add_(0, tokens, dx.to(at::kFloat));
}

double HeadForwardBackward(const ModelConfig& c, const HeadParams& p, const Tensor& x, const Tensor& labels, double scale,
                           Tensor* dx, bool* input_finite, HeadSaved* later) {
  const int64_t T = x.size(0), H = x.size(1), V = p.head.value.size(0);
  const int64_t chunk = std::max<int64_t>(1, kLogitsAtOnce / V);
  double loss = 0;
  *input_finite = true;
  for (int64_t begin = 0; begin < T; begin += chunk) {
    const int64_t n = std::min(chunk, T - begin);
    const Tensor rows = x.narrow(0, begin, n);
    Tensor u = at::empty({n, H}, x.options()), rstd = at::empty({n}, x.options().dtype(at::kFloat));
    RmsNorm(rows, p.norm.value, c.rms_norm_eps, u, rstd);
    *input_finite = *input_finite && AllFinite(rstd);
    Tensor logits = at::empty({n, V}, x.options());
    at::mm_out(logits, u, p.head.value.t());
    loss += CrossEntropy(logits, labels.narrow(0, begin, n), scale, dx != nullptr);
    if (dx == nullptr) continue;
    HeadSaved weights{u, logits};
    Tensor du = u;
    if (later != nullptr && begin + n == T) {
      *later = std::move(weights);
      du = at::empty_like(u);
    } else {
      HeadBackwardWeights(p, weights);
    }
    at::mm_out(du, logits, p.head.value);
    Tensor out = dx->narrow(0, begin, n), dw = p.norm.grad;
    RmsNormBackward(du, rows, p.norm.value, rstd, out, /*add_dx=*/false, dw);
  }
  return loss;
}

void HeadBackwardWeights(const HeadParams& p, HeadSaved& saved) {
  if (saved.u.defined()) AddGrad(p.head.grad, saved.d_logits, saved.u);
  saved = {};
}

}  // namespace disagmoe
