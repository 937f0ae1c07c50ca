// Text to training data.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "io/tokenizer.h"

namespace disagmoe {

struct PrepareOptions {
  std::string json_key = "text";
  int64_t document_bytes = 0;
  int workers = 1;  // threads that encode; the output is the same with any number of them
  // Bytes of the input files, those that are done and all; called by the calling thread.
  std::function<void(int64_t, int64_t)> progress;
};

struct PrepareStats {
  int64_t documents = 0;
  int64_t tokens = 0;
  int64_t bytes_in = 0;  // of text, after decompression
};

// Text files or JSONL, plain or gzip (dictzip too), to prefix.bin/.idx; every document ends with the tokenizer's eod,
// empty ones are skipped. Files named .jsonl, .ndjson or .json (or those and .gz) are JSONL: one object a line, text under
// json_key. All others are text, kept byte for byte and cut into documents at the first blank line after document_bytes
// (0: one document a file). Memory: 12 bytes a document, and a few documents for each worker; with the byte tokenizer
// pieces of them.
PrepareStats Prepare(const std::vector<std::string>& inputs, const Tokenizer& tokenizer, const std::string& prefix,
                     const PrepareOptions& options);

}  // namespace disagmoe
