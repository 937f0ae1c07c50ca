#include "io/document_reader.h"

#include <errno.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/file.h"
#include "io/text_input.h"

namespace disagmoe {
namespace {

constexpr size_t kChunk = 1 << 20;
constexpr size_t kBatch = 256 << 10;
constexpr size_t kMaxText = size_t{1} << 30;

// Collects pieces until there are enough for a batch.
class BatchMaker {
 public:
  BatchMaker(const ReaderOptions& options, const std::function<void(TextBatch)>& take)
      : whole_documents_(options.whole_documents), take_(take) {}

  void StartFile(const std::string& path, int64_t bytes_before) {
    batch_.path = path;
    bytes_before_ = bytes_before;
    batch_.file_bytes = bytes_before;
  }
  void Read(int64_t position, size_t text_bytes) {
    batch_.file_bytes = std::max(batch_.file_bytes, bytes_before_ + position);
    batch_.text_bytes += static_cast<int64_t>(text_bytes);
  }

  void Append(const char* text, size_t bytes) {
    in_document_ += static_cast<int64_t>(bytes);
    while (bytes > 0) {
      const size_t n = whole_documents_ ? bytes : std::min(bytes, kBatch - std::min(size_, kBatch - 1));
      if (piece_.text.size() + n > kMaxText) {
        throw Error({"a document is too long to be encoded at once", batch_.path, "more than 1 GiB", {},
                     "cut it with --document-bytes"});
      }
      piece_.text.append(text, n);
      size_ += n;
      text += n;
      bytes -= n;
      if (!whole_documents_ && size_ >= kBatch) {
        AddPiece(false);
        Flush();
      }
    }
  }
  void EndDocument() {
    if (in_document_ > 0) AddPiece(true);
    in_document_ = 0;
    if (size_ >= kBatch) Flush();
  }
  void AddLine(std::string text, int64_t number) {
    size_ += text.size();
    batch_.pieces.push_back({std::move(text), true, number});
    if (size_ >= kBatch) Flush();
  }
  int64_t in_document() const { return in_document_; }

  void Flush() {
    TextBatch full = std::move(batch_);
    batch_ = {full.path, {}, full.file_bytes, 0};
    size_ = piece_.text.size();
    take_(std::move(full));
  }

 private:
  void AddPiece(bool ends_document) {
    batch_.pieces.push_back({std::move(piece_.text), ends_document, 0});
    piece_.text.clear();
  }

  bool whole_documents_;
  const std::function<void(TextBatch)>& take_;
  TextBatch batch_;
  TextPiece piece_;
  size_t size_ = 0;
  int64_t in_document_ = 0, bytes_before_ = 0;
};

// Plain text: a document ends after the first blank line that finds it long enough.
class TextReader {
 public:
  TextReader(BatchMaker* sink, int64_t document_bytes) : sink_(*sink), document_bytes_(document_bytes) {}

  void Feed(const char* p, size_t bytes) {
    if (document_bytes_ == 0) return sink_.Append(p, bytes);
    const char *end = p + bytes, *unsent = p;
    while (p < end) {
      const void* found = std::memchr(p, '\n', static_cast<size_t>(end - p));
      const char* line_end = found ? static_cast<const char*>(found) : end;
      blank_ = blank_ && std::all_of(p, line_end, [](char c) { return c == ' ' || c == '\t' || c == '\r'; });
      const char* next = found ? line_end + 1 : end;
      line_bytes_ += next - p;
      p = next;
      if (!found) break;
      // Without the blank line itself: a second one opens no document of its own.
      if (blank_ && sink_.in_document() + (p - unsent) - line_bytes_ >= document_bytes_) {
        sink_.Append(unsent, static_cast<size_t>(p - unsent));
        sink_.EndDocument();
        unsent = p;
      }
      NewLine();
    }
    sink_.Append(unsent, static_cast<size_t>(end - unsent));
  }

  void EndFile() {
    sink_.EndDocument();
    NewLine();
  }

 private:
  void NewLine() {
    blank_ = true;
    line_bytes_ = 0;
  }

