// The sizing program (system.md section 6): which pools make the slowest of the four times of SizingTimes least. A
// mixed-integer program, solved with HiGHS; docs/decisions/0009-sizing-program.md has its columns and rows.
//
// Subject to: GPUs (the rest idle), n at most the experts, memory of the fullest worker of each pool with rounds of
// 2 max(p) micro-batches, which just fill the ring, and so many micro-batches a step at least. Where both pools share
// nodes, all NICs of a node are theirs: whole ones, one at least for each pool. (A single NIC is shared.)
//
// Ties, in this order, each within 1e-9: the second-slowest time; NICs nearest to one a worker (sum of both pools'
// distances); memory of the fuller pool over its limit; then the smaller numbers, in the order of Pools.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/evaluate.h"
#include "plan/sizing.h"

namespace disagmoe {

struct SizingProgram {
  const SizingModel* model = nullptr;  // must outlive the call
  int64_t gpus = 0;                    // of both pools; of attention's, where the FFN pool has a cluster of its own
  int64_t ffn_gpus = 0;                // of that one
  int64_t batch = 0;                   // sequences a step: replicas * m * b * 2 max(p) at most
  std::vector<int> group_counts_a{1}, group_counts_f{1};  // p_A, p_F: any pair; those above the layers are left out
  std::vector<int> sequences{1};       // b
  int most_n = 0;                      // 0: the experts
  int most_replicas = 0;               // 0: any
  bool may_recompute = true, may_move_head = true, may_mix = true;
  // What stays as in the model's job: p, p_a, p_f, m, n, b, recompute, head, mixed_nodes.
  Fixed fixed;
};

struct SizingAnswer {
  Pools pools;
  double ns = 0;                 // a sequence: times.worst()
  SizingTimes times;
  bool proven = false;           // nothing is faster; false where the time was up
  int64_t columns = 0, rows = 0; // of all programs that HiGHS got
  int programs = 0, nodes = 0;   // and the nodes of its searches
  double seconds = 0;
  // "attention", "FFN", "NICs of attention" or "NICs of FFN"; also ", memory of attention", ", memory of FFN" where a
  // worker's is full to 95 % at least.
  std::string binding;
};

// Nothing where nothing is allowed. Throws Error where HiGHS cannot be loaded: it is opened when first needed, since
// loading it takes 2 ms, as long as `disagmoe` takes to start. Built without HiGHS: the same answers by a pruned
// enumeration. `seconds` limits HiGHS only: bounds and ties before and after it take what they take.
std::optional<SizingAnswer> SolveSizing(const SizingProgram& program, double seconds);
bool SizingUsesHighs();
// All of them, one by one: small clusters and tests.
std::optional<SizingAnswer> EnumerateSizing(const SizingProgram& program);

}  // namespace disagmoe
