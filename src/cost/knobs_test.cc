// Every setting of every schedule is either refused or moves the simulated step or memory (field.md: no "same answer
// whatever the knob").
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "base/error.h"
#include "cost/cluster_costs.h"
#include "cost/jobs_for_tests.h"
#include "sim/simulate.h"

namespace disagmoe {
namespace {

using testing::HasSubstr;

// Small enough to be quick, large enough that everything takes part: nodes of two, groups of four over two nodes.
Job BaseJob(const ScheduleName& schedule) {
  const bool hetermoe = schedule.name == "hetermoe";
  Job job = SmallJob(schedule.name, hetermoe ? 1 : 2, 4, schedule.colocated ? 0 : 4);
  job.cluster.gpus_per_node = job.cluster.nics_per_node = 2;
  if (schedule.colocated && schedule.name.rfind("dualpipe", 0) != 0) job.virtual_stages = 2;
  if (schedule.name == "lancet") job.sequences = 2;
  job.global_batch = 8 * job.m * job.sequences;
  return job;
}

// Everything that a user sees of a step.
std::vector<int64_t> Answer(Job job, int replicas = 1) {
  job.cluster.gpus = static_cast<int>(replicas * job.workers());
  CheckJob(job);
  const Schedule s = ScheduleOf(job);
  const ClusterCosts costs(job, s);
  const SimResult r = Simulate(s, costs);
  std::vector<int64_t> out{r.step_ns};
  for (const ClassMemory& m : r.memory) out.insert(out.end(), {m.static_bytes, m.peak_bytes});
  return out;
}

struct Setting {
  const char* name;
  const char* value;
};
const Setting kSettings[] = {
    {"p", "1"}, {"p_a", "1"}, {"p_f", "1"}, {"m", "2"}, {"n", "2"}, {"ep", "2"}, {"idle", ""}, {"idle_ffn", "1"}, {"v", "1"}, {"b", "4"},
    {"batch", "128"}, {"round", "4"}, {"slope", "1"}, {"parts", "1"}, {"delay_weights", "false"}, {"head", "attention"}, {"nics_a", "0.5"},
    {"nics_f", "0.5"}, {"nics", "0.5"}, {"mixed_nodes", "true"}, {"dedup", "worker"}, {"overlap_slowdown", "false"},
    {"recompute", "true"}, {"shard_optimizer", "false"}, {"reserved_gb", "1"}, {"state_bytes", "8"},
    {"routing_skew", "1"}, {"expert_load", "9,5,1,1,1,1,1,1,1,1,1,1,1,1,1,1"},
    {"shadow_experts", "2"}, {"attention_expert_share", "0.25"}, {"straggler", "compute=2"}, {"straggler", "nic=3"},
    {"jitter", "0.2"}, {"seed", "7"}, {"spine_oversubscription", "4"}, {"nic_gbytes_s", "1"}, {"m2n", "0.2"},
    {"all_to_all", "0.2"}};

bool IsRefused(const ScheduleName& s, const std::string& knob) {
  const bool dual = s.name.rfind("dualpipe", 0) == 0;
  const std::set<std::string> pools{"p_a", "p_f", "m", "n", "head", "nics_a", "nics_f", "mixed_nodes", "m2n"};
  if (pools.contains(knob)) return s.colocated;
  if (knob == "idle_ffn") return true;  // two_clusters_test
  if (knob == "ep" || knob == "nics") return !s.colocated;
  if (knob == "v") return !s.colocated || dual;
  if (knob == "round") return dual;
  if (knob == "slope") return dual || s.name == "hetermoe";
  if (knob == "parts") return s.name != "tutel" && s.name != "comet" && s.name != "fastermoe" && s.name != "lancet";
  if (knob == "overlap_slowdown") return s.name == "megatron-1f1b";
  if (knob == "delay_weights") return s.name != "megatron-overlap";
  if (knob == "shadow_experts") return s.name != "fastermoe";
  if (knob == "attention_expert_share") return s.name != "hetermoe";
  return false;
}

TEST(Knobs, MoveSomethingOrAreRefused) {
  std::set<std::string> seen;
  for (const ScheduleName& schedule : ScheduleNames()) {
    const Job base = BaseJob(schedule);
    for (const Setting& setting : kSettings) {
      const std::string name = setting.name;
      std::string value = setting.value;
      seen.insert(name);
      Job job = base;
      if (name == "straggler") value = (schedule.colocated ? "C0.1:" : "A0.1:") + value;
      if (name == "seed") job.jitter = 0.2;
      if (name == "dedup" || name == "spine_oversubscription") job.dedup = Dedup::kExpert;
      const bool groups = name == "p" || name == "p_a" || name == "p_f";
      if (schedule.name == "hetermoe" && groups) value = "2";
      if (schedule.name == "dualpipe" && name == "p") value = "4";
      if (name == "b") job.global_batch *= 4;
      const int replicas = name == "idle" ? 2 : 1;  // the GPUs of one of them
      if (name == "idle") value = std::to_string(job.workers());
      const Job before = job;
      std::string refusal;
      std::vector<int64_t> after;
      try {
        SetKnob(&job, name, value);
        after = Answer(job, replicas);
      } catch (const Error& e) {
        refusal = e.what();
      }
      const std::string what = schedule.name + " " + name + "=" + value;
      if (IsRefused(schedule, name)) {
        EXPECT_THAT(refusal, HasSubstr("a setting that is not used")) << what;
        EXPECT_THAT(refusal, HasSubstr(name + "=" + value)) << what;
        EXPECT_THAT(refusal, HasSubstr(schedule.name)) << what;
      } else if (schedule.name == "hetermoe" && groups) {
        EXPECT_THAT(refusal, HasSubstr("hetermoe has one attention group")) << what;
      } else {
        EXPECT_EQ(refusal, "") << what;
        EXPECT_NE(after, Answer(before, replicas)) << what;
      }
    }
  }
  for (const KnobHelp& knob : Knobs()) EXPECT_TRUE(seen.contains(knob.name)) << knob.name << " is not tried here";
}

// What a setting moves goes the right way.
TEST(Knobs, GoTheRightWay) {
  const auto step = [](const Job& job) { return Answer(job)[0]; };
  for (const ScheduleName& schedule : ScheduleNames()) {
    const Job base = BaseJob(schedule);
    const auto with = [&](const std::string& name, const std::string& value) {
      Job job = base;
      SetKnob(&job, name, value);
      return step(job);
    };
    const int64_t now = step(base);
    EXPECT_GT(with("nic_gbytes_s", "1"), now) << schedule.name;
    EXPECT_GT(with("all_to_all", "0.2"), now) << schedule.name;
    EXPECT_GT(with("recompute", "true"), now) << schedule.name;
    EXPECT_GT(with("routing_skew", "1"), now) << schedule.name;
    EXPECT_GT(with("straggler", schedule.colocated ? "C0:compute=2" : "F0:compute=2"), now) << schedule.name;
    if (!schedule.colocated) {
      EXPECT_GT(with("m2n", "0.2"), now) << schedule.name;
    }
    // af-pipe-zb orders its weight gradients by the times: faster computations may get a slower order.
    if (base.overlaps() && schedule.name != "af-pipe-zb") {
      EXPECT_LT(with("overlap_slowdown", "false"), now) << schedule.name;
    }
    EXPECT_EQ(step(base), now) << schedule.name;  // the same again
  }
}

// Fields of ClusterSpec and EfficiencySpec that no setting names.
TEST(Knobs, EveryFigureOfTheClusterCounts) {
  const std::vector<std::function<void(ClusterSpec*)>> changes{
      [](ClusterSpec* c) { c->gpu.peak_tflops *= 2; },
      [](ClusterSpec* c) { c->gpu.memory_gbytes_s *= 2; },
      [](ClusterSpec* c) { c->nvlink_gbytes_s /= 10; },
      [](ClusterSpec* c) { c->nic_latency_us *= 10; },
      [](ClusterSpec* c) { c->nics_per_node = 1; },
      [](ClusterSpec* c) { c->gpus_per_node = c->nics_per_node = 1; },
      [](ClusterSpec* c) { c->efficiency.attention_forward /= 2; },
      [](ClusterSpec* c) { c->efficiency.attention_backward /= 2; },
      [](ClusterSpec* c) { c->efficiency.gemm /= 2; },
      [](ClusterSpec* c) { c->efficiency.grouped_gemm /= 2; },
      [](ClusterSpec* c) { c->efficiency.grouped_gemm_half_rows *= 10; },
      [](ClusterSpec* c) { c->efficiency.memory /= 2; },
      [](ClusterSpec* c) { c->efficiency.point_to_point /= 10; },
      [](ClusterSpec* c) { c->efficiency.nvlink /= 10; },
      [](ClusterSpec* c) { c->efficiency.collective /= 2; },
      [](ClusterSpec* c) { c->efficiency.op_overhead_us *= 2; },
      [](ClusterSpec* c) { c->efficiency.message_overhead_us *= 2; },
      [](ClusterSpec* c) { c->efficiency.overlap_slowdown *= 2; },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    bool moved = false;
    for (const ScheduleName& schedule : ScheduleNames()) {
      Job job = BaseJob(schedule);
      const std::vector<int64_t> before = Answer(job);
      changes[i](&job.cluster);
      moved |= Answer(job) != before;
    }
    EXPECT_TRUE(moved) << "change " << i;
  }
  // Within one node everything is NVLink; the memory's size is what a worker is compared with.
  Job job = SmallJob("megatron-1f1b", 1, 4);
  const std::vector<int64_t> before = Answer(job);
  job.cluster.nvlink_latency_us *= 10;
  EXPECT_NE(Answer(job), before);
  const Schedule s = ScheduleOf(job);
  EXPECT_EQ(ClusterCosts(job, s).MemoryLimit(0), 100'000'000'000);
}

std::string CheckError(const Job& job) {
  try {
    CheckJob(job);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(Knobs, JobsThatCannotBe) {
  const Job good = SmallJob("af-pipe", 2, 4, 4);
  EXPECT_EQ(CheckError(good), "");
  const auto error = [&](auto change, const char* schedule = "af-pipe") {
    Job job = good;
    job.schedule = schedule;
    change(&job);
    return CheckError(job);
  };
  EXPECT_THAT(error([](Job*) {}, "af-pope"), HasSubstr("unknown schedule"));
  EXPECT_THAT(error([](Job* j) { j->m = 5; }), HasSubstr("p_a * m + p_f * n = 18"));
  EXPECT_THAT(error([](Job* j) { j->cluster.gpus = 8; }), HasSubstr("divisor of the cluster's 8"));
  EXPECT_THAT(error([](Job* j) { j->idle_gpus = 2; }), HasSubstr("a divisor of 14, the cluster's 16 less 2 idle"));
  EXPECT_EQ(error([](Job* j) { j->idle_gpus = 2, j->cluster.gpus = 18; }), "");
  EXPECT_THAT(error([](Job* j) { j->idle_gpus = 16; }), HasSubstr("(idle): got 16"));
  EXPECT_THAT(error([](Job* j) { j->idle_gpus = -16; }), HasSubstr("(idle): got -16"));
  EXPECT_THAT(error([](Job* j) { j->global_batch = 30; }), HasSubstr("a multiple of 4"));
  EXPECT_THAT(error([](Job* j) { j->p_f = j->p_a = 1, j->n = 17, j->m = 4, j->cluster.gpus = 21; }),
              HasSubstr("more workers than experts"));
  EXPECT_THAT(error([](Job* j) { j->seq_length = 0; }), HasSubstr("--seq"));
  EXPECT_THAT(error([](Job* j) { j->expert_loads = {{1, 2}}; }), HasSubstr("wrong number of expert loads"));
  EXPECT_THAT(error([](Job* j) { j->expert_loads = {std::vector<double>(16, -1)}; }), HasSubstr("expert loads"));
  EXPECT_THAT(error([](Job* j) { j->expert_loads = {std::vector<double>(16, 0)}, j->expert_loads[0][3] = 1; }),
              HasSubstr("at least 2"));
  EXPECT_THAT(error([](Job* j) { j->expert_loads = {std::vector<double>(16, 1)}, j->routing_skew = 1; }),
              HasSubstr("two ways to route"));
  EXPECT_THAT(error([](Job* j) { j->nics_a = 1.5; }), HasSubstr("got 20, expected at most the cluster's 16"));
  EXPECT_EQ(error([](Job* j) { j->nics_a = 1.5, j->nics_f = 0.5; }), "");
  EXPECT_THAT(error([](Job* j) { j->cluster.topology = "flat", j->cluster.spine_oversubscription = 2; }),
              HasSubstr("one switch has no spine"));
  EXPECT_THAT(error([](Job* j) { j->p_a = 4, j->sequences = 1; }, "lancet"), HasSubstr("a multiple of its parts, 2"));
  EXPECT_THAT(error([](Job* j) { j->p_a = j->p_f = j->m = j->n = 65536; }),
              HasSubstr("p_a * m + p_f * n = 8589934592"));
  EXPECT_THAT(error([](Job* j) { j->shadow_experts = 17; }), HasSubstr("got 17, expected at most 16"));
  EXPECT_EQ(error([](Job* j) { j->shadow_experts = 16; }), "");
  // 1e7 forwards of 9 stages.
  EXPECT_THAT(error([](Job* j) { j->global_batch = 4 * 1111112; }),
              HasSubstr("1111112 micro-batches, expected at most 1111111"));
  EXPECT_EQ(error([](Job* j) { j->global_batch = 4 * 1111111; }), "");
  EXPECT_THAT(error([](Job* j) { j->sequences = 100'000'000, j->global_batch = 400'000'000, j->seq_length = 1 << 24; }),
              HasSubstr("takes too long"));
}

// A bandwidth of nothing makes a time that no integer holds: refused, not rounded to something.
TEST(Knobs, NumbersThatOverflow) {
  for (double ClusterSpec::*bandwidth : {&ClusterSpec::nic_gbytes_s, &ClusterSpec::nvlink_gbytes_s}) {
    Job job = SmallJob("af-pipe", 2, 4, 4);
    job.mixed_nodes = true;
    job.cluster.*bandwidth = 1e-300;
    EXPECT_THROW(Answer(job), Error);
  }
  Job job = SmallJob("af-pipe", 2, 4, 4);
  job.cluster.gpu.memory_gbytes_s = 1e-300;
  EXPECT_THROW(Answer(job), Error);
}

TEST(Knobs, ValuesThatCannotBe) {
  Job job = SmallJob("af-pipe", 2, 4, 4);
  const auto error = [&](const std::string& name, const std::string& value) -> std::string {
    try {
      SetKnob(&job, name, value);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_THAT(error("rond", "4"), HasSubstr("did you mean round?"));
  for (const Setting& bad : {Setting{"m", "0"}, {"m", "2.5"}, {"m", "x"}, {"m", ""}, {"m2n", "1.01"}, {"m2n", "nan"},
                             {"jitter", "0.3"}, {"head", "f"}, {"dedup", "rank"}, {"recompute", "maybe"},
                             {"straggler", "A0.1"}, {"straggler", "A0:"}, {"straggler", "A0:speed=2"},
                             {"straggler", "A0:compute=0"}, {"straggler", ":compute=2"}, {"seed", "3"}}) {
    EXPECT_THAT(error(bad.name, bad.value), HasSubstr(bad.name)) << bad.value;
  }
  EXPECT_EQ(error("jitter", "0.1"), "");
  EXPECT_EQ(error("seed", "3"), "");
  EXPECT_EQ(error("straggler", "A0.1:compute=1.5,nic=2"), "");
  EXPECT_EQ(job.stragglers.back().worker, "A0.1");
  EXPECT_EQ(job.stragglers.back().compute, 1.5);
  EXPECT_EQ(job.stragglers.back().nic, 2);
}

}  // namespace
}  // namespace disagmoe
