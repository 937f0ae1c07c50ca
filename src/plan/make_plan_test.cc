#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "base/error.h"
#include "plan/plan.h"

namespace disagmoe {
namespace {

using testing::HasSubstr;

PlanRequest Small() {
  PlanRequest r;
  r.model = LoadModelShape("olmoe-1b-7b");
  r.hardware = {LoadCluster("h800x16")};
  r.batch = 64, r.batch_least = 60, r.batch_most = 68;
  r.schedules = {"af-pipe", "megatron-1f1b", "megatron-overlap"};
  r.effort = 200'000;
  return r;
}

TEST(MakePlan, IsTheBestRowAndNeverWorseThanColocated) {
  const Plan plan = MakePlan(Small(), {});
  ASSERT_TRUE(plan.best());
  for (const PlanRow& row : plan.rows) {
    ASSERT_TRUE(row.best()) << row.schedule;
    EXPECT_GE(plan.best()->tokens_per_second(), row.best()->tokens_per_second()) << row.schedule;
  }
  ASSERT_GE(plan.best_colocated, 0);
  EXPECT_GE(plan.best()->tokens_per_second(), plan.rows[plan.best_colocated].best()->tokens_per_second());
  // A rejected layout that fits is slower, one that is faster does not fit.
  for (const Rejected& r : plan.rejected) EXPECT_EQ(r.e.fits, r.slower >= 1) << r.differs;
  const bool splits = !plan.best()->job.colocated();
  EXPECT_THAT(Verdict(plan), HasSubstr(splits ? "Splitting pays" : "Splitting does not pay"));
}

// The sizing program leaves out waits, fill and what communication slows down: no split is faster than its answer.
TEST(MakePlan, NoSplitIsFasterThanTheSizingProgram) {
  for (const char* model : {"olmoe-1b-7b", "deepseek-moe"}) {
    PlanRequest r = Small();
    r.model = LoadModelShape(model);
    r.schedules = {"af-pipe"};
    r.settings = {"overlap_slowdown=false"};
    const Plan plan = MakePlan(r, {});
    ASSERT_TRUE(plan.best()) << model;
    ASSERT_EQ(plan.sizing.size(), 1u);
    EXPECT_GE(plan.sizing[0].tokens_per_gpu, plan.best()->tokens_per_gpu) << model;
    EXPECT_LE(plan.sizing[0].tokens_per_gpu, 2 * plan.best()->tokens_per_gpu) << model;
  }
}

TEST(MakePlan, LessNetworkIsNotFasterAndMoreIsNotSlower) {
  PlanRequest r = Small();
  r.hardware[0].nic_gbytes_s = 5;  // so that it matters
  const Plan plan = MakePlan(r, {});
  ASSERT_EQ(plan.changes.size(), 4u);
  EXPECT_THAT(plan.changes[0].what, HasSubstr("NIC more"));
  EXPECT_GT(plan.changes[0].same_ratio, 1);
  EXPECT_LT(plan.changes[1].same_ratio, 1);
  EXPECT_GE(plan.changes[1].same_ratio, 0.8);  // no more is lost than the bandwidth that is
  for (const Change& c : plan.changes) EXPECT_GE(c.best_ratio, c.same_fits ? c.same_ratio * 0.999 : 0) << c.what;
}

TEST(MakePlan, SaysWhatWouldFit) {
  PlanRequest r = Small();
  r.hardware[0].gpu.memory_gb = 12;  // 6.9 billion parameters of 18 bytes on 16 GPUs are 7.8 GB, the reserve 6
  const Plan plan = MakePlan(r, {});
  EXPECT_FALSE(plan.best());
  EXPECT_EQ(Verdict(plan), "Nothing fits.");
  ASSERT_FALSE(plan.reliefs.empty());
  bool state = false, memory = false, gpus = false;
  for (const Relief& x : plan.reliefs) {
    state |= x.fits && x.what.find("Adam") != std::string::npos;
    memory |= x.fits && x.what.find("GPUs of 96 GB") != std::string::npos;
    gpus |= x.fits && x.what.find(" GPUs for 16") != std::string::npos;
    EXPECT_EQ(x.fits, x.peak_gb <= x.limit_gb) << x.what;
  }
  EXPECT_TRUE(memory);
  EXPECT_TRUE(gpus || state);
}

TEST(MakePlan, RefusesSettingsThatNothingHas) {
  PlanRequest r = Small();
  r.settings = {"nics_a=1"};
  r.schedules = {"megatron-1f1b"};
  EXPECT_THROW(MakePlan(r, {}), Error);
  r.settings = {"af-pipe:p=1"};
  EXPECT_THROW(MakePlan(r, {}), Error);
  r.settings = {"p"};
  EXPECT_THROW(MakePlan(r, {}), Error);
  r.settings = {};
  r.schedules = {"af-pip"};
  EXPECT_THROW(MakePlan(r, {}), Error);
  // One that some have is used by those.
  r = Small();
  r.settings = {"n=3"};
  const Plan plan = MakePlan(r, {});
  ASSERT_TRUE(plan.rows[0].best());
  EXPECT_EQ(plan.rows[0].best()->job.n, 3);
}

// Each pool on one kind or the other, each kind alone, and colocated on both as on the slower.
TEST(MakePlan, TwoKindsOfMachines) {
  PlanRequest r = Small();
  r.hardware = {LoadCluster("h800x8"), LoadCluster("h200x8")};
  r.schedules = {"af-pipe", "megatron-overlap"};
  const Plan plan = MakePlan(r, {});
  ASSERT_EQ(plan.rows.size(), 8u);
  int pools = 0;
  for (const PlanRow& row : plan.rows) {
    ASSERT_TRUE(row.best()) << row.hardware;
    pools += row.best()->job.ffn_cluster.has_value();
    EXPECT_LE(row.best()->tokens_per_second(), plan.best()->tokens_per_second());
  }
  EXPECT_EQ(pools, 2);
  // h800 and h200 differ in memory and its bandwidth: the slower is h800.
  const auto slower = std::find_if(plan.rows.begin(), plan.rows.end(),
                                   [](const PlanRow& row) { return row.hardware == "all as the slower"; });
  ASSERT_NE(slower, plan.rows.end());
  EXPECT_EQ(slower->grid.base.cluster.gpus, 16);
  EXPECT_EQ(slower->grid.base.cluster.gpu.memory_gb, 80);
}

TEST(MakePlan, StopsWithWhatItHas) {
  std::atomic<bool> stop{true};
  SearchControl control;
  control.stop = &stop;
  const Plan plan = MakePlan(Small(), control);
  EXPECT_TRUE(plan.stopped);
}

// Same request, same plan, whatever the number of threads.
TEST(MakePlan, ThreadsDoNotMatter) {
  SearchControl one, three;
  three.threads = 3;
  const Plan a = MakePlan(Small(), one), b = MakePlan(Small(), three);
  ASSERT_TRUE(a.best() && b.best());
  EXPECT_EQ(LayoutText(*a.best()), LayoutText(*b.best()));
  EXPECT_EQ(a.best()->sim.step_ns, b.best()->sim.step_ns);
  ASSERT_EQ(a.rejected.size(), b.rejected.size());
  for (size_t i = 0; i < a.rejected.size(); ++i) EXPECT_EQ(a.rejected[i].differs, b.rejected[i].differs);
}

}  // namespace
}  // namespace disagmoe
