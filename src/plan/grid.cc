#include "plan/grid.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/error.h"

namespace disagmoe {
namespace {

constexpr int kMostSequences = 64;  // of a micro-batch, a worker

std::vector<int> UpTo(int most) {
  std::vector<int> out(std::max(0, most));
  std::iota(out.begin(), out.end(), 1);
  return out;
}

bool IsDual(const std::string& schedule) { return schedule == "dualpipe" || schedule == "dualpipe-v"; }

// What is hidden of an exchange: all of it behind all computation, or behind the experts' alone, or nothing.
enum class Hidden : uint8_t { kAll, kExperts, kNothing };
Hidden HiddenBy(const std::string& schedule) {
  if (schedule == "megatron-1f1b") return Hidden::kNothing;
  if (schedule == "tutel" || schedule == "comet" || schedule == "fastermoe") return Hidden::kExperts;
  return Hidden::kAll;
}

}  // namespace

bool operator==(const Candidate& a, const Candidate& b) {
  return a.pools == b.pools && a.virtual_stages == b.virtual_stages && a.micro_batches == b.micro_batches &&
         a.round == b.round && a.slope == b.slope && a.parts == b.parts;
}

Grid::Grid(const GridRequest& request)
    : request_(request),
      colocated_(request.base.colocated()),
      dual_(IsDual(request.base.schedule)),
      layers_(static_cast<int>(request.base.model.num_layers)),
      experts_(static_cast<int>(request.base.model.num_experts)),
      gpus_(request.base.cluster.gpus - request.base.idle_gpus),
      model_(request.base) {
  MakeChoices();
}

void Grid::MakeChoices() {
  const Job& base = request_.base;
  const auto one = [](auto given) { return std::vector<decltype(given)>{given}; };
  const int groups = std::min(layers_, gpus_);
  choices_.groups_a = Given("p") || Given("p_a") ? one(base.p_a) : UpTo(groups);
  choices_.groups_f = Given("p") || Given("p_f") ? one(base.p_f) : UpTo(groups);
  if (base.schedule == "hetermoe") {
    if (!Given("p") && !Given("p_a")) choices_.groups_a = {1};
    if (!Given("p") && !Given("p_f")) choices_.groups_f = {1};
  }
  choices_.sequences = Given("b") ? one(base.sequences) : UpTo(kMostSequences);
  choices_.virtual_stages = dual_ ? one(1) : Given("v") ? one(base.virtual_stages) : UpTo(layers_);
  choices_.parts = one(base.parts);
  if (base.schedule == "tutel" && !Given("parts")) choices_.parts = {1, 2, 4, 8};
  const auto both = [&](const char* name, bool given) {
    return Given(name) ? std::vector<bool>{given} : std::vector<bool>{false, true};
  };
  choices_.recompute = both("recompute", base.recompute);
  choices_.head = colocated_ || base.schedule == "hetermoe" ? std::vector<bool>{base.head_on_attention}
                                                            : both("head", base.head_on_attention);
  const bool one_node = gpus_ <= base.cluster.gpus_per_node;
  choices_.mixed = colocated_ || one_node ? std::vector<bool>{base.mixed_nodes} : both("mixed_nodes", base.mixed_nodes);
  if (Given("m")) choices_.m = base.m;
  if (Given("ep")) choices_.m = base.m;
  if (Given("n")) choices_.n = base.n;
}

// Shapes with as many attention workers as there are GPUs for: with fewer, nothing is faster.
void Grid::TwoPoolShapes(const auto& visit) const {
  const int64_t most = request_.batch_most, least = request_.batch_least;
  for (const int p_f : choices_.groups_f) {
    for (const int p_a : choices_.groups_a) {
      const int last = std::min(experts_, (gpus_ - p_a) / p_f);
      for (int n = choices_.n > 0 ? choices_.n : 1; n <= (choices_.n > 0 ? std::min(last, choices_.n) : last); ++n) {
        int before = 0;
        const auto replicas = static_cast<int>(std::min<int64_t>(gpus_ / (p_a + p_f * n), most));
        for (int r = replicas; r >= 1; --r) {
          int64_t m = (gpus_ / r - int64_t{p_f} * n) / p_a;
          m = std::min(m, most / r);
          if (choices_.m > 0) m = m >= choices_.m ? choices_.m : 0;
          while (m > 0 && choices_.m == 0 && most / (r * m) * (r * m) < least) --m;
          if (m <= before) continue;  // with more replicas the same
          before = static_cast<int>(m);
          visit(Pools{.replicas = r, .p_a = p_a, .m = before, .p_f = p_f, .n = n});
        }
      }
    }
  }
}

void Grid::ColocatedShapes(const auto& visit) const {
  for (const int p : choices_.groups_a) {
    if (dual_ && p % 2 == 1) continue;
    const int last = std::min(experts_, gpus_ / p);
    for (int ep = choices_.m > 0 ? choices_.m : 1; ep <= (choices_.m > 0 ? std::min(last, choices_.m) : last); ++ep) {
      Pools x{.replicas = gpus_ / (p * ep), .p_a = p, .m = ep, .p_f = p, .n = ep};
      const int64_t most = request_.batch_most;
      x.replicas = static_cast<int>(std::min<int64_t>(x.replicas, most / ep));
      while (x.replicas > 0 && most / (int64_t{x.replicas} * ep) * x.replicas * ep < request_.batch_least) --x.replicas;
      if (x.replicas > 0) visit(x);
    }
  }
}

// That make a batch in the range: the one nearest to what is wanted, the nearest that rounds of `multiple` divide, and the
// largest.
std::vector<int64_t> Grid::MicroBatches(const Pools& x, int64_t multiple) const {
  const int64_t unit = int64_t{x.replicas} * x.m * x.sequences;
  const int64_t most = request_.batch_most / unit, least = std::max<int64_t>(1, (request_.batch_least + unit - 1) / unit);
  if (least > most) return {};
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
  int found = 0;
  for (int64_t q = ring; q <= c.micro_batches && (all || found < 3); ++q) {
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
          for (const int64_t batches : MicroBatches(c.pools, ring)) {
            c.micro_batches = batches;
            for (const int parts : choices_.parts) {
              c.parts = parts;
              if (!mixed || node_nics < 2) {
                Rounds(c, all, out);
                continue;
              }
              const double share = static_cast<double>(shape.p_a * shape.m) / (shape.p_a * shape.m + shape.p_f * shape.n);
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

// Dispatch and combine, forward and backward, of all layers, over NICs and NVLink.
double Grid::ExchangeNs(const Pools& x) const {
  const ClusterSpec& c = request_.base.cluster;
  const EfficiencySpec& e = c.efficiency;
  const double node = std::min<double>(x.m, c.gpus_per_node);
  const double nics = request_.base.nics_a > 0 ? request_.base.nics_a : static_cast<double>(c.nics_per_node) / c.gpus_per_node;
  const double nic = model_.RowNs(false) * e.m2n / (e.all_to_all * nics);
  const double nvlink = model_.RowNs(false) * e.m2n * c.nic_gbytes_s / (c.nvlink_gbytes_s * e.nvlink);
  const double rows = static_cast<double>(request_.base.seq_length) * layers_ / x.p_a * model_.Rows(x.m) /
                      (static_cast<double>(x.replicas) * x.m);
  return 4 * rows * std::max((1 - node / x.m) * nic, (node - 1) / x.m * nvlink);
}

// Sums of gradients and weights back, of the pool that takes longer.
double Grid::EndNs(const Pools& x) const {
  const Job& base = request_.base;
  const ClusterSpec& c = base.cluster;
  const ModelShape& m = base.model;
  const double bytes = base.gradient_bytes + (base.shard_optimizer ? base.weight_bytes : base.gradient_bytes);
  const double nic = c.nic_gbytes_s * c.efficiency.collective * c.nics_per_node / c.gpus_per_node;
  const auto sum = [&](double params, double holders, double near) {
    near = std::clamp(near, 1.0, holders);
    return params * bytes / near * (holders - near) / holders / nic;
  };
  const double workers = colocated_ ? static_cast<double>(x.p_a) * x.m : static_cast<double>(x.p_a * x.m + x.p_f * x.n);
  const double of_node = std::max(1.0, c.gpus_per_node / workers);
  const double shared = static_cast<double>(m.AttentionParams(layers_ - 1)) * std::ceil(layers_ / static_cast<double>(x.p_a)) +
                        static_cast<double>(m.EmbeddingParams());
  const double experts = static_cast<double>(m.ExpertParams()) * std::ceil(m.num_experts / static_cast<double>(x.n)) *
                         std::ceil(layers_ / static_cast<double>(x.p_f));
  const double attention_ns = sum(shared, static_cast<double>(x.m) * x.replicas, std::min<double>(x.m, c.gpus_per_node) * of_node);
  const double experts_ns = sum(experts, x.replicas, of_node);
  return colocated_ ? attention_ns + experts_ns : std::max(attention_ns, experts_ns);
}

void Grid::Score(Candidate* c) const {
  const Job& base = request_.base;
  const Pools& x = c->pools;
  const SizingTimes t = model_.Times(x);
  const double batch = static_cast<double>(c->micro_batches) * x.replicas * x.m * x.sequences;
  double ns = 0, held_a = 0, held_f = 0;
  if (colocated_) {
    const double compute = t.attention + t.ffn;
    const double exchange = ExchangeNs(x);
    const Hidden hidden = HiddenBy(base.schedule);
    ns = hidden == Hidden::kNothing ? compute + exchange
         : hidden == Hidden::kAll   ? std::max(compute, exchange)
                                    : t.attention + std::max(t.ffn, exchange);
    const int chunks = dual_ ? 2 : c->virtual_stages;
    ns *= 1 + (x.p_a - 1) / (static_cast<double>(c->micro_batches) * chunks);
    const double of_chunk = static_cast<double>(layers_) / (static_cast<double>(x.p_a) * chunks);
    const double round = std::min<double>(x.p_a, static_cast<double>(c->micro_batches));
    held_a = x.p_a == 1 ? layers_ : of_chunk * ((chunks - 1) * round + 2 * (x.p_a - 1) + 1);
    held_f = held_a;
  } else {
    const int p = std::max(x.p_a, x.p_f);
    const int chunks = (layers_ + p - 1) / p;
    ns = t.worst() * (1 + (2 * p - 1) / (static_cast<double>(c->micro_batches) * chunks));
    const int64_t round = c->round > 0 ? c->round : c->micro_batches;
    ns *= std::max(1.0, 2.0 * p / static_cast<double>(round) * (base.schedule == "hetermoe" ? 0 : 1));
    held_a = HeldActivations(layers_, x.p_a, x.p_f, static_cast<int>(round), c->slope, false);
    held_f = HeldActivations(layers_, x.p_a, x.p_f, static_cast<int>(round), c->slope, true);
    const double all_a = static_cast<double>(c->micro_batches) * ((layers_ + x.p_a - 1) / x.p_a);
    const double all_f = static_cast<double>(c->micro_batches) * ((layers_ + x.p_f - 1) / x.p_f);
    held_a = std::min(held_a, all_a), held_f = std::min(held_f, all_f);
  }
  const double a = model_.AttentionBytes(x, held_a), f = model_.FfnBytes(x, held_f);
  c->full = colocated_ ? (a + f - base.reserved_gb * 1e9) / model_.attention_limit()
                       : std::max(a / model_.attention_limit(), f / model_.ffn_limit());
  c->score = ns + EndNs(x) / batch;
}

double Grid::ScoreFloor(const Pools& shape) const {
  Pools x = shape;
  x.sequences = 1;
  double least = std::numeric_limits<double>::max();
  for (const bool head : choices_.head) {
    x.head_on_attention = head;
    const double attention = model_.AttentionNs(x);
    const double ffn = model_.ExpertsNs(x.p_f, x.n, false) / x.replicas;
    least = std::min(least, colocated_ ? attention + ffn : std::max(attention, ffn));
  }
  return least;
}

bool Grid::Complete(Candidate* c) const {
  Pools& x = c->pools;
  if (x.p_a < 1 || x.p_f < 1 || x.m < 1 || x.n < 1 || x.sequences < 1 || c->virtual_stages < 1) return false;
  if (colocated_) x.p_f = x.p_a, x.n = x.m;
  if (x.n > experts_ || x.p_a > layers_ || x.p_f > layers_ || x.sequences > kMostSequences) return false;
  if (colocated_ && (int64_t{x.p_a} * c->virtual_stages > layers_ || (dual_ && x.p_a % 2 == 1))) return false;
  const int64_t workers = colocated_ ? int64_t{x.p_a} * x.m : int64_t{x.p_a} * x.m + int64_t{x.p_f} * x.n;
  x.replicas = static_cast<int>(std::min(gpus_ / workers, request_.batch_most / x.m));
  const int64_t ring = colocated_ ? x.p_a : 2 * std::max(x.p_a, x.p_f);
  for (; x.replicas > 0; --x.replicas) {
    const std::vector<int64_t> batches = MicroBatches(x, ring);
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

Grid::Ranked Grid::Rank(size_t most) const {
  struct Shape {
    Pools pools;
    double floor = 0;
  };
  Ranked out;
  std::vector<Shape> shapes;
  const auto visit = [&](const Pools& x) {
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
  const size_t of_shape = colocated_ ? 10 : 3;
  const auto trim = [&](std::vector<Candidate>* all, const auto& order, size_t count) {
    std::stable_sort(all->begin(), all->end(), order);
    if (all->size() > count) all->resize(count);
  };
  double worst = std::numeric_limits<double>::max();
  std::vector<Candidate> variants, fitting;
  for (const Shape& shape : shapes) {
    if (shape.floor >= worst) break;
    variants.clear();
    for (const int v : choices_.virtual_stages) {
      if (colocated_ && !Given("v") && (int64_t{v} * shape.pools.p_a > layers_ || (shape.pools.p_a == 1 && v > 1))) break;
      Variants(shape.pools, v, false, &variants);
      if (!colocated_) break;
    }
    fitting.clear();
    for (const Candidate& c : variants) {
      if (c.fits()) fitting.push_back(c);
    }
    trim(&fitting, by_score, of_shape);
    out.fitting.insert(out.fitting.end(), fitting.begin(), fitting.end());
    trim(&variants, by_memory, 1);
    out.smallest.insert(out.smallest.end(), variants.begin(), variants.end());
    if (out.fitting.size() > 4 * of_shape * most) {
      trim(&out.fitting, by_score, of_shape * most);
      worst = out.fitting.back().score;
    }
    if (out.smallest.size() > 4 * most) trim(&out.smallest, by_memory, most);
  }
  trim(&out.fitting, by_score, of_shape * most);
  trim(&out.smallest, by_memory, most);
  return out;
}

std::vector<Candidate> Grid::All() const {
  std::vector<Candidate> out;
  const auto visit = [&](const Pools& x) {
    for (const int v : choices_.virtual_stages) {
      if (colocated_ && (int64_t{v} * x.p_a > layers_ || (x.p_a == 1 && v > 1))) break;
      Variants(x, v, true, &out);
      if (!colocated_) break;
    }
  };
  colocated_ ? ColocatedShapes(visit) : TwoPoolShapes(visit);
  return out;
}

std::vector<Candidate> Grid::Neighbours(const Candidate& from) const {
  std::vector<Candidate> out;
  const auto add = [&](const auto& change) {
    Candidate c = from;
    change(c);
    if (Complete(&c) && !(c == from) && std::find(out.begin(), out.end(), c) == out.end()) out.push_back(c);
  };
  const auto steps = [&](int value) { return std::vector<int>{value - 1, value + 1, value / 2, 2 * value}; };
  const Pools& x = from.pools;
  const bool m_free = !Given("m") && !Given("ep"), n_free = !Given("n");
  const bool p_a_free = !Given("p") && !Given("p_a"), p_f_free = !Given("p") && !Given("p_f");
  const int of_one = gpus_ / x.replicas;
  if (colocated_) {
    for (int value : steps(x.m)) if (m_free) add([&](Candidate& c) { c.pools.m = value; });
    for (int value : steps(x.p_a)) {
      if (!p_a_free || value < 1) continue;
      add([&](Candidate& c) { c.pools.p_a = value; });
      add([&](Candidate& c) { c.pools.p_a = value, c.virtual_stages = std::max(1, from.virtual_stages * x.p_a / value); });
      add([&](Candidate& c) { c.pools.p_a = value, c.pools.m = std::max(1, x.p_a * x.m / std::max(1, value)); });
    }
    if (choices_.virtual_stages.size() > 1 && x.p_a > 1) {
      for (int value : steps(from.virtual_stages)) add([&](Candidate& c) { c.virtual_stages = value; });
    }
    for (int parts : choices_.parts) add([&](Candidate& c) { c.parts = parts; });
  } else {
    for (int value : steps(x.n)) {
      if (!n_free) break;
      add([&](Candidate& c) { c.pools.n = value; });
      if (m_free) add([&](Candidate& c) { c.pools.n = value, c.pools.m = (of_one - x.p_f * value) / x.p_a; });
    }
    for (int value : steps(x.m)) {
      if (!m_free) break;
      add([&](Candidate& c) { c.pools.m = value; });
      if (n_free) add([&](Candidate& c) { c.pools.m = value, c.pools.n = (of_one - x.p_a * value) / x.p_f; });
    }
    for (int value : steps(x.p_a)) {
      if (!p_a_free || value < 1) continue;
      if (p_f_free) {
        add([&](Candidate& c) { c.pools.p_a = c.pools.p_f = value; });
        add([&](Candidate& c) {
          c.pools.p_a = c.pools.p_f = value;
          if (m_free) c.pools.m = std::max(1, x.p_a * x.m / value);
          if (n_free) c.pools.n = std::max(1, x.p_f * x.n / value);
        });
      }
      add([&](Candidate& c) { c.pools.p_a = value; });
      if (m_free) add([&](Candidate& c) { c.pools.p_a = value, c.pools.m = (of_one - x.p_f * x.n) / value; });
    }
    for (int value : steps(x.p_f)) {
      if (!p_f_free || value < 1) continue;
      add([&](Candidate& c) { c.pools.p_f = value; });
      if (n_free) add([&](Candidate& c) { c.pools.p_f = value, c.pools.n = (of_one - x.p_a * x.m) / value; });
    }
    if (choices_.head.size() > 1) add([](Candidate& c) { c.pools.head_on_attention = !c.pools.head_on_attention; });
    const int nics = request_.base.cluster.nics_per_node;
    if (choices_.mixed.size() > 1) {
      add([&](Candidate& c) {
        c.pools.mixed = !x.mixed;
        c.pools.node_nics_a = x.mixed ? 0 : std::clamp(nics * x.p_a * x.m / of_one, 1, std::max(1, nics - 1));
        c.pools.node_nics_f = x.mixed ? 0 : std::max(1, nics - c.pools.node_nics_a);
      });
    }
    for (int step : {-1, 1}) {
      const int a = x.node_nics_a + step;
      if (x.mixed && a >= 1 && a < nics) add([&](Candidate& c) { c.pools.node_nics_a = a, c.pools.node_nics_f = nics - a; });
    }
    std::vector<Candidate> rounds;
    Rounds(from, true, &rounds);
    for (const Candidate& r : rounds) {
      if (r.round != from.round && r.round <= 4 * std::max(1, from.round)) add([&](Candidate& c) { c = r; });
    }
  }
  for (int value : steps(x.sequences)) if (!Given("b")) add([&](Candidate& c) { c.pools.sequences = value; });
  for (int64_t value : MicroBatches(x, colocated_ ? x.p_a : 2 * std::max(x.p_a, x.p_f))) {
    add([&](Candidate& c) { c.micro_batches = value; });
  }
  if (choices_.recompute.size() > 1) add([](Candidate& c) { c.pools.recompute = !c.pools.recompute; });
  return out;
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
  job.idle_gpus = job.cluster.gpus - static_cast<int>(x.replicas * job.workers());
  job.global_batch = c.micro_batches * x.replicas * x.m * x.sequences;
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
