// disagmoe plan MODEL CLUSTER: does splitting pay here, with which split, and will it fit?
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/plan_measure.h"
#include "cli/plan_print.h"
#include "cost/expert_load.h"
#include "plan/lengths_plan.h"
#include "plan/plan.h"
#include "plan/plan_file.h"
#include "plan/roofline.h"
#include "plan/text.h"
#include "spec/trainable.h"

namespace disagmoe {
namespace {

using nlohmann::ordered_json;

// Ctrl-C: the first ends the search with the best so far, the second the program.
std::atomic<bool> interrupted{false};
void OnInterrupt(int) { interrupted = true; }

// "1024": within 5 %. "960:1088": any between.
void ParseBatch(const std::string& text, PlanRequest* request) {
  const auto whole = [&](const std::string& word) {
    size_t used = 0;
    int64_t value = 0;
    try {
      value = std::stoll(word, &used);
    } catch (const std::exception&) {
      used = 0;
    }
    if (used == word.size() && used > 0 && value >= 1 && value <= int64_t{1} << 24) return value;
    throw Error({"value not allowed", "--batch", "\"" + text + "\"", "sequences a step, as 1024 or 960:1088", ""});
  };
  const size_t colon = text.find(':');
  if (colon == std::string::npos) {
    request->batch = whole(text);
    request->batch_least = request->batch - request->batch / 20;
    request->batch_most = request->batch + request->batch / 20;
    return;
  }
  request->batch_least = whole(text.substr(0, colon));
  request->batch_most = whole(text.substr(colon + 1));
  if (request->batch_most < request->batch_least) {
    throw Error({"value not allowed", "--batch", "\"" + text + "\"", "the smaller number first", ""});
  }
  request->batch = (request->batch_least + request->batch_most) / 2;
}

std::vector<std::string> Schedules(const PlanArguments& a) {
  std::vector<std::string> out;
  for (const std::string& name : a.schedules) {
    if (name == "all") return {};
    if (name == "trained") {
      for (const ScheduleName& known : ScheduleNames()) {
        if (MissingForSchedule(known.name).empty()) out.push_back(known.name);
      }
    } else {
      out.push_back(name);
    }
  }
  return out;
}

// A line that is written over on a terminal, and now and then elsewhere.
class Progress {
 public:
  void operator()(const std::string& schedule, const SearchCounts& counts, double speed) {
    const auto now = std::chrono::steady_clock::now();
    const double since = std::chrono::duration<double>(now - last_).count();
    if (since < (terminal_ ? 0.1 : 10)) return;
    last_ = now;
    shown_ = true;
    std::fprintf(stderr, "%s%s: %lld shapes, %lld estimated, %lld simulated, %.0f tokens/s a GPU%s",
                 terminal_ ? "\r\033[K" : "", schedule.c_str(), static_cast<long long>(counts.considered),
                 static_cast<long long>(counts.estimated), static_cast<long long>(counts.simulated), speed,
                 terminal_ ? "" : "\n");
  }
  ~Progress() { Clear(); }
  void Clear() {
    if (shown_ && terminal_) std::fputs("\r\033[K", stderr);
    shown_ = false;
  }

