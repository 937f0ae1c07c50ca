#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "base/error.h"
#include "cost/profile_costs.h"
#include "spec/layout.h"

namespace disagmoe {
namespace {

TEST(ProfileCurve, StraightLines) {
  const Curve curve{{10, 20, 40}, {100, 300, 400}};
  EXPECT_DOUBLE_EQ(curve.At(10), 100);
  EXPECT_DOUBLE_EQ(curve.At(15), 200);
  EXPECT_DOUBLE_EQ(curve.At(30), 350);
  EXPECT_DOUBLE_EQ(curve.At(60), 500);  // the last line goes on
  EXPECT_DOUBLE_EQ(curve.At(6), 20);    // and the first
  EXPECT_DOUBLE_EQ(curve.At(0), 0);     // never below 0
  EXPECT_DOUBLE_EQ((Curve{{10}, {100}}).At(25), 250);
  EXPECT_DOUBLE_EQ(Curve{}.At(5), 0);
}

RunConfig Config() {
  RunConfig c;
  c.model.num_hidden_layers = 2;
  c.model.hidden_size = 256;
  c.model.num_experts = 8;
  c.model.num_experts_per_tok = 2;
  c.train.seq_length = 256;
  c.train.micro_batch_size = 1;
  return c;
}

StageTimes Times(StageKind kind, Curve forward, Curve backward) {
  StageTimes t;
  t.kind = kind;
  t.forward = std::move(forward);
  t.backward = std::move(backward);
  return t;
}

// Attention: 1 us a token at s = 128, 2 us at s = 256. Experts with two pairs a row: 2 us a row at 8 held experts, 4 us
// at 4; with one pair a row, at 8 experts: 1.5 us a row, so a row costs 1 us by itself and a pair 0.5 us.
Profile Made(const RunConfig& config) {
  Profile p;
  p.cpu = "made up";
  p.cores = 2;
  p.dtype = "fp32";
  p.model = config.model;
  for (StageKind kind : {StageKind::kFirstAttention, StageKind::kAttention}) {
    p.stages.push_back(Times(kind, {{128, 512}, {128000, 512000}}, {{128, 512}, {256000, 1024000}}));
    p.stages.back().seq_length = 128;
    p.stages.push_back(Times(kind, {{256, 512}, {512000, 1024000}}, {{256, 512}, {1024000, 2048000}}));
    p.stages.back().seq_length = 256;
  }
  auto experts = [&](int64_t held, int64_t per_row, double us) {
    const int64_t a = static_cast<int64_t>(128000 * us), b = static_cast<int64_t>(512000 * us);
    p.stages.push_back(Times(StageKind::kExperts, {{128, 512}, {a, b}}, {{128, 512}, {2 * a, 2 * b}}));
    p.stages.back().experts = held;
    p.stages.back().per_row = per_row;
  };
  experts(8, 2, 2);
  experts(4, 2, 4);
  experts(8, 1, 1.5);
  p.stages.push_back(Times(StageKind::kHead, {{256, 512}, {256, 512}}, {{256, 512}, {25, 50}}));
  p.message = {{1000, 2000}, {2000, 3000}};
  p.paced_message = {{1000, 2000}, {4000, 6000}};
  p.wake_ns = 7;
  p.late_ns = 5;
  p.gap_ns = 3;
  p.optimizer = {{1000, 2000}, {1000, 2000}};
  p.sums = {{0, 1000}, {500, 1500}};
  p.report_ns = 11;
  return p;
}

struct Case {
  explicit Case(const RunConfig& c)
      : config(c), profile(Made(c)), schedule(TrainingSchedule(c)) {}
  ProfileCosts Costs() const { return ProfileCosts(profile, config, schedule, "profile.json"); }
  std::string Fault() const {
    try {
      Costs();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }
  RunConfig config;
  Profile profile;
  Schedule schedule;
};

TEST(ProfileCosts, WholeStagesOfOneWorkerEach) {
  const Case c(Config());
  const ProfileCosts costs = c.Costs();
  ASSERT_EQ(costs.classes().size(), 2u);
  EXPECT_EQ(costs.ComputeNs({OpKind::kForward, 0, 0}, 0), 512000 + 3);  // 256 tokens, s = 256: 2 us; and a gap
  EXPECT_EQ(costs.ComputeNs({OpKind::kBackward, 2, 1}, 0), 1024000 + 3);
  EXPECT_EQ(costs.ComputeNs({OpKind::kForward, 1, 0}, 1), 512000 + 3);
  EXPECT_EQ(costs.ComputeNs({OpKind::kBackward, 4, 0}, 1), 25 + 3);
}

// Between two measured lengths a token's time is on the line: at s = 192, 1.5 us.
TEST(ProfileCosts, SequenceLengths) {
  RunConfig config = Config();
  config.train.seq_length = 192;
  EXPECT_EQ(Case(config).Costs().ComputeNs({OpKind::kForward, 0, 0}, 0), 192 * 1500 + 3);
  config.train.seq_length = 300;
  EXPECT_EQ(Case(config).Fault(),
            "the profile does not reach this sequence length (profile.json): got 300, expected 128 to 256. Hint: "
            "disagmoe profile ... --seq 300");
}

// Two FFN workers with 4 of 8 experts each: 256 pairs each, and 256 (1 - C(4,2)/C(8,2)) = 256 * 11/14 rows. With two
// pairs a row that were 128 rows at 4 us; the other 256 * 11/14 - 128 rows cost 1 us each.
TEST(ProfileCosts, PartOfTheExperts) {
  RunConfig config = Config();
  config.layout.n = 2;
  const int64_t rows_ns = 512000 + static_cast<int64_t>((256.0 * 11 / 14 - 128) * 1000 + 0.5);
  EXPECT_EQ(Case(config).Costs().ComputeNs({OpKind::kForward, 1, 0}, 1), rows_ns + 3);
}

// Message layouts of exchange.h: H = 256 fp32, 256 tokens, 2 pairs each, everything from 64-byte boundaries.
TEST(ProfileCosts, BytesOfMessages) {
  const Case c(Config());
  const ProfileCosts costs = c.Costs();
  const int64_t rows = 256 * 256 * 4;
  // header, tokens, offsets (257, to the next 64), experts and gates of 512 pairs, home rows
  EXPECT_EQ(costs.BytesBetween(0, false, 0, 0), 64 + 1024 + 1088 + 2 * 2048 + 1024 + rows);
  EXPECT_EQ(costs.BytesBetween(0, true, 0, 0), 64 + 2048 + rows);  // header, gate gradients
  EXPECT_EQ(costs.BytesBetween(1, false, 0, 0), 64 + 1024 + rows);
  EXPECT_EQ(costs.BytesBetween(1, true, 0, 0), rows);
  EXPECT_EQ(costs.BytesBetween(3, false, 0, 0), 0);  // to the head, on the same worker
  // With the counts of the global auxiliary loss: 8 floats, padded to 64 bytes.
  RunConfig global = Config();
  global.model.router_aux_loss = "global";
  EXPECT_EQ(Case(global).Costs().BytesBetween(0, true, 0, 0), 64 + 2048 + 64 + rows);
}

// E = 10, N = 3, k = 2: 3 + 3 + 4 experts, so a token visits twice 1 - C(7,2)/C(10,2) = 8/15 and 1 - C(6,2)/C(10,2) =
// 2/3: of 45 tokens 24, 24 and 30 rows.
TEST(ProfileCosts, DistinctWorkers) {
  RunConfig config = Config();
  config.model.num_experts = 10;
  config.layout.n = 3;
  config.train.seq_length = 45;
  Case c(config);
  for (StageTimes& t : c.profile.stages) t.seq_length = t.seq_length > 0 ? 45 : 0;
  const ProfileCosts costs = c.Costs();
  EXPECT_EQ(costs.BytesBetween(1, true, 0, 0), 24 * 1024);
  EXPECT_EQ(costs.BytesBetween(1, true, 1, 0), 24 * 1024);
  EXPECT_EQ(costs.BytesBetween(1, true, 2, 0), 30 * 1024);
  const Op gradients{OpKind::kSendBackward, 1, 0};
  EXPECT_EQ(costs.Transfer(gradients, 0, true).nic_bytes, 78 * 1024);
  EXPECT_EQ(costs.Transfer(gradients, 2, false).nic_bytes, 24 * 1024);
}

// By layer: all experts on the first worker, which then costs what a single one does, and what DistinctWorkers has.
TEST(ProfileCosts, ExpertCounts) {
  RunConfig config = Config();
  config.layout.n = 2;
  config.layout.expert_counts = {{4, 4}, {8, 0}};
  Case c(config);
  const ProfileCosts half = c.Costs();
  EXPECT_EQ(half.ComputeNs({OpKind::kForward, 3, 0}, 1), 512000 + 3);
  EXPECT_EQ(half.ComputeNs({OpKind::kForward, 3, 0}, 2), 0 + 3);
  EXPECT_GT(half.ComputeNs({OpKind::kForward, 1, 0}, 2), 128000);
  config.model.num_experts = 10;
  config.layout.n = 3;
  config.layout.expert_counts = {{4, 3, 3}, {0, 10, 0}};
  config.train.seq_length = 45;
  Case d(config);
  for (StageTimes& t : d.profile.stages) t.seq_length = t.seq_length > 0 ? 45 : 0;
  const ProfileCosts costs = d.Costs();
  for (int worker : {0, 1, 2}) {
    EXPECT_EQ(costs.BytesBetween(1, true, worker, 0), (worker == 0 ? 30 : 24) * 1024);
    EXPECT_EQ(costs.BytesBetween(2, false, 0, worker) > 45 * 1024, worker == 1);
  }
  EXPECT_EQ(costs.BytesBetween(2, false, 0, 0), 64 + 0 + 64 + 0);  // header, one offset
}

// 262144 bytes at 8 Gbit/s hold each side for 262144 ns; the wire below needs 4000 + 2 a byte beyond 1000 = 526288 ns,
// so 264144 more than that. A latency of 1 ms is longer than what is missing.
TEST(ProfileCosts, EmulatedNic) {
  RunConfig config = Config();
  config.transport.paced = true;
  config.transport.paced_gbps = 8;
  config.transport.paced_latency_us = 5;
  const Op gradients{OpKind::kSendBackward, 1, 0};
  TransferCost cost = Case(config).Costs().Transfer(gradients, 0, true);
  EXPECT_EQ(cost.nic_ns, 262144);
  EXPECT_EQ(cost.latency_ns, 264144 + 7);
  config.transport.paced_latency_us = 1000;
  cost = Case(config).Costs().Transfer(gradients, 1, false);
  EXPECT_EQ(cost.nic_ns, 262144);
  EXPECT_EQ(cost.latency_ns, 1000000 + 5 + 7);
}

// Without: 1000 + 1 a byte; the receiver pulls.
TEST(ProfileCosts, SharedMemory) {
  const Case c(Config());
  const Op gradients{OpKind::kSendBackward, 1, 0};
  const TransferCost send = c.Costs().Transfer(gradients, 0, true), receive = c.Costs().Transfer(gradients, 1, false);
  EXPECT_EQ(send.nic_ns, 0);
  EXPECT_EQ(receive.nic_ns, 262144);
  EXPECT_EQ(receive.latency_ns, 1000 + 7);
}

// One sequence for two attention workers: the second has nothing, and its empty message takes its time all the same. A
// message to oneself takes none.
TEST(ProfileCosts, EmptySlice) {
  RunConfig config = Config();
  config.layout.m = 2;
  const Case c(config);
  const Op gradients{OpKind::kSendBackward, 1, 0}, to_head{OpKind::kSendForward, 3, 0};
  const TransferCost cost = c.Costs().Transfer(gradients, 0, true);  // slices are [0, 0) and [0, 256)
  EXPECT_EQ(cost.nic_bytes, 0);
  EXPECT_EQ(cost.latency_ns, 1000 + 7);
  EXPECT_EQ(c.Costs().Transfer(to_head, 2, true).latency_ns, 0);
}

// H = 2, one head of 2, E = 2 experts of De = 2, one layer, V = 257. Attention: norm1 2, qkv (1 + 2) 2 x 2 = 12, out 4,
// router 4, embedding 514; shared with the experts: norm2 2. Experts: 2 x (2*2*2 + 2*2) = 24; head: 2 + 514.
TEST(ProfileCosts, ElementsAndSums) {
  RunConfig config;
  config.model.hidden_size = config.model.head_dim = 2;
  config.model.num_hidden_layers = config.model.num_attention_heads = config.model.num_key_value_heads = 1;
  config.model.num_experts = config.model.num_experts_per_tok = config.model.moe_intermediate_size = 2;
  std::vector<StepEndWork> work = StepEndWorkOf(config, ScheduleOf(config, 4, true));
  ASSERT_EQ(work.size(), 2u);
  EXPECT_EQ(work[0].elements, 536 + 2);
  EXPECT_EQ(work[1].elements, 24 + 516 + 2);
  // norm2's two floats are in the last of the two parts: rank 0 sends them, rank 1 sends their sum back.
  EXPECT_EQ(work[0].sent_bytes, 8);
  EXPECT_EQ(work[1].sent_bytes, 8);
  config.layout.n = 2;
  config.layout.expert_counts = {{0, 2}};
  work = StepEndWorkOf(config, ScheduleOf(config, 4, true));
  EXPECT_EQ(work[1].elements, 516 + 2);
  EXPECT_EQ(work[2].elements, 24 + 516 + 2);
  // Two replicas: of two holders each sends the other's part and then its own, so all elements once. norm2 has four
  // holders and is in the part of the last, which sends its sum to three.
  config.layout.n = 1;
  config.layout.expert_counts = {};
  config.layout.replicas = 2;
  work = StepEndWorkOf(config, ScheduleOf(config, 2, true));
  ASSERT_EQ(work.size(), 4u);
  for (int rank : {0, 2}) EXPECT_EQ(work[rank].elements, 536 + 2);
  for (int rank : {1, 3}) EXPECT_EQ(work[rank].elements, 24 + 516 + 2);
  EXPECT_EQ(work[0].sent_bytes, (536 + 2) * 4);
  EXPECT_EQ(work[1].sent_bytes, (24 + 516 + 2) * 4);
  EXPECT_EQ(work[3].sent_bytes, (24 + 516 + 3 * 2) * 4);
  // In parts of 16: 536 = 17 * 16 + 264, 516 = 16 * 16 + 260, 24 = 16 + 8.
  config.train.shard_optimizer = true;
  work = StepEndWorkOf(config, ScheduleOf(config, 2, true));
  EXPECT_EQ(work[0].elements, 17 * 16);
  EXPECT_EQ(work[1].elements, 16 * 16 + 16);
  EXPECT_EQ(work[2].elements, 264);
  EXPECT_EQ(work[3].elements, 260 + 8 + 2);
  // Experts are cut apart from all else, also where the same ranks hold both: 66 blocks over four are 16, 17, 16 and 17,
  // the last with 14 floats; 2 are 0, 1, 0 and 1, the last with 8.
  config.layout.replicas = 4;
  config.layout.colocated = true;
  work = StepEndWorkOf(config, ScheduleOf(config, 1, true));
  EXPECT_EQ(work[0].elements, 256);
  EXPECT_EQ(work[1].elements, 272 + 16);
  EXPECT_EQ(work[2].elements, 256);
  EXPECT_EQ(work[3].elements, 270 + 8);
  config.train.shard_optimizer = false;
  config.layout.replicas = 1;
  config.layout.m = 2;
  work = StepEndWorkOf(config, ScheduleOf(config, 4, true));
  // All but experts is shared: 1054 floats, cut at 33 * 16 = 528. Each sends the other's part, then its own.
  EXPECT_EQ(work[0].elements, 12 + 1054);
  EXPECT_EQ(work[0].sent_bytes, 1054 * 4);
  config.train.shard_optimizer = true;
  EXPECT_EQ(StepEndWorkOf(config, ScheduleOf(config, 4, true))[0].elements, 12 + 528);
}

// Everybody's end is the slowest's: sums, optimizer and report together.
TEST(ProfileCosts, StepEndsTogether) {
  const Case c(Config());
  const ProfileCosts costs = c.Costs();
  const StepEndCost a = costs.StepEnd(0), f = costs.StepEnd(1);
  EXPECT_LT(a.optimizer_ns, f.optimizer_ns);
  EXPECT_EQ(a.optimizer_ns + a.reduce_ns, f.optimizer_ns + f.reduce_ns);
  const std::vector<StepEndWork> work = StepEndWorkOf(c.config, c.schedule);
  EXPECT_EQ(f.optimizer_ns, work[1].elements);            // 1 ns an element
  EXPECT_EQ(f.reduce_ns, 500 + work[1].sent_bytes + 11);  // 1 ns a byte
}

TEST(ProfileCosts, AnotherModelIsRefused) {
  Case c(Config());
  c.profile.model.hidden_size = 128;
  EXPECT_EQ(
      c.Fault(),
      "the profile is of other runs (profile.json, hidden_size): got 128, expected 256 (the configuration's). Hint: "
      "disagmoe profile CONFIG.toml --out FILE makes one");
  Case limited(Config());
  limited.profile.model.swiglu_limit = 7;
  EXPECT_NE(limited.Fault().find("(profile.json, swiglu_limit): got 7.0, expected 0.0 "), std::string::npos) << limited.Fault();
  RunConfig config = Config();
  config.train.micro_batch_size = 5;
  EXPECT_NE(Case(config).Fault().find("1280 tokens a worker, expected at most 1024"), std::string::npos);
  config = Config();
  config.train.recompute = "layer";
  EXPECT_NE(Case(config).Fault().find("first_attention with recompute"), std::string::npos);
}

class ProfileFile : public ::testing::Test {
 protected:
  ProfileFile() : path_(::testing::TempDir() + "profile_test_" + std::to_string(getpid()) + ".json") {}
  ~ProfileFile() override { std::remove(path_.c_str()); }
  std::string Fault(const std::string& text) {
    std::ofstream(path_) << text;
    try {
      ReadProfile(path_);
    } catch (const Error& error) {
      return error.parts().what;
    }
    return "no error";
  }
  const std::string path_;
};

TEST_F(ProfileFile, ReadsWhatWasWritten) {
  const std::string text = ProfileJson(Made(Config()));
  std::ofstream(path_) << text;
  const Profile read = ReadProfile(path_);
  EXPECT_EQ(ProfileJson(read), text);
  EXPECT_EQ(read.stages.size(), 8u);
  EXPECT_EQ(read.stages[6].per_row, 1);
  EXPECT_EQ(read.model.hidden_size, 256);
}

TEST_F(ProfileFile, KeepsWhatLaterModelsHave) {
  Profile made = Made(Config());
  EXPECT_EQ(ProfileJson(made).find("swiglu_limit"), std::string::npos);  // as earlier files
  made.model.swiglu_limit = 7.5;
  made.model.n_group = 4;
  made.model.expert_bias = true;
  std::ofstream(path_) << ProfileJson(made);
  const ModelConfig read = ReadProfile(path_).model;
  EXPECT_EQ(read.swiglu_limit, 7.5);
  EXPECT_EQ(read.n_group, 4);
  EXPECT_TRUE(read.expert_bias);
  EXPECT_EQ(read.sliding_window, 0);
}

TEST_F(ProfileFile, RefusesWhatIsNone) {
  EXPECT_EQ(Fault("no json"), "not a profile");
  EXPECT_EQ(Fault("{}"), "not a profile of this version");
  std::string text = ProfileJson(Made(Config()));
  std::string unsorted = text;
  unsorted.replace(unsorted.find("1000,"), 5, "9000,");
  EXPECT_EQ(Fault(unsorted), "not a measured curve");
  EXPECT_EQ(Fault(text.replace(text.find("gap_ns"), 3, "cap")), "not a profile");
}

TraceEvent At(int rank, Stream stream, const std::string& name, int64_t begin, int64_t end, int64_t bytes = 0) {
  return {rank, stream, name, begin, end, 3, bytes, -1};
}

// Medians of each kind; of two runs the smaller. A wait between two computations is no gap.
TEST(ProfileBuilder, FromEvents) {
  RunConfig config = Config();
  config.model.num_hidden_layers = 1;
  config.train.micro_batches = 3;
  auto run = [&](int64_t t) {
    return std::vector<TraceEvent>{At(0, Stream::kForward, "F0.0", 0, 10 * t),
                                   At(0, Stream::kForward, "F0.1", 10 * t + 4, 24 * t),
                                   At(0, Stream::kForward, "F0.2", 24 * t + 6, 36 * t),
                                   At(0, Stream::kWait, "exposed", 36 * t, 40 * t),
                                   At(0, Stream::kReceive, "<B0.0", 30 * t, 39 * t, 1000),
                                   At(0, Stream::kBackward, "B0.0", 40 * t, 70 * t),
                                   At(1, Stream::kForward, "F1.0", 0, 50),
                                   At(1, Stream::kBackward, "B1.0", 60, 160),
                                   At(0, Stream::kStep, "reduce", 70 * t, 80 * t),
                                   At(1, Stream::kStep, "reduce", 20, 80 * t),
                                   At(0, Stream::kStep, "optimizer", 80 * t, 81 * t),
                                   At(1, Stream::kStep, "optimizer", 80 * t, 83 * t),
                                   At(0, Stream::kStep, "step", 0, 81 * t),
                                   At(1, Stream::kStep, "step", 0, 83 * t)};
  };
  ProfileBuilder builder(config);
  builder.Add(config, run(200));
  builder.Add(config, run(100));
  builder.Add(config, run(150));
  const Profile p = builder.Build();
  ASSERT_EQ(p.stages.size(), 2u);
  EXPECT_EQ(p.stages[0].kind, StageKind::kFirstAttention);
  EXPECT_EQ(p.stages[0].forward.x, (std::vector<int64_t>{256}));
  // 1000, 2400 - 1004, 3600 - 2406: the median is 1194
  EXPECT_EQ(p.stages[0].forward.ns, (std::vector<int64_t>{1194}));
  EXPECT_EQ(p.stages[0].backward.ns, (std::vector<int64_t>{3000}));
  EXPECT_EQ(p.stages[1].experts, 8);
  EXPECT_EQ(p.gap_ns, 6);  // of 4, 6 and 10 (F1.0 to B1.0)
  EXPECT_EQ(p.wake_ns, 100);
  EXPECT_EQ(p.message.ns, (std::vector<int64_t>{900}));
  // The last to come to the sums (rank 0) waits for nobody.
  EXPECT_EQ(p.sums.ns, (std::vector<int64_t>{1000}));
  const std::vector<StepEndWork> work = StepEndWorkOf(config, ScheduleOf(config, 3, true));
  EXPECT_EQ(p.optimizer.At(static_cast<double>(work[0].elements)), 100);
  EXPECT_EQ(p.optimizer.At(static_cast<double>(work[1].elements)), 300);
}

// Behind a NIC of 8 Gbit/s and 1 us, 1000 bytes take 1000 + 1000 ns; this one took 2300.
TEST(ProfileBuilder, LateNic) {
  RunConfig config = Config();
  config.transport.paced = true;
  config.transport.paced_gbps = 8;
  config.transport.paced_latency_us = 1;
  ProfileBuilder builder(config);
  builder.Add(config, {At(0, Stream::kReceive, "<F1.0", 100, 2400, 1000)});
  EXPECT_EQ(builder.Build().late_ns, 300);
  EXPECT_TRUE(builder.Build().paced_message.x.empty());
}

}  // namespace
}  // namespace disagmoe
