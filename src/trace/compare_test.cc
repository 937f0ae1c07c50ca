#include "trace/compare.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace disagmoe {
namespace {

// Ranks 0 and 1 are group 0, ranks 2 and 3 group 1; all transfers are with rank 2.
const std::vector<int> kGroups = {0, 0, 1, 1};

TraceEvent At(int rank, Stream stream, const std::string& name, int64_t begin, int64_t end, int64_t step = 1) {
  return {rank, stream, name, begin, end, step, 0, 2};
}

// One worker, one layer, one micro-batch; `scale` stretches all times.
std::vector<TraceEvent> Step(int64_t scale, int64_t step) {
  const int64_t t = 1000 * step;
  return {At(0, Stream::kForward, "F0.0", t, t + 10 * scale, step),
          At(0, Stream::kSend, ">F0.0", t + 9 * scale, t + 11 * scale, step),
          At(0, Stream::kWait, "bubble", t + 10 * scale, t + 15 * scale, step),
          At(0, Stream::kReceive, "<B0.0", t + 12 * scale, t + 15 * scale, step),
          At(0, Stream::kBackward, "B0.0", t + 15 * scale, t + 35 * scale, step),
          At(0, Stream::kStep, "optimizer", t + 35 * scale, t + 40 * scale, step),
          At(0, Stream::kStep, "step", t, t + 40 * scale, step)};
}

std::vector<TraceEvent> Steps(std::vector<int64_t> scales) {
  std::vector<TraceEvent> events;
  for (size_t i = 0; i < scales.size(); ++i) {
    for (const TraceEvent& e : Step(scales[i], static_cast<int64_t>(i) + 3)) events.push_back(e);
  }
  return events;
}

// Measured steps are 1, 2 and 6 times the simulated one: their median is twice as long, kind by kind too.
TEST(Compare, MedianOverSteps) {
  const StepComparison c = CompareSteps(Step(1, 1), Steps({1, 6, 2}), kGroups, 2);
  EXPECT_TRUE(c.same_order());
  EXPECT_EQ(c.steps, 3);
  EXPECT_EQ(c.simulated_ns, 40);
  EXPECT_EQ(c.measured_ns, 80);
  EXPECT_EQ(c.fastest_ns, 40);
  EXPECT_EQ(c.slowest_ns, 240);
  EXPECT_DOUBLE_EQ(c.ratio(), 0.5);
  ASSERT_EQ(c.workers.size(), 1u);
  std::vector<std::string> kinds;
  for (const KindTimes& k : c.workers[0].kinds) {
    kinds.push_back(k.kind);
    EXPECT_EQ(k.measured_ns, 2 * k.simulated_ns) << k.kind;
    EXPECT_EQ(k.count, 1) << k.kind;
  }
  EXPECT_EQ(kinds, (std::vector<std::string>{"attention backward", "attention forward", "bubble", "optimizer"}));
}

TEST(Compare, StageOfTheHead) {
  const StepComparison c = CompareSteps(Step(1, 1), Steps({1}), kGroups, 0);
  EXPECT_EQ(c.workers[0].kinds[2].kind, "head forward");
}

// The step is that of the slowest worker.
TEST(Compare, SlowestWorkerCounts) {
  std::vector<TraceEvent> measured = Step(1, 3), simulated = Step(1, 1);
  measured.push_back(At(1, Stream::kStep, "step", 3000, 3090, 3));
  simulated.push_back(At(1, Stream::kStep, "step", 1000, 1040, 1));
  EXPECT_EQ(CompareSteps(simulated, measured, kGroups, 2).measured_ns, 90);
}

std::string Difference(const std::vector<TraceEvent>& measured) {
  return CompareSteps(Step(1, 1), measured, kGroups, 2).workers.at(0).difference;
}

TEST(Compare, NamesTheFirstDifference) {
  std::vector<TraceEvent> swapped = Steps({1, 1});
  std::swap(swapped[7].begin_ns, swapped[11].begin_ns);  // forward and backward of the second step
  EXPECT_EQ(Difference(swapped), "computations, number 1: simulated F0.0, measured B0.0 (step 4)");
  std::vector<TraceEvent> less = Steps({1});
  less.erase(less.begin() + 1);
  EXPECT_EQ(Difference(less),
            "sends of activations to group 1, number 1: simulated >F0.0, measured nothing (step 3)");
  std::vector<TraceEvent> more = Steps({1});
  more.push_back(At(0, Stream::kReceive, "<F1.0", 3001, 3002, 3));
  EXPECT_EQ(Difference(more),
            "receives of activations from group 1, number 1: simulated nothing, measured <F1.0 (step 3)");
}

// Two groups' messages may come in any order, those of one group may not.
TEST(Compare, GroupsApart) {
  auto receive = [](const std::string& name, int64_t begin, int peer) {
    TraceEvent e = At(1, Stream::kReceive, name, begin, begin + 1);
    e.peer = peer;
    return e;
  };
  auto difference = [&](std::vector<TraceEvent> a, std::vector<TraceEvent> b) {
    b.push_back(At(1, Stream::kStep, "step", 0, 100));
    return CompareSteps(a, b, kGroups, 2).workers.at(0).difference;
  };
  EXPECT_EQ(difference({receive("<F1.0", 1, 0), receive("<F2.0", 2, 2)},
                       {receive("<F1.0", 2, 0), receive("<F2.0", 1, 3)}),
            "");
  EXPECT_EQ(difference({receive("<F1.0", 1, 2), receive("<F2.0", 2, 2)},
                       {receive("<F1.0", 2, 3), receive("<F2.0", 1, 3)}),
            "receives of activations from group 1, number 1: simulated <F1.0, measured <F2.0 (step 1)");
}

// A send to two peers is two events of one transfer.
TEST(Compare, PeersAreOneTransfer) {
  std::vector<TraceEvent> measured = Steps({1});
  measured.push_back(At(0, Stream::kSend, ">F0.0", 3010, 3012, 3));
  EXPECT_EQ(Difference(measured), "");
}

TEST(Compare, WorkersMustBeThere) {
  std::vector<TraceEvent> simulated = Step(1, 1);
  simulated.push_back(At(1, Stream::kForward, "F1.0", 0, 1, 1));
  const StepComparison c = CompareSteps(simulated, Steps({1}), kGroups, 2);
  EXPECT_FALSE(c.same_order());
  EXPECT_EQ(c.workers.at(1).difference, "rank 1 has no traced step");
  EXPECT_THROW(CompareSteps(simulated, {}, kGroups, 2), Error);
}

}  // namespace
}  // namespace disagmoe
