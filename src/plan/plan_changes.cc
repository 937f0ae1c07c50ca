// What a change would change: of the plan, and where nothing fits.
#include "plan/plan_changes.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "base/error.h"
#include "plan/estimate.h"
#include "plan/text.h"

namespace disagmoe {
namespace {

constexpr size_t kOfPlan =
    4;  // layouts of the plan's schedule that are looked at again; of others that train, the best
constexpr int kMostGpus = 32;  // times those that there are

std::vector<ClusterSpec*> MachinesOf(Job* job) {
  std::vector<ClusterSpec*> out{&job->cluster};
  if (job->ffn_cluster) out.push_back(&*job->ffn_cluster);
  return out;
}

// Popularity as 1 / r^skew of which the first of E has `times` the mean.
double SkewOf(int64_t experts, double times) {
  double low = 0, high = 4;
  for (int i = 0; i < 60; ++i) {
    const double skew = (low + high) / 2;
    double sum = 0;
    for (int64_t r = 1; r <= experts; ++r) sum += std::pow(static_cast<double>(r), -skew);
    (static_cast<double>(experts) / sum < times ? low : high) = skew;
  }
  return low;
}

struct WhatIf {
  std::string what;
  // The job in it: one, or several ways to use what is new; none where it does not apply.
  std::function<std::vector<Job>(const Job&)> jobs;
};

std::vector<WhatIf> WhatIfs(const Job& plan) {
  std::vector<WhatIf> out;
  out.push_back({"one NIC more in each node", [](const Job& j) {
                   Job more = j;
                   for (ClusterSpec* c : MachinesOf(&more)) ++c->nics_per_node;
                   if (j.nics_a <= 0 && j.nics_f <= 0) return std::vector<Job>{more};
                   // Whole NICs were given to the pools: the new one goes to either.
                   Job a = more, f = more;
                   const double all = static_cast<double>(j.workers());
                   const double node = std::min<double>(j.cluster.gpus_per_node, all);
                   a.nics_a += 1 / std::ceil(node * j.p_a * j.m / all - 1e-9);
                   f.nics_f += 1 / std::ceil(node * (j.colocated() ? j.m : j.p_f * j.n) / all - 1e-9);
                   return j.colocated() ? std::vector<Job>{a} : std::vector<Job>{a, f};
                 }});
  out.push_back({"20 % less bandwidth of each NIC", [](Job j) {
                   for (ClusterSpec* c : MachinesOf(&j)) c->nic_gbytes_s *= 0.8;
                   return std::vector<Job>{j};
                 }});
  out.push_back({"sequences twice as long, about half as many", [](Job j) {
                   j.seq_length *= 2;
                   if (j.micro_batches() % 2 == 0 && (j.round == 0 || j.micro_batches() / 2 % j.round == 0))
                     j.global_batch /= 2;
                   Job again = j;
                   again.recompute = true;
                   return std::vector<Job>{j, again};
                 }});
  if (!plan.uneven() && plan.model.num_experts > 1) {
    const double skew = SkewOf(plan.model.num_experts, 2);
    out.push_back({Format("the hottest expert of a layer at twice its share (routing_skew %.2f)", skew), [skew](Job j) {
                     j.routing_skew = skew;
                     return std::vector<Job>{j};
                   }});
  }
  return out;
}

struct Timed {
  const Job* layout = nullptr;  // of today
  double speed = 0;             // tokens a second
  bool fits = false;
};

// The better of the ways to use a change.
Timed TimeOf(const std::vector<Job>& jobs, const Job* layout) {
  Timed out{layout, 0, false};
  for (const Job& job : jobs) {
    try {
      const StepEstimate e = EstimateStep(job);
      const double speed =
          static_cast<double>(job.global_batch) * static_cast<double>(job.seq_length) / (e.step_ns * 1e-9);
      if (e.fits() > out.fits || (e.fits() == out.fits && speed > out.speed)) out.speed = speed, out.fits = e.fits();
    } catch (const Error&) {  // cannot be
    }
  }
  return out;
}

// Searched again, for another job with so many times the batch.
ScheduleSearch Again(const PlanRow& row, const Job& base, double batch_scale, const SearchControl& control) {
  const auto scaled = [&](int64_t batch) {
    return std::max<int64_t>(1, static_cast<int64_t>(std::llround(static_cast<double>(batch) * batch_scale)));
  };
  GridRequest request = row.grid;
  request.base = base;
  request.base.global_batch = scaled(row.grid.base.global_batch);
  request.batch_least = scaled(row.grid.batch_least);
  request.batch_most = scaled(row.grid.batch_most);
  return SearchSchedule(request, control);
}

}  // namespace

std::string LayoutText(const Job& job) {
  Evaluation e;
  e.job = job;
  e.round = job.round;
  e.parts = std::max(1, job.parts);
  return LayoutText(e);
}

void AddChanges(const SearchControl& control, Plan* plan) {
  std::vector<const Job*> layouts{&plan->best()->job};
  for (const int i : BestRows(*plan)) {
    const PlanRow& row = plan->rows[i];
    if (!row.trains && i != plan->chosen) continue;
    const size_t most = i == plan->chosen ? kOfPlan : 1;
    for (size_t k = 0; k < std::min(most, row.search.fitting.size()); ++k) {
      if (&row.search.fitting[k].e != plan->best()) layouts.push_back(&row.search.fitting[k].e.job);
    }
  }
  const Timed today = TimeOf({*layouts[0]}, layouts[0]);
  for (const WhatIf& what : WhatIfs(*layouts[0])) {
    if (control.stopped()) return;
    std::vector<Timed> times(layouts.size());
    ParallelFor(layouts.size(), control.threads,
                [&](size_t i) { times[i] = TimeOf(what.jobs(*layouts[i]), layouts[i]); });
    Change change;
    change.what = what.what;
    change.same_fits = times[0].fits;
    change.same_ratio = times[0].speed / today.speed;
    const Timed* best = nullptr;
    for (const Timed& t : times) {
      if (t.fits && (!best || t.speed > best->speed)) best = &t;
    }
    // Not for the error of an estimate.
    if (best && times[0].fits && best->speed < 1.01 * times[0].speed) best = times.data();
    if (best) {
      change.best_ratio = best->speed / today.speed;
      change.best_schedule = best->layout->schedule;
      change.best_layout = best == times.data() ? "" : LayoutText(*best->layout);
    }
    plan->changes.push_back(change);
  }
}

void AddReliefs(const PlanRequest& request, const SearchControl& control, Plan* plan) {
  // The split and the colocated schedule that fit or come nearest; of about the same memory, the faster as well.
  std::vector<size_t> nearest;
  for (const bool colocated : {false, true}) {
    const auto of = [&](const PlanRow& row) -> const Evaluation* {
      if (row.grid.base.colocated() != colocated || !row.trains) return nullptr;
      return row.best() ? row.best() : row.search.nearest();
    };
    double least = std::numeric_limits<double>::max();
    for (const PlanRow& row : plan->rows) {
      if (of(row)) least = std::min(least, static_cast<double>(of(row)->peak_bytes));
    }
    std::optional<size_t> best, smallest;
    for (size_t i = 0; i < plan->rows.size(); ++i) {
      const Evaluation* e = of(plan->rows[i]);
      if (!e || static_cast<double>(e->peak_bytes) > 1.1 * least) continue;
      if (!best || e->tokens_per_second() > of(plan->rows[*best])->tokens_per_second()) best = i;
      if (!smallest || e->peak_bytes < of(plan->rows[*smallest])->peak_bytes) smallest = i;
    }
    if (best) nearest.push_back(*best);
    if (smallest != best) nearest.push_back(*smallest);
  }
  // What only fits as slowly as the plan is no help.
  const double enough = plan->best() ? 2 * plan->best()->tokens_per_gpu : 0;
  SearchControl small = control;
  small.effort = control.effort / 4;
  small.threads = control.threads;
  // Whether it fits now.
  const auto try_one = [&](const std::string& what, double batch_scale, const std::function<void(Job*)>& change) {
    Relief relief;
    relief.what = what;
    for (const size_t i : nearest) {
      if (control.stopped()) break;
      Job base = plan->rows[i].grid.base;
      change(&base);
      const ScheduleSearch found = Again(plan->rows[i], base, batch_scale, small);
      plan->counts += found.counts;
      const Evaluation* e = found.best() ? found.best() : found.nearest();
      if (!e) continue;
      const bool better = relief.layout.empty() ||
                          (e->fits && (!relief.fits || e->tokens_per_gpu > relief.tokens_per_gpu)) ||
                          (!relief.fits && !e->fits && static_cast<double>(e->peak_bytes) * 1e-9 < relief.peak_gb);
      if (!better) continue;
      relief.fits = e->fits;
      relief.layout = e->job.schedule + ": " + LayoutText(*e);
      relief.tokens_per_gpu = e->tokens_per_gpu;
      relief.peak_gb = static_cast<double>(e->peak_bytes) * 1e-9;
      relief.limit_gb = static_cast<double>(e->sim.memory[e->fullest].limit_bytes) * 1e-9;
    }
    plan->reliefs.push_back(relief);
    return relief.fits && relief.tokens_per_gpu > enough;
  };
  const auto given = [&](const char* name) {
    const auto has = [&](const PlanRow& row) { return row.grid.fixed.contains(name); };
    return std::any_of(plan->rows.begin(), plan->rows.end(), has);
  };
  if (!given("state_bytes")) {
    try_one("Adam's moments in bf16 (state 8 B a parameter for 12)", 1, [](Job* j) { j->state_bytes = 8; }) ||
        try_one("Adam's moments in 8 bits (state 6 B a parameter for 12)", 1, [](Job* j) { j->state_bytes = 6; });
  }
  for (const double gb : {96.0, 141.0, 192.0, 288.0}) {
    if (gb <= request.hardware[0].gpu.memory_gb) continue;
    const auto larger = [gb](Job* j) {
      for (ClusterSpec* c : MachinesOf(j)) c->gpu.memory_gb = std::max(c->gpu.memory_gb, gb);
    };
    if (try_one(Format("GPUs of %.0f GB", gb), 1, larger)) break;
  }
  int fits = 0;
  for (int times = 2; times <= kMostGpus && fits == 0; times *= 2) {
    const auto more = [times](Job* j) {
      for (ClusterSpec* c : MachinesOf(j)) c->gpus *= times;
    };
    if (try_one(Format("%lld GPUs for %lld", static_cast<long long>(times) * GpusOf(request),
                       static_cast<long long>(GpusOf(request))),
                times, more)) {
      fits = times;
    } else {
      plan->reliefs.pop_back();
    }
    if (control.stopped()) return;
  }
  if (request.seq_length > 1024) {
    try_one("sequences half as long, twice as many", 2, [](Job* j) { j->seq_length /= 2; });
  }
}

}  // namespace disagmoe
