// Parameters that each worker holds, and what follows: state, gradient sums, optimizer.
#include "cost/cluster_tables.h"
#include "cost/memory.h"
#include "spec/params.h"

namespace disagmoe {

ClusterCosts::Tables::GroupParams ClusterCosts::Tables::ParamsOf(int group) const {
  const auto workers = static_cast<int64_t>(Ranks(group).size());
  GroupParams out;
  std::vector<int64_t> experts(workers, 0);  // over all layers
  for (int i = 0; i < stages * s.num_routes; ++i) {
    const int at = i % stages;
    const int layer = at / 2;
    for (int part = 0; part < s.parts(at); ++part) {
      if (s.group(at, MicroBatchOf(i / stages), part) != group) continue;
      const bool once = part == 0;
      if (at == stages - 1) {
        out.shared += once ? static_cast<double>(model.HeadParams()) : 0;
      } else if (at % 2 == 0) {
        const int64_t embedding = layer == 0 ? model.EmbeddingParams() : 0;
        out.shared += once ? static_cast<double>(model.AttentionParams(layer) + embedding) : 0;
      } else {
        const int64_t all = Routed(layer) ? model.num_experts * model.ExpertParams() : 0;
        if (once) out.shared += static_cast<double>(model.FfnParams(layer) - all);
        if (all == 0 || (!once && !OwnExperts())) continue;
        const auto [first, last] = ExpertsOfPart(part);
        const std::vector<int> counts = CountsOf(layer);
        for (int64_t w = 0; w < workers; ++w) {
          experts[w] += counts.empty()
                            ? PartBegin(last - first, workers, w + 1) - PartBegin(last - first, workers, w)
                            : counts[w];
        }
      }
    }
  }
  for (int64_t n : experts) out.experts.push_back(static_cast<double>(n * model.ExpertParams()));
  return out;
}

// Sums of gradients, then weights to all holders of the sharded state (or whole sums to all): over NVLink among the
// holders on a node; of what is left each NIC carries its share.
void ClusterCosts::Tables::FillEnds() {
  const double replicas = job.replicas();
  const double bytes = job.shard_optimizer ? job.gradient_bytes + job.weight_bytes : 2 * job.gradient_bytes;
  const auto sum_ns = [&](const ClusterSpec& c, double params, double holders, double near, double nics) {
    near = std::min(near, holders);
    const double nodes_of = holders / near;
    const double nvlink = params * bytes * (near - 1) / near / (c.nvlink_gbytes_s * c.efficiency.nvlink);
    const double nic = params * bytes / near * (nodes_of - 1) / nodes_of;
    return nvlink + nic / (nics * c.nic_gbytes_s * c.efficiency.collective);
  };
  static_parts.resize(classes.size());
  ends.resize(classes.size());
  for (size_t group = 0; group < s.groups.size(); ++group) {
    const ClusterSpec& c = job.cluster_of(static_cast<int>(group));
    const int64_t beside_it = !job.ffn_cluster                         ? job.workers()
                              : job.is_ffn(static_cast<int>(group)) ? int64_t{job.p_f} * job.n
                                                                       : int64_t{job.p_a} * job.m;
    const double replicas_on_node = std::clamp(static_cast<double>(c.gpus_per_node / beside_it), 1.0, replicas);
    const GroupParams params = ParamsOf(static_cast<int>(group));
    const auto workers = static_cast<double>(Ranks(static_cast<int>(group)).size());
    const double holders = workers * replicas * s.num_routes;
    const double expert_holders = replicas * s.num_routes;
    // A node with few of the group's workers has the most for each of its NICs.
    std::map<int, int> on_node;
    for (int node : NodesOfGroup(static_cast<int>(group))) ++on_node[node];
    int near = static_cast<int>(workers);
    for (const auto& [node, count] : on_node) near = std::min(near, count);
    const double nics = NicsOf(static_cast<int>(group));
    const double shared_ns = sum_ns(c, params.shared, holders, near * replicas_on_node, nics);
    for (size_t w = 0; w < params.experts.size(); ++w) {
      const int k = first_class[group] + LocalClass(static_cast<int>(group), w);
      const double experts = params.experts[w];
      const double ns = shared_ns + sum_ns(c, experts, expert_holders, replicas_on_node, nics);
      ends[k].reduce_ns = std::max(ends[k].reduce_ns, RoundToInt(ns * slow_nic[k]));
      const double updated = job.shard_optimizer ? params.shared / holders + experts / expert_holders
                                                 : params.shared + experts;
      const StaticMemory parts = StaticMemoryOf(job, params.shared + experts, updated);
      if (parts.total() > static_parts[k].total()) static_parts[k] = parts;
      // Reads gradient and state, writes state and weight.
      const double traffic = job.gradient_bytes + 2 * job.state_bytes + job.weight_bytes;
      const double update_ns = updated * traffic / (c.gpu.memory_gbytes_s * c.efficiency.memory) * slow_compute[k];
      ends[k].optimizer_ns = std::max(ends[k].optimizer_ns, RoundToInt(update_ns));
    }
  }
}

}  // namespace disagmoe
