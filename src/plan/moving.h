// What it takes to change the layout between two steps: weights and optimizer state that a GPU lacks in the new layout
// come from GPUs that have them in the old one. Gradients are zero between steps and do not move.
//
// Exact by layer, expert and shard. Assumed:
//  - Both layouts use the same machines in the same order: replica by replica, in a replica by node (NodesOf), then by
//    rank; idle GPUs last. Pools on machines of their own: the attention pool's first. Nobody is renumbered to save
//    traffic.
//  - With shard_optimizer the state of each block (a layer's attention, an expert, ...) is cut into contiguous parts of
//    equal size, one for each GPU that holds the block, in their order. Else each of them has all of it.
//  - What a GPU lacks comes from holders on its node, evenly, over NVLink. A node without one fetches it once from all
//    holders, evenly, over the NICs of the GPUs that lack it, which then give it to each other over NVLink.
//  - All goes at once, a GPU has its share of its node's NICs; the time is that of the slowest direction of a GPU. No
//    latencies and no spine. What arrives lands where gradients were: memory for it is not counted.
//  - If anything moves, groups are built anew: restart_seconds. If nothing moves, a change costs nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/job.h"

namespace disagmoe {

// Parameters that are held together, and the GPUs that hold them, ascending.
struct Block {
  int64_t params = 0;
  std::vector<int> gpus;
};
// Blocks in the same order for every layout of a model: the embedding; of each layer attention, what all tokens pass
// (dense FFN, shared experts; empty where there is none), expert after expert; the head.
struct Holdings {
  std::vector<Block> blocks;
  // By GPU; bytes a second, each direction, of what real transfers reach.
  std::vector<int> node_of;
  std::vector<double> nic_rate, nvlink_rate;
};
// Of a job that CheckJob takes.
Holdings HoldingsOf(const Job& job);

struct MoveCost {
  // By GPU, bytes.
  std::vector<double> nic_in, nic_out, nvlink_in, nvlink_out;
  double bytes = 0;         // that arrive, on all GPUs and over both fabrics
  double nic_bytes = 0;     // of them over NICs
  double move_seconds = 0;
  double restart_seconds = 0;
  double seconds() const { return move_seconds + restart_seconds; }
};

// Building groups and their communicators anew, buffers, the first slow steps: a guess. Measure your own.
inline constexpr double kRestartSeconds = 10;

// Jobs of the same model and machines; sizes of parameters and the sharding are those of each.
MoveCost CostOfMoving(const Job& from, const Job& to, double restart_seconds = kRestartSeconds);
// The same for holdings that are known; where many layouts are compared.
MoveCost CostOfMoving(const Job& from, const Holdings& held, const Job& to, const Holdings& wanted,
                      double restart_seconds = kRestartSeconds);

}  // namespace disagmoe
