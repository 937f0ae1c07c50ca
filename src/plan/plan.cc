#include "plan/plan.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>

#include "base/error.h"
#include "plan/estimate.h"
#include "plan/plan_changes.h"
#include "plan/text.h"
#include "spec/trainable.h"

namespace disagmoe {
namespace {

// Groups that the sizing program chooses from; the search looks between.
const std::vector<int> kGroupCounts{1, 2, 3, 4, 6, 8, 12, 16, 24, 32};
constexpr double kSizingSeconds = 1;
constexpr int64_t kFewGpus = 32;
constexpr int kMostRechoices = 8;
constexpr int64_t kMostOperations = 20'000'000;  // a few seconds

double Gb(double bytes) { return bytes * 1e-9; }

struct Setting {
  std::string schedule, name, value;  // schedule "": of all that have it
  bool used = false;
};

std::vector<Setting> Parse(const PlanRequest& request) {
  std::vector<Setting> out;
  for (const std::string& text : request.settings) {
    const size_t equal = text.find('=');
    if (equal == std::string::npos) {
      throw Error({"not a setting", "--set", "\"" + text + "\"", "key=value or SCHEDULE:key=value", ""});
    }
    Setting s{"", text.substr(0, equal), text.substr(equal + 1)};
    if (const size_t colon = s.name.find(':'); colon != std::string::npos) {
      s.schedule = s.name.substr(0, colon);
      s.name = s.name.substr(colon + 1);
    }
    out.push_back(s);
  }
  return out;
}

void Apply(std::vector<Setting>* settings, Job* job, Fixed* fixed) {
  std::set<std::string> known;
  for (const KnobHelp& knob : Knobs()) known.insert(knob.name);
  for (Setting& s : *settings) {
    if (!s.schedule.empty() && s.schedule != job->schedule) continue;
    if (s.schedule.empty() && known.contains(s.name) && !KnobIsUsed(*job, s.name)) continue;
    SetKnob(job, s.name, s.value);
    fixed->insert(s.name);
    s.used = true;
  }
}

struct Arrangement {
  std::string text;
  ClusterSpec cluster;
  std::optional<ClusterSpec> ffn;
};

// As slow as the slower in everything, with the GPUs of both; no node has GPUs of both.
ClusterSpec Slower(const ClusterSpec& a, const ClusterSpec& b) {
  ClusterSpec out = a;
  const auto less = [](double* x, double y) { *x = std::min(*x, y); };
  const auto more = [](double* x, double y) { *x = std::max(*x, y); };
  out.gpus = a.gpus + b.gpus;
  const int node = std::min({a.gpus, b.gpus, a.gpus_per_node});
  out.nics_per_node = std::max(1, std::min(a.nics_per_node, b.nics_per_node) * node / a.gpus_per_node);
  out.gpus_per_node = node;
  if (a.gpu.name != b.gpu.name) out.gpu.name = a.gpu.name + " + " + b.gpu.name;
  less(&out.gpu.peak_tflops, b.gpu.peak_tflops);
  less(&out.gpu.memory_gb, b.gpu.memory_gb);
  less(&out.gpu.memory_gbytes_s, b.gpu.memory_gbytes_s);
  less(&out.nvlink_gbytes_s, b.nvlink_gbytes_s);
  less(&out.nic_gbytes_s, b.nic_gbytes_s);
  more(&out.nic_latency_us, b.nic_latency_us);
  more(&out.nvlink_latency_us, b.nvlink_latency_us);
  more(&out.spine_oversubscription, b.spine_oversubscription);
  if (b.topology == "rail") out.topology = b.topology;
  EfficiencySpec& e = out.efficiency;
  const EfficiencySpec& f = b.efficiency;
  for (auto share :
       {&EfficiencySpec::attention_forward, &EfficiencySpec::attention_backward, &EfficiencySpec::gemm,
        &EfficiencySpec::grouped_gemm, &EfficiencySpec::memory, &EfficiencySpec::all_to_all, &EfficiencySpec::m2n,
        &EfficiencySpec::point_to_point, &EfficiencySpec::nvlink, &EfficiencySpec::collective}) {
    less(&(e.*share), f.*share);
  }
  for (auto cost : {&EfficiencySpec::grouped_gemm_half_rows, &EfficiencySpec::op_overhead_us,
                    &EfficiencySpec::message_overhead_us, &EfficiencySpec::overlap_slowdown}) {
    more(&(e.*cost), f.*cost);
  }
  out.name = a.name + "+" + b.name;
  return out;
}

// Nodes of both must be whole to be nodes of one cluster.
bool CanJoin(const ClusterSpec& a, const ClusterSpec& b) {
  const int node = std::min({a.gpus, b.gpus, a.gpus_per_node});
  return a.gpus_per_node == b.gpus_per_node && a.gpus % node == 0 && b.gpus % node == 0;
}

std::vector<Arrangement> Arrangements(const PlanRequest& request, bool colocated) {
  if (request.hardware.size() == 1) return {{"", request.hardware[0], std::nullopt}};
  const ClusterSpec& x = request.hardware[0];
  const ClusterSpec& y = request.hardware[1];
  std::vector<Arrangement> out;
  if (!colocated) {
    out.push_back({"A on " + x.name + ", F on " + y.name, x, y});
    if (x.name != y.name) out.push_back({"A on " + y.name + ", F on " + x.name, y, x});
  }
  if (CanJoin(x, y)) out.push_back({"all as the slower", Slower(x, y), std::nullopt});
  out.push_back({x.name + " alone", x, std::nullopt});
  if (x.name != y.name) out.push_back({y.name + " alone", y, std::nullopt});
  return out;
}

bool Better(const Evaluation& a, const Evaluation& b) {
  const double x = a.tokens_per_second(), y = b.tokens_per_second();
  // system.md section 6: equal steps by their memory.
  if (std::abs(x - y) > 1e-9 * y) return x > y;
  return a.peak_bytes < b.peak_bytes;
}

void Choose(Plan* plan) {
  plan->chosen = plan->best_split = plan->best_colocated = -1;
  for (size_t i = 0; i < plan->rows.size(); ++i) {
    const Evaluation* e = plan->rows[i].best();
    if (!e) continue;
    int* of_kind = plan->rows[i].grid.base.colocated() ? &plan->best_colocated : &plan->best_split;
    for (int* at : {of_kind, &plan->chosen}) {
      if (*at < 0 || Better(*e, *plan->rows[*at].best())) *at = static_cast<int>(i);
    }
  }
}

// Whether one of the best was not yet simulated whole, and is now.
bool SimulateChosen(Plan* plan) {
  bool changed = false;
  for (const int i : std::set<int>{plan->chosen, plan->best_split, plan->best_colocated}) {
    if (i < 0 || plan->rows[i].best()->whole) continue;
    ScheduleSearch& search = plan->rows[i].search;
    Found found = std::move(search.fitting.front());
    search.fitting.erase(search.fitting.begin());
    if (OperationsOf(found.e.job) < kMostOperations) found.e = Evaluate(found.e.job);
    found.e.whole = true;  // or as much of it as is simulated of anything
    search.Keep(std::move(found), false);
    changed = true;
  }
  return changed;
}

// Whether much faster layouts only lack memory.
bool Starved(const Plan& plan) {
  constexpr double kMuch = 2;
  return std::any_of(plan.rows.begin(), plan.rows.end(), [&](const PlanRow& row) {
    const Evaluation* e = row.search.nearest();
    return e && !row.best() && e->tokens_per_second() > kMuch * plan.best()->tokens_per_second();
  });
}

void AddRejected(Plan* plan) {
  const Evaluation& best = *plan->best();
  const auto add = [&](const Evaluation& e) {
    plan->rejected.push_back({e, Difference(best, e), WhatBinds(e), best.tokens_per_second() / e.tokens_per_second()});
  };
  const PlanRow& row = plan->rows[plan->chosen];
  // Of the same schedule: the best of other groups, and the fastest that does not fit.
  std::set<std::string> seen;
  const auto shape = [](const Evaluation& e) {
    const Job& j = e.job;
    return Format("%d %d %d %d %d", j.p_a, j.p_f, j.m, j.n, j.virtual_stages);
  };
  seen.insert(shape(best));
  for (const Found& f : row.search.fitting) {
    if (seen.size() < 5 && seen.insert(shape(f.e)).second) add(f.e);
  }
  const Evaluation* over = nullptr;
  for (const Found& f : row.search.over) {
    if (f.e.tokens_per_second() > best.tokens_per_second() &&
        (!over || f.e.tokens_per_second() > over->tokens_per_second()))
      over = &f.e;
  }
  if (over) add(*over);
  for (const int i : BestRows(*plan)) {
    if (i != plan->chosen && plan->rows[i].best()) add(*plan->rows[i].best());
  }
  std::stable_sort(plan->rejected.begin(), plan->rejected.end(),
                   [](const Rejected& a, const Rejected& b) { return a.slower < b.slower; });
}

// The fastest, and the fastest that leave room for a schedule that keeps more.
void AddSeeds(const std::vector<Found>& from, std::vector<Candidate>* seeds) {
  constexpr int kOfEach = 3;
  constexpr double kRoomy = 0.85;
  int fast = 0, roomy = 0;
  for (const Found& f : from) {
    const double limit = static_cast<double>(f.e.sim.memory[f.e.fullest].limit_bytes);
    const bool has_room = static_cast<double>(f.e.peak_bytes) < kRoomy * limit;
    if (fast >= kOfEach && (!has_room || roomy >= kOfEach)) continue;
    ++(fast < kOfEach ? fast : roomy);
    seeds->push_back(f.candidate);
  }
}

// Solves the sizing program for the pools of each arrangement; what it finds are seeds of the search.
std::map<std::string, std::vector<Candidate>> AddSizing(int threads, Plan* plan) {
  std::vector<size_t> rows;
  std::map<std::string, std::vector<Candidate>> seeds;
  for (size_t i = 0; i < plan->rows.size(); ++i) {
    const PlanRow& row = plan->rows[i];
    const bool pipe = row.schedule.starts_with("af-pipe");
    seeds.try_emplace(row.hardware);
    const auto same = [&](size_t k) { return plan->rows[k].hardware == row.hardware; };
    if (pipe && std::none_of(rows.begin(), rows.end(), same)) rows.push_back(i);
  }
  std::vector<std::optional<SizingRow>> found(rows.size());
  std::vector<std::vector<Candidate>> candidates(rows.size());
  ParallelFor(rows.size(), threads, [&](size_t k) {
    const GridRequest& request = plan->rows[rows[k]].grid;
    const Job& base = request.base;
    const SizingModel model(base);
    SizingProgram program;
    program.model = &model;
    program.gpus = base.cluster.gpus - base.idle_gpus;
    program.ffn_gpus = base.ffn_cluster ? base.ffn_cluster->gpus - base.idle_ffn_gpus : 0;
    program.batch = request.batch_most;
    program.group_counts_a = program.group_counts_f = kGroupCounts;
    program.sequences = {1, 2, 3, 4};
    program.fixed = request.fixed;
    const std::optional<SizingAnswer> answer = SolveSizing(program, kSizingSeconds);
    if (!answer) return;
    Candidate c;
    c.pools = answer->pools;
    const Grid grid(request);
    if (!grid.Complete(&c)) return;  // no batch in the range divides over these workers
    candidates[k].push_back(c);
    const double speed = static_cast<double>(base.seq_length) / (answer->ns * 1e-9) / static_cast<double>(base.gpus());
    found[k] = SizingRow{plan->rows[rows[k]].hardware, *answer, LayoutText(grid.JobOf(c)), speed};
  });
  for (size_t k = 0; k < rows.size(); ++k) {
    if (found[k]) plan->sizing.push_back(*found[k]);
    seeds[plan->rows[rows[k]].hardware] = candidates[k];
  }
  return seeds;
}

}  // namespace

int64_t GpusOf(const PlanRequest& request) {
  int64_t gpus = 0;
  for (const ClusterSpec& c : request.hardware) gpus += c.gpus;
  return gpus;
}

std::vector<int> BestRows(const Plan& plan) {
  std::vector<int> out;
  std::map<std::string, size_t> at;
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const auto [entry, is_new] = at.try_emplace(plan.rows[i].schedule, out.size());
    if (is_new) {
      out.push_back(static_cast<int>(i));
      continue;
    }
    int& best = out[entry->second];
    const Evaluation* e = plan.rows[i].best();
    if (e && (!plan.rows[best].best() || Better(*e, *plan.rows[best].best()))) best = static_cast<int>(i);
  }
  return out;
}