  BatchMaker& sink_;
  int64_t document_bytes_;
  bool blank_ = true;  // the line so far
  int64_t line_bytes_ = 0;
};

Error BadLine(const std::string& what, const std::string& path, int64_t line, const std::string& got,
              const std::string& expected) {
  return Error({what, path + ":" + std::to_string(line), got, expected, {}});
}

class LineReader {
 public:
  LineReader(BatchMaker* sink, std::string path) : sink_(*sink), path_(std::move(path)) {}

  void Feed(const char* p, size_t bytes) {
    const char* end = p + bytes;
    while (p < end) {
      const void* found = std::memchr(p, '\n', static_cast<size_t>(end - p));
      const char* line_end = found ? static_cast<const char*>(found) : end;
      if (line_.size() + static_cast<size_t>(line_end - p) > kMaxText) {
        throw BadLine("the line is too long", path_, number_ + 1, "more than 1 GiB", "one JSON object a line");
      }
      line_.append(p, line_end);
      p = line_end + (found ? 1 : 0);
      if (found) EndFile();
    }
  }

  void EndFile() {
    ++number_;
    if (line_.find_first_not_of(" \t\r") != std::string::npos) sink_.AddLine(std::move(line_), number_);
    line_.clear();
  }

 private:
  BatchMaker& sink_;
  std::string path_, line_;
  int64_t number_ = 0;
};

bool IsJsonl(std::string path) {
  if (path.ends_with(".gz")) path.resize(path.size() - 3);
  return path.ends_with(".jsonl") || path.ends_with(".ndjson") || path.ends_with(".json");
}

int64_t FileBytes(const std::string& path) {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) throw SystemError("cannot open the file", path, errno);
  if (S_ISDIR(info.st_mode)) throw Error({"not a file", path, "a folder", "a text, .jsonl or gzip file", {}});
  return S_ISREG(info.st_mode) ? static_cast<int64_t>(info.st_size) : 0;
}

// The line's beginning, fit for a terminal.
std::string Excerpt(const std::string& line) {
  std::string text = line.substr(0, 60);
  for (char& c : text) c = c >= ' ' && c <= '~' ? c : '?';
  return text + (line.size() > 60 ? "..." : "");
}

template <typename Reader>
void ReadAll(const std::string& path, BatchMaker& sink, Reader reader) {
  TextInput input(path);
  std::vector<char> chunk(kChunk);
  while (const size_t n = input.Read(chunk.data(), chunk.size())) {
    sink.Read(input.Position(), n);
    reader.Feed(chunk.data(), n);
  }
  reader.EndFile();
}

}  // namespace

int64_t TotalBytes(const std::vector<std::string>& paths) {
  int64_t total = 0;
  for (const std::string& path : paths) total += FileBytes(path);
  return total;
}

void ReadDocuments(const std::vector<std::string>& paths, const ReaderOptions& options,
                   const std::function<void(TextBatch)>& take) {
  BatchMaker sink(options, take);
  int64_t before = 0;
  for (const std::string& path : paths) {
    sink.StartFile(path, before);
    try {
      if (IsJsonl(path)) {
        ReadAll(path, sink, LineReader(&sink, path));
      } else {
        ReadAll(path, sink, TextReader(&sink, options.document_bytes));
      }
    } catch (const Error&) {
      sink.Flush();  // what is wrong there comes first
      throw;
    }
    sink.Flush();  // a batch is of one file
    before += FileBytes(path);
  }
}

std::string TextOfLine(const TextPiece& piece, const std::string& path, const std::string& key) {
  const std::string expected = "an object with the string \"" + key + "\"";
  nlohmann::json json;
  try {
    json = nlohmann::json::parse(piece.text);
  } catch (const nlohmann::json::exception& e) {
    throw BadLine("not JSON (" + std::string(e.what()) + ")", path, piece.line, Excerpt(piece.text), expected);
  }
  const auto value = json.is_object() ? json.find(key) : json.end();
  if (value == json.end() || !value->is_string()) {
    throw BadLine("no text in the line", path, piece.line, Excerpt(piece.text), expected);
  }
  return value->get<std::string>();
}

}  // namespace disagmoe
