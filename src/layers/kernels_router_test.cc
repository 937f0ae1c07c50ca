// Router, gathers and sums of rows, cross entropy.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>

#include "base/error.h"
#include "layers/kernels.h"
#include "layers/kernels_testing.h"

namespace disagmoe {
namespace {

using testing::Close;
using testing::Double;
using testing::Dot;
using testing::FiniteDifference;
using testing::Leaf;
using testing::SameBits;
using testing::Types;

class RouterTest : public ::testing::Test {
 protected:
  void SetUp() override {
    at::manual_seed(11);
    at::set_num_threads(1);
  }
};

struct Choice {
  Tensor scores;
  Tensor ids;
};
Choice Choose(const Tensor& logits, int64_t k, const RouterRule& rule = {}, const Tensor& correction = {}) {
  Choice c{at::full_like(logits, NAN), at::full({logits.size(0), k}, -1, at::kInt)};
  ScoreTopK(rule, logits, correction, c.scores, c.ids);
  return c;
}

std::vector<int32_t> Ids(const Tensor& ids) {
  return {ids.const_data_ptr<int32_t>(), ids.const_data_ptr<int32_t>() + ids.numel()};
}

struct Size {
  int64_t tokens, experts, k;
};
const std::vector<Size>& Sizes() {
  static const std::vector<Size> sizes = {{1, 1, 1}, {5, 3, 3}, {7, 16, 2}, {0, 8, 2}, {65, 17, 4}, {40, 130, 8}};
  return sizes;
}

TEST_F(RouterTest, SoftmaxMatchesTheDefinition) {
  for (const auto& [tokens, experts, k] : Sizes()) {
    SCOPED_TRACE(::testing::Message() << tokens << " " << experts << " " << k);
    const Tensor logits = at::randn({tokens, experts}) * 4;
    const Choice c = Choose(logits, k);
    const Tensor e = (Double(logits) - (tokens ? Double(logits).amax(1, true) : Double(logits))).exp();
    EXPECT_TRUE(Close(c.scores, e / e.sum(1, true), {1e-6, 1e-6}));
    const Tensor best = std::get<0>(at::topk(logits, k, 1, true, true));  // random logits have no ties
    EXPECT_TRUE(at::equal(logits.gather(1, c.ids.to(at::kLong)), best));
    Tensor probs = at::empty_like(c.scores);
    Tensor ids = at::empty_like(c.ids);
    generic::ScoreTopK({}, logits, {}, probs, ids);
    EXPECT_TRUE(at::equal(ids, c.ids));
    EXPECT_TRUE(Close(c.scores, probs));
  }
}

TEST_F(RouterTest, TiesGoToTheLowerIndex) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const bool fused : {true, false}) {
    const auto ids = [&](std::vector<float> row, int64_t k) {
      const Tensor logits = at::tensor(row).unsqueeze(0);
      Tensor probs = at::empty_like(logits);
      Tensor out = at::empty({1, k}, at::kInt);
      (fused ? ScoreTopK : generic::ScoreTopK)({}, logits, {}, probs, out);
      return Ids(out);
    };
    using V = std::vector<int32_t>;
    EXPECT_EQ(ids({1, 3, 3, 2, 3}, 3), (V{1, 2, 4}));
    EXPECT_EQ(ids({1, 3, 3, 2, 3}, 5), (V{1, 2, 4, 3, 0}));
    EXPECT_EQ(ids(std::vector<float>(40, -2.5f), 6), (V{0, 1, 2, 3, 4, 5}));
    EXPECT_EQ(ids({-1, -0.0f, 0.0f, -2}, 4), (V{1, 2, 0, 3}));   // -0 equals 0
    EXPECT_EQ(ids({-inf, 5, -inf, inf}, 4), (V{3, 1, 0, 2}));
    EXPECT_EQ(ids({1, NAN, inf, NAN}, 4), (V{1, 3, 2, 0}));      // NaN above all
    EXPECT_EQ(ids({-1, -NAN, -3}, 2), (V{1, 0}));
    EXPECT_EQ(ids({-200, -300, -100}, 3), (V{2, 0, 1}));         // though both small probabilities are 0
  }
}

