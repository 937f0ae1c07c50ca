// The colocated baselines: every schedule is sound; closed forms; what each overlap can and cannot hide (times from the
// independent event model).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "base/error.h"
#include "base/rng.h"
#include "schedule/event_model_for_tests.h"
#include "schedule/order.h"
#include "schedule/same_for_tests.h"
#include "schedule/schedule.h"

namespace disagmoe {
namespace {

using testing::HasSubstr;

const std::vector<std::string> kNames = {"megatron-1f1b", "megatron-overlap", "tutel", "comet", "fastermoe", "lancet"};

GenerateOptions Options(int micro_batches, int parts = 0) {
  GenerateOptions options;
  options.num_micro_batches = micro_batches;
  options.parts = parts;
  return options;
}

PlacementSpec Groups(int p, int layers, int v = 0) {
  return {.num_layers = layers, .p_a = p, .colocated = true, .virtual_stages = v};
}

bool Cuts(const std::string& name) { return !name.starts_with("megatron"); }

void ExpectSound(const Schedule& s, Rng* rng) {
  ScheduleFacts facts;
  ASSERT_NO_THROW(facts = ValidateSchedule(s));
  int64_t stages = 0, messages = 0;
  for (int i = 0; i < s.num_stages(); ++i) stages += s.parts(i);
  for (int i = 0; i + 1 < s.num_stages(); ++i) messages += std::max(s.parts(i), s.parts(i + 1));
  const int kinds = s.split_backward ? 3 : s.backward ? 2 : 1;
  EXPECT_EQ(facts.num_ops, s.num_micro_batches * (stages * kinds + messages * 2 * (s.backward ? 2 : 1)));
  for (size_t g = 0; g < s.groups.size(); ++g) EXPECT_EQ(facts.peak_in_flight[g], s.groups[g].max_in_flight);
  EXPECT_TRUE(Same(ParseSchedule(PrintSchedule(s), "text"), s));
  EXPECT_EQ(DrawGrid(s, 0.5).find("stops before"), std::string::npos);
  const ModelTimes times{.attention = 1 + rng->Uniform(), .ffn = 1 + rng->Uniform(), .transfer = rng->Uniform(),
                         .bounded = true, .exchange = rng->Uniform()};
  const ModelResult result = RunModel(s, times);
  EXPECT_FALSE(result.deadlock);
  if (s.backward && HeadIsFused(s)) {  // the model counts no head
    for (size_t g = 0; g < s.groups.size(); ++g) EXPECT_EQ(result.peak[g], s.groups[g].max_in_flight);
  }
}

TEST(Colocated, EveryScheduleIsSound) {
  Rng rng(1);
  int made = 0;
  for (const std::string& name : kNames) {
    for (int p = 1; p <= 4; ++p) {
      for (int v = 0; v <= 3; ++v) {
        for (int layers = p * std::max(v, 1); layers <= 9; layers += 1 + static_cast<int>(rng.Below(3))) {
          for (int m : {1, 2, 3, 8}) {
            GenerateOptions options = Options(m, Cuts(name) ? 1 << rng.Below(4) : 0);
            options.backward = rng.Below(5) > 0;
            PlacementSpec placement = Groups(p, layers, v);
            placement.head_on_attention = v == 0 && rng.Below(3) == 0;
            SCOPED_TRACE(testing::Message() << name << " p " << p << " v " << v << " L " << layers << " M " << m
                                            << " parts " << options.parts << " head " << placement.head_on_attention);
            ExpectSound(Generate(name, placement, options), &rng);
            ++made;
          }
        }
      }
    }
  }
  EXPECT_GT(made, 500);
}

// Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2): with chunks that take f and b, M v of them a
// position and R positions, the first chunk reaches the last position after (R - 1) f, and the last gradient comes back
// (R - 1) b after it left: step = (M v + R - 1)(f + b), bubble over ideal time (R - 1) / (M v). Without exchanges cuts
// into parts change nothing.
TEST(Colocated, ClosedFormOfInterleaved1F1B) {
  for (const char* name : {"megatron-1f1b", "tutel", "comet", "fastermoe"}) {
    for (int p = 1; p <= 4; ++p) {
      for (int v = 1; v <= 3; ++v) {
        for (int k = 1; k <= 2; ++k) {  // layers of a chunk
          const int m = 2 * p;
          const ModelResult result = RunModel(Generate(name, Groups(p, p * v * k, v), Options(m)), {});
          SCOPED_TRACE(testing::Message() << name << " p " << p << " v " << v << " k " << k);
          EXPECT_DOUBLE_EQ(result.step, (m * v + p - 1) * (2 * k + 4 * k));
          const double ideal = result.busy[0];
          EXPECT_DOUBLE_EQ((result.step - ideal) / ideal, (p - 1.0) / (m * v));
        }
      }
    }
  }
}

// What the split backward gains without exchanges, hand-derived. In the drain a position's gradients leave before the
// weight gradients W of its first attention (1 unit): megatron-overlap loses (R - 1)(f + b - 1) to the bubble. Lancet's
// parts also leave one by one: of d parts, all but one share of the last FFN forward (1) and of the first attention's
// input gradients (1) lie over the next position's: (R - 1)(f + b - 1 - 2 (d - 1) / d).
TEST(Colocated, ClosedFormOfSplitBackwards) {
  for (int p = 1; p <= 4; ++p) {
    for (int v = 1; v <= 3; ++v) {
      const int m = 2 * p, f = 4, b = 8;
      SCOPED_TRACE(testing::Message() << "p " << p << " v " << v);
      const double ideal = m * v * (f + b);
      EXPECT_DOUBLE_EQ(RunModel(Generate("megatron-overlap", Groups(p, p * v * 2, v), Options(m)), {}).step,
                       ideal + (p - 1) * (f + b - 1));
      for (int d : {1, 2, 4}) {
        EXPECT_DOUBLE_EQ(RunModel(Generate("lancet", Groups(p, p * v * 2, v), Options(m, d)), {}).step,
                         ideal + (p - 1) * (f + b - 1 - 2.0 * (d - 1) / d));
      }
    }
  }
}

// Korthikanti et al. (arXiv 2205.05198, section 4.2.3): the first position of interleaved 1F1B holds activations of
// L (1 + (p - 1) / (p v)) layers, which is w + 1 chunks; two stages a layer here. Position r holds 2 r chunks less.
// megatron-overlap: its w + 1 forwards before the first pair are as many; a pair's forward adds one stage before the
// first W of its backward takes one away.
TEST(Colocated, ActivationsInFlight) {
  for (int p = 1; p <= 4; ++p) {
    for (int v = 1; v <= 3; ++v) {
      for (int k = 1; k <= 2; ++k) {
        const int layers = p * v * k, m = 4 * p;
        SCOPED_TRACE(testing::Message() << "p " << p << " v " << v << " k " << k);
        const Schedule plain = Generate("megatron-1f1b", Groups(p, layers, v), Options(m));
        EXPECT_DOUBLE_EQ(plain.groups[0].max_in_flight, 2 * layers * (1 + (p - 1.0) / (p * v)));
        for (int r = 0; r < p; ++r) {
          EXPECT_EQ(plain.groups[r].max_in_flight, 2 * (layers + (p - 1) * k - 2 * r * k));
          const Schedule overlap = Generate("megatron-overlap", Groups(p, layers, v), Options(m));
          EXPECT_EQ(overlap.groups[r].max_in_flight, plain.groups[r].max_in_flight + 1);
        }
      }
    }
  }
}

// One group; attention a, experts T, each all-to-all C, in d parts of C / d and T / d. All dispatches are queued when
// attention ends, so the wire carries them until C, and then combines as they are made. Combine i can start at
// max(C, end of GEMM i), and d - i more follow it, so the layer ends at max over i of that + (d - i + 1) C / d.
// GEMM i ends at C/d + i T/d if T >= C, else at i C/d + T/d. T >= C: largest for i = d, T + 2C/d, or i = 1, 2C.
// T < C and d >= 2: 2C for i = 1, else C + C/d + T/d <= 2C. d = 1: T + 2C. In all cases max(2C, T + 2C/d): exposed
// is max(2C - T, 2C/d). Backward: the same with 2T.
double LayerTime(double c, double t, int d) { return std::max(2 * c, t + 2 * c / d); }

TEST(Overlap, TutelByHand) {
  const auto step = [](int degree, int layers, int micro_batches) {
    const Schedule s = Generate("tutel", Groups(1, layers), Options(micro_batches, degree));
    return RunModel(s, {.ffn = 3, .exchange = 4}).step;
  };
  // a = 1, T = 3, C = 4: 3 + (3 + 8) + (6 + 8), 3 + 8 + max(8, 6 + 4), 3 + 8 + max(8, 6 + 2).
  EXPECT_DOUBLE_EQ(step(1, 1, 1), 28);
  EXPECT_DOUBLE_EQ(step(2, 1, 1), 21);
  EXPECT_DOUBLE_EQ(step(4, 1, 1), 19);
  EXPECT_DOUBLE_EQ(step(8, 1, 1), 19);
  // Nothing overlaps from layer to layer or from micro-batch to micro-batch.
  EXPECT_DOUBLE_EQ(step(2, 3, 4), 12 * 21);
  // In a round of two the next micro-batch could start under the last combine of the one before, but that holds it:
  // forward only, 4 (1 + 8). Without holding, micro-batch 1's attention and the first part of its GEMM lie under it.
  GenerateOptions round = Options(2, 2);
  round.round = 2;
  round.backward = false;
  Schedule s = Generate("tutel", Groups(1, 2), round);
  EXPECT_DOUBLE_EQ(RunModel(s, {.ffn = 3, .exchange = 4}).step, 36);
  s.sync_exchange = false;
  EXPECT_LT(RunModel(s, {.ffn = 3, .exchange = 4}).step, 36);
  Rng rng(2);
  for (int i = 0; i < 200; ++i) {
    const double a = rng.Uniform(), t = rng.Uniform(), c = rng.Uniform();
    const int d = 1 << rng.Below(4);
    const ModelTimes times{.attention = a, .ffn = t, .exchange = c};
    EXPECT_NEAR(RunModel(Generate("tutel", Groups(1, 2), Options(2, d)), times).step,
                4 * (3 * a + LayerTime(c, t, d) + LayerTime(c, 2 * t, d)), 1e-9);
  }
}

TEST(Overlap, DegreeOneIsMegatron) {
  for (const char* name : {"tutel", "comet", "fastermoe"}) {
    Schedule s = Generate(name, Groups(2, 8, 2), Options(6, 1));
    s.name = "megatron-1f1b";
    EXPECT_TRUE(Same(s, Generate("megatron-1f1b", Groups(2, 8, 2), Options(6))));
  }
}

// An overlap within the layer hides at most the expert GEMM: exposed >= dispatch + combine - T, however fine the cut.
TEST(Overlap, WithinTheLayerHidesAtMostTheGemm) {
  Rng rng(3);
  for (int i = 0; i < 300; ++i) {
    const std::string name = kNames[2 + rng.Below(3)];
    const int layers = 1 + static_cast<int>(rng.Below(3)), m = 1 + static_cast<int>(rng.Below(3));
    const double t = 0.2 + rng.Uniform(), c = 2 * rng.Uniform();
    const Schedule s = Generate(name, Groups(1, layers), Options(m, 1 << rng.Below(4)));
    const ModelResult result = RunModel(s, {.ffn = t, .exchange = c});
    const double least = m * layers * (std::max(0.0, 2 * c - t) + std::max(0.0, 2 * c - 2 * t));
    EXPECT_GE(result.step - result.busy[0], least - 1e-9) << name;
  }
  // In the limit of fine cuts that is what is left.
  const ModelResult comet = RunModel(Generate("comet", Groups(1, 1), Options(1, 64)), {.ffn = 1, .exchange = 2});
  EXPECT_NEAR(comet.step - comet.busy[0], (4 - 1) + (4 - 2), 1e-9);
}

// A pair of one layer computes attention F (a) | experts B, W, F (T each) | attention B, W (a each). Dispatch F lies
// under 2T and dispatch B, which may wait for it on the wire, under 2T; combine F under 2a, the next layer's combine B,
// after it, under 2a. A pair begins with a combine B under one attention. So with C <= min(a, T) a pair takes its
// computation, L 3(a + T), and exposed are only the 2 L all-to-alls of the first forward and, of the last backward,
// the first combine (then each lies under a W): M L 3(a + T) + (2L + 1) C. With a < C <= 1.5 min(a, T) a pair also
// exposes C - a.
TEST(Overlap, MegatronOverlapHidesAllInItsSteadyState) {
  const auto step = [](int layers, int m, double a, double t, double c) {
    const ModelTimes times{.attention = a, .ffn = t, .exchange = c};
    return RunModel(Generate("megatron-overlap", Groups(1, layers), Options(m)), times).step;
  };
  Rng rng(4);
  for (int i = 0; i < 200; ++i) {
    const int layers = 1 + static_cast<int>(rng.Below(4)), m = 1 + static_cast<int>(rng.Below(5));
    const double a = 0.1 + rng.Uniform(), t = 0.1 + rng.Uniform(), c = std::min(a, t) * rng.Uniform();
    EXPECT_NEAR(step(layers, m, a, t, c), m * layers * 3 * (a + t) + (2 * layers + 1) * c, 1e-9);
  }
  EXPECT_NEAR(step(2, 5, 1, 1, 1.25) - step(2, 4, 1, 1, 1.25), 2 * 3 * 2 + 0.25, 1e-9);
  // Pipelined: a further round adds its computation and nothing else. Plain 1F1B adds the exchanges: 4 a layer, but 2 a
  // chunk are the pipeline's sends instead, which are free here (and to and from the head).
  for (int p = 2; p <= 4; ++p) {
    for (int v = 1; v <= 2; ++v) {
      const auto round = [&](const std::string& name, double c) {
        const ModelTimes times{.exchange = c};
        const PlacementSpec placement = Groups(p, p * v * 2, v);
        return RunModel(Generate(name, placement, Options(6 * p)), times).step -
               RunModel(Generate(name, placement, Options(5 * p)), times).step;
      };
      EXPECT_NEAR(round("megatron-overlap", 1), p * v * 12, 1e-9) << p << " " << v;
      EXPECT_GE(round("megatron-1f1b", 1), p * v * (12 + 4 * 2 - 2)) << p << " " << v;
    }
  }
}

// Lancet, L = 1, M = 1, d = 2, a = T = 1 (parts 0.5; B and W of a part 0.5 each), C = 0.5 (parts 0.25), by hand:
//   forward:  A 0-0.5-1; dispatches 0.5-0.75, 1-1.25; F/0 1-1.5, F/1 1.5-2: both dispatches hidden; combines 1.5-1.75,
//             2-2.25; head at 2.25
//   backward: combines 2.25-2.5-2.75; B1/0 2.5-3, B1/1 3-3.5, W1 3.5-4.5; dispatches 3-3.25, 3.5-3.75; B0, W0 4.5-6.5
// The computation is 6: exposed are the last combine's part and, with a head that takes no time, the first back.
TEST(Overlap, LancetByHand) {
  const Schedule s = Generate("lancet", Groups(1, 1), Options(1, 2));
  EXPECT_DOUBLE_EQ(RunModel(s, {.exchange = 0.5}).step, 6.5);
  // Between layers all is hidden: L layers compute 6 L.
  EXPECT_DOUBLE_EQ(RunModel(Generate("lancet", Groups(1, 3), Options(1, 2)), {.exchange = 0.5}).step, 18.5);
}

std::string Text(const std::vector<Op>& list) {
  std::string out;
  for (const Op& op : list) out.append(out.empty() ? "" : " ").append(PrintOp(op));
  return out;
}

TEST(AppendPair, ByHand) {
  const auto pair = [](LayerSpan forward, LayerSpan backward, bool with_weights) {
    Schedule s = PlaceStages(Groups(1, 3), Options(2));
    AppendPair(&s, forward, backward, with_weights);
    return Text(s.groups[0].compute);
  };
  EXPECT_EQ(pair({0, 1, 1}, {1, 2, 0}, true), "F0.1 B3.0 W3.0 F1.1 B2.0 W2.0");
  EXPECT_EQ(pair({0, 1, 1}, {1, 2, 0}, false), "F0.1 B3.0 F1.1 B2.0");
  // Heads; a longer forward.
  EXPECT_EQ(pair({1, 3, 1}, {2, 3, 0}, true), "B6.0 W6.0 F2.1 B5.0 W5.0 F3.1 B4.0 W4.0 F4.1 F5.1 F6.1");
  // A longer backward, nothing forward, nothing backward.
  EXPECT_EQ(pair({0, 1, 1}, {0, 2, 0}, false), "F0.1 B3.0 F1.1 B2.0 B1.0 B0.0");
  EXPECT_EQ(pair({}, {0, 1, 0}, true), "B1.0 W1.0 B0.0 W0.0");
  EXPECT_EQ(pair({2, 3, 0}, {}, true), "F4.0 F5.0 F6.0");
  EXPECT_EQ(pair({}, {}, true), "");
}

TEST(AppendPair, HeadApart) {
  PlacementSpec placement = Groups(2, 2);
  placement.head_on_attention = true;
  Schedule s = PlaceStages(placement, Options(2));
  ASSERT_FALSE(HeadIsFused(s));
  AppendPair(&s, {2, 2, 1}, {0, 1, 0}, true);
  AppendPair(&s, {1, 2, 1}, {1, 2, 0}, true);
  EXPECT_EQ(Text(s.groups[0].compute), "B1.0 W1.0 B0.0 W0.0 F4.1");
  EXPECT_EQ(Text(s.groups[1].compute), "F2.1 B3.0 W3.0 F3.1 B2.0 W2.0");
}

// One error, in one line, that names the option.
TEST(Colocated, RefusesWhatCannotBe) {
  const auto message = [](const std::string& name, PlacementSpec placement, GenerateOptions options) -> std::string {
    try {
      Generate(name, placement, options);
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
      return error.what();
    }
    return "no error";
  };
  EXPECT_THAT(message("tutel", Groups(1, 2), Options(2, 3)), HasSubstr("(parts): got 3, expected 1, 2, 4 or 8"));
  EXPECT_THAT(message("tutel", Groups(1, 2), Options(2, 16)), HasSubstr("(parts): got 16"));
  EXPECT_THAT(message("lancet", Groups(1, 2), Options(2, -1)), HasSubstr("(parts): got -1"));
  EXPECT_THAT(message("comet", Groups(1, 2), Options(2, 65)), HasSubstr("(parts): got 65"));
  EXPECT_THAT(message("megatron-overlap", Groups(1, 2), Options(2, 2)), HasSubstr("cuts nothing (parts): got 2"));
  EXPECT_THAT(message("fastermoe", Groups(2, 2, 2), Options(2)), HasSubstr("more chunks than layers"));
  GenerateOptions rounds = Options(4);
  rounds.round = 2;
  EXPECT_THAT(message("megatron-overlap", Groups(1, 2), rounds), HasSubstr("(round): got 2"));
  rounds.round = 3;
  EXPECT_THAT(message("lancet", Groups(2, 2), rounds), HasSubstr("possible rounds"));
  for (const std::string& name : kNames) {
    EXPECT_THAT(message(name, {.num_layers = 2}, Options(2)), HasSubstr(name + " needs groups that hold both parts"));
    // A ring of 4 with a slope of 5 stops: the first position wants 5 * 3 forwards of rounds of 4.
    GenerateOptions steep = Options(12);
    steep.round = 4;
    steep.slope = 5;
    EXPECT_THAT(message(name, Groups(4, 8, 2), steep), HasSubstr("round 4, slope 5"));
  }
}

}  // namespace
}  // namespace disagmoe
