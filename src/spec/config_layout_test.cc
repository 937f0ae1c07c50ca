// What follows from a checked configuration: placement, names of workers, the schedule.
#include <gtest/gtest.h>

#include "base/error.h"
#include "spec/config.h"
#include "spec/config_for_tests.h"
#include "spec/layout.h"

namespace disagmoe {
namespace {

TEST_F(ConfigTest, Placement) {
  const PlacementSpec placement = PlacementOf(
      Load("[model]\nnum_hidden_layers = 5\n[layout]\np_a = 2\np_f = 3\nm = 4\nn = 5\nhead = 'attention'\n"));
  EXPECT_EQ(placement.num_layers, 5);
  EXPECT_EQ(placement.p_a, 2);
  EXPECT_EQ(placement.p_f, 3);
  EXPECT_EQ(placement.m, 4);
  EXPECT_EQ(placement.n, 5);
  EXPECT_TRUE(placement.head_on_attention);
  EXPECT_FALSE(placement.colocated);
}

TEST_F(ConfigTest, ExpertCounts) {
  EXPECT_TRUE(Load("[layout]\nexpert_counts = []\n").layout.expert_counts.empty());
  const std::string layout = "[layout]\nn = 3\nexpert_counts = ";
  const RunConfig equal = Load("[layout]\nn = 3\n"), one = Load(layout + "[5, 0, 3]\n");
  const RunConfig each = Load("[layout]\nn = 3\n", {"layout.expert_counts=[[8,0,0],[1,2,5]]"});
  using Begins = std::vector<int64_t>;
  for (int layer : {0, 1}) {
    EXPECT_EQ(ExpertBegins(equal, layer), (Begins{0, 2, 5, 8}));  // 8 i / 3, rounded down
    EXPECT_EQ(ExpertBegins(one, layer), (Begins{0, 5, 5, 8}));
  }
  EXPECT_EQ(ExpertBegins(each, 0), (Begins{0, 8, 8, 8}));
  EXPECT_EQ(ExpertBegins(each, 1), (Begins{0, 1, 3, 8}));
  for (const RunConfig& config : {equal, one, each}) {
    EXPECT_EQ(Load(PrintConfig(config)).layout.expert_counts, config.layout.expert_counts);
  }
  EXPECT_NE(PrintConfig(one).find("\nexpert_counts = [5, 0, 3]\n"), std::string::npos);
  EXPECT_NE(PrintConfig(each).find("\nexpert_counts = [[8, 0, 0], [1, 2, 5]]\n"), std::string::npos);
}

TEST_F(ConfigTest, WorkerNamesFollowTheSchedule) {
  using Names = std::vector<std::string>;
  const RunConfig pools = Load("[layout]\np_a = 2\nm = 2\nn = 3\n");
  EXPECT_EQ(WorkerNames(pools), (Names{"A0.0", "A0.1", "A1.0", "A1.1", "F0.0", "F0.1", "F0.2"}));
  const RunConfig colocated = Load("[layout]\ncolocated = true\np_a = 2\n");
  EXPECT_EQ(WorkerNames(colocated), (Names{"C0.0", "C1.0"}));
  EXPECT_EQ(WorkerNames(Load("[layout]\nn = 2\nreplicas = 2\n")),
            (Names{"A0.0", "F0.0", "F0.1", "r1.A0.0", "r1.F0.0", "r1.F0.1"}));
  for (const RunConfig& config : {pools, colocated}) {
    const Names names = WorkerNames(config);
    for (const GroupSchedule& group : ScheduleOf(config, 4, true).groups)
      for (size_t i = 0; i < group.ranks.size(); ++i)
        EXPECT_EQ(names.at(static_cast<size_t>(group.ranks[i])), group.name + "." + std::to_string(i));
  }
}

TEST_F(ConfigTest, ScheduleFollowsLayoutAndRound) {
  const RunConfig pipe = Load("[schedule]\nround = 2\n");
  const Schedule training = ScheduleOf(pipe, 4, true);
  EXPECT_EQ(training.name, "af-pipe");
  EXPECT_EQ(training.num_micro_batches, 4);
  EXPECT_EQ(training.round, 2);
  const Schedule evaluation = ScheduleOf(pipe, 3, false);
  EXPECT_EQ(evaluation.num_micro_batches, 3);
  EXPECT_FALSE(evaluation.backward);
  EXPECT_EQ(ScheduleOf(Load("[layout]\ncolocated = true\n"), 4, true).name, "megatron-1f1b");
}

// What the checks let through has a schedule (ScheduleOf proves it), for training and for evaluation on fewer or more
// micro-batches, in the same placement; or the error names the keys.
TEST_F(ConfigTest, ChecksForeseeTheGenerators) {
  int made = 0, refused = 0, deadlocks = 0;
  RunConfig c;
  for (const char* name : {"af-pipe-zb", "megatron-overlap", "dualpipe-v"})
    for (int p = 1; p <= 4; ++p)
      for (int layers = 1; layers <= 8; ++layers)
        for (int micro_batches = 1; micro_batches <= 9; ++micro_batches)
          for (int round : {0, 1, 2, 3})
            for (const char* head : {"ffn", "attention"}) {
              c.schedule.name = name;
              c.schedule.round = round;
              c.layout.p_a = p;
              c.layout.colocated = std::string_view(name) != "af-pipe-zb";
              c.layout.p_f = c.layout.colocated ? 1 : (p + micro_batches) % 4 + 1;
              c.layout.head = head;
              c.model.num_hidden_layers = layers;
              c.train.micro_batches = micro_batches;
              try {
                CheckConfig(c, "test");
              } catch (const Error&) {
                ++refused;
                continue;
              }
              try {
                const Schedule training = ScheduleOf(c, micro_batches, true);
                for (int evaluation : {1, 2, 5}) {
                  const Schedule s = ScheduleOf(c, evaluation, false);
                  ASSERT_EQ(s.stage_group, training.stage_group);
                  ASSERT_EQ(s.num_micro_batches, evaluation);
                }
                ++made;
              } catch (const Error& error) {
                ++deadlocks;
                EXPECT_NE(std::string(error.what()).find("schedule.round"), std::string::npos) << error.what();
              }
            }
  EXPECT_GT(made, 1000);
  EXPECT_GT(refused, 1000);
  EXPECT_GT(deadlocks, 10);
}

}  // namespace
}  // namespace disagmoe
