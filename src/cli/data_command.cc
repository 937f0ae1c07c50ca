#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/error.h"
#include "cli/commands.h"
#include "io/batches.h"
#include "io/hf_tokenizer.h"
#include "io/prepare.h"

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

struct Inspected {
  std::string prefix;
  double share = 1;
  int64_t documents = 0, sequences = 0, tokens = 0, longest = 0;
  std::string dtype;
  std::pair<int64_t, int64_t> range;
  std::vector<int64_t> beginning;
};

Inspected Look(const IndexedDataset& data, const std::string& prefix, double share) {
  Inspected in{prefix, share, data.num_documents(), data.num_sequences(), data.num_tokens(), 0, data.dtype(), data.TokenRange(), {}};
  for (int64_t i = 0; i < in.documents; ++i) {
    const int64_t end = i + 1 < in.documents ? data.document_begin(i + 1) : in.tokens;
    in.longest = std::max(in.longest, end - data.document_begin(i));
  }
  in.beginning.resize(static_cast<size_t>(std::min<int64_t>(in.tokens, 200)));
  data.Read(0, static_cast<int64_t>(in.beginning.size()), in.beginning.data());
  return in;
}

ordered_json Json(const Inspected& in) {
  return {{"path", in.prefix},          {"documents", in.documents},      {"sequences", in.sequences},
          {"tokens", in.tokens},        {"min_token", in.range.first},    {"max_token", in.range.second},
          {"dtype", in.dtype},          {"longest_document", in.longest}, {"beginning", in.beginning}};
}

void Print(const Inspected& in, const Tokenizer& tokenizer) {
  std::printf("%s: documents %lld, sequences %lld, tokens %lld (%s), from %lld to %lld, longest document %lld\n", in.prefix.c_str(),
              static_cast<long long>(in.documents), static_cast<long long>(in.sequences), static_cast<long long>(in.tokens),
              in.dtype.c_str(), static_cast<long long>(in.range.first), static_cast<long long>(in.range.second),
              static_cast<long long>(in.longest));
  if (in.range.first < 0 || in.range.second >= tokenizer.vocab_size()) return;  // of another tokenizer
  std::printf("begins: %s\n", Harmless(tokenizer.Decode({in.beginning.begin(), in.beginning.end()})).c_str());
}

int InspectData(const DataArguments& arguments) {
  const bool blend = arguments.inspect.find(' ') != std::string::npos;
  const Corpus corpus(blend ? "" : arguments.inspect, {arguments.inspect});
  const auto tokenizer = LoadTokenizer(arguments.tokenizer);
  double total = 0;
  for (int64_t w : corpus.weights()) total += static_cast<double>(w);
  std::vector<Inspected> sets;
  for (size_t i = 0; i < corpus.size(); ++i) {
    sets.push_back(Look(corpus.data(i), corpus.prefix(i), static_cast<double>(corpus.weights()[i]) / total));
  }
  if (!blend) {
    if (arguments.json) std::puts(Json(sets[0]).dump().c_str());
    else Print(sets[0], *tokenizer);
    return 0;
  }
  ordered_json json = ordered_json::array();
  for (const Inspected& in : sets) {
    json.push_back(Json(in));
    json.back()["share"] = in.share;
    if (arguments.json) continue;
    // How often it is read while as many tokens are drawn as the blend has.
    std::printf("%.1f %% of the samples, %.2f epochs of it in %lld tokens\n", 100 * in.share,
                in.share * static_cast<double>(corpus.num_tokens()) / static_cast<double>(std::max<int64_t>(1, in.tokens)),
                static_cast<long long>(corpus.num_tokens()));
    Print(in, *tokenizer);
  }
  if (arguments.json) std::puts(json.dump().c_str());
  return 0;
}

// The script beside the program does it all: it has the tokenizer, and worker processes of its own.
[[noreturn]] void PrepareByScript(const DataArguments& arguments) {
  std::vector<std::string> words = {"prepare", "--tokenizer", arguments.tokenizer, "--out", arguments.out,
                                    "--json-key", arguments.json_key,
                                    "--document-bytes=" + std::to_string(arguments.document_bytes)};
  if (arguments.workers > 0) words.push_back("--workers=" + std::to_string(arguments.workers));
  if (!arguments.eod.empty()) words.push_back("--eod=" + arguments.eod);
  if (arguments.special_tokens) words.push_back("--special-tokens");
  if (arguments.json) words.push_back("--json");
  words.push_back("--");
  words.insert(words.end(), arguments.inputs.begin(), arguments.inputs.end());
  ExecHfProgram(FindHfProgram(), words);
}

}  // namespace

int DataCommand(const DataArguments& arguments) {
  if (!arguments.inspect.empty()) return InspectData(arguments);
  if (arguments.inputs.empty()) {
    throw Error({"no input", "disagmoe data", {}, "files of text or JSON lines", "disagmoe data --help"});
  }
  if (arguments.document_bytes < 0) {
    throw Error({"value not allowed", "--document-bytes", std::to_string(arguments.document_bytes), "0 or more", {}});
  }
  if (arguments.workers < 0 || arguments.workers > 1024) {
    throw Error({"value not allowed", "--workers", std::to_string(arguments.workers), "1 to 1024, or 0 for one a core", {}});
  }
  if (IsHfTokenizer(arguments.tokenizer)) PrepareByScript(arguments);
  if (!arguments.eod.empty() || arguments.special_tokens) {
    throw Error({"not a setting of this tokenizer", arguments.eod.empty() ? "--special-tokens" : "--eod",
                 arguments.tokenizer, "a Hugging Face tokenizer.json or its folder", {}});
  }
  const auto tokenizer = LoadTokenizer(arguments.tokenizer);
  PrepareOptions options;
  options.json_key = arguments.json_key;
  options.document_bytes = arguments.document_bytes;
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  options.workers = arguments.workers > 0 ? static_cast<int>(arguments.workers) : static_cast<int>(cores);
  if (isatty(STDERR_FILENO)) options.progress = ShowProgress;
  const std::filesystem::path folder = std::filesystem::path(arguments.out).parent_path();
  std::error_code ignored;  // the writer says what is wrong
  if (!folder.empty()) std::filesystem::create_directories(folder, ignored);
  const PrepareStats stats = Prepare(arguments.inputs, *tokenizer, arguments.out, options);
  if (arguments.json) {
    const ordered_json json = {{"path", arguments.out},
                               {"documents", stats.documents},
                               {"tokens", stats.tokens},
                               {"bytes_in", stats.bytes_in},
                               {"vocab_size", tokenizer->vocab_size()},
                               {"eod", tokenizer->eod()}};
    std::puts(json.dump().c_str());
    return 0;
  }
  std::printf("%s.bin and .idx: documents %lld, tokens %lld, from %lld bytes of text\n", arguments.out.c_str(),
              static_cast<long long>(stats.documents), static_cast<long long>(stats.tokens),
              static_cast<long long>(stats.bytes_in));
  return 0;
}

}  // namespace disagmoe
