// Training data: Megatron .bin/.idx pairs, and the batches that every layout draws from them alike.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
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
  // Smallest and largest token id, {0, -1} without tokens (one pass over the data).
  std::pair<int64_t, int64_t> TokenRange() const;
  int64_t MaxToken() const { return TokenRange().second; }
  const char* dtype() const;  // "u8", "i8", "i16", "i32", "i64", "u16"
  int64_t bin_bytes() const;
  int64_t idx_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

class IndexedWriter {
 public:
  // vocab_size decides the dtype: u16 below 65500, else i32. Writes to temporary names; Finish() renames both.
  IndexedWriter(const std::string& prefix, int64_t vocab_size);
  ~IndexedWriter();  // without Finish: removes the temporary files
  // Throws Error for a token outside [0, vocab_size) or a document above 2^31 - 1 tokens.
  void AddDocument(const std::vector<int32_t>& tokens);
  // The same in pieces, for documents that do not fit in memory. A document may be empty.
  void AddTokens(const int32_t* tokens, size_t count);
  void EndDocument();
  // A kill at any moment leaves the old pair, no index, or the new pair; never parts of both.
  void Finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// What `disagmoe data inspect` prints.
struct InspectReport {
  int64_t sequences = 0, documents = 0, tokens = 0;
  std::string dtype;
  int64_t min_token = 0, max_token = -1;
  int64_t bin_bytes = 0, idx_bytes = 0;
};
InspectReport Inspect(const std::string& prefix);

// Bytes 0..255 are tokens 0..255; 256 ends a document.
inline constexpr int32_t kByteVocab = 257;
inline constexpr int32_t kByteEod = 256;
std::vector<int32_t> EncodeBytes(const std::string& text, bool add_eod);
// Tokens that are no bytes are left out.
std::string DecodeBytes(const std::vector<int32_t>& tokens);

struct PrepareStats {
  int64_t documents = 0;
  int64_t tokens = 0;
  int64_t bytes_in = 0;  // of text, after decompression
};
// Text files or JSONL, plain or gzip (dictzip too), to prefix.bin/.idx with the byte tokenizer; every document ends with
// kByteEod, empty ones are skipped. Files named .jsonl, .ndjson or .json (or those and .gz) are JSONL: one object a line,
// text under `json_key` ("" means "text"). All others are text, kept byte for byte and cut into documents at the first
// blank line after `document_bytes` (0: one document a file). progress(bytes_done, bytes_total) counts bytes of the input
// files and may be null. Memory does not grow with the files, except 12 bytes a document.
PrepareStats PrepareBytes(const std::vector<std::string>& inputs, const std::string& json_key, int64_t document_bytes,
                          const std::string& prefix, void (*progress)(int64_t, int64_t));

// Deterministic batches: sample j of the training (or held-out) part is tokens [j*s, j*s + s + 1) of it; epochs
// visit the samples in a permutation that depends on seed and epoch only. The position is the number of
// samples drawn, so a run resumes exactly and every layout sees the same sequences.
class Batches {
 public:
  // `split`: weights of the parts by tokens, "949,50,1" or "0.95,0.05": training, held-out, the rest is not used. No
  // held-out part or weight 0: held_out_samples() is 0. Throws Error if one of the two parts has fewer than one sample
  // of seq_length + 1 tokens. `data` must outlive this.
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
