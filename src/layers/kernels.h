// Row-wise kernels of the model, forward and backward, without autograd.
//
// Each has two implementations behind one function: plain ATen calls that work on any device and dtype
// (namespace generic; also what the tests compare with), and, for contiguous fp32 and bf16 tensors on the CPU, fused
// loops over at::parallel_for. Inside, sums are fp32. Results do not depend on the number of threads.
//
// Outputs are given by the caller, already of the right shape and dtype, and are overwritten unless "adds to" is
// said. No function keeps a reference. All tensors contiguous unless said. Outputs must not overlap inputs unless said.
// The generic functions also take fp64 (then every "fp32" below is fp64), for the tests.
//
// Shapes: T tokens (rows), H hidden, n heads, d head_dim, E experts, K experts per token, P (token, expert) pairs,
// D expert hidden, V vocabulary.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace disagmoe {

using at::Tensor;

// y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps). x, y [T, H], w [H] (dtype of x), rstd [T] fp32.
// Source: Zhang and Sennrich 2019.
void RmsNorm(const Tensor& x, const Tensor& w, double eps, Tensor& y, Tensor& rstd);
// dx [T, H] (added to if add_dx), dw [H] fp32: adds to.
//   xhat = x rstd; g = dy w; dx = rstd (g - xhat mean(g xhat)); dw += sum_t dy xhat
void RmsNormBackward(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& rstd, Tensor& dx, bool add_dx,
                     Tensor& dw);

// theta^(-2i/d) of each pair i.
std::vector<double> RopeFrequencies(int64_t d, double theta);
// Sets cos, sin to new fp32 CPU tensors [seq, d/2], times factor: the angle of (position p, pair i) is p frequencies[i],
// in fp64.
void RopeTable(int64_t seq, const std::vector<double>& frequencies, double factor, Tensor& cos, Tensor& sin);
// Rotary embedding in place, rotate-half convention of Hugging Face: pairs (i, i + d/2).
// x [T, n, d] may have larger strides of rows and heads (a slice of the fused qkv rows [T, R]); cos, sin [s, d/2] fp32.
// Positions restart at every sequence: T is a multiple of s and row t uses table row t mod s.
// inverse: rotates back, which is the backward.
void Rope(Tensor x, const Tensor& cos, const Tensor& sin, bool inverse);

// act = scale * a, gate_up [P, 2D] = (gate, up), act [P, D]; scale [P] fp32 or undefined (1).
//   limit 0: a = silu(gate) * up
//   above 0: a = g sigmoid(1.702 g) (u + 1) with g = min(gate, limit), u = up within [-limit, limit] (gpt-oss)
void SwiGlu(const Tensor& gate_up, const Tensor& scale, double limit, Tensor& act);
// d_act [P, D] is the gradient of the *unscaled-output side* product, i.e. (dL/d(output row)) W_down before the gate
// value is applied: the true gradient of act is d_act, and act = scale * a. Gives
//   d_gate_up [P, 2D] = scale * d_act through a,  act [P, D] = scale * a,  d_scale [P] fp32 = sum_D d_act * a
// scale and d_scale undefined together (then scale = 1). d_gate_up may be gate_up itself (in place).
// What is clamped has no gradient; at the limit itself it has, as in torch.clamp.
void SwiGluBackward(const Tensor& d_act, const Tensor& gate_up, const Tensor& scale, double limit, Tensor& d_gate_up,
                    Tensor& act, Tensor& d_scale);