std::string WhatBinds(const Evaluation& e) {
  if (!e.fits) {
    const ClassMemory& m = e.sim.memory[e.fullest];
    return Format("memory of %s: %.1f GB of %.1f (state %.1f, activations %.1f, messages and workspace %.1f)",
                  e.class_names[e.fullest].c_str(), Gb(static_cast<double>(m.peak_bytes)),
                  Gb(static_cast<double>(m.limit_bytes)), Gb(static_cast<double>(m.static_bytes)),
                  Gb(static_cast<double>(m.peak_activation_bytes)),
                  Gb(static_cast<double>(m.peak_message_bytes + m.peak_workspace_bytes())));
  }
  const double busy = 100 / e.over_limit();
  std::string out = Format("%s, busy %.0f %% of the step", e.sim.limit.c_str(), busy);
  if (busy < 85) {
    out += e.bubble > e.exposed ? Format("; bubbles %.0f %%", 100 * e.bubble)
                                : Format("; waits for messages %.0f %%", 100 * e.exposed);
  }
  return out;
}

std::string Difference(const Evaluation& from, const Evaluation& to) {
  const Job& a = from.job;
  const Job& b = to.job;
  std::vector<std::string> parts;
  if (a.schedule != b.schedule) return b.schedule + ": " + LayoutText(to);
  const auto number = [&](const char* name, int64_t x, int64_t y) {
    if (x != y) parts.push_back(Format("%s %lld for %lld", name, static_cast<long long>(y), static_cast<long long>(x)));
  };
  if (b.colocated()) {
    number("PP", a.p_a, b.p_a), number("EP", a.m, b.m), number("v", a.virtual_stages, b.virtual_stages);
  } else {
    if (a.p_a == a.p_f && b.p_a == b.p_f) {
      number("p", a.p_a, b.p_a);
    } else {
      number("p_A", a.p_a, b.p_a), number("p_F", a.p_f, b.p_f);
    }
    if (a.m != b.m || a.n != b.n) parts.push_back(Format("%d A + %d F for %d A + %d F", b.m, b.n, a.m, a.n));
  }
  number("replicas", a.replicas(), b.replicas());
  number("b", a.sequences, b.sequences);
  number("q", from.round, to.round);
  if (a.micro_batches() != b.micro_batches()) number("M", a.micro_batches(), b.micro_batches());
  if (a.head_on_attention != b.head_on_attention) parts.push_back(b.head_on_attention ? "head on A" : "head on F");
  if (a.mixed_nodes != b.mixed_nodes)
    parts.push_back(b.mixed_nodes ? "pools mixed on the nodes" : "pools on nodes of their own");
  if (a.recompute != b.recompute) parts.push_back(b.recompute ? "with recomputation" : "without recomputation");
  if (a.mixed_nodes && b.mixed_nodes && a.nics_a != b.nics_a) {
    parts.push_back(Format("%.2f NICs an A worker for %.2f", b.nics_a, a.nics_a));
  }
  std::string out;
  for (const std::string& part : parts) out += (out.empty() ? "" : ", ") + part;
  return out.empty() ? "nothing" : out;
}

