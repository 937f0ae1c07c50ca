#include "cost/job.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "base/error.h"
#include "cost/cluster_costs.h"
#include "cost/work.h"

namespace disagmoe {
namespace {

[[noreturn]] void Refuse(const std::string& what, const std::string& where, const std::string& got,
                         const std::string& expected, const std::string& hint = "") {
  throw Error({what, where, got, expected, hint});
}

}  // namespace

bool Job::colocated() const {
  for (const ScheduleName& name : ScheduleNames()) {
    if (name.name == schedule) return name.colocated;
  }
  return false;
}

int Job::replicas() const {
  return static_cast<int>((cluster.gpus - idle_gpus) / (ffn_cluster ? int64_t{p_a} * m : workers()));
}

double Job::peak_tflops() const {
  if (!ffn_cluster) return cluster.gpu.peak_tflops;
  return (cluster.gpu.peak_tflops * cluster.gpus + ffn_cluster->gpu.peak_tflops * ffn_cluster->gpus) /
         static_cast<double>(gpus());
}

bool Job::overlaps() const { return schedule != "megatron-1f1b"; }

void CheckName(const Job& job) {
  std::string names;
  for (const ScheduleName& n : ScheduleNames()) {
    if (n.name == job.schedule) return;
    names += (names.empty() ? "" : ", ") + n.name;
  }
  Refuse("unknown schedule", "--schedule", "\"" + job.schedule + "\"", names);
}

namespace {

bool Routed(const ModelShape& m, size_t layer) { return m.num_experts > 0 && !m.dense[layer]; }

// One row for all layers, or one for each.
void CheckRows(const Job& job, const std::string& where, size_t rows) {
  const int64_t layers = job.model.num_layers;
  if (rows == 1 || static_cast<int64_t>(rows) == layers) return;
  Refuse(where + " of other layers than the model's", where, std::to_string(rows) + " rows",
         std::to_string(layers) + ", one a layer, or one for all");
}

}  // namespace

void CheckLoads(const Job& job) {
  if (job.expert_loads.empty()) return;
  CheckRows(job, "expert loads", job.expert_loads.size());
  for (size_t l = 0; l < job.expert_loads.size(); ++l) {
    const bool for_all = job.expert_loads.size() == 1;
    if (!for_all && !Routed(job.model, l)) continue;
    const std::vector<double>& loads = job.expert_loads[l];
    const std::string where = "expert loads" + (for_all ? "" : ", layer " + std::to_string(l));
    if (static_cast<int64_t>(loads.size()) != job.model.num_experts) {
      Refuse("wrong number of expert loads", where, std::to_string(loads.size()),
             std::to_string(job.model.num_experts));
    }
    int64_t used = 0;
    for (double x : loads) {
      if (!(x >= 0) || x > 1e300) Refuse("value out of range", where, std::to_string(x), "at least 0");
      used += x > 0;
    }
    if (used < job.model.experts_per_token) {
      Refuse("fewer experts with a load than a token has", where, std::to_string(used),
             "at least " + std::to_string(job.model.experts_per_token));
    }
  }
  if (job.routing_skew > 0) {
    Refuse("two ways to route", "routing_skew", "a skew and recorded loads", "one of them");
  }
}

namespace {

void CheckCounts(const Job& job, int workers) {
  if (job.expert_counts.empty()) return;
  CheckRows(job, "expert counts", job.expert_counts.size());
  if (job.attention_expert_share > 0) {
    Refuse("experts of both pools are not counted", "expert counts",
           "attention_expert_share " + std::to_string(job.attention_expert_share), "0");
  }
  for (size_t l = 0; l < job.expert_counts.size(); ++l) {
    const bool for_all = job.expert_counts.size() == 1;
    if (!for_all && !Routed(job.model, l)) continue;
    const std::vector<int>& row = job.expert_counts[l];
    const std::string where = "expert counts" + (for_all ? "" : ", layer " + std::to_string(l));
    if (row.size() != static_cast<size_t>(workers)) {
      Refuse("wrong number of expert counts", where, std::to_string(row.size()),
             std::to_string(workers) + ", one for each worker of a group");
    }
    int64_t sum = 0;
    for (int n : row) {
      if (n < 0) Refuse("value out of range", where, std::to_string(n), "at least 0");
      sum += n;
    }
    if (sum != job.model.num_experts) {
      Refuse("expert counts that do not add up", where, std::to_string(sum), std::to_string(job.model.num_experts));
    }
  }
}

// All workers' NICs are those of the cluster; which of them are on whose node is not looked at.
void CheckNics(const Job& job, const ClusterSpec& c, bool attention, bool ffn) {
  const double equal = static_cast<double>(c.nics_per_node) / c.gpus_per_node;
  const double a = job.nics_a > 0 ? job.nics_a : equal;
  const double f = job.nics_f > 0 ? job.nics_f : equal;
  const double used = job.replicas() * ((attention ? a * job.p_a * job.m : 0) + (ffn ? f * job.p_f * job.n : 0));
  const double there = equal * c.gpus;
  char got[120], most[40];
  if (used > there * (1 + 1e-9)) {
    std::snprintf(got, sizeof got, "%g", used);
    std::snprintf(most, sizeof most, "at most the cluster's %g", there);
    const std::string both = attention && ffn ? "nics_a, nics_f" : ffn ? "nics_f" : "nics_a";
    Refuse("more NICs than there are", job.colocated() ? "nics" : both, got, most);
  }
  if (c.topology != "rail" && c.spine_oversubscription != 1) {
    std::snprintf(got, sizeof got, "%g", c.spine_oversubscription);
    Refuse("one switch has no spine", "spine_oversubscription of " + c.name, got, "1, or topology rail");
  }
}

void CheckDocuments(const Job& job) {
  double all = 0;
  for (const auto& [length, share] : job.documents) {
    if (length < 1) Refuse("value out of range", "documents", std::to_string(length), "at least 1 token");
    if (!(share >= 0) || share > 1e300) Refuse("value out of range", "documents", std::to_string(share), "a share");
    all += share;
  }
  if (!job.documents.empty() && !(all > 0)) Refuse("shares that share nothing out", "documents", "0", "a sum above 0");
}

// A step of weeks at the peak would not fit nanoseconds with shares of it; the operations must fit memory.
void CheckSize(const Job& job) {
  constexpr double kMostSeconds = 1e6;
  constexpr int64_t kMostForwards = 10'000'000;
  char got[120];
  const double tokens = static_cast<double>(job.global_batch) * static_cast<double>(job.seq_length);
  const double seconds = tokens * TrainFlopsPerToken(job.model, job.sequence()) /
                         (job.peak_tflops() * 1e12 * static_cast<double>(job.gpus()));
  if (seconds > kMostSeconds) {
    std::snprintf(got, sizeof got, "%g s at the peak of all GPUs", seconds);
    Refuse("a step that takes too long", "batch, --seq", got, "at most 1e+06 s", "");
  }
  const int64_t forwards = job.micro_batches() * (2 * job.model.num_layers + 1) * std::max(1, job.parts);
  if (forwards > kMostForwards) {
    Refuse("too many operations to simulate", "batch, b", std::to_string(job.micro_batches()) + " micro-batches",
           "at most " + std::to_string(kMostForwards / (2 * job.model.num_layers + 1) / std::max(1, job.parts)),
           "a smaller batch says the same");
  }
}

// `workers` of a replica, of which each GPU of the cluster that is used has one.
void CheckGpus(const Job& job, const ClusterSpec& cluster, int idle, const char* idle_name, const std::string& layout,
               int64_t workers) {
  if (idle < 0 || idle >= cluster.gpus) {
    Refuse("value out of range", idle_name, std::to_string(idle),
           "0 or more, less than the cluster's " + std::to_string(cluster.gpus));
  }
  const int used = cluster.gpus - idle;
  if (used % workers == 0) return;
  const std::string all = "the cluster's " + std::to_string(cluster.gpus);
  const std::string left = std::to_string(used) + ", " + all + " less " + std::to_string(idle) + " idle";
  Refuse("a pipeline's workers do not divide the GPUs", "layout of " + job.schedule,
         layout + " = " + std::to_string(workers), "a divisor of " + (idle > 0 ? left : all),
         "the rest of the cluster holds replicas of it");
}

void CheckClusters(const Job& job) {
  if (!job.ffn_cluster) {
    CheckGpus(job, job.cluster, job.idle_gpus, "idle", job.colocated() ? "p * ep" : "p_a * m + p_f * n", job.workers());
    if (job.idle_ffn_gpus != 0) {
      Refuse("a setting that is not used", "idle_ffn", std::to_string(job.idle_ffn_gpus), "0: one cluster");
    }
    return CheckNics(job, job.cluster, true, !job.colocated());
  }
  if (job.colocated()) {
    Refuse("a schedule without pools on two clusters", job.schedule, job.cluster.name + "+" + job.ffn_cluster->name,
           "one cluster", "af-pipe, af-pipe-zb and hetermoe have an attention and an FFN pool");
  }
  if (job.mixed_nodes) Refuse("pools that share nodes", "mixed_nodes", "pools on clusters of their own", "false");
  const int64_t a = int64_t{job.p_a} * job.m, f = int64_t{job.p_f} * job.n;
  CheckGpus(job, job.cluster, job.idle_gpus, "idle", "p_a * m", a);
  CheckGpus(job, *job.ffn_cluster, job.idle_ffn_gpus, "idle_ffn", "p_f * n", f);
  const int64_t replicas = (job.ffn_cluster->gpus - job.idle_ffn_gpus) / f;
  if (replicas != job.replicas()) {
    Refuse("pools of different numbers of replicas",
           "p_a * m = " + std::to_string(a) + ", p_f * n = " + std::to_string(f),
           std::to_string(job.replicas()) + " of attention, " + std::to_string(replicas) + " of FFN",
           "as many of both");
  }
  CheckNics(job, job.cluster, true, false);
  CheckNics(job, *job.ffn_cluster, false, true);
}

}  // namespace

void CheckJob(const Job& job) {
  CheckName(job);
  CheckClusters(job);
  const int64_t wave = int64_t{job.replicas()} * job.m * job.sequences;
  if (job.global_batch % wave != 0) {
    Refuse("the batch does not divide into micro-batches", "batch", std::to_string(job.global_batch),
           "a multiple of " + std::to_string(wave) + " = replicas " + std::to_string(job.replicas()) +
               " * attention workers " + std::to_string(job.m) + " * sequences " + std::to_string(job.sequences));
  }
  const int holders = job.colocated() ? job.m : job.n;
  if (job.model.num_experts > 0 && holders > job.model.num_experts && job.expert_counts.empty()) {
    Refuse("more workers than experts", job.colocated() ? "ep" : "n", std::to_string(holders),
           "at most " + std::to_string(job.model.num_experts));
  }
  const int parts = job.parts > 0 ? job.parts : 2;
  if (job.schedule == "lancet" && job.sequences % parts != 0) {
    Refuse("lancet cuts a worker's micro-batch by sequences", "b", std::to_string(job.sequences),
           "a multiple of its parts, " + std::to_string(parts));
  }
  if (job.shadow_experts > job.model.num_experts) {
    Refuse("more shadowed experts than there are", "shadow_experts", std::to_string(job.shadow_experts),
           "at most " + std::to_string(job.model.num_experts));
  }
  CheckLoads(job);
  CheckCounts(job, holders);
  if (job.seq_length < 1) Refuse("value out of range", "--seq", std::to_string(job.seq_length), "at least 1");
  CheckDocuments(job);
  CheckSize(job);
}

void SetScheduleDefaults(Job* job) {
  // AF-Pipe packs one row a worker (system.md section 4). DeepSeek's library, with which DualPipe runs, one a node. The
  // others one for each expert, as Megatron-Core's all-to-all dispatcher.
  const std::string& s = job->schedule;
  const bool dualpipe = s == "dualpipe" || s == "dualpipe-v";
  job->dedup = !job->colocated() ? Dedup::kWorker : dualpipe ? Dedup::kNode : Dedup::kExpert;
  if (s == "hetermoe") job->parts = 1;
}

PlacementSpec PlacementOf(const Job& job) {
  PlacementSpec p;
  p.num_layers = static_cast<int>(job.model.num_layers);
  p.p_a = job.p_a;
  p.m = job.m;
  p.colocated = job.colocated();
  if (!p.colocated) p.p_f = job.p_f, p.n = job.n;
  p.head_on_attention = !p.colocated && job.head_on_attention;
  if (p.colocated && job.schedule != "dualpipe" && job.schedule != "dualpipe-v") p.virtual_stages = job.virtual_stages;
  return p;
}

std::vector<int> NodesOf(const Job& job) {
  const auto workers = static_cast<int>(job.workers());
  std::vector<int> place(workers);
  std::iota(place.begin(), place.end(), 0);
  if (!job.colocated() && job.mixed_nodes) {
    // Both pools evenly along the line of GPUs: worker i of A at (i + 1/2) / |A|, of F likewise; A first where equal.
    const int a = job.p_a * job.m;
    const int f = workers - a;
    std::vector<int> order(workers);
    std::iota(order.begin(), order.end(), 0);
    const auto at = [&](int r) { return r < a ? int64_t{2 * r + 1} * f : int64_t{2 * (r - a) + 1} * a; };
    std::stable_sort(order.begin(), order.end(), [&](int x, int y) { return at(x) < at(y); });
    for (int i = 0; i < workers; ++i) place[order[i]] = i;
  }
  const int a = job.ffn_cluster ? job.p_a * job.m : workers;
  for (int r = 0; r < a; ++r) place[r] /= job.cluster.gpus_per_node;
  for (int r = a; r < workers; ++r) place[r] = place[a - 1] + 1 + (r - a) / job.ffn_cluster->gpus_per_node;
  return place;
}

Schedule ScheduleOf(const Job& job) {
  const PlacementSpec placement = PlacementOf(job);
  GenerateOptions options;
  options.parts = job.schedule == "hetermoe" && job.attention_expert_share > 0 ? 2 : job.parts;
  options.slope = job.slope;
  options.delay_weights = job.delay_weights;
  if (!job.colocated()) {
    // Times of a layer in the middle decide the round, and what list scheduling goes by: planned for balanced routing
    // and workers that are all alike.
    Job calm = job;
    calm.jitter = calm.routing_skew = 0;
    calm.same_documents = true;
    calm.expert_loads.clear();
    calm.expert_counts.clear();
    calm.stragglers.clear();
    const Schedule sketch = Generate(job.schedule, placement, options);
    const ClusterCosts costs(calm, sketch);
    const int layer = static_cast<int>(job.model.num_layers) / 2;
    const auto first = [&](int stage) {
      int c = 0;
      while (costs.classes()[c].group != sketch.group(stage, 0)) ++c;
      return c;
    };
    const int a = first(2 * layer);
    const int f = first(2 * layer + 1);
    const auto attention = static_cast<double>(costs.ComputeNs({OpKind::kForward, 2 * layer, 0}, a));
    const auto ffn = static_cast<double>(costs.ComputeNs({OpKind::kForward, 2 * layer + 1, 0}, f));
    double transfer = 0;
    for (const bool sending : {true, false}) {
      const TransferCost cost = costs.Transfer({OpKind::kSendForward, 2 * layer, 0}, sending ? a : f, sending);
      transfer = std::max(transfer, static_cast<double>(std::max(cost.nic_ns, cost.nvlink_ns) + cost.latency_ns));
    }
    const double longest = std::max({attention, ffn, 1.0});
    options.transfer_ratio = transfer / longest;
    options.attention_time = attention / longest;
    options.ffn_time = ffn / longest;
  }
  options.num_micro_batches = static_cast<int>(job.micro_batches());
  options.round = job.round;
  return Generate(job.schedule, placement, options);
}

}  // namespace disagmoe