TEST_F(RouterTest, NotANumberKeepsIdsInRange) {
  Tensor logits = at::randn({200, 19});
  logits.masked_fill_(at::rand({200, 19}) < 0.3, NAN);
  logits.masked_fill_(at::rand({200, 19}) < 0.2, INFINITY);
  logits.masked_fill_(at::rand({200, 19}) < 0.2, -INFINITY);
  const Choice c = Choose(logits, 6);
  const Tensor sorted = std::get<0>(c.ids.sort(1));
  EXPECT_TRUE(((sorted >= 0) & (sorted < 19)).all().item<bool>());
  EXPECT_TRUE((sorted.narrow(1, 1, 5) > sorted.narrow(1, 0, 5)).all().item<bool>());  // all different
}

// Groups and experts as the papers tell it, one token at a time: the best groups, then the best of their experts.
std::vector<int32_t> NaiveChoice(const std::vector<float>& values, int64_t k, const RouterRule& rule, bool two_best) {
  const int64_t size = std::ssize(values) / rule.groups;
  const auto best = [](std::vector<std::pair<float, int32_t>> list, int64_t n) {  // ties to the lower number
    std::stable_sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    list.resize(n);
    return list;
  };
  std::vector<std::pair<float, int32_t>> groups, eligible;
  for (int32_t g = 0; g < rule.groups; ++g) {
    std::vector<float> members(values.begin() + g * size, values.begin() + (g + 1) * size);
    std::sort(members.begin(), members.end(), std::greater<>());
    groups.push_back({two_best ? members[0] + members[1] : members[0], g});
  }
  std::vector<int32_t> chosen;
  for (const auto& group : best(groups, rule.top_groups)) chosen.push_back(group.second);
  std::sort(chosen.begin(), chosen.end());
  for (int32_t g : chosen) {
    for (int64_t e = g * size; e < (g + 1) * size; ++e) eligible.push_back({values[e], static_cast<int32_t>(e)});
  }
  std::vector<int32_t> ids;
  for (const auto& expert : best(eligible, k)) ids.push_back(expert.second);
  return ids;
}

TEST_F(RouterTest, GroupsAndCorrectionsMatchTheDefinition) {
  struct Case {
    int64_t experts, groups, top, k;
  };
  for (const auto& [experts, groups, top, k] : std::vector<Case>{{8, 4, 2, 3}, {16, 4, 1, 4}, {160, 8, 3, 6}, {256, 8, 4, 8}, {6, 1, 1, 2}, {6, 3, 3, 5}}) {
    for (const bool corrected : {false, true}) {
      for (const bool sigmoid : {false, true}) {
        for (const bool ties : {false, true}) {
          SCOPED_TRACE(::testing::Message() << experts << " in " << groups << corrected << sigmoid << ties);
          const RouterRule rule{.sigmoid = sigmoid, .groups = groups, .top_groups = top};
          Tensor logits = at::randn({50, experts}) * 2, correction;
          if (ties) logits = logits.round();  // many exact ones
          if (corrected) correction = ties ? at::zeros({experts}) : at::randn({experts}) * (sigmoid ? 0.5 : 0.05);
          for (const bool fused : {true, false}) {
            Tensor scores = at::empty_like(logits), ids = at::empty({50, k}, at::kInt);
            (fused ? ScoreTopK : generic::ScoreTopK)(rule, logits, correction, scores, ids);
            const Tensor right = sigmoid ? at::sigmoid(Double(logits)) : at::softmax(Double(logits), 1);
            EXPECT_TRUE(Close(scores, right));
            const Tensor values = corrected ? scores + correction : logits;
            for (int64_t t = 0; t < 50; ++t) {
              const float* row = values.const_data_ptr<float>() + t * experts;
              EXPECT_EQ(Ids(ids[t]), NaiveChoice({row, row + experts}, k, rule, corrected)) << t << fused;
            }
          }
        }
      }
    }
  }
}

