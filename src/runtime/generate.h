// What does the model write? In one process.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/rng.h"
#include "layers/generator.h"

namespace disagmoe {

struct Sampling {
  double temperature = 0.8;  // 0: the most likely token
  int64_t top_k = 0;         // only the k most likely; 0: all
  double top_p = 1;          // only the most likely that make up this probability
  uint64_t seed = 1;
};

// A token drawn from softmax(logits / temperature), restricted as said. logits [V] on the host.
int64_t Sample(const Tensor& logits, const Sampling& sampling, Rng& rng);

// Up to `count` tokens that follow the prompt, each given to `on_token` as it comes; `end` (if not -1) is the last. When
// the generator is full, the last half of its tokens is read again.
std::vector<int64_t> GenerateTokens(Generator& generator, std::vector<int64_t> prompt, int64_t count, int64_t end,
                                    const Sampling& sampling, const std::function<void(int64_t)>& on_token = {});

struct SampleOptions {
  std::string from;                  // folder of a run (its latest checkpoint), of a checkpoint, or of Hugging Face
  std::string tokenizer = "";        // as LoadTokenizer takes it; "": see TokenizerFor
  std::string prompt = "The ";
  std::vector<int64_t> prompt_tokens = {};  // instead
  int64_t tokens = 300;
  Sampling sampling = {};
};
struct Sampled {
  std::vector<int64_t> prompt, tokens;
  std::string text;     // the prompt and what follows; without a tokenizer the tokens' numbers
  double seconds = 0;   // from the first token to the last
};
// Throws Error: no such model, a prompt that the vocabulary does not have, text without a tokenizer.
Sampled Generate(const SampleOptions& options);

}  // namespace disagmoe
