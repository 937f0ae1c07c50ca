// The whole model in one process, one micro-batch after the other: the judge of every layout. It knows nothing of
// schedules, exchanges or transports.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "layers/blocks.h"

namespace disagmoe {

// Weights of the losses in a step, the same in every layout.
struct LossScale {
  explicit LossScale(const RunConfig& config);
  double token = 0;  // 1 / tokens of a step
  double aux = 0;    // router_aux_loss_coef / (sequences, or micro-batches, of a step); 0 = none
  bool global_aux = false;
};

// Where non-finite values were first seen in a forward, in the order of the computation: 1 + the stage whose output held
// them, 0 for the embedding; kAllFinite for none.
inline constexpr int64_t kAllFinite = -1;
// The stages of micro-batches as one number, so that the smallest is the first.
inline int64_t BadKey(int64_t micro_batch, int64_t stage, int64_t layers) { return micro_batch * (2 * layers + 2) + stage + 1; }

class Reference {
 public:
  Reference(const RunConfig& config, at::Device device);

  struct Losses {
    double tokens = 0;  // sum of token losses (not scaled)
    double aux = 0;     // weighted
    int64_t bad_stage = kAllFinite;  // 1 + stage, or 0
  };
  struct Batch {  // of b sequences
    Tensor tokens, labels;           // [b, s] int64; kNoLabel counts for nothing
    std::vector<int64_t> documents;  // of AttentionSaved
    int64_t step_labels = 0;         // that count, of all batches of the step; 0: all
  };
  // backward: adds to the gradients.
  Losses Run(const Batch& batch, bool backward);
  // tokens [b, s + 1] int64: one text a sequence.
  Losses Run(const Tensor& tokens, bool backward);
  // Logits of the last position of tokens [1, t], t <= s: for generation.
  Tensor LastLogits(const Tensor& tokens);
  ParamStore& store() { return store_; }

 private:
  ModelConfig model_;
  LossScale scale_;
  bool recompute_;
  ParamStore store_;
  Rotary rotary_;
  std::vector<AttentionParams> attention_;
  std::vector<FfnParams> ffn_;
  std::unique_ptr<HeadParams> head_;
};

}  // namespace disagmoe
