// The order of AF-Pipe against the design's table, closed form and bounds (an independent event model's figures).
#include <gtest/gtest.h>

#include <numeric>

#include "base/error.h"
#include "schedule/event_model_for_tests.h"
#include "schedule/order.h"
#include "schedule/schedule.h"

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

// By position: A0 F0 A1 F1 ...
std::vector<int> ByPosition(const std::vector<int>& by_group) {
  const size_t p = by_group.size() / 2;
  std::vector<int> out;
  for (size_t g = 0; g < p; ++g) {
    out.push_back(by_group[g]);
    out.push_back(by_group[p + g]);
  }
  return out;
}

std::string Text(const std::vector<Op>& list) {
  std::string out;
  for (const Op& op : list) out.append(out.empty() ? "" : " ").append(PrintOp(op));
  return out;
}

struct Vector {
  int p, layers, micro_batches, round;
  double transfer, step;
  std::vector<int> peak;
};

TEST(AfPipe, TestVectors) {
  const std::vector<Vector> vectors = {
      {1, 1, 1, 1, 0.5, 7, {1, 1}},           {1, 4, 4, 2, 0, 51, {9, 7}},
      {1, 4, 4, 4, 0.5, 52, {15, 13}},        {2, 4, 4, 4, 0, 33, {8, 8, 7, 5}},
      {2, 4, 8, 4, 1, 71, {11, 9, 7, 5}},     {2, 4, 8, 8, 1, 63, {15, 13, 11, 9}},
      {2, 3, 8, 4, 0.5, 56, {11, 9, 7, 5}},
  };
  for (const Vector& v : vectors) {
    SCOPED_TRACE(testing::Message() << "p " << v.p << " L " << v.layers << " M " << v.micro_batches << " q " << v.round);
    const Schedule s = GenerateAfPipe(Square(v.p, v.layers), Options(v.micro_batches, v.round));
    const ScheduleFacts facts = ValidateSchedule(s);
    for (bool bounded : {false, true}) {
      const ModelResult result = RunModel(s, {.transfer = v.transfer, .bounded = bounded});
      EXPECT_FALSE(result.deadlock);
      EXPECT_DOUBLE_EQ(result.step, v.step);
      EXPECT_EQ(ByPosition(result.peak), v.peak);
    }
    EXPECT_EQ(ByPosition(facts.peak_in_flight), v.peak);
  }
}

TEST(AfPipe, SteepSlopeDeadlocks) {
  const Schedule s = BuildAfPipeRing(Square(2, 8), Options(12, 4, 3));
  EXPECT_TRUE(RunModel(s, {}).deadlock);
  EXPECT_THROW(ValidateSchedule(s), Error);
  try {
    GenerateAfPipe(Square(2, 8), Options(12, 4, 3));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("round 4, slope 3"), std::string::npos) << error.what();
  }
  EXPECT_NO_THROW(ValidateSchedule(GenerateAfPipe(Square(2, 8), Options(12, 4, 2))));
}

// The printed order of position 3 (F1): chunk c is stage 4c + 3; the head, stage 8, goes with stage 7.
TEST(AfPipe, PrintedOrder) {
  const Schedule s = GenerateAfPipe(Square(2, 4), Options(4, 4));
  EXPECT_EQ(s.groups[3].name, "F1");
  EXPECT_EQ(Text(s.groups[3].compute),
            "F3.0 F3.1 F3.2 F3.3 F7.0 F8.0 B8.0 B7.0 F7.1 F8.1 B8.1 B7.1 F7.2 F8.2 B8.2 B7.2 F7.3 F8.3 B8.3 B7.3 "
            "B3.0 B3.1 B3.2 B3.3");
}

TEST(AfPipe, ClosedFormWithoutTransferTime) {
  for (int p = 1; p <= 4; ++p) {
    for (int v = 1; v <= 3; ++v) {
      for (int rounds = 1; rounds <= 3; ++rounds) {
        const int r = 2 * p;
        for (int q : {r, r + 1, 2 * r}) {
          const int m = q * rounds;
          const Schedule s = GenerateAfPipe(Square(p, p * v), Options(m, q));
          EXPECT_DOUBLE_EQ(RunModel(s, {}).step, (m * v + r - 1) * 3) << "p " << p << " v " << v << " M " << m << " q " << q;
        }
      }
    }
  }
}

// At most w_r + 1 activations, and exactly that where there are enough stages and micro-batches.
TEST(AfPipe, InFlightBound) {
  for (int p = 1; p <= 4; ++p) {
    for (int layers = p; layers <= 9; ++layers) {
      for (int m : {1, 3, 8, 16}) {
        const Schedule s = GenerateAfPipe(Square(p, layers), Options(m, 0));
        const int r = 2 * p;
        const int v = (layers + p - 1) / p;
        const std::vector<int> peak = ByPosition(ValidateSchedule(s).peak_in_flight);
        for (int i = 0; i < r; ++i) {
          const int w = std::min(m * v, (v - 1) * s.round + 2 * (r - 1 - i));
          EXPECT_LE(peak[i], w + 1);
          if (layers % p != 0) continue;
          EXPECT_EQ(peak[i], std::min(m * v, w + 1)) << "p " << p << " L " << layers << " M " << m;
        }
      }
    }
  }
}

