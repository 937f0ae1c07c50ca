// From a model and a cluster to a plan that can be run: the best layout of each schedule, which one is best of all,
// what keeps the others back, and what a change of the cluster or the job would change.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/search.h"
#include "plan/sizing_program.h"

namespace disagmoe {

struct PlanRequest {
  ModelShape model;
  // One kind of machines, or two: then each pool may have its own kind, or all work as if they were of the slower one.
  std::vector<ClusterSpec> hardware;
  int64_t seq_length = 4096;
  // Sequences a step: any in the range, the nearest to `batch` where nothing else decides.
  int64_t batch = 1024, batch_least = 973, batch_most = 1075;
  std::vector<std::string> schedules;  // empty: all
  // "key=value" for every schedule that has such a setting, or "SCHEDULE:key=value".
  std::vector<std::string> settings;
  std::vector<std::vector<double>> expert_loads;
  Documents documents;       // that sequences are packed with
  bool changes = true;       // what-ifs
  int64_t effort = 700'000;  // of each schedule's search (search.h)
};

// A schedule on some arrangement of the hardware.
struct PlanRow {
  std::string schedule;
  std::string hardware;  // "", or "A on h800x64, F on h100x64"
  bool trains = false;   // the runtime executes it
  GridRequest grid;      // what is searched
  ScheduleSearch search;
  const Evaluation* best() const { return search.best(); }
};

// A layout that was not taken.
struct Rejected {
  Evaluation e;
  std::string differs;  // from the plan: "p 2 for 1, 12 A + 4 F for 8 A + 8 F"
  std::string binds;    // "NIC send of A1, busy 93 % of the step"
  double slower = 0;    // 1.08: its step for as many tokens; below 1 for one that does not fit
};

// The job or the cluster, changed.
struct Change {
  std::string what;        // "one NIC more in each node"
  bool same_fits = false;  // the plan as it is
  double same_ratio = 0;   // its tokens a second against today's
  // Of the layouts looked at: the best then. best_layout is empty where that is the plan.
  std::string best_schedule, best_layout;
  double best_ratio = 0;
};

// What the sizing program says of the pools, before anything is simulated.
struct SizingRow {
  std::string hardware;
  SizingAnswer answer;
  std::string layout;
  double tokens_per_gpu = 0;  // if nothing queued, waited or filled: at most
};

// Nothing fits: what would.
struct Relief {
  std::string what;
  bool fits = false;
  std::string layout;  // that fits, or that needs least
  double tokens_per_gpu = 0;
  double peak_gb = 0, limit_gb = 0;
};

struct Plan {
  std::vector<PlanRow> rows;  // as asked
  int chosen = -1;            // row; -1: nothing fits
  int best_split = -1, best_colocated = -1;
  std::vector<SizingRow> sizing;  // of each arrangement of the pools
  std::vector<Rejected> rejected;
  std::vector<Change> changes;
  std::vector<Relief> reliefs;
  SearchCounts counts;
  bool stopped = false;
  const Evaluation* best() const { return chosen < 0 ? nullptr : rows[chosen].best(); }
};
// Throws Error for a request that cannot be: an unknown schedule, a setting that none of the schedules has.
Plan MakePlan(const PlanRequest& request, const SearchControl& control);

// The rows before anything is searched.
std::vector<PlanRow> RowsOf(const PlanRequest& request);
// Of each schedule the row of its best arrangement, in order.
std::vector<int> BestRows(const Plan& plan);
// What keeps a simulated step from being shorter, or what does not fit.
std::string WhatBinds(const Evaluation& e);
// How a layout differs from another, in words.
std::string Difference(const Evaluation& from, const Evaluation& to);
// In words with numbers: whether splitting pays, and by what.
std::string Verdict(const Plan& plan);

}  // namespace disagmoe
