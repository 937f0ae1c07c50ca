#include "cli/plan_measure.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/rng.h"
#include "cli/temporary_folder.h"
#include "plan/estimate.h"
#include "plan/plan_file.h"
#include "plan/text.h"

namespace disagmoe {
namespace {

double PerSequence(const MeasuredLayout& m) {
  return m.step.ok() ? m.step.fastest() / static_cast<double>(m.e.job.global_batch) : 1e300;
}

// What a run of another batch or round would differ in, only.
bool SameRun(const Job& a, const Job& b) {
  return a.schedule == b.schedule && a.p_a == b.p_a && a.m == b.m &&
         (a.colocated() || (a.p_f == b.p_f && a.n == b.n)) && a.virtual_stages == b.virtual_stages &&
         a.sequences == b.sequences && a.global_batch == b.global_batch && a.round == b.round && a.slope == b.slope &&
         a.recompute == b.recompute && a.idle_gpus == b.idle_gpus && a.head_on_attention == b.head_on_attention;
}

// All within so many steps, simulated if they can be and fit, in an order of the seed.
std::vector<Evaluation> Around(const PlanRow& row, const MeasurePlanOptions& options) {
  const Grid grid(row.grid);
  std::vector<Candidate> seen{row.search.fitting[0].candidate};
  for (size_t begin = 0, step = 0; step < static_cast<size_t>(options.radius); ++step) {
    const size_t end = seen.size();
    for (size_t i = begin; i < end; ++i) {
      for (const Candidate& c : grid.Neighbours(seen[i])) {
        if (std::find(seen.begin(), seen.end(), c) == seen.end()) seen.push_back(c);
      }
    }
    begin = end;
  }
  Rng random(options.seed);
  for (size_t i = seen.size(); i > 2; --i) std::swap(seen[i - 1], seen[1 + random.Below(i - 1)]);
  std::vector<Evaluation> out;
  for (size_t i = 1; i < seen.size() && static_cast<int>(out.size()) < options.samples; ++i) {
    try {
      Evaluation e = Evaluate(grid.JobOf(seen[i]));
      const auto same = [&](const Evaluation& x) { return SameRun(x.job, e.job); };
      if (e.fits && !SameRun(e.job, row.best()->job) && std::none_of(out.begin(), out.end(), same))
        out.push_back(std::move(e));
    } catch (const Error&) {  // cannot be
    }
  }
  return out;
}

}  // namespace

std::vector<MeasuredLayout> MeasurePlan(const Plan& plan, const MeasurePlanOptions& options) {
  std::vector<MeasuredLayout> layouts;
  int nearest = -1;
  for (const int i : BestRows(plan)) {
    const PlanRow& row = plan.rows[i];
    if (!row.trains || !row.best()) continue;
    layouts.push_back({*row.best(), {}});
    const auto speed = [&](int k) { return plan.rows[k].best()->tokens_per_second(); };
    if (nearest < 0 || speed(i) > speed(nearest)) nearest = i;
  }
  if (nearest < 0) {
    throw Error({"nothing to measure", "--measure", "no layout fits that the runtime executes", "",
                 "disagmoe plan without --measure says why"});
  }
  for (Evaluation& e : Around(plan.rows[nearest], options)) layouts.push_back({std::move(e), {}});
  const TemporaryFolder folder("plans");
  std::vector<MeasuredFile> files;
  for (size_t i = 0; i < layouts.size(); ++i) {
    Job job = layouts[i].e.job;
    if (job.round == 0 && !job.colocated()) job.round = layouts[i].e.round;
    const std::string path = folder.path + "/plan" + std::to_string(i) + ".toml";
    std::ofstream(path) << PlanFile(job, options.model, options.cluster, "disagmoe plan --measure");
    files.push_back({job.schedule + ": " + LayoutText(layouts[i].e), path});
  }
  const std::vector<MeasuredStep> steps = MeasureAll(files, options.rounds, options.run);
  for (size_t i = 0; i < layouts.size(); ++i) layouts[i].step = steps[i];
  std::stable_sort(layouts.begin(), layouts.end(),
                   [](const MeasuredLayout& a, const MeasuredLayout& b) { return PerSequence(a) < PerSequence(b); });
  return layouts;
}

nlohmann::ordered_json MeasuredJson(const std::vector<MeasuredLayout>& layouts) {
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (const MeasuredLayout& m : layouts) {
    nlohmann::ordered_json one = {{"schedule", m.e.job.schedule},
                                  {"layout", LayoutText(m.e)},
                                  {"global_batch", m.e.job.global_batch},
                                  {"simulated_seconds", m.e.step_seconds}};
    if (m.step.ok()) {
      one.update({{"seconds", m.step.seconds}, {"fastest", m.step.fastest()}, {"median", m.step.median()}});
    } else {
      one["error"] = m.step.error;
    }
    out.push_back(std::move(one));
  }
  return out;
}

std::string MeasuredText(const std::vector<MeasuredLayout>& layouts) {
  std::string out = "\nMeasured here (fastest step of each; x: of the fastest, for as many sequences):\n";
  out += Format("  %10s %10s %6s %7s  %s\n", "step ms", "simulated", "x", "spread", "layout");
  for (const MeasuredLayout& m : layouts) {
    const std::string text = m.e.job.schedule + ": " + LayoutText(m.e);
    if (!m.step.ok()) {
      out += Format("  %10s %10.1f %6s %7s  %s: %s\n", "-", 1e3 * m.e.step_seconds, "", "", text.c_str(),
                    m.step.error.c_str());
      continue;
    }
    out += Format("  %10.1f %10.1f %5.2fx %5.0f %%  %s\n", 1e3 * m.step.fastest(), 1e3 * m.e.step_seconds,
                  PerSequence(m) / PerSequence(layouts[0]), 100 * m.step.spread(), text.c_str());
  }
  return out;
}

}  // namespace disagmoe
