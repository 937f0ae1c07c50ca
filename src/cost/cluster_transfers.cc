// Times and bytes of transfers.
#include "cost/cluster_tables.h"

namespace disagmoe {
namespace {

constexpr double kBf16 = 2;
constexpr double kRowMetadata = 6;  // bytes for each expert of a row: its number and its gate, or the gate's gradient

void Raise(SideRows* to, const SideRows& x) {
  to->nic = std::max(to->nic, x.nic);
  to->nvlink = std::max(to->nvlink, x.nvlink);
  to->spine = std::max(to->spine, x.spine);
}

}  // namespace

// Of a worker of `group`, to or from `peer`. rate: of the worker's NICs, bytes a nanosecond. A message is one of `cut`,
// which have the rows together.
TransferCost ClusterCosts::Tables::Cost(int group, int peer, const SideRows& rows, double rate, double row_bytes,
                                        int cut, double slow) const {
  const ClusterSpec& c = job.cluster_of(group);
  TransferCost out;
  out.nic_bytes = RoundToInt(rows.nic * row_bytes / cut);
  out.nvlink_bytes = RoundToInt(rows.nvlink * row_bytes / cut);
  const bool tiles = job.schedule == "comet";  // one kernel for all parts
  const double overhead = c.efficiency.message_overhead_us * 1e3 / (tiles ? cut : 1);
  if (out.nic_bytes > 0) {
    const double spine = rows.spine * row_bytes / cut * c.spine_oversubscription;
    out.nic_ns = RoundToInt(slow * std::max(static_cast<double>(out.nic_bytes), spine) / rate + overhead);
  }
  if (out.nvlink_bytes > 0) {
    const double nvlink = c.nvlink_gbytes_s * c.efficiency.nvlink;
    out.nvlink_ns = RoundToInt(static_cast<double>(out.nvlink_bytes) / nvlink + overhead);
  }
  const double far_us = std::max(c.nic_latency_us, job.cluster_of(peer).nic_latency_us);
  out.latency_ns = RoundToInt(1e3 * (out.nic_bytes > 0 ? far_us : out.nvlink_bytes > 0 ? c.nvlink_latency_us : 0));
  return out;
}

// The exchange over a boundary: between the owners of tokens (attention, head) and the holders of experts. A colocated
// combine that leaves its group is an exchange inside the group, then a send; its backward is modelled as the same in
// the group that sends, which has the same shape.
void ClusterCosts::Tables::FillBoundary(int route, int boundary, int part) {
  const int b = MicroBatchOf(route);
  const bool dispatch = boundary % 2 == 0;
  const auto group_at = [&](int at) { return s.group(at, b, s.parts(at) > 1 ? part : 0); };
  const int holders = group_at(dispatch ? boundary + 1 : boundary);
  const int owners = group_at(dispatch ? boundary : boundary + 1);
  const bool leaves = colocated && !dispatch && owners != holders;
  two_phases[route * stages + boundary] = leaves;
  if (leaves) {
    FillSend(route, boundary, part, holders, owners);
    FillExchange(route, boundary, part, holders, holders, &local_owner[0], &local_holder[0], true);
    FillExchange(route, boundary, part, owners, owners, &local_owner[1], &local_holder[1], true);
  } else {
    FillExchange(route, boundary, part, owners, holders, &owner, &holder, false);
  }
}

void ClusterCosts::Tables::FillExchange(int route, int boundary, int part, int owner_group, int holder_group,
                                        std::vector<TransferCost>* owner_costs,
                                        std::vector<TransferCost>* holder_costs, bool local) {
  const bool dispatch = boundary % 2 == 0;
  const int layer = boundary / 2;
  if (!Routed(layer) && colocated) return;  // a dense layer stays where it is
  const int cut = OwnExperts() ? 1 : s.boundary_parts(boundary);
  const std::vector<Holder>& holders = Holders(layer, holder_group, part);
  const bool inside = owner_group == holder_group;
  const std::vector<int> owner_nodes = NodesOfGroup(owner_group);
  const double tokens = TokensOfMicroBatch() / static_cast<double>(owner_nodes.size());
  const ExchangeRows rows = RowsOf(owner_nodes, tokens, holders, inside, job.dedup, job.cluster_of(owner_group),
                                   job.cluster_of(holder_group));

  const double h = static_cast<double>(model.hidden_size);
  // Every pair's metadata, spread over the rows that are sent.
  double pairs = 0, visits = 0;
  for (const Holder& x : holders) pairs += x.pairs, visits += x.visit;
  const double sent = job.dedup == Dedup::kExpert ? pairs : visits;
  const double row_bytes = kBf16 * h + (dispatch && Routed(layer) && sent > 0 ? kRowMetadata * pairs / sent : 0);
  // Weights of shadowed experts travel once a micro-batch, with the first part of the dispatch.
  const double shadow = dispatch && part == 0 && Routed(layer)
                            ? job.shadow_experts * kBf16 * 3 * h * static_cast<double>(model.expert_hidden) * cut
                            : 0;
  const auto fill = [&](int group, const std::vector<SideRows>& sides, std::vector<TransferCost>* table,
                        std::vector<int64_t>* message) {
    const ClusterSpec& c = job.cluster_of(group);
    const double rate = NicsOf(group) * c.nic_gbytes_s * (inside ? c.efficiency.all_to_all : c.efficiency.m2n);
    const int peer = group == owner_group ? holder_group : owner_group;
    std::vector<SideRows> worst(stride);
    std::vector<int> used(stride, -1);
    for (size_t w = 0; w < sides.size(); ++w) {
      const int at = LocalClass(group, w);
      used[at] = at + first_class[group];
      Raise(&worst[at], sides[w]);
      if (local) continue;
      int64_t& bytes = (*message)[Row(route, boundary, part) + at];
      bytes = std::max(bytes, RoundToInt(((sides[w].nic + sides[w].nvlink) * row_bytes + shadow) / cut));
    }
    for (int i = 0; i < stride && used[i] >= 0; ++i) {
      if (shadow > 0) (worst[i].nic > 0 ? worst[i].nic : worst[i].nvlink) += shadow / row_bytes;
      (*table)[Row(route, boundary, part) + i] = Cost(group, peer, worst[i], rate, row_bytes, cut, slow_nic[used[i]]);
    }
  };
  fill(owner_group, rows.owners, owner_costs, &owner_bytes);
  fill(holder_group, rows.holders, holder_costs, &holder_bytes);
}

// Point to point: worker i of one group to worker i of the next, on its rail.
void ClusterCosts::Tables::FillSend(int route, int boundary, int part, int from, int to) {
  const double tokens = TokensOfOwner();
  const std::vector<int> from_nodes = NodesOfGroup(from);
  const std::vector<int> to_nodes = NodesOfGroup(to);
  for (const int group : {from, to}) {
    const double rate = NicsOf(group) * job.cluster.nic_gbytes_s * job.cluster.efficiency.point_to_point;
    std::vector<SideRows> worst(stride);
    for (size_t w = 0; w < from_nodes.size(); ++w) {
      const bool near = from_nodes[w] == to_nodes[w];
      const int at = LocalClass(group, w);
      Raise(&worst[at], {near ? 0 : tokens, near ? tokens : 0, 0});
      const double row_bytes = kBf16 * static_cast<double>(model.hidden_size);
      const int cut = s.boundary_parts(boundary);
      const size_t row = Row(route, boundary, part) + at;
      (group == from ? holder : owner)[row] = Cost(group, group == from ? to : from, worst[at], rate, row_bytes, cut,
                                                   slow_nic[first_class[group] + at]);
      (group == from ? holder_bytes : owner_bytes)[row] = RoundToInt(tokens * row_bytes / cut);
    }
  }
}

void ClusterCosts::Tables::FillTransfers() {
  owner.resize(stage.size());
  holder.resize(stage.size());
  owner_bytes.resize(stage.size());
  holder_bytes.resize(stage.size());
  two_phases.resize(static_cast<size_t>(s.num_routes) * stages);
  if (colocated) {
    for (auto* table : {&local_owner[0], &local_owner[1], &local_holder[0], &local_holder[1]}) {
      table->resize(stage.size());
    }
  }
  for (int route = 0; route < s.num_routes; ++route) {
    for (int boundary = 0; boundary + 1 < stages; ++boundary) {
      for (int part = 0; part < s.boundary_parts(boundary); ++part) FillBoundary(route, boundary, part);
    }
  }
}

}  // namespace disagmoe
