// Every layout that a schedule allows on a cluster, ranked by the sizing program's times: which of them are worth
// simulating. No ratio of the pools, odd number, or batch size is left out; GPUs may stay idle where numbers do not
// divide.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "plan/evaluate.h"
#include "plan/sizing.h"

namespace disagmoe {

struct Candidate {
  Pools pools;                // colocated: p_a groups of m, p_f and n the same
  int virtual_stages = 1;     // colocated
  int64_t micro_batches = 1;  // of a replica
  int round = 0, slope = 2;
  int parts = 0;
  bool balanced = false;  // uneven routing: as many experts a worker as balance its load
  double score = 0;       // about the nanoseconds a sequence
  double full = 0;        // about its memory over the limit
  friend bool operator==(const Candidate& a, const Candidate& b);
};

struct GridRequest {
  Job base;  // model, hardware, schedule and settings; what is in `fixed` stays
  Fixed fixed;
  int64_t batch_least = 0, batch_most = 0;  // sequences a step: any between
  bool any_memory = false;                  // whether it fits does not matter
  int64_t batch_wanted() const { return base.global_batch; }
};

constexpr double kHopeless = 1.3;  // memory by the sizing program over the limit: not tried
constexpr int kMostSequences = 64;  // of a micro-batch, a worker

class Grid {
 public:
  explicit Grid(const GridRequest& request);

  struct Ranked {
    std::vector<Candidate> fitting;   // or nearly; by score; at most `most` shapes, a few of each
    std::vector<Candidate> smallest;  // by memory: those that come nearest to fitting
    int64_t considered = 0;           // shapes looked at
  };
  Ranked Rank(size_t most, const std::atomic<bool>* stop = nullptr) const;  // stopped: of those seen until then
  // One step away in one decision, or in two that trade GPUs: what fits and what does not.
  std::vector<Candidate> Neighbours(const Candidate& c) const;
  // With the score and memory that its numbers have; false where it cannot be (GPUs, batch, experts, what is fixed).
  bool Complete(Candidate* c, int64_t most_replicas = 1 << 30) const;
  // Every candidate, where there are not more than `most`.
  std::optional<std::vector<Candidate>> All(size_t most) const;

  Job JobOf(const Candidate& c) const;

 private:
  struct Choices {
    std::vector<int> groups_a, groups_f, sequences, virtual_stages, parts;
    std::vector<bool> recompute, head, mixed;
    int m = 0, n = 0;  // 0: any
  };
  bool TwoKinds() const { return request_.base.ffn_cluster.has_value(); }
  int64_t Replicas(const Pools& pools) const;
  int64_t MostM(const Pools& pools) const;
  int64_t MostN(const Pools& pools) const;
  bool Given(const char* name) const { return request_.fixed.contains(name); }
  void MakeChoices();
  void TwoPoolShapes(const auto& visit) const;
  void ColocatedShapes(const auto& visit) const;
  void Variants(const Pools& shape, int virtual_stages, bool all, std::vector<Candidate>* out) const;
  void Rounds(Candidate c, bool all, std::vector<Candidate>* out) const;
  std::vector<int64_t> MicroBatches(const Pools& pools, int64_t multiple, bool all) const;
  // Less than any score of the shape: computation alone; and about so with NICs.
  double ScoreFloor(const Pools& shape) const;
  double Quickest(const Pools& shape) const;
  std::optional<Candidate> Least(const Pools& shape) const;
  void Score(Candidate* c) const;
  double ExchangeNs(const Pools& pools) const;
  double EndNs(const Pools& pools) const;

  GridRequest request_;
  bool colocated_, dual_;
  int layers_, experts_, gpus_a_, gpus_f_;
  SizingModel model_;
  Choices choices_;
};

}  // namespace disagmoe
