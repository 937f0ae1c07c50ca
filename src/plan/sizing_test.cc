#include "plan/sizing.h"

#include <gtest/gtest.h>

#include "cost/jobs_for_tests.h"
#include "cost/memory.h"
#include "plan/evaluate.h"
#include "schedule/schedule.h"

namespace disagmoe {
namespace {

// What a pool must do is done by the simulator as well: of every layout, the busiest resource of the sizing program is
// near the simulator's limit (they differ in launches of messages, in the workers near a node's end, in gradient sums,
// and in computation that communication slows down), and no step is shorter.
TEST(Sizing, ItsBusiestResourceIsTheSimulatorsLimit) {
  Job job = MakeJob("af-pipe", LoadModelShape("olmoe-1b-7b"), LoadCluster("h800x48"));
  job.overlap_slowdown = false;
  const SizingModel model(job);
  int count = 0;
  for (int p : {1, 2, 4}) {
    for (int m : {2, 3, 8}) {
      for (int n : {1, 3, 8}) {
        if (48 % (p * (m + n)) != 0) continue;
        for (const bool recompute : {false, true}) {
          Job x = job;
          x.p_a = x.p_f = p, x.m = m, x.n = n, x.recompute = recompute;
          x.global_batch = 8 * p * x.replicas() * m;
          const Evaluation e = Evaluate(x);
          const SizingTimes t = model.Times(
              {.replicas = x.replicas(), .p_a = p, .m = m, .p_f = p, .n = n, .recompute = recompute});
          const double step = t.worst() * static_cast<double>(x.global_batch);
          EXPECT_LT(step, static_cast<double>(e.sim.step_ns)) << LayoutText(e);
          EXPECT_NEAR(step / static_cast<double>(e.sim.limit_ns), 1, 0.12) << LayoutText(e) << " " << e.sim.limit;
          ++count;
        }
      }
    }
  }
  EXPECT_GE(count, 20);
}

// Three layers, the first dense; shared experts; 5 experts, 2 a token. A GPU of 1 FLOP/ns in products, everything else
// free, so that each time is a number of FLOPs. Per token, all passes are 3 x the forward's products:
//   projections 2 (H n_h d + 2 H n_kv d + n_h d H) = 2 (64 + 2 * 32 + 64) = 384; router 2 H E = 80; scores and values
//   2 * 2 * (s + 1) / 2 * n_h d = 16 (s + 1), 1 + 2.5 times; an expert 6 H De = 192; shared 6 H 2 = 96; dense
//   6 H 16 = 768; head 2 H V = 160.
Job ThreeLayers() {
  Job job;
  job.schedule = "af-pipe";
  job.seq_length = 7;
  job.dedup = Dedup::kWorker;
  ModelShape& m = job.model;
  m.name = "three layers";
  m.vocab_size = 10;
  m.hidden_size = 8;
  m.num_layers = 3;
  m.num_heads = 2;
  m.num_kv_heads = 1;
  m.head_dim = m.value_dim = 4;
  m.window.assign(3, 0);
  m.num_experts = 5;
  m.experts_per_token = 2;
  m.expert_hidden = 4;
  m.shared_hidden = 2;
  m.dense = {true, false, false};
  m.dense_hidden = 16;
  ClusterSpec& c = job.cluster;
  c.gpus = 64;
  c.gpus_per_node = 4;
  c.nics_per_node = 2;
  c.gpu = {"gpu", 1e-3, 100, 1e30};
  c.nic_gbytes_s = 1;
  c.nvlink_gbytes_s = 4;
  c.efficiency.attention_forward = c.efficiency.attention_backward = 1;
  c.efficiency.gemm = c.efficiency.grouped_gemm = c.efficiency.memory = c.efficiency.m2n = c.efficiency.nvlink = 1;
  return job;
}

constexpr double kTokens = 7;
constexpr double kScores = 16 * 8 * 3.5;  // s + 1 = 8
constexpr double kDenseAttention = 3 * 384 + kScores, kAttention = 3 * (384 + 80) + kScores;
constexpr double kExpert = 3 * 192, kShared = 3 * 96, kDense = 3 * 768, kHead = 3 * 160;

TEST(Sizing, TimesOfThreeLayersByHand) {
  const SizingModel model(ThreeLayers());
  // p = 1: all layers. Five experts on three workers: the fullest has two of five, and of the shared experts' tokens
  // two in five; of the dense layer's a third.
  Pools x{.replicas = 2, .m = 3, .n = 3};
  SizingTimes t = model.Times(x);
  EXPECT_DOUBLE_EQ(t.attention, kTokens * (kDenseAttention + 2 * kAttention) / 6);
  EXPECT_DOUBLE_EQ(t.ffn, kTokens * (2 * 0.4 * (2 * kExpert + kShared) + kDense / 3 + kHead / 3) / 2);
  // p = 2: layers 0 and 2, or 1 and the head's stage (FFN: with the last layer, attention: group 3 mod 2).
  x.p_a = x.p_f = 2;
  t = model.Times(x);
  EXPECT_DOUBLE_EQ(t.attention, kTokens * (kDenseAttention + kAttention) / 6);
  EXPECT_DOUBLE_EQ(t.ffn, kTokens * (0.4 * (2 * kExpert + kShared) + kDense / 3 + kHead / 3) / 2);
  x.head_on_attention = true;
  t = model.Times(x);
  EXPECT_DOUBLE_EQ(t.attention, kTokens * (kDenseAttention + kAttention) / 6);  // more than one layer and the head
  EXPECT_DOUBLE_EQ(t.ffn, kTokens * (0.4 * (2 * kExpert + kShared) + kDense / 3) / 2);
  // p = 3: a layer each; attention's head is with layer 0, and FFN groups differ.
  x.p_a = 3;
  t = model.Times(x);
  EXPECT_DOUBLE_EQ(t.attention, kTokens * (kDenseAttention + kHead) / 6);
  // Recomputed: attention's forward once more, of the FFN two thirds of its products. n = 5: an expert of five.
  x.recompute = true, x.head_on_attention = false, x.p_f = 3, x.n = 5;
  t = model.Times(x);
  EXPECT_DOUBLE_EQ(t.attention, kTokens * (4 * (384 + 80) + 16 * 8 * 4.5) / 6);
  const double again = 1 + 2.0 / 9;
  const double dense = kDense / 5 * again, routed = 0.2 * (2 * kExpert + kShared) * again + kHead / 5;
  EXPECT_DOUBLE_EQ(t.ffn, kTokens * std::max(dense, routed) / 2);
}

// What is paid by row, launch, micro-batch. HBM of 1 byte/ns, products free.
TEST(Sizing, CopiesRowsLaunchesAndLoadsByHand) {
  Job job = ThreeLayers();
  job.cluster.gpu.peak_tflops = 1e30;
  job.cluster.gpu.memory_gbytes_s = 1;
  job.model.shared_hidden = 0;
  const Pools x{.replicas = 2, .m = 3, .n = 3, .sequences = 2};
  const double before = SizingModel(job).Times(x).attention, ffn_before = SizingModel(job).Times(x).ffn;
  // A row more of each token: written and read, H bf16, in the forward, twice that in the backward. To every expert
  // instead of every worker: of the workers with 1, 2, 2 experts a token of two visits 2/5, 7/10, 7/10 = 1.8, not 2.
  // Both routed layers.
  Job every = job;
  every.dedup = Dedup::kExpert;
  EXPECT_NEAR(SizingModel(every).Times(x).attention - before, kTokens * 0.2 * 2 * (3 * 2 * 8 * 2) / 6, 1e-9);
  // The FFN's norm reads and writes a row: the fullest worker gets 0.8 rather than 0.7.
  EXPECT_NEAR(SizingModel(every).Times(x).ffn - ffn_before, kTokens * 0.1 * 2 * (3 * 2 * 8 * 2) / 2, 1e-9);
  // Launches: 3 passes of 3 layers a micro-batch, 4 with recomputation, and 2 of the head, which is on FFN workers.
  Job launches = job;
  launches.cluster.efficiency.op_overhead_us = 1;
  EXPECT_NEAR(SizingModel(launches).Times(x).attention - before, 9000.0 / 2 / 6, 1e-9);
  EXPECT_NEAR(SizingModel(launches).Times(x).ffn - ffn_before, 11000.0 / (2 * 3 * 2), 1e-9);
  Pools again = x;
  again.recompute = true;
  EXPECT_NEAR(SizingModel(launches).Times(again).attention - SizingModel(job).Times(again).attention, 1000, 1e-9);
  // Loads: a grouped product of r rows takes as long as one of r + 10: 10 rows more for two experts of two layers.
  Job loads = ThreeLayers();
  const double fast = SizingModel(loads).Times(x).ffn;
  loads.cluster.efficiency.grouped_gemm_half_rows = 10;
  EXPECT_NEAR(SizingModel(loads).Times(x).ffn - fast, 10 * kExpert * 2 * 2 / (2 * 3 * 2), 1e-9);
}

// Bytes: a row is 16, its ids and gates 6 an expert. A token sends 1.8 rows of a routed layer, one of a dense one.
TEST(Sizing, NicsByHand) {
  Job job = ThreeLayers();
  const SizingModel model(job);
  // On nodes of their own, half a NIC a worker. Attention sends layer l's rows and gradients of layer l - 1's.
  Pools x{.replicas = 2, .m = 3, .n = 3};
  SizingTimes t = model.Times(x);
  const double sent = 16 * (1 + 1.8 + 1.8) + 2 * 12 + 16 * (1 + 1.8);
  EXPECT_NEAR(t.nic_a, kTokens * sent / 0.5 / 6, 1e-9);
  EXPECT_NEAR(t.nic_f, kTokens * (2 * 16 * (2 * 0.7 + 1.0 / 3) + 2 * 12 * 0.4) / 0.5 / 2, 1e-9);
  x.head_on_attention = true;  // gradients of the last layer's rows
  EXPECT_NEAR(model.Times(x).nic_a, kTokens * (sent + 16 * 1.8) / 0.5 / 6, 1e-9);
  x.head_on_attention = false;
  // On one node: NVLink, four times a NIC. (Workers of two and three experts: 0.7 and 0.9 rows.)
  x.m = x.n = 2;
  EXPECT_NEAR(model.Times(x).nic_a, kTokens * (16 * (1 + 3.2) + 24 + 16 * 2.6) / 4 / 4, 1e-9);
  // Mixed on two nodes, a NIC for the three attention workers of each, one for the one FFN worker: half of the rows
  // leave, over a NIC a third of which is a worker's, or all.
  x = {.m = 6, .n = 2, .mixed = true, .node_nics_a = 1, .node_nics_f = 1};
  t = model.Times(x);
  EXPECT_NEAR(t.nic_a, kTokens * (16 * (1 + 3.2) + 24 + 16 * 2.6) * 0.5 * 3 / 6, 1e-9);
  EXPECT_NEAR(t.nic_f, kTokens * (2 * 16 * (1.8 + 0.5) + 2 * 12 * 0.6) * 0.5, 1e-9);
  // Given NICs count in any case.
  job.nics_a = 2, job.nics_f = 0.25;
  t = SizingModel(job).Times(x);
  EXPECT_NEAR(t.nic_a, kTokens * (16 * (1 + 3.2) + 24 + 16 * 2.6) * 0.5 / 2 / 6, 1e-9);
  EXPECT_NEAR(t.nic_f, kTokens * (2 * 16 * (1.8 + 0.5) + 2 * 12 * 0.6) * 0.5 / 0.25, 1e-9);
}

// On shared nodes, against the transfers that ClusterCosts finds worker by worker: bytes over the NICs of the worker
// that has most, mean over the boundaries.
TEST(Sizing, SharesOfMixedNodesAreThoseOfTheCosts) {
  struct Layout {
    int p_a, m, p_f, n;
  };
  // 4 a node: one group over nodes; groups of whole nodes; two and four groups a node; unequal groups.
  for (const Layout& v : {Layout{1, 8, 1, 8}, {1, 12, 1, 4}, {2, 4, 2, 4}, {2, 6, 2, 2}, {4, 4, 4, 4}, {4, 1, 4, 1},
                          {4, 2, 4, 2}, {2, 8, 4, 4}, {4, 2, 1, 8}, {1, 6, 2, 3}}) {
    SCOPED_TRACE(testing::Message() << v.p_a << " x " << v.m << ", " << v.p_f << " x " << v.n);
    Job job = SmallJob("af-pipe", 1, 1, 1);
    job.cluster = SmallCluster(v.p_a * v.m + v.p_f * v.n);
    job.p_a = v.p_a, job.m = v.m, job.p_f = v.p_f, job.n = v.n;
    job.mixed_nodes = true;
    job.global_batch = 8 * job.m;
    const Costed c(job);
    const SizingModel::Each far = SizingModel(job).MixedFar(v.p_a, v.p_f, job.cluster.gpus / 4);
    double nic[2] = {0, 0}, all[2] = {0, 0};
    for (int boundary = 0; boundary < 8; ++boundary) {
      const bool dispatch = boundary % 2 == 0;
      // The last combine would go to attention of a fifth layer, which is the first group again: as the one before.
      const int at = boundary == 7 ? (v.p_a == 1 ? 5 : -1) : boundary;
      if (at < 0) continue;
      for (const bool sending : {true, false}) {
        const bool ffn = dispatch != sending;
        const Op op{kSendF, at, 0};
        const int k = c.ClassesOf(sending ? SenderOf(c.schedule, op) : ReceiverOf(c.schedule, op)).first;
        // What a worker sends forward it receives backward.
        const double whole = static_cast<double>(c.costs.MessageBytes({sending ? kSendB : kSendF, at, 0}, k));
        nic[ffn] += static_cast<double>(c.Send(kSendF, at, sending).nic_bytes) / whole;
        ++all[ffn];
      }
    }
    if (v.p_a == 1) {
      EXPECT_NEAR(far.attention, nic[0] / all[0], 1e-3);
      EXPECT_NEAR(far.ffn, nic[1] / all[1], 1e-3);
    } else {  // without the wrap from the last layer to the first group: 7 exchanges of 8
      EXPECT_NEAR(far.attention, nic[0] / all[0], 1.0 / 8);
      EXPECT_NEAR(far.ffn, nic[1] / all[1], 1.0 / 8);
    }
  }
}

// State of the fullest worker as ClusterCosts counts it, whose groups differ; and activations no more than the peak of
// the simulated step, which also has messages and what computations need while they run.
TEST(Sizing, MemoryIsThatOfTheCosts) {
  struct Layout {
    int p_a, m, p_f, n;
    bool head, recompute, shard;
  };
  for (const Layout& v : {Layout{1, 3, 1, 5, false, false, true}, {2, 2, 2, 3, true, false, true},
                          {3, 2, 3, 2, false, true, true}, {2, 2, 1, 4, true, true, false}}) {
    SCOPED_TRACE(testing::Message() << v.p_a << " x " << v.m << ", " << v.p_f << " x " << v.n);
    Job job = SmallJob("af-pipe", 1, 1, 1);
    job.model = SmallModel(true);
    job.model.shared_hidden = 32;
    job.p_a = v.p_a, job.m = v.m, job.p_f = v.p_f, job.n = v.n;
    job.head_on_attention = v.head, job.recompute = v.recompute, job.shard_optimizer = v.shard;
    job.cluster = SmallCluster(static_cast<int>(2 * job.workers()));  // two replicas
    job.reserved_gb = 0.001;
    const int ring = 2 * std::max(v.p_a, v.p_f);
    job.round = ring;
    job.global_batch = int64_t{4} * ring * 2 * job.m;
    const Costed c(job);
    const Evaluation e = Evaluate(job);
    double state[2] = {0, 0}, peak[2] = {0, 0};
    for (size_t k = 0; k < e.classes.size(); ++k) {
      const bool ffn = e.classes[k].group >= v.p_a;
      state[ffn] = std::max(state[ffn], static_cast<double>(c.costs.StaticParts(static_cast<int>(k)).total()));
      peak[ffn] = std::max(peak[ffn], static_cast<double>(e.sim.memory[k].peak_bytes));
    }
    const SizingModel model(job);
    const Pools x{.replicas = 2, .p_a = v.p_a, .m = v.m, .p_f = v.p_f, .n = v.n, .recompute = v.recompute,
                  .head_on_attention = v.head};
    EXPECT_NEAR(model.AttentionBytes(x, 0), state[0], 2);
    EXPECT_NEAR(model.FfnBytes(x, 0), state[1], 2);
    if (v.p_a != v.p_f) continue;
    const double a = HeldActivations(4, v.p_a, v.p_f, ring, 2, false);
    const double f = HeldActivations(4, v.p_a, v.p_f, ring, 2, true);
    EXPECT_LE(model.AttentionBytes(x, a) - state[0], peak[0] - state[0]);
    EXPECT_GE(model.AttentionBytes(x, a) - state[0], 0.5 * (peak[0] - state[0]));
    EXPECT_LE(model.FfnBytes(x, f) - state[1], peak[1] - state[1]);
    EXPECT_GE(model.FfnBytes(x, f) - state[1], (v.recompute ? 0.2 : 0.4) * (peak[1] - state[1]));
  }
}

// The parts put together are the times.
TEST(Sizing, LinesAreTheTimes) {
  Job job = ThreeLayers();
  job.cluster.efficiency.op_overhead_us = 0.1;
  job.cluster.efficiency.grouped_gemm_half_rows = 3;
  job.cluster.gpu.memory_gbytes_s = 1;
  const SizingModel model(job);
  for (int i = 0; i < 64; ++i) {
    const Pools x{.replicas = 1 + i % 2, .p_a = 1 + i % 3, .m = 1 + i % 4, .p_f = 1 + i / 2 % 3, .n = 1 + i % 5,
                  .sequences = 1 + i % 2, .recompute = i % 8 > 3, .head_on_attention = i % 16 > 7, .mixed = i > 31,
                  .node_nics_a = i > 31, .node_nics_f = i > 31};
    const SizingTimes t = model.Times(x);
    const SizingModel::Each byte = model.ByteNsOf(x);
    const auto largest = [](const SizingModel::Lines& lines, double at) {
      double out = 0;
      for (const SizingModel::Line& line : lines) out = std::max(out, line.at(at));
      return out;
    };
    EXPECT_DOUBLE_EQ(t.attention, largest(model.AttentionLines(x), model.Rows(x.n)));
    EXPECT_DOUBLE_EQ(t.ffn, largest(model.FfnLines(x), 1.0 / (x.m * x.sequences)));
    EXPECT_DOUBLE_EQ(t.nic_a, largest(model.AttentionNicLines(x, byte.attention), model.Rows(x.n)));
    EXPECT_DOUBLE_EQ(t.nic_f, model.FfnNicNs(x, byte.ffn));
  }
}

// The FFN pool's own machines: three times as fast, a NIC a GPU of twice the rate, half the memory; all else as before.
TEST(Sizing, PoolsOnMachinesOfTheirOwn) {
  Job job = ThreeLayers();
  const Pools x{.replicas = 2, .m = 3, .n = 3};
  const SizingModel one(job);
  job.ffn_cluster = job.cluster;
  job.ffn_cluster->gpu.peak_tflops *= 3;
  job.ffn_cluster->gpu.memory_gb = 50;
  job.ffn_cluster->nics_per_node = 4;
  job.ffn_cluster->nic_gbytes_s = 2;
  const SizingModel two(job);
  EXPECT_DOUBLE_EQ(two.Times(x).attention, one.Times(x).attention);
  EXPECT_DOUBLE_EQ(two.Times(x).ffn, one.Times(x).ffn / 3);
  EXPECT_DOUBLE_EQ(two.Times(x).nic_a, one.Times(x).nic_a);
  EXPECT_DOUBLE_EQ(two.Times(x).nic_f, one.Times(x).nic_f / 4);
  EXPECT_DOUBLE_EQ(two.attention_limit(), 100e9);
  EXPECT_DOUBLE_EQ(two.ffn_limit(), 50e9);
  Pools head = x;  // the head follows the machine that it is on
  head.head_on_attention = true;
  EXPECT_DOUBLE_EQ(two.Times(head).attention, one.Times(head).attention);
  EXPECT_DOUBLE_EQ(two.Times(head).ffn, one.Times(head).ffn / 3);
  Pools small = x;  // few enough for a node, but not the same one
  small.m = small.n = 1;
  EXPECT_DOUBLE_EQ(two.ByteNsOf(small).attention, 1 / 0.5);
  EXPECT_DOUBLE_EQ(two.ByteNsOf(small).ffn, 1 / 2.0);
}

TEST(Sizing, NeedsExperts) {
  Job job = ThreeLayers();
  job.model.num_experts = 0;
  EXPECT_THROW(SizingModel{job}, Error);
}

// Exact where pools are equal (schedule.md section 2: w_0 + 1); of unequal ones what list scheduling holds, nearly.
TEST(Sizing, HeldActivationsAreThoseOfTheSchedule) {
  const std::pair<int, int> groups[] = {{1, 1}, {2, 2}, {3, 3}, {4, 4}, {4, 2}, {4, 1}, {2, 4},
                                        {1, 4}, {6, 3}, {3, 6}, {2, 1}, {3, 2}, {2, 3}};
  for (const auto& [p_a, p_f] : groups) {
    const int p = std::max(p_a, p_f);
    GenerateOptions options;
    options.num_micro_batches = 8 * p;
    options.round = 2 * p;
    const PlacementSpec placement{.num_layers = 12, .p_a = p_a, .p_f = p_f, .m = 1, .n = 1};
    const std::vector<int> held = ValidateSchedule(Generate("af-pipe", placement, options)).peak_in_flight;
    for (const bool ffn : {false, true}) {
      const double ours = HeldActivations(12, p_a, p_f, 2 * p, 2, ffn);
      const int schedule = held[ffn ? p_a : 0];
      EXPECT_NEAR(ours, schedule, p_a == p_f ? 0 : 0.08 * schedule) << p_a << " " << p_f << (ffn ? " F0" : " A0");
    }
  }
}

}  // namespace
}  // namespace disagmoe
