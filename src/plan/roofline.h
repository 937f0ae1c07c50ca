// Computation against network: what attention and FFN do for each byte that crosses the pools, what their GPUs and
// NICs allow, and what follows for the sizes of the two pools (system.md section 6).
//
// Balanced routing; pools on nodes of their own, so that every row crosses a NIC; each direction of a NIC is a resource
// of its own. Times are the simulator's (work.h: products and memory traffic at the efficiencies of the cluster), and
// leave out launches, latencies, metadata of rows, embedding and, unless said, the head. A dense layer sends one row a
// token, to its home.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cost/job.h"

namespace disagmoe {

struct RooflineRequest {
  ModelShape model;
  ClusterSpec attention, ffn;      // of each pool
  int64_t seq_length = 4096;
  Documents documents;  // that the sequences are packed with; other lengths are shown as one text
  int ffn_workers = 8;             // n: of a group
  Dedup dedup = Dedup::kWorker;
  double nics_a = 0, nics_f = 0;   // of a GPU of each pool; 0 = an equal share of its node's
  double tokens = 0;               // of a micro-batch, over a group; 0 = a sequence for each FFN worker
};

// One operation of one token, over all layers, on one GPU with one NIC.
struct RoofPoint {
  double flops = 0, bytes = 0;            // bytes: one way
  double compute_ns = 0, network_ns = 0;
  double intensity() const { return flops / bytes; }
  double tflops() const { return flops / compute_ns / 1e3; }  // of a GPU that never waits
  // FLOP a byte from which on a GPU with so many NICs never waits for them, and how far above that the operation is:
  // compute-bound above 1, network-bound below.
  double turning_point(double nics) const { return intensity() / over(nics); }
  double over(double nics) const { return compute_ns / network_ns * nics; }
  double attainable_tflops(double nics) const { return over(nics) < 1 ? tflops() * over(nics) : tflops(); }
  double nics_needed() const { return network_ns / compute_ns; }  // of a GPU, so that transfers take as long
  double ns(double nics) const { return over(nics) < 1 ? network_ns / nics : compute_ns; }
};

struct OperationRoof {
  std::string gpu;
  double peak_tflops = 0, nic_gbytes_s = 0;
  double m2n = 0;                    // of nic_gbytes_s
  double nics = 0;                   // of a GPU
  double nominal_turning_point = 0;  // of one NIC, at both peaks
  double layer_intensity = 0;        // FLOP a byte in the typical MoE layer, forward
  double printed = 0;                // the paper's formula (work.h)
  // Forward, and forward with both gradients (scores and values 3.5 times, products three times; twice the bytes).
  RoofPoint forward, step;
};

struct SequencePoint {
  int64_t seq_length = 0;
  double intensity = 0;          // of attention, forward
  double attainable_tflops = 0;  // at its NICs
};

// First length of a sequence from which on attention is compute-bound; none: at no length (up to 2^40).
struct Crossing {
  std::optional<int64_t> nominal, forward, step;  // nominal: forward at both peaks and one NIC
};

struct Roofline {
  std::string model;
  int64_t seq_length = 0;
  int ffn_workers = 0;
  Dedup dedup = Dedup::kWorker;
  int64_t typical_layer = 0;   // the first MoE layer without a window, else the first MoE layer
  double rows = 0;             // that a token sends over its NIC in an MoE layer
  double rows_per_expert = 0;  // in one grouped call
  OperationRoof attention, ffn;
  std::vector<SequencePoint> sequences;  // 4K to 32K and the chosen one, ascending
  Crossing crossing;

  // Of a step (forward and backward). GPUs of the attention pool for each of the FFN pool, so that both take as long:
  double ratio_compute = 0;            // computing alone
  double ratio_compute_with_head = 0;  // the same, the FFN pool has the head too
  double ratio_both = 0;               // computing or transferring, whichever takes longer at their NICs
  // At ratio_compute, NICs for each GPU of the two pools together: needed, so that no transfer takes longer than the
  // computation, and had. Pools of the same NICs need the same number of them in all.
  double nics_needed = 0, nics_had = 0;
  // A token through all layers with one GPU in all, as large as each pool's share; so many GPUs, so many times faster.
  double split_ns = 0;      // computation on the pools, at ratio_compute
  double colocated_ns = 0;  // computation, if every one of these GPUs did both
  double hidden_ns = 0;     // the slower of computing and transferring on the pools, at ratio_both
  double waiting_ns = 0;    // computing, then transferring, at the best split for that
};

// Throws Error for a model without experts, no tokens, and workers or NICs that cannot be.
Roofline MakeRoofline(const RooflineRequest& request);

// max(a / M, f / N): `attention_ns` and `ffn_ns` of one GPU over pools of M and N.
double SplitNs(double attention_ns, double ffn_ns, double attention_gpus, double ffn_gpus);

// What follows, in sentences; each one holds for these numbers.
std::vector<std::string> RooflineVerdict(const Roofline& r);
// The numbers as a table, and the verdict. Lines of up to 100 columns.
std::string RooflineText(const Roofline& r);
nlohmann::ordered_json RooflineJson(const Roofline& r);
// For a terminal: both axes logarithmic, lines of `columns` (72 to 200) characters of UTF-8.
std::string DrawRoofline(const Roofline& r, int columns);
std::string RooflineSvg(const Roofline& r);

}  // namespace disagmoe
