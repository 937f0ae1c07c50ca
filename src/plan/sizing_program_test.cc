#include "plan/sizing_program.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/rng.h"
#include "cost/jobs_for_tests.h"
#include "plan/sizing_solver.h"

namespace disagmoe {
namespace {

constexpr double kSeconds = 60;

// A random model, cluster, and program over it, small enough to be enumerated.
struct Instance {
  Job job;
  SizingProgram program;
};

Instance RandomInstance(uint64_t seed) {
  Rng random(seed);
  const auto pick = [&](int least, int most) { return least + static_cast<int>(random.Below(most - least + 1)); };
  const auto real = [&](double least, double most) { return least + (most - least) * random.Uniform(); };
  Instance out;
  Job& job = out.job;
  job = SmallJob("af-pipe", 1, 1, 1);
  job.seq_length = 64 * pick(1, 8);
  job.dedup = pick(0, 2) == 0 ? Dedup::kExpert : pick(0, 1) == 0 ? Dedup::kWorker : Dedup::kNode;
  ModelShape& m = job.model;
  m.num_layers = pick(2, 8);
  m.window.assign(m.num_layers, 0);
  m.dense.assign(m.num_layers, false);
  m.dense[0] = pick(0, 1) == 1;
  if (pick(0, 2) == 0) m.window[m.num_layers / 2] = 16;
  m.num_experts = pick(4, 16);
  m.experts_per_token = pick(1, 4);
  m.expert_hidden = 16 * pick(1, 12);
  m.shared_hidden = pick(0, 1) * 64;
  m.vocab_size = 100 * pick(1, 30);
  ClusterSpec& c = job.cluster;
  c = SmallCluster(pick(2, pick(0, 3) == 0 ? 24 : 14));
  c.gpus_per_node = 1 << pick(0, 3);
  c.nics_per_node = pick(1, c.gpus_per_node);
  c.nic_gbytes_s = real(0.2, 6);
  c.nvlink_gbytes_s = real(1, 20);
  c.efficiency.op_overhead_us = pick(0, 1) * real(0, 50);
  job.reserved_gb = 0;
  out.program = {.model = nullptr, .gpus = c.gpus, .batch = pick(2, 80), .group_counts_a = {1, 2, 3},
                 .group_counts_f = {1, 2, 4}, .sequences = {1, 2, 3}, .fixed = {}};
  if (pick(0, 4) == 0) {  // the FFN pool's own machines
    job.ffn_cluster = c;
    job.ffn_cluster->gpus = pick(1, 12);
    job.ffn_cluster->gpu.peak_tflops *= real(0.3, 3);
    job.ffn_cluster->gpus_per_node = 2;
    job.ffn_cluster->nics_per_node = pick(1, 2);
    out.program.ffn_gpus = job.ffn_cluster->gpus;
  }
  if (pick(0, 9) == 0) job.m = pick(1, 4), out.program.fixed.insert("m");
  if (pick(0, 9) == 0) job.n = pick(1, 6), out.program.fixed.insert("n");
  if (pick(0, 9) == 0) job.p_a = job.p_f = pick(1, 2), out.program.fixed.insert("p");
  if (pick(0, 9) == 0) job.mixed_nodes = !job.ffn_cluster, out.program.fixed.insert("mixed_nodes");
  if (pick(0, 9) == 0) out.program.may_recompute = false;
  if (pick(0, 9) == 0) job.head_on_attention = true, out.program.fixed.insert("head");
  // Memory that some random layout just needs, or a little more or less: it binds.
  const SizingModel model(job);
  const Pools x{.replicas = pick(1, 3), .p_a = pick(1, 2), .m = pick(1, 4), .p_f = pick(1, 2),
                .n = pick(1, 4), .sequences = pick(1, 2), .recompute = pick(0, 1) == 1};
  const double held = HeldActivations(static_cast<int>(m.num_layers), 2, 2, 4, job.slope, false);
  c.gpu.memory_gb = model.AttentionBytes(x, held) * real(0.7, 2) / 1e9;
  if (pick(0, 1) == 0) c.gpu.memory_gb = std::max(c.gpu.memory_gb, model.FfnBytes(x, held) * real(0.9, 2) / 1e9);
  if (job.ffn_cluster) job.ffn_cluster->gpu.memory_gb = model.FfnBytes(x, held) * real(0.5, 2) / 1e9;
  return out;
}

std::string Text(const Pools& x) {
  testing::Message out;
  out << x.replicas << " x (" << x.p_a << " x " << x.m << ", " << x.p_f << " x " << x.n << "), b " << x.sequences
      << (x.recompute ? ", recompute" : "") << (x.head_on_attention ? ", head on attention" : "")
      << (x.mixed ? ", mixed " : "") << x.node_nics_a << ":" << x.node_nics_f;
  return out.GetString();
}

// With HiGHS its answer, without it that of the pruned enumeration: the one of all, one by one.
TEST(SizingProgram, FindsWhatEnumerationFinds) {
  int answers = 0, none = 0, bound_by_memory = 0, mixed = 0, uneven = 0, recompute = 0;
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    Instance x = RandomInstance(seed);
    const SizingModel model(x.job);
    x.program.model = &model;
    const std::optional<SizingAnswer> all = EnumerateSizing(x.program);
    const std::optional<SizingAnswer> solved = SolveSizing(x.program, kSeconds);
    ASSERT_EQ(all.has_value(), solved.has_value()) << "seed " << seed << ": " << (all ? Text(all->pools) : "nothing");
    if (!all) {
      ++none;
      continue;
    }
    ++answers;
    EXPECT_TRUE(solved->proven) << "seed " << seed;
    EXPECT_NEAR(solved->ns / all->ns, 1, 1e-9) << "seed " << seed;
    EXPECT_EQ(solved->pools, all->pools) << "seed " << seed << ": " << Text(solved->pools) << " instead of "
                                         << Text(all->pools);
    EXPECT_EQ(solved->binding, all->binding) << "seed " << seed;
    if (SizingUsesHighs()) {
      EXPECT_GE(solved->programs, 1) << "seed " << seed;
    }
    // Without a limit of memory it would be another.
    Job free = x.job;
    free.cluster.gpu.memory_gb = 1e6;
    if (free.ffn_cluster) free.ffn_cluster->gpu.memory_gb = 1e6;
    const SizingModel free_model(free);
    x.program.model = &free_model;
    const std::optional<SizingAnswer> more = SolveSizing(x.program, kSeconds);
    ASSERT_TRUE(more.has_value());
    EXPECT_LE(more->ns, solved->ns * (1 + 1e-9));
    bound_by_memory += more->ns < solved->ns * (1 - 1e-9);
    mixed += solved->pools.mixed;
    uneven += solved->pools.p_a != solved->pools.p_f;
    recompute += solved->pools.recompute;
  }
  EXPECT_GE(answers, 150);
  EXPECT_GE(none, 10);
  EXPECT_GE(bound_by_memory, 40);
  EXPECT_GE(mixed, 10);
  EXPECT_GE(uneven, 5);
  EXPECT_GE(recompute, 10);
}

// HiGHS alone: from all columns that are half as slow again as the best, not only those that bounds leave.
TEST(SizingProgram, HighsFindsTheBestOfManyColumns) {
  if (!SizingUsesHighs()) GTEST_SKIP() << "built without HiGHS";
  int count = 0;
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    Instance x = RandomInstance(seed);
    const SizingModel model(x.job);
    x.program.model = &model;
    const std::optional<SizingAnswer> best = EnumerateSizing(x.program);
    if (!best) continue;
    const SizingChoices choices(x.program);
    const SizingBounds bounds(choices);
    const double limit = 1.5 * best->ns;
    std::vector<SizingColumns> frames;
    for (int r = 1; r <= choices.most_replicas; ++r) {
      for (const auto& [p_a, p_f] : choices.groups) {
        for (const SizingFrame& frame : choices.Frames(r, p_a, p_f, 0)) {
          const auto smallest = bounds.SmallestOf(frame, limit);
          if (!smallest) continue;
          SizingColumns columns = ColumnsOf(choices, frame, *smallest, limit);
          if (!columns.attention.empty() && !columns.ffn.empty()) frames.push_back(std::move(columns));
        }
      }
    }
    SizingTies ties(&choices);
    ties.Add(best->pools, {.attention = limit});  // as if only this were known
    SizingAnswer stats;
    EXPECT_TRUE(SolveColumns(choices, frames, kSeconds, &ties, &stats)) << "seed " << seed;
    EXPECT_NEAR(ties.ns() / best->ns, 1, 1e-8) << "seed " << seed;
    ++count;
  }
  EXPECT_GE(count, 70);
}

