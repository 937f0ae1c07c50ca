#include "plan/moving.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "base/error.h"
#include "spec/params.h"

namespace disagmoe {
namespace {

// Stages and their groups, which do not depend on the number of micro-batches.
Schedule PlacedStages(const Job& job) {
  GenerateOptions options;
  options.parts = job.schedule == "hetermoe" && job.attention_expert_share > 0 ? 2 : job.parts;
  options.delay_weights = job.delay_weights;
  options.num_micro_batches = job.colocated() ? 2 * job.p_a : 1;
  return Generate(job.schedule, PlacementOf(job), options);
}

// GPU of each rank of the first replica, and how far the next replica's are: the line of a replica's GPUs by node and
// rank, or, for pools on machines of their own, a line for each.
struct Lines {
  std::vector<int> first, next;
  explicit Lines(const Job& job) {
    const std::vector<int> nodes = NodesOf(job);
    const auto workers = static_cast<int>(nodes.size());
    std::vector<int> order(workers);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return nodes[a] < nodes[b]; });
    first.resize(workers);
    next.assign(workers, workers);
    for (int i = 0; i < workers; ++i) first[order[i]] = i;
    if (!job.ffn_cluster) return;
    const int attention = job.p_a * job.m;
    for (int rank = 0; rank < workers; ++rank) {
      const bool ffn = rank >= attention;
      next[rank] = ffn ? workers - attention : attention;
      first[rank] = ffn ? job.cluster.gpus + rank - attention : rank;
    }
  }
};

// [first, last) of the experts of a part that has a group of its own: part 1 is the attention group's.
std::pair<int64_t, int64_t> ExpertsOfPart(const Job& job, int part) {
  const int64_t experts = job.model.num_experts;
  const int64_t cut = experts - std::llround(job.attention_expert_share * static_cast<double>(experts));
  return part == 0 ? std::pair<int64_t, int64_t>{0, cut} : std::pair<int64_t, int64_t>{cut, experts};
}

class Placing {
 public:
  explicit Placing(const Job& job) : job_(job), s_(PlacedStages(job)), lines_(job) {
    Machines(job.cluster);
    if (job.ffn_cluster) Machines(*job.ffn_cluster);
  }

  Holdings Run() {
    const ModelShape& m = job_.model;
    Shared(0, m.EmbeddingParams());
    for (int layer = 0; layer < static_cast<int>(m.num_layers); ++layer) {
      const bool routed = m.num_experts > 0 && !m.dense[layer];
      const int64_t experts = routed ? m.num_experts * m.ExpertParams() : 0;
      Shared(2 * layer, m.AttentionParams(layer));
      Shared(2 * layer + 1, m.FfnParams(layer) - experts);
      if (routed) Experts(2 * layer + 1);
    }
    Shared(2 * s_.num_layers, m.HeadParams());
    for (Block& b : out_.blocks) {
      std::sort(b.gpus.begin(), b.gpus.end());
      b.gpus.erase(std::unique(b.gpus.begin(), b.gpus.end()), b.gpus.end());
    }
    return std::move(out_);
  }

 private:
  void Machines(const ClusterSpec& c) {
    const int nodes = out_.node_of.empty() ? 0 : out_.node_of.back() + 1;
    for (int gpu = 0; gpu < c.gpus; ++gpu) {
      out_.node_of.push_back(nodes + gpu / c.gpus_per_node);
      out_.nic_rate.push_back(c.nic_gbytes_s * 1e9 * c.efficiency.point_to_point * c.nics_per_node / c.gpus_per_node);
      out_.nvlink_rate.push_back(c.nvlink_gbytes_s * 1e9 * c.efficiency.nvlink);
    }
  }

  // A micro-batch of each route.
  int MicroBatchOf(int route) const { return route == 0 ? 0 : s_.num_micro_batches - 1; }

  void Hold(Block* block, int rank) const {
    for (int r = 0; r < job_.replicas(); ++r) block->gpus.push_back(lines_.first[rank] + r * lines_.next[rank]);
  }

  // All workers of the stage's groups; of a stage in parts those of the first.
  void Shared(int stage, int64_t params) {
    Block block{params, {}};
    for (int route = 0; route < s_.num_routes; ++route) {
      for (int rank : s_.groups[s_.group(stage, MicroBatchOf(route))].ranks) Hold(&block, rank);
    }
    out_.blocks.push_back(std::move(block));
  }

  // Contiguous experts for each worker; where parts have groups of their own (hetermoe), first a cut between these.
  void Experts(int stage) {
    const int64_t experts = job_.model.num_experts;
    const bool own = !s_.part_group.empty();
    const size_t first_block = out_.blocks.size();
    for (int64_t e = 0; e < experts; ++e) out_.blocks.push_back({job_.model.ExpertParams(), {}});
    for (int part = 0; part < (own ? s_.parts(stage) : 1); ++part) {
      const auto [first, last] = own ? ExpertsOfPart(job_, part) : std::pair<int64_t, int64_t>{0, experts};
      for (int route = 0; route < s_.num_routes; ++route) {
        const std::vector<int>& ranks = s_.groups[s_.group(stage, MicroBatchOf(route), part)].ranks;
        int64_t e = first;
        for (size_t w = 0; w < ranks.size(); ++w) {
          const int64_t end = e + ExpertsOf(stage / 2, last - first, w, ranks.size());
          for (; e < end; ++e) Hold(&out_.blocks[first_block + e], ranks[w]);
        }
      }
    }
  }

