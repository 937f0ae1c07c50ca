#include "plan/plan_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "base/error.h"
#include "base/rng.h"
#include "plan/evaluate.h"
#include "spec/layout.h"
#include "spec/trainable.h"

namespace disagmoe {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

class PlanFileTest : public ::testing::Test {
 protected:
  PlanFileTest() : folder_(fs::path(::testing::TempDir()) / ("plan_file_" + std::to_string(getpid()))) {
    fs::create_directories(folder_);
  }
  ~PlanFileTest() override { fs::remove_all(folder_); }

  std::string Write(const std::string& text, const std::string& name = "plan.toml") const {
    std::ofstream(folder_ / name) << text;
    return (folder_ / name).string();
  }
  std::string Fault(const std::string& text, const std::vector<std::string>& overrides = {}) const {
    const std::string path = Write(text);
    try {
      ReadPlanFile(path, overrides);
    } catch (const Error& error) {
      std::string line = error.what();
      while (line.find(path) != std::string::npos) line.replace(line.find(path), path.size(), "plan.toml");
      return line;
    }
    return "";
  }

  fs::path folder_;
};

// Everything that a job says, but for the names of its model.
void ExpectSame(const Job& a, const Job& b, const std::string& what) {
  ModelShape shape = a.model;
  shape.name = b.model.name;
  shape.family = b.model.family;
  shape.source = b.model.source;
  EXPECT_EQ(shape, b.model) << what;
  EXPECT_EQ(PrintCluster(a.cluster), PrintCluster(b.cluster)) << what;
  ASSERT_EQ(a.ffn_cluster.has_value(), b.ffn_cluster.has_value()) << what;
  if (a.ffn_cluster) {
    EXPECT_EQ(PrintCluster(*a.ffn_cluster), PrintCluster(*b.ffn_cluster)) << what;
  }
  EXPECT_EQ(a.schedule, b.schedule) << what;
  EXPECT_EQ(a.seq_length, b.seq_length) << what;
  EXPECT_EQ(a.workers(), b.workers()) << what;
  EXPECT_EQ(a.replicas(), b.replicas()) << what;
  EXPECT_EQ(a.micro_batches(), b.micro_batches()) << what;
  EXPECT_EQ(a.expert_counts, b.expert_counts) << what;
  EXPECT_THAT(SettingsOf(a, b), testing::IsEmpty()) << what;
  EXPECT_THAT(SettingsOf(b, a), testing::IsEmpty()) << what;
}

// A layout that can be, on two replicas and some GPUs left.
Job RandomLayout(const ScheduleName& schedule, const std::string& model, const std::string& cluster, Rng& rng) {
  const auto pick = [&](std::initializer_list<int> from) { return from.begin()[rng.Below(from.size())]; };
  Job job;
  job.model = LoadModelShape(model);
  const std::vector<ClusterSpec> clusters = LoadClusters(cluster);
  job.cluster = clusters[0];
  if (clusters.size() == 2) job.ffn_cluster = clusters[1];
  job.schedule = schedule.name;
  SetScheduleDefaults(&job);
  const bool dual = schedule.name.starts_with("dualpipe"), hetermoe = schedule.name == "hetermoe";
  job.p_a = dual ? 2 : hetermoe ? 1 : pick({1, 2});
  job.p_f = schedule.colocated ? 1 : hetermoe ? 1 : pick({1, 2});
  job.m = pick({1, 2, 3});
  job.n = schedule.colocated ? 1 : pick({1, 2, 3});
  job.virtual_stages = schedule.colocated && !dual ? pick({1, 2}) : 1;
  job.sequences = schedule.name == "lancet" ? 2 : pick({1, 2});
  job.idle_gpus = job.cluster.gpus - 2 * (job.ffn_cluster ? job.p_a * job.m : static_cast<int>(job.workers()));
  if (job.ffn_cluster) job.idle_ffn_gpus = job.ffn_cluster->gpus - 2 * job.p_f * job.n;
  job.seq_length = pick({64, 100});
  job.global_batch = int64_t{job.replicas()} * job.m * job.sequences * 8;
  return job;
}

const std::pair<const char*, std::vector<const char*>> kSettings[] = {
    {"round", {"0", "2", "4"}}, {"slope", {"1", "3"}}, {"parts", {"1", "2"}}, {"delay_weights", {"false"}},
    {"head", {"attention"}}, {"nics_a", {"0.5", "0.3"}}, {"nics_f", {"0.7"}}, {"nics", {"0.1"}},
    {"mixed_nodes", {"true"}}, {"dedup", {"expert", "worker", "node"}}, {"overlap_slowdown", {"false"}},
    {"recompute", {"true"}}, {"shard_optimizer", {"false"}}, {"reserved_gb", {"0.1", "7"}}, {"state_bytes", {"8"}},
    {"routing_skew", {"0.6"}}, {"expert_load", {"9,5.25,3,1e-3,1,1,1,1", ";4,4,4,4,1,1,1,1;1,2,3,4,5,6,7,8;1,1,1,1,9,1,1,1"}}, {"shadow_experts", {"1"}},
    {"attention_expert_share", {"0.3"}}, {"straggler", {"X:compute=1.3", "X:nic=3"}}, {"straggler", {"X:compute=1.1"}},
    {"jitter", {"0.1"}}, {"seed", {"77"}}, {"spine_oversubscription", {"3"}}, {"nic_gbytes_s", {"11.5"}},
    {"m2n", {"0.33"}}, {"all_to_all", {"0.2"}}};

// Each of them one time in three, if the schedule takes it.
void SetAtRandom(Job* job, Rng& rng) {
  for (const auto& [name, values] : kSettings) {
    if (rng.Below(3) != 0 || (std::string(name) == "expert_load" && job->routing_skew > 0)) continue;
    std::string value = values[rng.Below(values.size())];
    if (value[0] == 'X') value.replace(0, 1, job->colocated() ? "C0" : "A0.0");
    Job changed = *job;
    try {
      SetKnob(&changed, name, value);
      Evaluate(changed);
    } catch (const Error&) {
      continue;
    }
    *job = changed;
  }
}

// Every schedule with random layouts and settings, of a model that is trained and of one that is not: read back, it is
// the same job, and takes the same time.
TEST_F(PlanFileTest, ReadsBackTheSameJob) {
  Rng rng(7);
  const std::string config = (folder_ / "config.json").string();
  std::ofstream(config) << R"({"model_type": "gpt_oss", "vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2,
    "intermediate_size": 64, "sliding_window": 32})";
  const std::string run = Write("[model]\nnum_hidden_layers = 4\nhidden_size = 64\nfirst_k_dense_replace = 1\n", "run.toml");
  std::set<std::string> settings;
  int uneven = 0;
  for (const ScheduleName& schedule : ScheduleNames()) {
    for (int i = 0; i < 16; ++i) {
      const std::string& model = i % 2 ? config : run;
      const std::string cluster = i % 4 < 2 || schedule.colocated ? "h800x32" : "h100x16+h800x24";
      Job job = RandomLayout(schedule, model, cluster, rng);
      SetAtRandom(&job, rng);
      const int holders = job.colocated() ? job.m : job.n;
      if (holders > 1 && rng.Below(3) == 0 && job.attention_expert_share == 0) {
        job.expert_counts.assign(rng.Below(2) == 0 ? 1 : 4, std::vector<int>(holders, 0));
        for (std::vector<int>& row : job.expert_counts) row[0] = 7, row[holders - 1] = 1;
      }
      const std::string text = PlanFile(job, model, cluster, "a test");
      SCOPED_TRACE(text);
      const Job read = ReadPlanFile(Write(text), {});
      ExpectSame(job, read, schedule.name);
      EXPECT_EQ(PlanFile(read, model, cluster, "a test"), text);
      uneven += !read.expert_counts.empty();
      const Evaluation before = Evaluate(job), after = Evaluate(read);
      EXPECT_EQ(before.sim.step_ns, after.sim.step_ns);
      EXPECT_EQ(before.peak_bytes, after.peak_bytes);
      for (const std::string& s : LoadConfig(Write(text), {}).plan.settings) settings.insert(s.substr(0, s.find('=')));
    }
  }
  EXPECT_GT(uneven, 8);
  // Each was tried, and those that another table says are none of [plan].
  const std::set<std::string> tables{"p", "p_a", "p_f", "m", "n", "ep", "b", "batch", "round", "slope", "head",
                                     "recompute",
                                     "shard_optimizer", "v", "idle", "idle_ffn"};
  for (const KnobHelp& knob : Knobs()) EXPECT_NE(settings.contains(knob.name), tables.contains(knob.name)) << knob.name;
}

