// Replicas, chunks of layers, uneven experts: who does what, and what is refused.
#include "spec/layout.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace disagmoe {
namespace {

struct Mistake {
  void (*change)(RunConfig&);
  const char* line;
};

// Of 4 layers, 8 experts, 4 micro-batches; two workers hold the experts.
std::string Fault(void (*change)(RunConfig&)) {
  RunConfig config;
  config.model.num_hidden_layers = 4;
  config.layout.n = 2;
  change(config);
  try {
    CheckConfig(config, "test");
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void Colocated(RunConfig& c, int groups) {
  c.layout.colocated = true;
  c.layout.p_a = groups;
  c.layout.n = 1;
}

TEST(Layout, ContradictionsAreRefused) {
  const Mistake mistakes[] = {
      {[](RunConfig& c) { c.layout.virtual_stages = 1; },
       "contradiction (test, layout.virtual_stages): got 1, expected 0 with layout.colocated = false. Hint: groups of "
       "two pools take layers in turn"},
      {[](RunConfig& c) {
         Colocated(c, 2);
         c.layout.virtual_stages = 3;
       },
       "contradiction (test, layout.virtual_stages): got 3, expected at most 2, model.num_hidden_layers = 4 over "
       "layout.p_a = 2. Hint: a chunk has at least one layer"},
      {[](RunConfig& c) {
         Colocated(c, 2);
         c.layout.virtual_stages = 2;
         c.layout.head = "attention";
       },
       "contradiction (test, layout.head): got \"attention\", expected \"ffn\" with layout.virtual_stages = 2. Hint: "
       "the head is with the last chunk of layers"},
      {[](RunConfig& c) {
         Colocated(c, 2);
         c.layout.virtual_stages = 2;
         c.schedule.name = "dualpipe-v";
       },
       "contradiction (test, layout.virtual_stages): got 2, expected 0 with schedule.name = \"dualpipe-v\". Hint: a "
       "group holds two chunks of layers"},
      {[](RunConfig& c) { c.layout.replicas = 3; },
       "contradiction (test, layout.replicas): got 3, expected a divisor of train.micro_batches = 4. Hint: each "
       "replica executes as many micro-batches of a step"},
      {[](RunConfig& c) {
         c.layout.replicas = 2;
         c.schedule.round = 4;
       },
       "contradiction (test, schedule.round): got 4, expected a divisor of train.micro_batches = 4 / layout.replicas = "
       "2. Hint: 0 chooses one"},
      {[](RunConfig& c) {
         Colocated(c, 1);
         c.layout.replicas = 4;
         c.schedule.name = "dualpipe-v";
       },
       "contradiction (test, train.micro_batches): got 4, expected at least twice layout.p_a = 1 for each of "
       "layout.replicas = 4 with schedule.name = \"dualpipe-v\""},
      {[](RunConfig& c) { c.layout.replicas = static_cast<int>(c.train.micro_batches = 65536); },
       "contradiction (test, layout.replicas): got 65536, expected at most 65536 workers in all"},
      {[](RunConfig& c) { c.layout.expert_counts = {{8}}; },
       "contradiction (test, layout.expert_counts): got 1 numbers, expected one for each of layout.n = 2 workers. "
       "Hint: 0 is allowed"},
      {[](RunConfig& c) {
         Colocated(c, 1);
         c.layout.m = 2;
         c.layout.expert_counts = {{4, 4}, {1, 2, 5}, {8, 0}, {0, 8}};
       },
       "contradiction (test, layout.expert_counts): got 3 numbers for layer 1, expected one for each of layout.m = 2 "
       "workers. Hint: 0 is allowed"},
      {[](RunConfig& c) { c.layout.expert_counts = {{4, 5}}; },
       "contradiction (test, layout.expert_counts): got a sum of 9, expected model.num_experts = 8. Hint: [] gives "
       "equal shares"},
      {[](RunConfig& c) { c.layout.expert_counts = {{4, 4}, {4, 4}, {8, 0}, {4, 3}}; },
       "contradiction (test, layout.expert_counts): got a sum of 7 for layer 3, expected model.num_experts = 8. Hint: "
       "[] gives equal shares"},
      {[](RunConfig& c) { c.layout.expert_counts = {{4, 4}, {4, 4}}; },
       "contradiction (test, layout.expert_counts): got 2 arrays, expected one for each of model.num_hidden_layers = "
       "4. Hint: or one array of integers for all layers"},
  };
  for (const Mistake& mistake : mistakes) EXPECT_EQ(Fault(mistake.change), mistake.line);
  EXPECT_EQ(Fault([](RunConfig& c) { c.layout.expert_counts = {{8, 0}, {0, 8}, {4, 4}, {1, 7}}; }), "no error");
}

TEST(Layout, ChunksOfLayersGoToTheGroupsInTurn) {
  RunConfig config;
  config.model.num_hidden_layers = 8;
  Colocated(config, 2);
  EXPECT_EQ(PlacementOf(config).virtual_stages, 0);
  config.layout.virtual_stages = 2;
  for (const char* name : {"auto", "megatron-overlap"}) {
    config.schedule.name = name;
    // Two layers a chunk, two stages a layer; the head is with the last.
    EXPECT_EQ(TrainingSchedule(config).stage_group,
              (std::vector<int>{0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1}));
  }
}

TEST(Layout, ReplicasShareTheMicroBatches) {
  RunConfig config;
  config.layout.m = 2;
  config.layout.replicas = 3;
  config.train.micro_batches = 12;
  EXPECT_EQ(config.layout.pipeline_workers(), 3);
  EXPECT_EQ(config.layout.workers(), 9);
  EXPECT_EQ(TrainingSchedule(config).num_micro_batches, 4);
  for (int r = 0; r <= 3; ++r) EXPECT_EQ(ReplicaBegin(config, 12, r), 4 * r);
  // An evaluation of 5: 1, 2 and 2; of 2: 0, 1 and 1.
  for (int r = 0; r <= 3; ++r) EXPECT_EQ(ReplicaBegin(config, 5, r), (std::vector<int64_t>{0, 1, 3, 5})[r]);
  for (int r = 0; r <= 3; ++r) EXPECT_EQ(ReplicaBegin(config, 2, r), (std::vector<int64_t>{0, 0, 1, 2})[r]);
}

// What the checks let through has schedules, for training and for an evaluation; or the error names the keys.
TEST(Layout, ChecksForeseeTheGenerators) {
  int made = 0, refused = 0;
  for (const char* name : {"megatron-1f1b", "megatron-overlap"})
    for (int p = 1; p <= 4; ++p)
      for (int v = 0; v <= 4; ++v)
        for (int layers = 1; layers <= 9; ++layers)
          for (int replicas = 1; replicas <= 3; ++replicas)
            for (int micro_batches = 1; micro_batches <= 9; ++micro_batches) {
              RunConfig c;
              Colocated(c, p);
              c.schedule.name = name;
              c.layout.virtual_stages = v;
              c.layout.replicas = replicas;
              c.model.num_hidden_layers = layers;
              c.train.micro_batches = micro_batches;
              try {
                CheckConfig(c, "test");
              } catch (const Error&) {
                ++refused;
                continue;
              }
              try {
                const Schedule training = TrainingSchedule(c);
                for (int evaluation : {1, 5}) {
                  ASSERT_EQ(ScheduleOf(c, evaluation, false).stage_group, training.stage_group);
                }
                ++made;
              } catch (const Error& error) {
                EXPECT_NE(std::string(error.what()).find("schedule.round"), std::string::npos) << error.what();
              }
            }
  EXPECT_GT(made, 1000);
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace disagmoe
