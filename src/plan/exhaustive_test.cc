// The plan against every layout there is: random models on small random clusters, each layout simulated, by loops that
// share nothing with the search. DISAGMOE_INSTANCES=240 for more of them; prints how far the plan is from the best.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "base/error.h"
#include "base/rng.h"
#include "plan/plan.h"

namespace disagmoe {
namespace {

struct Instance {
  PlanRequest request;
  int64_t layouts = 0;  // simulated
  double best = 1e300;  // seconds a sequence, of those that fit
  std::string best_text;
};

double Between(Rng* random, double low, double high) {  // even in the logarithm
  return low * std::pow(high / low, random->Uniform());
}

int OneOf(Rng* random, std::initializer_list<int> from) { return from.begin()[random->Below(from.size())]; }

Instance Draw(uint64_t seed) {
  Rng random(Mix64(seed + 1));
  Instance out;
  PlanRequest& r = out.request;
  ModelShape m = LoadModelShape(OneOf(&random, {0, 1}) == 0 ? "olmoe-1b-7b" : "deepseek-moe-16b");
  m.name = "random";
  m.num_layers = OneOf(&random, {2, 3, 4, 5});
  m.hidden_size = 128 * OneOf(&random, {2, 4, 8, 16});
  m.num_experts = OneOf(&random, {3, 4, 6, 8});
  m.experts_per_token = std::min<int64_t>(m.num_experts, OneOf(&random, {1, 2, 3}));
  m.expert_hidden = 64 * OneOf(&random, {2, 8, 24});
  m.vocab_size = OneOf(&random, {1000, 8000, 32000});
  m.window.assign(m.num_layers, 0);
  if (OneOf(&random, {0, 1}) == 1) {
    for (int64_t l = 0; l < m.num_layers; l += 2) m.window[l] = 128;
  }
  m.dense.assign(m.num_layers, false);
  if (m.dense_hidden > 0) m.dense[0] = true;
  r.model = m;
  ClusterSpec c = LoadCluster("h800x8");
  c.gpus_per_node = OneOf(&random, {2, 4});
  const char* most = std::getenv("DISAGMOE_GPUS");
  c.gpus = (most ? std::atoi(most) : OneOf(&random, {2, 4, 6, 8})) / c.gpus_per_node * c.gpus_per_node;
  if (c.gpus == 0) c.gpus = c.gpus_per_node;
  c.nics_per_node = OneOf(&random, {1, 2, 4});
  c.nic_gbytes_s = Between(&random, 2, 200);
  c.nvlink_gbytes_s = Between(&random, 50, 400);
  r.seq_length = OneOf(&random, {256, 1024, 4096});
  r.batch = r.batch_least = r.batch_most = OneOf(&random, {4, 6, 8, 12, 16});
  r.schedules = {"af-pipe", "megatron-1f1b", "megatron-overlap"};
  r.settings = {"reserved_gb=0.05"};
  r.changes = false;
  // From where little fits to where all does.
  const double state = 18e-9 * static_cast<double>(m.TotalParams()) / c.gpus;
  c.gpu.memory_gb = 0.05 + state * Between(&random, 1.2, 12) +
                    1e-9 * static_cast<double>(r.seq_length * m.hidden_size * m.num_layers) * Between(&random, 10, 200);
  r.hardware = {c};
  return out;
}

void Try(const Job& job, Instance* at) {
  try {
    const Evaluation e = Evaluate(job);
    ++at->layouts;
    const double seconds = e.step_seconds / static_cast<double>(job.global_batch);
    if (!e.fits || seconds >= at->best) return;
    at->best = seconds;
    at->best_text = job.schedule + ": " + LayoutText(e);
  } catch (const Error&) {  // cannot be
  }
}

// Micro-batches, rounds, recomputation.
void Orders(Job job, int64_t batch, Instance* at) {
  for (int b = 1; int64_t{b} * job.m * job.replicas() <= batch; ++b) {
    const int64_t wave = int64_t{b} * job.m * job.replicas();
    if (batch % wave != 0) continue;
    job.sequences = b;
    for (const bool recompute : {false, true}) {
      job.recompute = recompute;
      if (job.colocated()) {
        Try(job, at);
        continue;
      }
      const int64_t micro_batches = batch / wave;
      for (int64_t q = 1; q <= micro_batches; ++q) {
        if (micro_batches % q != 0) continue;
        for (int slope : {1, 2}) {
          job.round = static_cast<int>(q), job.slope = slope;
          Try(job, at);
        }
      }
    }
  }
}

void Exhaust(Instance* at) {
  const PlanRequest& r = at->request;
  const int gpus = r.hardware[0].gpus, layers = static_cast<int>(r.model.num_layers);
  const int experts = static_cast<int>(r.model.num_experts), node_nics = r.hardware[0].nics_per_node;
  const int node = r.hardware[0].gpus_per_node;
  for (const std::string& schedule : r.schedules) {
    Job job;
    job.model = r.model, job.cluster = r.hardware[0], job.schedule = schedule;
    job.seq_length = r.seq_length, job.global_batch = r.batch;
    job.reserved_gb = 0.05;
    SetScheduleDefaults(&job);
    const auto replicas = [&](const auto& then) {
      const int workers = static_cast<int>(job.workers());
      for (int n = 1; n * workers <= gpus; ++n) {
        job.idle_gpus = gpus - n * workers;
        then();
      }
    };
    for (job.p_a = 1; job.p_a <= std::min(layers, gpus); ++job.p_a) {
      for (job.m = 1; job.p_a * job.m <= gpus; ++job.m) {
        if (job.colocated()) {
          if (job.m > experts) break;
          for (job.virtual_stages = 1; job.p_a * job.virtual_stages <= layers; ++job.virtual_stages) {
            replicas([&] { Orders(job, r.batch, at); });
          }
          continue;
        }
        for (job.p_f = 1; job.p_f <= std::min(layers, gpus); ++job.p_f) {
          for (job.n = 1; job.n <= experts && job.p_a * job.m + job.p_f * job.n <= gpus; ++job.n) {
            for (const bool head : {false, true}) {
              job.head_on_attention = head;
              job.mixed_nodes = false, job.nics_a = job.nics_f = 0;
              replicas([&] { Orders(job, r.batch, at); });
              if (gpus <= node) continue;
              job.mixed_nodes = true;
              const double all = static_cast<double>(job.workers()), of_node = std::min<double>(node, all);
              if (node_nics == 1) replicas([&] { Orders(job, r.batch, at); });  // shared by all of the node
              for (int a = 1; a < node_nics; ++a) {
                job.nics_a = a / std::ceil(of_node * job.p_a * job.m / all - 1e-9);
                job.nics_f = (node_nics - a) / std::ceil(of_node * job.p_f * job.n / all - 1e-9);
                replicas([&] { Orders(job, r.batch, at); });
              }
            }
          }
        }
      }
    }
  }
}

TEST(Plan, IsWithinOnePerCentOfEveryLayout) {
  const char* wanted = std::getenv("DISAGMOE_INSTANCES");
  const int count = wanted ? std::atoi(wanted) : 24;
  std::vector<Instance> instances(count);
  std::vector<double> worse(count, 0);
  std::vector<std::string> found(count);
  const char* first = std::getenv("DISAGMOE_FIRST");
  const size_t begin = first ? std::atoi(first) : 0;
  ParallelFor(instances.size(), 2, [&](size_t i) {
    if (i < begin) return;
    instances[i] = Draw(i);
    Exhaust(&instances[i]);
    SearchControl control;
    control.exhaust = std::getenv("DISAGMOE_SEARCH_ALONE") == nullptr;
    const Plan plan = MakePlan(instances[i].request, control);
    const Evaluation* best = plan.best();
    if (best) found[i] = best->job.schedule + ": " + LayoutText(*best);
    const double seconds = best ? best->step_seconds / static_cast<double>(best->job.global_batch) : 1e300;
    worse[i] = seconds / instances[i].best - 1;  // both 1e300: nothing fits
  });
  int64_t layouts = 0;
  int fit = 0, split = 0;
  std::vector<double> sorted = worse;
  std::sort(sorted.begin(), sorted.end());
  for (int i = 0; i < count; ++i) {
    layouts += instances[i].layouts;
    fit += instances[i].best < 1e300;
    split += instances[i].best_text.starts_with("af-pipe");
    EXPECT_LE(worse[i], 0.01) << "instance " << i << ": " << found[i] << ", best " << instances[i].best_text;
    EXPECT_GE(worse[i], -1e-9) << "instance " << i << ": " << found[i] << " was not among all layouts";
  }
  std::printf(
      "%d instances, %lld layouts simulated; something fits in %d, a split is best in %d; behind the best: median "
      "%.4f %%, 95th %.4f %%, worst %.4f %%\n",
      count, static_cast<long long>(layouts), fit, split, 100 * sorted[count / 2], 100 * sorted[count * 95 / 100],
      100 * sorted.back());
}

}  // namespace
}  // namespace disagmoe