// Logits 9 and -9, 2 and 2: by its best expert the first group wins; by the two best, sigmoids give 1.00 and 1.76. A
// correction of the first group's second expert makes up for that, and brings that expert in, with its own small gate.
TEST_F(RouterTest, ACorrectionOnlyChooses) {
  const Tensor logits = at::tensor({9.0f, -9.0f, 2.0f, 2.0f}).view({1, 4});
  const RouterRule rule{.sigmoid = true, .groups = 2, .top_groups = 1, .renormalise = true, .scale = 2.5};
  using V = std::vector<int32_t>;
  EXPECT_EQ(Ids(Choose(logits, 2, rule).ids), (V{0, 1}));
  EXPECT_EQ(Ids(Choose(logits, 2, rule, at::zeros({4})).ids), (V{2, 3}));
  const Choice c = Choose(logits, 2, rule, at::tensor({0.0f, 0.8f, 0.0f, 0.0f}));
  EXPECT_EQ(Ids(c.ids), (V{0, 1}));
  Tensor gates = at::empty({1, 2});
  Gates(rule, c.scores, c.ids, gates);
  const double first = 1 / (1 + std::exp(-9.0)), second = 1 / (1 + std::exp(9.0));
  EXPECT_NEAR(gates[0][0].item<double>(), 2.5 * first / (first + second), 1e-6);
  EXPECT_NEAR(gates[0][1].item<double>(), 2.5 * second / (first + second), 1e-9);
}

// gpt-oss takes the softmax over the chosen logits; ours is over all, renormalised.
TEST_F(RouterTest, RenormalisedIsTheSoftmaxOverTheChosen) {
  for (const double scale : {1.0, 30.0, 1000.0}) {
    const Tensor logits = at::randn({40, 32}) * scale;
    const RouterRule rule{.renormalise = true};
    const Choice c = Choose(logits, 4, rule);
    Tensor gates = at::empty({40, 4});
    Gates(rule, c.scores, c.ids, gates);
    const Tensor expected = at::softmax(Double(logits.gather(1, c.ids.to(at::kLong))), 1);
    // The difference of two logits is rounded: half a unit of numbers up to 128 is 4e-6.
    EXPECT_TRUE(at::allclose(Double(gates), expected, 1e-5, 1e-37)) << scale;
  }
}

std::vector<RouterRule> Rules() {
  std::vector<RouterRule> rules;
  for (const bool sigmoid : {false, true}) {
    for (const bool renormalise : {false, true}) {
      for (const double scale : {1.0, 2.5}) rules.push_back({sigmoid, 1, 1, renormalise, scale});
    }
  }
  return rules;
}

