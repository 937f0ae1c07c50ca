// disagmoe-worker: the commands that need tensors. Started by disagmoe, which has checked the configuration; the words
// are the same.
#include <malloc.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "runtime/local_run.h"
#include "runtime/process_run.h"
#include "runtime/generate.h"
#include "runtime/verify.h"

namespace disagmoe {
namespace {

struct Words {
  std::string command, target;
  std::vector<std::string> overrides;
  bool json = false;
  // "--name VALUE" or the default.
  std::vector<std::pair<std::string, std::string>> options;
  std::string Option(const std::string& name, const std::string& otherwise) const {
    for (const auto& [n, v] : options) {
      if (n == name) return v;
    }
    return otherwise;
  }
};

Words Parse(int argc, char** argv) {
  Words w;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--json") {
      w.json = true;
    } else if (word.starts_with("--")) {
      const size_t eq = word.find('=');
      if (eq != std::string::npos) {
        w.options.emplace_back(word.substr(2, eq - 2), word.substr(eq + 1));
      } else if (i + 1 < argc) {
        w.options.emplace_back(word.substr(2), argv[++i]);
      } else {
        throw Error({"an option without its value", word, "", "", ""});
      }
    } else if (w.command.empty()) {
      w.command = word;
    } else if (w.target.empty()) {
      w.target = word;
    } else {
      w.overrides.push_back(word);
    }
  }
  return w;
}

int Train(const Words& w) {
  const RunConfig config = LoadConfig(w.target, w.overrides);
  if (config.transport.kind != "inproc") return RunProcess(config, w.json);
  RankContext base;
  base.json = w.json;
  RunThreads(config, base);
  return 0;
}

std::vector<int64_t> Numbers(const std::string& text) {
  std::vector<int64_t> out;
  for (size_t begin = 0; begin < text.size(); begin = text.find(',', begin) == text.npos ? text.size() : text.find(',', begin) + 1) {
    out.push_back(std::stoll(text.substr(begin)));
  }
  return out;
}

int PrintSample(const Words& w) {
  SampleOptions options;
  options.from = w.target;
  options.tokenizer = w.Option("tokenizer", "");
  options.prompt = w.Option("prompt", options.prompt);
  options.prompt_tokens = Numbers(w.Option("prompt-tokens", ""));
  options.tokens = std::stoll(w.Option("tokens", "300"));
  options.sampling.temperature = std::stod(w.Option("temperature", "0.8"));
  options.sampling.top_k = std::stoll(w.Option("top-k", "0"));
  options.sampling.top_p = std::stod(w.Option("top-p", "1"));
  options.sampling.seed = std::stoull(w.Option("seed", "1"));
  const Sampled sampled = Generate(options);
  if (!w.json) {
    std::printf("%s\n", sampled.text.c_str());
    return 0;
  }
  const nlohmann::ordered_json json = {{"text", sampled.text},
                                       {"prompt_tokens", sampled.prompt},
                                       {"tokens", sampled.tokens},
                                       {"tokens_per_second", static_cast<double>(sampled.tokens.size() - 1) / std::max(sampled.seconds, 1e-9)}};
  std::puts(json.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace).c_str());
  return 0;
}

int RunCommand(const Words& w) {
  if (w.command == "train") return Train(w);
  if (w.command == "reference") {
    Status status;
    RankContext context;
    context.status = &status;
    context.json = w.json;
    TrainReference(LoadConfig(w.target, w.overrides), context);
    return 0;
  }
  if (w.command == "verify") {
    VerifyOptions options;
    options.out = w.target;
    options.steps = std::stoll(w.Option("steps", "20"));
    options.threads = std::stoi(w.Option("threads", "0"));
    options.sample = std::stoll(w.Option("sample", "300"));
    options.json = w.json;
    return Verify(options);
  }
  if (w.command == "generate") return PrintSample(w);
  throw Error({"unknown command", "disagmoe-worker", "'" + w.command + "'", "train, reference, verify or generate", "start disagmoe instead"});
}

}  // namespace
}  // namespace disagmoe

int main(int argc, char** argv) {
  // Tensors above 32 MiB would be mapped and faulted in anew at every use: four times slower. Freed memory stays here.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 2047 << 20);
  bool json = false;
  for (int i = 1; i < argc; ++i) json |= std::strcmp(argv[i], "--json") == 0;
  auto fail = [json](const disagmoe::ErrorParts& parts, const char* line, int code) {
    if (json) std::puts(disagmoe::ErrorJson(parts).c_str());
    std::fprintf(stderr, "disagmoe: error: %s\n", line);
    return code;
  };
  try {
    return disagmoe::RunCommand(disagmoe::Parse(argc, argv));
  } catch (const disagmoe::WaitFailed& e) {
    return fail(e.parts(), e.what(), 1);
  } catch (const disagmoe::Error& e) {
    return fail(e.parts(), e.what(), 2);
  } catch (const std::exception& e) {
    return fail({.what = e.what(), .where = {}, .got = {}, .expected = {}, .hint = {}}, e.what(), 3);
  }
}
