// Jobs of tests, with their costs: a small model on a cluster of round figures, and published models on h800.
#pragma once

#include <string>
#include <utility>

#include "cost/cluster_costs.h"
#include "cost/job.h"
#include "schedule/ready.h"

namespace disagmoe {

// 4 layers (the first is dense, with `dense_first`), 16 experts of 64, 2 a token; hidden 128, 4 heads of 32, 2 of keys.
inline ModelShape SmallModel(bool dense_first = false) {
  ModelShape m;
  m.name = "small";
  m.vocab_size = 1000;
  m.hidden_size = 128;
  m.num_layers = 4;
  m.num_heads = 4;
  m.num_kv_heads = 2;
  m.head_dim = m.value_dim = 32;
  m.window.assign(4, 0);
  m.num_experts = 16;
  m.experts_per_token = 2;
  m.expert_hidden = 64;
  m.dense.assign(4, false);
  m.dense[0] = dense_first;
  m.dense_hidden = 512;
  return m;
}

// Nodes of four GPUs and NICs.
inline ClusterSpec SmallCluster(int gpus) {
  ClusterSpec c;
  c.name = "small";
  c.gpus = gpus;
  c.gpus_per_node = c.nics_per_node = 4;
  c.gpu = {"gpu", 1, 100, 1000};
  c.nvlink_gbytes_s = 8;
  c.nic_gbytes_s = 2;
  c.nic_latency_us = 3;
  c.nvlink_latency_us = 1;
  c.efficiency = {.attention_forward = 0.8, .attention_backward = 0.7, .gemm = 0.75, .grouped_gemm = 0.6,
                  .grouped_gemm_half_rows = 10, .memory = 0.8, .all_to_all = 0.5, .m2n = 0.8, .point_to_point = 0.9,
                  .nvlink = 0.9, .collective = 0.85, .op_overhead_us = 5, .message_overhead_us = 2,
                  .overlap_slowdown = 0.1, .source = ""};
  return c;
}

inline Job MakeJob(const std::string& schedule, const ModelShape& model, const ClusterSpec& cluster) {
  Job job;
  job.model = model;
  job.cluster = cluster;
  job.schedule = schedule;
  SetScheduleDefaults(&job);
  return job;
}

inline Job SmallJob(const std::string& schedule, int p, int m, int n = 0) {
  Job job = MakeJob(schedule, SmallModel(), SmallCluster(p * (m + n)));
  job.p_a = job.p_f = p;
  job.m = m;
  job.n = n == 0 ? 1 : n;
  job.seq_length = 64;
  job.global_batch = 8 * m;
  return job;
}

// Qwen3-235B, p groups of m and n, micro-batches of a 4096-token sequence for each attention worker.
inline Job QwenJob(const std::string& schedule, const std::string& cluster, int p, int m, int n = 0) {
  Job job = MakeJob(schedule, LoadModelShape("qwen3-235b-a22b"), LoadCluster(cluster));
  job.p_a = job.p_f = p;
  job.m = m;
  job.n = n == 0 ? 1 : n;
  job.global_batch = int64_t{16} * job.replicas() * m;
  return job;
}

inline constexpr OpKind kF = OpKind::kForward, kB = OpKind::kBackward, kW = OpKind::kWeight;
inline constexpr OpKind kSendF = OpKind::kSendForward, kSendB = OpKind::kSendBackward;

// A job with its schedule and costs.
struct Costed {
  Job job;
  Schedule schedule;
  ClusterCosts costs;
  explicit Costed(const Job& j) : job(j), schedule(ScheduleOf(job)), costs(job, schedule) { CheckJob(job); }
  Costed(const Job& j, const Schedule& s) : job(j), schedule(s), costs(job, schedule) {}
  // The classes of a group, [first, last).
  std::pair<int, int> ClassesOf(int group) const {
    int first = 0;
    while (costs.classes()[first].group != group) ++first;
    int last = first;
    while (last < static_cast<int>(costs.classes().size()) && costs.classes()[last].group == group) ++last;
    return {first, last};
  }
  int ClassOf(const Op& op) const { return ClassesOf(GroupOf(schedule, op)).first; }
  int64_t Ns(OpKind kind, int stage, int part = 0) const {
    const Op op{kind, stage, 0, part};
    return costs.ComputeNs(op, ClassOf(op));
  }
  TransferCost Send(OpKind kind, int boundary, bool sending = true, int part = 0) const {
    const Op op{kind, boundary, 0, part};
    return costs.Transfer(op, ClassesOf(sending ? SenderOf(schedule, op) : ReceiverOf(schedule, op)).first, sending);
  }
};

}  // namespace disagmoe
