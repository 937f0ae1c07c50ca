// The commands of the light program: it starts in milliseconds, and hands over to disagmoe-worker, which loads libtorch
// and UCX, where tensors are needed. Each command takes what main.cc parsed, prints to stdout and returns the exit code.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spec/config.h"

namespace disagmoe {

struct TrainArguments {
  std::string config;  // of a run, or a plan
  std::vector<std::string> overrides;
  std::vector<std::string> words;  // the whole command as given, for the worker: "train", "tiny.toml", ...
  bool json = false;
};
int TrainCommand(const TrainArguments& arguments);
int ReferenceCommand(const TrainArguments& arguments);
// Throws Error without data.path, if the pair cannot be read, or holds too little or tokens that the model has not.
void RequireData(const RunConfig& config, const std::string& path);

struct ScheduleArguments {
  std::string config;  // or a file in the text form of a schedule
  std::vector<std::string> overrides;
  bool grid = false;
  bool check = false;
  bool json = false;
  double transfer = 0;
  int columns = 0;
};
int ScheduleCommand(const ScheduleArguments& arguments);

// A model on a cluster.
struct SimulateArguments {
  std::string model, cluster;
  std::vector<std::string> schedules;  // empty: af-pipe, megatron-1f1b, megatron-overlap; "all"
  std::vector<std::string> sequences;  // "4k", "8192"; empty: 4k
  std::vector<std::string> settings;   // "key=value", or "SCHEDULE:key=value"
  std::string expert_load;             // JSON file with an array of relative loads
  std::string trace;                   // Perfetto JSON of the (only) simulation
  bool workers = false;                // a row a worker class
  bool any_memory = false;             // compare layouts that do not fit as well
  bool json = false;
};
int SimulateCommand(const SimulateArguments& arguments);
// model: a plan file; cluster, if there, the first of the overrides.
int SimulatePlanCommand(const SimulateArguments& arguments, std::vector<std::string> overrides);

struct PlanArguments {
  std::string model, cluster;          // "h800x64+h100x64": two kinds of machines
  std::string seq = "4k";
  std::string batch = "1024";          // within 5 %; or "960:1088"
  std::vector<std::string> schedules;  // empty: all; "trained": those that the runtime executes
  std::vector<std::string> settings;   // as simulate's
  std::string expert_load;
  std::string out;                     // plan file
  std::string svg;                     // roofline
  double effort = 1;                   // times the usual number of operations simulated
  int threads = 0;                     // 0: as many as there are cores
  bool brief = false;                  // the table alone
  // Sequences of changing length (plan/lengths.h): shares or a file; phases of a run; or packed with documents of such.
  std::string lengths, phases;
  bool packed = false;
  double restart_s = -1;               // of changing the layout; below 0: the usual
  // Real runs on this machine (plan_measure.h).
  bool measure = false;
  int samples = 6, radius = 1, rounds = 2;
  int64_t seed = 1, measure_steps = 5;
  std::string data;
  std::vector<std::string> run;        // overrides of the runs
  bool json = false;
};
int PlanCommand(const PlanArguments& arguments);

struct ReproduceArguments {
  std::vector<std::string> tables;  // empty: all
  bool markdown = false;
  bool json = false;
};
int ReproduceCommand(const ReproduceArguments& arguments);

struct DataArguments {
  std::vector<std::string> inputs;
  std::string out;
  std::string inspect;
  std::string json_key = "text";
  int64_t document_bytes = 0;
  std::string tokenizer = "bytes";
  int64_t workers = 0;  // 0: one a core
  std::string eod;      // of a Hugging Face tokenizer; "": as its files say
  bool special_tokens = false;
  bool json = false;
};
int DataCommand(const DataArguments& arguments);

struct TimelineArguments {
  std::string out;
  std::string svg;
  int64_t step = 0;  // 0: the last one traced
  int columns = 0;   // 0: the terminal's
  bool json = false;
};
int TimelineCommand(const TimelineArguments& arguments);

struct ProfileArguments {
  std::string config;
  std::vector<std::string> overrides;
  std::string out = "profile.json";
  std::vector<int64_t> seq_lengths;  // besides the configuration's; empty: half of it
  int64_t rounds = 2;
  double patience_s = 60;  // in all, waiting for other programs to pause
  bool json = false;
};
int ProfileCommand(const ProfileArguments& arguments);

// simulate --profile: a run of this machine.
struct SimulateRunArguments {
  std::string config;
  std::vector<std::string> overrides;
  std::string profile;
  std::string against;  // folder of a run to compare with
  std::string trace;    // Perfetto JSON
  std::string out;      // folder for events and configuration, as a run's
  bool json = false;
};
int SimulateRunCommand(const SimulateRunArguments& arguments);

// verify and generate: in the worker program.
struct ModelArguments {
  std::string command;
  std::string from;  // folder of a run, or of a checkpoint
  int64_t steps = 20, threads = 0, sample = 300, tokens = 300, top_k = 0, seed = 1;
  double temperature = 0.8, top_p = 1;
  std::optional<std::string> prompt;
  std::string tokenizer;               // "": the model's own
  std::vector<int64_t> prompt_tokens;  // instead of a prompt
  bool json = false;
};
int ModelCommand(const ModelArguments& arguments);

struct ExportArguments {
  std::string from;        // folder of a run, or of a checkpoint
  std::string out;
  std::string dtype;       // "": that of the model's config.json, else bf16
  std::string companions;  // "": hf/ of the run
  double shard_gb = 5;
  bool no_check = false;
  bool json = false;
};
int ExportCommand(const ExportArguments& arguments);

// The disagmoe-worker in the same folder as this program.
std::string WorkerProgram();
// Replaces this process by it.
[[noreturn]] void ExecWorker(const std::vector<std::string>& words);

// Text of `disagmoe COMMAND --help`; "" is the whole program.
std::string HelpOf(const std::string& command);

}  // namespace disagmoe
