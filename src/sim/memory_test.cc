// Memory over time, by hand.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "sim/made_up_costs_for_tests.h"
#include "sim/simulate.h"

namespace disagmoe {
namespace {

// One group, every computation 10 ns, nothing moves. Activations 100, 50, 10 of stages 0, 1, 2, of which 40, 30, 0 stay
// between B and W; the workspace of B0 is 130; static 1000.
//     0 F0 1100   10 F1 1150   20 F2 1160   30 B2   40 W2 1150   50 B1
//    60 B0 1000 + 100 + 30 + 130 = 1260   70 W1 1000 + 40 + 30   80 W0 1040
TEST(Memory, SplitBackward) {
  const Schedule s = HandSchedule(1, {0, 0, 0}, {{"C0", "F0.0 F1.0 F2.0 B2.0 W2.0 B1.0 B0.0 W1.0 W0.0"}});
  MadeUpCosts costs(s);
  costs.compute = [](const Op&, int) { return 10; };
  costs.static_parts = {.weights = 100, .gradients = 200, .optimizer = 600, .reserved = 100};
  costs.activation = [](const Op& op, int, bool after) {
    const int64_t whole[] = {100, 50, 10}, kept[] = {40, 30, 0};
    return after ? kept[op.stage] : whole[op.stage];
  };
  int64_t workspace = 130;
  costs.workspace = [&](const Op& op, int) { return op == Op{OpKind::kBackward, 0, 0} ? workspace : 0; };
  ClassMemory memory = Simulate(s, costs).memory[0];
  EXPECT_EQ(memory.static_bytes, 1000);
  EXPECT_EQ(memory.parts.optimizer, 600);
  EXPECT_TRUE(memory.timeline.empty());
  EXPECT_EQ(memory.peak_bytes, 1260);
  EXPECT_EQ(memory.peak_at_ns, 60);
  EXPECT_EQ(memory.peak_op, "B0.0");
  EXPECT_EQ(memory.peak_activation_bytes, 130);
  EXPECT_EQ(memory.peak_message_bytes, 0);
  EXPECT_EQ(memory.peak_workspace_bytes(), 130);
  EXPECT_TRUE(memory.fits());
  // B2 frees what F2 kept, W2 has nothing left to free: no point at 50. 70: 40 of F0, 30 of F1.
  const std::vector<MemoryPoint> expected{{0, 100},          {10, 150}, {20, 160}, {40, 150},
                                          {60, 130, 0, 130}, {70, 70},  {80, 40},  {90, 0}};
  EXPECT_EQ(Simulate(s, costs, {.trace = true}).memory[0].timeline, expected);
  // 1160 of F2 is more now, and its first.
  workspace = 30;
  costs.limit = 1160;
  memory = Simulate(s, costs).memory[0];
  EXPECT_EQ(memory.peak_bytes, 1160);
  EXPECT_EQ(memory.peak_at_ns, 20);
  EXPECT_EQ(memory.peak_op, "F2.0");
  EXPECT_TRUE(memory.fits());
  costs.limit = 1149;
  memory = Simulate(s, costs).memory[0];
  EXPECT_FALSE(memory.fits());
  EXPECT_EQ(memory.over_at_ns, 10);
  EXPECT_EQ(memory.over_op, "F1.0");
  EXPECT_EQ(memory.limit_bytes, 1149);
  costs.limit = 999;
  memory = Simulate(s, costs).memory[0];
  EXPECT_EQ(memory.over_at_ns, 0);
  EXPECT_EQ(memory.over_op, "static");
}

// Beside the events of the worker; static + activations + messages + workspace are at most the peak, first when it is.
TEST(Memory, CountersOfATrace) {
  const Schedule s = HandSchedule(2, {0, 1, 1}, {{"A0", "F0.0 F0.1"}, {"F0", "F1.0 F2.0 F1.1 F2.1"}});
  MadeUpCosts costs(s);
  costs.compute = [](const Op& op, int) { return op.stage == 0 ? 10 : 30; };
  costs.transfer = [](const Op& op, int, bool) { return TransferCost{.nic_ns = op.stage == 0 ? 20 : 0}; };
  costs.activation = [](const Op& op, int, bool) { return op.stage == 1 ? 100 : 0; };
  costs.workspace = [](const Op& op, int) { return op.stage == 2 ? 40 : 0; };
  costs.message = [](const Op& op, int) { return op.stage == 0 ? 7 : 0; };
  costs.static_parts = {.weights = 1000};
  const SimResult result = Simulate(s, costs, {.trace = true});
  const ClassMemory& memory = result.memory[1];
  const auto trace = nlohmann::json::parse(PerfettoJson(result.events, {{1, "F0"}}, MemoryCounters(memory, 1)));
  int64_t most = 0;
  double most_at = -1;
  std::map<double, nlohmann::json> at;
  for (const auto& e : trace["traceEvents"]) {
    if (e["name"] == "F1.0") {
      EXPECT_EQ(e["pid"], 2);
      EXPECT_EQ(e["ts"], 0.030);
    }
    if (e["ph"] != "C" || e["name"] != "memory") continue;
    at[e["ts"]] = e["args"];
    EXPECT_EQ(e["pid"], 2);
    EXPECT_EQ(e["args"].size(), 4u);
    EXPECT_EQ(e["args"]["static"], 1000);
    int64_t sum = 0;
    for (const auto& [name, bytes] : e["args"].items()) sum += bytes.get<int64_t>();
    if (sum > most) most = sum, most_at = e["ts"].get<double>();
  }
  // F1.0 [30, 60], F2.0 [60, 90], F1.1 [90, 120], F2.1 [120, 150].
  EXPECT_EQ(at[0.090], (nlohmann::json{{"static", 1000}, {"activations", 100}, {"messages", 7}, {"workspace", 0}}));
  EXPECT_EQ(at[0.120], (nlohmann::json{{"static", 1000}, {"activations", 0}, {"messages", 0}, {"workspace", 40}}));
  EXPECT_EQ(at[0.150], (nlohmann::json{{"static", 1000}, {"activations", 0}, {"messages", 0}, {"workspace", 0}}));
  EXPECT_EQ(most, memory.peak_bytes);
  EXPECT_EQ(most, 1114);
  EXPECT_DOUBLE_EQ(most_at, static_cast<double>(memory.peak_at_ns) * 1e-3);
  EXPECT_DOUBLE_EQ(most_at, 0.030);
}

// W may come late: the order B1 B0 W1 W0 keeps both remainders, B1 W1 B0 W0 one.
//   B1 B0 W1 W0: 40 B1: 150 -> 130   50 B0: 130 -> 70   W1 -> 40   W0 -> 0
// The workspace of W, 70, shows it: 70 + 70 = 140 against 130 + 70 = 200 where W1 runs before B0 (100 + 30).
TEST(Memory, WhatStaysUntilW) {
  for (bool late : {false, true}) {
    const std::string end = late ? "B0.0 W1.0 W0.0" : "W1.0 B0.0 W0.0";
    const Schedule s = HandSchedule(1, {0, 0, 0}, {{"C0", "F0.0 F1.0 F2.0 B2.0 W2.0 B1.0 " + end}});
    MadeUpCosts costs(s);
    costs.compute = [](const Op&, int) { return 10; };
    costs.activation = [](const Op& op, int, bool after) {
      const int64_t whole[] = {100, 50, 0}, kept[] = {40, 30, 0};
      return after ? kept[op.stage] : whole[op.stage];
    };
    costs.workspace = [](const Op& op, int) { return op.kind == OpKind::kWeight && op.stage == 1 ? 70 : 0; };
    const ClassMemory memory = Simulate(s, costs).memory[0];
    EXPECT_EQ(memory.peak_bytes, late ? 150 : 200);
    EXPECT_EQ(memory.peak_op, late ? "F1.0" : "W1.0");
  }
}

// Forward only: activations are dropped when F ends. A message takes its bytes from the start of its receipt to the end
// of its use.  A0: F0.0 [0,10] F0.1 [10,20]; >F0.0 [10,30], >F0.1 [30,50]; F0: F1.0 [30,60], F1.1 [60,90].
// F0: 10 message 7; 30 both messages and F1.0: 14 + 100 (F1.0's message ends at 60); 60 7 + 100.
TEST(Memory, Messages) {
  const Schedule s = HandSchedule(2, {0, 1, 1}, {{"A0", "F0.0 F0.1"}, {"F0", "F1.0 F2.0 F1.1 F2.1"}});
  MadeUpCosts costs(s);
  costs.compute = [](const Op& op, int) { return op.stage == 0 ? 10 : op.stage == 1 ? 30 : 0; };
  costs.transfer = [](const Op& op, int, bool) { return TransferCost{.nic_ns = op.stage == 0 ? 20 : 0}; };
  costs.activation = [](const Op& op, int, bool) { return op.stage == 1 ? 100 : 0; };
  costs.message = [](const Op& op, int) { return op.stage == 0 ? 7 : 0; };
  ClassMemory memory = Simulate(s, costs).memory[1];
  EXPECT_EQ(memory.peak_bytes, 114);
  EXPECT_EQ(memory.peak_at_ns, 30);
  EXPECT_EQ(memory.peak_op, "F1.0");
  EXPECT_EQ(memory.peak_message_bytes, 14);
  EXPECT_EQ(memory.peak_activation_bytes, 100);
  // The second message comes whole while F1.0 runs; at 60 one computation frees and the next one takes as much.
  const std::vector<MemoryPoint> expected{{0}, {10, 0, 7}, {30, 100, 14}, {60, 100, 7}, {90, 0, 0}};
  EXPECT_EQ(Simulate(s, costs, {.trace = true}).memory[1].timeline, expected);
  costs.limit = 6;
  memory = Simulate(s, costs).memory[1];
  EXPECT_EQ(memory.over_at_ns, 10);
  EXPECT_EQ(memory.over_op, "<F0.0");
  costs.limit = 107;
  EXPECT_EQ(Simulate(s, costs).memory[1].over_at_ns, 30);
}

}  // namespace
}  // namespace disagmoe