TEST_F(RouterTest, GatesAndRouterGradientMatchAutograd) {
  for (const auto& [tokens, experts, k] : Sizes()) {
    for (const RouterRule& rule : Rules()) {
      for (const bool auxiliary : {false, true}) {
        SCOPED_TRACE(::testing::Message() << tokens << " " << experts << " " << k << " sigmoid " << rule.sigmoid
                                          << " renormalise " << rule.renormalise << rule.scale << auxiliary);
        const Tensor logits = at::randn({tokens, experts});
        const Choice c = Choose(logits, k, rule);
        const Tensor d_gates = at::randn({tokens, k});
        const Tensor d_scores = auxiliary ? at::randn({tokens, experts}) : Tensor();

        const Tensor leaf = Leaf(logits);
        const Tensor scores = rule.sigmoid ? at::sigmoid(leaf) : at::softmax(leaf, 1);
        Tensor expected = scores.gather(1, c.ids.to(at::kLong));
        if (rule.renormalise) expected = expected / expected.sum(1, true);
        expected = expected * rule.scale;
        Tensor loss = (expected * Double(d_gates)).sum();
        if (auxiliary) loss = loss + (scores * Double(d_scores)).sum();
        const Tensor d_expected = testing::Grad(loss, at::ones({}), {leaf})[0];

        Tensor gates = at::full({tokens, k}, NAN);
        Gates(rule, c.scores, c.ids, gates);
        EXPECT_TRUE(Close(gates, expected));
        // One expert, or all gates of a renormalised row equal in gradient: the true gradient is 0, so a floor.
        Tensor d_logits = at::full_like(logits, NAN);
        RouterBackward(rule, d_gates, d_scores, c.scores, c.ids, d_logits);
        EXPECT_TRUE(at::allclose(Double(d_logits), d_expected, 0, 2e-6)) << (Double(d_logits) - d_expected).abs().max();

        Tensor generic_gates = at::empty_like(gates);
        Tensor generic_d = at::empty_like(logits);
        generic::Gates(rule, c.scores, c.ids, generic_gates);
        generic::RouterBackward(rule, d_gates, d_scores, c.scores, c.ids, generic_d);
        EXPECT_TRUE(Close(gates, generic_gates));
        EXPECT_TRUE(at::allclose(d_logits, generic_d, 0, 2e-6));
      }
    }
  }
}

TEST_F(RouterTest, RouterGradientMatchesFiniteDifferences) {
  for (const RouterRule& rule : Rules()) {
    Tensor logits = at::randn({3, 6}, at::kDouble);
    const Tensor d_gates = at::randn({3, 2}, at::kDouble);
    const Tensor d_scores = at::randn({3, 6}, at::kDouble);
    Tensor scores = at::empty_like(logits);
    Tensor ids = at::empty({3, 2}, at::kInt);
    Tensor gates = at::empty_like(d_gates);
    const auto f = [&] {
      generic::ScoreTopK(rule, logits, {}, scores, ids);
      generic::Gates(rule, scores, ids, gates);
      return Dot(gates, d_gates) + Dot(scores, d_scores);
    };
    f();
    Tensor d_logits = at::empty_like(logits);
    generic::RouterBackward(rule, d_gates, d_scores, scores, ids, d_logits);
    EXPECT_TRUE(Close(FiniteDifference(f, logits), d_logits, {1e-8, 0}));
  }
}

// Random segments, some empty: for each token the rows of src that it sums.
struct Segments {
  Segments(int64_t tokens, int64_t rows) {
    const Tensor counts = at::randint(0, 5, {tokens}, at::kLong);
    offsets = at::cat({at::zeros({1}, at::kLong), counts.cumsum(0)}).to(at::kInt);
    position = at::randint(0, rows, {counts.sum().item<int64_t>()}, at::kInt);
  }
  Tensor offsets;
  Tensor position;
};

TEST_F(RouterTest, SumRowsAddsSegments) {
  for (const at::ScalarType type : Types()) {
    for (const auto& [tokens, rows, h] : std::vector<std::array<int64_t, 3>>{
             {1, 1, 1}, {0, 3, 4}, {9, 5, 7}, {20, 30, 64}, {33, 50, 70}, {40, 50, 150}}) {
      SCOPED_TRACE(::testing::Message() << type << " " << tokens << " " << rows << " " << h);
      const Tensor src = at::randn({rows, h}).to(type);
      const Segments s(tokens, rows);
      Tensor expected = at::zeros({tokens, h}, at::kDouble);
      for (int64_t t = 0; t < tokens; ++t) {
        for (int32_t j = s.offsets[t].item<int32_t>(); j < s.offsets[t + 1].item<int32_t>(); ++j) {
          expected[t] += Double(src)[s.position[j].item<int64_t>()];
        }
      }
      Tensor out = at::full({tokens, h}, NAN, type);
      SumRows(src, s.position, s.offsets, out, /*add=*/false);
      EXPECT_TRUE(Close(out, expected));
      const Tensor before = at::randn({tokens, h}).to(type);
      out = before.clone();
      SumRows(src, s.position, s.offsets, out, /*add=*/true);
      EXPECT_TRUE(Close(out, expected + Double(before)));
      generic::SumRows(src, s.position, s.offsets, out.copy_(before), /*add=*/true);
      EXPECT_TRUE(Close(out, expected + Double(before)));
    }
  }
}

