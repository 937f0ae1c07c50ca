#include "spec/trainable.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <memory>

#include "base/error.h"
#include "schedule/schedule.h"

namespace disagmoe {
namespace {

RunConfig Load(const std::string& text, const std::vector<std::string>& overrides = {}) {
  const std::string path = ::testing::TempDir() + "trainable_test_" + std::to_string(getpid()) + ".toml";
  std::ofstream(path) << text;
  const auto remove = [](const std::string* p) { unlink(p->c_str()); };
  const std::unique_ptr<const std::string, decltype(remove)> gone(&path, remove);
  return LoadConfig(path, overrides);
}

// Every generator can be said; those that the runtime does not execute are refused with what they need.
TEST(Trainable, SchedulesThatTrain) {
  for (const ScheduleName& known : ScheduleNames()) {
    const int groups = known.name == "dualpipe" ? 2 : 1;
    const Schedule schedule = Generate(known.name, {.num_layers = 4, .p_a = groups, .colocated = known.colocated},
                                       {.num_micro_batches = 8});
    EXPECT_EQ(MissingForSchedule(known.name).empty(), schedule.executable()) << known.name;
    const std::string colocated = std::string("layout.colocated=") + (known.colocated ? "true" : "false");
    const RunConfig config = Load("", {"schedule.name=" + known.name, colocated});
    std::string refusal;
    try {
      RequireTrainable(config, "run.toml");
    } catch (const Error& error) {
      refusal = error.what();
    }
    EXPECT_EQ(refusal.empty(), schedule.executable()) << known.name << refusal;
    if (known.name == "tutel") {
      EXPECT_EQ(refusal, "the runtime does not execute this schedule (run.toml, schedule.name): got \"tutel\", expected "
                         "\"auto\", \"af-pipe\", \"megatron-1f1b\", \"megatron-overlap\", \"af-pipe-zb\" or \"dualpipe-v\". "
                         "Hint: tutel needs stages cut into parts; `disagmoe simulate` does");
    }
  }
  const RunConfig early = Load("", {"schedule.name=megatron-overlap", "layout.colocated=true",
                                    "plan.settings=['delay_weights=false']"});
  EXPECT_THROW(RequireTrainable(early, "run.toml"), Error);
}

// Each part of a model that the runtime has not is seen by itself. (A part that nobody looks at breaks ModelOf's own check.)
TEST(Trainable, EveryPartOfAModel) {
  const ModelShape known = ShapeOf({.num_hidden_layers = 4, .n_shared_experts = 2, .first_k_dense_replace = 1}, "known");
  std::string missing = "?";
  EXPECT_EQ(ModelOf(known, &missing).n_shared_experts, 2);
  EXPECT_EQ(missing, "");
  const std::pair<const char*, void (*)(ModelShape&)> parts[] = {
      {"latent attention", [](ModelShape& s) { s.kv_lora_rank = 64; }},
      {"values or RoPE of another width", [](ModelShape& s) { s.value_dim *= 2; }},
      {"heads of an odd width", [](ModelShape& s) { s.head_dim = s.value_dim = s.rope_dim = 31; }},
      {"sliding windows", [](ModelShape& s) { s.window[3] = 128; }},
      {"attention sinks", [](ModelShape& s) { s.sinks = true; }},
      {"biases", [](ModelShape& s) { s.attention_bias = true; }},
      {"biases", [](ModelShape& s) { s.output_bias = true; }},
      {"biases", [](ModelShape& s) { s.expert_bias = true; }},
      {"one norm over all heads", [](ModelShape& s) { s.qk_norm = s.qk_norm_all_heads = true; }},
      {"a router's bias", [](ModelShape& s) { s.router_bias = true; }},
      {"groups of experts", [](ModelShape& s) { s.expert_groups = 2, s.groups_per_token = 1; }},
      {"a gate of the shared experts", [](ModelShape& s) { s.shared_gate = true; }},
      {"shared experts of another width", [](ModelShape& s) { s.shared_hidden += 1; }},
      {"dense layers after those with experts", [](ModelShape& s) { s.dense[3] = true; }},
      {"tied embeddings", [](ModelShape& s) { s.tied_embeddings = true; }}};
  for (const auto& [what, change] : parts) {
    ModelShape shape = known;
    change(shape);
    ModelOf(shape, &missing);
    EXPECT_EQ(missing, what);
  }
}

// Of what simulates only, the dimensions are known: layouts are checked against them, a schedule can be printed.
TEST(Trainable, ModelByName) {
  const RunConfig config = Load("[plan]\nmodel = 'gpt-oss-20b'\n", {"layout.p_a=24"});
  EXPECT_EQ(config.model.num_hidden_layers, 24);
  EXPECT_EQ(config.model.num_experts, 32);
  EXPECT_THROW(Load("[plan]\nmodel = 'gpt-oss-20b'\n", {"layout.p_a=25"}), Error);
  EXPECT_THROW(Load("[plan]\nmodel = 'gpt-oss-20b'\n[model]\nnum_experts = 8\n"), Error);
  const RunConfig read = Load(PrintConfig(config));
  EXPECT_EQ(read.plan.model, config.plan.model);
  EXPECT_EQ(PrintConfig(read), PrintConfig(config));
  try {
    RequireTrainable(config, "run.toml");
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "the runtime does not train this model (run.toml, plan.model): got 'gpt-oss-20b' needs sliding windows, "
                 "attention sinks, biases, a router's bias, expected a table [model]: grouped-query attention, experts, "
                 "shared experts, leading dense layers. Hint: `disagmoe simulate` does");
  }
  EXPECT_EQ(PrintConfig(Load("")).find("[plan]"), std::string::npos);
}

}  // namespace
}  // namespace disagmoe
