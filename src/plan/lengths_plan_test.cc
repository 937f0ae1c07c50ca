#include "plan/lengths_plan.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "plan/evaluate.h"

namespace disagmoe {
namespace {

GridRequest SmallRequest(const std::string& schedule) {
  Job job;
  job.model = LoadModelShape("olmoe-1b-7b");
  job.model.num_layers = 4;
  job.model.window.resize(4);
  job.model.dense.resize(4);
  job.cluster = LoadCluster("h800x8");
  job.schedule = schedule;
  job.seq_length = 4096;
  job.global_batch = 64;
  SetScheduleDefaults(&job);
  return {job, {}, 64, 64};
}

LengthsRequest SmallPlan() {
  LengthsRequest request;
  request.schedules = {SmallRequest("af-pipe"), SmallRequest("megatron-overlap")};
  request.lengths = ParseLengths("2k:8,16k:1");
  request.most_layouts = 6;
  return request;
}

SearchControl Quick() {
  SearchControl control;
  control.effort = 150'000;
  control.exhaust = false;
  return control;
}

// What the plan says of its layouts is what Evaluate says, and the sums are those of the header.
TEST(LengthsPlan, SaysWhatTheSimulatorSays) {
  const LengthsRequest request = SmallPlan();
  const LengthsPlan plan = PlanForLengths(request, Quick());
  ASSERT_EQ(plan.lengths, (std::vector<int64_t>{2048, 16384}));
  EXPECT_NEAR(plan.shares[1], 0.5, 1e-12);  // 8 * 2k tokens in short sequences, 16k in long ones
  ASSERT_TRUE(plan.single());
  ASSERT_LE(plan.layouts.size(), 6u);
  for (const LayoutRow& row : plan.layouts) {
    double expected = 0;
    for (size_t k = 0; k < row.at.size(); ++k) {
      if (row.at[k].step_seconds == kCannot) {
        EXPECT_EQ(row.expected, kCannot);
        break;
      }
      const Job& job = row.at[k].job;
      EXPECT_EQ(job.seq_length, plan.lengths[k]);
      const double tokens = static_cast<double>(job.global_batch * job.seq_length);
      EXPECT_NEAR(tokens / (64 * 4096), 1, request.batch_slack + 1e-9);
      const Evaluation e = Evaluate(job);
      EXPECT_TRUE(e.fits);
      EXPECT_NEAR(row.at[k].step_seconds, e.step_seconds * 64 * 4096 / tokens, 1e-12);
      expected += 0.5 * row.at[k].step_seconds;
      if (k + 1 == row.at.size()) {
        EXPECT_NEAR(row.expected, expected, 1e-9 * expected);
      }
    }
    EXPECT_GE(row.expected, plan.single()->expected);
  }
  // One layout, whatever the length: who holds what stays.
  for (const LayoutRow& row : plan.layouts) {
    if (row.expected != kCannot) {
      EXPECT_EQ(CostOfMoving(row.at[0].job, row.at[1].job).bytes, 0);
    }
  }
  EXPECT_LE(plan.ideal, plan.single()->expected);
}

// Nearly the least expected time of every layout of a smaller cluster, simulated at both lengths.
TEST(LengthsPlan, IsTheBestOfEveryLayoutOfASmallCluster) {
  LengthsRequest request;
  request.schedules = {SmallRequest("af-pipe")};
  Job& base = request.schedules[0].base;
  base.cluster = LoadCluster("h800x4");
  request.lengths = ParseLengths("2k:8,16k:1");
  request.batch_slack = 0;
  request.schedules[0].fixed = {"recompute", "head"};
  const LengthsPlan plan = PlanForLengths(request, Quick());
  ASSERT_TRUE(plan.single());
  std::map<std::vector<int>, std::vector<double>> best;
  for (int k = 0; k < 2; ++k) {
    GridRequest at = request.schedules[0];
    at.base.seq_length = plan.lengths[k];
    at.base.global_batch = at.batch_least = at.batch_most = 64 * 4096 / plan.lengths[k];
    const Grid grid(at);
    const std::vector<Candidate> all = grid.All(1'000'000).value();
    for (const Candidate& c : all) {
      const Job job = grid.JobOf(c);
      try {
        const Evaluation e = Evaluate(job);
        std::vector<double>& times = best[{job.p_a, job.m, job.p_f, job.n, job.replicas(), job.head_on_attention}];
        times.resize(2, kCannot);
        if (e.fits) times[k] = std::min(times[k], e.step_seconds);
      } catch (const Error&) {  // an order that the generator does not take
      }
    }
  }
  double least = kCannot;
  for (const auto& [key, times] : best) least = std::min(least, 0.5 * (times[0] + times[1]));
  EXPECT_LE(plan.single()->expected, 1.01 * least);
  EXPECT_GE(plan.single()->expected, least * (1 - 1e-9));
}

TEST(LengthsPlan, PhasesAndWhatTheyCost) {
  LengthsRequest request = SmallPlan();
  request.phases = {{2048, 300}, {16384, 100}};
  request.restart_seconds = 0.5;
  const LengthsPlan plan = PlanForLengths(request, Quick());
  EXPECT_NEAR(plan.shares[0], 0.75, 1e-12);
  ASSERT_TRUE(plan.resizes);
  EXPECT_LE(plan.resizes->seconds, 400 * plan.single()->expected * (1 + 1e-9));
  EXPECT_NEAR(plan.resizes->single_seconds, 400 * plan.single()->expected, 1e-6);
  ASSERT_EQ(plan.break_even.size(), 1u);
  const nlohmann::ordered_json json = LengthsPlanJson(plan);
  EXPECT_EQ(json["phases"].size(), 2u);
  EXPECT_EQ(json["layouts"].size(), plan.layouts.size());
  const std::string text = PrintLengthsPlan(plan);
  EXPECT_NE(text.find("Best in expectation"), std::string::npos);
  // Same request, same answer; and as many threads as there are.
  SearchControl threads = Quick();
  threads.threads = 2;
  EXPECT_EQ(LengthsPlanJson(PlanForLengths(request, threads)).dump(), json.dump());
}

// A model that only fits in few layouts, and not at all at the longest length.
TEST(LengthsPlan, TheLongestDecidesWhatFits) {
  LengthsRequest request = SmallPlan();
  request.schedules.pop_back();
  request.lengths = ReadLengths("2048\n2048\n3072\n", "f", 1);  // one bucket, shorter than the longest
  ASSERT_EQ(request.lengths.buckets.size(), 1u);
  const LengthsPlan plan = PlanForLengths(request, Quick());
  ASSERT_EQ(plan.lengths, (std::vector<int64_t>{2389, 3072}));
  EXPECT_EQ(plan.shares, (std::vector<double>{1, 0}));
  EXPECT_NEAR(plan.single()->expected, plan.single()->at[0].step_seconds, 1e-12);
}

TEST(LengthsPlan, WhatCannotFitIsSaid) {
  LengthsRequest request = SmallPlan();
  for (GridRequest& r : request.schedules) r.base.cluster.gpu.memory_gb = 7;
  const LengthsPlan plan = PlanForLengths(request, Quick());
  EXPECT_FALSE(plan.single());
  EXPECT_NE(PrintLengthsPlan(plan).find("Nothing fits with sequences of 2k, 16k tokens"), std::string::npos);
  EXPECT_TRUE(LengthsPlanJson(plan)["best_in_expectation"].is_null());
}

}  // namespace
}  // namespace disagmoe
