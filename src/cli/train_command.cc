// train and reference: check everything that can be checked without tensors, then hand over.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/launch.h"
#include "io/batches.h"
#include "io/initial_weights.h"
#include "spec/config_keys.h"
#include "spec/layout.h"
#include "spec/model_shape.h"
#include "spec/trainable.h"
#include "transport/launch_env.h"
#include "transport/ucx.h"

namespace disagmoe {
namespace {

// What the configuration names, with the reason in its words.
Corpus OpenData(const DataConfig& data) {
  try {
    return Corpus(data.path, data.blend);
  } catch (const Error& error) {
    ErrorParts parts = error.parts();
    if (parts.where == "data.blend") throw;
    parts.where = (data.path.empty() ? "data.blend, " : "data.path, ") + parts.where;
    if (parts.hint.empty()) parts.hint = "disagmoe data --out build/data/text FILE makes a pair, then data.path=build/data/text";
    throw Error(parts);
  }
}

RankEnv Ranks() {
  return DetectRanks([](const char* name) { return std::getenv(name); });
}

// Each rank would train the whole run, all into the same folder.
void RequireOneProcess(const std::string& kind) {
  const RankEnv ranks = Ranks();
  if (!ranks.present || ranks.world == 1) return;
  throw Error({"this run is one process, and several were started", ranks.source, std::to_string(ranks.world) + " ranks",
               "1 (" + kind + ")", "start it without torchrun, srun or mpirun"});
}

// What a start on this machine alone needs at least, without activations: a plan may be of a cluster.
void RequireMemory(const RunConfig& config, const std::string& path, bool reference) {
  constexpr double kProcess = 0.1e9;        // of a worker, mostly libtorch
  constexpr double kBytesAParameter = 16;   // fp32: weight, gradient, two moments
  if (!reference && Ranks().present) return;
  const int processes = reference || config.transport.kind == "inproc" ? 1 : config.layout.workers();
  const std::string& device = config.device.type;
  const bool on_cpu = device == "cpu" || (device == "auto" && !std::filesystem::exists("/dev/nvidiactl"));
  const double state = on_cpu ? kBytesAParameter * static_cast<double>(ShapeOf(config.model, "").TotalParams()) : 0;
  const double need = processes * kProcess + state;
  const double there = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  if (need <= there) return;
  char got[120], most[80];
  std::snprintf(got, sizeof got, "%d processes and %.1f GB of parameters and their states", processes, state * 1e-9);
  std::snprintf(most, sizeof most, "at most this machine's %.1f GB in all", there * 1e-9);
  throw Error({"this machine cannot hold the run", path, got, most,
               "on several: torchrun, srun or mpirun, see `disagmoe train --help`; or a smaller model or layout"});
}

RunConfig CheckedConfig(const TrainArguments& arguments, bool reference) {
  const RunConfig config = LoadConfig(arguments.config, arguments.overrides);
  RequireTrainable(config, arguments.config);
  if (reference) RequireOneProcess("the reference");
  if (config.transport.kind == "inproc") RequireOneProcess("transport.kind = inproc");
  TrainingSchedule(config);
  const int64_t held_out = config.train.eval_micro_batches, replicas = config.layout.replicas;
  for (int64_t share : {held_out / replicas, (held_out + replicas - 1) / replicas}) {
    if (share > 0) ScheduleOf(config, share, false);
  }
  RequireMemory(config, arguments.config, reference);
  if (config.train.resume.empty()) CheckInitialWeights(config);
  RequireData(config, arguments.config);
  std::error_code error;
  std::filesystem::create_directories(config.out, error);
  if (error) throw Error({"cannot create the folder of the run", config.out, error.message(), {}, "out=DIR names another"});
  return config;
}

}  // namespace

void RequireData(const RunConfig& config, const std::string& path) {
  if (config.data.path.empty() && config.data.blend.empty()) {
    throw Error({"no training data", path + ", data.path", "\"\"", "the prefix of a .bin/.idx pair",
                 "disagmoe data --out build/data/text FILE, then data.path=build/data/text"});
  }
  const Corpus data = OpenData(config.data);
  BatchesOf(config, data);
  for (size_t i = 0; i < data.size(); ++i) {
    const auto [low, high] = data.data(i).TokenRange();
    if (low >= 0 && high < config.model.vocab_size) continue;
    throw Error({"token outside of the vocabulary", data.prefix(i) + ".bin", std::to_string(low < 0 ? low : high),
                 "0 to " + std::to_string(config.model.vocab_size - 1) + " (model.vocab_size)",
                 "the data was made for another vocabulary"});
  }
}

int TrainCommand(const TrainArguments& arguments) {
  const RunConfig config = CheckedConfig(arguments, false);
  if (Ranks().present || config.transport.kind == "inproc") ExecWorker(arguments.words);
  LaunchOptions launch;
  launch.program = WorkerProgram();
  launch.arguments = arguments.words;
  launch.world = config.layout.workers();
  launch.threads = config.device.threads;
  launch.port = config.transport.port;
  launch.json = arguments.json;
  launch.times.join_timeout_ns = static_cast<int64_t>(config.transport.join_timeout_s * 1e9);
  SetUcxEnvironment();
  return LaunchLocal(launch);
}

int ReferenceCommand(const TrainArguments& arguments) {
  CheckedConfig(arguments, true);
  ExecWorker(arguments.words);
}

int ModelCommand(const ModelArguments& arguments) {
  if (!std::filesystem::is_directory(arguments.from)) {
    throw Error({"no such folder", arguments.from, "", "the folder of a run (its out=), of a checkpoint or of Hugging Face", ""});
  }
  // As parsed, in one form: the worker need not know the ways to write a number.
  std::vector<std::string> words = {arguments.command, arguments.from};
  auto number = [&](const std::string& name, int64_t value) { words.push_back("--" + name + "=" + std::to_string(value)); };
  if (arguments.command == "verify") {
    number("steps", arguments.steps);
    number("threads", arguments.threads);
    number("sample", arguments.sample);
  } else {
    if (arguments.prompt) words.push_back("--prompt=" + *arguments.prompt);
    if (!arguments.tokenizer.empty()) words.push_back("--tokenizer=" + arguments.tokenizer);
    std::string tokens;
    for (int64_t t : arguments.prompt_tokens) tokens += (tokens.empty() ? "" : ",") + std::to_string(t);
    if (!tokens.empty()) words.push_back("--prompt-tokens=" + tokens);
    number("tokens", arguments.tokens);
    number("top-k", arguments.top_k);
    number("seed", arguments.seed);
    words.push_back("--top-p=" + TomlNumber(arguments.top_p));
    words.push_back("--temperature=" + TomlNumber(arguments.temperature));
  }
  if (arguments.json) words.push_back("--json");
  ExecWorker(words);
}

}  // namespace disagmoe
