#include "cost/cluster_costs.h"

#include <cmath>

#include "base/error.h"
#include "base/rng.h"
#include "cost/cluster_tables.h"

namespace disagmoe {

ClusterCosts::Tables::Tables(const Job& j, const Schedule& schedule)
    : job(j),
      s(schedule),
      model(j.model),
      colocated(j.colocated()),
      stages(s.num_stages()),
      parts(s.max_parts()),
      ids(s),
      keeps_all(j) {
  keeps_all.recompute = false;
  if (model.num_experts > 0) by_rank = RankRouting(job);
  nodes = NodesOf(job);
  MakeClasses();
  if (DrawsDocuments()) DrawDocuments();
  beside.assign(s.groups.size(), 0);
  FillStages();
  FillTransfers();
  if (job.overlap_slowdown && job.overlaps()) {  // how much runs beside transfers, from the times without it
    FillBeside();
    FillStages();
  }
  FillEnds();
}

std::vector<int> ClusterCosts::Tables::NodesOfGroup(int group) const {
  std::vector<int> out;
  for (int rank : Ranks(group)) out.push_back(nodes[rank]);
  return out;
}

// How slow a worker is; `named`: by its own name, not only by that of its group.
Straggler ClusterCosts::Tables::SlownessOf(const GroupSchedule& group, size_t worker, bool* named,
                                           std::vector<char>* used) const {
  Straggler out;
  for (size_t i = 0; i < job.stragglers.size(); ++i) {
    const Straggler& slow = job.stragglers[i];
    const bool whole = slow.worker == group.name;
    if (!whole && slow.worker != group.name + "." + std::to_string(worker)) continue;
    out.compute *= slow.compute;
    out.nic *= slow.nic;
    *named |= !whole;
    (*used)[i] = 1;
  }
  return out;
}

void ClusterCosts::Tables::MakeClasses() {
  const bool each = job.uneven() || job.jitter > 0 || !job.expert_counts.empty();
  std::vector<char> used(job.stragglers.size(), 0);
  for (size_t g = 0; g < s.groups.size(); ++g) {
    first_class.push_back(static_cast<int>(classes.size()));
    const GroupSchedule& group = s.groups[g];
    int rest = -1;
    for (size_t w = 0; w < group.ranks.size(); ++w) {
      bool named = false;
      const Straggler slow = SlownessOf(group, w, &named, &used);
      const bool alone = each || named || (DrawsDocuments() && !job.is_ffn(static_cast<int>(g)));
      if (alone || rest < 0) {
        if (!alone) rest = static_cast<int>(classes.size());
        classes.push_back({static_cast<int>(g), 1, static_cast<int>(w)});
        slow_compute.push_back(slow.compute);
        slow_nic.push_back(slow.nic);
      } else {
        ++classes[rest].count;
      }
      if (static_cast<size_t>(group.ranks[w]) >= members_of.size()) members_of.resize(group.ranks[w] + 1, -1);
      members_of[group.ranks[w]] = alone ? static_cast<int>(classes.size()) - 1 : rest;
    }
    stride = std::max(stride, static_cast<int>(classes.size()) - first_class.back());
  }
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i]) continue;
    std::string names;
    for (const GroupSchedule& g : s.groups) names += (names.empty() ? "" : ", ") + g.name;
    throw Error({"a straggler that is not there", "straggler", job.stragglers[i].worker,
                 "a group (" + names + ") or a worker such as " + s.groups[0].name + ".0", ""});
  }
}

std::vector<int> ClusterCosts::Tables::CountsOf(int layer) const {
  if (job.expert_counts.empty()) return {};
  return job.expert_counts[job.expert_counts.size() == 1 ? 0 : layer];
}

std::pair<int64_t, int64_t> ClusterCosts::Tables::ExpertsOfPart(int part) const {
  if (!OwnExperts()) return {0, model.num_experts};
  const double share = job.attention_expert_share * static_cast<double>(model.num_experts);
  const int64_t cut = model.num_experts - RoundToInt(share);
  return part == 0 ? std::pair<int64_t, int64_t>{0, cut} : std::pair<int64_t, int64_t>{cut, model.num_experts};
}

