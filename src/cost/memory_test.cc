#include "cost/memory.h"

#include <gtest/gtest.h>

#include "cost/cluster_costs.h"
#include "cost/jobs_for_tests.h"
#include "schedule/ready.h"

namespace disagmoe {
namespace {

constexpr OpKind kF = OpKind::kForward, kB = OpKind::kBackward;

// Qwen3-235B: H 4096, 64 + 4 + 4 heads of 128, E 128, k 8, De 1536. A token of attention, bytes:
//   x, two normed rows, h                     4 * 8192 = 32768
//   queries, keys, values; output             2 * 72 * 128 + 2 * 64 * 128 = 34816
//   log-sums, probabilities; choice and gates 4 * 64 + 4 * 128 + 8 * 8 = 832
TEST(Memory, QwenByHand) {
  Job job = QwenJob("af-pipe", "h800x128", 2, 32, 32);
  EXPECT_EQ(AttentionActivationBytes(job, 3), 32768 + 34816 + 832);
  // Inputs of products (x and h normed, the output) and gradients of their results (q k v, H, logits in fp32).
  EXPECT_EQ(AttentionGradientBytes(job, 3), 2 * 72 * 128 + 8192 + 512);
  EXPECT_EQ(AttentionWeightBytes(job, 3), 2 * 72 * 128 + 8192 + 512 + 2 * 8192 + 2 * 64 * 128);
  EXPECT_EQ(FfnRowBytes(job), 8192);
  EXPECT_EQ(FfnPairBytes(job), 3 * 3072);
  EXPECT_EQ(FfnPairGradientBytes(job), 8192 + 2 * 3072);
  EXPECT_EQ(FfnPairWeightBytes(job), 8192 + 2 * 3072 + 8192 + 3072);
  EXPECT_EQ(CommonFfnBytes(job, 3), 0);
  EXPECT_EQ(CommonFfnGradientBytes(job, 3), 0);
  EXPECT_EQ(HeadActivationBytes(job), 8192 + 2 * 151936);
  EXPECT_EQ(HeadWorkspaceBytes(job), 4 * 151936);
  Job colocated = QwenJob("megatron-1f1b", "h800x128", 8, 16);
  EXPECT_EQ(FfnRowBytes(colocated), 0);
  EXPECT_EQ(FfnPairBytes(colocated), 8192 + 3 * 3072);
  for (Job* j : {&job, &colocated}) {
    j->recompute = true;
    EXPECT_EQ(AttentionActivationBytes(*j, 3), 8192 + 64);
    EXPECT_EQ(FfnRowBytes(*j), 8192);
    EXPECT_EQ(FfnPairBytes(*j), 0);
  }
}

// DeepSeek-V3: keys and values of all 128 heads, and the latent rows; a dense layer has no router; shared experts.
TEST(Memory, DeepseekByHand) {
  Job job;
  job.model = LoadModelShape("deepseek-v3");
  const int64_t qkv = 128 * (192 + 192 + 128), latent = 1536 + 512, out = 128 * 128;
  EXPECT_EQ(AttentionActivationBytes(job, 0), 2 * (4 * 7168 + qkv + latent + out) + 4 * 128);
  EXPECT_EQ(AttentionActivationBytes(job, 5), 2 * (4 * 7168 + qkv + latent + out) + 4 * 128 + 4 * 256 + 8 * 8);
  EXPECT_EQ(AttentionGradientBytes(job, 0), 2 * (qkv + latent + 64 + 7168));
  EXPECT_EQ(AttentionWeightBytes(job, 0), 2 * (qkv + latent + 64 + 7168 + 7168 + latent + out));
  EXPECT_EQ(CommonFfnBytes(job, 0), 6 * 18432);
  EXPECT_EQ(CommonFfnBytes(job, 5), 6 * 2048);
  EXPECT_EQ(CommonFfnWeightBytes(job, 5), 2 * (7168 + 2 * 2048 + 7168 + 2048));
}

// What a worker keeps and uses of an operation. 128 experts on 32: 8 * 32 * 4096 / 32 pairs, 32 * 4096 visits of 1 -
// C(124, 8) / C(128, 8) rows.
TEST(Memory, OperationsByHand) {
  Job job = QwenJob("af-pipe", "h800x128", 2, 32, 32);
  double missed = 1;
  for (int i = 0; i < 4; ++i) missed *= (120.0 - i) / (128 - i);
  const double tokens = 4096, rows = 32 * tokens * (1 - missed), pairs = 8 * tokens, sent = tokens * 32 * (1 - missed);
  const Schedule s = ScheduleOf(job);
  const auto near = [&](int64_t got, double expected) { EXPECT_NEAR(static_cast<double>(got), expected, 2); };
  {
    const ClusterCosts c(job, s);
    near(c.ActivationBytes({kF, 2, 0}, 0, false), tokens * 68416);
    near(c.ActivationBytes({kF, 3, 0}, 2, false), rows * 8192 + pairs * 9216);
    near(c.WorkspaceBytes({kF, 2, 0}, 0), sent * 8192);
    near(c.WorkspaceBytes({kF, 3, 0}, 2), (rows + pairs) * 8192);
    near(c.WorkspaceBytes({kB, 2, 0}, 0), sent * 8192 + tokens * (18432 + 8192 + 512));
    near(c.WorkspaceBytes({kB, 3, 0}, 2), rows * 8192 + pairs * (8192 + 6144));
    near(c.WorkspaceBytes({kF, 188, 0}, 3), tokens * 4 * 151936);
    EXPECT_EQ(c.WorkspaceBytes({kB, 188, 0}, 3), 0);
    near(c.MessageBytes({OpKind::kSendForward, 2, 0}, 2), sent * 8192 + tokens * 48);
    near(c.MessageBytes({OpKind::kSendForward, 3, 0}, 1), sent * 8192);
  }
  // What was not kept is made again while the backward runs.
  job.recompute = true;
  const ClusterCosts c(job, s);
  near(c.ActivationBytes({kF, 2, 0}, 0, false), tokens * 8256);
  near(c.WorkspaceBytes({kB, 2, 0}, 0), sent * 8192 + tokens * (18432 + 8192 + 512 + 68416 - 8256));
  near(c.ActivationBytes({kF, 3, 0}, 2, false), rows * 8192);
  near(c.WorkspaceBytes({kB, 3, 0}, 2), rows * 8192 + pairs * (8192 + 6144 + 9216));
}

StaticMemory OfAllWorkers(const Job& job) {
  const Schedule s = ScheduleOf(job);
  const ClusterCosts c(job, s);
  StaticMemory sum;
  for (size_t k = 0; k < c.classes().size(); ++k) {
    const StaticMemory one = c.StaticParts(static_cast<int>(k));
    const int64_t workers = c.classes()[k].count * job.replicas();
    sum.weights += workers * one.weights;
    sum.gradients += workers * one.gradients;
    sum.optimizer += workers * one.optimizer;
    sum.reserved += workers * one.reserved;
    EXPECT_EQ(c.StaticBytes(static_cast<int>(k)), one.weights + one.gradients + one.optimizer + one.reserved);
  }
  return sum;
}

// 18 bytes a parameter (system.md section 3): weight 2 and gradient 4 on each holder, state 12 shared by all holders, or
// on each without sharding. Over all workers of all replicas an expert is on `replicas` workers, all else on the
// workers of its group in all replicas; dualpipe's two directions hold all of it twice. A worker's share of the state
// is rounded to a byte.
TEST(Memory, PartsAddUpToTheParameters) {
  struct Layout {
    const char* schedule;
    int p, m, n, replicas, copies;
  };
  for (const Layout& l : {Layout{"af-pipe", 2, 4, 8, 1, 1}, {"af-pipe", 1, 3, 4, 3, 1},
                          {"megatron-1f1b", 2, 8, 0, 2, 1}, {"tutel", 2, 4, 0, 1, 1},
                          {"dualpipe", 2, 4, 0, 3, 2}, {"dualpipe-v", 2, 4, 0, 1, 1}}) {
    for (bool shard : {true, false}) {
      SCOPED_TRACE(std::string(l.schedule) + (shard ? ", sharded" : ""));
      Job job = SmallJob(l.schedule, l.p, l.m, l.n);
      job.model.shared_hidden = 64;
      job.cluster.gpus *= l.replicas;
      job.global_batch *= l.replicas;
      job.shard_optimizer = shard;
      const ModelShape& m = job.model;
      const int64_t experts = 4 * 16 * m.ExpertParams();
      int64_t attention = m.EmbeddingParams(), ffn = m.HeadParams();
      for (int64_t i = 0; i < 4; ++i) {
        attention += m.AttentionParams(i);
        ffn += m.FfnParams(i) - experts / 4;
      }
      const int64_t r = l.replicas, a_holders = r * l.m, f_holders = r * (l.n == 0 ? l.m : l.n);
      const int64_t held = l.copies * (experts * r + attention * a_holders + ffn * f_holders);
      const StaticMemory sum = OfAllWorkers(job);
      EXPECT_EQ(sum.weights, 2 * held);
      EXPECT_EQ(sum.gradients, 4 * held);
      EXPECT_NEAR(sum.optimizer, 12 * (shard ? experts + attention + ffn : held), job.cluster.gpus / 2);
      EXPECT_EQ(sum.reserved, job.cluster.gpus * int64_t{6'000'000'000});
    }
  }
}

// schedule.md section 6: Qwen3-235B with Adam does not fit 64 GPUs of 80 GB in any split. 227.1 of its 235.1 billion
// parameters are experts, in one F-pool: 4.09 TB, 55 F-workers' memory with 6 GB reserved on each. That leaves at most
// 9 A-workers. Here: what is static leaves too little, on some worker, for the activations that the schedule's order
// holds with the smallest round, recomputed as far as can be. The nearest: 4 A and 60 F, 79.4 GB of state.
TEST(Memory, Qwen3DoesNotFitIn64) {
  int splits = 0;
  for (int p : {1, 2, 4, 8, 16, 32}) {
    for (int m = 1; m < 64 / p; ++m) {
      Job job = QwenJob("af-pipe", "h800x64", p, m, 64 / p - m);
      job.global_batch = 64 * m;
      job.round = 2 * p;
      job.recompute = true;
      for (bool head_on_attention : {false, true}) {
        job.head_on_attention = head_on_attention;
        const Schedule s = ScheduleOf(job);
        const ClusterCosts c(job, s);
        bool over = false;
        for (size_t k = 0; k < c.classes().size(); ++k) {
          const int cls = static_cast<int>(k);
          const int group = c.classes()[k].group;
          int64_t least = INT64_MAX;
          for (int stage = 0; stage + 1 < s.num_stages(); ++stage) {
            if (s.group(stage, 0) == group) least = std::min(least, c.ActivationBytes({kF, stage, 0}, cls, false));
          }
          over |= c.StaticBytes(cls) + s.groups[group].max_in_flight * least > c.MemoryLimit(cls);
        }
        EXPECT_TRUE(over) << p << " x " << m << " A, head on A: " << head_on_attention;
        ++splits;
      }
    }
  }
  EXPECT_EQ(splits, 2 * (63 + 31 + 15 + 7 + 3 + 1));
}

}  // namespace
}  // namespace disagmoe
