#include "plan/estimate.h"

#include <algorithm>
#include <vector>

#include "plan/evaluate.h"

namespace disagmoe {
namespace {

bool IsDual(const Job& job) { return job.schedule == "dualpipe" || job.schedule == "dualpipe-v"; }

// Layers that the groups take turns with: leaving out a multiple of it changes no group's share of the rest.
int64_t LayerPeriod(const Job& job) {
  if (!job.colocated()) {
    const int64_t least = std::min(job.p_a, job.p_f), most = std::max(job.p_a, job.p_f);
    return most % least == 0 ? most : least * most;
  }
  return IsDual(job) ? 2 * job.p_a : int64_t{job.p_a} * job.virtual_stages;
}

int64_t RoundOf(const Job& job) {
  const int64_t micro_batches = job.micro_batches();
  if (IsDual(job)) return 2 * job.p_a;
  if (job.schedule == "hetermoe" && job.round == 0) return micro_batches;
  if (job.round > 0) return job.round;
  if (!job.colocated()) return micro_batches;  // follows from the costs: not known here
  for (int64_t q = std::min<int64_t>(job.p_a, micro_batches); q <= micro_batches; ++q) {
    if (micro_batches % q == 0) return q;
  }
  return micro_batches;
}

// Two sizes to simulate; one, the whole, where that is hardly more.
std::vector<int64_t> Sizes(int64_t whole, int64_t period, int64_t first, int64_t second) {
  const int64_t rest = whole % period;
  const std::vector<int64_t> sizes{first * period + rest, second * period + rest};
  return sizes[0] + sizes[1] < whole * 3 / 4 ? sizes : std::vector<int64_t>{whole};
}

Job Smaller(const Job& job, int64_t layers, int64_t micro_batches) {
  Job out = job;
  out.model.num_layers = layers;
  out.model.window.resize(layers);
  out.model.dense.resize(layers);
  if (out.expert_counts.size() > 1) out.expert_counts.resize(layers);
  out.global_batch = micro_batches * job.replicas() * job.m * job.sequences;
  return out;
}

double Line(const std::vector<int64_t>& at, const double* values, int64_t x) {
  if (at.size() == 1) return values[0];
  const double slope = (values[1] - values[0]) / static_cast<double>(at[1] - at[0]);
  return values[1] + slope * static_cast<double>(x - at[1]);
}

}  // namespace

int64_t OperationsOf(const Job& job) {
  const std::string& s = job.schedule;
  const int64_t parts = std::max({1, job.parts, s == "comet" ? 8 : s == "fastermoe" ? 4 : s == "lancet" ? 2 : 1});
  // Filling bubbles takes longer than simulating them.
  const int64_t slow = s == "af-pipe-zb" ? 3 : 1;
  return job.micro_batches() * (2 * job.model.num_layers + 1) * 4 * parts * slow;
}

StepEstimate EstimateStep(const Job& job) {
  CheckJob(job);
  const int64_t all_layers = job.model.num_layers;
  const int64_t all_batches = job.micro_batches();
  std::vector<int64_t> layers = Sizes(all_layers, LayerPeriod(job), 2, 4);
  const bool shapes_differ = !job.expert_loads.empty() || job.expert_counts.size() > 1;
  if (shapes_differ) layers = {all_layers};
  const std::vector<int64_t> batches = Sizes(all_batches, RoundOf(job), 2, 3);
  StepEstimate out;
  out.exact = layers.size() == 1 && batches.size() == 1;
  double steps[2];
  std::vector<double> fulls[2];  // by class: which is fullest may change with the layers
  for (size_t i = 0; i < layers.size(); ++i) {
    double of_batches[2];
    for (size_t j = 0; j < batches.size(); ++j) {
      const Job smaller = Smaller(job, layers[i], batches[j]);
      const Evaluation e = Evaluate(smaller);
      out.operations += OperationsOf(smaller);
      of_batches[j] = static_cast<double>(e.sim.step_ns);
      fulls[i].clear();
      for (const ClassMemory& m : e.sim.memory) {
        fulls[i].push_back(static_cast<double>(m.peak_bytes) / static_cast<double>(m.limit_bytes));
      }
    }
    steps[i] = Line(batches, of_batches, all_batches);
  }
  out.step_ns = Line(layers, steps, all_layers);
  for (size_t c = 0; c < fulls[0].size(); ++c) {
    const double of_layers[2] = {fulls[0][c], fulls[1].empty() ? 0 : fulls[1][c]};
    out.full = std::max(out.full, Line(layers, of_layers, all_layers));
  }
  return out;
}

}  // namespace disagmoe
