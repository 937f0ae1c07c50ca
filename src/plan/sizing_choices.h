// What the sizing program chooses from, and which of equally fast choices it takes. A frame fixes everything but m, n
// and b; given those bounds, each time depends on one pool's numbers and, at most, on one number of the other's.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/sizing_program.h"

namespace disagmoe {

inline constexpr double kSizingTie = 1e-9;

struct SizingFrame {
  Pools pools;                  // without m, n, b
  int64_t nodes = 0;            // shared by both pools: 1; of mixed ones any number; 2 = they share none
  int64_t least = 0, most = 0;  // p_a m + p_f n
  int64_t most_a = 0, most_f = 0;  // p_a m, p_f n
};

class SizingChoices {
 public:
  explicit SizingChoices(const SizingProgram& program);

  // Largest m of a replica with b sequences, by the batch; 0: none.
  int64_t MostM(const Pools& pools, int64_t b) const;
  bool FitsAttention(const Pools& pools) const;
  bool FitsFfn(const Pools& pools) const;
  // Largest m * b that the memory of an FFN worker allows.
  int64_t MostSequences(const Pools& pools) const;
  double AttentionShare(const Pools& pools) const;  // memory over its limit
  double FfnShare(const Pools& pools) const;
  bool Allowed(const Pools& pools) const;        // all constraints

  std::vector<std::pair<int, int>> groups;       // p_a, p_f
  std::vector<int> sequences, n, m;              // m empty: any
  std::vector<bool> recompute, head, mixed;
  int most_replicas = 0;
  // NICs of a node for attention and FFN workers; of pools that share no node {0, 0}.
  std::vector<std::pair<int, int>> Nics(bool mixed) const;
  // Of r, p_a and p_f: all frames that have room for a worker a group, and for `workers` of a replica.
  std::vector<SizingFrame> Frames(int replicas, int p_a, int p_f, double workers) const;
  const SizingProgram& program() const { return p_; }
  const SizingModel& model() const { return *p_.model; }

 private:
  double Held(const Pools& pools, bool ffn) const;
  SizingProgram p_;
};

// Keeps the best, by the order that sizing_program.h says.
class SizingTies {
 public:
  explicit SizingTies(const SizingChoices* choices);
  void Add(const Pools& pools, const SizingTimes& times);
  double ns() const { return ns_; }          // infinite: none yet
  double second() const { return second_; }  // of those
  std::optional<SizingAnswer> Best() const;

 private:
  struct Tie {
    Pools pools;
    SizingTimes times;
  };
  const SizingChoices* choices_;
  double ns_, second_;
  std::vector<Tie> ties_;
};

// The largest m of n and b in a frame, and whether a pool with it is allowed: nothing else of them is faster. 0: none.
int64_t LargestM(const SizingChoices& choices, const SizingFrame& frame, int n, int b);

// What can be left out because of its own times.
class SizingBounds {
 public:
  explicit SizingBounds(const SizingChoices& choices);  // must outlive it
  // Of r, p_a and p_f, whatever the rest: the time; the workers that one as fast as `limit` has.
  double Least(int replicas, int p_a, int p_f) const;
  double LeastWorkers(int replicas, int p_a, int p_f, double limit) const;
  // Smallest n and m that are as fast as `limit` by their own times.
  struct Smallest {
    int n = 0;
    int64_t m = 0;
  };
  // Nothing: the frame has no pools as fast.
  std::optional<Smallest> SmallestOf(const SizingFrame& frame, double limit) const;

 private:
  struct Attention {
    SizingModel::Lines ns, bytes;   // of one worker, over rows
  };
  struct Ffn {
    std::vector<double> ns, bytes;  // by n: least up to it
  };
  size_t Index(int p, const Pools& x) const {
    return (static_cast<size_t>(p) * 2 + x.recompute) * 2 + x.head_on_attention;
  }
  const SizingChoices& choices_;
  std::vector<Attention> attention_;
  std::vector<Ffn> ffn_;
  std::vector<double> rows_;        // by n: least from it on
};

// Adds what a frame has from `smallest` on that is not slower than ties' best: the fastest; with `all` ties as well.
void ScanFrame(const SizingChoices& choices, const SizingFrame& frame, SizingBounds::Smallest smallest, bool all,
               SizingTies* ties);

}  // namespace disagmoe