TEST_F(RouterTest, WeightedRowsAndTheirGradientsMatchAutograd) {
  for (const at::ScalarType type : Types()) {
    for (const auto& [tokens, rows, h] : std::vector<std::array<int64_t, 3>>{
             {1, 1, 1}, {0, 3, 4}, {9, 5, 7}, {20, 30, 64}, {40, 50, 150}, {30, 4, 700}}) {
      SCOPED_TRACE(::testing::Message() << type << " " << tokens << " " << rows << " " << h);
      const Segments s(tokens, rows);
      const int64_t n = s.position.size(0);
      const Tensor src = at::randn({rows, h}).to(type), d_out = at::randn({tokens, h}).to(type);
      const Tensor weight = at::randn({n}).to(testing::SumType(type));
      const Tensor leaf = Leaf(weight), place = s.position.to(at::kLong);
      const Tensor counts = (s.offsets.narrow(0, 1, tokens) - s.offsets.narrow(0, 0, tokens)).to(at::kLong);
      const Tensor token = at::repeat_interleave(counts);
      const Tensor terms = leaf.unsqueeze(1) * Double(src).index_select(0, place);
      const Tensor expected = at::zeros({tokens, h}, at::kDouble).index_add(0, token, terms);
      const Tensor before = at::randn({n}).to(testing::SumType(type));
      const Tensor d_expected = testing::Grad(expected, d_out, {leaf})[0] + Double(before);
      for (const bool fused : {true, false}) {
        Tensor out = at::full({tokens, h}, NAN, type);
        (fused ? SumRows : generic::SumRows)(src, s.position, s.offsets, out, false, weight);
        EXPECT_TRUE(Close(out, expected));
        Tensor d_weight = before.clone();
        (fused ? AddRowDots : generic::AddRowDots)(d_out, src, s.position, s.offsets, d_weight);
        EXPECT_TRUE(Close(d_weight, d_expected, testing::ToleranceOf(testing::SumType(type))));
      }
    }
  }
}

TEST_F(RouterTest, AddSegmentsAddsWeightedRows) {
  for (const at::ScalarType type : Types()) {
    for (const int64_t h : {1, 7, 64, 150, 700}) {
      for (const bool weighted : {false, true}) {
        SCOPED_TRACE(::testing::Message() << type << " " << h << weighted);
        const std::vector<int64_t> begin = {2, 2, 9, 40};  // an empty one, rows before and behind
        const Tensor src = at::randn({41, h}).to(type);
        const Tensor weight = weighted ? at::randn({41}).to(testing::SumType(type)) : Tensor();
        const Tensor before = at::randn({3, h}).to(testing::SumType(type));
        Tensor expected = Double(before).clone();
        for (int64_t e = 0; e < 3; ++e) {
          for (int64_t i = begin[e]; i < begin[e + 1]; ++i) {
            expected[e] += Double(src)[i] * (weighted ? Double(weight)[i] : at::ones({}, at::kDouble));
          }
        }
        for (const bool fused : {true, false}) {
          Tensor sums = before.clone();
          (fused ? AddSegments : generic::AddSegments)(src, weight, begin, sums);
          EXPECT_TRUE(Close(sums, expected));
        }
      }
    }
  }
}

