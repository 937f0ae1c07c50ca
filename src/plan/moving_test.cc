#include "plan/moving.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "cost/jobs_for_tests.h"
#include "spec/params.h"

namespace disagmoe {
namespace {

ModelShape Tiny(int layers = 3) {
  ModelShape m = SmallModel();
  m.vocab_size = 7;
  m.hidden_size = 5;
  m.num_heads = m.num_kv_heads = 1;
  m.head_dim = m.value_dim = 3;
  m.num_layers = layers;
  m.window.assign(layers, 0);
  m.dense.assign(layers, false);
  m.num_experts = 5;
  m.expert_hidden = 2;
  m.shared_hidden = 3;
  return m;
}

Job TinyJob(const std::string& schedule, int gpus, int p, int m, int n = 1, bool shard = true) {
  Job job = MakeJob(schedule, Tiny(), SmallCluster(gpus));
  job.cluster.gpus_per_node = job.cluster.nics_per_node = 2;
  job.p_a = job.p_f = p;
  job.m = m, job.n = n;
  job.idle_gpus = gpus % static_cast<int>(job.workers());
  job.global_batch = int64_t{4} * job.replicas() * m;
  job.shard_optimizer = shard;
  return job;
}

// Who holds a parameter, by the rules of system.md section 3 for two pools, and of consecutive layers for a pipeline
// whose groups do not divide them (3 layers over p = 1 or 3 groups here).
std::vector<int> HoldersOfParam(const Job& job, const std::string& kind, int layer, int expert) {
  std::set<int> ranks;
  const int p = job.p_a;
  const bool attention = kind == "attention" || kind == "embed";
  const int group = kind == "embed" ? 0 : kind == "head" ? (static_cast<int>(job.model.num_layers) - 1) % p : layer % p;
  const int size = attention || job.colocated() ? job.m : job.n;
  const int first = (attention || job.colocated() ? 0 : p * job.m) + group * size;
  for (int w = 0; w < size; ++w) {
    const int64_t e = job.model.num_experts;
    if (expert >= 0 && (expert < e * w / size || expert >= e * (w + 1) / size)) continue;
    ranks.insert(first + w);
  }
  std::vector<int> gpus;
  for (int r = 0; r < job.replicas(); ++r) {
    for (int rank : ranks) gpus.push_back(r * static_cast<int>(job.workers()) + rank);
  }
  return gpus;
}

struct Flow {
  std::map<int, double> nic_in, nic_out, nvlink_in, nvlink_out;
};

// One thing of so many bytes, for all that lack it: the rules of the header, said once more.
void FetchOne(const std::vector<int>& held, const std::vector<int>& wanted, double bytes, int per_node, Flow* flow) {
  std::map<int, std::vector<int>> lacking, near;
  for (int gpu : held) near[gpu / per_node].push_back(gpu);
  for (int gpu : wanted) {
    if (std::find(held.begin(), held.end(), gpu) == held.end()) lacking[gpu / per_node].push_back(gpu);
  }
  for (const auto& [node, gpus] : lacking) {
    for (int gpu : gpus) {
      if (near.contains(node)) {
        flow->nvlink_in[gpu] += bytes;
        for (int from : near[node]) flow->nvlink_out[from] += bytes / static_cast<double>(near[node].size());
        continue;
      }
      for (int from : held) flow->nic_out[from] += bytes / static_cast<double>(held.size() * gpus.size());
      for (int by : gpus) {
        const double part = bytes / static_cast<double>(gpus.size());
        if (by == gpu) {
          flow->nic_in[gpu] += part;
        } else {
          flow->nvlink_in[gpu] += part;
          flow->nvlink_out[by] += part;
        }
      }
    }
  }
}

// Parameter by parameter.
Flow SlowFlow(const Job& from, const Job& to) {
  Flow flow;
  const ModelShape& m = from.model;
  const auto block = [&](const std::string& kind, int layer, int expert, int64_t params) {
    const std::vector<int> held = HoldersOfParam(from, kind, layer, expert),
                           wanted = HoldersOfParam(to, kind, layer, expert);
    const auto owner = [&](const Job& job, const std::vector<int>& gpus, int64_t i) {
      if (!job.shard_optimizer) return gpus;
      size_t h = 0;
      while (i >= params * static_cast<int64_t>(h + 1) / static_cast<int64_t>(gpus.size())) ++h;
      return std::vector<int>{gpus[h]};
    };
    for (int64_t i = 0; i < params; ++i) {
      FetchOne(held, wanted, to.weight_bytes, from.cluster.gpus_per_node, &flow);
      FetchOne(owner(from, held, i), owner(to, wanted, i), to.state_bytes, from.cluster.gpus_per_node, &flow);
    }
  };
  block("embed", 0, -1, m.vocab_size * m.hidden_size);
  for (int l = 0; l < m.num_layers; ++l) {
    block("attention", l, -1, m.AttentionParams(l));
    block("ffn", l, -1, 3 * m.hidden_size * m.shared_hidden);
    for (int e = 0; e < m.num_experts; ++e) block("ffn", l, e, 3 * m.hidden_size * m.expert_hidden);
  }
  block("head", 0, -1, m.HeadParams());
  return flow;
}

void ExpectSame(const std::vector<double>& fast, const std::map<int, double>& slow, const std::string& what) {
  for (size_t gpu = 0; gpu < fast.size(); ++gpu) {
    const auto at = slow.find(static_cast<int>(gpu));
    const double expected = at == slow.end() ? 0 : at->second;
    EXPECT_NEAR(fast[gpu], expected, 1e-6 * (1 + expected)) << what << " of GPU " << gpu;
  }
}

std::vector<Job> TinyJobs() {
  return {TinyJob("af-pipe", 8, 1, 2, 2),          TinyJob("af-pipe", 8, 1, 5, 3),
          TinyJob("af-pipe", 8, 2, 2, 2),          TinyJob("af-pipe-zb", 8, 1, 2, 1),
          TinyJob("af-pipe", 8, 1, 3, 5, false),   TinyJob("megatron-1f1b", 8, 1, 4),
          TinyJob("megatron-overlap", 8, 3, 2),    TinyJob("comet", 8, 1, 2, 1, false)};
}

TEST(MoveCost, IsThatOfEveryParameter) {
  const std::vector<Job> jobs = TinyJobs();
  for (size_t a = 0; a < jobs.size(); ++a) {
    CheckJob(jobs[a]);
    for (size_t b = 0; b < jobs.size(); ++b) {
      SCOPED_TRACE(std::to_string(a) + " to " + std::to_string(b));
      const MoveCost cost = CostOfMoving(jobs[a], jobs[b], 3);
      const Flow slow = SlowFlow(jobs[a], jobs[b]);
      ExpectSame(cost.nic_in, slow.nic_in, "NIC in");
      ExpectSame(cost.nic_out, slow.nic_out, "NIC out");
      ExpectSame(cost.nvlink_in, slow.nvlink_in, "NVLink in");
      ExpectSame(cost.nvlink_out, slow.nvlink_out, "NVLink out");
    }
  }
}

double Total(const std::vector<double>& of) {
  double sum = 0;
  for (double x : of) sum += x;
  return sum;
}

TEST(MoveCost, WhatIsSentArrivesAndNothingElseMoves) {
  const std::vector<Job> jobs = TinyJobs();
  for (const Job& from : jobs) {
    const MoveCost same = CostOfMoving(from, from);
    EXPECT_EQ(same.bytes, 0);
    EXPECT_EQ(same.seconds(), 0);
    for (const Job& to : jobs) {
      const MoveCost cost = CostOfMoving(from, to);
      EXPECT_NEAR(Total(cost.nic_in), Total(cost.nic_out), 1e-6 * cost.bytes);
      EXPECT_NEAR(Total(cost.nvlink_in), Total(cost.nvlink_out), 1e-6 * cost.bytes);
      EXPECT_NEAR(Total(cost.nic_in), cost.nic_bytes, 1e-9 * cost.bytes);
    }
  }
  // The order of the same placement moves nothing.
  EXPECT_EQ(CostOfMoving(TinyJob("af-pipe", 8, 1, 2, 2), TinyJob("af-pipe-zb", 8, 1, 2, 2)).seconds(), 0);
}

// Two GPUs of a node change their roles, attention and experts, one of each: both fetch what the other has. Of a shard
// of everything with one holder, all of it moves.
TEST(MoveCost, RolesChangedByHand) {
  Job from = TinyJob("af-pipe", 2, 1, 1, 1);
  Job to = from;
  to.head_on_attention = true;  // only the head moves: from GPU 1 to GPU 0
  const MoveCost cost = CostOfMoving(from, to, 7);
  const double head = static_cast<double>(from.model.HeadParams()) * (from.weight_bytes + from.state_bytes);
  EXPECT_DOUBLE_EQ(cost.bytes, head);
  EXPECT_DOUBLE_EQ(cost.nvlink_out[1], head);
  EXPECT_DOUBLE_EQ(cost.nvlink_in[0], head);
  EXPECT_DOUBLE_EQ(cost.nic_bytes, 0);
  EXPECT_DOUBLE_EQ(cost.seconds(), 7 + head / (8e9 * 0.9));  // NVLink of the small cluster
  const MoveCost back = CostOfMoving(to, from, 7);
  EXPECT_DOUBLE_EQ(back.nvlink_out[0], head);  // and the same the other way
  EXPECT_DOUBLE_EQ(back.seconds(), cost.seconds());
}

// On nodes of one GPU the same goes over NICs.
TEST(MoveCost, BetweenNodes) {
  Job from = TinyJob("af-pipe", 2, 1, 1, 1);
  from.cluster.gpus_per_node = from.cluster.nics_per_node = 1;
  Job to = from;
  to.head_on_attention = true;
  const MoveCost cost = CostOfMoving(from, to, 0);
  EXPECT_DOUBLE_EQ(cost.nic_bytes, cost.bytes);
  EXPECT_DOUBLE_EQ(cost.seconds(), cost.bytes / (2e9 * 0.9));
}

// Pools on machines of their own: m = 1, n = 2 become m = 2, n = 1 on 2 + 2 GPUs. The second attention GPU lacks all of
// attention and gets it from the first; the first FFN GPU lacks the second half of the experts.
TEST(MoveCost, PoolsOnTheirOwnMachines) {
  Job from = TinyJob("af-pipe", 2, 1, 1, 2, false);
  from.model.num_experts = 4;
  from.ffn_cluster = from.cluster;
  from.ffn_cluster->nvlink_gbytes_s = 16;
  from.idle_gpus = 1, from.idle_ffn_gpus = 0;
  Job to = from;
  to.m = 2, to.n = 1, to.idle_gpus = 0, to.idle_ffn_gpus = 1;
  CheckJob(from);
  CheckJob(to);
  const MoveCost cost = CostOfMoving(from, to, 0);
  const double each = from.weight_bytes + from.state_bytes;
  const ModelShape& m = from.model;
  const double attention = each * static_cast<double>(m.EmbeddingParams() + 3 * m.AttentionParams(0));
  const double experts = each * static_cast<double>(3 * 2 * m.ExpertParams());
  EXPECT_DOUBLE_EQ(cost.nvlink_in[1], attention);
  EXPECT_DOUBLE_EQ(cost.nvlink_out[0], attention);
  EXPECT_DOUBLE_EQ(cost.nvlink_in[2], experts);
  EXPECT_DOUBLE_EQ(cost.nvlink_out[3], experts);
  EXPECT_DOUBLE_EQ(cost.bytes, attention + experts);
  EXPECT_DOUBLE_EQ(cost.seconds(), std::max(attention / 8e9, experts / 16e9) / 0.9);
}

// An expert more for the first of two workers: it is all that moves.
TEST(MoveCost, OtherCountsOfExperts) {
  Job from = TinyJob("af-pipe", 3, 1, 1, 2, false);
  from.expert_counts = {{2, 3}};
  Job to = from;
  to.expert_counts = {{2, 3}, {3, 2}, {2, 3}};
  CheckJob(to);
  const double expert = static_cast<double>(from.model.ExpertParams()) * (from.weight_bytes + from.state_bytes);
  EXPECT_DOUBLE_EQ(CostOfMoving(from, to).bytes, expert);
  EXPECT_DOUBLE_EQ(CostOfMoving(from, to).nic_in[1], expert);  // from GPU 2, of the other node
}

// Every schedule: a worker holds as many parameters as its memory says.
TEST(Holdings, AreTheParametersOfTheMemoryModel) {
  for (const ScheduleName& name : ScheduleNames()) {
    for (const int share : {0, 1}) {
      Job job = SmallJob(name.name, name.name == "hetermoe" ? 1 : 2, 2, name.colocated ? 0 : 3);
      if (share == 1 && name.name != "hetermoe") continue;
      if (name.name == "lancet") job.sequences = 2, job.global_batch *= 2;
      job.attention_expert_share = share * 0.3;
      job.model.shared_hidden = 32;
      job.cluster.gpus = static_cast<int>(2 * job.workers());
      job.global_batch *= 2;
      const Costed costed(job);
      const Holdings held = HoldingsOf(job);
      std::vector<int64_t> params(job.cluster.gpus, 0);
      std::vector<double> state(job.cluster.gpus, 0);
      for (const Block& b : held.blocks) {
        for (int gpu : b.gpus) {
          params[gpu] += b.params;
          state[gpu] += static_cast<double>(b.params) / static_cast<double>(b.gpus.size());
        }
      }
      for (const WorkerClass& c : costed.costs.classes()) {
        const int id = static_cast<int>(&c - costed.costs.classes().data());
        int64_t most = 0;
        double most_state = 0;
        for (int w = 0; w < c.count; ++w) {
          const int rank = costed.schedule.groups[c.group].ranks[c.first_worker + w];
          EXPECT_EQ(params[rank], params[rank + job.workers()]) << name.name;  // its replica
          most = std::max(most, params[rank]);
          most_state = std::max(most_state, state[rank]);
        }
        EXPECT_NEAR(static_cast<double>(costed.costs.StaticParts(id).weights),
                    static_cast<double>(most) * job.weight_bytes, 2)
            << name.name;
        EXPECT_NEAR(static_cast<double>(costed.costs.StaticParts(id).optimizer), most_state * job.state_bytes, 20)
            << name.name;
      }
    }
  }
}

// Parameters of a model are what its table says, whatever the layout.
TEST(Holdings, AddUpToTheModel) {
  const Job job = QwenJob("af-pipe", "h800x128", 2, 8, 8);
  int64_t all = 0;
  for (const Block& b : HoldingsOf(job).blocks) all += b.params;
  EXPECT_EQ(all, job.model.TotalParams());
}

}  // namespace
}  // namespace disagmoe
