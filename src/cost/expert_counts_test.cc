// Workers that hold different numbers of experts, and the numbers that balance their loads.
#include "cost/expert_counts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "base/error.h"
#include "base/rng.h"
#include "cost/jobs_for_tests.h"
#include "cost/traffic.h"
#include "sim/simulate.h"

namespace disagmoe {
namespace {

using testing::HasSubstr;
using Counts = std::vector<std::vector<int>>;

int64_t StepNs(const Job& job) {
  const Costed c(job);
  return Simulate(c.schedule, c.costs).step_ns;
}

// The least largest load of all ways to cut the experts, and the least sum of squares of those that have it.
std::pair<double, int> TryAll(const std::vector<double>& loads, int workers, int most) {
  double least = 1e300;
  int squares = 0;
  const std::function<void(int, size_t, double, int)> cut = [&](int left, size_t at, double largest, int sum) {
    if (left == 0) {
      if (at != loads.size()) return;
      const bool same = std::abs(largest - least) < 1e-9;
      if (!same && largest > least) return;
      squares = same ? std::min(squares, sum) : sum;
      least = std::min(least, largest);
      return;
    }
    double load = 0;
    for (size_t end = at;; ++end) {
      const int n = static_cast<int>(end - at);
      cut(left - 1, end, std::max(largest, load), sum + n * n);
      if (end == loads.size() || n == most) return;
      load += loads[end];
    }
  };
  cut(workers, 0, 0, 0);
  return {least, squares};
}

TEST(BalancedCounts, AgainstEveryWayToCut) {
  Rng random(5);
  for (int round = 0; round < 300; ++round) {
    Job job = SmallJob("af-pipe", 1, 1, 1 + static_cast<int>(random.Below(5)));
    const int experts = 2 + static_cast<int>(random.Below(8));
    job.model.num_experts = experts;
    job.model.experts_per_token = 1 + static_cast<int64_t>(random.Below(2));
    const int most = round % 3 == 0 ? 0 : (experts + job.n - 1) / job.n + static_cast<int>(random.Below(3));
    job.expert_loads.assign(4, {});
    for (std::vector<double>& loads : job.expert_loads) {
      for (int e = 0; e < experts; ++e) {  // many ties in every other round; some without load
        loads.push_back(round % 2 == 0 ? 1 + static_cast<double>(random.Below(3))
                                       : std::max(0.01, random.Uniform() - 0.3));
      }
    }
    const Counts counts = BalancedCounts(job, most);
    ASSERT_EQ(counts.size(), 4u);
    for (int layer = 0; layer < 4; ++layer) {
      const std::vector<double> p = RoutingOf(RankRouting(job), job, layer).probability;
      double largest = 0;
      int squares = 0, at = 0;
      ASSERT_EQ(counts[layer].size(), static_cast<size_t>(job.n));
      for (int n : counts[layer]) {
        ASSERT_LE(at + n, experts);
        if (most > 0) {
          EXPECT_LE(n, most);
        }
        largest = std::max(largest, std::accumulate(p.begin() + at, p.begin() + at + n, 0.0));
        squares += n * n;
        at += n;
      }
      EXPECT_EQ(at, experts);
      const auto [least, least_squares] = TryAll(p, job.n, most > 0 ? most : experts);
      EXPECT_NEAR(largest, least, 1e-9) << round;
      EXPECT_EQ(squares, least_squares) << round;
    }
  }
}

TEST(BalancedCounts, EqualWhereNothingIsUneven) {
  Job job = SmallJob("af-pipe", 1, 4, 3);
  EXPECT_EQ(BalancedCounts(job), (Counts{{5, 5, 6}}));
  job = SmallJob("megatron-1f1b", 1, 4);
  EXPECT_EQ(BalancedCounts(job), (Counts{{4, 4, 4, 4}}));
  job.expert_loads.assign(4, std::vector<double>(16, 0.1));  // recorded, and all the same
  EXPECT_EQ(BalancedCounts(job), (Counts{{4, 4, 4, 4}, {4, 4, 4, 4}, {4, 4, 4, 4}, {4, 4, 4, 4}}));
  job.model = SmallModel(true);
  job.routing_skew = 1;
  job.expert_loads.clear();
  EXPECT_EQ(BalancedCounts(job)[0], (std::vector<int>{4, 4, 4, 4}));  // dense
  EXPECT_THROW(BalancedCounts(job, 3), Error);
  job.model.num_experts = 0;
  EXPECT_EQ(BalancedCounts(job), Counts{});
}

// Experts 0 to 3 have three times the load of the other 12, 24 in all: of 2 experts a token they are 1/4, the others
// 1/12 each. Equal shares give worker 0 one pair a token, of the mean 1/2; shares of 2, 2, 6, 6 experts give each 1/2.
Job Skewed(const std::string& schedule) {
  Job job = SmallJob(schedule, 1, 4, schedule == "af-pipe" ? 4 : 0);
  std::vector<double> loads(16, 1);
  std::fill(loads.begin(), loads.begin() + 4, 3);
  job.expert_loads.assign(4, loads);
  return job;
}

TEST(BalancedCounts, HalveTheFullestWorker) {
  for (const char* schedule : {"af-pipe", "megatron-1f1b", "tutel"}) {
    Job job = Skewed(schedule);
    EXPECT_EQ(BalancedCounts(job), (Counts{{2, 2, 6, 6}, {2, 2, 6, 6}, {2, 2, 6, 6}, {2, 2, 6, 6}}));
    job.overlap_slowdown = false;
    job.cluster.efficiency.op_overhead_us = 0;
    job.cluster.efficiency.grouped_gemm_half_rows = 0;
    job.cluster.gpu.memory_gbytes_s = 1e9;
    const Costed equal(job);
    job.expert_counts = BalancedCounts(job);
    const Costed balanced(job);
    const int first = equal.ClassesOf(GroupOf(equal.schedule, {kF, 3, 0})).first;
    const auto ns = [&](const Costed& c, int w) {
      return static_cast<double>(c.costs.ComputeNs({kF, 3, 0}, first + w));
    };
    EXPECT_NEAR(ns(balanced, 0), ns(equal, 0) / 2, 1) << schedule;
    for (int w = 1; w < 4; ++w) EXPECT_NEAR(ns(balanced, w), ns(balanced, 0), 1) << schedule;
    EXPECT_LT(StepNs(job), StepNs(equal.job)) << schedule;
  }
  EXPECT_EQ(BalancedCounts(Skewed("af-pipe"), 5)[1], (std::vector<int>{2, 4, 5, 5}));  // 2/4 + 2/12 of a pair
}

// Weights of 2 bytes, state of 12 of what nobody shares: each worker's own experts, in all layers; the head's are of
// all four workers.
TEST(ExpertCounts, AreExactInMemory) {
  Job job = SmallJob("af-pipe", 1, 4, 4);
  job.expert_counts = {{0, 4, 6, 6}, {3, 3, 5, 5}, {16, 0, 0, 0}, {4, 4, 4, 4}};
  const Costed c(job);
  const std::vector<int> experts{23, 11, 15, 15};
  const auto head = static_cast<double>(job.model.HeadParams());
  const auto expert = static_cast<double>(job.model.ExpertParams());
  const int first = c.ClassesOf(1).first;
  ASSERT_EQ(c.ClassesOf(1).second - first, 4);
  for (int w = 0; w < 4; ++w) {
    const StaticMemory m = c.costs.StaticParts(first + w);
    EXPECT_NEAR(static_cast<double>(m.weights), 2 * (head + experts[w] * expert), 1) << w;
    EXPECT_NEAR(static_cast<double>(m.optimizer), 12 * (head / 4 + experts[w] * expert), 1) << w;
    EXPECT_NEAR(static_cast<double>(c.costs.StepEnd(first + w).optimizer_ns),
                (head / 4 + experts[w] * expert) * 30 / 800, 1) << w;
  }
  // Nothing travels to a worker without experts; all pairs to one with all.
  EXPECT_EQ(c.costs.MessageBytes({kSendF, 0, 0}, first), 0);
  EXPECT_EQ(c.costs.Transfer({kSendF, 0, 0}, first, false).nic_ns, 0);
  EXPECT_EQ(c.costs.MessageBytes({kSendF, 4, 0}, first + 1), 0);
  EXPECT_GT(c.costs.MessageBytes({kSendF, 4, 0}, first), 256 * 256);

  job = SmallJob("megatron-1f1b", 1, 4);
  job.expert_counts = {{1, 5, 5, 5}};
  const Costed colocated(job);
  const int64_t more = colocated.costs.StaticParts(1).weights - colocated.costs.StaticParts(0).weights;
  EXPECT_NEAR(static_cast<double>(more), 2 * 4 * 4 * expert, 1);
}

TEST(ExpertCounts, EqualOnesChangeNothing) {
  for (const char* schedule : {"af-pipe", "megatron-1f1b", "comet"}) {
    Job job = SmallJob(schedule, 2, 4, schedule[0] == 'a' ? 4 : 0);
    const int64_t step = StepNs(job);
    job.expert_counts = {{4, 4, 4, 4}};
    EXPECT_EQ(StepNs(job), step) << schedule;
    job.expert_counts.assign(4, {4, 4, 4, 4});
    EXPECT_EQ(StepNs(job), step) << schedule;
    job.expert_counts.assign(4, {1, 7, 7, 1});
    EXPECT_GT(StepNs(job), step) << schedule;
  }
}

TEST(ExpertCounts, ThatCannotBe) {
  const auto error = [](const Counts& counts, auto change) -> std::string {
    Job job = SmallJob("af-pipe", 1, 4, 4);
    job.model = SmallModel(true);
    job.expert_counts = counts;
    change(&job);
    try {
      CheckJob(job);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  const auto same = [](Job*) {};
  const std::vector<int> good{4, 0, 6, 6};
  EXPECT_EQ(error({good}, same), "");
  EXPECT_EQ(error({{}, good, good, good}, same), "");  // layer 0 is dense
  EXPECT_THAT(error({good, good}, same), HasSubstr("got 2 rows, expected 4"));
  EXPECT_THAT(error({good, good, good, {4, 4, 4}}, same), HasSubstr("(expert counts, layer 3): got 3, expected 4"));
  EXPECT_THAT(error({{4, 4, 4, 5}}, same), HasSubstr("(expert counts): got 17, expected 16"));
  EXPECT_THAT(error({{-4, 8, 6, 6}}, same), HasSubstr("got -4"));
  EXPECT_THAT(error({good}, [](Job* j) { j->schedule = "hetermoe", j->attention_expert_share = 0.5; }),
              HasSubstr("attention_expert_share"));
  EXPECT_EQ(error({std::vector<int>(20, 0)}, [](Job* j) {
    j->n = 20, j->cluster.gpus = 24;
    j->expert_counts[0][0] = 16;
  }), "");  // more workers than experts
}

}  // namespace
}  // namespace disagmoe
