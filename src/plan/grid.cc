#include "plan/grid.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "cost/expert_counts.h"

namespace disagmoe {
namespace {

// What the sizing program's memory may be too high by, of the limit: a pipeline's fullest group is not always the one
// that it takes.
constexpr double kMayFit = 1.03, kColocatedMayFit = 1.2;
constexpr int64_t kMostRound = 4096;  // what a neighbour or a small cluster is tried with
constexpr int64_t kSmallBatch = 2048;
constexpr int kSmallCluster = 16;  // GPUs: above, there are too many layouts to count them
constexpr int kParts = 4;          // Tutel's degree, until the local search

std::vector<int> UpTo(int most) {
  std::vector<int> out(std::max(0, most));
  std::iota(out.begin(), out.end(), 1);
  return out;
}

bool IsDual(const std::string& schedule) { return schedule == "dualpipe" || schedule == "dualpipe-v"; }

}  // namespace

bool operator==(const Candidate& a, const Candidate& b) {
  return a.pools == b.pools && a.virtual_stages == b.virtual_stages && a.micro_batches == b.micro_batches &&
         a.round == b.round && a.slope == b.slope && a.parts == b.parts && a.balanced == b.balanced;
}

Grid::Grid(const GridRequest& request)
    : request_(request),
      colocated_(request.base.colocated()),
      dual_(IsDual(request.base.schedule)),
      layers_(static_cast<int>(request.base.model.num_layers)),
      experts_(static_cast<int>(request.base.model.num_experts)),
      gpus_a_(request.base.cluster.gpus - request.base.idle_gpus),
      gpus_f_(request.base.ffn_cluster ? request.base.ffn_cluster->gpus - request.base.idle_ffn_gpus : gpus_a_),
      model_(request.base) {
  MakeChoices();
}

// Of as many replicas as there are GPUs for.
int64_t Grid::Replicas(const Pools& x) const {
  const int64_t a = int64_t{x.p_a} * x.m, f = int64_t{x.p_f} * x.n;
  if (colocated_) return gpus_a_ / a;
  return TwoKinds() ? std::min(gpus_a_ / a, gpus_f_ / f) : gpus_a_ / (a + f);
}

// The most workers of an attention (FFN) group beside the other pool of x.
int64_t Grid::MostM(const Pools& x) const {
  return (gpus_a_ / x.replicas - (TwoKinds() ? 0 : int64_t{x.p_f} * x.n)) / x.p_a;
}
int64_t Grid::MostN(const Pools& x) const {
  return (gpus_f_ / x.replicas - (TwoKinds() ? 0 : int64_t{x.p_a} * x.m)) / x.p_f;
}

void Grid::MakeChoices() {
  const Job& base = request_.base;
  const auto one = [](auto given) { return std::vector<decltype(given)>{given}; };
  choices_.groups_a = Given("p") || Given("p_a") ? one(base.p_a) : UpTo(std::min(layers_, gpus_a_));
  choices_.groups_f = Given("p") || Given("p_f") ? one(base.p_f) : UpTo(std::min(layers_, gpus_f_));
  if (base.schedule == "hetermoe") {
    if (!Given("p") && !Given("p_a")) choices_.groups_a = {1};
    if (!Given("p") && !Given("p_f")) choices_.groups_f = {1};
  }
  choices_.sequences = Given("b") ? one(base.sequences) : UpTo(kMostSequences);
  if (base.schedule == "lancet" && !Given("b")) {  // it cuts a worker's sequences
    std::erase_if(choices_.sequences, [&](int b) { return b % (base.parts > 0 ? base.parts : 2) != 0; });
  }
  choices_.virtual_stages = dual_ ? one(1) : Given("v") ? one(base.virtual_stages) : UpTo(layers_);
  choices_.parts = one(base.parts);
  if (base.schedule == "tutel" && !Given("parts")) choices_.parts = {1, 2, 4, 8};
  const auto both = [&](const char* name, bool given) {
    return Given(name) ? std::vector<bool>{given} : std::vector<bool>{false, true};
  };
  choices_.recompute = both("recompute", base.recompute);
  if (request_.any_memory && !Given("recompute")) choices_.recompute = {false};
  choices_.head = colocated_ || base.schedule == "hetermoe" ? std::vector<bool>{base.head_on_attention}
                                                            : both("head", base.head_on_attention);
  const bool apart = TwoKinds() || gpus_a_ <= base.cluster.gpus_per_node;
  choices_.mixed = colocated_ || apart ? std::vector<bool>{base.mixed_nodes} : both("mixed_nodes", base.mixed_nodes);
  if (Given("m")) choices_.m = base.m;
  if (Given("ep")) choices_.m = base.m;
  if (Given("n")) choices_.n = base.n;
}

// Shapes with as many attention workers as there are GPUs for: with fewer, nothing is faster.
void Grid::TwoPoolShapes(const auto& visit) const {
  const int64_t most = request_.batch_most, least = request_.batch_least;
  for (const int p_f : choices_.groups_f) {
    for (const int p_a : choices_.groups_a) {
      const int last = std::min(experts_, (gpus_f_ - (TwoKinds() ? 0 : p_a)) / p_f);
      for (int n = choices_.n > 0 ? choices_.n : 1; n <= (choices_.n > 0 ? std::min(last, choices_.n) : last); ++n) {
        int before = 0;
        Pools x{.p_a = p_a, .m = 1, .p_f = p_f, .n = n};
        for (int64_t r = std::min(Replicas(x), most); r >= 1; --r) {
          x.replicas = static_cast<int>(r);
          int64_t m = std::min(MostM(x), most / r);
          if (choices_.m > 0) m = m >= choices_.m ? choices_.m : 0;
          while (m > 0 && choices_.m == 0 && most / (r * m) * (r * m) < least) --m;
          if (m <= before) continue;  // with more replicas the same
          before = static_cast<int>(m);
          Pools shape = x;
          shape.m = before;
          visit(shape);
        }
      }
    }
  }
}

void Grid::ColocatedShapes(const auto& visit) const {
  for (const int p : choices_.groups_a) {
    if (dual_ && p % 2 == 1) continue;
    const int last = std::min(experts_, gpus_a_ / p);
    for (int ep = choices_.m > 0 ? choices_.m : 1; ep <= (choices_.m > 0 ? std::min(last, choices_.m) : last); ++ep) {
      Pools x{.replicas = gpus_a_ / (p * ep), .p_a = p, .m = ep, .p_f = p, .n = ep};
      const int64_t most = request_.batch_most;
      x.replicas = static_cast<int>(std::min<int64_t>(x.replicas, most / ep));
      while (x.replicas > 0 && most / (int64_t{x.replicas} * ep) * x.replicas * ep < request_.batch_least) --x.replicas;
      // Fewer have less to sum over a slow network.
      for (; x.replicas > 0; x.replicas /= 2) visit(x);
    }
  }
}

// That make a batch in the range: the one nearest to what is wanted, the nearest that rounds of `multiple` divide, and
// the largest.
std::vector<int64_t> Grid::MicroBatches(const Pools& x, int64_t multiple, bool all) const {
  const int64_t unit = int64_t{x.replicas} * x.m * x.sequences;
  const int64_t most = request_.batch_most / unit,
                least = std::max<int64_t>(1, (request_.batch_least + unit - 1) / unit);
  if (least > most) return {};
  if (all) {
    std::vector<int64_t> every(static_cast<size_t>(most - least + 1));
    std::iota(every.begin(), every.end(), least);
    return every;
  }
  const auto near = [&](int64_t step) {
    const int64_t wanted = (request_.batch_wanted() + unit * step / 2) / (unit * step) * step;
    return std::clamp(wanted, (least + step - 1) / step * step, most / step * step);
  };
  std::vector<int64_t> out{near(1)};
  if (multiple > 1 && most / multiple * multiple >= least) out.push_back(near(multiple));
  out.push_back(most);
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

void Grid::Rounds(Candidate c, bool all, std::vector<Candidate>* out) const {
  const Job& base = request_.base;
  const auto add = [&](int64_t round, int slope) {
    c.round = static_cast<int>(round);
    c.slope = slope;
    Score(&c);
    out->push_back(c);
  };
  const int slope = Given("slope") ? base.slope : 2;
  if (Given("round")) {
    if (base.round == 0 || c.micro_batches % base.round == 0) add(base.round, slope);
    return;
  }
  if (colocated_) return add(0, slope);
  if (base.schedule == "hetermoe") {
    add(0, slope);
    for (int64_t q : {2, 4, 8}) {
      if (q < c.micro_batches && c.micro_batches % q == 0) add(q, slope);
    }
    return;
  }
  const int64_t ring = 2 * std::max(c.pools.p_a, c.pools.p_f);
  if (all) {
    for (int64_t q = 1; q <= std::min(c.micro_batches, kMostRound); ++q) {
      if (c.micro_batches % q != 0) continue;
      for (const int e : Given("slope") ? std::vector<int>{slope} : std::vector<int>{1, 2}) add(q, e);
    }
    return;
  }
  int found = 0;
  for (int64_t q = ring; q <= c.micro_batches && found < 3; ++q) {
    if (c.micro_batches % q == 0) add(q, slope), ++found;
  }
  if (found == 0) add(c.micro_batches, slope);  // one round
  if (Given("slope")) return;
  // Half a ring: slower, for half the activations.
  for (int64_t q = ring / 2; q < ring && q < c.micro_batches; ++q) {
    if (c.micro_batches % q != 0) continue;
    add(q, 1);
    break;
  }
}

void Grid::Variants(const Pools& shape, int virtual_stages, bool all, std::vector<Candidate>* out) const {
  const int64_t ring = colocated_ ? shape.p_a : 2 * std::max(shape.p_a, shape.p_f);
  const int64_t most = request_.batch_most / (int64_t{shape.replicas} * shape.m);
  const int node_nics = request_.base.cluster.nics_per_node;
  for (const int b : choices_.sequences) {
    if (b > most && !Given("b")) break;
    // Far from each other first; the local search looks between.
    if (!all && b > 4 && (b & (b - 1)) != 0 && !Given("b")) continue;
    for (const bool recompute : choices_.recompute) {
      for (const bool head : choices_.head) {
        for (const bool mixed : choices_.mixed) {
          Candidate c;
          c.pools = shape;
          c.pools.sequences = b, c.pools.recompute = recompute;
          c.pools.head_on_attention = head, c.pools.mixed = mixed;
          c.virtual_stages = virtual_stages;
          for (const int64_t batches : MicroBatches(c.pools, ring, all)) {
            c.micro_batches = batches;
            for (const int parts : choices_.parts) {
              c.parts = parts;
              if (!all && choices_.parts.size() > 1 && parts != kParts) continue;
              if (!mixed || node_nics < 2) {
                Rounds(c, all, out);
                continue;
              }
              const double share =
                  static_cast<double>(shape.p_a * shape.m) / (shape.p_a * shape.m + shape.p_f * shape.n);
              const int even = std::clamp(static_cast<int>(std::lround(share * node_nics)), 1, node_nics - 1);
              for (int a = all ? 1 : even; a <= (all ? node_nics - 1 : even); ++a) {
                c.pools.node_nics_a = a, c.pools.node_nics_f = node_nics - a;
                Rounds(c, all, out);
              }
            }
          }
        }
      }
    }
  }
}

// The variant that needs least memory.
std::optional<Candidate> Grid::Least(const Pools& shape) const {
  std::vector<Candidate> variants;
  const int64_t ring = colocated_ ? shape.p_a : 2 * std::max(shape.p_a, shape.p_f);
  for (const bool head : choices_.head) {
    Candidate c;
    c.pools = shape;
    c.pools.sequences = choices_.sequences.front();
    c.pools.recompute = choices_.recompute.back();
    c.pools.head_on_attention = head;
    c.virtual_stages = choices_.virtual_stages.front();
    c.parts = choices_.parts.front();
    for (const int64_t batches : MicroBatches(c.pools, ring, false)) {
      c.micro_batches = batches;
      Rounds(c, false, &variants);
    }
  }
  const auto least = std::min_element(variants.begin(), variants.end(),
                                      [](const Candidate& a, const Candidate& b) { return a.full < b.full; });
  return least == variants.end() ? std::nullopt : std::optional(*least);
}

bool Grid::Complete(Candidate* c, int64_t most_replicas) const {
  Pools& x = c->pools;
  if (x.p_a < 1 || x.p_f < 1 || x.m < 1 || x.n < 1 || x.sequences < 1 || c->virtual_stages < 1) return false;
  if (colocated_) x.p_f = x.p_a, x.n = x.m;
  // One group has no chunks to alternate with; dualpipe has a chunk a direction.
  if (dual_ || (x.p_a == 1 && !Given("v"))) c->virtual_stages = 1;
  if (x.n > experts_ || x.p_a > layers_ || x.p_f > layers_ || x.sequences > kMostSequences) return false;
  if (colocated_ && (int64_t{x.p_a} * c->virtual_stages > layers_ || (dual_ && x.p_a % 2 == 1))) return false;
  x.replicas = static_cast<int>(std::min({Replicas(x), request_.batch_most / x.m, most_replicas}));
  const int64_t ring = colocated_ ? x.p_a : 2 * std::max(x.p_a, x.p_f);
  for (; x.replicas > 0; --x.replicas) {
    const std::vector<int64_t> batches = MicroBatches(x, ring, false);
    if (batches.empty()) continue;
    if (std::find(batches.begin(), batches.end(), c->micro_batches) == batches.end()) c->micro_batches = batches.back();
    if (!colocated_ && request_.base.schedule != "hetermoe" && !Given("round") &&
        (c->round == 0 || c->micro_batches % c->round != 0 || (c->slope == 2 && c->round < ring))) {
      std::vector<Candidate> rounds;
      Rounds(*c, false, &rounds);
      if (rounds.empty()) return false;
      *c = rounds[0];
    }
    Score(c);
    return true;
  }
  return false;
}

Grid::Ranked Grid::Rank(size_t most, const std::atomic<bool>* stop) const {
  const auto stopped = [&] { return stop && stop->load(std::memory_order_relaxed); };
  struct Shape {
    Pools pools;
    double floor = 0;
  };
  Ranked out;
  std::vector<Shape> shapes;
  const auto visit = [&](const Pools& x) {
    if (shapes.size() > most && stopped()) return;
    ++out.considered;
    shapes.push_back({x, ScoreFloor(x)});
    // Only the better half stays in reach.
    if (shapes.size() < 64 * most + 4096) return;
    std::nth_element(shapes.begin(), shapes.begin() + static_cast<ptrdiff_t>(shapes.size() / 2), shapes.end(),
                     [](const Shape& a, const Shape& b) { return a.floor < b.floor; });
    shapes.resize(shapes.size() / 2);
  };
  colocated_ ? ColocatedShapes(visit) : TwoPoolShapes(visit);
  std::stable_sort(shapes.begin(), shapes.end(), [](const Shape& a, const Shape& b) { return a.floor < b.floor; });

  const auto by_score = [](const Candidate& a, const Candidate& b) { return a.score < b.score; };
  const auto by_memory = [](const Candidate& a, const Candidate& b) { return a.full < b.full; };
  // A colocated shape has chunks to choose as well.
  const size_t of_shape = std::max<size_t>(colocated_ ? 10 : 3, 3 * most / std::max<size_t>(1, shapes.size()));
  const auto trim = [&](std::vector<Candidate>* all, const auto& order, size_t count) {
    std::stable_sort(all->begin(), all->end(), order);
    if (all->size() > count) all->resize(count);
  };
  double worst = std::numeric_limits<double>::max();
  std::vector<Candidate> variants, fitting;
  for (const Shape& shape : shapes) {
    if (shape.floor >= worst || (!out.fitting.empty() && stopped())) break;
    if (Quickest(shape.pools) >= worst) continue;
    const std::optional<Candidate> least = colocated_ || request_.any_memory ? std::nullopt : Least(shape.pools);
    if (least && least->full > kHopeless) {
      out.smallest.push_back(*least);
      if (out.smallest.size() > 4 * most) trim(&out.smallest, by_memory, most);
      continue;
    }
    variants.clear();
    for (const int v : choices_.virtual_stages) {
      if (colocated_ && !Given("v") && (int64_t{v} * shape.pools.p_a > layers_ || (shape.pools.p_a == 1 && v > 1)))
        break;
      Variants(shape.pools, v, false, &variants);
      if (!colocated_) break;
    }
    fitting.clear();
    for (const Candidate& c : variants) {
      if (request_.any_memory || c.full < (colocated_ ? kColocatedMayFit : kMayFit)) fitting.push_back(c);
    }
    trim(&fitting, by_score, of_shape);
    out.fitting.insert(out.fitting.end(), fitting.begin(), fitting.end());
    trim(&variants, by_memory, 1);
    out.smallest.insert(out.smallest.end(), variants.begin(), variants.end());
    if (out.fitting.size() > of_shape * most * 5 / 4) {
      trim(&out.fitting, by_score, of_shape * most);
      worst = out.fitting.back().score;
    }
    if (out.smallest.size() > 4 * most) trim(&out.smallest, by_memory, most);
  }
  trim(&out.fitting, by_score, of_shape * most);
  trim(&out.smallest, by_memory, most);
  return out;
}

// Of any number of replicas and workers, also where GPUs would be left for more.
std::optional<std::vector<Candidate>> Grid::All(size_t most) const {
  std::vector<Candidate> out;
  if (gpus_a_ > kSmallCluster || gpus_f_ > kSmallCluster || request_.batch_most > kSmallBatch) return std::nullopt;
  const auto given = [](int value, int64_t last) {
    return value > 0 ? std::vector<int>(value <= last ? 1 : 0, value) : UpTo(static_cast<int>(last));
  };
  const auto shapes = [&](Pools x, int virtual_stages) {
    for (x.replicas = 1; x.replicas <= Replicas(x) && out.size() <= most; ++x.replicas) {
      Variants(x, virtual_stages, true, &out);
    }
  };
  for (const int p_a : choices_.groups_a) {
    for (const int m : given(choices_.m, colocated_ ? std::min(experts_, gpus_a_ / p_a) : gpus_a_ / p_a)) {
      if (out.size() > most) return std::nullopt;
      if (colocated_) {
        if (dual_ && p_a % 2 == 1) continue;
        for (const int v : choices_.virtual_stages) {
          if (int64_t{v} * p_a > layers_ || (p_a == 1 && v > 1 && !Given("v"))) break;
          shapes({.p_a = p_a, .m = m, .p_f = p_a, .n = m}, v);
        }
        continue;
      }
      for (const int p_f : choices_.groups_f) {
        Pools x{.p_a = p_a, .m = m, .p_f = p_f, .n = 1};
        for (const int n : given(choices_.n, std::min<int64_t>(experts_, MostN(x)))) {
          x.n = n;
          shapes(x, 1);
        }
      }
    }
  }
  return out.size() > most ? std::nullopt : std::optional(out);
}

Job Grid::JobOf(const Candidate& c) const {
  Job job = request_.base;
  const Pools& x = c.pools;
  job.p_a = x.p_a, job.m = x.m;
  if (!colocated_) job.p_f = x.p_f, job.n = x.n;
  job.virtual_stages = c.virtual_stages;
  job.sequences = x.sequences;
  job.recompute = x.recompute, job.head_on_attention = x.head_on_attention, job.mixed_nodes = x.mixed;
  job.round = c.round, job.slope = c.slope, job.parts = c.parts;
  const int64_t used = job.ffn_cluster ? x.attention_gpus() : x.replicas * job.workers();
  job.idle_gpus = job.cluster.gpus - static_cast<int>(used);
  if (job.ffn_cluster) job.idle_ffn_gpus = job.ffn_cluster->gpus - static_cast<int>(x.ffn_gpus());
  job.global_batch = c.micro_batches * x.replicas * x.m * x.sequences;
  if (c.balanced) job.expert_counts = BalancedCounts(job);
  if (x.mixed && x.node_nics_a > 0) {
    // Whole NICs of each node, shared by the pool's workers there: of the nodes, one with the most.
    const double all = static_cast<double>(job.workers());
    const double node = std::min<double>(job.cluster.gpus_per_node, all);
    if (!Given("nics_a")) job.nics_a = x.node_nics_a / std::ceil(node * x.p_a * x.m / all - 1e-9);
    if (!Given("nics_f")) job.nics_f = x.node_nics_f / std::ceil(node * x.p_f * x.n / all - 1e-9);
  }
  return job;
}

}  // namespace disagmoe