TEST_F(RouterTest, SumRowsRoundsOnceAndInOrder) {
  // 2^24 + 1 is not an fp32 number: (2^24 + 1) - 2^24 is 0 in this order, 1 in the other.
  const float big = 16777216.0f;
  const Tensor src = at::tensor({big, 1.0f, -big}).view({3, 1});
  const Tensor offsets = at::tensor({0, 3, 6}, at::kInt);
  Tensor out = at::empty({2, 1});
  SumRows(src, at::tensor({0, 1, 2, 0, 2, 1}, at::kInt), offsets, out, false);
  EXPECT_TRUE(at::equal(out, at::tensor({0.0f, 1.0f}).view({2, 1})));
  // In bf16, 256 + 1 rounds to 256 each time, but the fp32 sum of 256 + 1 + 1 is 258.
  const Tensor small = at::tensor({256.0f, 1.0f}).view({2, 1}).to(at::kBFloat16);
  Tensor sum = at::empty({1, 1}, at::kBFloat16);
  SumRows(small, at::tensor({0, 1, 1}, at::kInt), at::tensor({0, 3}, at::kInt), sum, false);
  EXPECT_EQ(sum.item<float>(), 258.0f);
}

TEST_F(RouterTest, GatherRowsCopies) {
  for (const at::ScalarType type : Types()) {
    for (const auto& [rows, h, n] : std::vector<std::array<int64_t, 3>>{{1, 1, 1}, {5, 7, 0}, {9, 33, 40}}) {
      const Tensor src = at::randn({rows, h}).to(type);
      const Tensor index = at::randint(0, rows, {n}, at::kInt);
      Tensor out = at::full({n, h}, NAN, type);
      GatherRows(src, index, out);
      for (int64_t i = 0; i < n; ++i) EXPECT_TRUE(at::equal(out[i], src[index[i].item<int64_t>()]));
      Tensor other = at::empty_like(out);
      generic::GatherRows(src, index, other);
      EXPECT_TRUE(at::equal(out, other));
    }
  }
}

TEST_F(RouterTest, RowsOutOfRangeAreRefused) {
  const Tensor src = at::randn({3, 4});
  Tensor out = at::empty({1, 4});
  EXPECT_THROW(GatherRows(src, at::tensor({3}, at::kInt), out), InternalError);
  EXPECT_THROW(GatherRows(src, at::tensor({-1}, at::kInt), out), InternalError);
  EXPECT_THROW(SumRows(src, at::tensor({0, 3}, at::kInt), at::tensor({0, 2}, at::kInt), out, false), InternalError);
  EXPECT_THROW(SumRows(src, at::tensor({0, 1}, at::kInt), at::tensor({0, 3}, at::kInt), out, false), InternalError);
  Tensor gates = at::empty({1, 1});
  EXPECT_THROW(Gates({}, at::ones({1, 2}), at::tensor({2}, at::kInt).view({1, 1}), gates), InternalError);
  Tensor logits = at::randn({1, 4});
  EXPECT_THROW(CrossEntropy(logits, at::tensor({4}, at::kLong), 1, true), InternalError);
  EXPECT_THROW(CrossEntropy(logits, at::tensor({-1}, at::kLong), 1, true), InternalError);
}

TEST_F(RouterTest, CrossEntropyMatchesAutograd) {
  for (const at::ScalarType type : Types()) {
    for (const auto& [rows, v] : std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {0, 9}, {5, 7}, {33, 100}, {9, 1000}}) {
      SCOPED_TRACE(::testing::Message() << type << " " << rows << " x " << v);
      const Tensor logits = (at::randn({rows, v}) * 5 + 20).to(type);
      const Tensor labels = at::randint(0, v, {rows}, at::kLong);
      const Tensor leaf = Leaf(logits);
      const Tensor loss = -at::log_softmax(leaf, 1).gather(1, labels.unsqueeze(1)).sum();
      const Tensor expected = testing::Grad(loss * 0.25, at::ones({}), {leaf})[0];
      for (const auto function : {CrossEntropy, generic::CrossEntropy}) {
        Tensor work = logits.clone();
        EXPECT_NEAR(function(work, labels, 0.25, true), loss.item<double>(), 1e-6 * (1 + loss.item<double>()));
        const double rounding = type == at::kBFloat16 ? 1.0 / 256 : 0;
        EXPECT_TRUE(at::allclose(Double(work), expected, rounding, 1e-6));
        Tensor again = logits.clone();
        EXPECT_NEAR(function(again, labels, 0.25, false), loss.item<double>(), 1e-6 * (1 + loss.item<double>()));
      }
    }
  }
}

