// disagmoe: parses the command line, and turns errors into one line and an exit code.
#include <CLI/CLI.hpp>

#include <cmath>
#include <cstdio>

#include "base/error.h"
#include "cli/commands.h"

namespace disagmoe {
namespace {

// Holds what the parser writes into; the commands read it.
struct CommandLine {
  TrainArguments train;
  ScheduleArguments schedule;
  DataArguments data;
  TimelineArguments timeline;
  SimulateArguments simulate;
  PlanArguments plan;
  ReproduceArguments reproduce;
  ModelArguments model;
  ExportArguments export_;
  ProfileArguments profile;
  SimulateRunArguments simulate_run;
  bool json = false;
  bool help = false;
  bool version = false;
  CLI::App app;
};

CLI::App* AddCommand(CommandLine& line, const char* name) {
  CLI::App* command = line.app.add_subcommand(name);
  command->set_help_flag();
  command->allow_extras();  // reported by us, in the same words with every version of the library
  command->add_flag("-h,--help", line.help);
  command->add_flag("--json", line.json);
  return command;
}

void AddCommands(CommandLine& line) {
  line.app.set_help_flag();
  line.app.allow_extras();
  line.app.add_flag("-h,--help", line.help);
  line.app.add_flag("--version", line.version);
  for (const char* name : {"train", "reference"}) {
    CLI::App* command = AddCommand(line, name);
    command->add_option("config", line.train.config);
    command->add_option("overrides", line.train.overrides);
  }
  CLI::App* schedule = AddCommand(line, "schedule");
  schedule->add_option("config", line.schedule.config);
  schedule->add_option("overrides", line.schedule.overrides);
  schedule->add_flag("--grid", line.schedule.grid);
  schedule->add_flag("--check", line.schedule.check);
  schedule->add_option("--transfer", line.schedule.transfer);
  schedule->add_option("--columns", line.schedule.columns);
  CLI::App* simulate = AddCommand(line, "simulate");
  simulate->add_option("model", line.simulate.model);
  simulate->add_option("cluster", line.simulate.cluster);
  simulate->add_option("--schedule", line.simulate.schedules)->delimiter(',');
  simulate->add_option("--seq", line.simulate.sequences)->delimiter(',');
  simulate->add_option("--set", line.simulate.settings);
  simulate->add_option("--expert-load", line.simulate.expert_load);
  simulate->add_option("--trace", line.simulate.trace);
  simulate->add_option("overrides", line.simulate_run.overrides);
  simulate->add_option("--profile", line.simulate_run.profile);
  simulate->add_option("--against", line.simulate_run.against);
  simulate->add_option("--out", line.simulate_run.out);
  simulate->add_flag("--workers", line.simulate.workers);
  simulate->add_flag("--any-memory", line.simulate.any_memory);
  CLI::App* plan = AddCommand(line, "plan");
  plan->add_option("model", line.plan.model);
  plan->add_option("cluster", line.plan.cluster);
  plan->add_option("--seq", line.plan.seq);
  plan->add_option("--batch", line.plan.batch);
  plan->add_option("--schedule", line.plan.schedules)->delimiter(',');
  plan->add_option("--set", line.plan.settings);
  plan->add_option("--expert-load", line.plan.expert_load);
  plan->add_option("--out", line.plan.out);
  plan->add_option("--svg", line.plan.svg);
  plan->add_option("--effort", line.plan.effort)->check(CLI::Range(0.01, 1e6));
  plan->add_option("--threads", line.plan.threads)->check(CLI::Range(1, 4096));
  plan->add_flag("--brief", line.plan.brief);
  plan->add_option("--lengths", line.plan.lengths);
  plan->add_option("--phases", line.plan.phases);
  plan->add_flag("--packed", line.plan.packed);
  plan->add_option("--restart", line.plan.restart_s)->check(CLI::NonNegativeNumber);
  plan->add_flag("--measure", line.plan.measure);
  plan->add_option("--samples", line.plan.samples)->check(CLI::Range(0, 1000));
  plan->add_option("--radius", line.plan.radius)->check(CLI::Range(0, 5));
  plan->add_option("--rounds", line.plan.rounds)->check(CLI::Range(1, 100));
  plan->add_option("--seed", line.plan.seed)->check(CLI::NonNegativeNumber);
  plan->add_option("--steps", line.plan.measure_steps)->check(CLI::Range(1, 10000));
  plan->add_option("--data", line.plan.data);
  plan->add_option("--run", line.plan.run);
  CLI::App* reproduce = AddCommand(line, "reproduce");
  reproduce->add_option("tables", line.reproduce.tables);
  reproduce->add_flag("--markdown", line.reproduce.markdown);
  CLI::App* data = AddCommand(line, "data");
  data->add_option("inputs", line.data.inputs);
  data->add_option("--out", line.data.out);
  data->add_option("--inspect", line.data.inspect);
  data->add_option("--json-key", line.data.json_key);
  data->add_option("--document-bytes", line.data.document_bytes);
  data->add_option("--tokenizer", line.data.tokenizer);
  data->add_option("--workers", line.data.workers);
  data->add_option("--eod", line.data.eod);
  data->add_flag("--special-tokens", line.data.special_tokens);
  CLI::App* timeline = AddCommand(line, "timeline");
  timeline->add_option("out", line.timeline.out);
  timeline->add_option("--svg", line.timeline.svg);
  timeline->add_option("--step", line.timeline.step);
  timeline->add_option("--columns", line.timeline.columns);
  CLI::App* profile = AddCommand(line, "profile");
  profile->add_option("config", line.profile.config);
  profile->add_option("overrides", line.profile.overrides);
  profile->add_option("--out", line.profile.out);
  profile->add_option("--seq", line.profile.seq_lengths)->delimiter(',')->check(CLI::PositiveNumber)->expected(1);
  profile->add_option("--patience", line.profile.patience_s)->check(CLI::NonNegativeNumber);
  profile->add_option("--rounds", line.profile.rounds)->check(CLI::Range(1, 1000));
  CLI::App* verify = AddCommand(line, "verify");
  verify->add_option("out", line.model.from);
  verify->add_option("--steps", line.model.steps)->check(CLI::PositiveNumber);
  verify->add_option("--threads", line.model.threads)->check(CLI::Range(0, 4096));
  verify->add_option("--sample", line.model.sample)->check(CLI::NonNegativeNumber);
  CLI::App* exported = AddCommand(line, "export");
  exported->add_option("from", line.export_.from);
  exported->add_option("--out", line.export_.out);
  exported->add_option("--dtype", line.export_.dtype);
  exported->add_option("--with", line.export_.companions);
  exported->add_option("--shard", line.export_.shard_gb)->check(CLI::Range(1e-6, 1e6));
  exported->add_flag("--no-check", line.export_.no_check);
  CLI::App* generate = AddCommand(line, "generate");
  generate->add_option("from", line.model.from);
  generate->add_option("--prompt", line.model.prompt);
  generate->add_option("--prompt-tokens", line.model.prompt_tokens)->delimiter(',')->check(CLI::NonNegativeNumber);
  generate->add_option("--tokenizer", line.model.tokenizer);
  generate->add_option("--tokens", line.model.tokens)->check(CLI::Range(1, 1 << 20));
  generate->add_option("--top-k", line.model.top_k)->check(CLI::NonNegativeNumber);
  generate->add_option("--top-p", line.model.top_p)->check(CLI::Range(0.0, 1.0));
  generate->add_option("--temperature", line.model.temperature)->check(CLI::NonNegativeNumber);
  generate->add_option("--seed", line.model.seed)->check(CLI::NonNegativeNumber);
}

[[noreturn]] void Misuse(const std::string& what, const std::string& command, const std::string& got) {
  const std::string program = command.empty() ? "disagmoe" : "disagmoe " + command;
  throw Error({what, program, got.empty() ? "" : "'" + got + "'", {}, program + " --help"});
}

// The words after the configuration are settings; the first was taken for a cluster.
int SimulateRun(CommandLine& line) {
  SimulateRunArguments& run = line.simulate_run;
  const SimulateArguments& words = line.simulate;
  if (!words.schedules.empty() || !words.sequences.empty() || !words.settings.empty() || !words.expert_load.empty()) {
    Misuse("an option for models and clusters", "simulate", "--profile " + run.profile);
  }
  run.config = words.model;
  run.trace = words.trace;
  if (!words.cluster.empty()) run.overrides.insert(run.overrides.begin(), words.cluster);
  run.json = line.json;
  return SimulateRunCommand(run);
}

// "simulate PLAN.toml [key=value ...]": the file says the cluster, and the first setting was taken for one.
bool IsPlan(const SimulateArguments& words) {
  return words.model.ends_with(".toml") && (words.cluster.empty() || words.cluster.find('=') != std::string::npos);
}

int Dispatch(CommandLine& line, const std::string& command) {
  auto need = [&](const std::string& value, const char* what) {
    if (value.empty()) Misuse(std::string(what) + " is missing", command, "");
  };
  if (command == "train" || command == "reference") {
    need(line.train.config, "CONFIG.toml");
    line.train.json = line.json;
    return command == "train" ? TrainCommand(line.train) : ReferenceCommand(line.train);
  }
  if (command == "schedule") {
    need(line.schedule.config, "CONFIG.toml");
    line.schedule.json = line.json;
    return ScheduleCommand(line.schedule);
  }
  if (command == "plan") {
    need(line.plan.model, "MODEL");
    need(line.plan.cluster, "CLUSTER");
    line.plan.json = line.json;
    return PlanCommand(line.plan);
  }
  if (command == "reproduce") {
    line.reproduce.json = line.json;
    return ReproduceCommand(line.reproduce);
  }
  if (command == "simulate" && !line.simulate_run.profile.empty()) {
    need(line.simulate.model, "CONFIG.toml");
    return SimulateRun(line);
  }
  if (command == "simulate") {
    for (const auto* option : {&line.simulate_run.against, &line.simulate_run.out}) {
      if (!option->empty()) Misuse("an option that needs --profile", command, *option);
    }
    need(line.simulate.model, "a model");
    line.simulate.json = line.json;
    if (IsPlan(line.simulate)) return SimulatePlanCommand(line.simulate, line.simulate_run.overrides);
    for (const std::string& word : line.simulate_run.overrides) Misuse("unexpected argument", command, word);
    need(line.simulate.cluster, "a cluster");
    return SimulateCommand(line.simulate);
  }
  if (command == "data") {
    if (line.data.inspect.empty()) need(line.data.out, "--out PREFIX");
    line.data.json = line.json;
    return DataCommand(line.data);
  }
  if (command == "verify" || command == "generate") {
    need(line.model.from, "the folder of a run");
    if (!std::isfinite(line.model.temperature)) Misuse("--temperature is not a number", command, "");
    if (!std::isfinite(line.model.top_p)) Misuse("--top-p is not a number", command, "");
    line.model.command = command;
    line.model.json = line.json;
    return ModelCommand(line.model);
  }
  if (command == "export") {
    need(line.export_.from, "the folder of a run");
    need(line.export_.out, "--out DIR");
    if (!std::isfinite(line.export_.shard_gb)) Misuse("--shard is not a number", command, "");
    line.export_.json = line.json;
    return ExportCommand(line.export_);
  }
  if (command == "profile") {
    need(line.profile.config, "CONFIG.toml");
    line.profile.json = line.json;
    return ProfileCommand(line.profile);
  }
  need(line.timeline.out, "the folder of a run");
  line.timeline.json = line.json;
  return TimelineCommand(line.timeline);
}

int Run(CommandLine& line, int argc, char** argv) {
  AddCommands(line);
  line.train.words.assign(argv + 1, argv + argc);
  try {
    line.app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    Misuse(error.what(), "", "");
  }
  const std::vector<CLI::App*> chosen = line.app.get_subcommands();
  const std::string command = chosen.empty() ? "" : chosen[0]->get_name();
  if (line.help) {
    std::fputs(HelpOf(command).c_str(), stdout);
    return 0;
  }
  if (line.version) {
    std::puts("disagmoe " DISAGMOE_VERSION);
    return 0;
  }
  for (const std::string& extra : line.app.remaining(true)) {
    if (extra.starts_with('-')) Misuse("unknown option", command, extra);
    Misuse(chosen.empty() ? "unknown command" : "unexpected argument", command, extra);
  }
  if (chosen.empty()) Misuse("a command is missing", "", "");
  return Dispatch(line, command);
}

void Report(const CommandLine& line, const std::string& message, const ErrorParts& parts) {
  std::fflush(stdout);
  std::fprintf(stderr, "disagmoe: %s\n", message.c_str());
  if (line.json) std::puts(ErrorJson(parts).c_str());
}

}  // namespace
}  // namespace disagmoe

int main(int argc, char** argv) {
  disagmoe::CommandLine line;
  try {
    return disagmoe::Run(line, argc, argv);
  } catch (const disagmoe::Error& error) {
    disagmoe::Report(line, std::string("error: ") + error.what(), error.parts());
    return 2;
  } catch (const std::exception& error) {  // InternalError's line says what it is
    disagmoe::Report(line, error.what(), {error.what(), {}, {}, {}, {}});
    return 3;
  }
}
