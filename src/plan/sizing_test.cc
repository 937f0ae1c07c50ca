#include "plan/sizing.h"

#include <gtest/gtest.h>

#include "plan/evaluate.h"

namespace disagmoe {
namespace {

// What a pool must do is done by the simulator as well: of every layout, the busiest resource of the sizing program is
// near the simulator's limit (they differ in launches, in the workers near a node's end, and in computation that
// communication slows down), and no step is shorter.
TEST(Sizing, ItsBusiestResourceIsTheSimulatorsLimit) {
  Job job;
  job.model = LoadModelShape("olmoe-1b-7b");
  job.cluster = LoadCluster("h800x48");
  job.schedule = "af-pipe";
  SetScheduleDefaults(&job);
  job.overlap_slowdown = false;
  const SizingModel model(job);
  int count = 0;
  for (int p : {1, 2, 4}) {
    for (int m : {2, 3, 8}) {
      for (int n : {1, 3, 8}) {
        if (48 % (p * (m + n)) != 0) continue;
        for (const bool recompute : {false, true}) {
          Job x = job;
          x.p_a = x.p_f = p, x.m = m, x.n = n, x.recompute = recompute;
          x.global_batch = 8 * p * x.replicas() * m;
          const Evaluation e = Evaluate(x);
          const SizingTimes t = model.Times(
              {.replicas = x.replicas(), .p_a = p, .m = m, .p_f = p, .n = n, .recompute = recompute});
          const double step = t.worst() * static_cast<double>(x.global_batch);
          EXPECT_LT(step, static_cast<double>(e.sim.step_ns)) << LayoutText(e);
          EXPECT_NEAR(step / static_cast<double>(e.sim.limit_ns), 1, 0.12) << LayoutText(e) << " " << e.sim.limit;
          ++count;
        }
      }
    }
  }
  EXPECT_GT(count, 20);
}

}  // namespace
}  // namespace disagmoe
