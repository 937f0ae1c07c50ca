#include "cost/expert_counts.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "base/error.h"
#include "cost/traffic.h"
#include "spec/params.h"

namespace disagmoe {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// Sums of the loads before each expert.
std::vector<double> SumsBefore(const Routing& routing) {
  std::vector<double> sums{0};
  for (size_t e = 0; e < routing.probability.size(); ++e) {
    const bool shadowed = !routing.shadowed.empty() && routing.shadowed[e];
    sums.push_back(sums.back() + (shadowed ? 0 : routing.probability[e]));
  }
  return sums;
}

// The least largest load. After w workers with the first j experts it is least[j]: the last of them has [i, j), and as
// the rest grows with i and its own share shrinks, the best i is where the two cross.
double LeastLargest(const std::vector<double>& sums, int workers, int most) {
  const int experts = static_cast<int>(sums.size()) - 1;
  std::vector<double> least(experts + 1, kNever), next(least);
  least[0] = 0;
  for (int w = 0; w < workers; ++w) {
    for (int j = 0; j <= experts; ++j) {
      const auto load = [&](int i) { return std::max(least[i], sums[j] - sums[i]); };
      int low = std::max(0, j - most), high = j;
      while (low < high) {  // the first i from which on the rest counts
        const int i = (low + high) / 2;
        if (least[i] >= sums[j] - sums[i]) {
          high = i;
        } else {
          low = i + 1;
        }
      }
      next[j] = load(low);
      if (low > std::max(0, j - most)) next[j] = std::min(next[j], load(low - 1));
    }
    std::swap(least, next);
  }
  return least[experts];
}

// Of the shares with no more load than `largest` the ones with the least sum of squares.
std::vector<int> NearestToEqual(const std::vector<double>& sums, int workers, int most, double largest) {
  const int experts = static_cast<int>(sums.size()) - 1;
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::vector<int64_t> squares(experts + 1, kNone), next;
  std::vector<std::vector<int>> count(workers, std::vector<int>(experts + 1, 0));
  squares[0] = 0;
  for (int w = 0; w < workers; ++w) {
    next.assign(experts + 1, kNone);
    for (int j = 0; j <= experts; ++j) {
      for (int n = 0; n <= std::min(j, most) && sums[j] - sums[j - n] <= largest; ++n) {
        if (squares[j - n] == kNone) continue;
        const int64_t all = squares[j - n] + int64_t{n} * n;
        if (all >= next[j]) continue;
        next[j] = all;
        count[w][j] = n;
      }
    }
    std::swap(squares, next);
  }
  std::vector<int> out(workers);
  for (int w = workers, j = experts; w-- > 0; j -= out[w]) out[w] = count[w][j];
  return out;
}

}  // namespace

std::vector<std::vector<int>> BalancedCounts(const Job& job, int max_experts) {
  const auto experts = static_cast<int>(job.model.num_experts);
  const int workers = job.colocated() ? job.m : job.n;
  if (experts == 0) return {};
  const int most = max_experts > 0 ? std::min(max_experts, experts) : experts;
  if (int64_t{most} * workers < experts) {
    throw Error({"more experts than their workers may hold", "workers of a group: " + std::to_string(workers),
                 std::to_string(most) + " experts each", "room for " + std::to_string(experts), ""});
  }
  std::vector<int> equal;
  for (int w = 0; w < workers; ++w) {
    equal.push_back(static_cast<int>(PartBegin(experts, workers, w + 1) - PartBegin(experts, workers, w)));
  }
  if (!job.uneven()) return {equal};
  const Routing by_rank = RankRouting(job);
  std::vector<std::vector<int>> out;
  for (int64_t layer = 0; layer < job.model.num_layers; ++layer) {
    if (job.model.dense[layer]) {
      out.push_back(equal);
      continue;
    }
    const std::vector<double> sums = SumsBefore(RoutingOf(by_rank, job, layer));
    // Sums of equal loads may differ by rounding.
    const double largest = LeastLargest(sums, workers, most) * (1 + 1e-12);
    out.push_back(NearestToEqual(sums, workers, most, largest));
  }
  return out;
}

}  // namespace disagmoe
