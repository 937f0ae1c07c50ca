// Chunks of layers, replicas and uneven experts compute what the one-process reference computes. Ranks are threads here
// (e2e_test.py: processes over UCX).
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include "runtime/executor.h"
#include "runtime/layouts_for_tests.h"
#include "spec/layout.h"

namespace disagmoe {
namespace {

struct Case {
  const char* name;
  void (*change)(RunConfig&);
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// 4 layers, 7 experts, 4 micro-batches of 3 sequences; an evaluation of 2.
class LayoutKeys : public testing::TestWithParam<Case> {};

TEST_P(LayoutKeys, AgreeWithTheReference) {
  RunConfig config = TinyRun();
  config.train.steps = 10;
  GetParam().change(config);
  CheckConfig(config, "test");
  ExpectSameTraining(TrainInproc(config), TrainReferenceForTest(config));
}

std::string NameOf(const testing::TestParamInfo<Case>& info) { return info.param.name; }

void Pools(RunConfig& c, int p_a, int p_f, int m, int n) {
  c.layout.p_a = p_a;
  c.layout.p_f = p_f;
  c.layout.m = m;
  c.layout.n = n;
}

void Colocated(RunConfig& c, int groups, int workers, int virtual_stages = 0, const char* schedule = "auto") {
  c.layout.colocated = true;
  c.layout.p_a = groups;
  c.layout.m = workers;
  c.layout.virtual_stages = virtual_stages;
  c.schedule.name = schedule;
}

// A worker without any, and one without in some layers.
const std::vector<std::vector<int64_t>> kThree = {{3, 0, 4}, {0, 7, 0}, {2, 2, 3}, {1, 0, 6}};

INSTANTIATE_TEST_SUITE_P(
    VirtualStages, LayoutKeys,
    testing::Values(Case{"one_of_two_groups", [](RunConfig& c) { Colocated(c, 2, 1, 1); }},
                    Case{"two_of_two_groups", [](RunConfig& c) { Colocated(c, 2, 2, 2); }},
                    Case{"alone", [](RunConfig& c) { Colocated(c, 1, 2, 2); }},
                    Case{"uneven",
                         [](RunConfig& c) {
                           Colocated(c, 3, 1, 2);
                           c.model.num_hidden_layers = 7;
                           c.train.micro_batches = 8;
                         }},
                    Case{"overlap",
                         [](RunConfig& c) {
                           Colocated(c, 2, 2, 1, "megatron-overlap");
                           c.train.micro_batches = 8;
                         }},
                    Case{"overlap_uneven",
                         [](RunConfig& c) {
                           Colocated(c, 2, 1, 2, "megatron-overlap");
                           c.model.num_hidden_layers = 5;
                           c.model.router_aux_loss = "global";
                         }},
                    Case{"recompute",
                         [](RunConfig& c) {
                           Colocated(c, 2, 1, 1);
                           c.train.recompute = "layer";
                         }}),
    NameOf);

INSTANTIATE_TEST_SUITE_P(
    ExpertCounts, LayoutKeys,
    testing::Values(Case{"for_all_layers",
                         [](RunConfig& c) {
                           Pools(c, 1, 1, 2, 3);
                           c.layout.expert_counts = {{1, 4, 2}};
                         }},
                    Case{"none_on_one",
                         [](RunConfig& c) {
                           Pools(c, 2, 2, 1, 2);
                           c.layout.expert_counts = {{0, 7}};
                         }},
                    Case{"by_layer",
                         [](RunConfig& c) {
                           Pools(c, 1, 2, 2, 3);
                           c.layout.expert_counts = kThree;
                         }},
                    Case{"by_layer_global_sharded",
                         [](RunConfig& c) {
                           Pools(c, 2, 1, 1, 3);
                           c.layout.expert_counts = kThree;
                           c.model.router_aux_loss = "global";
                           c.train.shard_optimizer = true;
                         }},
                    Case{"by_layer_dense_shared_recompute",
                         [](RunConfig& c) {
                           Pools(c, 2, 2, 2, 3);
                           c.layout.expert_counts = kThree;
                           c.model.first_k_dense_replace = 1;
                           c.model.n_shared_experts = 1;
                           c.train.recompute = "layer";
                         }},
                    Case{"by_layer_colocated_overlap",
                         [](RunConfig& c) {
                           Colocated(c, 2, 3, 1, "megatron-overlap");
                           c.layout.expert_counts = kThree;
                         }},
                    Case{"by_layer_zb",
                         [](RunConfig& c) {
                           Pools(c, 2, 1, 2, 3);
                           c.schedule.name = "af-pipe-zb";
                           c.layout.expert_counts = kThree;
                         }}),
    NameOf);

INSTANTIATE_TEST_SUITE_P(
    Replicas, LayoutKeys,
    testing::Values(Case{"of_two_workers", [](RunConfig& c) { c.layout.replicas = 2; }},
                    Case{"of_two_pools",
                         [](RunConfig& c) {
                           Pools(c, 2, 2, 2, 3);
                           c.layout.replicas = 2;
                         }},
                    Case{"of_one_micro_batch_each",
                         [](RunConfig& c) {
                           Pools(c, 2, 1, 1, 2);
                           c.layout.replicas = 4;  // two have nothing to evaluate
                         }},
                    Case{"of_one_worker",
                         [](RunConfig& c) {
                           Colocated(c, 1, 1);
                           c.layout.replicas = 4;
                         }},
                    Case{"sharded_global",
                         [](RunConfig& c) {
                           Pools(c, 1, 2, 2, 2);
                           c.layout.replicas = 2;
                           c.train.shard_optimizer = true;
                           c.train.eval_micro_batches = 3;  // 1 and 2
                           c.model.router_aux_loss = "global";
                         }},
                    Case{"rounds",
                         [](RunConfig& c) {
                           Pools(c, 1, 1, 1, 2);
                           c.layout.replicas = 3;
                           c.train.micro_batches = 12;
                           c.schedule.round = 2;
                         }},
                    Case{"zb_shared_dense",
                         [](RunConfig& c) {
                           Pools(c, 2, 1, 1, 2);
                           c.layout.replicas = 2;
                           c.schedule.name = "af-pipe-zb";
                           c.model.n_shared_experts = 1;
                           c.model.first_k_dense_replace = 1;
                         }},
                    Case{"colocated_sharded",
                         [](RunConfig& c) {
                           Colocated(c, 2, 2);
                           c.layout.replicas = 2;
                           c.train.shard_optimizer = true;
                         }},
                    Case{"dualpipe_v",
                         [](RunConfig& c) {
                           Colocated(c, 2, 1, 0, "dualpipe-v");
                           c.layout.replicas = 2;
                           c.train.micro_batches = 8;
                         }},
                    Case{"chunks",
                         [](RunConfig& c) {
                           Colocated(c, 2, 1, 1, "megatron-overlap");
                           c.layout.replicas = 2;
                           c.train.micro_batches = 8;
                         }},
                    Case{"paced",
                         [](RunConfig& c) {
                           c.layout.replicas = 2;
                           c.transport.paced = true;
                           c.transport.paced_gbps = 1;
                         }},
                    Case{"experts_by_layer",
                         [](RunConfig& c) {
                           Pools(c, 2, 2, 1, 3);
                           c.layout.replicas = 2;
                           c.layout.expert_counts = kThree;
                           c.train.shard_optimizer = true;
                         }},
                    Case{"everything",
                         [](RunConfig& c) {
                           Colocated(c, 2, 3, 1, "megatron-overlap");
                           c.layout.replicas = 2;
                           c.layout.expert_counts = kThree;
                           c.model.router_aux_loss = "global";
                           c.model.first_k_dense_replace = 1;
                           c.train.shard_optimizer = true;
                           c.train.recompute = "layer";
                         }}),
    NameOf);

// Numbers do not tell where an expert is: who holds which, and with whom it is summed. Ranks 0, 1 are A, 2 to 4 are F0,
// 5 to 7 F1; the second replica's from 8 on.
TEST(ExpertCounts, AreHeld) {
  RunConfig config = TinyRun();
  Pools(config, 2, 2, 1, 3);
  config.layout.expert_counts = kThree;
  config.layout.replicas = 2;
  const Topology topology(config, TrainingSchedule(config));
  for (int rank = 0; rank < 16; ++rank) {
    const Topology::Held held = topology.held(rank);
    const int place = rank % 8, group = (place - 2) / 3, worker = (place - 2) % 3;
    int experts = 0;
    for (const HeldParam& p : held.params) {
      if (!p.spec.per_expert) continue;
      ++experts;
      const int layer = p.spec.stage / 2;
      ASSERT_EQ(layer % 2, group);
      int64_t first = 0;
      for (int i = 0; i < worker; ++i) first += kThree[layer][i];
      EXPECT_EQ(p.first, first);
      EXPECT_EQ(p.count, kThree[layer][worker]);
    }
    EXPECT_EQ(experts, place < 2 ? 0 : 4);  // two matrices in two layers
    if (place < 2) continue;
    EXPECT_EQ(held.buckets.back().ranks, (std::vector<int>{place, place + 8}));
    EXPECT_EQ(held.params[held.buckets.back().begin].spec.per_expert, true);
  }
}

// Replica 1 alone, its two micro-batches of four: the gradients that the others do not have, and which were bad.
TEST(Replicas, ExecuteTheirShare) {
  c10::NoGradGuard no_grad;
  RunConfig config = TinyRun();
  Colocated(config, 1, 1);
  const Corpus data(config.data.path, config.data.blend);
  const Batches batches = BatchesOf(config, data);
  Status status;
  const auto run = [&](int replicas, int rank, const PassSpec& pass, bool poison) {
    RunConfig c = config;
    c.layout.replicas = replicas;
    const Schedule schedule = TrainingSchedule(c);
    const Topology topology(c, schedule);
    ParamStore store(topology.held(rank).params, at::kFloat, at::kCPU);
    store.Initialise(7);
    if (poison) store.Get("embed").master.fill_(NAN);
    Waits waits(rank, {0, 0}, 1'000'000'000, status);
    Executor executor(c, topology, store, batches, nullptr, rank, at::kCPU, waits, status);
    const PassResult result = executor.Run(schedule, pass);
    return std::pair(store.flat_grad().clone(), result.bad);
  };
  const at::Tensor whole = run(1, 0, {.id = 1}, false).first;
  const at::Tensor second = run(2, 1, {.id = 1, .first_micro_batch = 2}, false).first;
  const at::Tensor first = run(2, 0, {.id = 1}, false).first;
  EXPECT_LE((first + second - whole).norm().item<double>(), 1e-5 * whole.norm().item<double>());
  EXPECT_EQ(run(2, 1, {.id = 1, .first_micro_batch = 2}, true).second, BadKey(2, -1, 4));
}

TEST(Replicas, SameSeedSameLayoutSameBits) {
  RunConfig config = TinyRun();
  Pools(config, 2, 1, 1, 2);
  config.layout.replicas = 2;
  config.train.steps = 5;
  const TestRun a = TrainInproc(config), b = TrainInproc(config);
  for (size_t i = 0; i < a.result.steps.size(); ++i) {
    EXPECT_EQ(a.result.steps[i].loss, b.result.steps[i].loss);
    EXPECT_EQ(a.result.steps[i].grad_norm, b.result.steps[i].grad_norm);
  }
  ASSERT_EQ(a.result.steps[0].workers.size(), 8u);
  EXPECT_EQ(a.result.steps[0].workers[0].name, "A0.0");
  EXPECT_EQ(a.result.steps[0].workers[7].name, "r1.F0.1");
}

}  // namespace
}  // namespace disagmoe