// The formulas as printed, T = max(C_a/(M P), V/(M_nic B), C_f/(N P), V/(N_nic B)): one replica, one group a pool, one
// expert a token, a number of experts that each N divides, products alone take time. Nodes of 4 GPUs and 4 NICs, shared
// by the pools; on k nodes 1 - 1/k of V leaves a node, and workers on fewer nodes than k have only those nodes' NICs.
TEST(SizingProgram, IsThePrintedOneWhereThatIsExact) {
  for (const double nic : {0.005, 0.02, 0.05, 1.0}) {
    Job job = SmallJob("af-pipe", 1, 1, 1);
    ModelShape& m = job.model;
    m.num_layers = 2;
    m.window.assign(2, 0);
    m.dense.assign(2, false);
    m.num_experts = 60;
    m.experts_per_token = 1;
    ClusterSpec& c = job.cluster;
    c.gpus = 12;
    c.gpu = {"gpu", 0.001, 1e9, 1e30};
    c.nic_gbytes_s = nic;
    c.nvlink_gbytes_s = 1e9;
    c.efficiency = {};
    c.efficiency.attention_forward = c.efficiency.attention_backward = c.efficiency.gemm = 1;
    c.efficiency.grouped_gemm = c.efficiency.memory = c.efficiency.m2n = c.efficiency.nvlink = 1;
    job.mixed_nodes = true;
    const SizingModel model(job);
    // FLOPs of 64 tokens and all passes, P = 1 a ns; H 128, 4 heads of 32, 2 of keys and values, De 64, V 1000.
    const double attention = 3 * 2 * (2 * 128 * 128 + 2 * 128 * 64 + 128 * 60) + 3.5 * 2 * 65 / 2.0 * 4 * 64;
    const double c_a = 64 * 2 * attention;
    const double c_f = 64 * (2 * 3 * 6 * 128 * 64 + 3 * 2 * 128 * 1000);
    // Rows of 256 bytes: dispatches with 6 more, gradients of combines; the last is the head's, on FFN workers.
    const double v_a = 64 * (2 * 262 + 256), v_f = 64 * (2 * 262 + 2 * 256);
    double best = 1e300;
    for (int M = 1; M <= 11; ++M) {
      for (int N = 1; M + N <= 12 && N <= 6; ++N) {
        const int k = (M + N + 3) / 4;
        for (int x = 1; x <= 3; ++x) {
          const double m_nic = x * std::min(k, M), n_nic = (4 - x) * std::min(k, N), far = 1 - 1.0 / k;
          const double t_a = std::max(c_a / M, far * v_a / (m_nic * nic));
          const double t_f = std::max(c_f / N, far * v_f / (n_nic * nic));
          best = std::min(best, std::max(t_a, t_f));
        }
      }
    }
    const std::optional<SizingAnswer> answer =
        SolveSizing({.model = &model, .gpus = 12, .batch = 1000, .most_n = 6, .most_replicas = 1,
                     .may_recompute = false, .may_move_head = false, .fixed = {"mixed_nodes"}}, kSeconds);
    ASSERT_TRUE(answer.has_value());
    EXPECT_NEAR(answer->ns / best, 1, 1e-9) << Text(answer->pools);
    EXPECT_TRUE(answer->proven);
  }
}

