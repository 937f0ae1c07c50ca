// train and reference: check everything that can be checked without tensors, then hand over.
#include <cstdlib>
#include <filesystem>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/launch.h"
#include "io/dataset.h"
#include "spec/config_keys.h"
#include "spec/layout.h"
#include "transport/launch_env.h"
#include "transport/ucx.h"

namespace disagmoe {
namespace {

// The pair that data.path names, with the reason in the words of the configuration.
IndexedDataset OpenData(const std::string& path) {
  try {
    return IndexedDataset(path);
  } catch (const Error& error) {
    ErrorParts parts = error.parts();
    parts.where = "data.path, " + parts.where;
    if (parts.hint.empty()) parts.hint = "disagmoe data --out build/data/text FILE makes a pair, then data.path=build/data/text";
    throw Error(parts);
  }
}

void CheckData(const RunConfig& config) {
  const IndexedDataset data = OpenData(config.data.path);
  Batches(data, config.data.split, config.train.seq_length, config.train.seed);
  const auto [low, high] = data.TokenRange();
  if (low >= 0 && high < config.model.vocab_size) return;
  throw Error({"token outside of the vocabulary", config.data.path + ".bin", std::to_string(low < 0 ? low : high),
               "0 to " + std::to_string(config.model.vocab_size - 1) + " (model.vocab_size)",
               "the data was made for another vocabulary"});
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

RunConfig CheckedConfig(const TrainArguments& arguments, bool reference) {
  const RunConfig config = LoadConfig(arguments.config, arguments.overrides);
  if (reference) RequireOneProcess("the reference");
  if (config.transport.kind == "inproc") RequireOneProcess("transport.kind = inproc");
  TrainingSchedule(config);
  const int64_t held_out = config.train.eval_micro_batches, replicas = config.layout.replicas;
  for (int64_t share : {held_out / replicas, (held_out + replicas - 1) / replicas}) {
    if (share > 0) ScheduleOf(config, share, false);
  }
  if (config.data.path.empty()) {
    throw Error({"no training data", arguments.config + ", data.path", "\"\"", "the prefix of a .bin/.idx pair",
                 "disagmoe data --out build/data/text FILE, then data.path=build/data/text"});
  }
  CheckData(config);
  std::error_code error;
  std::filesystem::create_directories(config.out, error);
  if (error) throw Error({"cannot create the folder of the run", config.out, error.message(), {}, "out=DIR names another"});
  return config;
}

}  // namespace

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
    throw Error({"no such folder", arguments.from, "", "the folder of a run (its out=) or of a checkpoint", ""});
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
    number("bytes", arguments.bytes);
    number("seed", arguments.seed);
    words.push_back("--temperature=" + TomlNumber(arguments.temperature));
  }
  if (arguments.json) words.push_back("--json");
  ExecWorker(words);
}

}  // namespace disagmoe
