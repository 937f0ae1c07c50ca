// Schedules whose backward is split, on real tensors: they compute what the one-process reference computes, and what
// the same order with whole backwards computes, to the last bit.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "base/error.h"
#include "runtime/executor.h"
#include "runtime/layouts_for_tests.h"

namespace disagmoe {
namespace {

struct Split {
  const char* schedule;
  int p_a, p_f, m, n;
  const char* head = "ffn";
  const char* variant = "";
  void (*change)(RunConfig&) = [](RunConfig&) {};
  std::string name() const {
    std::string text = schedule;
    for (int count : {p_a, p_f, m, n}) text += "_" + std::to_string(count);
    std::erase(text, '-');
    return text + head + variant;
  }
};

RunConfig With(RunConfig c, const Split& s) {
  c.schedule.name = s.schedule;
  c.layout.p_a = s.p_a;
  c.layout.p_f = s.p_f;
  c.layout.m = s.m;
  c.layout.n = s.n;
  c.layout.head = s.head;
  c.layout.colocated = c.schedule.name != "af-pipe-zb";
  s.change(c);
  CheckConfig(c, "test");
  return c;
}

class SplitBackward : public testing::TestWithParam<Split> {};

TEST_P(SplitBackward, AgreesWithTheReference) {
  const RunConfig config = With(TinyRun(), GetParam());
  const Schedule schedule = ScheduleOf(config, config.train.micro_batches, true);
  ASSERT_TRUE(schedule.split_backward);
  ASSERT_EQ(schedule.name, GetParam().schedule);
  const bool bf16 = config.train.dtype == "bf16";
  ExpectSameTraining(TrainInproc(config), TrainReferenceForTest(config), bf16 ? 2e-3 : 1e-5, bf16 ? 4e-2 : 1e-4);
}

std::string NameOf(const testing::TestParamInfo<Split>& info) { return info.param.name(); }

// dualpipe-v: chunks of layers even and not (5 layers, 4 chunks), more micro-batches than it needs, an evaluation of 2.
INSTANTIATE_TEST_SUITE_P(
    Layouts, SplitBackward,
    testing::Values(Split{"af-pipe-zb", 1, 1, 1, 1}, Split{"af-pipe-zb", 1, 1, 3, 2}, Split{"af-pipe-zb", 2, 2, 1, 1},
                    Split{"af-pipe-zb", 2, 2, 2, 3}, Split{"af-pipe-zb", 3, 3, 1, 2}, Split{"af-pipe-zb", 1, 2, 1, 1},
                    Split{"af-pipe-zb", 2, 1, 1, 2}, Split{"af-pipe-zb", 3, 2, 2, 1}, Split{"af-pipe-zb", 1, 3, 1, 2},
                    Split{"af-pipe-zb", 2, 3, 1, 1, "attention"}, Split{"af-pipe-zb", 2, 2, 2, 2, "attention"},
                    Split{"megatron-overlap", 1, 1, 1, 1}, Split{"megatron-overlap", 1, 1, 3, 1},
                    Split{"megatron-overlap", 2, 1, 2, 1}, Split{"megatron-overlap", 3, 1, 1, 1},
                    Split{"megatron-overlap", 3, 1, 3, 1, "attention"}, Split{"dualpipe-v", 1, 1, 1, 1},
                    Split{"dualpipe-v", 1, 1, 2, 1}, Split{"dualpipe-v", 2, 1, 2, 1},
                    Split{"af-pipe-zb", 2, 2, 1, 1, "ffn", "latent_tied",
                          [](RunConfig& c) {
                            ModelConfig& m = c.model;
                            m.kv_lora_rank = 12;
                            m.q_lora_rank = 14;
                            m.qk_nope_head_dim = 10;
                            m.qk_rope_head_dim = 6;
                            m.v_head_dim = 8;
                            m.tie_word_embeddings = true;
                          }},
                    Split{"dualpipe-v", 2, 1, 1, 1, "ffn", "uneven",
                          [](RunConfig& c) {
                            c.model.num_hidden_layers = 5;
                            c.train.micro_batches = 7;
                          }},
                    Split{"dualpipe-v", 3, 1, 1, 1, "ffn", "deep",
                          [](RunConfig& c) {
                            c.model.num_hidden_layers = 6;
                            c.train.micro_batches = 6;
                          }}),
    NameOf);

void SharedDense(RunConfig& c) {
  c.model.n_shared_experts = 1;
  c.model.first_k_dense_replace = 1;
  c.model.router_aux_loss = "global";
}
void Recompute(RunConfig& c) {
  c.train.recompute = "layer";
  c.model.qk_norm = true;
  c.model.n_shared_experts = 1;
}
void Bf16(RunConfig& c) {
  c.train.dtype = "bf16";
  c.train.steps = 5;
  c.model.num_experts_per_tok = 7;  // rounding would flip a choice
}
void Sharded(RunConfig& c) { c.train.shard_optimizer = true; }
void OneSequence(RunConfig& c) { c.train.micro_batch_size = 1; }  // one of two slices is empty
void AllDense(RunConfig& c) { c.model.first_k_dense_replace = 4; }
void Paced(RunConfig& c) {
  c.transport.paced = true;
  c.transport.paced_gbps = 1;
  c.transport.paced_latency_us = 50;
}

INSTANTIATE_TEST_SUITE_P(
    Variants, SplitBackward,
    testing::Values(Split{"af-pipe-zb", 2, 1, 2, 3, "ffn", "shared_dense", SharedDense},
                    Split{"af-pipe-zb", 1, 1, 1, 1, "ffn", "shared_dense", SharedDense},
                    Split{"af-pipe-zb", 2, 2, 2, 3, "ffn", "recompute", Recompute},
                    Split{"af-pipe-zb", 2, 2, 2, 3, "ffn", "bf16", Bf16},
                    Split{"af-pipe-zb", 2, 1, 2, 2, "ffn", "sharded", Sharded},
                    Split{"af-pipe-zb", 2, 1, 2, 2, "ffn", "one_sequence", OneSequence},
                    Split{"af-pipe-zb", 2, 1, 1, 2, "ffn", "all_dense", AllDense},
                    Split{"af-pipe-zb", 2, 2, 1, 1, "ffn", "paced", Paced},
                    Split{"megatron-overlap", 2, 1, 2, 1, "ffn", "shared_dense", SharedDense},
                    Split{"megatron-overlap", 2, 1, 1, 1, "ffn", "recompute", Recompute},
                    Split{"megatron-overlap", 2, 1, 1, 1, "ffn", "bf16", Bf16},
                    Split{"dualpipe-v", 2, 1, 2, 1, "ffn", "shared_dense", SharedDense},
                    Split{"dualpipe-v", 2, 1, 1, 1, "ffn", "recompute", Recompute},
                    Split{"dualpipe-v", 2, 1, 1, 1, "ffn", "bf16", Bf16}),
    NameOf);

TEST(SplitBackward, SameSeedSameLayoutSameBits) {
  for (const Split& split :
       {Split{"af-pipe-zb", 2, 1, 2, 3}, Split{"megatron-overlap", 2, 1, 2, 1}, Split{"dualpipe-v", 2, 1, 2, 1}}) {
    RunConfig config = With(TinyRun(), split);
    config.train.steps = 5;
    const TestRun a = TrainInproc(config), b = TrainInproc(config);
    for (size_t i = 0; i < a.result.steps.size(); ++i) {
      EXPECT_EQ(a.result.steps[i].loss, b.result.steps[i].loss);
      EXPECT_EQ(a.result.steps[i].grad_norm, b.result.steps[i].grad_norm);
    }
    for (const auto& [name, grad] : a.gradients) EXPECT_TRUE(at::equal(grad, b.gradients.at(name))) << name;
  }
}

// One worker holds everything and runs `schedule` once: the gradients.
at::Tensor RunAlone(const RunConfig& config, const Schedule& schedule) {
  c10::NoGradGuard no_grad;
  const Corpus data(config.data.path, config.data.blend);
  const Batches batches = BatchesOf(config, data);
  const Topology topology(config, schedule);
  ParamStore store(topology.held(0).params, at::kFloat, at::kCPU);
  store.Initialise(7);
  Status status;
  Waits waits(0, {0}, 1'000'000'000, status);
  Executor executor(config, topology, store, batches, nullptr, 0, at::kCPU, waits, status);
  executor.Run(schedule, {.id = 1, .step = 1});
  return store.flat_grad().clone();
}

class Alone : public testing::Test {
 protected:
  Alone() {
    Recompute(config_);
    schedule_ = ScheduleOf(config_, 4, true);
  }
  std::vector<Op>& order() { return schedule_.groups[0].compute; }
  size_t Find(const Op& op) { return std::find(order().begin(), order().end(), op) - order().begin(); }
  std::string Fault() {
    try {
      RunAlone(config_, schedule_);
    } catch (const InternalError& e) {
      return e.what();
    }
    return "no error";
  }

  RunConfig config_ = With(TinyRun(), {"megatron-overlap", 1, 1, 1, 1});
  Schedule schedule_;
};

// Each W follows its B here. Without W, and with all W at the end: the same terms of each sum in the same order.
TEST_F(Alone, WholeApartAndLastGiveTheSameBits) {
  const at::Tensor apart = RunAlone(config_, schedule_);
  EXPECT_GT(apart.norm().item<double>(), 0.1);
  const Schedule split = schedule_;
  std::stable_partition(order().begin(), order().end(), [](const Op& op) { return op.kind != OpKind::kWeight; });
  ASSERT_NE(order(), split.groups[0].compute);
  EXPECT_TRUE(at::equal(RunAlone(config_, schedule_), apart));
  schedule_ = split;
  std::erase_if(order(), [](const Op& op) { return op.kind == OpKind::kWeight; });
  schedule_.split_backward = false;
  EXPECT_TRUE(at::equal(RunAlone(config_, schedule_), apart));
}

TEST_F(Alone, SkippedRepeatedAndEarlyWeightsAreFound) {
  const Schedule good = schedule_;
  for (int stage : {0, 3, 8}) {
    const Op w{OpKind::kWeight, stage, 2};
    order().erase(order().begin() + Find(w));
    EXPECT_NE(Fault().find("a pass left something behind"), std::string::npos) << stage;
    schedule_ = good;
    order().insert(order().begin() + Find(w), w);
    EXPECT_NE(Fault().find("weight gradients without their backward"), std::string::npos) << stage;
    schedule_ = good;
    order().insert(order().begin(), w);
    EXPECT_NE(Fault().find("weight gradients without their backward"), std::string::npos) << stage;
    schedule_ = good;
  }
}

TEST_F(Alone, PartsAreRefused) {
  schedule_.stage_parts.assign(9, 2);
  EXPECT_NE(Fault().find("whole stages and one route"), std::string::npos);
}

}  // namespace
}  // namespace disagmoe
