// Every layout computes what the one-process reference computes: loss, gradients, gradient norm, auxiliary loss. Ranks
// are threads here (e2e_test.py: processes over UCX).
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "runtime/layouts_for_tests.h"

namespace disagmoe {
namespace {

struct Layout {
  int p_a, p_f, m, n;
  bool colocated = false;
  const char* head = "ffn";
  std::string name() const {
    return std::string(colocated ? "colocated" : "a") + std::to_string(p_a) + "f" + std::to_string(p_f) + "m" + std::to_string(m) + "n" +
           std::to_string(n) + head;
  }
};

RunConfig With(RunConfig c, const Layout& l) {
  c.layout.p_a = l.p_a;
  c.layout.p_f = l.p_f;
  c.layout.m = l.m;
  c.layout.n = l.n;
  c.layout.colocated = l.colocated;
  c.layout.head = l.head;
  return c;
}

class Layouts : public testing::TestWithParam<Layout> {};

TEST_P(Layouts, AgreeWithTheReference) {
  RunConfig config = With(TinyRun(), GetParam());
  ExpectSameTraining(TrainInproc(config), TrainReferenceForTest(config));
}

INSTANTIATE_TEST_SUITE_P(
    Matrix, Layouts,
    testing::Values(Layout{1, 1, 1, 1}, Layout{1, 1, 2, 1}, Layout{1, 1, 1, 2}, Layout{1, 1, 3, 4}, Layout{1, 1, 4, 3}, Layout{2, 2, 1, 1},
                    Layout{2, 2, 2, 3}, Layout{3, 3, 1, 1}, Layout{3, 3, 2, 2}, Layout{1, 2, 1, 1}, Layout{2, 1, 1, 2}, Layout{3, 1, 2, 1},
                    Layout{1, 3, 1, 2}, Layout{2, 3, 2, 1}, Layout{3, 2, 1, 3}, Layout{1, 1, 1, 1, false, "attention"},
                    Layout{2, 2, 2, 2, false, "attention"}, Layout{3, 2, 2, 1, false, "attention"}, Layout{1, 1, 1, 1, true},
                    Layout{1, 1, 3, 1, true}, Layout{2, 1, 2, 1, true}, Layout{3, 1, 3, 1, true}, Layout{3, 3, 4, 4}),
    [](const auto& info) { return info.param.name(); });

// Documents apart, from a blend: the step's loss is divided by the same number of labels in every layout.
class PackedLayouts : public testing::TestWithParam<Layout> {};

TEST_P(PackedLayouts, AgreeWithTheReference) {
  const RunConfig config = With(TinyPackedRun(), GetParam());
  const TestRun want = TrainReferenceForTest(config);
  ExpectSameTraining(TrainInproc(config), want);
  RunConfig joined = config;
  joined.data.documents = "join";
  EXPECT_GT(std::abs(TrainReferenceForTest(joined).result.steps[0].loss / want.result.steps[0].loss - 1), 1e-4);
}

// The head's shares cut sequences; attention's do not.
INSTANTIATE_TEST_SUITE_P(Matrix, PackedLayouts,
                         testing::Values(Layout{1, 1, 1, 1}, Layout{1, 1, 2, 5}, Layout{2, 2, 2, 3}, Layout{3, 2, 1, 2, false, "attention"},
                                         Layout{2, 1, 2, 1, true}),
                         [](const auto& info) { return info.param.name(); });

TEST(PackedRuns, ReplicasRecomputationAndSplitBackwardsAgreeWithTheReference) {
  RunConfig config = With(TinyPackedRun(), {2, 2, 1, 2});
  config.layout.replicas = 2;
  config.train.recompute = "layer";
  config.schedule.name = "af-pipe-zb";
  ExpectSameTraining(TrainInproc(config), TrainReferenceForTest(config));
}

struct Variant {
  std::string name;
  void (*change)(RunConfig&);
};
void Latent(RunConfig& c) {
  ModelConfig& m = c.model;
  m.kv_lora_rank = 12;
  m.qk_nope_head_dim = 10;
  m.qk_rope_head_dim = 6;
  m.v_head_dim = 8;
}

class Variants : public testing::TestWithParam<Variant> {};

TEST_P(Variants, AgreeWithTheReference) {
  RunConfig config = With(TinyRun(), {2, 2, 2, 3});
  GetParam().change(config);
  ExpectSameTraining(TrainInproc(config), TrainReferenceForTest(config), config.train.dtype == "bf16" ? 2e-3 : 1e-5,
                     config.train.dtype == "bf16" ? 4e-2 : 1e-4);
}

INSTANTIATE_TEST_SUITE_P(
    Matrix, Variants,
    testing::Values(Variant{"global_aux", [](RunConfig& c) { c.model.router_aux_loss = "global"; }},
                    Variant{"no_aux", [](RunConfig& c) { c.model.router_aux_loss = "none"; }},
                    Variant{"recompute", [](RunConfig& c) { c.train.recompute = "layer"; }},
                    Variant{"sharded", [](RunConfig& c) { c.train.shard_optimizer = true; }},
                    Variant{"qk_norm", [](RunConfig& c) { c.model.qk_norm = true; }},
                    Variant{"no_renorm", [](RunConfig& c) { c.model.norm_topk_prob = false; }},
                    Variant{"shared_dense",
                            [](RunConfig& c) {
                              c.model.n_shared_experts = 1;
                              c.model.first_k_dense_replace = 1;
                              c.model.router_aux_loss = "global";
                            }},
                    Variant{"bf16",
                            [](RunConfig& c) {
                              c.train.dtype = "bf16";
                              c.train.steps = 5;
                              c.model.num_experts_per_tok = 7;  // rounding would flip a choice
                            }},
                    Variant{"one_sequence",  // one of two slices is empty
                            [](RunConfig& c) {
                              c.train.micro_batch_size = 1;
                              c.model.qk_norm = true;
                              c.model.router_aux_loss = "global";
                            }},
                    Variant{"gpt_oss_attention",
                            [](RunConfig& c) {
                              ModelConfig& m = c.model;
                              m.attention_bias = m.output_bias = m.attention_sinks = true;
                              m.sliding_window = 7;
                              m.layer_types = {"sliding_attention", "full_attention", "sliding_attention", "full_attention"};
                            }},
                    Variant{"latent", Latent},
                    Variant{"latent_narrow_queries_recompute",
                            [](RunConfig& c) {
                              Latent(c);
                              c.model.q_lora_rank = 14;
                              c.train.recompute = "layer";
                            }},
                    Variant{"tied", [](RunConfig& c) { c.model.tie_word_embeddings = true; }},
                    Variant{"tied_sharded",
                            [](RunConfig& c) {
                              c.model.tie_word_embeddings = true;
                              c.train.shard_optimizer = true;
                              c.layout.head = "attention";
                            }},
                    Variant{"tied_on_one_worker",  // which adds both gradients itself
                            [](RunConfig& c) {
                              c.model.tie_word_embeddings = true;
                              c.layout = {};
                              c.layout.colocated = true;
                            }},
                    Variant{"all_dense", [](RunConfig& c) { c.model.first_k_dense_replace = 4; }},
                    Variant{"one_micro_batch", [](RunConfig& c) { c.train.micro_batches = 1; }},
                    Variant{"odd_micro_batches", [](RunConfig& c) { c.train.micro_batches = 5; }},
                    Variant{"fewer_experts_than_workers",
                            [](RunConfig& c) {
                              c.model.num_experts = 2;
                              c.model.num_experts_per_tok = 1;
                            }},
                    Variant{"paced",
                            [](RunConfig& c) {
                              c.transport.paced = true;
                              c.transport.paced_gbps = 1;
                              c.transport.paced_latency_us = 50;
                            }}),
    [](const auto& info) { return info.param.name; });

// Logits that differ by a few millionths. Where one worker holds all experts sums are taken in the reference's order, so
// every choice is the same. Several workers' parts are added in another order: the inputs of the next router differ in the
// last bit, a few tokens in a thousand fall to the other side, and the loss moves by as much.
TEST(Router, NearTies) {
  RunConfig config = TinyRun();
  config.train.steps = 1;
  config.train.eval_micro_batches = 0;
  auto near = [](ParamStore& store) {
    for (const auto& p : store.held()) {
      if (!p.spec.name.ends_with(".router")) continue;
      at::Tensor w = store.Get(p.spec.name).master;
      for (int64_t e : {3, 4, 5}) w.select(0, e).copy_(w.select(0, 1)).mul_(1 + 3e-5 * static_cast<double>(e));
    }
  };
  const TestRun reference = TrainReferenceForTest(config, near);
  ExpectSameTraining(TrainInproc(With(config, {1, 1, 1, 1}), near), reference);
  ExpectSameTraining(TrainInproc(With(config, {2, 2, 1, 1}), near), reference);
  ExpectSameTraining(TrainInproc(With(config, {2, 2, 2, 3}), near), reference, 1e-3, 0.2);
}

// Router rows that are equal bit by bit: every choice among them is an exact tie. And experts that nobody chooses.
TEST(Router, TiesAndEmptyExperts) {
  RunConfig config = With(TinyRun(), {2, 2, 2, 3});
  auto ties = [](ParamStore& store) {
    for (const auto& p : store.held()) {
      if (!p.spec.name.ends_with(".router")) continue;
      at::Tensor w = store.Get(p.spec.name).master;
      w.select(0, 3).copy_(w.select(0, 1));
      w.select(0, 4).copy_(w.select(0, 1));
      w.select(0, 6).zero_();
    }
  };
  config.train.steps = 1;  // Adam makes a step of the learning rate out of the rounding that then separates the ties
  ExpectSameTraining(TrainInproc(config, ties), TrainReferenceForTest(config, ties));
  auto one_worker = [](ParamStore& store) {  // all tokens to experts 0 and 1: the other FFN workers get none
    for (const auto& p : store.held()) {
      if (!p.spec.name.ends_with(".router")) continue;
      store.Get(p.spec.name).master.zero_();
    }
  };
  ExpectSameTraining(TrainInproc(config, one_worker), TrainReferenceForTest(config, one_worker));
}

TEST(Determinism, SameSeedSameLayoutSameBits) {
  const RunConfig config = With(TinyRun(), {2, 2, 2, 3});
  const auto a = TrainInproc(config), b = TrainInproc(config);
  for (size_t i = 0; i < a.result.steps.size(); ++i) {
    EXPECT_EQ(a.result.steps[i].loss, b.result.steps[i].loss);
    EXPECT_EQ(a.result.steps[i].grad_norm, b.result.steps[i].grad_norm);
  }
  for (const auto& [name, grad] : a.gradients) EXPECT_TRUE(at::equal(grad, b.gradients.at(name))) << name;
}

// One row per token and distinct FFN worker, each way: forward M2N and N2M, and the same backward.
TEST(Bytes, RowsCountedAreTheFormula) {
  RunConfig config = With(TinyRun(), {2, 2, 1, 3});
  config.train.steps = 1;
  config.model.num_experts = 3;  // one expert a worker, all chosen: d = 3 distinct workers exactly
  config.model.num_experts_per_tok = 3;
  const auto run = TrainInproc(config);
  double rows = 0;
  for (const auto& w : run.result.steps[0].workers) rows += w.row_bytes_sent;
  const auto& t = config.train;
  const double tokens = static_cast<double>(t.micro_batches * t.micro_batch_size * t.seq_length);
  const double row = static_cast<double>(config.model.hidden_size) * 4, L = static_cast<double>(config.model.num_hidden_layers);
  // Each layer: d rows a token out and back, forward and backward. The last layer's results go to the head on the same
  // group: of 3 rows a token one stays on its worker.
  EXPECT_DOUBLE_EQ(rows, tokens * row * (2 * 3 * L + 2 * 3 * (L - 1) + 2 * 2));
}

TEST(Failure, NanNamesStepAndLayer) {
  RunConfig config = With(TinyRun(), {2, 2, 1, 2});
  config.train.eval_micro_batches = 0;
  auto poison = [](ParamStore& store) {
    const Param* p = store.Find("layers.1.experts.down");
    if (p != nullptr) p->master.fill_(NAN);
  };
  try {
    TrainInproc(config, poison);
    FAIL() << "no error";
  } catch (const Error& e) {
    const std::string line = e.what();
    EXPECT_NE(line.find("the loss is not finite (step 1, first seen in the output of experts of layer 1, micro-batch 0)"), std::string::npos) << line;
  }
}

}  // namespace
}  // namespace disagmoe
