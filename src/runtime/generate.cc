#include "runtime/generate.h"

#include <ATen/ATen.h>

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "base/error.h"
#include "io/tokenizer.h"
#include "runtime/state_io.h"

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

std::string GenerateText(const SampleOptions& options) {
  std::string folder = options.from;
  if (!std::filesystem::exists(folder + "/manifest.json")) folder = ResolveCheckpoint(folder + "/checkpoints", "latest");
  // The manifest carries the run's configuration as text.
  const std::filesystem::path file = std::filesystem::temp_directory_path() / ("disagmoe-" + std::to_string(getpid()) + ".toml");
  std::ofstream(file) << ReadManifest(folder).config;
  const RunConfig config = LoadConfig(file.string(), {});
  std::filesystem::remove(file);
  if (config.model.vocab_size != kByteVocab) {
    throw Error({"only byte-level models can be printed", folder, "vocabulary of " + std::to_string(config.model.vocab_size), std::to_string(kByteVocab), ""});
  }
  Generator generator(config, at::kCPU);
  LoadState(folder, generator.store(), nullptr);
  std::vector<int32_t> text = EncodeBytes(options.prompt, false);
  if (text.empty()) text.push_back(kByteEod);
  for (int64_t t : GenerateTokens(generator, {text.begin(), text.end()}, options.bytes, kByteEod, options.sampling)) {
    text.push_back(static_cast<int32_t>(t));
  }
  return DecodeBytes(text);
}

}  // namespace disagmoe