const std::vector<Holder>& ClusterCosts::Tables::Holders(int layer, int group, int part) {
  const int kind = !Routed(layer) ? -1 : job.uneven() || job.expert_counts.size() > 1 ? layer : 0;
  const auto [at, is_new] = holders_of.try_emplace({kind, group * parts + (OwnExperts() ? part : 0)});
  if (!is_new) return at->second;
  const std::vector<int> group_nodes = NodesOfGroup(group);
  if (kind >= 0) {
    const auto [first, last] = ExpertsOfPart(part);
    return at->second = HoldersOf(RoutingOf(by_rank, job, layer), first, last, group_nodes, CountsOf(layer));
  }
  // Every token visits its home alone.
  std::map<int, int> on_node;
  for (int node : group_nodes) ++on_node[node];
  const double share = 1.0 / static_cast<double>(group_nodes.size());
  for (int node : group_nodes) at->second.push_back({node, 0, share, share, on_node[node] * share});
  return at->second;
}

double ClusterCosts::Tables::RowsOfToken(const std::vector<Holder>& holders) const {
  double rows = 0;
  for (const Holder& h : holders) rows += job.dedup == Dedup::kExpert ? h.pairs : h.visit;
  return rows;
}

double ClusterCosts::Tables::NicsOf(int group) const {
  const double given = job.is_ffn(group) ? job.nics_f : job.nics_a;
  const ClusterSpec& c = job.cluster_of(group);
  return given > 0 ? given : static_cast<double>(c.nics_per_node) / c.gpus_per_node;
}

ClusterCosts::ClusterCosts(const Job& job, const Schedule& schedule)
    : t_(std::make_unique<Tables>(job, schedule)) {}

ClusterCosts::~ClusterCosts() = default;

const std::vector<WorkerClass>& ClusterCosts::classes() const { return t_->classes; }

int64_t ClusterCosts::ComputeNs(const Op& op, int c) const {
  const StageCost& cost = t_->stage[t_->At(op, c)];
  int64_t ns = op.kind == OpKind::kForward    ? cost.forward_ns
               : op.kind == OpKind::kBackward ? cost.backward_ns
                                              : cost.weight_ns;
  if (!t_->document_factors.empty()) ns += RoundToInt(t_->ScoresBeyondMean(op, c));
  if (t_->job.jitter <= 0) return ns;
  // The sum of four uniform numbers, scaled to the wanted deviation: bell-shaped, never more than sqrt(12) deviations
  // from the mean, so never negative below 1 / sqrt(12) = 0.288.
  const auto id = static_cast<uint64_t>(t_->ids(op));
  Rng random(Mix64(t_->job.seed ^ Mix64(id * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(c))));
  double sum = 0;
  for (int i = 0; i < 4; ++i) sum += random.Uniform() - 0.5;
  return std::max<int64_t>(0, RoundToInt(static_cast<double>(ns) * (1 + t_->job.jitter * sum * std::sqrt(3.0))));
}

namespace {

// Whether the side of a boundary is that of the tokens' owners.
bool IsOwner(const Op& send, bool sending) { return (send.stage % 2 == 0) == (sending != IsBackward(send.kind)); }

}  // namespace

TransferCost ClusterCosts::Transfer(const Op& send, int c, bool sending) const {
  return (IsOwner(send, sending) ? t_->owner : t_->holder)[t_->At(send, c)];
}

bool ClusterCosts::HasLocalPhase(const Op& send) const {
  return t_->two_phases[t_->s.route(send.micro_batch) * t_->stages + send.stage];
}

TransferCost ClusterCosts::LocalPhase(const Op& send, int c, bool sending) const {
  if (!HasLocalPhase(send)) return {};
  const bool backward = IsBackward(send.kind);
  return (sending == backward ? t_->local_owner : t_->local_holder)[backward][t_->At(send, c)];
}

StepEndCost ClusterCosts::StepEnd(int c) const { return t_->ends[c]; }

StaticMemory ClusterCosts::StaticParts(int c) const { return t_->static_parts[c]; }

int64_t ClusterCosts::ActivationBytes(const Op& forward, int c, bool after_backward) const {
  const StageCost& cost = t_->stage[t_->At(forward, c)];
  return after_backward ? cost.kept_for_weight_bytes : cost.kept_bytes;
}

int64_t ClusterCosts::WorkspaceBytes(const Op& op, int c) const {
  const StageCost& cost = t_->stage[t_->At(op, c)];
  return op.kind == OpKind::kForward    ? cost.forward_workspace_bytes
         : op.kind == OpKind::kBackward ? cost.backward_workspace_bytes
                                        : 0;
}

int64_t ClusterCosts::MessageBytes(const Op& send, int c) const {
  return (IsOwner(send, false) ? t_->owner_bytes : t_->holder_bytes)[t_->At(send, c)];
}

int64_t ClusterCosts::MemoryLimit(int c) const {
  return RoundToInt(t_->job.cluster_of(t_->classes[c].group).gpu.memory_gb * 1e9);
}

}  // namespace disagmoe
