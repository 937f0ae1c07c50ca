// The correction of a router moves by loads, next to parameters that AdamW moves by gradients.
#include "layers/optimizer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace disagmoe {
namespace {

// 2 micro-batches of 2 sequences of 5 tokens, 3 of 4 experts a token: 60 pairs in a step, 15 an expert.
struct TinyStep {
  TinyStep() {
    config.model.topk_method = "noaux_tc";
    config.model.num_experts = 4;
    config.model.num_experts_per_tok = 3;
    config.model.hidden_size = 8;
    config.model.moe_intermediate_size = 8;
    config.model.router_bias_update_rate = 0.25;
    config.train.micro_batches = 2;
    config.train.micro_batch_size = 2;
    config.train.seq_length = 5;
    config.train.weight_decay = 0.5;
  }
  RunConfig config;
};

at::Tensor Floats(std::vector<float> values) { return at::tensor(values); }

TEST(Correction, MovesByTheSignOfMeanLessLoad) {
  TinyStep run;
  ParamStore store(HoldAll(run.config.model), at::kFloat, at::kCPU);
  AdamW adam(store, {{0, store.numel()}}, run.config.train, &run.config.model);
  const Param& first = store.Get("layers.0.router_correction");
  const Param& second = store.Get("layers.1.router_correction");
  first.grad.copy_(Floats({15, 14, 16, 15}));  // the mean is 15
  second.grad.copy_(Floats({0, 60, 0, 0}));
  adam.Step(1, 1e-3, /*coefficient=*/0.1);  // clipping does not touch it
  EXPECT_TRUE(at::equal(first.master, Floats({0, 0.25, -0.25, 0})));
  EXPECT_TRUE(at::equal(second.master, Floats({0.25, -0.25, 0.25, 0.25})));
  store.ZeroGrad();
  first.grad.copy_(Floats({16, 14, 16, 14}));
  adam.Step(2, 1e-3, 1);
  EXPECT_TRUE(at::equal(first.master, Floats({-0.25, 0.5, -0.5, 0.25})));  // and no decay
  for (const char* name : {"layers.0.norm2", "layers.0.router", "layers.0.experts.gate_up"}) {
    EXPECT_FALSE(store.Get(name).master.any().item<bool>()) << name;
  }
}

// 16 tokens over 3 experts: no load is the mean of 16 / 3, though 5.3333335f could be rounded to.
TEST(Correction, MeansThatAreNoWholeNumbers) {
  TinyStep run;
  run.config.model.num_experts = 3;
  run.config.model.num_experts_per_tok = 1;
  run.config.train.micro_batches = 1;
  run.config.train.seq_length = 8;
  ParamStore store(HoldAll(run.config.model), at::kFloat, at::kCPU);
  AdamW adam(store, {{0, store.numel()}}, run.config.train, &run.config.model);
  const Param& c = store.Get("layers.0.router_correction");
  c.grad.copy_(Floats({5, 6, 5}));
  adam.Step(1, 1e-3, 1);
  EXPECT_TRUE(at::equal(c.master, Floats({0.25, -0.25, 0.25})));
}

// Owners of any part update that part alone, and what is between parameters stays zero.
TEST(Correction, EveryOwnerUpdatesItsPart) {
  TinyStep run;
  run.config.model.initializer_range = 0.1;
  const auto fill = [](ParamStore& store) {
    store.Initialise(3);
    store.flat_grad().copy_(at::arange(store.numel()) % 31);
  };
  ParamStore whole(HoldAll(run.config.model), at::kFloat, at::kCPU);
  fill(whole);
  AdamW(whole, {{0, whole.numel()}}, run.config.train, &run.config.model).Step(1, 1e-3, 0.5);
  size_t at = 0;
  while (!whole.held()[at].spec.counts_load) ++at;
  const int64_t correction = whole.offset(at);
  for (const int64_t cut : {correction - 1, correction, correction + 1, correction + 3, correction + 4, correction + 9}) {
    ParamStore store(HoldAll(run.config.model), at::kFloat, at::kCPU);
    fill(store);
    AdamW(store, {{0, cut}}, run.config.train, &run.config.model).Step(1, 1e-3, 0.5);
    AdamW(store, {{cut, store.numel()}}, run.config.train, &run.config.model).Step(1, 1e-3, 0.5);
    EXPECT_TRUE(at::allclose(store.flat_master(), whole.flat_master(), 1e-6, 1e-7)) << cut;
    const auto part = [&](const ParamStore& s) { return s.flat_master().narrow(0, correction, 16); };
    EXPECT_TRUE(at::equal(part(store), part(whole))) << cut;
  }
  EXPECT_TRUE(whole.flat_master().narrow(0, correction, 4).any().item<bool>());
  EXPECT_FALSE(whole.flat_master().narrow(0, correction + 4, 12).any().item<bool>());
}

TEST(Correction, LoadsAreNoPartOfTheNorm) {
  TinyStep run;
  ParamStore store(HoldAll(run.config.model), at::kFloat, at::kCPU);
  store.flat_grad().copy_(at::arange(store.numel()) % 5);
  at::Tensor others = store.flat_grad().clone();
  std::vector<int64_t> edges = {0, 7, store.numel()};
  for (size_t i = 0; i < store.held().size(); ++i) {
    if (!store.held()[i].spec.counts_load) continue;
    others.narrow(0, store.offset(i), store.offset(i + 1) - store.offset(i)).zero_();
    for (int64_t d : {-1, 0, 1, 4, 15, 16, 17}) edges.push_back(store.offset(i) + d);
  }
  for (int64_t begin : edges) {
    for (int64_t end : edges) {
      if (begin > end) continue;
      EXPECT_DOUBLE_EQ(GradSquares(store, {begin, end}), SumOfSquares(others.narrow(0, begin, end - begin)))
          << begin << " " << end;
    }
  }
  ModelConfig plain = run.config.model;
  plain.topk_method = "greedy";
  ParamStore none(HoldAll(plain), at::kFloat, at::kCPU);
  none.flat_grad().copy_(at::arange(none.numel()) % 5);
  EXPECT_EQ(GradSquares(none, {3, none.numel()}), SumOfSquares(none.flat_grad().narrow(0, 3, none.numel() - 3)));
}

}  // namespace
}  // namespace disagmoe
