// Chunks of layers, replicas and uneven experts compute what the one-process reference computes. Ranks are threads here
// (e2e_test.py: processes over UCX).
#include <gtest/gtest.h>

#include "runtime/layouts_for_tests.h"

namespace disagmoe {
namespace {

struct Case {
  const char* name;
  void (*change)(RunConfig&);
};

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
