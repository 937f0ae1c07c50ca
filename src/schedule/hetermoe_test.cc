// hetermoe: the published order (HeterMoE, arXiv 2504.03871, Theorem 1) and its uneven expert assignment.
#include <gtest/gtest.h>

#include "base/error.h"
#include "schedule/schedule.h"
#include "schedule/split_model_for_tests.h"

namespace disagmoe {
namespace {

Schedule Make(int layers, int micro_batches, int parts, int round = 0, bool head_on_attention = false,
              bool backward = true) {
  GenerateOptions options;
  options.num_micro_batches = micro_batches;
  options.parts = parts;
  options.round = round;
  options.backward = backward;
  return Generate("hetermoe", {.num_layers = layers, .head_on_attention = head_on_attention}, options);
}

std::string Order(const Schedule& s, int group) {
  std::string out;
  for (const Op& op : s.groups[group].compute) out.append(out.empty() ? "" : " ").append(PrintOp(op));
  return out;
}

// Theorem 1 with R = 2 and L = 3, whose last layer is attention alone: here the head, with the attention pool, takes
// that place after two whole layers. A1 A1 A2 A2, then of the last layer forward and backward in turn, then A2 A2 A1
// A1.
TEST(HeterMoe, PublishedOrder) {
  const Schedule s = Make(2, 2, 1, 0, true);
  EXPECT_EQ(Order(s, 0), "F0.0 F0.1 F2.0 F2.1 F4.0 B4.0 F4.1 B4.1 B2.0 B2.1 B0.0 B0.1");
  EXPECT_EQ(Order(s, 1), "F1.0 F1.1 F3.0 F3.1 B3.0 B3.1 B1.0 B1.1");
}

// Section 4.2: experts on the attention group after the attention of all micro-batches of the layer.
TEST(HeterMoe, UnevenOrder) {
  const Schedule s = Make(2, 2, 0, 0, true);
  EXPECT_EQ(Order(s, 0),
            "F0.0 F0.1 F1.0/1 F1.1/1 F2.0 F2.1 F3.0/1 F3.1/1 F4.0 B4.0 F4.1 B4.1 "
            "B3.0/1 B3.1/1 B2.0 B2.1 B1.0/1 B1.1/1 B0.0 B0.1");
  EXPECT_EQ(Order(s, 1), "F1.0 F1.1 F3.0 F3.1 B3.0 B3.1 B1.0 B1.1");
  EXPECT_EQ(s.stage_parts, (std::vector<int>{1, 2, 1, 2, 1}));
  EXPECT_EQ(s.group(3, 0, 0), 1);
  EXPECT_EQ(s.group(3, 0, 1), 0);
}

// The paper's figure 6: three micro-batches, three layers, experts a third slower than attention; the attention GPUs
// compute 75 % of the time of the forward. Here T_a = 3, T_f = 4 and M = 3: from its first attention to the end of its
// last one, A0 computes 9 L of 9 + 12 (L - 1) units; the experts never wait after the first attention.
TEST(HeterMoe, ExpertsSetThePace) {
  for (int layers : {3, 8}) {
    const SplitResult r = RunSplitModel(Make(layers, 3, 1, 0, false, false), {.attention = 3, .ffn = 4});
    EXPECT_DOUBLE_EQ(r.step, 3 + 12 * layers);
    EXPECT_DOUBLE_EQ(r.busy[0], 9 * layers);
    EXPECT_DOUBLE_EQ(r.busy[1], 12 * layers);
  }
}

// T_a = T_f = 1, no transfer time, even assignment. Forward: F0 starts at 1 and never waits; the last micro-batch's
// last stage and head end at 1 + M L if they were not in turn with backwards. A backward of 2 follows each forward on
// F0's last stage: it has M (L - 1) + 3 M + 2 M (L - 1) = 3 M L to do without a wait. A0's first layer then ends 2
// later.
TEST(HeterMoe, StepWithoutTransfers) {
  for (int layers : {1, 3, 6}) {
    for (int m : {2, 4, 7}) {
      EXPECT_DOUBLE_EQ(RunSplitModel(Make(layers, m, 1), {}).step, 3 + 3 * m * layers) << layers << " " << m;
    }
  }
}

// As published a round is the whole step; shorter ones follow each other and hold less.
TEST(HeterMoe, Rounds) {
  const Schedule all = Make(3, 8, 1);
  const Schedule half = Make(3, 8, 1, 4);
  EXPECT_EQ(all.round, 8);
  EXPECT_EQ(all.groups[0].max_in_flight, 8 * 3);
  EXPECT_EQ(half.groups[0].max_in_flight, 4 * 3);
  EXPECT_LT(RunSplitModel(all, {}).step, RunSplitModel(half, {}).step);
}

TEST(HeterMoe, RefusesWhatCannotBe) {
  const auto message = [](PlacementSpec placement, GenerateOptions options) -> std::string {
    options.num_micro_batches = 4;
    try {
      Generate("hetermoe", placement, options);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(message({.num_layers = 4}, {}), "no error");
  EXPECT_NE(message({.num_layers = 4, .p_a = 2}, {}).find("got 2, 1, expected 1, 1"), std::string::npos);
  EXPECT_NE(message({.num_layers = 4, .p_f = 2}, {}).find("got 1, 2, expected 1, 1"), std::string::npos);
  EXPECT_NE(message({.num_layers = 4, .colocated = true}, {}).find("needs two pools"), std::string::npos);
  EXPECT_NE(message({.num_layers = 4}, {.parts = 3}).find("got 3"), std::string::npos);
  EXPECT_NE(message({.num_layers = 4}, {.round = 3}).find("possible rounds: 1, 2, 4"), std::string::npos);
}

}  // namespace
}  // namespace disagmoe