TEST(AfPipe, RoundIsTheSmallestDivisorThatHidesTransfers) {
  const auto round = [](int p, int m, double ratio) {
    GenerateOptions options = Options(m, 0);
    options.transfer_ratio = ratio;
    return GenerateAfPipe(Square(p, 4), options).round;
  };
  EXPECT_EQ(round(2, 12, 0), 4);     // R = 4
  EXPECT_EQ(round(2, 12, 0.25), 6);  // 5
  EXPECT_EQ(round(2, 12, 0.5), 6);   // 6
  EXPECT_EQ(round(2, 16, 1), 8);     // 8
  EXPECT_EQ(round(2, 7, 0), 7);      // 7 is prime
  EXPECT_EQ(round(2, 3, 0), 3);      // fewer than R
  EXPECT_EQ(round(1, 6, 0), 2);
}

// Schedule.md section 3: the links from the last position to the first park the rest of a round, q - R + 1 messages.
TEST(AfPipe, Slots) {
  const Schedule s = GenerateAfPipe(Square(2, 4), Options(8, 8));
  for (const Link& link : s.links) {
    const std::string ends = s.groups[link.src_group].name + s.groups[link.dst_group].name;
    const bool wraps = ends == (link.backward ? "A0F1" : "F1A0");
    EXPECT_EQ(link.slots, wraps ? 8 - 4 + 1 : 2) << ends;
  }
}

// By hand, p_a = 1, p_f = 2, L = 2, M = 8, q = 4: an F-group takes 2 for a forward, A0 takes 1. Columns: A0 has 0 and 2,
// F0 1, F1 3; forwards allowed ahead of backwards, w + 1: 7, 5, 3, 1. A0 starts
//   0 F0.0, 1 F0.1, 2 F0.2, 3 F2.0 (F0 is done with it, and it is older than F0.3), 4 F0.3, 5 F2.1, 6 F0.4, 7 F2.2,
//   8 F0.5, 9 F0.6: F2.3 (the fourth of column 2) and F0.7 must wait; 10 B2.0 (F1: F3.0 at 4, B3.0 at 6), 12 F2.3,
//   16 B0.0 (F0: B1.0 at 12), 18 B2.1, older than F0.7, which may start now, 20 F2.4, 21 F0.7, 22 B2.2.
TEST(AfPipe, UnequalPoolsByHand) {
  const Schedule s = GenerateAfPipe({.num_layers = 2, .p_a = 1, .p_f = 2}, Options(8, 4));
  EXPECT_TRUE(Text(s.groups[0].compute)
                  .starts_with("F0.0 F0.1 F0.2 F2.0 F0.3 F2.1 F0.4 F2.2 F0.5 F0.6 B2.0 F2.3 B0.0 B2.1 F2.4 F0.7 B2.2 "))
      << Text(s.groups[0].compute);
}

// Schedule.md section 2: with that round the step is within 2 % of the one without transfer time; q = R costs 4, 8, 12
// and 16 %. So it is at M = 16; the cost is a fixed time, so its share falls with M.
TEST(AfPipe, ChosenRoundHidesTransfers) {
  const double bound = (16 * 8 + 3) * 3;
  for (const auto& [ratio, cost] : {std::pair{0.25, 0.04}, {0.5, 0.08}, {0.75, 0.12}, {1.0, 0.16}}) {
    GenerateOptions options = Options(16, 0);
    options.transfer_ratio = ratio;
    EXPECT_LE(RunModel(GenerateAfPipe(Square(2, 16), options), {.transfer = ratio}).step, bound * 1.02);
    const Schedule least = GenerateAfPipe(Square(2, 16), Options(16, 4));
    EXPECT_NEAR(RunModel(least, {.transfer = ratio}).step / bound, 1 + cost, 0.005);
  }
}

TEST(AfPipe, RefusesWhatCannotBe) {
  const auto message = [](PlacementSpec placement, GenerateOptions options) -> std::string {
    try {
      GenerateAfPipe(placement, options);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(message(Square(2, 4), Options(12, 5)).find("1, 2, 3, 4, 6, 12"), std::string::npos);
  EXPECT_NE(message(Square(3, 2), Options(4, 0)).find("A2 would hold nothing"), std::string::npos);
  EXPECT_NE(message({.num_layers = 2, .p_a = 1, .p_f = 3}, Options(4, 0)).find("F2 would hold nothing"), std::string::npos);
  EXPECT_NE(message(Square(1, 0), Options(4, 0)).find("number of layers"), std::string::npos);
  EXPECT_NE(message(Square(1, 1), Options(0, 0)).find("number of micro-batches"), std::string::npos);
  EXPECT_NE(message({.num_layers = 1, .n = 0}, Options(1, 0)).find("n): got 0"), std::string::npos);
  // A third A-group may hold the head alone.
  EXPECT_EQ(message({.num_layers = 2, .p_a = 3, .p_f = 2, .head_on_attention = true}, Options(4, 0)), "no error");
}

}  // namespace
}  // namespace disagmoe
