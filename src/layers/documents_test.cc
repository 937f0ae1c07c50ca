// Documents in a sample are apart: a packed batch has the loss and the gradients of its documents by themselves, each run
// through the same model as a sequence of its own length.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include "base/rng.h"
#include "layers/reference.h"

namespace disagmoe {
namespace {

RunConfig TinyConfig() {
  RunConfig c;
  ModelConfig& m = c.model;
  m.vocab_size = 40;
  m.hidden_size = 32;
  m.num_hidden_layers = 3;
  m.num_attention_heads = 4;
  m.num_key_value_heads = 2;
  m.head_dim = 8;
  m.num_experts = 6;
  m.num_experts_per_tok = 2;
  m.moe_intermediate_size = 16;
  m.initializer_range = 0.2;
  m.router_aux_loss = "none";  // it is of a sample, however many documents that has
  c.train.seq_length = 24;
  c.train.micro_batch_size = 3;
  return c;
}

struct Packed {
  Reference::Batch batch;
  std::vector<int64_t> lengths;  // of the documents, or of their parts where a sample cuts them
};

// Three samples: several documents, some of one token, one that ends with a sample and one that is a whole sample.
Packed MakePacked() {
  Packed p;
  p.lengths = {5, 1, 11, 7, 1, 1, 20, 2, 24};
  Rng rng(4);
  p.batch.tokens = at::empty({3, 24}, at::kLong);
  p.batch.labels = at::empty({3, 24}, at::kLong);
  int64_t* tokens = p.batch.tokens.data_ptr<int64_t>();
  int64_t* labels = p.batch.labels.data_ptr<int64_t>();
  for (int64_t t = 0; t < 72; ++t) {
    tokens[t] = static_cast<int64_t>(rng.Below(40));
    labels[t] = static_cast<int64_t>(rng.Below(40));
  }
  int64_t row = 0;
  for (int64_t n : p.lengths) {
    p.batch.documents.push_back(row);
    row += n;
    if (row != 48) labels[row - 1] = kNoLabel;  // the document of the second sample goes on in no sample here
  }
  EXPECT_EQ(row, 72);
  p.batch.step_labels = 72 - static_cast<int64_t>(p.lengths.size()) + 1;
  return p;
}

struct Result {
  double loss = 0;
  Tensor gradient;
};

Result RunPacked(const RunConfig& config, const Reference::Batch& batch) {
  Reference model(config, at::kCPU);
  model.store().Initialise(3);
  const double loss = model.Run(batch, true).tokens;
  return {loss, model.store().flat_grad().clone()};
}

Result RunApart(const RunConfig& config, const Packed& p) {
  Result sum;
  int64_t row = 0;
  for (int64_t n : p.lengths) {
    RunConfig c = config;
    c.train.seq_length = n;
    Reference::Batch one;
    one.tokens = p.batch.tokens.view({72}).narrow(0, row, n).view({1, n});
    one.labels = p.batch.labels.view({72}).narrow(0, row, n).view({1, n});
    one.step_labels = p.batch.step_labels;
    const Result r = RunPacked(c, one);
    sum.loss += r.loss;
    sum.gradient = sum.gradient.defined() ? sum.gradient + r.gradient : r.gradient;
    row += n;
  }
  return sum;
}

double Distance(const Result& a, const Result& b) { return ((a.gradient - b.gradient).norm() / b.gradient.norm()).item<double>(); }

class Documents : public testing::TestWithParam<void (*)(RunConfig&)> {};

TEST_P(Documents, ApartAreAsByThemselves) {
  c10::NoGradGuard no_grad;
  RunConfig config = TinyConfig();
  GetParam()(config);
  const Packed p = MakePacked();
  const Result apart = RunApart(config, p);
  const Result packed = RunPacked(config, p.batch);
  EXPECT_NEAR(packed.loss, apart.loss, 1e-5 * apart.loss);
  EXPECT_LT(Distance(packed, apart), 1e-5);
  // And it matters: as one text the same samples have other gradients.
  Reference::Batch joined = p.batch;
  joined.documents.clear();
  EXPECT_GT(Distance(RunPacked(config, joined), apart), 1e-2);
}

INSTANTIATE_TEST_SUITE_P(Models, Documents,
                         testing::Values([](RunConfig&) {}, [](RunConfig& c) { c.model.qk_norm = true; },
                                         [](RunConfig& c) { c.train.recompute = "layer"; },
                                         [](RunConfig& c) { c.model.num_key_value_heads = 4; }));

}  // namespace
}  // namespace disagmoe
