// Weight gradients in the bubbles: the pass, and af-pipe-zb.
#include "schedule/fill_weights.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/error.h"
#include "base/rng.h"
#include "schedule/closed_forms.h"
#include "schedule/event_model_for_tests.h"
#include "schedule/schedule.h"
#include "schedule/split_model_for_tests.h"

namespace disagmoe {
namespace {

GenerateOptions Options(int micro_batches, int round = 0, double transfer_ratio = 0) {
  GenerateOptions options;
  options.num_micro_batches = micro_batches;
  options.round = round;
  options.transfer_ratio = transfer_ratio;
  return options;
}

PlacementSpec Square(int p, int layers) { return {.num_layers = layers, .p_a = p, .p_f = p}; }

std::vector<int> Peaks(const Schedule& s) {
  std::vector<int> peaks;
  for (const GroupSchedule& group : s.groups) peaks.push_back(group.max_in_flight);
  return peaks;
}

// The two models agree where both can run a schedule.
TEST(SplitModel, AgreesWithTheOther) {
  for (const auto& [p, layers, m, q, transfer, step] :
       {std::tuple{1, 4, 4, 4, 0.5, 52.0}, {2, 4, 8, 4, 1.0, 71.0}, {2, 3, 8, 4, 0.5, 56.0}}) {
    const Schedule s = Generate("af-pipe", Square(p, layers), Options(m, q));
    EXPECT_DOUBLE_EQ(RunSplitModel(s, {.transfer = transfer}).step, step);
    EXPECT_DOUBLE_EQ(RunModel(s, {.transfer = transfer}).step, step);
    EXPECT_EQ(RunSplitModel(s, {}).peak, RunModel(s, {}).peak);
  }
}

// ZB-H1 on plain 1F1B (slope 1, one chunk a group): bubble (p - 1)(F + B - 2 W) within 1F1B's memory, p units on every
// group. Times of a unit: one layer, F = 2, B = 4. Exactly so where whole W fit the waits; else within one W.
TEST(FillWithWeightGradients, ZeroBubbleH1) {
  for (int p : {2, 3, 4, 8}) {
    for (int m : {2 * p, 3 * p + 1}) {
      for (double share : {0.5, 0.375, 0.25}) {
        GenerateOptions options = Options(m, m);
        options.slope = 1;
        Schedule s =
            Generate("megatron-1f1b", {.num_layers = p, .p_a = p, .colocated = true, .virtual_stages = 1}, options);
        const ChunkTimes t{2, 4, 4 * share};
        EXPECT_DOUBLE_EQ(RunSplitModel(s, {}).step, 6 * m + BubbleOneForwardOneBackward(p, t));
        EXPECT_EQ(s.groups[0].max_in_flight, 2 * p);
        EXPECT_TRUE(FillWithWeightGradients(&s, {.weight_share = share}, std::vector<int>(p, 2 * p)));
        EXPECT_NO_THROW(ValidateSchedule(s));
        const SplitResult r = RunSplitModel(s, {.weight_share = share});
        EXPECT_GE(r.step, 6 * m + BubbleZeroBubble(p, t)) << p << " " << m << " " << share;
        EXPECT_LE(r.step, 6 * m + BubbleZeroBubble(p, t) + (share == 0.375 ? t.weight : 0))
            << p << " " << m << " " << share;
        for (int peak : r.peak) EXPECT_LE(peak, 2 * p);
      }
    }
  }
}

// AF-Pipe without transfer time and p >= 2: the bubble (R - 1)(F + B) becomes (R - 1)(F + B - 2 W) = R - 1, so that the
// last position computes from its first forward to the end.
TEST(AfPipeZb, ClosedFormWithoutTransferTime) {
  for (int p = 2; p <= 4; ++p) {
    for (int v = 1; v <= 3; ++v) {
      for (int rounds = 1; rounds <= 3; ++rounds) {
        for (int q : {2 * p, 2 * p + 1, 4 * p}) {
          const int m = q * rounds;
          const double step = RunSplitModel(Generate("af-pipe-zb", Square(p, p * v), Options(m, q)), {}).step;
          EXPECT_DOUBLE_EQ(step, 3 * m * v + BubbleZeroBubble(2 * p, {1, 2, 1}))
              << p << " " << v << " " << m << " " << q;
        }
      }
    }
  }
}

// p = 1: each pool has one group, so none has room beside AF-Pipe's own; only the bubble at the end is filled, 2 of 3.
TEST(AfPipeZb, OneGroupAPool) {
  EXPECT_DOUBLE_EQ(RunSplitModel(Generate("af-pipe", Square(1, 4), Options(8, 4)), {}).step, 99);
  EXPECT_DOUBLE_EQ(RunSplitModel(Generate("af-pipe-zb", Square(1, 4), Options(8, 4)), {}).step, 98);
}

struct Layout {
  PlacementSpec placement;
  GenerateOptions options;
};

Layout Draw(Rng* rng) {
  const auto draw = [&](int least, int most) { return least + static_cast<int>(rng->Below(most - least + 1)); };
  Layout x;
  x.placement.p_a = draw(1, 4);
  x.placement.p_f = draw(0, 1) == 0 ? x.placement.p_a : draw(1, 4);
  x.placement.num_layers = draw(std::max(x.placement.p_a, x.placement.p_f), 9);
  x.placement.head_on_attention = draw(0, 1) == 1;
  x.options.num_micro_batches = draw(1, 12);
  // Not multiples of a stage's time, so that the order in which two transfers start does not hang on a tie.
  x.options.transfer_ratio = draw(0, 3) * 0.23;
  x.options.attention_time = (0.5 + rng->Uniform()) * x.placement.p_a;
  x.options.ffn_time = x.placement.p_f;
  x.options.weight_share = draw(0, 1) == 0 ? 0.5 : 0.3;
  return x;
}

SplitTimes TimesOf(const GenerateOptions& o) {
  return {.attention = o.attention_time,
          .ffn = o.ffn_time,
          .weight_share = o.weight_share,
          .transfer = o.transfer_ratio * std::max(o.attention_time, o.ffn_time)};
}

// With the times it was made for, it is never slower than AF-Pipe by more than a hair (the pass's model and this one
// take equally old transfers in different orders), and holds no more than AF-Pipe's fullest group of the pool.
TEST(AfPipeZb, NeverSlowerAndNoFuller) {
  Rng rng(5);
  double sum = 0;
  const int count = 400;
  for (int i = 0; i < count; ++i) {
    const Layout x = Draw(&rng);
    SCOPED_TRACE(testing::Message() << x.placement.p_a << " " << x.placement.p_f << " L " << x.placement.num_layers
                                    << " M " << x.options.num_micro_batches << " T " << x.options.transfer_ratio
                                    << " a " << x.options.attention_time << " w " << x.options.weight_share);
    const Schedule plain = Generate("af-pipe", x.placement, x.options);
    const Schedule s = Generate("af-pipe-zb", x.placement, x.options);
    const SplitResult before = RunSplitModel(plain, TimesOf(x.options));
    const SplitResult after = RunSplitModel(s, TimesOf(x.options));
    EXPECT_FALSE(after.deadlock);
    EXPECT_LE(after.step, before.step * (x.options.transfer_ratio < 0.5 ? 1 + 1e-6 : 1.02));
    sum += after.step / before.step;
    const std::vector<int> had = Peaks(plain);
    const auto pool = [&](int g) { return g < x.placement.p_a ? had.begin() : had.begin() + x.placement.p_a; };
    for (size_t g = 0; g < had.size(); ++g) {
      const int size = static_cast<int>(g) < x.placement.p_a ? x.placement.p_a : x.placement.p_f;
      EXPECT_LE(after.peak[g], *std::max_element(pool(g), pool(g) + size));
      // Forwards and backwards stay in AF-Pipe's order.
      std::vector<Op> order = s.groups[g].compute;
      std::erase_if(order, [](const Op& op) { return op.kind == OpKind::kWeight; });
      EXPECT_EQ(order, plain.groups[g].compute);
    }
  }
  EXPECT_LT(sum / count, 0.93);
}

// Within 1 % of the bound (the last position computes without a gap) where the round hides the transfers, at T = 0.5;
// with the smallest round the waits that are left are shorter than AF-Pipe's.
TEST(AfPipeZb, FillsTransferWaits) {
  for (int p : {2, 4}) {
    const int layers = 4 * p, m = 8 * p, r = 2 * p;
    const auto step = [&](const std::string& name, int round) {
      return RunSplitModel(Generate(name, Square(p, layers), Options(m, round, 0.49)), {.transfer = 0.49}).step;
    };
    const double bound = 3.0 * m * layers / p + WarmUpAf(r, {.m2n = 0.49});
    EXPECT_LE(step("af-pipe-zb", 0), bound * 1.01);
    EXPECT_GE(step("af-pipe-zb", 0), bound);
    EXPECT_GE(step("af-pipe", 0), bound * 1.03);
    EXPECT_LE(step("af-pipe-zb", r), step("af-pipe", r) * 0.95);
  }
}

// Where transfers take longer than computing, gradients that leave earlier can hold up activations: if no rule helps,
// the backward stays whole rather than getting slower.
TEST(AfPipeZb, StaysWholeWhereSplittingCosts) {
  int whole = 0;
  for (int layers = 3; layers <= 7; ++layers) {
    const GenerateOptions options = Options(12, 0, 1.47);
    const Schedule s = Generate("af-pipe-zb", Square(2, layers), options);
    EXPECT_NO_THROW(ValidateSchedule(s));
    whole += !s.split_backward;
    const double plain = RunSplitModel(Generate("af-pipe", Square(2, layers), options), {.transfer = 1.47}).step;
    EXPECT_LE(RunSplitModel(s, {.transfer = 1.47}).step, plain);
  }
  EXPECT_GT(whole, 0);
}

TEST(AfPipeZb, ForwardOnly) {
  GenerateOptions options = Options(4);
  options.backward = false;
  const Schedule s = Generate("af-pipe-zb", Square(2, 4), options);
  EXPECT_FALSE(s.split_backward);
  EXPECT_EQ(s.groups[0].compute, Generate("af-pipe", Square(2, 4), options).groups[0].compute);
}

TEST(FillWithWeightGradients, RefusesWhatCannotBe) {
  const auto message = [](auto change) -> std::string {
    Schedule s = Generate("af-pipe", Square(2, 4), Options(4));
    FillTimes times;
    std::vector<int> limit = Peaks(s);
    change(&s, &times, &limit);
    try {
      FillWithWeightGradients(&s, times, limit);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  using S = Schedule*;
  using T = FillTimes*;
  using L = std::vector<int>*;
  EXPECT_EQ(message([](S, T, L) {}), "no error");
  EXPECT_NE(message([](S, T, L limit) { --limit->at(2); }).find("group F0"), std::string::npos);
  EXPECT_NE(message([](S s, T, L) { s->backward = false; }).find("forward-only"), std::string::npos);
  EXPECT_NE(message([](S s, T, L) { s->split_backward = true; }).find("a split backward"), std::string::npos);
  EXPECT_NE(message([](S, T t, L) { t->weight_share = 2; }).find("a share from 0 to 1"), std::string::npos);
  EXPECT_NE(message([](S, T t, L) { t->ffn = 0; }).find("times above 0"), std::string::npos);
  EXPECT_NE(message([](S s, T, L) {
              std::swap(s->groups[0].compute.front(), s->groups[0].compute.back());
            }).find("stops before B0.3"),
            std::string::npos);
  EXPECT_NE(message([](S s, T, L) { s->groups[0].compute.erase(s->groups[0].compute.begin()); }).find("does not run"),
            std::string::npos);
}

}  // namespace
}  // namespace disagmoe
