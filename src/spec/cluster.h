// Machines: GPUs, nodes, network, and how much of each number real kernels reach. TOML files; presets are built in
// (presets/clusters).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec/model_shape.h"

namespace disagmoe {

struct GpuSpec {
  std::string name;
  double peak_tflops = 0;      // dense, bf16
  double memory_gb = 0;        // 1e9 bytes
  double memory_gbytes_s = 0;  // HBM bandwidth
};

// What share of a peak an operation class reaches, with the source of the figure. Of GPUs: measured on kernels of
// libraries in use; a run can bring its own (`disagmoe profile`).
struct EfficiencySpec {
  double attention_forward = 0;   // flash attention's own FLOPs
  double attention_backward = 0;
  double gemm = 0;                // projections, head, dense and shared FFN
  // Grouped GEMM of the experts: grouped_gemm * rows / (rows + grouped_gemm_half_rows), rows per expert and call.
  double grouped_gemm = 0;
  double grouped_gemm_half_rows = 0;
  double memory = 0;              // of HBM bandwidth: norms, routing, permutation, optimizer
  double all_to_all = 0;          // of NIC bandwidth, all-to-all inside a colocated group
  double m2n = 0;                 // of NIC bandwidth, between two pools
  double point_to_point = 0;      // of NIC bandwidth, pipeline sends
  double nvlink = 0;              // of nvlink_gbytes_s
  double collective = 0;          // of NIC bandwidth, gradient sums
  double op_overhead_us = 0;      // kernel launches and gaps: of an attention stage's forward; an FFN's is the same, a
                                  // backward's double
  double message_overhead_us = 0; // of an all-to-all or M2N call, holds the sender's NIC
  // Computation is slower by this share while communication kernels run beside it (their SMs, HBM traffic).
  double overlap_slowdown = 0;
  std::string source;             // of all of them
};

struct ClusterSpec {
  std::string name;            // "h800x128"
  std::string source;
  int gpus = 0;
  int gpus_per_node = 8;
  GpuSpec gpu;
  double nvlink_gbytes_s = 0;  // per GPU and direction
  int nics_per_node = 8;
  double nic_gbytes_s = 0;     // per NIC and direction
  double nic_latency_us = 0;
  double nvlink_latency_us = 0;
  // "rail": NIC i of every node is on leaf switch i; other rails are reached over the spine. "flat": one switch.
  std::string topology = "rail";
  double spine_oversubscription = 1;  // 2 = the spine carries half of what the leaves could send
  EfficiencySpec efficiency;
};

// "h800x128": preset and number of GPUs (part of a node, or whole nodes); or a .toml file (with `gpus`). Throws Error
// with the presets that exist; of a file, with the line.
ClusterSpec LoadCluster(const std::string& name_or_path);
// One, or two joined by "+" ("h800x64+h100x64"): a pool each, attention and FFN. A file whose name has a "+" is one.
std::vector<ClusterSpec> LoadClusters(const std::string& names_or_paths);
// The text of such a file; `where` is its name in messages. `gpus` 0: the text must say it.
ClusterSpec ReadCluster(const std::string& toml, const std::string& where, int gpus = 0);
std::vector<Preset> ClusterPresets();
std::string PrintCluster(const ClusterSpec& cluster);  // TOML that LoadCluster reads back

}  // namespace disagmoe
