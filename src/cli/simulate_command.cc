// disagmoe simulate MODEL CLUSTER: what each way of training costs.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/evaluation_json.h"
#include "cost/expert_load.h"
#include "plan/evaluate.h"
#include "plan/lengths.h"
#include "plan/plan_file.h"

namespace disagmoe {
namespace {

using nlohmann::ordered_json;

std::vector<std::string> SchedulesOf(const SimulateArguments& a, bool two_clusters) {
  if (a.schedules.empty() && two_clusters) return {"af-pipe", "af-pipe-zb"};
  if (a.schedules.empty()) return {"af-pipe", "megatron-1f1b", "megatron-overlap"};
  std::vector<std::string> out;
  for (const std::string& name : a.schedules) {
    if (name != "all") {
      out.push_back(name);
      continue;
    }
    for (const ScheduleName& known : ScheduleNames()) out.push_back(known.name);
  }
  return out;
}

// A setting is "key=value" for every schedule, or "SCHEDULE:key=value".
void ApplySettings(const SimulateArguments& a, Job* job, Fixed* fixed) {
  for (const std::string& setting : a.settings) {
    const size_t equal = setting.find('=');
    if (equal == std::string::npos) {
      throw Error({"not a setting", "--set", "\"" + setting + "\"", "key=value or SCHEDULE:key=value", ""});
    }
    std::string name = setting.substr(0, equal);
    if (const size_t colon = name.find(':'); colon != std::string::npos) {
      if (name.substr(0, colon) != job->schedule) continue;
      name = name.substr(colon + 1);
    }
    SetKnob(job, name, setting.substr(equal + 1));
    fixed->insert(name);
  }
}

// A setting for a schedule that is not simulated is a mistake, not a wish.
void CheckPrefixes(const SimulateArguments& a, const std::vector<std::string>& schedules) {
  for (const std::string& setting : a.settings) {
    const size_t colon = setting.find(':');
    if (colon == std::string::npos || colon > setting.find('=')) continue;
    const std::string name = setting.substr(0, colon);
    if (std::find(schedules.begin(), schedules.end(), name) != schedules.end()) continue;
    throw Error({"a setting that is not used", "--set " + setting, name, "one of the schedules simulated", ""});
  }
}

std::string Gb(int64_t bytes) {
  char text[40];
  std::snprintf(text, sizeof text, "%.1f", static_cast<double>(bytes) * 1e-9);
  return text;
}

double Seconds(int64_t ns) { return static_cast<double>(ns) * 1e-9; }

const char* DedupName(Dedup d) { return d == Dedup::kExpert ? "expert" : d == Dedup::kWorker ? "worker" : "node"; }

ordered_json WorkersJson(const Evaluation& e) {
  ordered_json out = ordered_json::array();
  for (size_t c = 0; c < e.classes.size(); ++c) {
    const ClassTimes& t = e.sim.times[c];
    const ClassMemory& m = e.sim.memory[c];
    ordered_json row{{"name", e.class_names[c]},
                     {"workers", e.classes[c].count},
                     {"compute_ns", t.compute_ns},
                     {"overlapped_ns", t.overlapped_ns},
                     {"exposed_ns", t.exposed_ns},
                     {"bubble_ns", t.bubble_ns},
                     {"optimizer_ns", t.optimizer_ns},
                     {"reduce_ns", t.reduce_ns},
                     {"nic_send_ns", t.nic_send_ns},
                     {"nic_receive_ns", t.nic_receive_ns},
                     {"nvlink_send_ns", t.nvlink_send_ns},
                     {"nvlink_receive_ns", t.nvlink_receive_ns},
                     {"nic_bytes_sent", t.nic_bytes_sent},
                     {"nvlink_bytes_sent", t.nvlink_bytes_sent},
                     {"static_bytes", m.static_bytes},
                     {"weight_bytes", m.parts.weights},
                     {"gradient_bytes", m.parts.gradients},
                     {"optimizer_bytes", m.parts.optimizer},
                     {"reserved_bytes", m.parts.reserved},
                     {"peak_bytes", m.peak_bytes},
                     {"peak_at_ns", m.peak_at_ns},
                     {"peak_op", m.peak_op},
                     {"peak_activation_bytes", m.peak_activation_bytes},
                     {"peak_message_bytes", m.peak_message_bytes},
                     {"peak_workspace_bytes", m.peak_workspace_bytes()},
                     {"limit_bytes", m.limit_bytes}};
    if (!m.fits()) row["out_of_memory"] = {{"at_ns", m.over_at_ns}, {"op", m.over_op}};
    out.push_back(row);
  }
  return out;
}

ordered_json ToJson(const Evaluation& e) {
  const Job& j = e.job;
  ordered_json out = EvaluationJson(e);
  out["all_to_all_efficiency"] = j.cluster.efficiency.all_to_all;
  out["m2n_efficiency"] = j.colocated() ? ordered_json() : ordered_json(j.cluster.efficiency.m2n);
  out["dedup"] = DedupName(j.dedup);
  out["workers"] = WorkersJson(e);
  return out;
}

void PrintHead(const Job& job, int64_t batch) {
  std::vector<ClusterSpec> clusters{job.cluster};
  if (job.ffn_cluster) clusters.push_back(*job.ffn_cluster);
  std::string names, gpus;
  for (const ClusterSpec& c : clusters) {
    names += (names.empty() ? "" : "+") + c.name;
    gpus += (gpus.empty() ? "" : " + ") + std::to_string(c.gpus) + " x " + c.gpu.name;
  }
  std::printf("%s on %s (%s), batch of %lld sequences\n", job.model.name.c_str(), names.c_str(), gpus.c_str(),
              static_cast<long long>(batch));
  for (size_t i = 0; i < clusters.size(); ++i) {
    const EfficiencySpec& e = clusters[i].efficiency;
    std::printf("efficiencies%s: attention %.2f/%.2f, GEMM %.2f, experts %.2f; NICs of %g GB/s\n",
                clusters.size() == 1 ? "" : i == 0 ? " of the attention pool" : " of the FFN pool",
                e.attention_forward, e.attention_backward, e.gemm, e.grouped_gemm, clusters[i].nic_gbytes_s);
  }
}

// When it first has too little memory.
std::string OverText(const ClassMemory& m) {
  if (m.static_bytes > m.limit_bytes) return "from the start, without activations";
  char text[80];
  std::snprintf(text, sizeof text, "from %.3f s on, at %s", Seconds(m.over_at_ns), m.over_op.c_str());
  return text;
}

// What it needs at its peak, by part.
void PrintOutOfMemory(const std::string& worker, const ClassMemory& m) {
  std::printf("    %s needs %s GB of %s: weights %s, gradients %s, optimizer %s, reserve %s, ", worker.c_str(),
              Gb(m.peak_bytes).c_str(), Gb(m.limit_bytes).c_str(), Gb(m.parts.weights).c_str(),
              Gb(m.parts.gradients).c_str(), Gb(m.parts.optimizer).c_str(), Gb(m.parts.reserved).c_str());
  std::printf("activations %s, messages %s, workspace %s;\n", Gb(m.peak_activation_bytes).c_str(),
              Gb(m.peak_message_bytes).c_str(), Gb(m.peak_workspace_bytes()).c_str());
  std::printf("    above it %s\n", OverText(m).c_str());
}

void PrintRow(const Evaluation& e, int64_t batch, const Evaluation* plain, const Evaluation* overlap) {
  const auto times = [&](const Evaluation* base) {
    char text[16] = "     -";
    if (base) std::snprintf(text, sizeof text, "%5.2fx", e.tokens_per_gpu / base->tokens_per_gpu);
    return std::string(text);
  };
  const EfficiencySpec& efficiency = e.job.cluster.efficiency;
  char network[40];
  std::snprintf(network, sizeof network, e.job.colocated() ? "all-to-all %.2f" : "M2N %.2f",
                e.job.colocated() ? efficiency.all_to_all : efficiency.m2n);
  if (e.job.ffn_cluster && e.job.ffn_cluster->efficiency.m2n != efficiency.m2n) {
    std::snprintf(network, sizeof network, "M2N %.2f/%.2f", efficiency.m2n, e.job.ffn_cluster->efficiency.m2n);
  }
  // Pools of odd sizes have the nearest batch that divides.
  const std::string own = e.job.global_batch == batch ? "" : ", batch " + std::to_string(e.job.global_batch);
  std::printf("%-16s %9.3f %7.0f %6.0f %5.1f | %4.0f %4.0f %4.0f %4.0f | %5s | %5.2f | %s %s | %s%s%s; a row per "
              "%s, %s; %s\n",
              e.job.schedule.c_str(), e.step_seconds, e.tokens_per_gpu, e.tflops_per_gpu, 100 * e.mfu, 100 * e.compute,
              100 * e.overlapped, 100 * e.exposed, 100 * e.bubble, Gb(e.peak_bytes).c_str(), e.over_limit(),
              times(plain).c_str(), times(overlap).c_str(), LayoutText(e).c_str(), own.c_str(), e.fits ? "" : "; OUT OF MEMORY",
              DedupName(e.job.dedup), network, e.sim.limit.c_str());
  if (!e.fits) PrintOutOfMemory(e.class_names[e.fullest], e.sim.memory[e.fullest]);
}

// Times add up to the step, memory to the peak.
void PrintWorkers(const Evaluation& e) {
  std::printf("    %-8s %7s | %8s %10s %8s %8s %9s | %9s %9s\n", "worker", "number", "compute", "overlapped",
              "exposed", "bubble", "= step s", "NIC out s", "NIC in s");
  for (size_t c = 0; c < e.classes.size(); ++c) {
    const ClassTimes& t = e.sim.times[c];
    std::printf("    %-8s %7d | %8.3f %10.3f %8.3f %8.3f %9.3f | %9.3f %9.3f\n", e.class_names[c].c_str(),
                e.classes[c].count, Seconds(t.compute_ns), Seconds(t.overlapped_ns), Seconds(t.exposed_ns),
                Seconds(t.bubble_ns), e.step_seconds, Seconds(t.nic_send_ns), Seconds(t.nic_receive_ns));
  }
  std::printf("    %-8s %7s | %7s %9s %9s %7s %11s %8s %9s %9s %5s | %7s %-9s %s\n", "worker", "number", "weights",
              "gradients", "optimizer", "reserve", "activations", "messages", "workspace", "= peak GB", "of GB", "at s",
              "operation", "above it");
  for (size_t c = 0; c < e.classes.size(); ++c) {
    const ClassMemory& m = e.sim.memory[c];
    std::printf("    %-8s %7d | %7s %9s %9s %7s %11s %8s %9s %9s %5s | %7.3f %-9s %s\n", e.class_names[c].c_str(),
                e.classes[c].count, Gb(m.parts.weights).c_str(), Gb(m.parts.gradients).c_str(),
                Gb(m.parts.optimizer).c_str(), Gb(m.parts.reserved).c_str(), Gb(m.peak_activation_bytes).c_str(),
                Gb(m.peak_message_bytes).c_str(), Gb(m.peak_workspace_bytes()).c_str(), Gb(m.peak_bytes).c_str(),
                m.limit_bytes > 0 ? Gb(m.limit_bytes).c_str() : "-", Seconds(m.peak_at_ns), m.peak_op.c_str(),
                m.fits() ? "" : OverText(m).c_str());
  }
  std::printf("    limit: %s, %.3f s\n", e.sim.limit.c_str(), Seconds(e.sim.limit_ns));
}

// What a schedule can do: its best layout, or why there is none.
struct Row {
  std::string schedule;
  std::optional<Evaluation> e;
  ErrorParts why;
};

Row Find(const SimulateArguments& a, const Job& base, const std::string& name) {
  Job job = base;
  job.schedule = name;
  CheckName(job);
  SetScheduleDefaults(&job);
  Fixed fixed;
  ApplySettings(a, &job, &fixed);
  LayoutSearch search = SearchLayouts(job, fixed, a.any_memory);
  if (search.best) return {name, std::move(search.best), {}};
  if (search.best_over) return {name, std::move(search.best_over), {}};
  if (search.mistake) return {name, std::nullopt, *search.mistake};
  return {name, std::nullopt,
          {"no layout can be", "schedule " + name, std::to_string(search.considered) + " layouts tried",
           "one whose groups and replicas use all GPUs, with a batch that divides",
           "two pools need two GPUs; fewer --set, another batch, or --any-memory"}};
}

// Of the rows that have a layout.
const Evaluation* Of(const std::vector<Row>& rows, const std::string& schedule) {
  for (const Row& row : rows) {
    if (row.schedule == schedule && row.e) return &*row.e;
  }
  return nullptr;
}

void PrintTable(const SimulateArguments& a, const Job& base, const std::vector<Row>& rows, bool first) {
  int64_t batch = 0;
  for (const Row& row : rows) {
    if (!row.e) continue;
    batch = batch == 0 || batch == row.e->job.global_batch ? row.e->job.global_batch : base.global_batch;
  }
  if (first) PrintHead(base, batch);
  std::printf("\n%-26s tok/s/  TFLOP        |  of the step, %%     |  peak | over  | against plain  |\n",
              (std::to_string(base.seq_length) + " tokens a sequence").c_str());
  std::printf("%-16s %9s %7s %6s %5s | %4s %4s %4s %4s | %5s | %5s | %6s %6s | %s\n", "schedule", "step s", "GPU", "/s/GPU",
              "MFU%", "comp", "over", "exp", "bub", "GB", "limit", "1f1b", "ovlap", "layout; dispatch and its "
              "efficiency; limit");
  // What does not fit is no baseline, unless it was asked for.
  const auto baseline = [&](const char* name) {
    const Evaluation* e = Of(rows, name);
    return e && (e->fits || a.any_memory) ? e : nullptr;
  };
  for (const Row& row : rows) {
    if (!row.e) {
      std::printf("%-16s cannot: %s\n", row.schedule.c_str(), Error(row.why).what());
      continue;
    }
    PrintRow(*row.e, batch, baseline("megatron-1f1b"), baseline("megatron-overlap"));
    if (a.workers) PrintWorkers(*row.e);
  }
}

void WriteTrace(const std::string& path, const Evaluation& found) {
  const Evaluation e = Evaluate(found.job, {.trace = true});
  std::vector<WorkerName> names;
  std::vector<TraceCounter> counters;
  const Schedule schedule = ScheduleOf(e.job);
  for (size_t c = 0; c < e.classes.size(); ++c) {
    const int rank = schedule.groups[e.classes[c].group].ranks[e.classes[c].first_worker];
    names.push_back({rank, e.class_names[c]});
    const std::vector<TraceCounter> memory = MemoryCounters(e.sim.memory[c], rank);
    counters.insert(counters.end(), memory.begin(), memory.end());
  }
  std::ofstream out(path);
  out << PerfettoJson(e.sim.events, names, counters);
  if (!out.flush()) throw Error({"cannot write the trace", path, "", "", ""});
}

}  // namespace

int SimulateCommand(const SimulateArguments& a) {
  const std::vector<ClusterSpec> clusters = LoadClusters(a.cluster);
  const std::vector<std::string> schedules = SchedulesOf(a, clusters.size() == 2);
  CheckPrefixes(a, schedules);
  Job base;
  base.model = LoadModelShape(a.model);
  base.cluster = clusters[0];
  if (clusters.size() == 2) base.ffn_cluster = clusters[1];
  if (!a.expert_load.empty()) base.expert_loads = ReadExpertLoads(a.expert_load);
  std::vector<int64_t> sequences;
  for (const std::string& text : a.sequences) sequences.push_back(ParseLength(text, "--seq"));
  if (sequences.empty()) sequences.push_back(4096);
  if (!a.trace.empty() && (schedules.size() != 1 || sequences.size() != 1)) {
    throw Error({"a trace is of one simulation", "--trace", std::to_string(schedules.size() * sequences.size()), "one schedule, one --seq", ""});
  }
  ordered_json json = ordered_json::array();
  bool any = false;
  for (size_t i = 0; i < sequences.size(); ++i) {
    base.seq_length = sequences[i];
    std::vector<Row> rows;
    for (const std::string& name : schedules) rows.push_back(Find(a, base, name));
    const bool none = std::none_of(rows.begin(), rows.end(), [](const Row& row) { return row.e.has_value(); });
    if (none) throw Error(rows[0].why);
    if (!a.trace.empty()) WriteTrace(a.trace, *rows[0].e);
    for (const Row& row : rows) {
      any |= row.e && row.e->fits;
      if (!a.json) continue;
      json.push_back(row.e ? ToJson(*row.e)
                           : ordered_json{{"schedule", row.schedule}, {"seq_length", base.seq_length},
                                          {"error", ordered_json::parse(ErrorJson(row.why))}});
    }
    if (!a.json) PrintTable(a, base, rows, i == 0);
  }
  if (a.json) std::puts(json.dump(1).c_str());
  return any ? 0 : 1;
}

int SimulatePlanCommand(const SimulateArguments& a, std::vector<std::string> overrides) {
  if (!a.cluster.empty()) overrides.insert(overrides.begin(), a.cluster);
  if (!a.schedules.empty() || !a.sequences.empty()) {
    throw Error({"the plan says it", a.schedules.empty() ? "--seq" : "--schedule", "", "",
                 a.schedules.empty() ? "train.seq_length=N after the file changes it"
                                     : "`disagmoe simulate " + a.model + " CLUSTER` compares schedules"});
  }
  Job job = ReadPlanFile(a.model, overrides);
  CheckPrefixes(a, {job.schedule});
  if (!a.expert_load.empty()) job.expert_loads = ReadExpertLoads(a.expert_load);
  Fixed fixed;
  ApplySettings(a, &job, &fixed);
  const Evaluation e = Evaluate(job);
  if (!a.trace.empty()) WriteTrace(a.trace, e);
  if (a.json) {
    std::puts(ordered_json::array({ToJson(e)}).dump(1).c_str());
  } else {
    PrintTable(a, job, {{job.schedule, e, {}}}, true);
  }
  return e.fits ? 0 : 1;
}

}  // namespace disagmoe
