// The model in one process for generation: one sequence, token by token, with cached keys and values.
#pragma once

#include <memory>
#include <vector>

#include "layers/blocks.h"
#include "layers/kv_cache.h"

namespace disagmoe {

class Generator {
 public:
  // Of at most `most` tokens, prompt included; 0: train.seq_length.
  Generator(const RunConfig& config, at::Device device, int64_t most = 0);
  ParamStore& store() { return store_; }
  int64_t most() const { return rotary_.cos.size(0); }
  int64_t length() const { return length_; }  // tokens so far
  // Forgets what was before. Logits [V] of what follows the last token, fp32 on the host.
  Tensor Prefill(const std::vector<int64_t>& tokens);
  // The same of one more token.
  Tensor Step(int64_t token);

 private:
  Tensor Embed(const std::vector<int64_t>& tokens) const;
  Tensor Logits(const Tensor& x) const;  // of the last row
  Tensor Ffn(int64_t layer, const AttentionOutput& a) const;

  const ModelConfig model_;
  ParamStore store_;
  Rotary rotary_;
  std::vector<AttentionParams> attention_;
  std::vector<FfnParams> ffn_;
  std::vector<KvCache> caches_;
  std::unique_ptr<HeadParams> head_;
  int64_t length_ = 0;
};

}  // namespace disagmoe
