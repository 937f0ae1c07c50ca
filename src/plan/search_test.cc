#include "plan/search.h"

#include <gtest/gtest.h>

#include "plan/estimate.h"

namespace disagmoe {
namespace {

Job SmallJob(const std::string& schedule) {
  Job job;
  job.model = LoadModelShape("olmoe-1b-7b");
  job.model.num_layers = 4;
  job.model.window.resize(4);
  job.model.dense.resize(4);
  job.cluster = LoadCluster("h800x8");
  job.schedule = schedule;
  job.global_batch = 16;
  SetScheduleDefaults(&job);
  return job;
}

// An estimate from smaller steps is the step, where rounds and layers repeat themselves.
TEST(EstimateStep, IsTheStepOfALongRing) {
  Job job = SmallJob("af-pipe");
  job.model.num_layers = 32;
  job.model.window.resize(32);
  job.model.dense.resize(32);
  job.p_a = job.p_f = 2, job.m = job.n = 2;
  job.round = 4;
  job.global_batch = 64;
  const Evaluation e = Evaluate(job);
  const StepEstimate estimate = EstimateStep(job);
  EXPECT_FALSE(estimate.exact);
  EXPECT_NEAR(estimate.step_ns / static_cast<double>(e.sim.step_ns), 1, 0.01);
  EXPECT_LT(estimate.operations, OperationsOf(job) / 3);
}

// Every candidate of a small cluster, simulated.
TEST(SearchSchedule, FindsTheBestOfASmallCluster) {
  for (const char* schedule : {"af-pipe", "megatron-1f1b", "megatron-overlap"}) {
    const GridRequest request{SmallJob(schedule), {}, 16, 16};
    SearchControl control;
    control.exhaust = false;
    const ScheduleSearch search = SearchSchedule(request, control);
    ASSERT_TRUE(search.best()) << schedule;
    const Grid grid(request);
    double best = 1e300;
    int64_t count = 0;
    const auto all = grid.All(1'000'000);
    ASSERT_TRUE(all);
    for (const Candidate& c : *all) {
      try {
        const Evaluation e = Evaluate(grid.JobOf(c));
        ++count;
        if (e.fits) best = std::min(best, e.step_seconds / static_cast<double>(e.job.global_batch));
      } catch (const Error&) {  // an order that the generator does not take
      }
    }
    const double found = search.fitting[0].per_sequence();
    EXPECT_LE(found, 1.01 * best) << schedule << " of " << count << ", " << LayoutText(*search.best());
    EXPECT_GE(found, best * (1 - 1e-9)) << schedule;
  }
}

}  // namespace
}  // namespace disagmoe
