// What is to be simulated: a model, a cluster, and how training is laid out on it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cost/work.h"
#include "schedule/schedule.h"
#include "spec/cluster.h"
#include "spec/model_shape.h"

namespace disagmoe {

// Rows that a token sends to the experts: one for each of its experts, for each worker that holds one, or for each node
// (which spreads it over NVLink).
enum class Dedup : uint8_t { kExpert, kWorker, kNode };

struct Straggler {
  std::string worker;   // "A0.3", or a whole group "F1"
  double compute = 1;   // its computations take this much longer
  double nic = 1;       // its NIC transfers take this much longer
};

struct Job {
  ModelShape model;
  ClusterSpec cluster;
  std::optional<ClusterSpec> ffn_cluster;  // two pools: the FFN pool's own machines; `cluster` is the attention pool's
  std::string schedule = "af-pipe";

  int64_t seq_length = 4096;
  // Sequences are packed with documents that do not see each other; each slice of a micro-batch has its own, drawn by
  // seed (same_documents: all have the mean). Empty: a sequence is one text.
  Documents documents;
  bool same_documents = false;
  int64_t global_batch = 1024;  // sequences a step, on the whole cluster
  int sequences = 1;            // of an attention worker in a micro-batch, b

  // Layout of one pipeline; the rest of the cluster holds data-parallel replicas of it, but for those left unused.
  int p_a = 1, p_f = 1, m = 1, n = 1;  // colocated: p_a groups of m
  int idle_gpus = 0;                   // left unused; a GPU's tokens and MFU count them
  int idle_ffn_gpus = 0;               // of ffn_cluster
  int virtual_stages = 1;              // colocated
  bool head_on_attention = false;      // two pools
  int round = 0;                       // q; 0 = chosen
  int slope = 2;                       // e
  int parts = 0;                       // 0 = the schedule's choice
  bool delay_weights = true;           // megatron-overlap

  // Network.
  double nics_a = 0, nics_f = 0;       // NICs a worker of each pool (colocated: nics_a); 0 = an equal share
  bool mixed_nodes = false;            // both pools on the same nodes, else one after the other
  Dedup dedup = Dedup::kExpert;
  bool overlap_slowdown = true;        // computation is slower beside communication kernels

  // Memory.
  bool recompute = false;              // keep a layer's inputs and routing, recompute the rest
  bool shard_optimizer = true;         // optimizer state over all that hold a parameter
  double weight_bytes = 2, gradient_bytes = 4, state_bytes = 12;  // a parameter
  double reserved_gb = 6;              // of each GPU: context, communication library, fragmentation

  // Routing: popularity of the r-th expert is proportional to 1 / r^skew; or expert_loads, relative loads of a recorded
  // run (any scale). In another order in each layer.
  double routing_skew = 0;
  std::vector<std::vector<double>> expert_loads;
  // Experts of the first, second, ... worker of a group that holds them: one row for all layers, or one a layer (of a
  // dense layer: not read). 0 is allowed, a row adds up to num_experts. Empty: equal shares.
  std::vector<std::vector<int>> expert_counts;
  int shadow_experts = 0;              // fastermoe: hottest experts of a layer, copied to every worker
  double attention_expert_share = 0;   // hetermoe: share of the experts on attention workers

  std::vector<Straggler> stragglers;
  double jitter = 0;                   // relative standard deviation of each computation
  uint64_t seed = 1;

  Sequence sequence() const { return {seq_length, documents}; }
  bool colocated() const;
  int64_t workers() const { return int64_t{p_a} * m + (colocated() ? 0 : int64_t{p_f} * n); }  // of a replica
  int64_t gpus() const { return int64_t{cluster.gpus} + (ffn_cluster ? ffn_cluster->gpus : 0); }
  int replicas() const;
  // Of a group: in the order of a schedule's groups, attention first.
  bool is_ffn(int group) const { return !colocated() && group >= p_a; }
  const ClusterSpec& cluster_of(int group) const { return ffn_cluster && group >= p_a ? *ffn_cluster : cluster; }
  double peak_tflops() const;  // dense, mean of all GPUs
  int64_t micro_batches() const { return global_batch / (int64_t{replicas()} * m * sequences); }
  bool uneven() const { return routing_skew > 0 || !expert_loads.empty(); }
  // Computation of one group goes on while its own exchanges run.
  bool overlaps() const;
};

// Throws Error for an unknown schedule.
void CheckName(const Job& job);
// Throws Error where numbers cannot be: more workers than GPUs that are used, pools of other numbers of replicas, a
// batch that does not divide, more workers than experts, loads or counts of other experts or layers, more NICs than
// there are, a step too long or of too many operations to be simulated.
void CheckJob(const Job& job);

// Of it what no layout changes: throws Error for recorded loads of another model.
void CheckLoads(const Job& job);

// Settings by name, for --set; throws Error for an unknown one (with the nearest), a value that cannot be, and one that
// `job.schedule` ignores. Applied after the schedule is set.
void SetKnob(Job* job, const std::string& name, const std::string& value);
// Whether the schedule has such a setting.
bool KnobIsUsed(const Job& job, const std::string& name);
// The settings ("name=value") that SetKnob needs, in this order, to make `base`, of the same schedule, the same as `job`
// in all that its schedule uses.
std::vector<std::string> SettingsOf(const Job& job, const Job& base);
struct KnobHelp {
  std::string name, meaning;
};
std::vector<KnobHelp> Knobs();
// The dedup that the published system uses, and other settings that belong to a schedule.
void SetScheduleDefaults(Job* job);

PlacementSpec PlacementOf(const Job& job);
// Valid. transfer_ratio (of GenerateOptions) and the relative times follow from the job's costs, without its jitter,
// stragglers and uneven routing.
Schedule ScheduleOf(const Job& job);

// Node of each worker of a replica, by rank. An FFN pool on machines of its own: after those of the attention pool.
std::vector<int> NodesOf(const Job& job);

}  // namespace disagmoe
