// Training data: Megatron .bin/.idx pairs, and the batches that every layout draws from them alike.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace disagmoe {

// A validated, memory-mapped .bin/.idx pair (format: docs/formats.md). All dtype codes of integers are read.
class IndexedDataset {
 public:
  // `prefix` without .bin/.idx. Throws Error: missing, truncated, wrong magic, sizes that contradict each other.
  explicit IndexedDataset(const std::string& prefix);
  ~IndexedDataset();
  IndexedDataset(IndexedDataset&&) noexcept;
  int64_t num_sequences() const;
  int64_t num_documents() const;
  int64_t num_tokens() const;
  int64_t sequence_length(int64_t i) const;
  // Copies tokens [begin, begin + count) of the concatenation of all sequences.
  void Read(int64_t begin, int64_t count, int64_t* out) const;
  // Largest token id (one pass over the data, for checks against the vocabulary).
  int64_t MaxToken() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

class IndexedWriter {
 public:
  // vocab_size decides the dtype: u16 below 65500, else i32. Writes to temporary names; Finish() renames both.
  IndexedWriter(const std::string& prefix, int64_t vocab_size);
  ~IndexedWriter();  // without Finish: removes the temporary files
  void AddDocument(const std::vector<int32_t>& tokens);
  void Finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Bytes 0..255 are tokens 0..255; 256 ends a document.
inline constexpr int32_t kByteVocab = 257;
inline constexpr int32_t kByteEod = 256;
std::vector<int32_t> EncodeBytes(const std::string& text, bool add_eod);
std::string DecodeBytes(const std::vector<int32_t>& tokens);

struct PrepareStats {
  int64_t documents = 0;
  int64_t tokens = 0;
  int64_t bytes_in = 0;
};
// Text files (a blank-line separated or whole-file document each, see `document_bytes`) or JSONL ({"text": ...}),
// plain or gzip, to prefix.bin/.idx with the byte tokenizer. Text is cut into documents of about `document_bytes` at
// blank lines (0: one document a file). progress(bytes_done, bytes_total) may be null.
PrepareStats PrepareBytes(const std::vector<std::string>& inputs, const std::string& json_key, int64_t document_bytes,
                          const std::string& prefix, void (*progress)(int64_t, int64_t));

// Deterministic batches: sample j of the training (or held-out) part is tokens [j*s, j*s + s + 1) of it; epochs
// visit the samples in a permutation that depends on seed and epoch only. The position is the number of
// samples drawn, so a run resumes exactly and every layout sees the same sequences.
class Batches {
 public:
  // Throws Error if a part has fewer than one sample of seq_length + 1 tokens.
  Batches(const IndexedDataset& data, const std::string& split, int64_t seq_length, uint64_t seed);
  // Global sequence number g (0, 1, 2, ... over the whole run) of training data: seq_length + 1 tokens.
  void Train(int64_t g, int64_t* out) const;
  // Held-out sequence number g, in order, wrapping around.
  void HeldOut(int64_t g, int64_t* out) const;
  int64_t train_samples() const { return train_samples_; }
  int64_t held_out_samples() const { return held_out_samples_; }

 private:
  const IndexedDataset& data_;
  int64_t seq_length_;
  uint64_t seed_;
  int64_t train_begin_ = 0, train_samples_ = 0, held_out_begin_ = 0, held_out_samples_ = 0;
};

}  // namespace disagmoe
