// Files of text as documents, in batches that can be encoded apart from one another. Private to this folder.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace disagmoe {

// Text of one document, or a part of it; or a line of JSON.
struct TextPiece {
  std::string text;
  bool ends_document = true;
  int64_t line = 0;  // JSON: its number
};

struct TextBatch {
  std::string path;
  std::vector<TextPiece> pieces;
  int64_t file_bytes = 0;  // of this file and those before it, read so far
  int64_t text_bytes = 0;  // the same after decompression, read since the last batch
};

struct ReaderOptions {
  int64_t document_bytes = 0;
  bool whole_documents = true;  // false: a piece may be part of a document
};

// Reads the files in order and hands over their batches, of about 256 KiB. If a file is bad, all that was read before is
// handed over first.
void ReadDocuments(const std::vector<std::string>& paths, const ReaderOptions& options,
                   const std::function<void(TextBatch)>& take);
// The text of a JSON line; throws Error that names the line.
std::string TextOfLine(const TextPiece& piece, const std::string& path, const std::string& key);
// Size of all files together; Error for one that is none.
int64_t TotalBytes(const std::vector<std::string>& paths);

}  // namespace disagmoe