std::string Verdict(const Plan& plan) {
  const auto row = [&](int i) { return plan.rows[i].schedule; };
  if (plan.chosen < 0) return "Nothing fits.";
  if (plan.best_split < 0) {
    return plan.best_colocated < 0
               ? "Nothing fits."
               : "No split fits the memory: the plan is colocated, " + row(plan.best_colocated) + ".";
  }
  const Evaluation& split = *plan.rows[plan.best_split].best();
  if (plan.best_colocated < 0) return "Splitting is the only way that fits the memory: " + row(plan.best_split) + ".";
  const Evaluation& colocated = *plan.rows[plan.best_colocated].best();
  const double gain = split.tokens_per_second() / colocated.tokens_per_second();
  const auto shares = [](const Evaluation& e) {
    return Format("waits for messages %.0f %%, bubbles %.0f %%, limit %s", 100 * e.exposed, 100 * e.bubble,
                  e.sim.limit.c_str());
  };
  if (gain > 1) {
    return Format("Splitting pays: %s is %.2f x as fast as the best colocated schedule, %s.\n",
                  row(plan.best_split).c_str(), gain, row(plan.best_colocated).c_str()) +
           "  split: " + shares(split) + "\n  colocated: " + shares(colocated);
  }
  return Format("Splitting does not pay here: the best split, %s, reaches %.2f of the best colocated schedule, %s.\n",
                row(plan.best_split).c_str(), gain, row(plan.best_colocated).c_str()) +
         "  split: " + shares(split) + "\n  colocated: " + shares(colocated);
}

