// Workers of a group that differ: whose figures a class has, and who is slow.
#include "cost/cluster_costs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "cost/jobs_for_tests.h"

namespace disagmoe {
namespace {

// Groups of six, nodes of four: some send to the next group over NVLink, some over the NIC; the one class has the worst
// of both.
TEST(ClusterClasses, TheWorstWorkerOfAClassCounts) {
  Job job = SmallJob("megatron-1f1b", 2, 6);
  const Costed c(job);
  // Ranks 0..5 to 6..11 on nodes 0 0 0 0 1 1 | 1 1 2 2 2 2: all far.
  EXPECT_EQ(c.Send(kSendF, 3).nic_bytes, 64 * 256);
  EXPECT_EQ(c.Send(kSendF, 3).nvlink_bytes, 0);
  // Inside, 16 experts on six are 2 3 3 2 3 3. The two on node 1 return 3 / 16 of two rows of each of 4 * 64 tokens
  // over the NIC; over NVLink it is most for the second and third, of each of 3 * 64 tokens.
  EXPECT_EQ(c.Send(kSendF, 1).nic_bytes, 2 * 3 * 4 * 64 / 16 * 256);
  EXPECT_EQ(c.Send(kSendF, 1).nvlink_bytes, 2 * 3 * 3 * 64 / 16 * 256);
  // What a worker receives altogether is not the sum of the two: of each of 5 * 64 tokens.
  EXPECT_EQ(c.costs.MessageBytes({kSendB, 1, 0}, 0), 2 * 3 * 5 * 64 / 16 * 256);
  Job small = SmallJob("megatron-1f1b", 2, 3);  // 0 0 0 | 0 1 1: the first is near, two are far
  EXPECT_EQ(Costed(small).Send(kSendF, 3).nic_bytes, 64 * 256);
  EXPECT_EQ(Costed(small).Send(kSendF, 3).nvlink_bytes, 64 * 256);
}

// 16 experts on 3 workers are 5, 5 and 6: the class has the time and the memory of the last.
TEST(ClusterClasses, UnevenSharesOfExperts) {
  Job job = SmallJob("af-pipe", 1, 3, 3);
  const Costed c(job);
  job.jitter = 1e-9;  // each worker alone
  const Costed each(job);
  EXPECT_EQ(each.costs.classes().size(), 6u);
  EXPECT_LT(each.costs.ComputeNs({kF, 3, 0}, 3), each.costs.ComputeNs({kF, 3, 0}, 5));
  EXPECT_EQ(c.Ns(kF, 3), each.costs.ComputeNs({kF, 3, 0}, 5));
  EXPECT_EQ(c.costs.StaticBytes(1), each.costs.StaticBytes(5));
  EXPECT_LT(each.costs.StaticBytes(4), each.costs.StaticBytes(5));
}

// The hottest worker is slower, the coolest faster than balanced, and the A side is as it was, but for the rows.
TEST(ClusterClasses, UnevenRoutingSlowsTheHotWorkerOnly) {
  Job job = SmallJob("af-pipe", 1, 4, 4);
  job.dedup = Dedup::kExpert;
  const Costed even(job);
  job.routing_skew = 1;
  const Costed odd(job);
  ASSERT_EQ(odd.costs.classes().size(), 8u);
  for (int layer = 0; layer < 4; ++layer) {
    int slower = 0;
    double sum = 0;
    for (int w = 4; w < 8; ++w) {
      const int64_t ns = odd.costs.Transfer({kSendF, 2 * layer, 0}, w, false).nic_bytes;
      slower += odd.costs.ComputeNs({kF, 2 * layer + 1, 0}, w) > even.Ns(kF, 2 * layer + 1);
      sum += static_cast<double>(ns);
    }
    EXPECT_GT(slower, 0);
    EXPECT_LT(slower, 4);
    EXPECT_NEAR(sum, 4.0 * static_cast<double>(even.Send(kSendF, 2 * layer, false).nic_bytes), 8);
    for (int w = 0; w < 4; ++w) {
      EXPECT_EQ(odd.costs.ComputeNs({kF, 2 * layer, 0}, w), even.Ns(kF, 2 * layer));
      const int64_t bytes = odd.costs.Transfer({kSendF, 2 * layer, 0}, w, true).nic_bytes;
      EXPECT_NEAR(bytes, even.Send(kSendF, 2 * layer).nic_bytes, 1);
    }
  }
}

TEST(ClusterClasses, Stragglers) {
  Job job = SmallJob("af-pipe", 1, 4, 4);
  const Costed plain(job);
  job.stragglers = {{"A0.2", 1.5, 3}, {"F0", 2, 1}, {"F0.1", 1, 2}};
  const Costed slow(job);
  const auto& classes = slow.costs.classes();
  ASSERT_EQ(classes.size(), 4u);  // A0 0, 1, 3; A0.2; F0.0, 2, 3; F0.1
  EXPECT_EQ(classes[0].count, 3);
  EXPECT_EQ(classes[1].first_worker, 2);
  EXPECT_EQ(classes[2].count, 3);
  EXPECT_EQ(classes[3].first_worker, 1);
  const Op f{kF, 2, 0}, g{kB, 3, 0}, send{kSendF, 2, 0};
  EXPECT_EQ(slow.costs.ComputeNs(f, 0), plain.costs.ComputeNs(f, 0));
  EXPECT_NEAR(slow.costs.ComputeNs(f, 1), 1.5 * static_cast<double>(plain.costs.ComputeNs(f, 0)), 1);
  EXPECT_NEAR(slow.costs.ComputeNs(g, 2), 2.0 * static_cast<double>(plain.costs.ComputeNs(g, 1)), 1);
  EXPECT_NEAR(slow.costs.ComputeNs(g, 3), 2.0 * static_cast<double>(plain.costs.ComputeNs(g, 1)), 1);
  const auto nic = [&](const Costed& c, int k, bool sending) {
    return static_cast<double>(c.costs.Transfer(send, k, sending).nic_ns) - 2000;
  };
  EXPECT_EQ(nic(slow, 0, true), nic(plain, 0, true));
  EXPECT_NEAR(nic(slow, 1, true), 3 * nic(plain, 0, true), 2);
  EXPECT_EQ(nic(slow, 2, false), nic(plain, 1, false));
  EXPECT_NEAR(nic(slow, 3, false), 2 * nic(plain, 1, false), 2);
  job.stragglers = {{"A0.1", 2, 1}, {"A0.4", 2, 1}};
  try {
    Costed(job, plain.schedule);
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), testing::HasSubstr("got A0.4, expected a group (A0, F0) or a worker such as A0.0"));
  }
}