// What a run executes is what was planned: the same groups and ranks, micro-batches, rounds, and operations.
TEST_F(PlanFileTest, ARunExecutesTheSameSchedule) {
  Rng rng(3);
  const std::string run = Write("[model]\nnum_hidden_layers = 4\n", "run.toml");
  for (const ScheduleName& schedule : ScheduleNames()) {
    if (!MissingForSchedule(schedule.name).empty()) continue;
    Job job = RandomLayout(schedule, run, "h800x32", rng);
    if (schedule.name != "dualpipe-v") job.round = ScheduleOf(job).round;
    const RunConfig config = LoadConfig(Write(PlanFile(job, run, "h800x32", "")), {});
    RequireTrainable(config, "plan.toml");
    const Schedule trained = TrainingSchedule(config), planned = ScheduleOf(job);
    EXPECT_EQ(trained.name, planned.name);
    EXPECT_EQ(trained.round, planned.round) << schedule.name;
    EXPECT_EQ(trained.num_micro_batches, planned.num_micro_batches) << schedule.name;
    EXPECT_EQ(trained.stage_group, planned.stage_group) << schedule.name;
    EXPECT_EQ(config.layout.workers(), 2 * job.workers()) << schedule.name;
  }
}

// Families by their published configurations: a plan names them, and that of a run's own model has its table.
TEST_F(PlanFileTest, EveryPublishedModel) {
  for (const Preset& preset : ModelPresets()) {
    Job job;
    job.model = LoadModelShape(preset.name);
    job.cluster = LoadCluster("h800x16");
    job.m = job.n = 8;
    job.global_batch = 64;
    job.dedup = Dedup::kWorker;
    const std::string text = PlanFile(job, preset.name, "h800x16", "a test\nof two lines");
    EXPECT_THAT(text, HasSubstr("\n[model]\nfrom = \"" + preset.name + "\"\n\n[layout]\n"));
    EXPECT_TRUE(text.starts_with("# a test\n# of two lines\n# ")) << text;
    ExpectSame(job, ReadPlanFile(Write(text), {}), preset.name);
    const RunConfig config = LoadConfig(Write(text), {});
    EXPECT_EQ(config.model.num_hidden_layers, job.model.num_layers);
    EXPECT_EQ(config.model.model_type, job.model.family);
    RequireTrainable(config, "plan.toml");
    // The file of a file is no other.
    EXPECT_EQ(LoadModelShape(Write(text)).num_layers, job.model.num_layers);
    Job again = ReadPlanFile(Write(text), {});
    ExpectSame(again, ReadPlanFile(Write(PlanFile(again, Write(text, "first.toml"), "h800x16", "")), {}), preset.name);
  }
}

