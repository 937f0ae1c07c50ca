// Pools on machines of their own: what is the same as on one cluster, and whose figures count where.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "cost/cluster_costs.h"
#include "cost/jobs_for_tests.h"
#include "sim/simulate.h"

namespace disagmoe {
namespace {

using testing::HasSubstr;

// The same job with its cluster told apart into the two pools' GPUs.
Job Apart(Job job) {
  const int replicas = job.replicas();
  job.ffn_cluster = job.cluster;
  job.cluster.gpus = replicas * job.p_a * job.m;
  job.ffn_cluster->gpus = replicas * job.p_f * job.n;
  return job;
}

// A cluster of 100 GB GPUs in nodes of four; overheads out of the way.
Job Plain(int p, int m, int n) {
  Job job = Apart(SmallJob("af-pipe", p, m, n));
  job.overlap_slowdown = false;
  return job;
}

// All that a user sees of a step.
std::vector<int64_t> Answer(const Job& job) {
  const Costed c(job);
  const SimResult r = Simulate(c.schedule, c.costs);
  std::vector<int64_t> out{r.step_ns, r.limit_ns};
  for (const ClassTimes& t : r.times) {
    out.insert(out.end(), {t.compute_ns, t.overlapped_ns, t.exposed_ns, t.bubble_ns, t.optimizer_ns, t.reduce_ns,
                           t.nic_send_ns, t.nvlink_receive_ns});
  }
  for (const ClassMemory& m : r.memory) out.insert(out.end(), {m.static_bytes, m.peak_bytes, m.limit_bytes});
  return out;
}

// Where pools have whole nodes of like machines it does not matter whether they are one cluster.
TEST(TwoClusters, HalvesOfOneAreThatOne) {
  std::vector<Job> jobs;
  for (const char* schedule : {"af-pipe", "af-pipe-zb"}) {
    const Job job = SmallJob(schedule, 2, 4, 4);
    jobs.insert(jobs.end(), 7, job);
    Job* j = &jobs[jobs.size() - 7];
    j[1].head_on_attention = true;
    j[2].cluster.gpus *= 2, j[2].global_batch *= 2;
    j[3].jitter = 0.1;
    j[4].routing_skew = 1;
    j[5].stragglers = {{"A0", 1.5, 1}, {"F1.2", 1, 2}};
    j[6].cluster.spine_oversubscription = 2, j[6].nics_a = 0.5, j[6].nics_f = 0.75;
  }
  jobs.push_back(SmallJob("af-pipe", 1, 8, 4));
  jobs.push_back(SmallJob("hetermoe", 1, 4, 4));
  jobs.push_back(jobs.back());
  jobs.back().attention_expert_share = 0.25;
  for (const Job& job : jobs) EXPECT_EQ(Answer(job), Answer(Apart(job))) << job.schedule << &job - jobs.data();
}

// Half the peak there: products of the FFN pool take twice as long, attention what it took.
TEST(TwoClusters, ComputationsAreOfTheirPool) {
  Job job = Plain(1, 4, 4);
  const Costed same(job);
  job.ffn_cluster->gpu.peak_tflops /= 2;
  const Costed half(job);
  // 4 * 64 tokens bring each F-worker a quarter of 2 pairs each, 32 to each of its 4 experts; 1 TFLOP/s.
  const double experts = 6 * 128.0 * 128 * 64 / (1e3 * 0.6 * 32 / 42);
  for (int layer = 0; layer < 4; ++layer) {
    EXPECT_EQ(half.Ns(kF, 2 * layer), same.Ns(kF, 2 * layer));
    EXPECT_EQ(half.Ns(kB, 2 * layer), same.Ns(kB, 2 * layer));
    EXPECT_NEAR(half.Ns(kF, 2 * layer + 1) - same.Ns(kF, 2 * layer + 1), experts, 1);
    EXPECT_NEAR(half.Ns(kB, 2 * layer + 1) - same.Ns(kB, 2 * layer + 1), 2 * experts, 1);
  }
  // The head, 64 tokens of each F-worker: two products forward. On attention workers nothing of it changes.
  const double product = 2 * 64 * 128.0 * 1000 / (1e3 * 0.75);
  EXPECT_NEAR(half.Ns(kF, 8) - same.Ns(kF, 8), 2 * product, 1);
  job.head_on_attention = true;
  EXPECT_EQ(Costed(job).Ns(kF, 8), same.Ns(kF, 8));
  // Launches: 5 us.
  job.ffn_cluster->efficiency.op_overhead_us = 7;
  const Costed launches(job);
  EXPECT_EQ(launches.Ns(kF, 3), half.Ns(kF, 3) + 2000);
  EXPECT_EQ(launches.Ns(kF, 2), half.Ns(kF, 2));
  // Everything there runs beside something, where links are slow: half as slow again, and here not at all.
  job.overlap_slowdown = true;
  for (ClusterSpec* c : {&job.cluster, &*job.ffn_cluster}) {
    c->nic_gbytes_s = 0.01;
    c->efficiency.op_overhead_us = c == &job.cluster ? 5 : 0;
  }
  job.cluster.efficiency.overlap_slowdown = 0;
  job.ffn_cluster->efficiency.overlap_slowdown = 0.5;
  const Costed slow(job);
  EXPECT_EQ(slow.Ns(kF, 2), same.Ns(kF, 2));
  EXPECT_NEAR(slow.Ns(kF, 3), 1.5 * static_cast<double>(half.Ns(kF, 3) - 5000), 1);
}

// Each side of a transfer at its own rate, with its own overhead; both with the larger latency (3 and 7 us).
TEST(TwoClusters, TransfersAreOfBothPools) {
  Job job = Plain(1, 4, 8);
  const Costed same(job);
  job.ffn_cluster->nic_gbytes_s /= 2;
  job.ffn_cluster->nic_latency_us = 7;
  const Costed half(job);
  job.ffn_cluster->nic_gbytes_s *= 2;
  job.ffn_cluster->nics_per_node /= 2;
  const Costed fewer(job);
  job.ffn_cluster->nics_per_node *= 2;
  job.ffn_cluster->efficiency.m2n /= 2;
  job.ffn_cluster->efficiency.message_overhead_us += 4;
  const Costed calls(job);
  for (const OpKind kind : {kSendF, kSendB}) {
    for (const int boundary : {2, 3}) {
      const bool from_a = (boundary == 2) == (kind == kSendF);
      const TransferCost a = same.Send(kind, boundary, from_a), f = same.Send(kind, boundary, !from_a);
      for (const Costed* c : {&half, &fewer, &calls}) {
        const TransferCost a_now = c->Send(kind, boundary, from_a), f_now = c->Send(kind, boundary, !from_a);
        EXPECT_EQ(a_now.nic_ns, a.nic_ns);
        EXPECT_EQ(f_now.nic_bytes, f.nic_bytes);
        EXPECT_NEAR(f_now.nic_ns, 2 * (f.nic_ns - 2000) + (c == &calls ? 6000 : 2000), 1);
        EXPECT_EQ(a_now.latency_ns, 7000);
        EXPECT_EQ(f_now.latency_ns, 7000);
      }
    }
  }
  // The last combine stays in the F-group, on two of its nodes: there attention's NICs, NVLink and latency are nothing.
  const TransferCost inside = same.Send(kSendF, 7);
  EXPECT_GT(inside.nic_ns, 0);
  EXPECT_GT(inside.nvlink_ns, 0);
  job = Plain(1, 4, 8);
  job.cluster.nic_gbytes_s = job.cluster.nvlink_gbytes_s = 0.5;
  job.cluster.nic_latency_us = 9;
  EXPECT_EQ(Costed(job).Send(kSendF, 7).nic_ns, inside.nic_ns);
  EXPECT_EQ(Costed(job).Send(kSendF, 7).nvlink_ns, inside.nvlink_ns);
  EXPECT_EQ(Costed(job).Send(kSendF, 7).latency_ns, 3000);
  job = Plain(1, 4, 8);
  job.ffn_cluster->nvlink_gbytes_s /= 2;
  EXPECT_NEAR(Costed(job).Send(kSendF, 7).nvlink_ns - 2000, 2 * (inside.nvlink_ns - 2000), 1);
}

// As StepEndByHand of cluster_costs_test, with half of everything in the F pool.
TEST(TwoClusters, StepEndsAreOfTheirPool) {
  Job job = SmallJob("af-pipe", 1, 4, 8);
  job.cluster.gpus *= 2;
  job.global_batch *= 2;
  job = Apart(job);
  const Costed same(job);
  ClusterSpec& f = *job.ffn_cluster;
  f.nvlink_gbytes_s /= 2, f.nic_gbytes_s /= 2, f.gpu.memory_gbytes_s /= 2;
  f.gpu.memory_gb = 50;
  const Costed half(job);
  EXPECT_EQ(half.costs.StepEnd(0).reduce_ns, same.costs.StepEnd(0).reduce_ns);
  EXPECT_EQ(half.costs.StepEnd(0).optimizer_ns, same.costs.StepEnd(0).optimizer_ns);
  EXPECT_NEAR(half.costs.StepEnd(1).reduce_ns, 2 * same.costs.StepEnd(1).reduce_ns, 1);
  EXPECT_NEAR(half.costs.StepEnd(1).optimizer_ns, 2 * same.costs.StepEnd(1).optimizer_ns, 1);
  EXPECT_EQ(half.costs.MemoryLimit(0), 100'000'000'000);
  EXPECT_EQ(half.costs.MemoryLimit(1), 50'000'000'000);

  // Two replicas of 2 A-workers fit a node, and of 4 F-workers not: A sums over NVLink alone (8 GB/s, 0.9), experts
  // of F over NICs alone (2 GB/s, 0.85); 6 bytes a parameter.
  Job near = SmallJob("af-pipe", 1, 2, 4);
  near.cluster.gpus = 12;
  near.global_batch = 16;
  near = Apart(near);
  const ModelShape& m = near.model;
  double a = static_cast<double>(m.EmbeddingParams());
  for (int64_t l = 0; l < 4; ++l) a += static_cast<double>(m.AttentionParams(l));
  const auto head = static_cast<double>(m.HeadParams());
  const double experts = 4 * 4 * static_cast<double>(m.ExpertParams());
  EXPECT_NEAR(Costed(near).costs.StepEnd(0).reduce_ns, 6 * a * 3 / 4 / 7.2, 1);
  EXPECT_NEAR(Costed(near).costs.StepEnd(1).reduce_ns,
              6 * head * 3 / 4 / 7.2 + 6 * head / 4 / 2 / 1.7 + 6 * experts / 2 / 1.7, 1);
}

TEST(TwoClusters, NodesOfBothPools) {
  Job job = Plain(2, 3, 4);
  job.ffn_cluster->gpus_per_node = 8;
  EXPECT_EQ(NodesOf(job), (std::vector<int>{0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2}));
  job.ffn_cluster->gpus_per_node = 3;
  EXPECT_EQ(NodesOf(job), (std::vector<int>{0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4}));
}

TEST(TwoClusters, JobsThatCannotBe) {
  const auto error = [](auto change, const char* schedule = "af-pipe") -> std::string {
    Job job = Plain(2, 4, 8);
    job.schedule = schedule;
    change(&job);
    try {
      CheckJob(job);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(error([](Job*) {}), "");
  EXPECT_THAT(error([](Job* j) { j->ffn_cluster->name = "other"; }, "megatron-1f1b"),
              HasSubstr("without pools on two clusters (megatron-1f1b): got small+other, expected one cluster"));
  EXPECT_THAT(error([](Job* j) { j->mixed_nodes = true; }), HasSubstr("mixed_nodes"));
  EXPECT_THAT(error([](Job* j) { j->cluster.gpus = 12; }),
              HasSubstr("p_a * m = 8, expected a divisor of the cluster's 12"));
  EXPECT_THAT(error([](Job* j) { j->idle_ffn_gpus = 1; }),
              HasSubstr("p_f * n = 16, expected a divisor of 15, the cluster's 16 less 1 idle"));
  EXPECT_EQ(error([](Job* j) { j->idle_ffn_gpus = 1, j->ffn_cluster->gpus = 17; }), "");
  EXPECT_THAT(error([](Job* j) { j->idle_ffn_gpus = 16; }), HasSubstr("(idle_ffn): got 16"));
  EXPECT_THAT(error([](Job* j) { j->cluster.gpus = 16; }), HasSubstr("got 2 of attention, 1 of FFN"));
  // 8 workers with 4 NICs for 4 GPUs; the other pool's NICs do not help.
  EXPECT_THAT(error([](Job* j) { j->nics_a = 1.5, j->nics_f = 0.1; }),
              HasSubstr("(nics_a): got 12, expected at most the cluster's 8"));
  EXPECT_THAT(error([](Job* j) { j->nics_f = 1.5, j->nics_a = 0.1; }),
              HasSubstr("(nics_f): got 24, expected at most the cluster's 16"));
  EXPECT_THAT(error([](Job* j) { j->ffn_cluster->topology = "flat", j->ffn_cluster->spine_oversubscription = 2; }),
              HasSubstr("one switch has no spine"));
  EXPECT_THAT(error([](Job* j) { j->ffn_cluster.reset(), j->cluster.gpus = 24, j->idle_ffn_gpus = 1; }),
              HasSubstr("idle_ffn"));
}

TEST(TwoClusters, SettingsOfTheNetworkAreOfBoth) {
  Job job = Plain(2, 4, 8);
  job.ffn_cluster->topology = "flat";
  SetKnob(&job, "nic_gbytes_s", "1");
  SetKnob(&job, "m2n", "0.3");
  SetKnob(&job, "all_to_all", "0.4");
  SetKnob(&job, "spine_oversubscription", "2");
  SetKnob(&job, "idle_ffn", "3");
  for (const ClusterSpec* c : {&job.cluster, &*job.ffn_cluster}) {
    EXPECT_EQ(c->nic_gbytes_s, 1);
    EXPECT_EQ(c->efficiency.m2n, 0.3);
    EXPECT_EQ(c->efficiency.all_to_all, 0.4);
  }
  EXPECT_EQ(job.cluster.spine_oversubscription, 2);
  EXPECT_EQ(job.ffn_cluster->spine_oversubscription, 1);
  EXPECT_EQ(job.idle_ffn_gpus, 3);
}

}  // namespace
}  // namespace disagmoe
