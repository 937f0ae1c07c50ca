// Generation: attention of one token at a time, with the keys and values of those before it.
#pragma once

#include "layers/attention.h"

namespace disagmoe {

// Of one layer and one sequence. Without a window there is room for `most` tokens; with one, for those that can still be
// seen. Latent attention keeps latents (arXiv 2405.04434, section 2.1.2), rk + dr numbers a token.
class KvCache {
 public:
  KvCache(const ModelConfig& model, const AttentionParams& p, int64_t most, const Tensor& like);
  int64_t length() const { return length_; }  // tokens so far
  // Forgets all tokens, and takes those of a forward of one sequence that starts at position 0.
  void Fill(const ModelConfig& model, const AttentionParams& p, const AttentionSaved& saved);
  // The same as AttentionForward for one more token, x [1, H], given the parameters and the whole rotary table: h [1, H].
  AttentionOutput Step(const ModelConfig& model, const AttentionParams& p, const Tensor& x);

 private:
  void Append(const ModelConfig& model, const AttentionParams& p, const AttentionSaved& saved);
  Tensor Attend(const ModelConfig& model, const AttentionParams& p, const AttentionSaved& saved) const;

  // A token's place is its position modulo the room: which order they lie in does not matter.
  Tensor keys_, values_;  // [nkv, room, d]; latent attention: keys_ [1, room, rk + dr] alone
  int64_t length_ = 0;
};

}  // namespace disagmoe
