// No simulated step or peak is below its bound, and the bound of a step is exact where theory is.
#include "plan/bounds.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/rng.h"
#include "plan/evaluate.h"

namespace disagmoe {
namespace {

Job JobOf(const std::string& model, const std::string& schedule) {
  Job job;
  job.model = LoadModelShape(model);
  job.cluster = LoadCluster("h800x32");
  job.schedule = schedule;
  SetScheduleDefaults(&job);
  return job;
}

// Where messages take no time, little lies between a bound and its step.
void Ideal(Job* job) {
  job->cluster.nvlink_gbytes_s = job->cluster.nic_gbytes_s = 1e6;
  job->cluster.nvlink_latency_us = job->cluster.nic_latency_us = 0;
  job->cluster.efficiency.message_overhead_us = 0;
  job->overlap_slowdown = false;
}

// A layout at random; most cannot be.
void Shuffle(Rng* random, Job* job) {
  const auto one_of = [&](std::initializer_list<int> from) { return from.begin()[random->Below(from.size())]; };
  job->p_a = one_of({1, 2, 4, 8});
  job->p_f = job->colocated() ? 1 : job->p_a;
  job->m = one_of({1, 2, 3, 4, 8});
  job->n = one_of({1, 2, 3, 4, 8});
  job->virtual_stages = job->colocated() ? one_of({1, 2, 3}) : 1;
  job->sequences = one_of({1, 2});
  job->round = one_of({0, 0, 4});
  job->head_on_attention = !job->colocated() && one_of({0, 1}) == 1;
  job->recompute = one_of({0, 1}) == 1;
  job->dedup = static_cast<Dedup>(one_of({0, 1, 2}));
  job->routing_skew = one_of({0, 0, 1});
  job->attention_expert_share = job->schedule == "hetermoe" ? one_of({0, 1}) * 0.25 : 0;
  job->seq_length = one_of({1, 512, 4096});
  const int workers = static_cast<int>(job->workers());
  job->cluster.gpus = workers <= 8 ? 8 : (workers + 7) / 8 * 8;
  job->global_batch = job->replicas() * job->m * job->sequences * one_of({1, 8, 12, 16, 32});
}

TEST(Bounds, NothingSimulatedIsBelow) {
  Rng random(1);
  for (const ScheduleName& name : ScheduleNames()) {
    int ran = 0;
    for (int i = 0; i < 1000 && ran < 60; ++i) {
      // The first layers of two of these are dense; one has windows in every other layer.
      const char* models[] = {"olmoe-1b-7b", "deepseek-moe-16b", "deepseek-v2-lite", "gpt-oss-20b"};
      Job job = JobOf(models[i % 4], name.name);
      Shuffle(&random, &job);
      if (i / 4 % 2 == 1) Ideal(&job);
      std::optional<JobBounds> bounds;
      std::optional<Evaluation> e;
      try {
        bounds = BoundsOf(job);
        e = Evaluate(job);
      } catch (const Error&) {
        continue;
      }
      if (!bounds) continue;
      ++ran;
      const std::string what = job.model.name + " " + name.name + " " + LayoutText(*e);
      // Rounding: half a nanosecond an operation.
      EXPECT_LE(bounds->step_ns, static_cast<double>(e->sim.step_ns + e->sim.num_ops)) << what;
      EXPECT_LE(bounds->peak_bytes, e->peak_bytes) << what;
    }
    EXPECT_GE(ran, 10) << name.name;
  }
}

// A worker is compared with the memory of its own pool's GPUs.
TEST(Bounds, MemoryOfEachPool) {
  Job job = JobOf("olmoe-1b-7b", "af-pipe");
  job.cluster = LoadCluster("h800x8");
  job.ffn_cluster = job.cluster;
  job.p_a = job.p_f = 1, job.m = job.n = 8;
  job.global_batch = 64;
  const double peak = static_cast<double>(BoundsOf(job)->peak_bytes) * 1e-9;
  EXPECT_TRUE(BoundsOf(job)->may_fit);
  for (ClusterSpec* c : {&job.cluster, &*job.ffn_cluster}) {
    const double memory = c->gpu.memory_gb;
    c->gpu.memory_gb = 1;  // less than the reserve
    EXPECT_FALSE(BoundsOf(job)->may_fit);
    EXPECT_NEAR(static_cast<double>(BoundsOf(job)->peak_bytes) * 1e-9, peak, 1e-9);
    c->gpu.memory_gb = memory;
  }
}

// Interleaved 1F1B: (M v + R - 1)(F + B) where chunks are alike; here the head makes the last group busier, and the
// bound of that group holds: its own computation, the way to it and back.
TEST(Bounds, OfAPipelineIsNearlyItsStep) {
  for (const char* name : {"megatron-1f1b", "tutel"}) {
    for (int v : {1, 2}) {
      Job job = JobOf("olmoe-1b-7b", name);
      Ideal(&job);
      job.p_a = 4, job.m = 8, job.virtual_stages = v, job.parts = 1;
      job.global_batch = 8 * 8;
      const Evaluation e = Evaluate(job);
      const double step = static_cast<double>(e.sim.step_ns);
      EXPECT_GT(BoundsOf(job)->step_ns, 0.97 * step) << name << " v " << v;
      EXPECT_LE(BoundsOf(job)->step_ns, step) << name << " v " << v;
      // Without the way through the pipeline, three of eight micro-batches' time is missing.
      EXPECT_LT(static_cast<double>(e.sim.limit_ns), 0.9 * step) << name << " v " << v;
    }
  }
}

}  // namespace
}  // namespace disagmoe