 private:
  bool terminal_ = isatty(2) != 0;
  bool shown_ = false;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

Roofline RooflineOf(const PlanRequest& request, const Plan& plan) {
  RooflineRequest r;
  r.model = request.model;
  r.attention = request.hardware.front();
  r.ffn = request.hardware.back();
  r.seq_length = request.seq_length;
  r.ffn_workers = static_cast<int>(std::min<int64_t>(8, request.model.num_experts));
  // With the groups of the best split, if there is one.
  if (plan.best_split >= 0) {
    const Job& job = plan.rows[plan.best_split].best()->job;
    r.ffn_workers = job.n, r.dedup = job.dedup, r.nics_a = job.nics_a, r.nics_f = job.nics_f;
    r.attention = job.cluster;
    r.ffn = job.ffn_cluster ? *job.ffn_cluster : job.cluster;
  }
  return MakeRoofline(r);
}

void Write(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  if (!out.flush()) throw Error({"cannot write", path, "", "", ""});
}

}  // namespace

namespace {

// The machines of a plan, as LoadClusters takes them. Such as are none of the given ones are written beside the plan.
std::string ClusterArgument(const PlanArguments& a, const PlanRequest& request, const Job& job) {
  const std::string& out = a.out;
  if (request.hardware.size() == 1) return a.cluster;
  const size_t plus = a.cluster.find('+');
  const std::string names[2] = {a.cluster.substr(0, plus), a.cluster.substr(plus + 1)};
  std::string text;
  for (const ClusterSpec* c : {&job.cluster, job.ffn_cluster ? &*job.ffn_cluster : nullptr}) {
    if (!c) continue;
    std::string name;
    for (size_t k = 0; k < 2; ++k) {
      if (request.hardware[k].name == c->name) name = names[k];
    }
    if (name.empty()) {
      name = out + ".cluster.toml";
      Write(name, PrintCluster(*c));
    }
    text += (text.empty() ? "" : "+") + name;
  }
  return text;
}

void WritePlan(const PlanArguments& a, const PlanRequest& request, const Evaluation& e) {
  Job job = e.job;
  if (job.round == 0 && !job.colocated()) job.round = e.round;
  const std::string made_by = "disagmoe plan " + a.model + " " + a.cluster + " --seq " +
                              std::to_string(request.seq_length) + ": " + job.schedule + ", " + LayoutText(e);
  Write(a.out, PlanFile(job, a.model, ClusterArgument(a, request, job), made_by));
  if (!a.json) std::printf("\nwritten: %s\n", a.out.c_str());
}

// Sequences of changing length.
int PlanLengths(const PlanArguments& a, const PlanRequest& request, const SearchControl& control) {
  LengthsRequest lengths;
  if (!a.lengths.empty()) lengths.lengths = LoadLengths(a.lengths);
  if (!a.phases.empty()) lengths.phases = ParsePhases(a.phases);
  if (a.restart_s >= 0) lengths.restart_seconds = a.restart_s;
  for (const PlanRow& row : RowsOf(request)) lengths.schedules.push_back(row.grid);
  const LengthsPlan plan = PlanForLengths(lengths, control);
  if (a.json) {
    std::puts(LengthsPlanJson(plan).dump(1).c_str());
  } else {
    std::fputs(PrintLengthsPlan(plan).c_str(), stdout);
  }
  const LayoutRow* best = plan.single();
  if (best && !a.out.empty()) WritePlan(a, request, Evaluate(best->at.back().job));
  return best ? 0 : 1;
}

// The data of a run's configuration, for real runs of its model.
std::string DataOf(const std::string& model) {
  const bool run = model.ends_with(".toml");
  const std::string path = run ? LoadConfig(model, {}).data.path : "";
  if (!path.empty()) return path;
  throw Error({"no training data", "--measure", run ? "\"\" (data.path of " + model + ")" : "",
               "--data PREFIX of a .bin/.idx pair", "disagmoe data --out build/data/text FILE"});
}

SearchControl ControlOf(const PlanArguments& a) {
  struct sigaction action = {};
  action.sa_handler = OnInterrupt;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  SearchControl control;
  control.stop = &interrupted;
  control.threads = a.threads > 0 ? a.threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return control;
}

// What is said must be used, and what is to be written must be writable, before minutes are spent.
void CheckArguments(const PlanArguments& a) {
  const bool changing = !a.packed && !(a.lengths.empty() && a.phases.empty());
  const auto unused = [](const std::string& option, const std::string& expected) {
    throw Error({"an option that is not used", option, "", expected, "disagmoe plan --help"});
  };
  if (changing && a.measure) unused("--measure", "no --lengths or --phases, or --packed");
  if (changing && !a.svg.empty()) unused("--svg", "no --lengths or --phases, or --packed");
  if (changing && a.cluster.find('+') != std::string::npos) unused("--lengths, --phases", "one kind of machines");
  if (!changing && a.restart_s >= 0) unused("--restart", "--lengths or --phases");
  if (a.packed && !a.phases.empty()) unused("--phases", "no --packed");
  if (!(a.effort >= 0.01))
    throw Error({"value not allowed", "--effort", std::to_string(a.effort), "at least 0.01", ""});
  for (const std::string& path : {a.out, a.svg}) {
    if (path.empty()) continue;
    const bool is_new = !std::filesystem::exists(path);
    if (!std::ofstream(path, std::ios::app)) throw Error({"cannot write", path, "", "", ""});
    if (is_new) std::filesystem::remove(path);
  }
}

PlanRequest RequestOf(const PlanArguments& a) {
  PlanRequest request;
  request.model = LoadModelShape(a.model);
  request.hardware = LoadClusters(a.cluster);
  request.schedules = Schedules(a);
  request.settings = a.settings;
  request.seq_length = ParseLength(a.seq, "--seq");
  request.changes = !a.brief;
  request.effort = static_cast<int64_t>(static_cast<double>(request.effort) * a.effort);
  ParseBatch(a.batch, &request);
  if (!a.expert_load.empty()) request.expert_loads = ReadExpertLoads(a.expert_load);
  if (a.packed) {
    if (a.lengths.empty())
      throw Error({"lengths are missing", "--packed", "", "--lengths with those of the documents", ""});
    const Lengths lengths = LoadLengths(a.lengths);
    if (lengths.longest > request.seq_length) {
      throw Error({"documents longer than a sequence", "--lengths", std::to_string(lengths.longest),
                   "at most --seq, " + std::to_string(request.seq_length), ""});
    }
    request.documents = DocumentsOf(lengths);
  }
  return request;
}

}  // namespace

int PlanCommand(const PlanArguments& a) {
  CheckArguments(a);
  const PlanRequest request = RequestOf(a);
  SearchControl control = ControlOf(a);
  Progress progress;
  control.progress = std::ref(progress);
  if (!a.packed && !(a.lengths.empty() && a.phases.empty())) {
    control.effort = request.effort;
    return PlanLengths(a, request, control);
  }
  const std::string data = !a.measure ? "" : a.data.empty() ? DataOf(a.model) : a.data;
  const auto start = std::chrono::steady_clock::now();
  const Plan plan = MakePlan(request, control);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  progress.Clear();

  const Roofline roofline = RooflineOf(request, plan);
  if (!a.svg.empty()) Write(a.svg, RooflineSvg(roofline));
  ordered_json json;
  if (a.json) {
    json = PlanJson(request, plan);
    json["roofline"] = RooflineJson(roofline);
  } else {
    std::fputs(PlanText(request, plan).c_str(), stdout);
    if (!a.brief) std::printf("\n%s\n%s", DrawRoofline(roofline, 96).c_str(), RooflineText(roofline).c_str());
    std::fflush(stdout);
    std::fprintf(stderr, "%lld shapes, %lld estimated, %lld simulated, %.2f s\n",
                 static_cast<long long>(plan.counts.considered), static_cast<long long>(plan.counts.estimated),
                 static_cast<long long>(plan.counts.simulated), seconds);
  }
  const Evaluation* best = plan.best();
  std::vector<MeasuredLayout> measured;
  if (a.measure) {
    MeasurePlanOptions options{a.samples, a.radius, static_cast<uint64_t>(a.seed), a.rounds, a.model, a.cluster, {}};
    options.run.steps = a.measure_steps;
    options.run.data = data;
    options.run.overrides = a.run;
    if (a.model.ends_with(".toml")) {  // as the run that it is of
      options.run.overrides.insert(options.run.overrides.begin(), "train.dtype=" + LoadConfig(a.model, {}).train.dtype);
    }
    measured = MeasurePlan(plan, options);
    if (a.json) {
      json["measured"] = MeasuredJson(measured);
    } else {
      std::fputs(MeasuredText(measured).c_str(), stdout);
    }
    if (!measured[0].step.ok()) {
      throw Error({"no layout could be measured", "--measure", measured[0].step.error, "", ""});
    }
    best = &measured[0].e;
  }
  if (a.json) std::puts(json.dump(1).c_str());
  if (best && !a.out.empty()) WritePlan(a, request, *best);
  return best ? 0 : 1;
}

}  // namespace disagmoe
