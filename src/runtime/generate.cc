#include "runtime/generate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <numeric>

#include "base/error.h"
#include "base/time.h"
#include "io/initial_weights.h"
#include "io/tokenizer.h"
#include "runtime/state_io.h"
#include "spec/hf_config.h"

namespace disagmoe {
namespace {

// Which tokens may be drawn: the most likely, up to top_k of them and up to a sum of top_p.
void Restrict(std::vector<double>& p, const Sampling& sampling) {
  const size_t most = sampling.top_k > 0 ? std::min(p.size(), static_cast<size_t>(sampling.top_k)) : p.size();
  if (most == p.size() && sampling.top_p >= 1) return;
  std::vector<size_t> order(p.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p[a] > p[b]; });
  double sum = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    if (i > 0 && (i >= most || sum >= sampling.top_p)) p[order[i]] = 0;
    sum += p[order[i]];
  }
}

}  // namespace

int64_t Sample(const Tensor& logits, const Sampling& sampling, Rng& rng) {
  if (sampling.temperature == 0) return logits.argmax().item<int64_t>();
  const Tensor softmax = at::softmax((logits / std::max(sampling.temperature, 1e-3)).to(at::kDouble), 0);
  const double* data = softmax.const_data_ptr<double>();
  std::vector<double> p(data, data + softmax.numel());
  Restrict(p, sampling);
  double left = rng.Uniform() * std::accumulate(p.begin(), p.end(), 0.0);
  int64_t last = 0;  // rounding may leave a little at the end
  for (int64_t t = 0; t < std::ssize(p); ++t) {
    if (p[t] == 0) continue;
    last = t;
    if ((left -= p[t]) <= 0) break;
  }
  return last;
}

std::vector<int64_t> GenerateTokens(Generator& generator, std::vector<int64_t> prompt, int64_t count, int64_t end,
                                    const Sampling& sampling, const std::function<void(int64_t)>& on_token) {
  std::vector<int64_t> tokens = std::move(prompt), out;
  const auto read_last = [&](int64_t most) {
    const int64_t n = std::min(most, std::ssize(tokens));
    return generator.Prefill({tokens.end() - n, tokens.end()});
  };
  Rng rng(sampling.seed);
  Tensor logits;
  while (std::ssize(out) < count) {
    if (!logits.defined()) logits = read_last(generator.most());
    else if (generator.length() == generator.most()) logits = read_last(std::max<int64_t>(1, generator.most() / 2));
    else logits = generator.Step(tokens.back());
    const int64_t next = Sample(logits, sampling, rng);
    tokens.push_back(next);
    out.push_back(next);
    if (on_token) on_token(next);
    if (next == end) break;
  }
  return out;
}

namespace {

struct Loaded {
  RunConfig config;
  std::string checkpoint;  // "": of Hugging Face
  std::string companions;  // folder that may have a tokenizer; ""
};

Loaded Find(const std::string& from) {
  namespace fs = std::filesystem;
  Loaded out;
  if (fs::exists(from + "/manifest.json")) out.checkpoint = from;
  else if (fs::exists(from + "/checkpoints")) out.checkpoint = ResolveCheckpoint(from + "/checkpoints", "latest");
  if (out.checkpoint.empty()) {
    out.config.model = LoadHfModel(from).hf.model;
    out.config.train.init = out.companions = from;
    CheckInitialWeights(out.config);
    return out;
  }
  out.config = ParseConfig(ReadManifest(out.checkpoint).config, out.checkpoint + "/manifest.json");
  const fs::path kept = fs::weakly_canonical(out.checkpoint).parent_path().parent_path() / "hf";
  if (fs::is_directory(kept)) out.companions = kept.string();
  return out;
}

// What the model came with, or bytes for their vocabulary; null: none.
std::unique_ptr<Tokenizer> TokenizerFor(const SampleOptions& options, const Loaded& model) {
  namespace fs = std::filesystem;
  std::string name = options.tokenizer;
  if (name.empty() && fs::exists(model.companions + "/tokenizer.json")) name = model.companions;
  if (name.empty() && fs::exists(model.companions + "/tokenizer.model")) name = model.companions + "/tokenizer.model";
  if (name.empty() && model.config.model.vocab_size == kByteVocab) name = kByteTokenizer;
  return name.empty() ? nullptr : LoadTokenizer(name);
}

std::vector<int64_t> PromptOf(const SampleOptions& options, const Tokenizer* tokenizer, int64_t vocabulary) {
  std::vector<int64_t> prompt = options.prompt_tokens;
  if (prompt.empty() && tokenizer == nullptr) {
    throw Error({"no tokenizer for the prompt", options.from, "a vocabulary of " + std::to_string(vocabulary), {},
                 "--tokenizer names one; --prompt-tokens 1,2,3 needs none"});
  }
  if (prompt.empty()) {
    for (int32_t t : tokenizer->Encode(options.prompt)) prompt.push_back(t);
    if (prompt.empty()) prompt.push_back(tokenizer->eod());
  }
  for (int64_t t : prompt) {
    if (t >= 0 && t < vocabulary) continue;
    throw Error({"a prompt outside of the vocabulary", options.from, "token " + std::to_string(t),
                 "0 to " + std::to_string(vocabulary - 1), "is it another model's tokenizer?"});
  }
  return prompt;
}

// -1 where the tokenizer does not say.
int64_t EndOf(const Tokenizer* tokenizer) {
  try {
    return tokenizer == nullptr ? -1 : tokenizer->eod();
  } catch (const Error&) {
    return -1;
  }
}

}  // namespace

Sampled Generate(const SampleOptions& options) {
  const Loaded model = Find(options.from);
  const auto tokenizer = TokenizerFor(options, model);
  Sampled out;
  out.prompt = PromptOf(options, tokenizer.get(), model.config.model.vocab_size);
  // Room for all of it, within reason: positions beyond the trained length are the user's wish.
  constexpr int64_t kRoom = 1 << 15;
  const int64_t trained = model.config.train.seq_length, wanted = std::ssize(out.prompt) + options.tokens;
  Generator generator(model.config, at::kCPU, std::max(trained, std::min(kRoom, wanted)));
  if (model.checkpoint.empty()) SetInitialWeights(model.config, generator.store());
  else LoadState(model.checkpoint, generator.store(), nullptr);
  int64_t first = 0;
  out.tokens = GenerateTokens(generator, out.prompt, options.tokens, EndOf(tokenizer.get()), options.sampling,
                              [&](int64_t) { first = first == 0 ? NowNs() : first; });
  out.seconds = first == 0 ? 0 : static_cast<double>(NowNs() - first) * 1e-9;
  std::vector<int32_t> all(out.prompt.begin(), out.prompt.end());
  all.insert(all.end(), out.tokens.begin(), out.tokens.end());
  if (tokenizer != nullptr) {
    out.text = tokenizer->Decode(all);
  } else {
    for (int32_t t : all) out.text += (out.text.empty() ? "" : " ") + std::to_string(t);
  }
  return out;
}

}  // namespace disagmoe
