// Tiny cases whose times are worked out by hand.
#include <gtest/gtest.h>

#include "base/error.h"
#include "sim/made_up_costs_for_tests.h"
#include "sim/simulate.h"
#include "trace/trace.h"

namespace disagmoe {
namespace {

// "begin-end" of an event of a rank, in order of the trace; waits and steps as well.
std::string At(const SimResult& result, int rank, const std::string& name) {
  std::string out;
  for (const TraceEvent& e : result.events) {
    if (e.rank != rank || e.name != name) continue;
    out += (out.empty() ? "" : " ") + std::to_string(e.begin_ns) + "-" + std::to_string(e.end_ns);
  }
  return out;
}

SimResult Traced(const Schedule& s, const StepCosts& costs, bool bounded = true) {
  return Simulate(s, costs, {.trace = true, .bounded_slots = bounded});
}

TransferCost Nic(int64_t ns) { return {.nic_ns = ns}; }

void ExpectTimes(const ClassTimes& t, int64_t compute, int64_t overlapped, int64_t exposed, int64_t bubble) {
  EXPECT_EQ(t.compute_ns, compute);
  EXPECT_EQ(t.overlapped_ns, overlapped);
  EXPECT_EQ(t.exposed_ns, exposed);
  EXPECT_EQ(t.bubble_ns, bubble);
}

// Computations 10, the head 0, transfers over boundary 0 30.
//   A0  F0.0 [0,10] F0.1 [10,20]                          B0.0 [90,100]             B0.1 [120,130]
//       sends >F0.0 [10,40] >F0.1 [40,70]                 receives <B0.0 [60,90] <B0.1 [90,120]
//   F0  F1.0 [40,50] B1.0 [50,60]  F1.1 [70,80] B1.1 [80,90]
// >B0.0 moves from 60 on, beside >F0.1: full duplex. (Half duplex: from 70 on, step 140.)
// A0 waits [20,90] for a message posted at 60, [100,120] for one posted at 90. It computes [10,20] beside its sending
// and [90,100] beside its receiving. F0 waits [0,40] for what is posted at 10 and [60,70] for what was at 20.
TEST(Hand, FullDuplex) {
  const Schedule s = HandSchedule(2, {0, 1, 1}, {{"A0", "F0.0 F0.1 B0.0 B0.1"},
                                                 {"F0", "F1.0 F2.0 B2.0 B1.0 F1.1 F2.1 B2.1 B1.1"}});
  MadeUpCosts costs(s);
  costs.compute = [](const Op& op, int) { return op.stage == 2 ? 0 : 10; };
  costs.transfer = [](const Op& op, int, bool) {
    return op.stage == 0 ? TransferCost{.nic_ns = 30, .nic_bytes = 8} : TransferCost{};
  };
  costs.step_end = [](int c) { return c == 0 ? StepEndCost{.reduce_ns = 3, .optimizer_ns = 4} : StepEndCost{}; };
  const SimResult r = Traced(s, costs);
  EXPECT_EQ(r.step_ns, 137);
  EXPECT_EQ(At(r, 0, "F0.0") + " " + At(r, 0, "F0.1"), "0-10 10-20");
  EXPECT_EQ(At(r, 0, "B0.0") + " " + At(r, 0, "B0.1"), "90-100 120-130");
  EXPECT_EQ(At(r, 1, "F1.0") + " " + At(r, 1, "B1.0"), "40-50 50-60");
  EXPECT_EQ(At(r, 1, "F1.1") + " " + At(r, 1, "B1.1"), "70-80 80-90");
  EXPECT_EQ(At(r, 0, ">F0.0") + " " + At(r, 0, ">F0.1"), "10-40 40-70");
  EXPECT_EQ(At(r, 1, "<F0.1"), "40-70");
  EXPECT_EQ(At(r, 1, ">B0.0") + " " + At(r, 1, ">B0.1"), "60-90 90-120");
  EXPECT_EQ(At(r, 0, "<B0.0") + " " + At(r, 0, "<B0.1"), "60-90 90-120");
  ExpectTimes(r.times[0], 20 + 4, 20, 30 + 20 + 3, 40);
  ExpectTimes(r.times[1], 0, 40, 30 + 10, 10 + 47);
  EXPECT_EQ(At(r, 0, "bubble"), "20-60");
  EXPECT_EQ(At(r, 0, "exposed"), "60-90 100-120 130-133");
  EXPECT_EQ(At(r, 0, "reduce") + " " + At(r, 0, "optimizer") + " " + At(r, 0, "step"), "130-133 133-137 0-137");
  EXPECT_EQ(At(r, 1, "bubble"), "0-10 90-137");
  for (const TraceEvent& e : r.events) {
    EXPECT_EQ(e.step, 1);
    if (e.stream != Stream::kSend && e.stream != Stream::kReceive) continue;
    EXPECT_EQ(e.bytes, 8);
    EXPECT_EQ(e.peer, 1 - e.rank);
  }
}

// Both directions of F0's NIC queue are used by A0 and F0 alone: the head is with A0. Computations 10; sends of F0:
// >F1.0 1, >F1.1 100, >F1.2 7, gradients 9; what A0 sends costs nothing.
//   A0  F0.0 F0.1 F0.2 [0,30] F2.0 [30,40] B2.0 [40,50]
//   F0  F1.0 [10,20] F1.1 [20,30] F1.2 [30,40] B1.0 [50,60]
//   NIC of F0: >F1.0 [20,21] >F1.1 [30,130]; >F1.2 is posted at 40, >B0.0 at 60: the gradient goes first, [130,139],
//   then >F1.2 [139,146].
TEST(Hand, BackwardFirst) {
  const Schedule s = HandSchedule(3, {0, 1, 0}, {{"A0", "F0.0 F0.1 F0.2 F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 B0.0 B0.1 B0.2"},
                                                 {"F0", "F1.0 F1.1 F1.2 B1.0 B1.1 B1.2"}});
  MadeUpCosts costs(s);
  costs.compute = [](const Op&, int) { return 10; };
  costs.transfer = [](const Op& op, int, bool) {
    if (op == Op{OpKind::kSendBackward, op.stage, op.micro_batch}) return Nic(op.stage == 0 ? 9 : 0);
    const int64_t forward[] = {1, 100, 7};
    return Nic(op.stage == 1 ? forward[op.micro_batch] : 0);
  };
  const SimResult r = Traced(s, costs);
  EXPECT_EQ(At(r, 1, ">F1.0") + " " + At(r, 1, ">F1.1"), "20-21 30-130");
  EXPECT_EQ(At(r, 1, ">B0.0") + " " + At(r, 1, ">F1.2"), "130-139 139-146");
  EXPECT_EQ(At(r, 0, "<B0.0") + " " + At(r, 0, "<F1.2"), "130-139 139-146");
}

// Two fabrics at once, unequal sides, latency. The NIC sends [10,14] and receives from 10 on for 9; NVLink sends
// [10,17] and receives [10,12]: all has ended at 19, it is there at 19 + 5.
TEST(Hand, FabricsAndLatency) {
  const Schedule s = HandSchedule(1, {0, 1, 1}, {{"A0", "F0.0"}, {"F0", "F1.0 F2.0"}});
  MadeUpCosts costs(s);
  costs.compute = [](const Op&, int) { return 10; };
  costs.transfer = [](const Op& op, int, bool sending) {
    if (op.stage == 1) return TransferCost{};
    return sending ? TransferCost{.nic_ns = 4, .nvlink_ns = 7, .latency_ns = 5}
                   : TransferCost{.nic_ns = 9, .nvlink_ns = 2, .latency_ns = 3};
  };
  const SimResult r = Traced(s, costs);
  EXPECT_EQ(At(r, 0, ">F0.0"), "10-17");
  EXPECT_EQ(At(r, 1, "<F0.0"), "10-24");
  EXPECT_EQ(At(r, 1, "F1.0"), "24-34");
  EXPECT_EQ(r.times[0].nvlink_send_ns, 7);
  EXPECT_EQ(r.times[1].nic_receive_ns, 9);
}

// One slot: a message waits until the one before it is used. A0 computes 10, F0 20, the second layer's 10; transfers 5.
//   A0  F0.0 F0.1 F0.2 [0,30]                          F2.0 [40,50]
//   >F0.0 [10,15]; F1.0 [15,35]; >F0.1 posted at 20 [35,40]; F1.1 [40,60]; >F0.2 posted at 30 [60,65]
//   >F2.0, posted at 50 to another group, passes the one that waits: [50,55].
// Without bounds >F0.1 [20,25], >F0.2 [30,35].
TEST(Hand, Slots) {
  const Schedule s = HandSchedule(3, {0, 1, 0, 2, 2}, {{"A0", "F0.0 F0.1 F0.2 F2.0 F2.1 F2.2"},
                                                       {"F0", "F1.0 F1.1 F1.2"},
                                                       {"F1", "F3.0 F4.0 F3.1 F4.1 F3.2 F4.2"}}, 1);
  MadeUpCosts costs(s);
  costs.compute = [](const Op& op, int) { return op.stage == 1 ? 20 : 10; };
  costs.transfer = [](const Op& op, int, bool) { return Nic(op.stage == 3 ? 0 : 5); };
  SimResult r = Traced(s, costs);
  EXPECT_EQ(At(r, 0, ">F0.0") + " " + At(r, 0, ">F0.1") + " " + At(r, 0, ">F0.2"), "10-15 35-40 60-65");
  EXPECT_EQ(At(r, 0, "F2.0"), "40-50");
  EXPECT_EQ(At(r, 0, ">F2.0"), "50-55");
  // F0 waits for F0.1's message, which is posted at 20, from 35 to 40.
  EXPECT_EQ(At(r, 1, "exposed"), "10-15 35-40 60-65");
  r = Traced(s, costs, false);
  EXPECT_EQ(At(r, 0, ">F0.0") + " " + At(r, 0, ">F0.1") + " " + At(r, 0, ">F0.2"), "10-15 20-25 30-35");
}

// A freed slot goes to the message that is used next, not to the one posted first: the receiver's order is that of
// its slots. A0 makes micro-batch 1 first, F0 uses 0 first; one slot. >F0.1 is posted at 10 and parks until F1.0 has
// ended: >F0.0 [20,25], F1.0 [25,35], >F0.1 [35,40].
TEST(Hand, SlotsInOrderOfUse) {
  const Schedule s = HandSchedule(2, {0, 1, 1}, {{"A0", "F0.1 F0.0"}, {"F0", "F1.0 F2.0 F1.1 F2.1"}}, 1);
  MadeUpCosts costs(s);
  costs.compute = [](const Op& op, int) { return op.stage == 2 ? 0 : 10; };
  costs.transfer = [](const Op& op, int, bool) { return Nic(op.stage == 0 ? 5 : 0); };
  const SimResult r = Traced(s, costs);
  EXPECT_EQ(At(r, 1, "F1.0") + " " + At(r, 1, "F1.1"), "25-35 40-50");
}

// An exchange of the group with itself over boundary 0 (6 ns) holds what is not of its micro-batch and its two stages.
//   async: F0.0 [0,10] F0.1 [10,20] F1.0 [20,30] F1.1 [30,40]
//   sync:  F0.0 [0,10], exchange [10,16], F0.1 [16,26], exchange [26,32], F1.0 [32,42], F1.1 [42,52]
TEST(Hand, SyncExchange) {
  Schedule s = HandSchedule(2, {0, 0, 0}, {{"C0", "F0.0 F0.1 F1.0 F2.0 F1.1 F2.1"}});
  MadeUpCosts costs(s);
  costs.compute = [](const Op& op, int) { return op.stage == 2 ? 0 : 10; };
  costs.transfer = [](const Op& op, int, bool) { return TransferCost{.nvlink_ns = op.stage == 0 ? 6 : 0}; };
  EXPECT_EQ(Traced(s, costs).step_ns, 40);
  s.sync_exchange = true;
  const SimResult r = Traced(s, costs);
  EXPECT_EQ(At(r, 0, "F0.1") + " " + At(r, 0, "F1.0") + " " + At(r, 0, "F1.1"), "16-26 32-42 42-52");
  EXPECT_EQ(At(r, 0, "exposed"), "10-16 26-32");
  ExpectTimes(r.times[0], 40, 0, 12, 0);
  EXPECT_EQ(Simulate(s, costs, {.sync_exchange = false}).step_ns, 40);
}

// Its own two stages may start: parts of one micro-batch overlap (two parts of stage 1, 4 each; exchanges 6 each over
// both boundaries, the head 10). Part 0 is there at 16, part 1 at 22: F1.0 [16,20] runs under the exchange of part 1,
// F1.0/1 [22,26] under that of part 0's result, posted at 20, [22,28]; >F1.0/1 [28,34]; F2.0 [34,44]. All waiting, 6, 2
// and 8, is for what is posted.
TEST(Hand, SyncExchangeOverlapsItsParts) {
  Schedule s = HandSchedule(1, {0, 0, 0}, {{"C0", "F0.0 F1.0/0 F1.0/1 F2.0"}}, 8, {1, 2, 1});
  s.sync_exchange = true;
  MadeUpCosts costs(s);
  costs.compute = [](const Op& op, int) { return op.stage == 1 ? 4 : 10; };
  costs.transfer = [](const Op&, int, bool) { return Nic(6); };
  const SimResult r = Traced(s, costs);
  EXPECT_EQ(At(r, 0, "F1.0") + " " + At(r, 0, "F1.0/1") + " " + At(r, 0, "F2.0"), "16-20 22-26 34-44");
  ExpectTimes(r.times[0], 20, 8, 6 + 2 + 8, 0);
}

// C0 has two classes, of which the second takes 20 for a forward instead of 10. An exchange within C0 (NVLink, 4)
// comes before the send to F0 (NIC, 5; F0 receives for 7). It has arrived when the slow class has sent: 24.
//   fast F0.0 [0,10], held until 24, F0.1 [24,34]; slow F0.0 [0,20], held until 24, F0.1 [24,44]
//   NIC [24,29], F0 receives [24,31], F1.0 [31,41]. The send itself holds nobody. For micro-batch 1: fast posts at 34,
//   slow at 44, there at 48, F0 receives [48,55], F1.1 [55,65].
TEST(Hand, LocalPhaseThenSend) {
  Schedule s = HandSchedule(2, {0, 1, 1}, {{"C0", "F0.0 F0.1", 3}, {"F0", "F1.0 F2.0 F1.1 F2.1"}});
  s.sync_exchange = true;
  MadeUpCosts costs(s);
  costs.made_classes = {{0, 2, 0}, {0, 1, 2}, {1, 1, 0}};
  costs.compute = [](const Op& op, int c) { return op.stage == 2 ? 0 : c == 1 ? 20 : 10; };
  costs.has_local = [](const Op& op) { return op.stage == 0; };
  costs.local = [](const Op&, int, bool) { return TransferCost{.nvlink_ns = 4, .nvlink_bytes = 1}; };
  costs.transfer = [](const Op& op, int, bool sending) { return Nic(op.stage == 1 ? 0 : sending ? 5 : 7); };
  const SimResult r = Traced(s, costs);
  EXPECT_EQ(At(r, 0, "F0.0") + " " + At(r, 0, "F0.1"), "0-10 24-34");
  EXPECT_EQ(At(r, 2, "F0.0") + " " + At(r, 2, "F0.1"), "0-20 24-44");
  EXPECT_EQ(At(r, 0, ">F0.0 local") + " " + At(r, 0, "<F0.0 local"), "10-14 10-24");
  EXPECT_EQ(At(r, 2, ">F0.0 local"), "20-24");
  EXPECT_EQ(At(r, 0, ">F0.0") + " " + At(r, 2, ">F0.0"), "24-29 24-29");
  EXPECT_EQ(At(r, 3, "F1.0") + " " + At(r, 3, "F1.1"), "31-41 55-65");
  // F0's first message is posted by the slow class at 20.
  EXPECT_EQ(At(r, 3, "bubble"), "0-20 41-44");
  EXPECT_EQ(At(r, 3, "exposed"), "20-31 44-55");
  ExpectTimes(r.times[0], 15, 5, 14, 31);  // overlapped: [24,29]
  EXPECT_EQ(r.times[0].nvlink_bytes_sent, 2);
}

// A slow worker in A0 (13 instead of 10) delays F0, and nobody else: the message is there when both have sent (5 each;
// F0 receives 5 from the first start on).
//   fast F0.0 [0,10] F0.1 [10,20]; slow [0,13] [13,26]; F0: <F0.0 [10,15], there at 18, F1.0 [18,28];
//   <F0.1 [20,25], there at 31, F1.1 [31,41].
TEST(Hand, OneSlowWorker) {
  const Schedule s = HandSchedule(2, {0, 1, 1}, {{"A0", "F0.0 F0.1", 2}, {"F0", "F1.0 F2.0 F1.1 F2.1"}});
  MadeUpCosts costs(s);
  costs.made_classes = {{0, 1, 0}, {0, 1, 1}, {1, 1, 0}};
  costs.compute = [](const Op& op, int c) { return op.stage == 2 ? 0 : c == 1 ? 13 : 10; };
  costs.transfer = [](const Op& op, int, bool) { return Nic(op.stage == 0 ? 5 : 0); };
  const SimResult r = Traced(s, costs);
  EXPECT_EQ(At(r, 0, "F0.0") + " " + At(r, 0, "F0.1"), "0-10 10-20");
  EXPECT_EQ(At(r, 1, "F0.0") + " " + At(r, 1, "F0.1"), "0-13 13-26");
  EXPECT_EQ(At(r, 2, "<F0.0") + " " + At(r, 2, "<F0.1"), "10-18 20-31");
  EXPECT_EQ(At(r, 2, "F1.0") + " " + At(r, 2, "F1.1"), "18-28 31-41");
  EXPECT_EQ(At(r, 2, "bubble") + " " + At(r, 2, "exposed"), "0-13 13-18 28-31");
}

// Stage 1 in two parts (8 each), transfers 5, computations of A0 10.
//   F0.0 [0,10]; >F0.0 [10,15] >F0.0/1 [15,20]; F1.0 [15,23] F1.0/1 [23,31]; >F1.0 [23,28] >F1.0/1 [31,36];
//   F2.0 [36,46]. A0 waits [10,36] for its last input, which is posted at 31.
TEST(Hand, Parts) {
  const Schedule s = HandSchedule(1, {0, 1, 0}, {{"A0", "F0.0 F2.0"}, {"F0", "F1.0/0 F1.0/1"}}, 2, {1, 2, 1});
  MadeUpCosts costs(s);
  costs.compute = [](const Op& op, int) { return op.stage == 1 ? 8 : 10; };
  costs.transfer = [](const Op&, int, bool) { return Nic(5); };
  const SimResult r = Traced(s, costs);
  EXPECT_EQ(r.step_ns, 46);
  EXPECT_EQ(At(r, 1, "F1.0") + " " + At(r, 1, "F1.0/1"), "15-23 23-31");
  EXPECT_EQ(At(r, 0, ">F0.0") + " " + At(r, 0, ">F0.0/1"), "10-15 15-20");
  EXPECT_EQ(At(r, 1, ">F1.0") + " " + At(r, 1, ">F1.0/1"), "23-28 31-36");
  ExpectTimes(r.times[0], 20, 0, 5, 21);
  ExpectTimes(r.times[1], 6, 10, 5, 25);  // overlapped: [15,20], [23,28]
}

// W fills a wait: B1.0's gradient (20 ns) is on its way to A0 while F0 computes W1.0. A0: F0.0 [0,10];
// >F0.0 [10,30]; F1.0 [30,40] B1.0 [40,50] W1.0 [50,60]; >B0.0 [50,70]; B0.0 [70,80] W0.0 [80,90].
TEST(Hand, WeightGradients) {
  const Schedule s = HandSchedule(1, {0, 1, 1}, {{"A0", "F0.0 B0.0 W0.0"}, {"F0", "F1.0 F2.0 B2.0 W2.0 B1.0 W1.0"}});
  MadeUpCosts costs(s);
  costs.compute = [](const Op& op, int) { return op.stage == 2 ? 0 : 10; };
  costs.transfer = [](const Op& op, int, bool) { return Nic(op.stage == 0 ? 20 : 0); };
  const SimResult r = Traced(s, costs);
  EXPECT_EQ(At(r, 1, "W1.0") + " " + At(r, 0, "B0.0") + " " + At(r, 0, "W0.0"), "50-60 70-80 80-90");
  ExpectTimes(r.times[1], 20, 10, 20, 40);
  for (const TraceEvent& e : r.events) {
    if (e.name[0] == 'W') {
      EXPECT_EQ(e.stream, Stream::kBackward);
    }
  }
}

}  // namespace
}  // namespace disagmoe