// Mean and deviation over 20000 operations, the same on every call and another with another seed; independent of
// others.
TEST(ClusterClasses, Jitter) {
  Job job = SmallJob("af-pipe", 1, 2, 2);
  job.global_batch = 2 * 5000;
  const Costed plain(job);
  job.jitter = 0.1;
  const Costed a(job);
  job.seed = 2;
  const Costed b(job, a.schedule);
  double n = 0, sum = 0, squares = 0, product = 0, before = 0, same = 0;
  for (int micro_batch = 0; micro_batch < 5000; ++micro_batch) {
    for (int k = 0; k < 4; ++k) {
      const Op op{kF, 2 + k / 2, micro_batch};
      const double x = static_cast<double>(a.costs.ComputeNs(op, k)) / static_cast<double>(plain.Ns(kF, 2 + k / 2)) - 1;
      EXPECT_EQ(a.costs.ComputeNs(op, k), a.costs.ComputeNs(op, k));
      same += a.costs.ComputeNs(op, k) == b.costs.ComputeNs(op, k);
      n += 1, sum += x, squares += x * x, product += x * before, before = x;
    }
  }
  // The mean of 20000 deviates by 0.1 / sqrt(20000) = 0.0007, the deviation by less; four of these.
  EXPECT_NEAR(sum / n, 0, 0.003);
  EXPECT_NEAR(std::sqrt(squares / n), 0.1, 0.002);
  EXPECT_NEAR(product / squares, 0, 0.03);
  EXPECT_LT(same, 0.01 * n);
}

}  // namespace
}  // namespace disagmoe
