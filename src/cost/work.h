// Arithmetic and memory traffic of one stage, from the model's dimensions. Exact counts: causal attention at half,
// sliding windows, grouped queries, latent attention, shared experts, dense layers, head. Per token, forward, unless
// said.
//
// A query sees (s + 1) / 2 keys on average, itself included: 2 (s + 1) n_h d FLOPs of scores and values a token, where
// system.md section 6 rounds to 2 s n_h d.
//
// A backward has twice the multiplications of a forward (input and weight gradients), flash attention 2.5 times
// its own (it recomputes the scores: five products instead of two). MFU counts 2 for both.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "spec/cluster.h"
#include "spec/model_shape.h"

namespace disagmoe {

struct Work {
  double attention_flops = 0;   // scores and values
  double gemm_flops = 0;        // dense products
  double expert_flops = 0;      // grouped products
  double memory_bytes = 0;      // read and written by all that is not a product
  Work& operator+=(const Work& o);
  Work operator*(double x) const;
};

// Lengths of documents and their shares, of the documents (any scale).
using Documents = std::vector<std::pair<int64_t, double>>;
// So many tokens of one text, or packed with documents that do not see each other. Documents are not cut where a
// sequence ends, but for those longer than one: pieces of its length, and what is left.
struct Sequence {
  int64_t tokens = 0;
  Documents documents;  // empty: one text
  Sequence(int64_t length, Documents packed = {}) : tokens(length), documents(std::move(packed)) {}
};
// A document's pieces: how many of how many tokens, and the last.
struct Pieces {
  int64_t whole = 0, rest = 0;
  Pieces(int64_t document, int64_t seq_length) : whole(document / seq_length), rest(document % seq_length) {}
};

// Keys that a query sees on average in a text of s tokens: (s + 1) / 2, or less with a window (0 = none).
double MeanKeys(int64_t text, int64_t window);
// Over the tokens of documents: with full attention (E[s^2] / E[s] + 1) / 2.
double MeanKeys(const Sequence& sequence, int64_t window);

// One token of attention stage l (norms, projections, scores, router, packing `copies` rows and summing as many that
// come back). bf16 activations.
Work AttentionWork(const ModelShape& model, int64_t layer, const Sequence& sequence, double copies);
// One (token, expert) pair of an MoE layer; one token of what every token passes (shared experts, or a dense layer).
Work ExpertPairWork(const ModelShape& model);
Work CommonFfnWork(const ModelShape& model, int64_t layer);
// One row that an FFN worker of two pools receives: the norm before the experts, which it computes itself.
Work FfnRowWork(const ModelShape& model);
// What of an FFN stage's forward runs again with recomputation: the products to gate and up, not the one down.
Work FfnRecomputeWork(Work forward);
// One token of the head: projection; its memory traffic is that of forward, loss and backward together.
Work HeadWork(const ModelShape& model);

// FLOPs of one token's training for MFU: 3 x forward, active experts only, no recomputation.
double TrainFlopsPerToken(const ModelShape& model, const Sequence& sequence);

// Intensities of system.md section 6. Exact ones: FLOPs of the stage per byte that crosses the pools one way
// (rows: rows a token sends). As printed in the paper: multiply-adds and FLOPs mixed, n_h d = H.
struct Intensities {
  double attention = 0, ffn = 0;
};
Intensities ExactIntensities(const ModelShape& model, int64_t layer, const Sequence& sequence, double rows);
Intensities PrintedIntensities(const ModelShape& model, int64_t seq_length);

// Which products of an operation run.
struct Pass {
  bool forward = false;        // the forward, or its recomputation
  bool input_gradient = false;
  bool weight_gradient = false;
};
// Nanoseconds on one GPU. rows_per_expert: of one grouped call, for its efficiency.
double TimeNs(const Work& work, const Pass& pass, const ClusterSpec& cluster, double rows_per_expert);

}  // namespace disagmoe
