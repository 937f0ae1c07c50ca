#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "base/rng.h"
#include "cost/traffic.h"

namespace disagmoe {
namespace {

constexpr double kAlways = std::numeric_limits<double>::infinity();

// A fixed order of experts for a layer: Fisher-Yates by the repository's own generator, the same everywhere.
std::vector<int64_t> Shuffled(int64_t experts, uint64_t seed) {
  std::vector<int64_t> order(experts);
  std::iota(order.begin(), order.end(), int64_t{0});
  Rng random(seed);
  for (int64_t i = experts - 1; i > 0; --i) {
    std::swap(order[i], order[random.Below(static_cast<uint64_t>(i + 1))]);
  }
  return order;
}

// Multiplies a polynomial, cut behind x^k, by 1 + w x.
void Multiply(std::vector<double>* poly, double w) {
  for (size_t j = poly->size() - 1; j > 0; --j) (*poly)[j] += w * (*poly)[j - 1];
}

// Probability of each expert where a set of k has the likelihood of its odds' product: w_e times the sum of all
// products of k - 1 odds of others, over that of all products of k.
std::vector<double> Probabilities(const std::vector<double>& w, int64_t k) {
  const size_t n = w.size();
  const size_t row = static_cast<size_t>(k) + 1;
  std::vector<double> behind((n + 1) * row, 0);  // [e][j]: of j odds of those from e on
  behind[n * row] = 1;
  for (size_t e = n; e-- > 0;) {
    const double* next = &behind[(e + 1) * row];
    double* here = &behind[e * row];
    here[0] = next[0];
    for (size_t j = 1; j < row; ++j) here[j] = next[j] + w[e] * next[j - 1];
  }
  std::vector<double> before(k + 1, 0), out(n);
  before[0] = 1;
  for (size_t e = 0; e < n; ++e) {
    double others = 0;
    for (int64_t j = 0; j < k; ++j) others += before[j] * behind[(e + 1) * row + k - 1 - j];
    out[e] = w[e] * others / behind[k];
    Multiply(&before, w[e]);
  }
  return out;
}

// Odds that give these probabilities: the fixed point w_e <- w_e p_e / (probability of e with w).
std::vector<double> OddsFor(const std::vector<double>& p, int64_t k) {
  std::vector<double> odds(p.size(), kAlways), w, target;
  for (double x : p) {
    if (x >= 1) {
      --k;
    } else {
      target.push_back(x);
      w.push_back(x / (1 - x));
    }
  }
  if (k > 0) {
    double off = 1;
    for (int round = 0; round < 1000 && off > 1e-12; ++round) {
      const std::vector<double> now = Probabilities(w, k);
      off = 0;
      for (size_t e = 0; e < w.size(); ++e) {
        off = std::max(off, std::abs(now[e] - target[e]));
        if (now[e] > 0) w[e] *= target[e] / now[e];
      }
    }
  }
  size_t next = 0;
  for (size_t e = 0; e < p.size(); ++e) {
    if (p[e] < 1) odds[e] = w[next++];
  }
  return odds;
}

// Balanced: the i-th of `count` experts is missed with 1 - k / (E - i), given that those before were.
double Missed(int64_t experts, int64_t k, int64_t count) {
  double none = 1;
  for (int64_t i = 0; i < count && none > 0; ++i) {
    none *= std::max(0.0, 1 - static_cast<double>(k) / static_cast<double>(experts - i));
  }
  return none;
}

// Balanced, k experts of `chosen` groups: over all choices of groups, by how many of the set's experts are in them.
double MissedInGroups(const Routing& r, const std::vector<char>& set) {
  const auto experts = static_cast<int64_t>(set.size());
  const int64_t size = experts / r.groups;
  const int64_t chosen = r.groups_per_token;
  const auto most = static_cast<int64_t>(std::count(set.begin(), set.end(), 1));
  // ways[t][x]: choices of t groups with x experts of the set.
  std::vector<std::vector<double>> ways(chosen + 1, std::vector<double>(most + 1, 0));
  ways[0][0] = 1;
  for (int64_t g = 0; g < r.groups; ++g) {
    const auto here = static_cast<int64_t>(std::count(set.begin() + g * size, set.begin() + (g + 1) * size, 1));
    for (int64_t t = chosen; t > 0; --t) {
      for (int64_t x = most; x >= here; --x) ways[t][x] += ways[t - 1][x - here];
    }
  }
  double all = 0, missed = 0;
  for (int64_t x = 0; x <= most; ++x) {
    if (ways[chosen][x] == 0) continue;
    all += ways[chosen][x];
    missed += ways[chosen][x] * Missed(size * chosen, r.k, x);
  }
  return missed / all;
}

// Sum over all sets of k experts that have none of `without`.
double Products(const Routing& r, const std::vector<char>* without) {
  const auto always = std::count(r.odds.begin(), r.odds.end(), kAlways);
  std::vector<double> poly(r.k - always + 1, 0);
  poly[0] = 1;
  for (size_t e = 0; e < r.odds.size(); ++e) {
    if (r.odds[e] != kAlways && !(without && (*without)[e])) Multiply(&poly, r.odds[e]);
  }
  return poly.back();
}

double MissedByOdds(const Routing& r, const std::vector<char>& set) {
  for (size_t e = 0; e < set.size(); ++e) {
    if (set[e] && r.odds[e] == kAlways) return 0;
  }
  return Products(r, &set) / r.all_products;
}

bool HasLayersLoads(const Job& job) { return job.expert_loads.size() > 1; }

// Experts by load, the most first; ties by number.
std::vector<int64_t> ByLoad(const std::vector<double>& loads) {
  std::vector<int64_t> order(loads.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return loads[a] > loads[b]; });
  return order;
}

// Probabilities and odds of k of these loads. `order` is ByLoad of them.
void SetLoads(const std::vector<double>& loads, const std::vector<int64_t>& order, Routing* out) {
  const size_t experts = loads.size();
  std::vector<double> weight;
  for (int64_t e : order) weight.push_back(loads[e]);
  // The most popular are full one after the other, as long as an equal share of what is left would exceed 1.
  double left = static_cast<double>(out->k);
  double sum = std::accumulate(weight.rbegin(), weight.rend(), 0.0);
  out->probability.assign(experts, 0);
  for (size_t r = 0; r < experts && left > 0; ++r) {
    const bool full = left * weight[r] >= sum * (1 - 1e-12);
    if (!full) {
      for (size_t i = r; i < experts; ++i) out->probability[order[i]] = left * weight[i] / sum;
      break;
    }
    out->probability[order[r]] = 1;
    left -= 1;
    sum = std::accumulate(weight.rbegin(), weight.rend() - static_cast<std::ptrdiff_t>(r + 1), 0.0);
  }
  out->odds = OddsFor(out->probability, out->k);
  out->all_products = Products(*out, nullptr);
}

}  // namespace

