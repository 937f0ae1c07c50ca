#include "plan/estimate.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "plan/evaluate.h"

namespace disagmoe {
namespace {

constexpr int64_t kLong = 50'000;  // operations

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

Evaluation EvaluateRounds(const Job& job) {
  CheckJob(job);
  const int64_t all = job.micro_batches();
  const std::vector<int64_t> batches = Sizes(all, RoundOf(job), 2, 3);
  if (batches.size() == 1 || OperationsOf(job) < kLong) return Evaluate(job);
  const Evaluation two = Evaluate(Smaller(job, job.model.num_layers, batches[0]));
  Evaluation e = Evaluate(Smaller(job, job.model.num_layers, batches[1]));
  const auto go_on = [&](int64_t from, int64_t* to) {
    const double values[2] = {static_cast<double>(from), static_cast<double>(*to)};
    *to = static_cast<int64_t>(std::llround(Line(batches, values, all)));
  };
  for (size_t c = 0; c < e.sim.times.size(); ++c) {
    const ClassTimes& a = two.sim.times[c];
    ClassTimes& b = e.sim.times[c];
    for (auto field : {&ClassTimes::compute_ns, &ClassTimes::overlapped_ns, &ClassTimes::exposed_ns,
                       &ClassTimes::bubble_ns, &ClassTimes::optimizer_ns, &ClassTimes::reduce_ns,
                       &ClassTimes::nic_send_ns, &ClassTimes::nic_receive_ns, &ClassTimes::nvlink_send_ns,
                       &ClassTimes::nvlink_receive_ns, &ClassTimes::nic_bytes_sent, &ClassTimes::nvlink_bytes_sent}) {
      go_on(a.*field, &(b.*field));
    }
  }
  go_on(two.sim.step_ns, &e.sim.step_ns);
  go_on(two.sim.limit_ns, &e.sim.limit_ns);
  go_on(two.sim.num_ops, &e.sim.num_ops);
  e.job = job;
  if (e.round == batches[1]) e.round = static_cast<int>(all);  // of an order without rounds
  e.whole = false;
  SumUp(&e);
  return e;
}

StepEstimate EstimateStep(const Job& job, bool whole) {
  CheckJob(job);
  const int64_t all_layers = job.model.num_layers;
  const int64_t all_batches = job.micro_batches();
  std::vector<int64_t> layers = Sizes(all_layers, LayerPeriod(job), 2, 4);
  const bool shapes_differ = !job.expert_loads.empty() || job.expert_counts.size() > 1;
  if (shapes_differ || whole) layers = {all_layers};
  // Two rounds and three; of a long one, one and two.
  const int64_t first = OperationsOf(Smaller(job, layers[0], std::min(all_batches, 2 * RoundOf(job)))) > kLong ? 1 : 2;
  std::vector<int64_t> batches = Sizes(all_batches, RoundOf(job), first, first + 1);
  if (whole) batches = {all_batches};
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
