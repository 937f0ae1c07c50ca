// simulate CONFIG.toml --profile FILE: the step that `train` would run here, from measured times.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/commands.h"
#include "cost/profile_costs.h"
#include "sim/simulate.h"
#include "spec/layout.h"
#include "spec/trainable.h"
#include "trace/compare.h"
#include "trace/trace.h"

namespace disagmoe {
namespace {

using nlohmann::ordered_json;

void WriteFile(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  if (!file) throw Error({"cannot write", path, {}, {}, {}});
}

// As a run leaves them: `timeline` and `--against` read both alike.
void WriteFolder(const std::string& out, RunConfig config, const std::vector<TraceEvent>& events, int world) {
  config.out = out;
  for (int rank = 0; rank < world; ++rank) {
    std::vector<TraceEvent> own;
    for (const TraceEvent& e : events) {
      if (e.rank == rank) own.push_back(e);
    }
    WriteEvents(EventsPath(out, rank), own);
  }
  WriteFile(out + "/config.toml", PrintConfig(config));
}

std::vector<int> GroupOfRank(const Schedule& schedule, int replicas) {
  std::map<int, int> groups;
  for (size_t g = 0; g < schedule.groups.size(); ++g) {
    for (int rank : schedule.groups[g].ranks) groups[rank] = static_cast<int>(g);
  }
  std::vector<int> out;
  for (int replica = 0; replica < replicas; ++replica)
    for (const auto& [rank, group] : groups) out.push_back(group);  // ranks are 0, 1, ...
  return out;
}

// One replica was simulated; the others do the same at the same time.
void CopyToReplicas(SimResult* result, const LayoutConfig& layout) {
  const size_t events = result->events.size(), workers = result->times.size();
  for (int replica = 1; replica < layout.replicas; ++replica) {
    for (size_t i = 0; i < events; ++i) {
      TraceEvent event = result->events[i];
      event.rank += replica * layout.pipeline_workers();
      if (event.peer >= 0) event.peer += replica * layout.pipeline_workers();
      result->events.push_back(std::move(event));
    }
    for (size_t i = 0; i < workers; ++i) result->times.push_back(ClassTimes(result->times[i]));
  }
}

double Ms(int64_t ns) { return static_cast<double>(ns) * 1e-6; }

ordered_json TimesJson(const std::string& name, const ClassTimes& t) {
  return {{"worker", name},
          {"compute_ns", t.compute_ns},
          {"overlapped_ns", t.overlapped_ns},
          {"exposed_ns", t.exposed_ns},
          {"bubble_ns", t.bubble_ns},
          {"optimizer_ns", t.optimizer_ns},
          {"reduce_ns", t.reduce_ns},
          {"bytes_sent", t.nic_bytes_sent}};
}

ordered_json ComparisonJson(const StepComparison& c, const std::vector<std::string>& names) {
  ordered_json json = {{"measured_ns", c.measured_ns},
                       {"fastest_ns", c.fastest_ns},
                       {"slowest_ns", c.slowest_ns},
                       {"steps", c.steps},
                       {"ratio", c.ratio()},
                       {"same_order", c.same_order()},
                       {"workers", ordered_json::array()}};
  for (const WorkerComparison& w : c.workers) {
    ordered_json worker = {
        {"worker", names.at(w.rank)}, {"difference", w.difference}, {"kinds", ordered_json::object()}};
    for (const KindTimes& k : w.kinds) {
      worker["kinds"][k.kind] = {{"count", k.count}, {"simulated_ns", k.simulated_ns}, {"measured_ns", k.measured_ns}};
    }
    json["workers"].push_back(worker);
  }
  return json;
}

int WidthOf(const std::vector<std::string>& names) {
  size_t width = 8;
  for (const std::string& name : names) width = std::max(width, name.size() + 2);
  return static_cast<int>(width);
}

void PrintComparison(const StepComparison& c, const std::vector<std::string>& names, const std::string& against) {
  std::printf("\n%s: %lld traced steps, median %.3f ms (%.3f to %.3f); simulated %.3f ms = %.3f of it\n",
              against.c_str(), static_cast<long long>(c.steps), Ms(c.measured_ns), Ms(c.fastest_ns), Ms(c.slowest_ns),
              Ms(c.simulated_ns), c.ratio());
  const int width = WidthOf(names);
  std::printf("%-*s%-20s%8s%14s%14s%8s\n", width, "worker", "in a step", "number", "simulated ms", "measured ms",
              "ratio");
  for (const WorkerComparison& w : c.workers) {
    for (const KindTimes& k : w.kinds) {
      std::printf("%-*s%-20s%8lld%14.3f%14.3f", width, names.at(w.rank).c_str(), k.kind.c_str(),
                  static_cast<long long>(k.count), Ms(k.simulated_ns), Ms(k.measured_ns));
      k.measured_ns > 0
          ? std::printf("%8.2f\n", static_cast<double>(k.simulated_ns) / static_cast<double>(k.measured_ns))
          : std::printf("\n");
    }
  }
  for (const WorkerComparison& w : c.workers) {
    if (!w.difference.empty()) std::printf("%s differs: %s\n", names.at(w.rank).c_str(), w.difference.c_str());
  }
  if (c.same_order()) std::printf("the same operations in the same order on every worker and stream\n");
}

void PrintTimes(const Schedule& schedule, const RunConfig& config, const SimResult& result,
                const std::vector<std::string>& names) {
  const double tokens =
      static_cast<double>(config.train.micro_batches * config.train.micro_batch_size * config.train.seq_length);
  const int replicas = config.layout.replicas;
  const std::string of = replicas == 1 ? "" : ", each of " + std::to_string(replicas) + " replicas";
  std::printf("%s, %d micro-batches%s: step %.3f ms, %.0f tokens/s; limit: %s, %.3f ms\n", schedule.name.c_str(),
              schedule.num_micro_batches, of.c_str(), Ms(result.step_ns),
              tokens / (static_cast<double>(result.step_ns) * 1e-9), result.limit.c_str(), Ms(result.limit_ns));
  const int width = WidthOf(names);
  std::printf("%-*s%12s%13s%12s%12s   of the step, ms\n", width, "worker", "compute", "overlapped", "exposed",
              "bubble");
  for (size_t i = 0; i < names.size(); ++i) {
    const ClassTimes& t = result.times[i];
    std::printf("%-*s%12.3f%13.3f%12.3f%12.3f\n", width, names[i].c_str(), Ms(t.compute_ns), Ms(t.overlapped_ns),
                Ms(t.exposed_ns), Ms(t.bubble_ns));
  }
}

}  // namespace

int SimulateRunCommand(const SimulateRunArguments& arguments) {
  const RunConfig config = LoadConfig(arguments.config, arguments.overrides);
  RequireTrainable(config, arguments.config);
  const Profile profile = ReadProfile(arguments.profile);
  const Schedule schedule = TrainingSchedule(config);
  const ProfileCosts costs(profile, config, schedule, arguments.profile);
  SimOptions options;
  options.trace = true;
  options.sync_exchange = false;  // as the runtime executes it
  SimResult result = Simulate(schedule, costs, options);
  CopyToReplicas(&result, config.layout);
  std::vector<std::string> names =
      WorkerNames(config);  // by rank; groups are in the order of ranks, and so are classes
  if (!arguments.out.empty()) WriteFolder(arguments.out, config, result.events, static_cast<int>(names.size()));
  if (!arguments.trace.empty()) {
    std::vector<WorkerName> workers;
    for (const std::string& name : names) workers.push_back({static_cast<int>(workers.size()), name});
    WriteFile(arguments.trace, PerfettoJson(result.events, workers));
  }
  ordered_json json = {{"step_ns", result.step_ns},
                       {"limit_ns", result.limit_ns},
                       {"limit", result.limit},
                       {"workers", ordered_json::array()}};
  for (size_t i = 0; i < names.size(); ++i) json["workers"].push_back(TimesJson(names[i], result.times[i]));
  if (!arguments.json) PrintTimes(schedule, config, result, names);
  if (!arguments.against.empty()) {
    const StepComparison c = CompareSteps(result.events, ReadRunEvents(arguments.against),
                                          GroupOfRank(schedule, config.layout.replicas), 2 * schedule.num_layers);
    json["against"] = ComparisonJson(c, names);
    if (!arguments.json) PrintComparison(c, names, arguments.against);
  }
  if (arguments.json) std::puts(json.dump().c_str());
  return 0;
}

}  // namespace disagmoe
