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

// The step is that of the GPUs that are used; figures of a GPU are of all.
TEST(Evaluate, IdleGpusCountWithoutWork) {
  Job job = SmallJob("af-pipe");
  job.m = 5, job.n = 3;
  job.global_batch = 60;
  const Evaluation used = Evaluate(job);
  job.cluster.gpus = 24;
  job.idle_gpus = 8;
  const Evaluation e = Evaluate(job);
  EXPECT_EQ(job.replicas(), 2);
  EXPECT_EQ(e.sim.step_ns, used.sim.step_ns);
  EXPECT_NEAR(e.tokens_per_gpu, used.tokens_per_gpu * 16 / 24, 1e-9 * e.tokens_per_gpu);
  EXPECT_NEAR(e.mfu, used.mfu * 16 / 24, 1e-9);
  EXPECT_THAT(LayoutText(e), HasSubstr("5 A + 3 F, x 2, 8 idle, b 1"));
  EXPECT_EQ(LayoutText(used).find("idle"), std::string::npos);
}

// A GPU's share of the tokens is of the GPUs of both pools, MFU against the sum of their peaks.
TEST(Evaluate, FiguresOfTwoClusters) {
  Job job = SmallJob("af-pipe");
  job.cluster = LoadCluster("h800x8");
  job.cluster.gpus = 9;
  job.ffn_cluster = LoadCluster("h800x5");
  job.ffn_cluster->gpu.peak_tflops = 500;
  job.m = 8, job.n = 4;
  job.idle_gpus = job.idle_ffn_gpus = 1;
  const Evaluation e = Evaluate(job);
  const double tokens = 64.0 * 4096 / e.step_seconds;
  EXPECT_NEAR(e.tokens_per_gpu, tokens / 14, 1e-9 * tokens);
  EXPECT_NEAR(e.mfu, e.tflops_per_gpu * 14 / (9 * 989.0 + 5 * 500), 1e-9);
  EXPECT_THAT(LayoutText(e), HasSubstr("8 A + 4 F, 1 + 1 idle, b 1"));
}

// The halves of a cluster, told apart: the search finds what it finds in the whole with as many workers in each pool.
TEST(SearchLayouts, TwoClusters) {
  Job job = SmallJob("af-pipe");
  const Job whole = job;
  job.cluster = LoadCluster("h800x8");
  job.ffn_cluster = job.cluster;
  const LayoutSearch search = SearchLayouts(job, {"recompute"});
  ASSERT_TRUE(search.best);
  double best = 1e300;
  for (int p : {1, 2}) {
    Job one = whole;
    one.p_a = one.p_f = p, one.m = one.n = 8 / p;
    const LayoutSearch found = SearchLayouts(one, {"recompute", "p", "m", "n", "mixed_nodes"});
    if (found.best) best = std::min(best, 1 / found.best->tokens_per_gpu);
  }
  EXPECT_LE(1 / search.best->tokens_per_gpu, best);  // it may also take replicas of parts of nodes
  job.p_a = job.p_f = 2, job.m = 4;
  const LayoutSearch four = SearchLayouts(job, {"recompute", "m", "p"});
  ASSERT_TRUE(four.best);
  EXPECT_EQ(four.best->job.n, 4);
  EXPECT_EQ(four.best->job.replicas(), 1);
}

TEST(SearchLayouts, LeavesGpusIdle) {
  for (const char* schedule : {"af-pipe", "megatron-1f1b"}) {
    Job job = SmallJob(schedule);
    const LayoutSearch used = SearchLayouts(job, {"recompute"});
    job.cluster.gpus = 24;
    job.idle_gpus = 8;
    const LayoutSearch search = SearchLayouts(job, {"recompute", "idle"});
    ASSERT_TRUE(search.best) << schedule;
    EXPECT_EQ(search.best->sim.step_ns, used.best->sim.step_ns) << schedule;
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
            if (e.fits) best = std::min(best, 1 / e.tokens_per_gpu);
          } catch (const Error&) {
          }
        }
      }
    }
  }
  const LayoutSearch search = SearchLayouts(base, {"recompute"});
  ASSERT_TRUE(search.best);
  EXPECT_LE(1 / search.best->tokens_per_gpu, best);  // of more groups and sequences
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
  base.m = 10, base.n = 10;
  const LayoutSearch search = SearchLayouts(base, {"p", "m", "n"});
  ASSERT_FALSE(search.best);
  ASSERT_TRUE(search.mistake);
  EXPECT_THAT(search.mistake->what, HasSubstr("do not divide the GPUs"));
}

