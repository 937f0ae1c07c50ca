#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/commands.h"
#include "io/dataset.h"

namespace disagmoe {
namespace {

using nlohmann::ordered_json;

void ShowProgress(int64_t done, int64_t total) {
  std::fprintf(stderr, "\r%.1f of %.1f MB read%s", static_cast<double>(done) / 1e6, static_cast<double>(total) / 1e6,
               done == total ? "\n" : "");
}

// Text of whatever origin: nothing in it may steer the terminal. Bytes above ASCII may be controls too (C1).
std::string Harmless(const std::string& text) {
  std::string out;
  for (unsigned char c : text) {
    if ((c >= 0x20 && c < 0x7f) || c == '\n') {
      out += static_cast<char>(c);
    } else {
      char code[5];
      std::snprintf(code, sizeof code, "\\x%02x", c);
      out += code;
    }
  }
  return out;
}

int Inspect(const DataArguments& arguments) {
  const IndexedDataset data(arguments.inspect);
  const auto [min_token, max_token] = data.TokenRange();
  std::vector<int64_t> beginning(static_cast<size_t>(std::min<int64_t>(data.num_tokens(), 200)));
  data.Read(0, static_cast<int64_t>(beginning.size()), beginning.data());
  if (arguments.json) {
    const ordered_json json = {{"path", arguments.inspect},     {"documents", data.num_documents()},
                               {"sequences", data.num_sequences()}, {"tokens", data.num_tokens()},
                               {"min_token", min_token},        {"max_token", max_token},
                               {"beginning", beginning}};
    std::puts(json.dump().c_str());
    return 0;
  }
  std::printf("%s: documents %lld, sequences %lld, tokens %lld, from %lld to %lld\n", arguments.inspect.c_str(),
              static_cast<long long>(data.num_documents()), static_cast<long long>(data.num_sequences()),
              static_cast<long long>(data.num_tokens()), static_cast<long long>(min_token),
              static_cast<long long>(max_token));
  if (min_token < 0 || max_token >= kByteVocab) return 0;  // tokens of another tokenizer are not bytes
  std::printf("begins: %s\n", Harmless(DecodeBytes({beginning.begin(), beginning.end()})).c_str());
  return 0;
}

}  // namespace

int DataCommand(const DataArguments& arguments) {
  if (!arguments.inspect.empty()) return Inspect(arguments);
  if (arguments.inputs.empty()) {
    throw Error({"no input", "disagmoe data", {}, "files of text or JSON lines", "disagmoe data --help"});
  }
  if (arguments.document_bytes < 0) {
    throw Error({"value not allowed", "--document-bytes", std::to_string(arguments.document_bytes), "0 or more", {}});
  }
  const std::filesystem::path folder = std::filesystem::path(arguments.out).parent_path();
  std::error_code ignored;  // the writer says what is wrong
  if (!folder.empty()) std::filesystem::create_directories(folder, ignored);
  const PrepareStats stats = PrepareBytes(arguments.inputs, arguments.json_key, arguments.document_bytes, arguments.out,
                                          isatty(STDERR_FILENO) ? ShowProgress : nullptr);
  if (arguments.json) {
    const ordered_json json = {{"path", arguments.out},
                               {"documents", stats.documents},
                               {"tokens", stats.tokens},
                               {"bytes_in", stats.bytes_in},
                               {"vocab_size", kByteVocab}};
    std::puts(json.dump().c_str());
    return 0;
  }
  std::printf("%s.bin and .idx: documents %lld, tokens %lld, from %lld bytes of text\n", arguments.out.c_str(),
              static_cast<long long>(stats.documents), static_cast<long long>(stats.tokens),
              static_cast<long long>(stats.bytes_in));
  return 0;
}

}  // namespace disagmoe
