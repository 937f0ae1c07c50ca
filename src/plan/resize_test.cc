#include "plan/resize.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/rng.h"

namespace disagmoe {
namespace {

LayoutCosts RandomCosts(Rng* random, int layouts, int lengths) {
  LayoutCosts c;
  for (int i = 0; i < layouts; ++i) {
    c.step.emplace_back();
    c.move.emplace_back();
    for (int k = 0; k < lengths; ++k) {
      const bool cannot = i > 0 && random->Below(6) == 0;  // layout 0 runs everything
      c.step[i].push_back(cannot ? kCannot : 1 + random->Uniform());
    }
    for (int j = 0; j < layouts; ++j) c.move[i].push_back(i == j ? 0 : 10 * random->Uniform());
  }
  return c;
}

// Every sequence of choices.
double Cheapest(const LayoutCosts& c, const std::vector<Phase>& phases, const std::vector<int>& length_of, size_t k,
                int before) {
  if (k == phases.size()) return 0;
  double best = kCannot;
  for (int i = 0; i < c.count(); ++i) {
    const double here =
        static_cast<double>(phases[k].steps) * c.step[i][length_of[k]] + (before < 0 ? 0 : c.move[before][i]);
    best = std::min(best, here + Cheapest(c, phases, length_of, k + 1, i));
  }
  return best;
}

TEST(PlanResizes, IsTheCheapestOfAllWays) {
  Rng random(11);
  int changed = 0;
  for (int round = 0; round < 200; ++round) {
    const int layouts = 1 + static_cast<int>(random.Below(4)), lengths = 1 + static_cast<int>(random.Below(3));
    const LayoutCosts c = RandomCosts(&random, layouts, lengths);
    std::vector<Phase> phases;
    std::vector<int> length_of;
    const size_t count = 1 + random.Below(5);
    for (size_t k = 0; k < count; ++k) {
      length_of.push_back(static_cast<int>(random.Below(static_cast<uint64_t>(lengths))));
      phases.push_back({1000 * (1 + length_of.back()), 1 + static_cast<int64_t>(random.Below(60))});
    }
    const ResizePlan plan = PlanResizes(c, phases, length_of);
    EXPECT_NEAR(plan.seconds, Cheapest(c, phases, length_of, 0, -1), 1e-9);
    // What it says it does costs what it says.
    double seconds = 0, moving = 0;
    for (size_t k = 0; k < phases.size(); ++k) {
      seconds += static_cast<double>(phases[k].steps) * c.step[plan.layout[k]][length_of[k]];
      if (k > 0) moving += c.move[plan.layout[k - 1]][plan.layout[k]];
    }
    EXPECT_NEAR(plan.moving, moving, 1e-9);
    EXPECT_NEAR(plan.seconds, seconds + moving, 1e-9);
    EXPECT_LE(plan.seconds, plan.single_seconds + 1e-9);
    changed += plan.changes > 0;
  }
  EXPECT_GT(changed, 20);
}

// Two layouts, each faster at one length by 1 s a step; 10 s there, 30 s back.
LayoutCosts TwoLayouts() { return {{{1, 4}, {2, 3}}, {{0, 10}, {30, 0}}}; }

TEST(PlanResizes, ByHand) {
  const std::vector<int> lengths{0, 1, 0};
  // 20 steps gain 20 s for 10 + 30: not worth it; the phase of 4096 decides. 100 + 80 + 100.
  ResizePlan plan = PlanResizes(TwoLayouts(), {{4096, 100}, {32768, 20}, {4096, 100}}, lengths);
  EXPECT_EQ(plan.layout, (std::vector<int>{0, 0, 0}));
  EXPECT_DOUBLE_EQ(plan.seconds, 280);
  EXPECT_EQ(plan.changes, 0);
  // 50 steps gain 50.
  plan = PlanResizes(TwoLayouts(), {{4096, 100}, {32768, 50}, {4096, 100}}, lengths);
  EXPECT_EQ(plan.layout, (std::vector<int>{0, 1, 0}));
  EXPECT_DOUBLE_EQ(plan.seconds, 100 + 10 + 150 + 30 + 100);
  EXPECT_DOUBLE_EQ(plan.moving, 40);
  EXPECT_EQ(plan.single, 0);
  EXPECT_DOUBLE_EQ(plan.single_seconds, 400);
  // Never coming back, 11 steps are enough; at 10 it is the same, and it stays.
  EXPECT_EQ(PlanResizes(TwoLayouts(), {{4096, 100}, {32768, 11}}, {0, 1}).changes, 1);
  EXPECT_EQ(PlanResizes(TwoLayouts(), {{4096, 100}, {32768, 10}}, {0, 1}).changes, 0);
}

TEST(PlanResizes, WhatNothingRunsIsSaid) {
  LayoutCosts c = TwoLayouts();
  c.step[0][1] = kCannot;
  const ResizePlan plan = PlanResizes(c, {{4096, 100}, {32768, 1}, {4096, 100}}, {0, 1, 0});
  EXPECT_EQ(plan.layout, (std::vector<int>{0, 1, 0}));  // must
  EXPECT_EQ(plan.single, 1);
  c.step[1][1] = kCannot;
  EXPECT_THROW(PlanResizes(c, {{4096, 100}, {32768, 1}}, {0, 1}), Error);
}

TEST(BreakEven, ByHand) {
  const BreakEven e = BreakEvenOf(TwoLayouts(), 0, 1, false);
  EXPECT_EQ(e.to, 1);
  EXPECT_DOUBLE_EQ(e.gain, 1);
  EXPECT_EQ(e.steps, 10);
  EXPECT_EQ(e.steps_back, 40);
  EXPECT_EQ(BreakEvenOf(TwoLayouts(), 1, 1, false).to, -1);
  // A target that gains less but is near pays sooner.
  const LayoutCosts three{{{1, 4}, {2, 3}, {2, 3.5}}, {{0, 10, 1}, {30, 0, 1}, {1, 1, 0}}};
  EXPECT_EQ(BreakEvenOf(three, 0, 1, false).to, 2);
  EXPECT_EQ(BreakEvenOf(three, 0, 1, false).steps, 2);
  LayoutCosts must = TwoLayouts();
  must.step[0][1] = kCannot;
  EXPECT_EQ(BreakEvenOf(must, 0, 1, true).steps_back, 1);
}

// One step fewer than it says does not pay, so many do: against the plan of two phases.
TEST(BreakEven, IsWhereThePlanChanges) {
  Rng random(5);
  for (int round = 0; round < 100; ++round) {
    const LayoutCosts c = RandomCosts(&random, 3, 2);
    const BreakEven e = BreakEvenOf(c, 0, 1, false);
    if (e.to < 0 || e.gain == kCannot) continue;
    const auto stays = [&](int64_t steps) { return c.step[0][1] * static_cast<double>(steps); };
    const auto changes = [&](int64_t steps) {
      double best = kCannot;
      for (int to = 1; to < 3; ++to) best = std::min(best, c.move[0][to] + c.step[to][1] * static_cast<double>(steps));
      return best;
    };
    EXPECT_LE(changes(e.steps), stays(e.steps) + 1e-9);
    if (e.steps > 1) {
      EXPECT_GT(changes(e.steps - 1), stays(e.steps - 1) - 1e-9);
    }
  }
}

}  // namespace
}  // namespace disagmoe
