#include "io/dataset.h"

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "base/rng.h"

namespace disagmoe {
namespace {

constexpr int64_t kWeightUnit = 1000000;  // weights are exact decimals: no rounding may differ between machines

Error BadSplit(const std::string& split, const std::string& got) {
  return Error({"wrong split of the data", "split = \"" + split + "\"", got,
                "weights of up to 9 digits, 6 of them after a point, as in \"949,50,1\"", {}});
}

// "949" or "0.95" in millionths.
int64_t ParseWeight(const std::string& split, const std::string& text) {
  const size_t first = text.find_first_not_of(" \t"), last = text.find_last_not_of(" \t");
  const std::string word = first == std::string::npos ? "" : text.substr(first, last - first + 1);
  const size_t point = word.find('.');
  const std::string whole = word.substr(0, point);
  std::string part = point == std::string::npos ? "" : word.substr(point + 1);
  const bool digits = (whole + part).find_first_not_of("0123456789") == std::string::npos;
  if (!digits || (whole + part).empty() || whole.size() > 9 || part.size() > 6) throw BadSplit(split, "\"" + word + "\"");
  part.resize(6, '0');
  return (whole.empty() ? 0 : std::stoll(whole)) * kWeightUnit + std::stoll(part);
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

}  // namespace

Batches::Batches(const IndexedDataset& data, const std::string& split, int64_t seq_length, uint64_t seed)
    : data_(data), seq_length_(seq_length), seed_(SeedFor(seed, "batches")) {
  if (seq_length < 1) throw Error({"sequence length out of range", "seq_length", std::to_string(seq_length), "1 or more", {}});
  const std::vector<int64_t> weights = ParseSplit(split);
  __int128 total = 0;
  for (int64_t w : weights) total += w;
  const auto boundary = [&](__int128 sum) { return static_cast<int64_t>(sum * data.num_tokens() / total); };
  const int64_t train_end = boundary(weights[0]);
  const int64_t held_out_end = weights.size() > 1 ? boundary(__int128{weights[0]} + weights[1]) : train_end;
  const auto samples = [&](const std::string& part, int64_t tokens) {
    if (tokens <= seq_length) {
      throw Error({"too little data for one sample", part + " part of split \"" + split + "\"",
                   std::to_string(tokens) + " of " + std::to_string(data.num_tokens()) + " tokens",
                   "at least " + std::to_string(seq_length) + " + 1", "use more data, another split or a shorter seq_length"});
    }
    return (tokens - 1) / seq_length;
  };
  train_samples_ = samples("training", train_end);
  held_out_begin_ = train_end;
  if (weights.size() > 1 && weights[1] > 0) held_out_samples_ = samples("held-out", held_out_end - train_end);
}

void Batches::Train(int64_t g, int64_t* out) const {
  DM_CHECK(g >= 0, "sample " + std::to_string(g));
  const int64_t epoch = g / train_samples_;
  const uint64_t sample = Permute(static_cast<uint64_t>(g % train_samples_), static_cast<uint64_t>(train_samples_),
                                  Mix64(seed_ + static_cast<uint64_t>(epoch)));
  data_.Read(train_begin_ + static_cast<int64_t>(sample) * seq_length_, seq_length_ + 1, out);
}

void Batches::HeldOut(int64_t g, int64_t* out) const {
  DM_CHECK(g >= 0 && held_out_samples_ > 0, "sample " + std::to_string(g) + " of the held-out part");
  data_.Read(held_out_begin_ + g % held_out_samples_ * seq_length_, seq_length_ + 1, out);
}

}  // namespace disagmoe
