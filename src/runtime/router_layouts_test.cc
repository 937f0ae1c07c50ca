// Routers with sigmoids, groups, biases and corrections, experts with biases, a gated shared expert, a dense layer in the
// middle: every layout computes what the reference computes, and the loads and corrections are the same to the last bit.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "runtime/layouts_for_tests.h"

namespace disagmoe {
namespace {

struct Case {
  const char* name;
  void (*change)(RunConfig&);
};

RunConfig ConfigOf(const Case& which) {
  RunConfig c = TinyRun();
  ModelConfig& m = c.model;
  m.num_experts = 8;
  m.num_experts_per_tok = 3;
  m.scoring_func = "sigmoid";
  m.topk_method = "noaux_tc";
  m.n_group = 4;
  m.topk_group = 2;
  m.routed_scaling_factor = 2.5;
  m.router_bias_update_rate = 0.01;
  m.router_bias = m.expert_bias = m.shared_expert_gate = true;
  m.swiglu_limit = 1;
  m.shared_expert_intermediate_size = 20;
  m.mlp_only_layers = {2};
  c.train.steps = 6;
  c.layout.p_a = c.layout.p_f = c.layout.m = 2;
  c.layout.n = 3;
  which.change(c);
  CheckConfig(c, "test");
  return c;
}

// What starts at zero, by its place in the whole parameter.
void Biases(ParamStore& store) {
  for (const auto& p : store.held()) {
    if (p.spec.init_std != 0 || p.spec.norm_weight) continue;
    at::Tensor w = store.Get(p.spec.name).master;
    const int64_t each = p.spec.per_expert ? p.spec.shape[1] : 0;
    const at::Tensor place = at::arange(w.numel()) + p.first * each;
    w.copy_(((place * 37 + static_cast<int64_t>(p.spec.name.size())) % 19 - 9).to(at::kFloat).mul(0.02).view(w.sizes()));
  }
  store.Refresh(0, store.numel());
}

class RouterLayouts : public testing::TestWithParam<Case> {};

TEST_P(RouterLayouts, AgreeWithTheReference) {
  const RunConfig config = ConfigOf(GetParam());
  const TestRun got = TrainInproc(config, Biases), want = TrainReferenceForTest(config, Biases);
  ExpectSameTraining(got, want);
  ASSERT_EQ(want.corrections.size(), 3u);
  ASSERT_EQ(got.corrections.size(), 3u);
  const double pairs = static_cast<double>(4 * 3 * 24 * 3);
  for (const auto& [name, correction] : want.corrections) {
    EXPECT_TRUE(at::equal(got.corrections.at(name), correction)) << name;
    EXPECT_TRUE(at::equal(got.gradients.at(name), want.gradients.at(name))) << name;  // the loads
    EXPECT_EQ(want.gradients.at(name).sum().item<double>(), pairs) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, RouterLayouts,
    testing::Values(Case{"pools", [](RunConfig&) {}},
                    Case{"alone", [](RunConfig& c) { c.layout.p_a = c.layout.p_f = c.layout.m = c.layout.n = 1; }},
                    Case{"uneven",
                         [](RunConfig& c) {
                           c.layout.p_f = 1;
                           c.layout.m = 3;
                           c.layout.expert_counts = {{5, 0, 3}};
                         }},
                    Case{"recompute",
                         [](RunConfig& c) {
                           c.train.recompute = "layer";
                           c.model.router_aux_loss = "global";
                         }},
                    Case{"sharded", [](RunConfig& c) { c.train.shard_optimizer = true; }},
                    Case{"replicas",
                         [](RunConfig& c) {
                           c.layout.replicas = 2;
                           c.layout.n = 1;
                           c.train.shard_optimizer = true;
                         }},
                    Case{"split", [](RunConfig& c) { c.schedule.name = "af-pipe-zb"; }},
                    Case{"colocated_split",
                         [](RunConfig& c) {
                           c.layout.colocated = true;
                           c.layout.p_f = c.layout.n = 1;
                           c.schedule.name = "megatron-overlap";
                         }}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace disagmoe
