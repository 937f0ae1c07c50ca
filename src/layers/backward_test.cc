// The two steps of a backward. That both in a row are right is reference_test's business; here: nothing of the second
// happens in the first, and the second may come whenever it likes.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "layers/blocks.h"
#include "layers/layers_for_tests.h"

namespace disagmoe {
namespace {

constexpr int64_t kSequence = 9, kTokens = 18;

ModelConfig Model() {
  ModelConfig m;
  m.vocab_size = 23;
  m.hidden_size = 24;
  m.num_hidden_layers = 2;
  m.num_attention_heads = 4;
  m.num_key_value_heads = 2;
  m.head_dim = 8;
  m.qk_norm = true;
  m.num_experts = 5;
  m.moe_intermediate_size = 20;
  m.intermediate_size = 36;
  m.n_shared_experts = 1;
  m.first_k_dense_replace = 1;
  m.initializer_range = 0.3;
  return m;
}

// All that an FFN can have.
ModelConfig Rich() {
  ModelConfig m = Model();
  m.expert_bias = m.router_bias = m.shared_expert_gate = true;
  m.swiglu_limit = 1;
  m.scoring_func = "sigmoid";
  m.topk_method = "noaux_tc";
  return m;
}

ModelConfig LatentModel(int64_t q_lora_rank) {
  ModelConfig m = Model();
  m.qk_norm = false;
  m.kv_lora_rank = 12;
  m.q_lora_rank = q_lora_rank;
  m.qk_nope_head_dim = 10;
  m.qk_rope_head_dim = 6;
  m.v_head_dim = 8;
  return m;
}

ModelConfig ModelWithBiases() {
  ModelConfig m = Model();
  m.qk_norm = false;
  m.attention_bias = m.output_bias = m.attention_sinks = true;
  m.sliding_window = 4;
  return m;
}

struct Weights {
  explicit Weights(at::ScalarType dtype, const ModelConfig& m = Model()) : model(m), store(HoldAll(m), dtype, at::kCPU) {
    RandomWeights(store, 3);
  }
  ModelConfig model;
  ParamStore store;
};

bool IsZero(const Param& p) { return !p.grad.any().item<bool>(); }

class TwoSteps : public testing::TestWithParam<at::ScalarType> {
 protected:
  Tensor Rows(uint64_t seed) {
    at::manual_seed(seed);
    return at::randn({kTokens, Model().hidden_size}).to(GetParam());
  }
};

// The gradients by all weights and by the input. apart: between the steps everything that the caller owns is spoilt.
Tensor AttentionGradients(at::ScalarType dtype, const ModelConfig& model, int64_t layer, const Tensor& x, const Tensor& d, bool recompute,
                          bool apart, Tensor* dx) {
  Weights w(dtype, model);
  const Rotary rotary(w.model, kSequence, at::kCPU);
  const AttentionParams p(w.store, w.model, layer, rotary);
  AttentionSaved saved;
  saved.documents = {0, 3, kSequence};
  const AttentionOutput a = AttentionForward(w.model, p, x.clone(), saved);
  if (recompute) {
    AttentionForget(saved);
    AttentionRecompute(w.model, p, saved);
  }
  Tensor dh = d.clone(), d_gates = a.ids.defined() ? a.gates.clone() : Tensor();
  AuxLoss aux;
  aux.weight = 0.1;
  if (!apart) {
    AttentionBackward(w.model, p, saved, dh, d_gates, &aux);
    *dx = dh;
    return w.store.flat_grad().clone();
  }
  AttentionBackwardInputs(w.model, p, saved, dh, d_gates, &aux);
  *dx = dh.clone();
  dh.fill_(NAN);
  a.h.fill_(NAN);
  for (const Param* matrix : {&p.qkv, &p.q, &p.q_a, &p.q_b, &p.kv_a, &p.kv_b, &p.out}) {
    EXPECT_TRUE(!matrix->defined() || IsZero(*matrix));
  }
  for (const Param* vector : {&p.norm1, &p.q_norm, &p.k_norm, &p.q_a_norm, &p.kv_a_norm, &p.qkv_bias, &p.out_bias, &p.sinks}) {
    EXPECT_FALSE(vector->defined() && IsZero(*vector));
  }
  for (const Tensor* t : {&saved.qkv, &saved.q, &saved.k, &saved.lse, &saved.h, &saved.router.scores}) {
    EXPECT_FALSE(t->defined());
  }
  AttentionBackwardWeights(w.model, p, saved);
  EXPECT_FALSE(saved.x.defined() || saved.o.defined() || saved.d_h.defined() || saved.d_qkv.defined() || saved.d_q.defined());
  for (const Param* matrix : {&p.qkv, &p.q, &p.q_a, &p.q_b, &p.kv_a, &p.kv_b, &p.out}) {
    EXPECT_FALSE(matrix->defined() && IsZero(*matrix));
  }
  return w.store.flat_grad().clone();
}

TEST_P(TwoSteps, Attention) {
  for (const ModelConfig& model : {Model(), LatentModel(0), LatentModel(14), ModelWithBiases()}) {
    for (int64_t layer : {0, 1}) {  // dense, with router
      for (bool recompute : {false, true}) {
        Tensor dx[2];
        const Tensor whole = AttentionGradients(GetParam(), model, layer, Rows(1), Rows(2), recompute, false, &dx[0]);
        const Tensor apart = AttentionGradients(GetParam(), model, layer, Rows(1), Rows(2), recompute, true, &dx[1]);
        EXPECT_TRUE(at::equal(whole, apart)) << layer << recompute;
        EXPECT_TRUE(at::equal(dx[0], dx[1])) << layer << recompute;
        EXPECT_TRUE(whole.any().item<bool>());
      }
    }
  }
}

// Rows of a document see no other's: the same results and gradients as of the documents as sequences of their own.
// Positions count on from document to document, which changes nothing: only differences matter.
TEST(Documents, AreApart) {
  for (const ModelConfig& model : {Model(), LatentModel(14), ModelWithBiases()}) {
    const std::vector<int64_t> lengths = {5, 1, 7};
    int64_t s = 0;
    std::vector<int64_t> first;
    for (int64_t n : lengths) {
      first.push_back(s);
      s += n;
    }
    at::manual_seed(4);
    const Tensor x = at::randn({s, model.hidden_size}), d = at::randn({s, model.hidden_size});
    auto run = [&](Weights& w, int64_t row, int64_t rows, std::vector<int64_t> documents) {
      const AttentionParams p(w.store, w.model, 0, Rotary(w.model, rows, at::kCPU));  // a layer without router
      AttentionSaved saved;
      saved.documents = std::move(documents);
      const Tensor h = AttentionForward(w.model, p, x.narrow(0, row, rows), saved).h.clone();
      AttentionForget(saved);
      AttentionRecompute(w.model, p, saved);
      Tensor dx = d.narrow(0, row, rows).clone();
      AttentionBackward(w.model, p, saved, dx, {}, nullptr);
      return at::cat({h, dx}, 1);
    };
    Weights together(at::kFloat, model), alone(at::kFloat, model);
    const Tensor got = run(together, 0, s, first);
    std::vector<Tensor> parts;
    for (size_t i = 0; i < lengths.size(); ++i) parts.push_back(run(alone, first[i], lengths[i], {}));
    EXPECT_TRUE(at::allclose(got, at::cat(parts), 1e-5, 1e-5));
    EXPECT_TRUE(at::allclose(together.store.flat_grad(), alone.store.flat_grad(), 1e-4, 1e-4));
    EXPECT_FALSE(at::allclose(run(together, 0, s, {}), at::cat(parts), 1e-2, 1e-2));
  }
}

// Pairs of two experts a row; at_home: every row is, else every third.
RowPairs Pairs(bool dense, bool at_home) {
  RowPairs pairs;
  pairs.offsets = {0};
  for (int32_t r = 0; r < kTokens; ++r) {
    if (!dense) {
      for (int32_t k : {0, 2}) {
        pairs.expert.push_back((r + k) % 4);  // the last expert gets nothing
        pairs.gate.push_back(0.3f + 0.01f * static_cast<float>(r));
      }
    }
    pairs.offsets.push_back(pairs.pairs());
    if (at_home || r % 3 == 0) pairs.home.push_back(r);
  }
  return pairs;
}

Tensor FfnGradients(at::ScalarType dtype, const ModelConfig& model, int64_t layer, bool at_home, const Tensor& h,
                    const Tensor& d, bool recompute, bool apart, Tensor* dx) {
  Weights w(dtype, model);
  const FfnParams p(w.store, w.model, layer);
  FfnSaved saved;
  Tensor out = at::empty_like(h), gradient = d.clone();
  FfnForward(w.model, p, h.clone(), Pairs(layer == 0, at_home), saved, out);
  if (recompute) {
    FfnForget(saved);
    FfnRecompute(w.model, p, saved);
  }
  std::vector<float> d_gates;
  if (!apart) {
    FfnBackward(w.model, p, saved, gradient, d_gates);
    *dx = gradient;
    return w.store.flat_grad().clone();
  }
  FfnBackwardInputs(p, saved, gradient, d_gates);
  *dx = gradient.clone();
  gradient.fill_(NAN);
  out.fill_(NAN);
  for (const Param* matrix : {&p.gate_up, &p.down, &p.home_gate_up, &p.home_down, &p.gate_up_bias, &p.down_bias, &p.home_gate}) {
    EXPECT_TRUE(!matrix->defined() || IsZero(*matrix));
  }
  EXPECT_FALSE(IsZero(p.norm2));
  for (const Tensor* t : {&saved.position, &saved.order, &saved.rstd, &saved.home_gate}) EXPECT_FALSE(t->defined());
  EXPECT_EQ(saved.gate.defined(), p.down_bias.defined());
  FfnBackwardWeights(w.model, p, saved);
  EXPECT_FALSE(saved.h.defined() || saved.d_out.defined() || saved.act.defined() || saved.home_d_out.defined());
  return w.store.flat_grad().clone();
}

TEST_P(TwoSteps, Ffn) {
  for (int64_t layer : {0, 1}) {  // dense; experts and a shared one
    for (bool at_home : {false, true}) {
      for (bool recompute : {false, true}) {
        for (const ModelConfig& m : {Model(), Rich()}) {
          Tensor dx[2];
          const Tensor whole = FfnGradients(GetParam(), m, layer, at_home, Rows(1), Rows(2), recompute, false, &dx[0]);
          const Tensor apart = FfnGradients(GetParam(), m, layer, at_home, Rows(1), Rows(2), recompute, true, &dx[1]);
          EXPECT_TRUE(at::equal(whole, apart)) << layer << at_home << recompute << m.expert_bias;
          EXPECT_TRUE(at::equal(dx[0], dx[1])) << layer << at_home << recompute << m.expert_bias;
          EXPECT_TRUE(whole.any().item<bool>());
        }
      }
    }
  }
}

TEST_P(TwoSteps, Head) {
  Weights whole(GetParam()), apart(GetParam());
  const Tensor x = Rows(1), labels = at::arange(kTokens, at::kLong);
  bool finite = false;
  Tensor dx[2] = {at::empty_like(x), at::empty_like(x)};
  const HeadParams p(whole.store), q(apart.store);
  const double loss = HeadForwardBackward(whole.model, p, x, labels, 0.5, &dx[0], &finite);
  HeadSaved saved;
  EXPECT_EQ(HeadForwardBackward(apart.model, q, x, labels, 0.5, &dx[1], &finite, &saved), loss);
  EXPECT_TRUE(at::equal(dx[0], dx[1]));
  dx[1].fill_(NAN);
  EXPECT_TRUE(IsZero(q.head));
  EXPECT_FALSE(IsZero(q.norm));
  HeadBackwardWeights(q, saved);
  EXPECT_FALSE(saved.u.defined() || saved.d_logits.defined());
  EXPECT_TRUE(at::equal(whole.store.flat_grad(), apart.store.flat_grad()));
}

// Of a large vocabulary (2^24 / 2^18 = 64 rows at once) only the last rows are kept.
TEST(TwoStepsOfTheHead, KeepsTheLastLogits) {
  ModelConfig model = Model();
  model.vocab_size = 1 << 18;
  model.hidden_size = 8;
  ParamStore store(HoldAll(model), at::kFloat, at::kCPU);
  const HeadParams p(store);
  store.Initialise(3);
  at::manual_seed(1);
  const Tensor x = at::randn({100, 8}), labels = at::arange(100, at::kLong);
  Tensor dx = at::empty_like(x);
  bool finite = false;
  HeadForwardBackward(model, p, x, labels, 0.5, &dx, &finite);
  const Tensor whole = p.head.grad.clone();
  store.ZeroGrad();
  HeadSaved saved;
  HeadForwardBackward(model, p, x, labels, 0.5, &dx, &finite, &saved);
  EXPECT_EQ(saved.d_logits.size(0), 100 - 64);
  HeadBackwardWeights(p, saved);
  EXPECT_TRUE(at::equal(whole, p.head.grad));
}

// An empty slice has nothing to do in either step.
TEST_P(TwoSteps, NoTokens) {
  Weights w(GetParam());
  const Tensor none = Rows(1).narrow(0, 0, 0);
  const Rotary rotary(w.model, kSequence, at::kCPU);
  const AttentionParams p(w.store, w.model, 1, rotary);
  const FfnParams q(w.store, w.model, 1);
  AttentionSaved attention;
  FfnSaved ffn;
  const AttentionOutput a = AttentionForward(w.model, p, none, attention);
  Tensor dh = none.clone(), out = none.clone(), d = none.clone();
  AttentionBackwardInputs(w.model, p, attention, dh, a.gates, nullptr);
  AttentionBackwardWeights(w.model, p, attention);
  RowPairs pairs;
  pairs.offsets = {0};
  FfnForward(w.model, q, none, pairs, ffn, out);
  std::vector<float> d_gates;
  FfnBackwardInputs(q, ffn, d, d_gates);
  FfnBackwardWeights(w.model, q, ffn);
  bool finite = false;
  HeadSaved head;
  const HeadParams h(w.store);
  HeadForwardBackward(w.model, h, none, at::empty({0}, at::kLong), 0.5, &d, &finite, &head);
  HeadBackwardWeights(h, head);
  EXPECT_FALSE(w.store.flat_grad().any().item<bool>());
}

INSTANTIATE_TEST_SUITE_P(Types, TwoSteps, testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& info) { return std::string(at::toString(info.param)); });

}  // namespace
}  // namespace disagmoe
