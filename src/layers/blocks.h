// The parts of a layer, forward and backward, as functions of rows. What a forward keeps for its backward is a value
// (…Saved); gradients of weights are added to Param::grad. No autograd graph is built.
//
// A backward is two steps, which a schedule may run apart: …BackwardInputs makes the gradients of the inputs and keeps
// in `saved` only what …BackwardWeights needs, which adds those of the matrices and uses `saved` up. …Backward is the
// two in a row. Norm weights, biases, sinks, router and embedding belong to the first step: their gradients cost next to
// nothing.
//
// Shapes: T tokens of whole sequences of length s, H hidden, nh/nkv query/KV heads of size d, E experts, K a token;
// at an FFN worker: R received rows (one per token that visits it), P (row, expert) pairs, D expert hidden size.
// Rows are in the dtype of computation; router, gates, losses and gradient sums in fp32.
#pragma once

#include <cstdint>
#include <vector>

#include "layers/attention.h"
#include "layers/kernels.h"
#include "layers/param_store.h"

namespace disagmoe {

// ---- FFN part at one worker: out = gated experts of norm2(h), plus at a token's home h and the shared expert ----

struct FfnParams {
  FfnParams(const ParamStore& store, const ModelConfig& model, int64_t layer);
  Param norm2, gate_up, down;  // experts held here: [e, 2 De, H], [e, H, De]; undefined in a dense layer
  Param gate_up_bias, down_bias;  // [e, 2 De], [e, H]; undefined without
  Param home_gate_up, home_down;  // shared experts, or the dense FFN; undefined without
  Param home_gate;             // [1, H]: the shared experts' result is multiplied by sigmoid(home_gate . norm2(h))
  double limit = 0;            // of the experts' activation: see SwiGlu
};

// The pairs of the rows at one worker, in order of rows; expert ids are local (0 = the first held here). On the host.
struct RowPairs {
  std::vector<int32_t> offsets;  // [R + 1]
  std::vector<int32_t> expert;   // [P]
  std::vector<float> gate;       // [P]
  std::vector<int32_t> home;     // rows whose home is here, ascending
  int64_t rows() const { return static_cast<int64_t>(offsets.size()) - 1; }
  int64_t pairs() const { return static_cast<int64_t>(expert.size()); }
};

struct FfnSaved {
  Tensor h;                      // [R, H]
  RowPairs pairs;
  std::vector<int64_t> begin;    // [e + 1] of each expert in sorted order
  Tensor row, position, offsets, order;  // sorted pair -> row; pair -> sorted pair; CSR; sorted pair -> pair (int32)
  Tensor gate;                   // [P] fp32, sorted
  Tensor home;                   // [rows at home] int32; undefined if all rows are
  Tensor rstd, gate_up, home_gate_up;
  Tensor home_gate;              // [rows at home] fp32: the sigmoid
  // Between the two steps of a backward, with h, row and home; (home_)gate_up are then its gradients.
  Tensor d_out, act;            // [P, H] gradients of the experts' results, [P, D] their activations times gate
  Tensor home_d_out, home_act, home_d_gate;  // home_d_gate: by what the sigmoid was taken of
};

// h [R, H] is kept in `saved`. out [R, H] is overwritten.
void FfnForward(const ModelConfig& model, const FfnParams& p, const Tensor& h, RowPairs pairs, FfnSaved& saved,
                Tensor& out);
void FfnForget(FfnSaved& saved);
void FfnRecompute(const ModelConfig& model, const FfnParams& p, FfnSaved& saved);
// d [R, H]: gradient of out, becomes that of h (perhaps another tensor). d_gates: [P] in order of pairs, written.
void FfnBackward(const ModelConfig& model, const FfnParams& p, FfnSaved& saved, Tensor& d, std::vector<float>& d_gates);
void FfnBackwardInputs(const FfnParams& p, FfnSaved& saved, Tensor& d, std::vector<float>& d_gates);
void FfnBackwardWeights(const ModelConfig& model, const FfnParams& p, FfnSaved& saved);
// Pairs as one process sees them: all rows at home, all experts local.
RowPairs AllPairs(const Tensor& ids, const Tensor& gates, int64_t tokens);

// ---- embedding and head ----

void EmbedForward(const Param& embed, const Tensor& tokens, Tensor& x);
void EmbedBackward(const Param& embed, const Tensor& tokens, const Tensor& dx);

struct HeadParams {
  explicit HeadParams(const ParamStore& store)
      : norm(store.Get("final_norm")), head(store.Get(store.Find("head") != nullptr ? "head" : "embed")) {}
  Param norm, head;  // head is the embedding if these are tied: EmbedBackward adds to the same gradient
};
struct HeadSaved {
  Tensor u, d_logits;  // [n, H] rows after the norm, [n, V] gradient of their logits; undefined: nothing is left to do
};
// Sum of the token losses of x [T, H] against labels [T]; with dx also the gradients of scale * loss
// by x (written to dx, not x itself) and by the weights.
// input_finite: whether x held neither NaN nor infinity.
// later: what HeadBackwardWeights needs of the last 2^24 / V rows; all logits could be too many to keep, so what the
// rows before those add to the gradients of the weights is added here all the same.
double HeadForwardBackward(const ModelConfig& model, const HeadParams& p, const Tensor& x, const Tensor& labels,
                           double scale, Tensor* dx, bool* input_finite, HeadSaved* later = nullptr);
void HeadBackwardWeights(const HeadParams& p, HeadSaved& saved);
// Whether all rows that a norm saw were finite: 1 / rms is a positive number exactly then, so this costs nothing.
bool AllFinite(const Tensor& rstd);

// dst[index[i]] += src[i], index [n] int32 without repeats; undefined: all rows.
void AddRows(Tensor& dst, const Tensor& index, const Tensor& src);
// grad += a^T b in fp32, whatever the dtype of a [T, m] and b [T, n].
void AddGrad(Tensor grad, const Tensor& a, const Tensor& b);

}  // namespace disagmoe