// As torch.nn.functional.cross_entropy has its ignore_index: as if the rows were not there.
TEST_F(RouterTest, CrossEntropySkipsRowsWithoutLabel) {
  for (const at::ScalarType type : Types()) {
    const Tensor logits = (at::randn({6, 30}) * 5).to(type);
    const Tensor labels = at::tensor({3, -100, 29, -100, 0, -100}, at::kLong), rows = at::tensor({0, 2, 4}, at::kLong);
    for (const auto function : {CrossEntropy, generic::CrossEntropy}) {
      Tensor expected = logits.index_select(0, rows), work = logits.clone(), again = logits.clone();
      const double loss = function(expected, labels.index_select(0, rows), 0.25, true);
      EXPECT_NEAR(function(work, labels, 0.25, true), loss, 1e-12 * loss);
      EXPECT_TRUE(at::equal(work.index_select(0, rows), expected));
      EXPECT_EQ(work.index_select(0, at::tensor({1, 3, 5}, at::kLong)).abs().max().item<double>(), 0);
      EXPECT_NEAR(function(again, labels, 0.25, false), loss, 1e-12 * loss);
    }
  }
}

TEST_F(RouterTest, CrossEntropyOfEqualLogitsIsLogV) {
  for (const float level : {0.0f, 1e4f, -1e4f}) {
    Tensor logits = at::full({3, 50}, level);
    EXPECT_NEAR(CrossEntropy(logits, at::tensor({0, 7, 49}, at::kLong), 1, true), 3 * std::log(50.0), 1e-5);
    Tensor expected = at::full({3, 50}, 0.02);
    expected[0][0] -= 1;
    expected[1][7] -= 1;
    expected[2][49] -= 1;
    EXPECT_TRUE(Close(logits, expected));
  }
}

TEST_F(RouterTest, ResultsDoNotDependOnThreads) {
  const Tensor logits = at::randn({900, 100});
  const Tensor d_gates = at::randn({900, 4});
  testing::ExpectSameOnTwoThreads([&] {
    const RouterRule rule{.renormalise = true};
    const Choice c = Choose(logits, 4, rule);
    Tensor gates = at::empty({900, 4});
    Gates(rule, c.scores, c.ids, gates);
    Tensor d_logits = at::empty_like(logits);
    RouterBackward(rule, d_gates, {}, c.scores, c.ids, d_logits);
    Tensor work = logits.clone();
    const Tensor labels = at::arange(900, at::kLong).remainder(100);
    const double loss = CrossEntropy(work, labels, 1, true);
    return std::vector<Tensor>{c.scores, c.ids, gates, d_logits, work, at::scalar_tensor(loss, at::kDouble)};
  });
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const Tensor src = at::randn({2000, 70}).to(type);
    const Segments s(2000, 2000);
    testing::ExpectSameOnTwoThreads([&] {
      Tensor sum = at::empty_like(src);
      SumRows(src, s.position, s.offsets, sum, false);
      Tensor rows = at::empty({s.position.size(0), 70}, type);
      GatherRows(src, s.position, rows);
      Tensor dots = at::zeros({s.position.size(0)}), sums = at::zeros({2, 70});
      AddRowDots(src, src, s.position, s.offsets, dots);
      AddSegments(src, {}, {0, 1200, 2000}, sums);
      return std::vector<Tensor>{sum, rows, dots, sums};
    });
  }
}

}  // namespace
}  // namespace disagmoe
