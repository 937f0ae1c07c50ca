// Sums and gathers over a set of ranks, built on the transport's point-to-point messages.
//
// Direct: every rank sends each other rank its part at once (one hop, each byte crosses once and the sum is taken in
// rank order, so it is deterministic). A ring would send the same bytes in more hops; sets here are the workers of a group
// or of two, tens at most.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "layers/optimizer.h"
#include "runtime/waits.h"
#include "transport/transport.h"

namespace disagmoe {

// A step number of passes, a bucket id and a phase make the keys unique.
struct CollectiveKey {
  uint32_t pass = 0;
  int32_t bucket = 0;
};

// Part i of a flat range that `ranks` share, cut at multiples of 16 floats.
Range PartOf(const Range& range, size_t parts, size_t i);

class Collectives {
 public:
  Collectives(Transport* transport, int rank, Waits& waits) : transport_(transport), rank_(rank), waits_(waits) {}

  // A flat fp32 range held by `ranks` (ascending, this rank among them).
  struct Bucket {
    Range range;
    std::vector<int> ranks;
    int32_t id = 0;  // the same number at all its ranks
  };
  // Sums of flat over the ranks of each bucket; each rank gets its part (PartOf).
  void ReduceScatter(const at::Tensor& flat, const std::vector<Bucket>& buckets, uint32_t pass);
  // Everybody gets everybody's part.
  void AllGather(const at::Tensor& flat, const std::vector<Bucket>& buckets, uint32_t pass);
  // Values of all ranks at rank 0, in rank order; others get nothing.
  std::vector<std::vector<double>> Gather(const std::vector<double>& mine, int world, uint32_t pass, int32_t id);
  // Rank 0's values at all ranks.
  std::vector<double> Broadcast(const std::vector<double>& values, int world, uint32_t pass, int32_t id);

 private:
  RequestPtr Send(int peer, uint32_t pass, int32_t id, int32_t phase, const void* data, size_t bytes, MessageKind kind);
  Transport* transport_;
  int rank_;
  Waits& waits_;
};

}  // namespace disagmoe
