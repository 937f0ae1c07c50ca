// Deterministic samples of training data, the same for every layout.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/blend.h"
#include "io/dataset.h"
#include "spec/config.h"

namespace disagmoe {

// The data sets that a run draws from.
class Corpus {
 public:
  explicit Corpus(IndexedDataset data);
  // data.path, or if that is empty data.blend. Throws Error.
  Corpus(const std::string& path, const std::vector<std::string>& blend);
  size_t size() const { return data_.size(); }
  const IndexedDataset& data(size_t i) const { return data_[i]; }
  const std::string& prefix(size_t i) const { return entries_[i].prefix; }
  std::vector<int64_t> weights() const;
  int64_t num_tokens() const;
  // "123", or of a blend "123 x 0.700000, 45 x 0.300000": tokens and weights. Data that differs here is other data.
  std::string Fingerprint() const;

 private:
  std::vector<BlendEntry> entries_;
  std::vector<IndexedDataset> data_;
};

// Sample number g of the run (0, 1, 2, ... over all steps) is one of the data set that Blend::Find says, by its own
// count. A data set's sample j is tokens [j*s, j*s + s + 1) of its training (or held-out) part; its epochs visit the
// samples in a permutation that depends on seed, epoch and the data set's place in the blend. So the position is one
// number, a run resumes exactly, and every layout sees the same sequences.
class Batches {
 public:
  // `split`: weights of the parts by tokens, "949,50,1" or "0.95,0.05": training, held-out, the rest is not used; of each
  // data set. No held-out part or weight 0: held_out_samples() is 0. apart: documents in a sample are not to see each
  // other, else a sample is one document. Throws Error if a part of a data set has fewer than one sample of
  // seq_length + 1 tokens. `data` must outlive this.
  Batches(const Corpus& data, const std::string& split, int64_t seq_length, uint64_t seed, bool apart = false);

  // Training sample g: seq_length + 1 tokens. begins: where documents begin in them, ascending, the first is 0.
  void Train(int64_t g, int64_t* out, std::vector<int64_t>* begins = nullptr) const { Draw(g, false, out, begins); }
  // Held-out sample g, in order, wrapping around.
  void HeldOut(int64_t g, int64_t* out, std::vector<int64_t>* begins = nullptr) const { Draw(g, true, out, begins); }
  // Those begins alone, without reading tokens.
  std::vector<int64_t> Begins(bool held_out, int64_t g) const;
  // Labels that count in the loss of samples [first, first + count): all but those that begin a document, which what
  // is before them does not tell. Reads no tokens.
  int64_t CountedLabels(bool held_out, int64_t first, int64_t count) const;
  int64_t train_samples() const;     // of an epoch, of all data sets
  int64_t held_out_samples() const;

 private:
  struct Part {  // of one data set
    const IndexedDataset* data;
    uint64_t seed;
    int64_t train_samples, held_out_begin, held_out_samples;
  };
  struct Window {
    const IndexedDataset* data;
    int64_t begin;
  };
  Window Find(int64_t g, bool held_out) const;
  std::vector<int64_t> BeginsOf(const Window& window) const;
  void Draw(int64_t g, bool held_out, int64_t* out, std::vector<int64_t>* begins) const;

  int64_t seq_length_;
  bool apart_;
  Blend blend_;
  std::vector<Part> parts_;
};

// As a run's configuration says.
Batches BatchesOf(const RunConfig& config, const Corpus& data);

}  // namespace disagmoe
