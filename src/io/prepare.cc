#include "io/prepare.h"

#include <algorithm>
#include <deque>
#include <future>
#include <utility>

#include "base/error.h"
#include "io/dataset.h"
#include "io/document_reader.h"

namespace disagmoe {
namespace {

struct EncodedBatch {
  std::vector<int32_t> tokens;
  std::vector<size_t> ends;  // tokens up to the end of each document that ends here
  int64_t file_bytes = 0, text_bytes = 0;
};

EncodedBatch Encode(const TextBatch& batch, const Tokenizer& tokenizer, const std::string& json_key) {
  EncodedBatch out{{}, {}, batch.file_bytes, batch.text_bytes};
  for (const TextPiece& piece : batch.pieces) {
    const std::vector<int32_t> tokens =
        tokenizer.Encode(piece.line > 0 ? TextOfLine(piece, batch.path, json_key) : piece.text);
    out.tokens.insert(out.tokens.end(), tokens.begin(), tokens.end());
    if (piece.ends_document) out.ends.push_back(out.tokens.size());
  }
  return out;
}

// Encodes batches side by side and writes them in the order in which they came.
class Pipeline {
 public:
  Pipeline(const Tokenizer& tokenizer, const std::string& prefix, const PrepareOptions& options, int64_t total_bytes)
      : tokenizer_(tokenizer), options_(options), total_bytes_(total_bytes), writer_(prefix, tokenizer.vocab_size()) {}

  void Take(TextBatch batch) {
    if (failed_) return;
    if (running_.size() >= static_cast<size_t>(options_.workers)) WriteFirst();
    running_.push_back(std::async(std::launch::async, [this, batch = std::move(batch)] {
      return Encode(batch, tokenizer_, options_.json_key);
    }));
  }
  void Drain() {
    while (!running_.empty()) WriteFirst();
  }
  void Finish() { writer_.Finish(); }
  const PrepareStats& stats() const { return stats_; }

 private:
  void WriteFirst() {
    std::future<EncodedBatch> first = std::move(running_.front());
    running_.pop_front();
    EncodedBatch batch;
    try {
      batch = first.get();
    } catch (...) {
      failed_ = true;  // nothing after it is of interest
      running_.clear();
      throw;
    }
    size_t begin = 0;
    for (const size_t end : batch.ends) {
      Append(batch, begin, end);
      EndDocument();
      begin = end;
    }
    Append(batch, begin, batch.tokens.size());
    stats_.bytes_in += batch.text_bytes;
    if (options_.progress) options_.progress(std::min(batch.file_bytes, total_bytes_), total_bytes_);
  }

  void Append(const EncodedBatch& batch, size_t begin, size_t end) {
    writer_.AddTokens(batch.tokens.data() + begin, end - begin);
    in_document_ += static_cast<int64_t>(end - begin);
  }

  void EndDocument() {
    if (in_document_ == 0) return;
    const int32_t eod = tokenizer_.eod();
    writer_.AddTokens(&eod, 1);
    writer_.EndDocument();
    stats_.documents += 1;
    stats_.tokens += in_document_ + 1;
    in_document_ = 0;
  }

  const Tokenizer& tokenizer_;
  const PrepareOptions& options_;
  const int64_t total_bytes_;
  IndexedWriter writer_;
  PrepareStats stats_;
  int64_t in_document_ = 0;
  bool failed_ = false;
  std::deque<std::future<EncodedBatch>> running_;  // last: their threads end before the rest goes
};

}  // namespace

PrepareStats Prepare(const std::vector<std::string>& inputs, const Tokenizer& tokenizer, const std::string& prefix,
                     const PrepareOptions& options) {
  if (options.document_bytes < 0) {
    throw Error({"document size out of range", "document_bytes", std::to_string(options.document_bytes), "0 or more", {}});
  }
  DM_CHECK(options.workers >= 1, "workers to prepare data");
  const int64_t total = TotalBytes(inputs);
  Pipeline pipeline(tokenizer, prefix, options, total);
  try {
    ReadDocuments(inputs, {options.document_bytes, !tokenizer.by_byte()},
                  [&](TextBatch batch) { pipeline.Take(std::move(batch)); });
  } catch (const Error&) {
    pipeline.Drain();  // a fault of what was read before comes first, with any number of workers
    throw;
  }
  pipeline.Drain();
  if (pipeline.stats().documents == 0) {
    throw Error({"no text in the input", std::to_string(inputs.size()) + " files", "0 documents", "at least one", {}});
  }
  if (options.progress) options.progress(total, total);
  pipeline.Finish();
  return pipeline.stats();
}

}  // namespace disagmoe
