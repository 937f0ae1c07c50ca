// The sizing program of system.md section 6: two pools, each as fast as its computation and its NICs allow. It decides
// what is worth simulating; nothing in it queues, waits or fills.
//
// All times are nanoseconds of the whole cluster a sequence of the batch. A pool is as slow as its fullest group: of
// p groups the layers g, g + p, ...; of n workers the one with most experts. Time of
//   attention  attention and the copies of rows of its layers, and its head, over replicas * m
//   FFN        experts, shared experts, dense layers, head of the fullest worker, over replicas; and, a micro-batch,
//              launches and what loading the experts' weights costs (grouped products of few rows)
//   NICs       rows of a worker, each direction: those that leave the node over its NICs, the others over NVLink
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "cost/job.h"

namespace disagmoe {

// What is decided. NICs are whole ones, by node; they matter where both pools share nodes, else each has its own.
struct Pools {
  int replicas = 1;
  int p_a = 1, m = 1, p_f = 1, n = 1;
  int sequences = 1;  // b
  bool recompute = false, head_on_attention = false, mixed = false;
  int node_nics_a = 0, node_nics_f = 0;

  int64_t attention_gpus() const { return int64_t{replicas} * p_a * m; }
  int64_t ffn_gpus() const { return int64_t{replicas} * p_f * n; }
  int64_t gpus() const { return attention_gpus() + ffn_gpus(); }
  friend bool operator==(const Pools&, const Pools&) = default;
};

struct SizingTimes {
  double attention = 0, ffn = 0, nic_a = 0, nic_f = 0;
  double worst() const;
  double second() const;  // the second-slowest: ties are broken by it (system.md section 6)
};

// Activations (of one layer and micro-batch) that the first worker of a pool holds with rounds of q micro-batches and a
// warm-up of slope e (schedule.md section 2). Of unequal pools, where a group of the fewer has several places of the
// ring, within a tenth of what list scheduling holds.
double HeldActivations(int layers, int p_a, int p_f, int round, int slope, bool ffn);

// Unchanging: threads may share one.
class SizingModel {
 public:
  // Model, hardware, sequence length, dedup, given NICs and memory settings of `base`; its layout is not looked at.
  // Routing is taken as balanced, nobody as slow. Throws Error for a model without experts.
  explicit SizingModel(const Job& base);

  // Group counts from 1 to the layers, n from 1 to the experts; anything else positive.
  SizingTimes Times(const Pools& pools) const;
  // Of the fullest worker of each pool: state, and `held` activations of micro-batches in each of its layers' stages.
  double AttentionBytes(const Pools& pools, double held) const;
  double FfnBytes(const Pools& pools, double held) const;
  double attention_limit() const { return attention_cluster().gpu.memory_gb * 1e9; }
  double ffn_limit() const { return ffn_cluster().gpu.memory_gb * 1e9; }

  // The parts of the times, for those who put them together (sizing_program.h): a time is the largest of its lines.
  struct Line {
    double constant = 0, slope = 0;
    double at(double x) const { return constant + slope * x; }
  };
  using Lines = std::vector<Line>;
  Lines AttentionLines(const Pools& pools) const;  // over Rows(n), whatever pools.n is
  Lines FfnLines(const Pools& pools) const;        // over 1 / (m b), whatever m and b are
  // Of the NICs or NVLink of an attention worker, over Rows(n), where so many ns pass for a byte; of an FFN worker.
  Lines AttentionNicLines(const Pools& pools, double byte_ns) const;
  double FfnNicNs(const Pools& pools, double byte_ns) const;
  double AttentionNs(const Pools& pools) const;    // without copies
  double ExpertsNs(int p_f, int n, bool recompute) const;  // of one replica, without head, launches, loads
  double Rows(int n) const { return rows_[n]; }    // that a token sends: workers it visits, experts, or nodes
  double RowNs(bool ffn) const;                    // of one row over one NIC
  struct Each {  // a worker of either pool
    double attention = 0, ffn = 0;
  };
  // Nanoseconds of a byte that a worker sends to the other pool.
  Each ByteNsOf(const Pools& pools) const { return ByteNsOf(pools, NodesOf(pools)); }
  // As if its replicas were on so many shared nodes: attention's then does not look at n, nor the FFN's at m.
  Each ByteNsOf(const Pools& pools, int64_t nodes) const;
  // NICs of a worker.
  Each NicsOf(const Pools& pools, int64_t nodes) const;
  // Shares of a worker's rows that leave its node, means over layers; of each exchange the worker counts that has most
  // (as ClusterCosts takes it). Mixed: both pools evenly over `nodes` full ones.
  Each MixedFar(int p_a, int p_f, int64_t nodes) const;
  int64_t NodesOf(const Pools& pools) const;       // of a replica on shared nodes

  const Job& base() const { return base_; }
  const ClusterSpec& attention_cluster() const { return base_.cluster; }
  const ClusterSpec& ffn_cluster() const { return base_.ffn_cluster ? *base_.ffn_cluster : base_.cluster; }
  bool own_clusters() const { return base_.ffn_cluster.has_value(); }  // then no node is shared

 private:
  struct Passes {  // all of one token
    double plain = 0, again = 0;  // without and with recomputation
    double of(bool recompute) const { return recompute ? again : plain; }
  };
  // What a group does; only those groups that may be the slowest.
  struct AttentionGroup {
    Passes work;
    int layers = 0;
    int routed = 0, dense = 0;  // layers that send copies
    int sends_routed = 0, sends_dense = 0, ids = 0;  // exchanges a direction; those with experts' ids and gates
    bool head = false;
  };
  struct FfnGroup {
    int routed = 0, dense = 0;
    bool head = false;
  };
  Each FindMixedFar(int p_a, int p_f, int64_t nodes) const;
  Line AttentionLine(const AttentionGroup& g, const Pools& pools) const;
  Line FfnLine(const FfnGroup& g, const Pools& pools) const;
  double NicBytes(const AttentionGroup& g, double rows) const;
  void FillAttention();
  void FillFfn();
  void FillGroups();
  void FillRows();

  struct Seen;  // shares that were asked for before
  Job base_;
  double tokens_;  // of a sequence
  int layers_;
  std::vector<Passes> attention_;         // by layer
  Passes copy_, pair_, load_, row_, shared_, dense_;
  double head_a_ = 0, head_f_ = 0;        // a token's
  double launch_a_ = 0, launch_f_ = 0;    // one pass
  std::vector<std::array<std::vector<AttentionGroup>, 2>> attention_groups_;  // by p_a, head
  std::vector<std::array<std::vector<FfnGroup>, 2>> ffn_groups_;
  std::vector<std::array<double, 2>> attention_params_;                       // of the largest group
  double shared_params_ = 0, dense_params_ = 0;                               // of a layer
  std::vector<double> rows_, visits_, share_;  // by n: of a token; of the fullest worker, of all experts
  std::array<double, 2> attention_kept_{}, row_kept_{}, pair_kept_{}, common_kept_{};  // bytes; with recomputation
  std::shared_ptr<Seen> seen_;
};

}  // namespace disagmoe
