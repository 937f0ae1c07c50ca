// Published closed forms beside what event models of the schedules do.
#include "schedule/closed_forms.h"

#include <gtest/gtest.h>

#include "schedule/schedule.h"
#include "schedule/split_model_for_tests.h"

namespace disagmoe {
namespace {

// system.md section 5: with L = 1, T_a = T_f, T_M2N = T_a2a, T_p2p = 0 exactly 1/4, whatever PP and v are.
TEST(ClosedForms, WarmUpRatioAsPrinted) {
  for (int pp : {2, 8, 16}) {
    for (int v : {1, 4}) {
      for (double transfer : {0.0, 0.5, 3.0}) {
        const LayerTimes t{.attention = 2, .ffn = 2, .all_to_all = transfer, .m2n = transfer};
        EXPECT_DOUBLE_EQ(WarmUpAfPrinted(pp, v, t) / WarmUpBase(pp, v, 1, t), 0.25);
      }
    }
  }
}

// What the schedules do on as many groups of as many GPUs: PP colocated groups of one layer each, and PP positions of
// two pools. The colocated chain to the last group is PP - 1 layers, each attention, dispatch, experts, combine;
// AF-Pipe's is PP - 1 stages, each a computation and a transfer. So the ratio is 1/2: the printed B_AF has a factor of
// 1/2 too many.
TEST(ClosedForms, WarmUpRatioOfTheSchedules) {
  for (int pp : {2, 4, 8}) {
    for (double transfer : {0.0, 0.5, 1.0}) {
      const LayerTimes t{.attention = 1, .ffn = 1, .all_to_all = transfer, .m2n = transfer};
      GenerateOptions options;
      options.num_micro_batches = 2 * pp;
      const SplitTimes times{.transfer = transfer, .within_groups = true};
      const Schedule base =
          Generate("megatron-1f1b", {.num_layers = pp, .p_a = pp, .colocated = true, .virtual_stages = 1}, options);
      const Schedule af = Generate("af-pipe", {.num_layers = pp, .p_a = pp / 2, .p_f = pp / 2}, options);
      const double base_start = RunSplitModel(base, times).first.back();
      const double af_start = RunSplitModel(af, times).first.back();
      EXPECT_DOUBLE_EQ(base_start, WarmUpBase(pp, 1, 1, t));
      EXPECT_DOUBLE_EQ(af_start, WarmUpAf(pp, t));
      EXPECT_DOUBLE_EQ(af_start / base_start, 0.5);
      EXPECT_DOUBLE_EQ(WarmUpAfPrinted(pp, 1, t), af_start / 2);
    }
  }
}

// Also for other rounds and chunks: the start of the last position does not depend on them.
TEST(ClosedForms, WarmUpOfAfPipe) {
  for (int p : {1, 2, 4}) {
    for (int v : {1, 3}) {
      for (int q : {2 * p, 4 * p}) {
        for (double transfer : {0.0, 0.25, 1.0}) {
          GenerateOptions options;
          options.num_micro_batches = 4 * p;
          options.round = q;
          const Schedule s = Generate("af-pipe", {.num_layers = p * v, .p_a = p, .p_f = p}, options);
          EXPECT_DOUBLE_EQ(RunSplitModel(s, {.transfer = transfer}).first.back(), WarmUpAf(2 * p, {.m2n = transfer}));
        }
      }
    }
  }
}

// Interleaved 1F1B with v chunks of one layer (F = 2, B = 4): (M v + p - 1)(F + B), bubble (p - 1)/(M v) of the work.
TEST(ClosedForms, Interleaved) {
  for (int p : {2, 3, 4}) {
    for (int v : {1, 2, 4}) {
      for (int rounds : {1, 3}) {
        GenerateOptions options;
        options.num_micro_batches = p * rounds;
        options.round = p;
        const Schedule s =
            Generate("megatron-1f1b", {.num_layers = p * v, .p_a = p, .colocated = true, .virtual_stages = v}, options);
        const SplitResult r = RunSplitModel(s, {});
        EXPECT_DOUBLE_EQ(r.step, StepInterleaved(p, v, p * rounds, {2, 4, 2}));
        EXPECT_NEAR(r.step / r.busy[0] - 1, BubbleRatioInterleaved(p, v, p * rounds), 1e-12);
      }
    }
  }
}

// Figures by hand, PP = 8, F = 1, B = 2, W = 1: 7 * 3, 7 * 1, 3 * (3 + 2 - 3).
TEST(ClosedForms, ByHand) {
  EXPECT_DOUBLE_EQ(BubbleOneForwardOneBackward(8, {1, 2, 1}), 21);
  EXPECT_DOUBLE_EQ(BubbleZeroBubble(8, {1, 2, 1}), 7);
  EXPECT_DOUBLE_EQ(BubbleDualPipe(8, 3, {1, 2, 1}), 6);
  EXPECT_DOUBLE_EQ(WarmUpBase(4, 2, 3, {1, 2, 0.5, 0, 7}), 1.5 * (3 * 4 + 7));
  EXPECT_DOUBLE_EQ(WarmUpAfPrinted(4, 2, {1, 2, 0, 0.5, 0}), 0.75 * 2.5);
  EXPECT_DOUBLE_EQ(WarmUpAf(4, {1, 2, 0, 0.5, 0}), 3 * 2);
}

}  // namespace
}  // namespace disagmoe