std::vector<PlanRow> RowsOf(const PlanRequest& request) {
  std::vector<std::string> names = request.schedules;
  if (names.empty()) {
    for (const ScheduleName& n : ScheduleNames()) names.push_back(n.name);
  }
  std::vector<Setting> settings = Parse(request);
  std::vector<PlanRow> rows;
  for (const std::string& name : names) {
    Job job;
    job.model = request.model;
    job.schedule = name;
    CheckName(job);
    for (const Arrangement& a : Arrangements(request, job.colocated())) {
      job.cluster = a.cluster;
      job.ffn_cluster = a.ffn;
      job.seq_length = request.seq_length;
      job.global_batch = request.batch;
      job.expert_loads = request.expert_loads;
      job.documents = request.documents;
      PlanRow row{
          name, a.text, MissingForSchedule(name).empty(), {job, {}, request.batch_least, request.batch_most}, {}};
      SetScheduleDefaults(&row.grid.base);
      Apply(&settings, &row.grid.base, &row.grid.fixed);
      if (row.grid.fixed.contains("batch")) row.grid.batch_least = row.grid.batch_most = row.grid.base.global_batch;
      rows.push_back(std::move(row));
    }
  }
  for (const Setting& s : settings) {
    if (!s.used) {
      throw Error({"a setting that is not used", "--set " + s.name, s.name + "=" + s.value,
                   "one that a schedule of the plan has", "see disagmoe plan --help"});
    }
  }
  return rows;
}

