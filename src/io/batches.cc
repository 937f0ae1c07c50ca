#include "io/batches.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/rng.h"

namespace disagmoe {
namespace {

Error BadSplit(const std::string& split, const std::string& got) {
  return Error({"wrong split of the data", "split = \"" + split + "\"", got,
                "weights of up to 9 digits, 6 of them after a point, as in \"949,50,1\"", {}});
}

int64_t ParseWeight(const std::string& split, const std::string& text) {
  const size_t first = text.find_first_not_of(" \t"), last = text.find_last_not_of(" \t");
  const std::string word = first == std::string::npos ? "" : text.substr(first, last - first + 1);
  const std::optional<int64_t> weight = Millionths(word);
  if (!weight) throw BadSplit(split, "\"" + word + "\"");
  return *weight;
}

std::vector<int64_t> ParseSplit(const std::string& split) {
  std::vector<int64_t> weights;
  for (size_t begin = 0; begin <= split.size();) {
    const size_t comma = std::min(split.find(',', begin), split.size());
    weights.push_back(ParseWeight(split, split.substr(begin, comma - begin)));
    begin = comma + 1;
  }
  if (weights[0] == 0) throw BadSplit(split, "weight 0 for training");
  return weights;
}

// A permutation of [0, n) without a table: a Feistel network over the next power of four, walked until it falls
// below n (at most 4 tries on average).
uint64_t Permute(uint64_t i, uint64_t n, uint64_t key) {
  const int half = std::max(1, (static_cast<int>(std::bit_width(n - 1)) + 1) / 2);
  const uint64_t mask = (uint64_t{1} << half) - 1;
  do {
    uint64_t left = i >> half, right = i & mask;
    for (uint64_t round = 0; round < 8; ++round) {
      const uint64_t mixed = left ^ (Mix64(key ^ Mix64(right * 8 + round)) & mask);
      left = right;
      right = mixed;
    }
    i = left << half | right;
  } while (i >= n);
  return i;
}

std::vector<BlendEntry> Entries(const std::string& path, const std::vector<std::string>& blend) {
  if (path.empty()) return ParseBlend(blend);
  return {{1, path}};
}

}  // namespace

Corpus::Corpus(IndexedDataset data) : entries_{{1, ""}} { data_.push_back(std::move(data)); }

Corpus::Corpus(const std::string& path, const std::vector<std::string>& blend) : entries_(Entries(path, blend)) {
  for (const BlendEntry& entry : entries_) data_.emplace_back(entry.prefix);
}

std::vector<int64_t> Corpus::weights() const {
  std::vector<int64_t> weights;
  for (const BlendEntry& entry : entries_) weights.push_back(entry.weight);
  return weights;
}

int64_t Corpus::num_tokens() const {
  int64_t tokens = 0;
  for (const IndexedDataset& data : data_) tokens += data.num_tokens();
  return tokens;
}

std::string Corpus::Fingerprint() const {
  if (size() == 1) return std::to_string(num_tokens());
  __int128 total = 0;
  for (const BlendEntry& entry : entries_) total += entry.weight;
  std::string text;
  for (size_t i = 0; i < size(); ++i) {
    // Shares of one: the weights 7 and 3 are those of 0.7 and 0.3.
    char share[16];
    std::snprintf(share, sizeof share, "0.%09lld", static_cast<long long>(__int128{entries_[i].weight} * 1000000000 / total));
    text += (i == 0 ? "" : ", ") + std::to_string(data_[i].num_tokens()) + " x " + share;
  }
  return text;
}

Batches::Batches(const Corpus& data, const std::string& split, int64_t seq_length, uint64_t seed, bool apart)
    : seq_length_(seq_length), apart_(apart), blend_(data.weights()) {
  if (seq_length < 1) throw Error({"sequence length out of range", "seq_length", std::to_string(seq_length), "1 or more", {}});
  const std::vector<int64_t> weights = ParseSplit(split);
  __int128 total = 0;
  for (int64_t w : weights) total += w;
  for (size_t i = 0; i < data.size(); ++i) {
    const int64_t all = data.data(i).num_tokens();
    const auto boundary = [&](__int128 sum) { return static_cast<int64_t>(sum * all / total); };
    const auto samples = [&](const std::string& part, int64_t tokens) {
      if (tokens <= seq_length) {
        throw Error({"too little data for one sample",
                     part + " part of split \"" + split + "\"" + (data.size() > 1 ? " of " + data.prefix(i) : ""),
                     std::to_string(tokens) + " of " + std::to_string(all) + " tokens",
                     "at least " + std::to_string(seq_length) + " + 1", "use more data, another split or a shorter seq_length"});
      }
      return (tokens - 1) / seq_length;
    };
    const int64_t train_end = boundary(weights[0]);
    const int64_t held_out_end = weights.size() > 1 ? boundary(__int128{weights[0]} + weights[1]) : train_end;
    const int64_t train = samples("training", train_end);
    const bool any = weights.size() > 1 && weights[1] > 0;
    const std::string name = i == 0 ? "batches" : "batches " + std::to_string(i);
    parts_.push_back({&data.data(i), SeedFor(seed, name), train, train_end,
                      any ? samples("held-out", held_out_end - train_end) : 0});
  }
}

Batches BatchesOf(const RunConfig& config, const Corpus& data) {
  return Batches(data, config.data.split, config.train.seq_length, config.train.seed, config.data.documents == "apart");
}

int64_t Batches::train_samples() const {
  int64_t samples = 0;
  for (const Part& part : parts_) samples += part.train_samples;
  return samples;
}

int64_t Batches::held_out_samples() const {
  int64_t samples = 0;
  for (const Part& part : parts_) samples += part.held_out_samples;
  return samples;
}

Batches::Window Batches::Find(int64_t g, bool held_out) const {
  DM_CHECK(g >= 0, "sample " + std::to_string(g));
  const Blend::Place place = blend_.Find(g);
  const Part& part = parts_[place.dataset];
  if (held_out) {
    DM_CHECK(part.held_out_samples > 0, "sample " + std::to_string(g) + " of the held-out part");
    return {part.data, part.held_out_begin + place.sample % part.held_out_samples * seq_length_};
  }
  const int64_t epoch = place.sample / part.train_samples;
  const uint64_t sample = Permute(static_cast<uint64_t>(place.sample % part.train_samples),
                                  static_cast<uint64_t>(part.train_samples), Mix64(part.seed + static_cast<uint64_t>(epoch)));
  return {part.data, static_cast<int64_t>(sample) * seq_length_};
}

void Batches::Draw(int64_t g, bool held_out, int64_t* out, std::vector<int64_t>* begins) const {
  const Window window = Find(g, held_out);
  window.data->Read(window.begin, seq_length_ + 1, out);
  if (begins != nullptr) *begins = BeginsOf(window);
}

std::vector<int64_t> Batches::Begins(bool held_out, int64_t g) const { return BeginsOf(Find(g, held_out)); }

std::vector<int64_t> Batches::BeginsOf(const Window& window) const {
  std::vector<int64_t> begins = {0};
  if (!apart_) return begins;
  for (int64_t at : window.data->BeginsIn(window.begin + 1, window.begin + seq_length_ + 1)) {
    begins.push_back(at - window.begin);
  }
  return begins;
}

int64_t Batches::CountedLabels(bool held_out, int64_t first, int64_t count) const {
  int64_t labels = count * seq_length_;
  for (int64_t g = first; apart_ && g < first + count; ++g) {
    const Window window = Find(g, held_out);
    labels -= window.data->CountBegins(window.begin + 1, window.begin + seq_length_ + 1);
  }
  return labels;
}

}  // namespace disagmoe
