// Sequences packed with documents.
#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "cost/jobs_for_tests.h"
#include "cost/work.h"

namespace disagmoe {
namespace {

// Token by token.
double CountedKeys(int64_t seq_length, const Documents& documents, int64_t window) {
  double keys = 0, tokens = 0;
  for (const auto& [length, share] : documents) {
    for (int64_t i = 0; i < length; ++i) {
      const int64_t before = i % seq_length + 1;  // of its piece, itself included
      keys += share * static_cast<double>(window > 0 ? std::min(window, before) : before);
      tokens += share;
    }
  }
  return keys / tokens;
}

TEST(Documents, MeanKeysAreCounted) {
  const std::vector<Documents> all{{{8, 1}}, {{3, 1}, {5, 2}}, {{1, 0.5}, {20, 0.25}, {16, 1}}};
  for (const Documents& documents : all) {
    for (const int64_t window : {0, 1, 2, 4, 100}) {
      EXPECT_NEAR(MeanKeys(Sequence(8, documents), window), CountedKeys(8, documents, window), 1e-12) << window;
    }
  }
  // (E[s^2] / E[s] + 1) / 2 of 2 and 6, half of each: (20 / 4 + 1) / 2.
  EXPECT_DOUBLE_EQ(MeanKeys(Sequence(8, {{2, 1}, {6, 1}}), 0), 3);
}

TEST(Documents, FlopsOfAStep) {
  const ModelShape m = SmallModel();
  const Sequence packed(64, {{2, 1}, {6, 1}});
  const double keys = (64 + 1) / 2.0 - 3;  // that are not seen
  const double flops = 3 * 2 * keys * 4 * (32 + 32) * 4;  // of 4 heads of 32 in 4 layers
  EXPECT_NEAR(TrainFlopsPerToken(m, 64) - TrainFlopsPerToken(m, packed), flops, 1e-6 * flops);
}

Job PackedJob(const Documents& documents, bool same = false) {
  Job job = SmallJob("af-pipe", 2, 3, 3);
  job.seq_length = 4096;
  job.overlap_slowdown = false;  // follows from the mean
  job.documents = documents;
  job.same_documents = same;
  return job;
}

const Documents kMixed{{64, 4}, {512, 2}, {4096, 1}};

// Every attention operation, by class of its group.
template <typename Visit>
void ForAttention(const Costed& c, OpKind kind, int layer, const Visit& visit) {
  for (int b = 0; b < c.schedule.num_micro_batches; ++b) {
    const Op op{kind, 2 * layer, b};
    const auto [first, last] = c.ClassesOf(c.schedule.group(2 * layer, b));
    for (int k = first; k < last; ++k) visit(b, k, c.costs.ComputeNs(op, k));
  }
}

TEST(Documents, OneAsLongAsTheSequenceIsNoDocument) {
  Job whole = PackedJob({});
  const Costed one(whole), packed(PackedJob({{4096, 3}}));
  for (const OpKind kind : {kF, kB}) {
    const int64_t ns = one.Ns(kind, 2);
    ForAttention(packed, kind, 1, [&](int, int, int64_t x) { EXPECT_EQ(x, ns); });
  }
}

TEST(Documents, SlicesDifferButTheirMeanDoesNot) {
  for (const bool recompute : {false, true}) {
    Job job = PackedJob(kMixed), same = PackedJob(kMixed, true);
    job.recompute = same.recompute = recompute;
    const Costed drawn(job), mean(same);
    for (const OpKind kind : {kF, kB}) {
      const auto expected = static_cast<double>(mean.Ns(kind, 2));
      double sum = 0, squares = 0;
      int count = 0;
      ForAttention(drawn, kind, 1, [&](int, int, int64_t ns) {
        const double x = static_cast<double>(ns) / expected;
        sum += x, squares += (x - 1) * (x - 1), ++count;
      });
      EXPECT_EQ(count, drawn.schedule.num_micro_batches * 3);
      EXPECT_NEAR(sum / count, 1, 1e-6);
      EXPECT_GT(std::sqrt(squares / count), 0.02);
    }
    // The rest of a slice is the same: experts, transfers, memory.
    EXPECT_EQ(drawn.Ns(kF, 3), mean.Ns(kF, 3));
    EXPECT_EQ(drawn.Send(kSendF, 2).nic_ns, mean.Send(kSendF, 2).nic_ns);
    EXPECT_EQ(drawn.costs.ActivationBytes({kF, 2, 1}, 0, false), mean.costs.ActivationBytes({kF, 2, 1}, 0, false));
  }
}

// All that varies is scores and values: in a layer whose window is one token there is nothing to vary; in the others a
// slice's times are a line through its keys, the same for forward and backward.
TEST(Documents, OnlyScoresScale) {
  Job job = PackedJob(kMixed);
  job.model.window[1] = 1;
  const Costed c(job);
  std::vector<int64_t> windowed, forward, backward;
  ForAttention(c, kF, 1, [&](int, int, int64_t ns) { windowed.push_back(ns); });
  for (int64_t ns : windowed) EXPECT_EQ(ns, windowed[0]);
  ForAttention(c, kF, 2, [&](int, int, int64_t ns) { forward.push_back(ns); });
  ForAttention(c, kB, 2, [&](int, int, int64_t ns) { backward.push_back(ns); });
  // Flash attention's backward has 2.5 times the FLOPs, here at 0.7 of the peak instead of 0.8.
  for (size_t i = 1; i < forward.size(); ++i) {
    const auto f = static_cast<double>(forward[i] - forward[0]), b = static_cast<double>(backward[i] - backward[0]);
    EXPECT_NEAR(b, f * 2.5 * 0.8 / 0.7, 4) << i;
  }
}

TEST(Documents, AreDrawnBySeed) {
  const auto times = [](uint64_t seed) {
    Job job = PackedJob(kMixed);
    job.seed = seed;
    std::vector<int64_t> out;
    ForAttention(Costed(job), kF, 0, [&](int, int, int64_t ns) { out.push_back(ns); });
    return out;
  };
  EXPECT_EQ(times(1), times(1));
  EXPECT_NE(times(1), times(2));
}

// The longest slice has the keys of a whole text of its length at most, the shortest those of the shortest documents.
TEST(Documents, SlicesAreWithinTheirDocuments) {
  const Job job = PackedJob({{64, 64}, {4096, 1}});  // half of the tokens in each
  const Costed drawn(job);
  Job longest = job, shortest = job;
  longest.documents = {{4096, 1}}, shortest.documents = {{64, 1}};
  const int64_t most = Costed(longest).Ns(kF, 0), least = Costed(shortest).Ns(kF, 0);
  const int64_t mean = Costed(PackedJob(job.documents, true)).Ns(kF, 0);
  // Slices share out the mean of the step; its own draw may be off by some.
  ForAttention(drawn, kF, 0, [&](int, int, int64_t ns) {
    EXPECT_LT(ns, mean + 2 * (most - mean));
    EXPECT_GT(ns, least - (mean - least));
  });
  EXPECT_NEAR(static_cast<double>(mean), 0.5 * static_cast<double>(most + least), 2);
}

TEST(Documents, WhatCannotBeIsRefused) {
  for (const Documents& documents : {Documents{{0, 1}}, Documents{{5, -1}}, Documents{{5, 0}}}) {
    EXPECT_THROW(CheckJob(PackedJob(documents)), Error);
  }
  CheckJob(PackedJob(kMixed));
}

}  // namespace
}  // namespace disagmoe
