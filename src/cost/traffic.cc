#include "cost/traffic.h"

#include <algorithm>
#include <map>

#include "spec/params.h"

namespace disagmoe {

std::vector<Holder> HoldersOf(const Routing& routing, int64_t first, int64_t last, const std::vector<int>& nodes,
                              const std::vector<int>& counts) {
  const auto workers = static_cast<int64_t>(nodes.size());
  const size_t experts = routing.probability.size();
  std::map<int, std::vector<char>> on_node;
  std::vector<Holder> out(nodes.size());
  std::vector<char> own(experts);
  int64_t end = first;
  for (int64_t w = 0; w < workers; ++w) {
    Holder& h = out[w];
    h.node = nodes[w];
    const int64_t begin = end;
    end = counts.empty() ? first + PartBegin(last - first, workers, w + 1) : begin + counts[w];
    h.experts = end - begin;
    std::vector<char>& node = on_node.try_emplace(h.node, experts).first->second;
    std::fill(own.begin(), own.end(), 0);
    for (int64_t e = begin; e < end; ++e) {
      if (!routing.shadowed.empty() && routing.shadowed[e]) continue;
      own[e] = node[e] = 1;
      h.pairs += routing.probability[e];
    }
    h.visit = VisitProbability(routing, own);
  }
  std::map<int, double> visits;
  for (const auto& [id, set] : on_node) visits[id] = VisitProbability(routing, set);
  for (Holder& h : out) h.node_visit = visits[h.node];
  return out;
}

namespace {

// Of a node: its holders, what a token brings to all of them, and the probability that it comes at all.
struct NodeSum {
  int holders = 0;
  double rows = 0;
  double visit = 0;
};

// Share of a worker's rows that leave its rail. To a GPU at another NIC than the sender's they do; with node dedup only
// where the other side lacks the rail, as they change it over NVLink. A single switch has no spine.
double OffRail(const ClusterSpec& own, const ClusterSpec& other, Dedup dedup) {
  if (own.topology != "rail") return 0;
  if (other.topology != "rail" || own.nics_per_node > other.nics_per_node) return 1;
  return dedup == Dedup::kNode ? 1 - static_cast<double>(own.nics_per_node) / other.nics_per_node
                               : 1 - 1.0 / other.nics_per_node;
}

}  // namespace

ExchangeRows RowsOf(const std::vector<int>& owner_nodes, double tokens, const std::vector<Holder>& holders,
                    bool same_group, Dedup dedup, const ClusterSpec& owner_cluster,
                    const ClusterSpec& holder_cluster) {
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
  const double owners_off = OffRail(owner_cluster, holder_cluster, dedup);
  const double holders_off = OffRail(holder_cluster, owner_cluster, dedup);

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
    side.spine = side.nic * owners_off;
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
    side.spine = side.nic * holders_off;
  }
  return out;
}

}  // namespace disagmoe
