#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "plan/evaluate.h"
#include "plan/reproduce.h"

namespace disagmoe {
namespace {

using testing::HasSubstr;

Job SmallJob(const std::string& schedule) {
  Job job;
  job.model = LoadModelShape("olmoe-1b-7b");
  job.cluster = LoadCluster("h800x16");
  job.schedule = schedule;
  job.global_batch = 64;
  job.p_f = 1;
  SetScheduleDefaults(&job);
  return job;
}

TEST(Evaluate, SharesAddUpAndFiguresFollowFromTheStep) {
  for (const ScheduleName& name : ScheduleNames()) {
    Job job = SmallJob(name.name);
    job.sequences = 2;  // lancet cuts by sequences
    const bool dual = name.name.starts_with("dualpipe");
    if (name.colocated) {
      job.p_a = dual ? 2 : 1, job.m = 16 / job.p_a;
      job.virtual_stages = 1;
    } else {
      job.m = job.n = 8;
    }
    const Evaluation e = Evaluate(job);
    EXPECT_NEAR(e.compute + e.overlapped + e.exposed + e.bubble, 1, 1e-12) << name.name;
    const double tokens = 64.0 * 4096;
    EXPECT_NEAR(e.tokens_per_gpu * e.step_seconds * 16, tokens, 1e-6 * tokens);
    EXPECT_NEAR(e.mfu, e.tflops_per_gpu / 989, 1e-12);
    EXPECT_GE(e.over_limit(), 1);
    EXPECT_EQ(e.class_names.size(), e.classes.size());
  }
}

// Every layout of a small space, tried one by one.
TEST(SearchLayouts, FindsTheBestOfEveryLayoutOfASmallSpace) {
  const Job base = SmallJob("megatron-1f1b");
  double best = 1e300;
  for (int p : {1, 2}) {
    for (int ep : {8, 16}) {
      if (p * ep > 16) continue;
      for (int v : {1, 2, 3, 4, 6, 8}) {
        if (p == 1 && v > 1) continue;
        for (int b : {1, 2, 4}) {
          Job job = base;
          job.p_a = p, job.m = ep, job.virtual_stages = v, job.sequences = b;
          if (job.global_batch % (job.replicas() * ep * b) != 0) continue;
          try {
            const Evaluation e = Evaluate(job);
            if (e.fits) best = std::min(best, e.step_seconds);
          } catch (const Error&) {
          }
        }
      }
    }
  }
  const LayoutSearch search = SearchLayouts(base, {"recompute"});
  ASSERT_TRUE(search.best);
  EXPECT_DOUBLE_EQ(search.best->step_seconds, best);
}

TEST(SearchLayouts, KeepsWhatIsGiven) {
  Job base = SmallJob("af-pipe");
  base.p_a = base.p_f = 2;
  base.sequences = 2;
  const LayoutSearch search = SearchLayouts(base, {"p", "b"});
  ASSERT_TRUE(search.best);
  EXPECT_EQ(search.best->job.p_a, 2);
  EXPECT_EQ(search.best->job.p_f, 2);
  EXPECT_EQ(search.best->job.sequences, 2);
}

TEST(SearchLayouts, SaysWhyNothingCanBe) {
  Job base = SmallJob("af-pipe");
  base.m = 5, base.n = 6;
  const LayoutSearch search = SearchLayouts(base, {"p", "m", "n"});
  ASSERT_FALSE(search.best);
  ASSERT_TRUE(search.mistake);
  EXPECT_THAT(search.mistake->what, HasSubstr("do not divide the GPUs"));
}

// 235 B parameters with 18 bytes each on eight GPUs of 80 GB.
TEST(SearchLayouts, OutOfMemoryIsAnAnswer) {
  Job base = SmallJob("megatron-1f1b");
  base.model = LoadModelShape("qwen3-235b-a22b");
  base.cluster = LoadCluster("h800x8");
  base.p_a = 1, base.m = 8;
  const Evaluation e = Evaluate(base);
  EXPECT_FALSE(e.fits);
  EXPECT_EQ(e.sim.memory[0].over_at_ns, 0);  // the state alone
  EXPECT_GT(e.peak_bytes, int64_t{80} * 1'000'000'000);
}

// Schedules that overlap more are not slower, with the same work, dispatch and layout.
TEST(Evaluate, OverlapHelps) {
  Job job = SmallJob("megatron-1f1b");
  job.p_a = 1, job.m = 16, job.overlap_slowdown = false;
  const double plain = Evaluate(job).step_seconds;
  for (const char* name : {"megatron-overlap", "comet"}) {
    job.schedule = name;
    EXPECT_LT(Evaluate(job).step_seconds, plain) << name;
  }
}

TEST(Reproduce, TablesAreRectangularAndPrint) {
  const auto quiet = [](const std::string&) {};
  const auto tables = Reproduce({"bubble", "memory", "shares", "all-to-all"}, quiet);
  ASSERT_EQ(tables.size(), 4u);
  for (const ClaimTable& t : tables) {
    for (const auto& row : t.rows) EXPECT_EQ(row.size(), t.columns.size()) << t.id;
    EXPECT_FALSE(t.verdict.empty());
    EXPECT_THAT(PrintClaims({t}), HasSubstr(t.title));
    EXPECT_THAT(ClaimsMarkdown({t}), HasSubstr("| --- |"));
  }
  EXPECT_EQ(nlohmann::json::parse(ClaimsJson(tables)).size(), 4u);
  try {
    Reproduce({"nothing"}, quiet);
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("speed-up"));
  }
}

// System.md section 5: a quarter as printed. The schedules themselves: a half (schedule.md section 4).
TEST(Reproduce, BubbleRatios) {
  const auto tables = Reproduce({"bubble"}, [](const std::string&) {});
  for (const auto& row : tables[0].rows) {
    EXPECT_EQ(row[4], "0.25");
    EXPECT_EQ(row[6], row[7]);  // the simulated start and its formula
    EXPECT_EQ(row[8], "0.50");
  }
}

}  // namespace
}  // namespace disagmoe
