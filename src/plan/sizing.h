// The sizing program of system.md section 6: two pools, each as fast as its computation and its NICs allow. It decides
// what is worth simulating; nothing in it queues, waits or fills.
//
// All times are nanoseconds of the whole cluster a sequence of the batch. A pool is as slow as its fullest group: of
// p groups the layers g, g + p, ...; of n workers the one with most experts. Time of
//   attention  (attention + copies * rows) of its layers, over replicas * m
//   FFN        experts and rows that the fullest worker gets, over replicas; and, a micro-batch, what loading the
//              experts' weights costs (grouped products of few rows)
//   NICs       rows that leave the node, each direction, over the NICs of a pool
#pragma once

#include <cstdint>
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
// warm-up of slope e (schedule.md section 2); of unequal pools as if both had the larger number of groups.
double HeldActivations(int layers, int p_a, int p_f, int round, int slope, bool ffn);

class SizingModel {
 public:
  // Model, hardware, sequence length, dedup and memory settings of `base`; its layout is not looked at. Routing is
  // taken as balanced, nobody as slow. Throws Error for a model without experts.
  explicit SizingModel(const Job& base);

  SizingTimes Times(const Pools& pools) const;
  // Of the fullest worker of each pool: state, and `held` activations of micro-batches in each of its layers' stages.
  double AttentionBytes(const Pools& pools, double held) const;
  double FfnBytes(const Pools& pools, double held) const;
  double attention_limit() const { return limit_a_; }
  double ffn_limit() const { return limit_f_; }

  // The parts of the times, for those who put them together (the program solved by HiGHS).
  double AttentionNs(const Pools& pools) const;        // without copies; over replicas * m
  double CopiesNs(const Pools& pools) const;           // of one row a token
  double ExpertsNs(int p_f, int n, bool recompute) const;  // of one replica, a sequence; without head
  double LoadNs(int p_f, int n, bool recompute) const;     // a micro-batch
  double HeadNs() const { return head_ns_; }           // on one worker
  double Rows(int n) const { return rows_[n]; }        // that a token sends: workers it visits, experts, or nodes
  // Shares of the rows that leave the node, means over layers: of the attention worker, of the FFN worker.
  struct Far {
    double attention = 1, ffn = 1;
  };
  Far FarOf(const Pools& pools) const;
  double RowNs(bool ffn) const { return ffn ? row_ns_f_ : row_ns_a_; }  // of one row over one NIC

 private:
  struct Side {  // of one layer: all passes of one token
    double plain = 0, recompute = 0;
  };
  double GroupSum(const std::vector<Side>& layers, int p, bool recompute) const;

  Job base_;
  int64_t tokens_;  // of a sequence
  std::vector<Side> attention_, common_;
  std::vector<double> attention_params_, common_params_, attention_kept_, attention_kept_recompute_;
  std::vector<bool> routed_;
  Side copy_, pair_, load_, row_;
  double launch_a_ = 0, launch_f_ = 0;  // all passes of a stage
  double head_ns_ = 0;
  std::vector<double> rows_, share_;    // by n: of a token; of the fullest worker, of all experts
  double row_ns_a_ = 0, row_ns_f_ = 0;
  double limit_a_ = 0, limit_f_ = 0;
};

}  // namespace disagmoe
