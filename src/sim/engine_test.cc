// The engine against the design's table (figures of an independent event model, schedule.md section 4), closed forms.
#include <gtest/gtest.h>

#include "base/error.h"
#include "schedule/order.h"
#include "sim/made_up_costs_for_tests.h"
#include "sim/simulate.h"

namespace disagmoe {
namespace {

GenerateOptions Options(int micro_batches, int round, int slope = 2) {
  GenerateOptions options;
  options.num_micro_batches = micro_batches;
  options.round = round;
  options.slope = slope;
  return options;
}

PlacementSpec Square(int p, int layers) { return {.num_layers = layers, .p_a = p, .p_f = p}; }

// T_a = T_f = 1000 ns, B = 2 F, the head and its boundary nothing; one byte an activation, so that the peak of memory
// counts activations in flight.
MadeUpCosts UnitCosts(const Schedule& s, int64_t transfer_ns) {
  MadeUpCosts costs(s);
  const int head = 2 * s.num_layers;
  costs.compute = [head](const Op& op, int) {
    return op.stage == head ? 0 : op.kind == OpKind::kBackward ? 2000 : 1000;
  };
  costs.transfer = [head, transfer_ns](const Op& op, int, bool) {
    return op.stage == head - 1 ? TransferCost{} : TransferCost{.nic_ns = transfer_ns};
  };
  costs.activation = [head](const Op& op, int, bool) { return op.stage == head ? 0 : 1; };
  return costs;
}

// A0 F0 A1 F1 ...
int GroupAt(int p, int position) { return position % 2 == 0 ? position / 2 : p + position / 2; }

struct Row {
  int p, layers, micro_batches, round;
  int64_t transfer, step;
  std::vector<int64_t> peak;  // by position
};

TEST(Engine, TestVectors) {
  const std::vector<Row> rows = {
      {1, 1, 1, 1, 500, 7000, {1, 1}},           {1, 4, 4, 2, 0, 51000, {9, 7}},
      {1, 4, 4, 4, 500, 52000, {15, 13}},        {2, 4, 4, 4, 0, 33000, {8, 8, 7, 5}},
      {2, 4, 8, 4, 1000, 71000, {11, 9, 7, 5}},  {2, 4, 8, 8, 1000, 63000, {15, 13, 11, 9}},
      {2, 3, 8, 4, 500, 56000, {11, 9, 7, 5}},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(testing::Message() << "p " << row.p << " L " << row.layers << " M " << row.micro_batches);
    const Schedule s = Generate("af-pipe", Square(row.p, row.layers), Options(row.micro_batches, row.round));
    for (bool bounded : {false, true}) {
      const SimResult result = Simulate(s, UnitCosts(s, row.transfer), {.bounded_slots = bounded});
      EXPECT_EQ(result.step_ns, row.step);
      for (int i = 0; i < 2 * row.p; ++i) EXPECT_EQ(result.memory[GroupAt(row.p, i)].peak_bytes, row.peak[i]);
    }
  }
}

std::string MessageOf(const Schedule& s, const StepCosts& costs, const SimOptions& options = {}) {
  try {
    Simulate(s, costs, options);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// The last row of the table: slope 3 deadlocks. Its first position has done its forwards and waits for a backward.
TEST(Engine, SteepSlopeDeadlocks) {
  const Schedule s = BuildAfPipeRing(Square(2, 8), Options(12, 4, 3));
  const std::string message = MessageOf(s, UnitCosts(s, 0));
  EXPECT_NE(message.find("group A0"), std::string::npos) << message;
  EXPECT_NE(message.find("it waits for <"), std::string::npos) << message;
  EXPECT_NE(message.find("stands before"), std::string::npos) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

TEST(Engine, DeadlockNamesWhatIsMissing) {
  // A group's own order.
  const Schedule order = HandSchedule(1, {0, 0, 0}, {{"C0", "F0.0 F1.0 B1.0 F2.0 B2.0 B0.0"}});
  EXPECT_NE(MessageOf(order, MadeUpCosts(order)).find("group C0, B1.0"), std::string::npos);
  const Schedule weight = HandSchedule(1, {0, 0, 0}, {{"C0", "F0.0 F1.0 F2.0 W2.0 B2.0 B1.0 W1.0 B0.0 W0.0"}});
  EXPECT_NE(MessageOf(weight, MadeUpCosts(weight)).find("B2.0, which is not before it"), std::string::npos);
  // A whole stage needs both parts of a message, and there is one slot.
  const Schedule slots = HandSchedule(1, {0, 1, 0}, {{"A0", "F0.0 F2.0"}, {"F0", "F1.0/0 F1.0/1"}}, 1, {1, 2, 1});
  MadeUpCosts costs(slots);
  costs.transfer = [](const Op&, int, bool) { return TransferCost{.nic_ns = 1}; };
  EXPECT_NE(MessageOf(slots, costs).find("group A0, F2.0"), std::string::npos) << MessageOf(slots, costs);
  EXPECT_NE(MessageOf(slots, costs).find("<F1.0/1, which waits for one of 1 receive slots"), std::string::npos);
  EXPECT_EQ(MessageOf(slots, costs, {.bounded_slots = false}), "no error");
  // Another micro-batch may not start under an exchange, and its slot is not freed otherwise.
  Schedule held = HandSchedule(2, {0, 0, 0}, {{"C0", "F0.0 F0.1 F1.0 F2.0 F1.1 F2.1"}}, 1);
  held.sync_exchange = true;
  MadeUpCosts held_costs(held);
  held_costs.transfer = [](const Op& op, int, bool) { return TransferCost{.nic_ns = op.stage == 0 ? 1 : 0}; };
  EXPECT_NE(MessageOf(held, held_costs).find("the group's own exchanges >F0.1"), std::string::npos);
  EXPECT_EQ(MessageOf(held, held_costs, {.sync_exchange = false}), "no error");
}

// Without transfers, q >= R, q | M: step = (M v + R - 1)(F + B).
TEST(Engine, ClosedFormWithoutTransferTime) {
  for (int p = 1; p <= 4; ++p) {
    for (int v = 1; v <= 3; ++v) {
      for (int q : {2 * p, 2 * p + 1, 4 * p}) {
        const int m = 2 * q;
        const Schedule s = Generate("af-pipe", Square(p, p * v), Options(m, q));
        SCOPED_TRACE(testing::Message() << "p " << p << " v " << v << " q " << q);
        EXPECT_EQ(Simulate(s, UnitCosts(s, 0)).step_ns, (m * v + 2 * p - 1) * 3000);
      }
    }
  }
}

// The last position starts after R - 1 forwards and transfers: (R - 1) [(T_a + T_f) / 2 + T_M2N].
TEST(Engine, WarmUp) {
  for (int p : {1, 2, 4}) {
    for (int64_t transfer : {0, 250, 1000}) {
      const Schedule s = Generate("af-pipe", Square(p, 2 * p), Options(8, 8));
      const SimResult result = Simulate(s, UnitCosts(s, transfer), {.trace = true});
      const int last = s.groups[GroupAt(p, 2 * p - 1)].ranks[0];
      for (const TraceEvent& event : result.events) {
        if (event.rank != last || event.stream != Stream::kForward) continue;
        EXPECT_EQ(event.begin_ns, (2 * p - 1) * (1000 + transfer));
        break;
      }
    }
  }
}

// A group's compute time is that of its stages; the busiest resource bounds the step, and is named.
TEST(Engine, Limit) {
  Schedule s = Generate("af-pipe", {.num_layers = 2, .p_a = 1, .p_f = 1, .m = 2, .n = 1}, Options(4, 4));
  MadeUpCosts costs = UnitCosts(s, 100);
  // 4 micro-batches, 2 stages, F + B.
  SimResult result = Simulate(s, costs);
  EXPECT_EQ(result.limit_ns, 4 * 2 * 3000);
  EXPECT_EQ(result.limit, "compute of A0");
  costs.step_end = [](int c) { return StepEndCost{.reduce_ns = 7, .optimizer_ns = c == 1 ? 11 : 5}; };
  result = Simulate(s, costs);
  EXPECT_EQ(result.limit_ns, 4 * 2 * 3000 + 11);
  EXPECT_EQ(result.limit, "compute of F0.0");
  EXPECT_EQ(result.times[1].optimizer_ns, 11);
  EXPECT_EQ(result.times[1].reduce_ns, 7);
  // A0 receives two combines forward (boundary 1; boundary 3 is free) and two gradients backward a micro-batch, each
  // 4000 ns: 4 (1 + 2) 4000; it sends 4 (2 + 1) of 10 ns.
  costs.transfer = [](const Op& op, int c, bool sending) {
    return op.stage == 3 ? TransferCost{} : TransferCost{.nic_ns = 10, .nvlink_ns = c == 0 && !sending ? 4000 : 10};
  };
  result = Simulate(s, costs);
  EXPECT_EQ(result.limit_ns, 4 * 3 * 4000);
  EXPECT_EQ(result.limit, "NVLink receive of A0");
  EXPECT_EQ(result.times[0].nvlink_send_ns, 4 * 3 * 10);
  EXPECT_EQ(result.times[0].nic_receive_ns, 4 * 3 * 10);
}

TEST(Engine, CountsOperationsAndBytes) {
  const Schedule s = Generate("af-pipe", Square(1, 2), Options(4, 4));
  MadeUpCosts costs(s);
  costs.transfer = [](const Op&, int, bool sending) {
    return TransferCost{.nic_ns = 1, .nic_bytes = sending ? 3 : 50, .nvlink_bytes = sending ? 5 : 70};
  };
  const SimResult result = Simulate(s, costs);
  // 5 stages and 4 boundaries, forward and backward, 4 micro-batches.
  EXPECT_EQ(result.num_ops, (5 + 4) * 2 * 4);
  // A0 sends boundaries 0 and 2 forward, 1 backward; F0 1 and 3 forward, 0, 2 backward and, to itself, 3.
  EXPECT_EQ(result.times[0].nic_bytes_sent, 4 * 3 * 3);
  EXPECT_EQ(result.times[0].nvlink_bytes_sent, 4 * 3 * 5);
  EXPECT_EQ(result.times[1].nic_bytes_sent, 4 * 5 * 3);
}

TEST(Engine, ClassNames) {
  const Schedule s = Generate("af-pipe", {.num_layers = 2, .p_a = 2, .p_f = 1, .m = 4, .n = 1}, Options(2, 2));
  EXPECT_EQ(ClassName(s, {0, 4, 0}), "A0");
  EXPECT_EQ(ClassName(s, {1, 3, 1}), "A1.1");
  EXPECT_EQ(ClassName(s, {1, 1, 0}), "A1.0");
  EXPECT_EQ(ClassName(s, {2, 1, 0}), "F0.0");
}

}  // namespace
}  // namespace disagmoe