// Whatever is given is tried, also what the search would not have thought of.
TEST(SearchLayouts, TriesEverySizeThatIsGiven) {
  for (const char* name : {"m", "n"}) {
    for (int given = 1; given < 16; ++given) {
      Job base = SmallJob("af-pipe");
      base.m = base.n = given, base.global_batch = 1024;
      const LayoutSearch search = SearchLayouts(base, {"p", name, "b", "recompute"}, true);
      ASSERT_TRUE(search.best) << name << given;
      EXPECT_EQ(name[0] == 'm' ? search.best->job.m : search.best->job.n, given);
    }
  }
}

TEST(SearchLayouts, FindsAStragglerOfALaterGroup) {
  Job base = SmallJob("af-pipe");
  base.p_a = base.p_f = 4;
  base.stragglers = {{"A3", 1.5, 1}};
  EXPECT_TRUE(SearchLayouts(base, {"p"}, true).best);
}

// More workers than int has, and more than there are GPUs: neither may be divided by.
TEST(SearchLayouts, RefusesLayoutsWithoutAReplica) {
  Job base = SmallJob("megatron-1f1b");
  base.p_a = base.m = 65536;
  EXPECT_THAT(SearchLayouts(base, {"p", "ep"}).mistake->got, HasSubstr("4294967296"));
  base = SmallJob("af-pipe");
  base.p_a = base.p_f = 4;
  base.m = base.n = 100;
  EXPECT_THAT(SearchLayouts(base, {"p", "m", "n"}).mistake->got, HasSubstr("= 800"));
  base = SmallJob("dualpipe");
  base.p_a = 3;
  base.cluster.gpus = 24;
  EXPECT_THAT(SearchLayouts(base, {"p"}).mistake->expected, HasSubstr("even"));
}

// Groups as large as there are experts, or as a node.
TEST(SearchLayouts, GroupsOfFewExpertsOrSmallNodes) {
  Job base = SmallJob("megatron-1f1b");
  base.model.num_experts = base.model.experts_per_token = 4;
  const LayoutSearch few = SearchLayouts(base, {"p", "v"}, true);
  ASSERT_TRUE(few.best);
  EXPECT_LE(few.best->job.m, 4);
  base = SmallJob("megatron-1f1b");
  base.cluster.gpus_per_node = base.cluster.nics_per_node = 2;
  base.cluster.nic_gbytes_s = 0.01;  // any exchange that leaves the node costs seconds
  const LayoutSearch small = SearchLayouts(base, {}, true);
  ASSERT_TRUE(small.best);
  EXPECT_LE(small.best->job.m, 2);
}

// With 64 GB, af-pipe has layouts that fit without recomputation and a faster one that does not.
TEST(SearchLayouts, RecomputesWhereThatIsFaster) {
  Job base = SmallJob("af-pipe");
  base.model = LoadModelShape("gpt-oss-120b");
  base.cluster = LoadCluster("h800x64");
  base.cluster.gpu.memory_gb = 64;
  base.global_batch = 1024;
  double best[2];
  for (int recompute : {0, 1}) {
    base.recompute = recompute != 0;
    const LayoutSearch search = SearchLayouts(base, {"recompute"});
    ASSERT_TRUE(search.best);
    best[recompute] = search.best->tokens_per_gpu;
  }
  EXPECT_LT(best[0], best[1]);
  EXPECT_EQ(SearchLayouts(base, {}).best->tokens_per_gpu, best[1]);
}

// Where nothing fits, no layout of any number of groups needs less than the one that is shown.
TEST(SearchLayouts, ShowsTheSmallestWhereNothingFits) {
  Job base = SmallJob("megatron-1f1b");
  base.model = LoadModelShape("qwen3-30b-a3b");
  base.cluster = LoadCluster("h800x8");
  base.global_batch = 1024;
  const LayoutSearch search = SearchLayouts(base, {});
  ASSERT_FALSE(search.best);
  for (int p : {1, 2, 4, 8}) {
    base.p_a = p;
    EXPECT_LE(search.best_over->peak_bytes, SearchLayouts(base, {"p"}).best_over->peak_bytes) << p;
  }
}

// A tutel of degree 1 is megatron, so the best tutel is not slower, however many more layouts there are.
TEST(SearchLayouts, MoreChoicesAreNotWorse) {
  Job base = SmallJob("megatron-1f1b");
  base.model = LoadModelShape("qwen3-235b-a22b");
  base.cluster = LoadCluster("h800x128");
  base.global_batch = 256;
  const double plain = SearchLayouts(base, {}, true).best->tokens_per_gpu;
  base.schedule = "tutel";
  EXPECT_GE(SearchLayouts(base, {}, true).best->tokens_per_gpu, plain);
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