// How a router makes scores of logits, chooses experts, and makes gates of scores.
struct RouterRule {
  bool sigmoid = false;                // scores: the sigmoid of each logit; or softmax over all E
  int64_t groups = 1, top_groups = 1;  // only experts of the best top_groups of so many equal groups can be chosen
  bool renormalise = false;            // gates are divided by their sum + 1e-20
  double scale = 1;                    // of the gates, after that
};
// logits [T, E] fp32 -> scores [T, E] fp32, ids [T, K] int32: the K largest logits, in descending order, ties to the
// lower index (so that the choice is the same everywhere). NaN counts as the largest. With a correction [E] fp32, the
// largest scores + correction. A group is as good as its best expert; with a correction, as its two best added up.
void ScoreTopK(const RouterRule& rule, const Tensor& logits, const Tensor& correction, Tensor& scores, Tensor& ids);
// gates [T, K] fp32: scores at ids, without the correction.
void Gates(const RouterRule& rule, const Tensor& scores, const Tensor& ids, Tensor& gates);
// d_logits [T, E] fp32 from d_gates [T, K] and d_scores [T, E] (of the auxiliary loss; undefined = none).
void RouterBackward(const RouterRule& rule, const Tensor& d_gates, const Tensor& d_scores, const Tensor& scores,
                    const Tensor& ids, Tensor& d_logits);

// out[i] = src[index[i]]; index [n] int32, src [T, H], out [n, H].
void GatherRows(const Tensor& src, const Tensor& index, Tensor& out);
// out[t] (+)= sum over j in [offsets[t], offsets[t+1]) of weight[j] * src[position[j]], in that order, in fp32, rounded
// once. src [P, H], position [n = offsets[T]] int32, offsets [T + 1] int32, weight [n] fp32 or undefined (1), out [T, H];
// add: adds to out (rounded after the sum).
void SumRows(const Tensor& src, const Tensor& position, const Tensor& offsets, Tensor& out, bool add,
             const Tensor& weight = {});
// Its way back to the weights: d_weight[j] += d_out[t] . src[position[j]] for the same j. d_weight [n] fp32: adds to.
void AddRowDots(const Tensor& d_out, const Tensor& src, const Tensor& position, const Tensor& offsets, Tensor& d_weight);
// sums[e] += sum over rows i in [begin[e], begin[e+1]) of weight[i] * src[i], in that order. src [P, H], weight [P] fp32
// or undefined (1), sums [e, H] fp32: adds to.
void AddSegments(const Tensor& src, const Tensor& weight, const std::vector<int64_t>& begin, Tensor& sums);

// Cross entropy summed over rows; logits [T, V] become the gradient scale * (softmax - onehot) in place.
// labels [T] int64 in [0, V), or kNoLabel: such a row has no loss and gradient 0. Returns the sum of the losses (fp64 sum of fp32 values). gradient = false leaves logits unspecified.
inline constexpr int64_t kNoLabel = -100;
double CrossEntropy(Tensor& logits, const Tensor& labels, double scale, bool gradient);

namespace generic {
void RmsNorm(const Tensor& x, const Tensor& w, double eps, Tensor& y, Tensor& rstd);
void RmsNormBackward(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& rstd, Tensor& dx, bool add_dx,
                     Tensor& dw);
void Rope(Tensor x, const Tensor& cos, const Tensor& sin, bool inverse);
void SwiGlu(const Tensor& gate_up, const Tensor& scale, double limit, Tensor& act);
void SwiGluBackward(const Tensor& d_act, const Tensor& gate_up, const Tensor& scale, double limit, Tensor& d_gate_up,
                    Tensor& act, Tensor& d_scale);
void ScoreTopK(const RouterRule& rule, const Tensor& logits, const Tensor& correction, Tensor& scores, Tensor& ids);
void Gates(const RouterRule& rule, const Tensor& scores, const Tensor& ids, Tensor& gates);
void RouterBackward(const RouterRule& rule, const Tensor& d_gates, const Tensor& d_scores, const Tensor& scores,
                    const Tensor& ids, Tensor& d_logits);
void GatherRows(const Tensor& src, const Tensor& index, Tensor& out);
void SumRows(const Tensor& src, const Tensor& position, const Tensor& offsets, Tensor& out, bool add,
             const Tensor& weight = {});
void AddRowDots(const Tensor& d_out, const Tensor& src, const Tensor& position, const Tensor& offsets, Tensor& d_weight);
void AddSegments(const Tensor& src, const Tensor& weight, const std::vector<int64_t>& begin, Tensor& sums);
double CrossEntropy(Tensor& logits, const Tensor& labels, double scale, bool gradient);
}  // namespace generic

}  // namespace disagmoe