Plan MakePlan(const PlanRequest& request, const SearchControl& control) {
  Plan plan;
  plan.rows = RowsOf(request);
  SearchControl inner = control;
  // Small clusters have more layouts for each GPU, and their steps are quickly simulated.
  inner.effort = request.effort * (GpusOf(request) <= kFewGpus ? 3 : 1);
  inner.threads = plan.rows.size() >= 2 * static_cast<size_t>(control.threads) ? 1 : control.threads;
  const int outer = inner.threads == 1 ? control.threads : 1;
  std::mutex mutex;
  if (control.progress) {
    inner.progress = [&](const std::string& schedule, const SearchCounts& counts, double speed) {
      const std::lock_guard lock(mutex);
      control.progress(schedule, counts, speed);
    };
  }
  const std::map<std::string, std::vector<Candidate>> sized = AddSizing(control.threads, &plan);
  // The candidates of af-pipe-zb are those of af-pipe: ranked once, where both are asked for and nothing else differs.
  std::map<std::string, Grid::Ranked> ranked;
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    if (plan.rows[i].schedule != "af-pipe") continue;
    for (size_t k = 0; k < plan.rows.size(); ++k) {
      const bool same = plan.rows[k].schedule == "af-pipe-zb" && plan.rows[k].hardware == plan.rows[i].hardware;
      if (same && request.settings.empty()) ranked.try_emplace(plan.rows[i].hardware);
    }
  }
  std::vector<std::string> shared;
  for (const auto& [hardware, unused] : ranked) shared.push_back(hardware);
  ParallelFor(shared.size(), control.threads, [&](size_t h) {
    for (size_t i = 0; i < plan.rows.size(); ++i) {
      if (plan.rows[i].schedule != "af-pipe" || plan.rows[i].hardware != shared[h]) continue;
      ranked.at(shared[h]) = Grid(plan.rows[i].grid).Rank(kShapes, control.stop);
    }
  });
  ParallelFor(plan.rows.size(), outer, [&](size_t i) {
    const bool pipe = plan.rows[i].schedule.starts_with("af-pipe");
    const auto at = ranked.find(plan.rows[i].hardware);
    plan.rows[i].search =
        SearchSchedule(plan.rows[i].grid, inner, pipe ? sized.at(plan.rows[i].hardware) : std::vector<Candidate>{},
                       pipe && at != ranked.end() ? &at->second : nullptr);
  });
  // What is good for one schedule may be for others, and was not among the first that they tried.
  std::vector<std::vector<Candidate>> seeds(plan.rows.size());
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    for (const PlanRow& other : plan.rows) {
      const bool same_kind = other.grid.base.colocated() == plan.rows[i].grid.base.colocated();
      if (!same_kind || other.hardware != plan.rows[i].hardware || other.schedule == plan.rows[i].schedule) continue;
      AddSeeds(other.search.fitting, &seeds[i]);
    }
  }
  ParallelFor(plan.rows.size(), outer, [&](size_t i) {
    plan.rows[i].search = Continue(std::move(plan.rows[i].search), plan.rows[i].grid, inner, seeds[i]);
  });
  Choose(&plan);
  // What is said of the best is simulated whole, which may change who is best.
  for (int round = 0; round < kMostRechoices && SimulateChosen(&plan); ++round) Choose(&plan);
  for (const PlanRow& row : plan.rows) {
    plan.counts += row.search.counts;
    plan.stopped |= row.search.stopped;
  }
  if (plan.best()) AddRejected(&plan);
  if (request.changes && !control.stopped()) {
    if (plan.best()) AddChanges(control, &plan);
    if (!plan.best() || Starved(plan)) AddReliefs(request, inner, &plan);
  }
  return plan;
}

}  // namespace disagmoe
