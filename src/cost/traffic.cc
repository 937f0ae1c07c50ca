#include "cost/traffic.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "base/rng.h"
#include "spec/params.h"

namespace disagmoe {
namespace {

// A fixed order of experts for a layer: Fisher-Yates by the repository's own generator, the same everywhere.
std::vector<int64_t> Shuffled(int64_t experts, uint64_t seed) {
  std::vector<int64_t> order(experts);
  std::iota(order.begin(), order.end(), int64_t{0});
  Rng random(seed);
  for (int64_t i = experts - 1; i > 0; --i) std::swap(order[i], order[random.Below(static_cast<uint64_t>(i + 1))]);
  return order;
}

}  // namespace

std::vector<double> ExpertProbabilities(const Job& job, int64_t layer) {
  const int64_t experts = job.model.num_experts;
  const auto k = static_cast<double>(job.model.experts_per_token);
  std::vector<double> weight(experts, 1);
  if (job.uneven()) {
    const std::vector<int64_t> order = Shuffled(experts, job.seed * 1000003 + static_cast<uint64_t>(layer));
    for (int64_t r = 0; r < experts; ++r) {
      weight[order[r]] = job.expert_load.empty() ? std::pow(static_cast<double>(r + 1), -job.routing_skew) : job.expert_load[r];
    }
  }
  std::vector<double> p(experts, 0);
  std::vector<char> full(experts, 0);
  double left = k;
  for (bool again = true; again;) {
    again = false;
    double sum = 0;
    for (int64_t e = 0; e < experts; ++e) sum += full[e] ? 0 : weight[e];
    if (sum <= 0) break;
    for (int64_t e = 0; e < experts; ++e) {
      if (full[e]) continue;
      p[e] = left * weight[e] / sum;
      if (p[e] > 1) full[e] = again = true;
    }
    left = k;
    for (int64_t e = 0; e < experts; ++e) {
      if (full[e]) p[e] = 1, left -= 1;
    }
  }
  return p;
}

std::vector<Holder> HoldersOf(const std::vector<double>& p, int64_t k, int64_t first, int64_t last,
                              const std::vector<int>& nodes) {
  const auto workers = static_cast<int64_t>(nodes.size());
  const auto experts = static_cast<int64_t>(p.size());
  const bool uniform = std::all_of(p.begin(), p.end(), [&](double x) { return x == p.front(); });
  // Probability that a token misses all of a set of experts. Uniform: the i-th of them with 1 - k / (E - i), given that
  // it missed those before. Else as if experts were independent.
  const auto missed_uniform = [&](int64_t count) {
    double none = 1;
    for (int64_t i = 0; i < count; ++i) {
      none *= std::max(0.0, 1 - static_cast<double>(k) / static_cast<double>(experts - i));
    }
    return none;
  };
  std::map<int, std::pair<int64_t, double>> on_node;  // experts, product of misses
  std::vector<Holder> out(nodes.size());
  for (int64_t w = 0; w < workers; ++w) {
    Holder& h = out[w];
    h.node = nodes[w];
    const int64_t begin = first + PartBegin(last - first, workers, w);
    const int64_t end = first + PartBegin(last - first, workers, w + 1);
    double none = 1;
    for (int64_t e = begin; e < end; ++e) {
      h.pairs += p[e];
      none *= 1 - p[e];
    }
    h.visit = 1 - (uniform ? missed_uniform(end - begin) : none);
    auto& node = on_node.try_emplace(h.node, 0, 1.0).first->second;
    node.first += end - begin;
    node.second *= none;
  }
  for (Holder& h : out) {
    const auto& [count, none] = on_node[h.node];
    h.node_visit = 1 - (uniform ? missed_uniform(count) : none);
  }
  return out;
}

namespace {

// Of a node: its holders, what a token brings to all of them, and the probability that it comes at all.
struct NodeSum {
  int holders = 0;
  double rows = 0;
  double visit = 0;
};

}  // namespace

ExchangeRows RowsOf(const std::vector<int>& owner_nodes, double tokens, const std::vector<Holder>& holders, bool same_group,
                    Dedup dedup, const ClusterSpec& cluster) {
  const auto row = [&](const Holder& h) { return dedup == Dedup::kExpert ? h.pairs : h.visit; };
  std::map<int, NodeSum> nodes;
  double all = 0;
  for (const Holder& h : holders) {
    NodeSum& node = nodes[h.node];
    node.visit = h.node_visit;
    node.rows += row(h);
    ++node.holders;
    all += row(h);
  }
  double visits = 0;
  for (const auto& [id, node] : nodes) visits += node.visit;
  std::map<int, int> owners_on;
  for (int node : owner_nodes) ++owners_on[node];
  // Rows to a GPU of another number than the sender's leave the rail; with node dedup they change it over NVLink.
  const bool rail = cluster.topology == "rail";
  const double off_rail = !rail ? 1 : dedup == Dedup::kNode ? 0 : 1 - 1.0 / cluster.gpus_per_node;

  ExchangeRows out;
  out.owners.resize(owner_nodes.size());
  out.holders.resize(holders.size());
  for (size_t i = 0; i < owner_nodes.size(); ++i) {
    SideRows& side = out.owners[i];
    const auto own = nodes.find(owner_nodes[i]);
    const double near = own == nodes.end() ? 0 : own->second.rows;
    const double self = same_group ? row(holders[i]) : 0;
    const double near_visits = own == nodes.end() ? 0 : own->second.visit;
    side.nic = tokens * (dedup == Dedup::kNode ? visits - near_visits : all - near);
    side.nvlink = tokens * (near - self);
    side.spine = side.nic * off_rail;
  }
  for (size_t j = 0; j < holders.size(); ++j) {
    SideRows& side = out.holders[j];
    const Holder& h = holders[j];
    const NodeSum& node = nodes[h.node];
    const auto here = owners_on.find(h.node);
    const double near = here == owners_on.end() ? 0 : here->second;
    const double far = static_cast<double>(owner_nodes.size()) - near;
    side.nvlink = tokens * row(h) * (near - (same_group ? 1 : 0));
    if (dedup == Dedup::kNode) {
      // Rows land on the holder of the sender's rail, evenly, and are spread from there to the others of the node.
      side.nic = tokens * far * node.visit / node.holders;
      side.nvlink += tokens * far * h.visit * (node.holders - 1) / node.holders;
    } else {
      side.nic = tokens * far * row(h);
    }
    side.spine = side.nic * off_rail;
  }
  return out;
}

}  // namespace disagmoe