// Of equally fast pools: the second-slowest time; NICs nearest to one a worker (nodes of four GPUs and NICs: 2 and 2
// workers with a NIC each, or 2 and 1 where the one has two); memory; the smaller numbers.
TEST(SizingProgram, BreaksTiesInOrder) {
  const Job job = SmallJob("af-pipe", 1, 4, 4);
  const SizingModel model(job);
  const SizingChoices choices({.model = &model, .gpus = 8, .batch = 64, .fixed = {}});
  SizingTies ties(&choices);
  const SizingTimes times{.attention = 10, .ffn = 5};
  const Pools larger{.m = 4, .n = 4, .sequences = 64, .mixed = true, .node_nics_a = 2, .node_nics_f = 2};
  Pools uneven = larger;
  uneven.n = 2, uneven.sequences = 1;
  ASSERT_LT(std::max(choices.AttentionShare(uneven), choices.FfnShare(uneven)),
            std::max(choices.AttentionShare(larger), choices.FfnShare(larger)));
  ties.Add(uneven, times);
  ties.Add(larger, times);
  EXPECT_EQ(ties.Best()->pools, larger);
  Pools smaller = larger;
  smaller.sequences = 63;
  ties.Add(smaller, times);
  EXPECT_EQ(ties.Best()->pools, smaller);
  ties.Add(uneven, {.attention = 10, .ffn = 4});
  EXPECT_EQ(ties.Best()->pools, uneven);
  ties.Add(larger, {.attention = 9, .ffn = 9});
  EXPECT_EQ(ties.Best()->pools, larger);
  EXPECT_EQ(ties.Best()->ns, 9);
  ties.Add(smaller, {.attention = 9 * (1 + 1e-8), .ffn = 1});  // slower
  EXPECT_EQ(ties.Best()->pools, larger);
}

// By hand: four GPUs of one node, attention three times the FFN's work: 3 and 1, not 2 and 2. Then nothing else is as
// fast. What binds follows.
TEST(SizingProgram, SaysWhatBinds) {
  Job job = SmallJob("af-pipe", 1, 1, 1);
  job.cluster = SmallCluster(4);
  job.seq_length = 4096;
  const SizingModel model(job);
  SizingProgram program{.model = &model, .gpus = 4, .batch = 64, .fixed = {}};
  std::optional<SizingAnswer> answer = SolveSizing(program, kSeconds);
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->pools.gpus(), 4);
  EXPECT_EQ(answer->pools.m * answer->pools.replicas, 3) << Text(answer->pools);
  EXPECT_EQ(answer->binding, "attention");
  job.cluster.nvlink_gbytes_s = 0.01;
  const SizingModel slow(job);
  program.model = &slow;
  answer = SolveSizing(program, kSeconds);
  EXPECT_EQ(answer->binding.substr(0, 7), "NICs of") << answer->binding;
  // Not enough of anything.
  program.gpus = 1;
  EXPECT_FALSE(SolveSizing(program, kSeconds).has_value());
  program.gpus = 4, program.batch = 1;
  EXPECT_FALSE(SolveSizing(program, kSeconds).has_value());
  EXPECT_FALSE(EnumerateSizing(program).has_value());
}

}  // namespace
}  // namespace disagmoe
