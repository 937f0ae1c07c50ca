// The best layout of a schedule on a cluster: candidates ranked by the sizing program's times, the best of them
// estimated from smaller steps, the best of those simulated, and then their neighbours, until nothing is better. Same
// request, same answer, whatever the number of threads (unless it is stopped).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "plan/evaluate.h"
#include "plan/grid.h"

namespace disagmoe {

constexpr size_t kShapes = 200;  // that are ranked for a search

struct SearchCounts {
  int64_t considered = 0;  // shapes: groups and workers
  int64_t estimated = 0;   // candidates of which smaller steps were simulated
  int64_t simulated = 0;   // whole steps
  SearchCounts& operator+=(const SearchCounts& o);
};

// Shared by the searches of a plan; progress is called from any thread, one call at a time.
struct SearchControl {
  const std::atomic<bool>* stop = nullptr;  // set: ends soon, with the best so far
  std::function<void(const std::string& schedule, const SearchCounts&, double tokens_per_gpu)> progress;
  int threads = 1;
  // Operations that may be simulated for a schedule: a step of Qwen3-235B on 128 GPUs has about 50,000.
  int64_t effort = 700'000;
  bool exhaust = true;  // simulate all that there is, where that is little
  bool stopped() const { return stop && stop->load(); }
};

struct Found {
  Candidate candidate;
  Evaluation e;
  double per_sequence() const { return e.step_seconds / static_cast<double>(e.job.global_batch); }
};

struct ScheduleSearch {
  std::string schedule;
  SearchCounts counts;
  std::vector<Found> fitting;  // simulated, the best first; other shapes follow
  std::vector<Found> over;     // simulated, faster than the best or, if nothing fits, the smallest first
  bool stopped = false;
  bool complete = false;              // nothing was left out
  std::optional<ErrorParts> mistake;  // if none can be: why not, of one of them
  // Puts it where it belongs. any_memory: it counts as fitting.
  void Keep(Found found, bool any_memory);
  const Evaluation* best() const { return fitting.empty() ? nullptr : &fitting.front().e; }
  const Evaluation* nearest() const { return over.empty() ? nullptr : &over.front().e; }
};
// seeds: tried in any case. ranked: instead of Grid::Rank (of a schedule with the same candidates).
ScheduleSearch SearchSchedule(const GridRequest& request, const SearchControl& control,
                              const std::vector<Candidate>& seeds = {}, const Grid::Ranked* ranked = nullptr);

// Goes on from there with candidates that other searches found good, and what is around the best of them.
ScheduleSearch Continue(ScheduleSearch found, const GridRequest& request, const SearchControl& control,
                        const std::vector<Candidate>& seeds);

// fn(i) for each i, on so many threads; the first exception is thrown again.
void ParallelFor(size_t count, int threads, const std::function<void(size_t)>& fn);

}  // namespace disagmoe