  int64_t ExpertsOf(int layer, int64_t experts, size_t worker, size_t workers) const {
    const auto& counts = job_.expert_counts;
    if (!counts.empty()) return counts[counts.size() == 1 ? 0 : layer][worker];
    const auto w = static_cast<int64_t>(worker), all = static_cast<int64_t>(workers);
    return PartBegin(experts, all, w + 1) - PartBegin(experts, all, w);
  }

  const Job& job_;
  const Schedule s_;
  const Lines lines_;
  Holdings out_;
};

class Mover {
 public:
  Mover(const std::vector<int>& node_of, MoveCost* out) : node_of_(node_of), out_(*out) {
    for (auto* of : {&out_.nic_in, &out_.nic_out, &out_.nvlink_in, &out_.nvlink_out}) of->assign(node_of.size(), 0);
  }

  // The same bytes to each of `wanted`, from `held`; both ascending, so by node.
  void Fetch(double bytes, std::span<const int> held, std::span<const int> wanted) {
    lacking_.clear();
    std::set_difference(wanted.begin(), wanted.end(), held.begin(), held.end(), std::back_inserter(lacking_));
    double from_each = 0;
    for (size_t i = 0, j = 0; i < lacking_.size(); i = j) {
      const int node = node_of_[lacking_[i]];
      while (j < lacking_.size() && node_of_[lacking_[j]] == node) ++j;
      const std::span<const int> here(&lacking_[i], j - i);
      const auto near =
          std::equal_range(held.begin(), held.end(), here[0], [&](int a, int b) { return node_of_[a] < node_of_[b]; });
      const auto count = static_cast<double>(here.size());
      if (near.first != near.second) {
        for (int gpu : here) out_.nvlink_in[gpu] += bytes;
        const auto holders = static_cast<double>(near.second - near.first);
        for (auto at = near.first; at != near.second; ++at) out_.nvlink_out[*at] += bytes * count / holders;
      } else {
        for (int gpu : here) {
          out_.nic_in[gpu] += bytes / count;
          out_.nvlink_in[gpu] += bytes * (count - 1) / count;
          out_.nvlink_out[gpu] += bytes * (count - 1) / count;
        }
        from_each += bytes / static_cast<double>(held.size());
      }
    }
    if (from_each > 0) {
      for (int gpu : held) out_.nic_out[gpu] += from_each;
    }
  }

  // Of a block whose parameters are cut into parts on one side or both.
  void FetchShards(int64_t params, double bytes, const std::vector<int>& held, bool held_cut,
                   const std::vector<int>& wanted, bool wanted_cut) {
    const auto end = [&](const std::vector<int>& gpus, bool cut, size_t i) {
      return cut ? PartBegin(params, static_cast<int64_t>(gpus.size()), static_cast<int64_t>(i) + 1) : params;
    };
    const auto of = [](const std::vector<int>& gpus, bool cut, size_t i) {
      return cut ? std::span<const int>(&gpus[i], 1) : std::span<const int>(gpus);
    };
    for (int64_t at = 0, next = 0, i = 0, j = 0; at < params; at = next) {
      while (end(held, held_cut, i) <= at) ++i;
      while (end(wanted, wanted_cut, j) <= at) ++j;
      next = std::min(end(held, held_cut, i), end(wanted, wanted_cut, j));
      Fetch(static_cast<double>(next - at) * bytes, of(held, held_cut, i), of(wanted, wanted_cut, j));
    }
  }

 private:
  const std::vector<int>& node_of_;
  MoveCost& out_;
  std::vector<int> lacking_;
};

void Sum(MoveCost* cost, const Holdings& machines, double restart_seconds) {
  for (size_t gpu = 0; gpu < cost->nic_in.size(); ++gpu) {
    cost->nic_bytes += cost->nic_in[gpu];
    cost->bytes += cost->nic_in[gpu] + cost->nvlink_in[gpu];
    const double seconds = std::max(std::max(cost->nic_in[gpu], cost->nic_out[gpu]) / machines.nic_rate[gpu],
                                    std::max(cost->nvlink_in[gpu], cost->nvlink_out[gpu]) / machines.nvlink_rate[gpu]);
    cost->move_seconds = std::max(cost->move_seconds, seconds);
  }
  cost->restart_seconds = cost->bytes > 0 ? restart_seconds : 0;
}

}  // namespace

Holdings HoldingsOf(const Job& job) { return Placing(job).Run(); }

MoveCost CostOfMoving(const Job& from, const Holdings& held, const Job& to, const Holdings& wanted,
                      double restart_seconds) {
  DM_CHECK(held.blocks.size() == wanted.blocks.size() && held.node_of == wanted.node_of,
           "layouts of one model and cluster");
  MoveCost out;
  Mover mover(held.node_of, &out);
  for (size_t i = 0; i < held.blocks.size(); ++i) {
    const Block& old = held.blocks[i];
    const Block& now = wanted.blocks[i];
    if (now.params == 0 || (old.gpus == now.gpus && from.shard_optimizer == to.shard_optimizer)) continue;
    mover.Fetch(static_cast<double>(now.params) * to.weight_bytes, old.gpus, now.gpus);
    mover.FetchShards(now.params, to.state_bytes, old.gpus, from.shard_optimizer, now.gpus, to.shard_optimizer);
  }
  Sum(&out, wanted, restart_seconds);
  return out;
}

MoveCost CostOfMoving(const Job& from, const Job& to, double restart_seconds) {
  return CostOfMoving(from, HoldingsOf(from), to, HoldingsOf(to), restart_seconds);
}

}  // namespace disagmoe