Routing RankRouting(const Job& job) {
  const ModelShape& m = job.model;
  Routing out;
  out.k = m.experts_per_token;
  if (m.groups_per_token > 0 && m.groups_per_token < m.expert_groups) {
    out.groups = m.expert_groups;
    out.groups_per_token = m.groups_per_token;
  }
  const auto experts = static_cast<size_t>(m.num_experts);
  if (!job.uneven() || HasLayersLoads(job)) {
    out.probability.assign(experts, static_cast<double>(out.k) / static_cast<double>(experts));
    return out;
  }
  std::vector<double> weight = job.expert_loads.empty() ? std::vector<double>{} : job.expert_loads[0];
  for (size_t r = 0; weight.size() < experts; ++r) {
    weight.push_back(std::pow(static_cast<double>(r + 1), -job.routing_skew));
  }
  std::sort(weight.rbegin(), weight.rend());
  SetLoads(weight, ByLoad(weight), &out);
  return out;
}

Routing RoutingOf(const Routing& by_rank, const Job& job, int64_t layer) {
  Routing out = by_rank;
  const auto experts = static_cast<int64_t>(by_rank.probability.size());
  const int64_t shadows = std::min<int64_t>(job.shadow_experts, experts);
  if (shadows > 0) out.shadowed.assign(experts, 0);
  if (!job.uneven()) {
    for (int64_t i = 0; i < shadows; ++i) out.shadowed[i * experts / shadows] = 1;
    return out;
  }
  std::vector<int64_t> order;
  if (HasLayersLoads(job)) {
    order = ByLoad(job.expert_loads[layer]);
    SetLoads(job.expert_loads[layer], order, &out);
  } else {
    order = Shuffled(experts, job.seed * 1000003 + static_cast<uint64_t>(layer));
    for (int64_t r = 0; r < experts; ++r) {
      out.probability[order[r]] = by_rank.probability[r];
      out.odds[order[r]] = by_rank.odds[r];
    }
  }
  for (int64_t r = 0; r < shadows; ++r) out.shadowed[order[r]] = 1;
  return out;
}

double VisitProbability(const Routing& r, const std::vector<char>& set) {
  DM_CHECK(set.size() == r.probability.size(), "a set of other experts");
  const auto count = static_cast<int64_t>(std::count(set.begin(), set.end(), 1));
  if (count == 0) return 0;
  if (!r.odds.empty()) return 1 - MissedByOdds(r, set);
  if (r.groups_per_token > 0) return 1 - MissedInGroups(r, set);
  return 1 - Missed(static_cast<int64_t>(set.size()), r.k, count);
}

}  // namespace disagmoe
