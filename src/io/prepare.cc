#include <errno.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/dataset.h"
#include "io/file.h"
#include "io/text_input.h"

namespace disagmoe {
namespace {

constexpr size_t kChunk = 1 << 20;
constexpr size_t kMaxLine = size_t{1} << 30;

// Documents as they come, in pieces of any size.
class DocumentSink {
 public:
  DocumentSink(const std::string& prefix, PrepareStats* stats) : writer_(prefix, kByteVocab), stats_(*stats) {}

  void Append(const char* text, size_t bytes) {
    in_document_ += static_cast<int64_t>(bytes);
    while (bytes > 0) {
      const size_t n = std::min(bytes, kPiece);
      tokens_.assign(reinterpret_cast<const uint8_t*>(text), reinterpret_cast<const uint8_t*>(text) + n);
      writer_.AddTokens(tokens_.data(), n);
      text += n;
      bytes -= n;
    }
  }

  void EndDocument() {
    if (in_document_ == 0) return;
    writer_.AddTokens(&kByteEod, 1);
    writer_.EndDocument();
    stats_.documents += 1;
    stats_.tokens += in_document_ + 1;
    in_document_ = 0;
  }

  int64_t in_document() const { return in_document_; }
  void Finish() { writer_.Finish(); }

 private:
  static constexpr size_t kPiece = 64 << 10;
  IndexedWriter writer_;
  PrepareStats& stats_;
  std::vector<int32_t> tokens_;
  int64_t in_document_ = 0;
};

// Plain text: a document ends after the first blank line that finds it long enough.
class TextReader {
 public:
  TextReader(DocumentSink* sink, int64_t document_bytes) : sink_(*sink), document_bytes_(document_bytes) {}

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

  DocumentSink& sink_;
  int64_t document_bytes_;
  bool blank_ = true;  // the line so far
  int64_t line_bytes_ = 0;
};

class JsonlReader {
 public:
  JsonlReader(DocumentSink* sink, std::string path, std::string key)
      : sink_(*sink), path_(std::move(path)), key_(std::move(key)) {}

  void Feed(const char* p, size_t bytes) {
    const char* end = p + bytes;
    while (p < end) {
      const void* found = std::memchr(p, '\n', static_cast<size_t>(end - p));
      const char* line_end = found ? static_cast<const char*>(found) : end;
      if (line_.size() + static_cast<size_t>(line_end - p) > kMaxLine) {
        throw Bad("the line is too long", "more than 1 GiB", "one JSON object a line");
      }
      line_.append(p, line_end);
      p = line_end + (found ? 1 : 0);
      if (found) EndLine();
    }
  }

  void EndFile() { EndLine(); }

 private:
  void EndLine() {
    ++number_;
    if (line_.find_first_not_of(" \t\r") != std::string::npos) {
      const std::string text = Text();
      sink_.Append(text.data(), text.size());
      sink_.EndDocument();
    }
    line_.clear();
  }

  std::string Text() const {
    const std::string expected = "an object with the string \"" + key_ + "\"";
    nlohmann::json json;
    try {
      json = nlohmann::json::parse(line_);
    } catch (const nlohmann::json::exception& e) {
      throw Bad("not JSON (" + std::string(e.what()) + ")", Excerpt(), expected);
    }
    const auto value = json.is_object() ? json.find(key_) : json.end();
    if (value == json.end() || !value->is_string()) {
      throw Bad("no text in the line", Excerpt(), expected);
    }
    return value->get<std::string>();
  }

  // The line's beginning, fit for a terminal.
  std::string Excerpt() const {
    std::string text = line_.substr(0, 60);
    for (char& c : text) c = c >= ' ' && c <= '~' ? c : '?';
    return text + (line_.size() > 60 ? "..." : "");
  }

  Error Bad(const std::string& what, const std::string& got, const std::string& expected) const {
    return Error({what, path_ + ":" + std::to_string(number_), got, expected, {}});
  }

  DocumentSink& sink_;
  std::string path_, key_, line_;
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

}  // namespace

std::vector<int32_t> EncodeBytes(const std::string& text, bool add_eod) {
  std::vector<int32_t> tokens;
  tokens.reserve(text.size() + 1);
  for (unsigned char c : text) tokens.push_back(c);
  if (add_eod) tokens.push_back(kByteEod);
  return tokens;
}

std::string DecodeBytes(const std::vector<int32_t>& tokens) {
  std::string text;
  for (int32_t token : tokens) {
    if (token >= 0 && token < 256) text += static_cast<char>(token);
  }
  return text;
}

PrepareStats PrepareBytes(const std::vector<std::string>& inputs, const std::string& json_key, int64_t document_bytes,
                          const std::string& prefix, void (*progress)(int64_t, int64_t)) {
  if (document_bytes < 0) {
    throw Error({"document size out of range", "document_bytes", std::to_string(document_bytes), "0 or more", {}});
  }
  int64_t total = 0, before = 0;
  for (const std::string& path : inputs) total += FileBytes(path);
  PrepareStats stats;
  DocumentSink sink(prefix, &stats);
  std::vector<char> chunk(kChunk);
  for (const std::string& path : inputs) {
    TextInput input(path);
    const auto read_all = [&](auto reader) {
      while (const size_t n = input.Read(chunk.data(), chunk.size())) {
        stats.bytes_in += static_cast<int64_t>(n);
        reader.Feed(chunk.data(), n);
        if (progress) progress(std::min(before + input.Position(), total), total);
      }
      reader.EndFile();
    };
    if (IsJsonl(path)) {
      read_all(JsonlReader(&sink, path, json_key.empty() ? "text" : json_key));
    } else {
      read_all(TextReader(&sink, document_bytes));
    }
    before += FileBytes(path);
  }
  if (stats.documents == 0) {
    throw Error({"no text in the input", std::to_string(inputs.size()) + " files", "0 documents", "at least one", {}});
  }
  if (progress) progress(total, total);
  sink.Finish();
  return stats;
}

}  // namespace disagmoe
