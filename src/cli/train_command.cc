// train and reference: check everything that can be checked without tensors, then hand over.
#include <cstdlib>
#include <filesystem>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/launch.h"
#include "io/dataset.h"
#include "transport/launch_env.h"
#include "transport/ucx.h"

namespace disagmoe {
namespace {

RunConfig CheckedConfig(const TrainArguments& arguments) {
  const RunConfig config = LoadConfig(arguments.config, arguments.overrides);
  ScheduleOf(config, config.train.micro_batches, true);
  if (config.train.eval_micro_batches > 0) ScheduleOf(config, config.train.eval_micro_batches, false);
  if (config.data.path.empty()) {
    throw Error({"no training data", arguments.config + ", data.path", "\"\"", "the prefix of a .bin/.idx pair",
                 "disagmoe data --out build/data/text FILE, then data.path=build/data/text"});
  }
  const IndexedDataset data(config.data.path);
  Batches(data, config.data.split, config.train.seq_length, config.train.seed);
  std::error_code error;
  std::filesystem::create_directories(config.out, error);
  if (error) throw Error({"cannot create the folder of the run", config.out, error.message(), {}, "out=DIR names another"});
  return config;
}

}  // namespace

int TrainCommand(const TrainArguments& arguments) {
  const RunConfig config = CheckedConfig(arguments);
  const bool started_by_others = DetectRanks([](const char* name) { return std::getenv(name); }).present;
  if (started_by_others || config.transport.kind == "inproc") ExecWorker(arguments.words);
  LaunchOptions launch;
  launch.program = WorkerProgram();
  launch.arguments = arguments.words;
  launch.world = config.layout.workers();
  launch.threads = config.device.threads;
  launch.port = config.transport.port;
  launch.times.join_timeout_ns = static_cast<int64_t>(config.transport.join_timeout_s * 1e9);
  SetUcxEnvironment();
  return LaunchLocal(launch);
}

int ReferenceCommand(const TrainArguments& arguments) {
  CheckedConfig(arguments);
  ExecWorker(arguments.words);
}

int ModelCommand(const ModelArguments& arguments) {
  if (!std::filesystem::is_directory(arguments.from)) {
    throw Error({"no such folder", arguments.from, "", "the folder of a run (its out=) or of a checkpoint", ""});
  }
  ExecWorker(arguments.words);
}

}  // namespace disagmoe
