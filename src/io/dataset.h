// Megatron .bin/.idx pairs. What is drawn from them: batches.h; how they are made of text: prepare.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace disagmoe {

// A validated, memory-mapped .bin/.idx pair (format: docs/formats.md), of any of Megatron's eight dtypes.
class IndexedDataset {
 public:
  // `prefix` without .bin/.idx. Throws Error: missing, truncated, wrong magic, sizes that contradict each other, floats
  // that are no whole numbers, sequences that are no text.
  explicit IndexedDataset(const std::string& prefix);
  ~IndexedDataset();
  IndexedDataset(IndexedDataset&&) noexcept;
  int64_t num_sequences() const;
  int64_t num_documents() const;
  int64_t num_tokens() const;
  int64_t sequence_length(int64_t i) const;
  // Copies tokens [begin, begin + count) of the concatenation of all sequences.
  void Read(int64_t begin, int64_t count, int64_t* out) const;
  // First token of document i.
  int64_t document_begin(int64_t i) const;
  // Of documents that are not empty: how many begin at tokens [begin, end), and where, ascending. By binary search.
  int64_t CountBegins(int64_t begin, int64_t end) const;
  std::vector<int64_t> BeginsIn(int64_t begin, int64_t end) const;
  // Smallest and largest token id, {0, -1} without tokens (one pass over the data).
  std::pair<int64_t, int64_t> TokenRange() const;
  int64_t MaxToken() const { return TokenRange().second; }
  const char* dtype() const;  // "u8", "i8", "i16", "i32", "i64", "f64", "f32", "u16"
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

}  // namespace disagmoe