constexpr const char* kPlan =
    "[layout]\nm = 2\nn = 2\n[train]\nmicro_batch_size = 4\nmicro_batches = 4\n[plan]\ncluster = \"h800x4\"\n";

TEST_F(PlanFileTest, OverridesAndDefaults) {
  const Job job = ReadPlanFile(Write(kPlan), {"layout.n=1", "layout.m=3", "train.micro_batch_size=6",
                                              "plan.settings=[\"nics_a=0.5\"]"});
  EXPECT_EQ(job.schedule, "af-pipe");  // "auto"
  EXPECT_EQ(job.m, 3);
  EXPECT_EQ(job.sequences, 2);
  EXPECT_EQ(job.global_batch, 24);
  EXPECT_EQ(job.nics_a, 0.5);
  EXPECT_EQ(job.dedup, Dedup::kWorker);  // the schedule's
  EXPECT_EQ(job.model.name, "plan");
}

TEST_F(PlanFileTest, Mistakes) {
  EXPECT_EQ(Fault("[layout]\nm = 2\n"),
            "no cluster to simulate on (plan.toml, plan.cluster): got \"\", expected such as \"h800x128\", or a .toml file. "
            "Hint: or `disagmoe simulate plan.toml CLUSTER`, which searches its own layouts");
  EXPECT_EQ(Fault(kPlan, {"layout.m=3", "layout.n=1"}),
            "contradiction (plan.toml, train.micro_batch_size): got 4, expected a multiple of layout.m = 3. Hint: an "
            "attention worker has as many sequences as the others in the cost model");
  EXPECT_EQ(Fault(kPlan, {"plan.settings=[\"p_a=2\", \"m=1\"]"}),
            "contradiction (plan.toml, layout.p_a): got 1, expected 2, as the rest of the plan has it. Hint: plan.settings "
            "are for what no other table says");
  EXPECT_EQ(Fault(kPlan, {"plan.settings=[\"nics_a\"]"}),
            "not a setting (plan.toml, plan.settings): got \"nics_a\", expected \"key=value\"");
  EXPECT_EQ(Fault(kPlan, {"plan.settings=[\"nics_b=1\"]"}),
            "unknown setting (plan.toml, plan.settings): got \"nics_b=1\", expected see disagmoe simulate --help. Hint: did "
            "you mean nics_a?");
  EXPECT_EQ(Fault(kPlan, {"plan.settings=[\"ep=2\"]"}),
            "a setting that is not used (plan.toml, plan.settings): got ep=2, expected nothing: colocated schedules only. "
            "Hint: schedule af-pipe");
  EXPECT_THAT(Fault(kPlan, {"plan.cluster=h900x8"}), HasSubstr("unknown cluster"));
  EXPECT_EQ(Fault(kPlan, {"layout.replicas=2"}),
            "more workers than GPUs (plan.toml, layout): got 8, expected at most the 4 of h800x4. Hint: layout.replicas = 2 "
            "of 4");
  EXPECT_THAT(Fault(kPlan, {"plan.cluster=h800x8", "plan.settings=[\"idle=0\"]"}),
              HasSubstr("contradiction (plan.toml, layout.replicas): got 1, expected 2"));
  EXPECT_THAT(Fault(kPlan, {"model.from=gpt-oss-20"}), HasSubstr("did you mean 'gpt-oss-20b'?"));
  EXPECT_EQ(Fault(kPlan, {"plan.clustr=x"}), "unknown key (command line): got 'plan.clustr'. Hint: did you mean 'plan.cluster'?");
  EXPECT_EQ(Fault(kPlan, {"plan.settings=5"}),  // one string
            "not a setting (plan.toml, plan.settings): got \"5\", expected \"key=value\"");
  EXPECT_EQ(Fault(kPlan, {"plan.settings=[5]"}),
            "wrong type (command line, plan.settings): got an array, expected an array of strings");
}

}  // namespace
}  // namespace disagmoe
