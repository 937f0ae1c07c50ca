#include "cost/cluster_costs.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/error.h"
#include "base/rng.h"
#include "cost/memory.h"
#include "cost/traffic.h"
#include "cost/work.h"
#include "schedule/ready.h"
#include "spec/params.h"

namespace disagmoe {
namespace {

constexpr double kRowMetadata = 6;  // bytes for each expert of a row: its number and its gate

int64_t Round(double x) { return static_cast<int64_t>(std::llround(x)); }

// The largest over the members of a class; both kinds of sides and plain numbers.
void Raise(double* to, double x) { *to = std::max(*to, x); }
void Raise(SideRows* to, const SideRows& x) {
  Raise(&to->nic, x.nic);
  Raise(&to->nvlink, x.nvlink);
  Raise(&to->spine, x.spine);
}

// What one stage, or one part of it, is for one worker class.
struct StageCost {
  int64_t forward_ns = 0, backward_ns = 0, weight_ns = 0;
  int64_t kept_bytes = 0, kept_for_weight_bytes = 0, workspace_bytes = 0;
};

}  // namespace

struct ClusterCosts::Tables {
  const Job& job;
  const Schedule& s;
  const ModelShape& model;
  const int stages, parts;
  std::vector<WorkerClass> classes;
  std::vector<int> first_class;            // by group
  std::vector<int> members_of;             // by rank: its class
  std::vector<double> slow_compute, slow_nic;  // by class
  std::vector<int> nodes;                  // by rank
  int stride = 1;                          // most classes of a group

  std::vector<StageCost> stage;            // [(route * stages + stage) * parts + part][local class]
  // [(route * stages + boundary) * parts + part][local class]
  std::vector<TransferCost> owner, holder;
  std::vector<TransferCost> local_owner[2], local_holder[2];  // [backward]: in the group that sends
  std::vector<char> two_phases;            // by route and boundary
  std::vector<StepEndCost> ends;
  std::vector<int64_t> static_bytes;

  Tables(const Job& j, const Schedule& schedule)
      : job(j), s(schedule), model(j.model), stages(s.num_stages()), parts(s.max_parts()) {}

  size_t Row(int route, int stage_or_boundary, int part) const {
    return (static_cast<size_t>(route * stages + stage_or_boundary) * parts + part) * stride;
  }
  size_t At(const Op& op, int c) const {
    return Row(s.route(op.micro_batch), op.stage, op.part) + static_cast<size_t>(c - first_class[classes[c].group]);
  }
  // A micro-batch of each route.
  int MicroBatchOf(int route) const { return route == 0 ? 0 : s.num_micro_batches - 1; }
  const std::vector<int>& Ranks(int group) const { return s.groups[group].ranks; }
  std::vector<int> NodesOfGroup(int group) const;

  void MakeClasses();
  double TokensOfOwner() const { return static_cast<double>(job.sequences) * static_cast<double>(job.seq_length); }
  double TokensOfMicroBatch() const { return TokensOfOwner() * job.m; }
  bool Routed(int layer) const { return model.num_experts > 0 && !model.dense[layer]; }
  std::vector<Holder> Holders(int layer, int group, int part) const;
  double ShadowedPairs(int layer) const;
  double NicRate(int group, double efficiency) const;
  TransferCost Cost(const SideRows& rows, double rate, double row_bytes, int parts_cut, double slow) const;

  void FillStages();
  StageCost AttentionCost(int layer, int route) const;
  StageCost FfnCost(int layer, const std::vector<Holder>& holders, size_t worker, int part) const;
  StageCost HeadCost(int group) const;
  StageCost Timed(const Work& work, double rows_per_expert, double launches) const;
  void FillTransfers();
  void FillBoundary(int route, int boundary, int part);
  void FillExchange(int route, int boundary, int part, int owner_group, int holder_group,
                    std::vector<TransferCost>* owner_costs, std::vector<TransferCost>* holder_costs);
  void FillSend(int route, int boundary, int part, int from, int to);
  void FillEnds();
};

std::vector<int> ClusterCosts::Tables::NodesOfGroup(int group) const {
  std::vector<int> out;
  for (int rank : Ranks(group)) out.push_back(nodes[rank]);
  return out;
}

void ClusterCosts::Tables::MakeClasses() {
  const bool each = job.uneven() || job.jitter > 0;
  size_t used = 0;
  for (size_t g = 0; g < s.groups.size(); ++g) {
    first_class.push_back(static_cast<int>(classes.size()));
    const GroupSchedule& group = s.groups[g];
    int rest = -1;
    for (size_t w = 0; w < group.ranks.size(); ++w) {
      double compute = 1;
      double nic = 1;
      bool named = false;
      for (const Straggler& slow : job.stragglers) {
        const bool whole = slow.worker == group.name;
        if (!whole && slow.worker != group.name + "." + std::to_string(w)) continue;
        compute *= slow.compute;
        nic *= slow.nic;
        named |= !whole;
        if (whole ? w == 0 : true) ++used;
      }
      if (each || named || rest < 0) {
        if (!each && !named) rest = static_cast<int>(classes.size());
        classes.push_back({static_cast<int>(g), 1, static_cast<int>(w)});
        slow_compute.push_back(compute);
        slow_nic.push_back(nic);
      } else {
        ++classes[rest].count;
      }
      if (static_cast<size_t>(group.ranks[w]) >= members_of.size()) members_of.resize(group.ranks[w] + 1, -1);
      members_of[group.ranks[w]] = each || named ? static_cast<int>(classes.size()) - 1 : rest;
    }
    stride = std::max(stride, static_cast<int>(classes.size()) - first_class.back());
  }
  if (used < job.stragglers.size()) {
    std::string names;
    for (const GroupSchedule& g : s.groups) names += (names.empty() ? "" : ", ") + g.name;
    throw Error({"a straggler that is not there", "straggler", job.stragglers.back().worker,
                 "a group (" + names + ") or a worker such as " + s.groups[0].name + ".0", ""});
  }
}

double ClusterCosts::Tables::ShadowedPairs(int layer) const {
  if (job.shadow_experts == 0 || !Routed(layer)) return 0;
  std::vector<double> p = ExpertProbabilities(job, layer);
  std::sort(p.rbegin(), p.rend());
  double sum = 0;
  for (int i = 0; i < std::min<int>(job.shadow_experts, static_cast<int>(p.size())); ++i) sum += p[i];
  return sum;
}

std::vector<Holder> ClusterCosts::Tables::Holders(int layer, int group, int part) const {
  const std::vector<int> group_nodes = NodesOfGroup(group);
  if (!Routed(layer)) {  // every token visits its home alone
    std::vector<Holder> out;
    for (int node : group_nodes) {
      const double share = 1.0 / static_cast<double>(group_nodes.size());
      const auto on_node = static_cast<double>(std::count(group_nodes.begin(), group_nodes.end(), node));
      out.push_back({node, share, share, on_node * share});
    }
    return out;
  }
  std::vector<double> p = ExpertProbabilities(job, layer);
  if (job.shadow_experts > 0) {  // their tokens stay where they are
    std::vector<double> sorted = p;
    std::sort(sorted.rbegin(), sorted.rend());
    const double least = sorted[std::min<size_t>(job.shadow_experts, p.size()) - 1];
    int left = job.shadow_experts;
    for (double& x : p) {
      if (x >= least && left > 0) x = 0, --left;
    }
  }
  int64_t first = 0;
  int64_t last = model.num_experts;
  if (!s.part_group.empty()) {
    const int64_t cut = model.num_experts - Round(job.attention_expert_share * static_cast<double>(model.num_experts));
    (part == 0 ? last : first) = cut;
  }
  return HoldersOf(p, model.experts_per_token, first, last, group_nodes);
}

double ClusterCosts::Tables::NicRate(int group, double efficiency) const {
  const double equal = static_cast<double>(job.cluster.nics_per_node) / job.cluster.gpus_per_node;
  const bool attention = job.colocated() || group < job.p_a;
  const double given = attention ? job.nics_a : job.nics_f;
  return (given > 0 ? given : equal) * job.cluster.nic_gbytes_s * efficiency;  // bytes a nanosecond
}

TransferCost ClusterCosts::Tables::Cost(const SideRows& rows, double rate, double row_bytes, int cut, double slow) const {
  const ClusterSpec& c = job.cluster;
  TransferCost out;
  out.nic_bytes = Round(rows.nic * row_bytes / cut);
  out.nvlink_bytes = Round(rows.nvlink * row_bytes / cut);
  const bool tiles = job.schedule == "comet";  // one kernel for all parts
  const double overhead = c.efficiency.message_overhead_us * 1e3 / (tiles ? cut : 1);
  if (out.nic_bytes > 0) {
    const double spine = rows.spine * row_bytes / cut * c.spine_oversubscription;
    out.nic_ns = Round(slow * std::max(static_cast<double>(out.nic_bytes), spine) / rate + overhead);
  }
  if (out.nvlink_bytes > 0) {
    out.nvlink_ns = Round(static_cast<double>(out.nvlink_bytes) / (c.nvlink_gbytes_s * c.efficiency.nvlink) + overhead);
  }
  out.latency_ns = Round(1e3 * (out.nic_bytes > 0 ? c.nic_latency_us : out.nvlink_bytes > 0 ? c.nvlink_latency_us : 0));
  return out;
}

StageCost ClusterCosts::Tables::Timed(const Work& work, double rows_per_expert, double launches) const {
  const ClusterSpec& c = job.cluster;
  const double slower = job.overlap_slowdown && job.overlaps() ? 1 + c.efficiency.overlap_slowdown : 1;
  const double launch = c.efficiency.op_overhead_us * 1e3 * launches;
  StageCost out;
  out.forward_ns = Round(slower * TimeNs(work, {.forward = true}, c, rows_per_expert) + launch);
  const Pass input{.forward = job.recompute, .input_gradient = true, .weight_gradient = !s.split_backward};
  out.backward_ns = Round(slower * TimeNs(work, input, c, rows_per_expert) + launch * (s.split_backward ? 1 : 2));
  if (s.split_backward) {
    out.weight_ns = Round(slower * TimeNs(work, {.weight_gradient = true}, c, rows_per_expert) + launch);
  }
  return out;
}

StageCost ClusterCosts::Tables::AttentionCost(int layer, int route) const {
  const int cut = s.parts(2 * layer);
  double copies = 0;
  for (int part = 0; part < (s.part_group.empty() ? 1 : s.parts(2 * layer + 1)); ++part) {
    for (const Holder& h : Holders(layer, s.group(2 * layer + 1, MicroBatchOf(route), part), part)) {
      copies += job.dedup == Dedup::kExpert ? h.pairs : h.visit;
    }
  }
  const double tokens = TokensOfOwner() / cut;
  StageCost out = Timed(AttentionWork(model, layer, job.seq_length, copies) * tokens, 0, 1);
  out.kept_bytes = Round(tokens * AttentionActivationBytes(job, layer));
  out.kept_for_weight_bytes = Round(tokens * AttentionWeightBytes(job, layer));
  return out;
}

StageCost ClusterCosts::Tables::FfnCost(int layer, const std::vector<Holder>& holders, size_t worker, int part) const {
  const bool own_experts = !s.part_group.empty();
  const int cut = own_experts ? 1 : s.parts(2 * layer + 1);
  const bool tiles = job.schedule == "comet";
  const double tokens = TokensOfMicroBatch() / cut;
  const bool common = !own_experts || part == 0;  // shared experts are with part 0
  Work work;
  if (common) work += CommonFfnWork(model, layer) * (tokens / static_cast<double>(holders.size()));
  double pairs = 0;
  double rows_per_expert = 0;
  double rows = 0;
  if (Routed(layer)) {
    const Holder& h = holders[worker];
    pairs = (h.pairs + ShadowedPairs(layer) / static_cast<double>(holders.size())) * tokens;
    rows = (job.dedup == Dedup::kExpert ? h.pairs : h.visit) * tokens;
    const int64_t all = !own_experts ? model.num_experts
                        : part == 0  ? model.num_experts - Round(job.attention_expert_share * static_cast<double>(model.num_experts))
                                     : Round(job.attention_expert_share * static_cast<double>(model.num_experts));
    const double experts = static_cast<double>(all) / static_cast<double>(holders.size());
    rows_per_expert = pairs * (tiles ? cut : 1) / std::max(1.0, experts + job.shadow_experts);
    work += ExpertPairWork(model) * pairs;
  }
  StageCost out = Timed(work, rows_per_expert, tiles ? 1.0 / cut : 1);
  out.kept_bytes = Round(rows * FfnRowBytes(job) + pairs * FfnPairBytes(job) +
                         (common ? tokens / static_cast<double>(holders.size()) * CommonFfnBytes(job, layer) : 0));
  out.kept_for_weight_bytes = Round(pairs * FfnPairWeightBytes(job));
  return out;
}

// Its forward also computes the gradient of its input (schedule.h), so the backward is the weight gradient.
StageCost ClusterCosts::Tables::HeadCost(int group) const {
  const double tokens = TokensOfMicroBatch() / static_cast<double>(Ranks(group).size());
  const Work work = HeadWork(model) * tokens;
  const ClusterSpec& c = job.cluster;
  const double slower = job.overlap_slowdown && job.overlaps() ? 1 + c.efficiency.overlap_slowdown : 1;
  StageCost out;
  out.forward_ns = Round(slower * TimeNs(work, {.forward = true, .input_gradient = s.backward}, c, 0));
  const int64_t weight = Round(slower * TimeNs(work, {.weight_gradient = true}, c, 0));
  (s.split_backward ? out.weight_ns : out.backward_ns) = weight;
  out.kept_bytes = out.kept_for_weight_bytes = Round(tokens * HeadActivationBytes(job));
  out.workspace_bytes = Round(tokens * HeadWorkspaceBytes(job));
  return out;
}

void ClusterCosts::Tables::FillStages() {
  stage.resize(static_cast<size_t>(s.num_routes) * stages * parts * stride);
  for (int route = 0; route < s.num_routes; ++route) {
    for (int i = 0; i < stages; ++i) {
      for (int part = 0; part < s.parts(i); ++part) {
        const int group = s.group(i, MicroBatchOf(route), part);
        StageCost* row = &stage[Row(route, i, part)];
        const bool ffn = i % 2 == 1;
        const std::vector<Holder> holders = ffn ? Holders(i / 2, group, part) : std::vector<Holder>{};
        const StageCost shared = ffn ? StageCost{} : i == stages - 1 ? HeadCost(group) : AttentionCost(i / 2, route);
        for (size_t w = 0; w < Ranks(group).size(); ++w) {
          StageCost cost = ffn ? FfnCost(i / 2, holders, w, part) : shared;
          const int c = members_of[Ranks(group)[w]];
          const double slow = slow_compute[c];
          StageCost& to = row[c - first_class[group]];
          to.forward_ns = std::max(to.forward_ns, Round(slow * static_cast<double>(cost.forward_ns)));
          to.backward_ns = std::max(to.backward_ns, Round(slow * static_cast<double>(cost.backward_ns)));
          to.weight_ns = std::max(to.weight_ns, Round(slow * static_cast<double>(cost.weight_ns)));
          to.kept_bytes = std::max(to.kept_bytes, cost.kept_bytes);
          to.kept_for_weight_bytes = std::max(to.kept_for_weight_bytes, cost.kept_for_weight_bytes);
          to.workspace_bytes = std::max(to.workspace_bytes, cost.workspace_bytes);
        }
      }
    }
  }
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
  const bool leaves = job.colocated() && !dispatch && owners != holders;
  two_phases[route * stages + boundary] = leaves;
  if (leaves) {
    FillSend(route, boundary, part, holders, owners);
    FillExchange(route, boundary, part, holders, holders, &local_owner[0], &local_holder[0]);
    FillExchange(route, boundary, part, owners, owners, &local_owner[1], &local_holder[1]);
  } else {
    FillExchange(route, boundary, part, owners, holders, &owner, &holder);
  }
}

void ClusterCosts::Tables::FillExchange(int route, int boundary, int part, int owner_group, int holder_group,
                                        std::vector<TransferCost>* owner_costs, std::vector<TransferCost>* holder_costs) {
  const bool dispatch = boundary % 2 == 0;
  const int layer = boundary / 2;
  if (!Routed(layer) && job.colocated()) return;  // a dense layer stays where it is
  const bool own_experts = !s.part_group.empty();
  const int cut = own_experts ? 1 : s.boundary_parts(boundary);
  const std::vector<Holder> holders = Holders(layer, holder_group, part);
  const bool inside = owner_group == holder_group;
  const std::vector<int> owner_nodes = NodesOfGroup(owner_group);
  const double tokens = TokensOfMicroBatch() / static_cast<double>(owner_nodes.size());
  const ExchangeRows rows = RowsOf(owner_nodes, tokens, holders, inside, job.dedup, job.cluster);

  const double row_values = 2 * static_cast<double>(model.hidden_size);
  const double pairs = Routed(layer) ? static_cast<double>(model.experts_per_token) : 0;
  double all = 0;
  for (const Holder& h : holders) all += job.dedup == Dedup::kExpert ? h.pairs : h.visit;
  const double row_bytes = row_values + (dispatch ? kRowMetadata * pairs / std::max(1.0, all) : 0);
  const EfficiencySpec& e = job.cluster.efficiency;
  // Weights of shadowed experts travel once a micro-batch, with the first part of the dispatch.
  const double shadow = dispatch && part == 0 && Routed(layer)
                            ? job.shadow_experts * 6.0 * static_cast<double>(model.hidden_size * model.expert_hidden) * cut
                            : 0;
  const auto fill = [&](int group, const std::vector<SideRows>& sides, std::vector<TransferCost>* table) {
    std::vector<SideRows> worst(stride);
    std::vector<int> used(stride, -1);
    for (size_t w = 0; w < sides.size(); ++w) {
      const int c = members_of[Ranks(group)[w]];
      used[c - first_class[group]] = c;
      Raise(&worst[c - first_class[group]], sides[w]);
    }
    for (int i = 0; i < stride && used[i] >= 0; ++i) {
      if (shadow > 0) (worst[i].nic > 0 ? worst[i].nic : worst[i].nvlink) += shadow / row_bytes;
      (*table)[Row(route, boundary, part) + i] =
          Cost(worst[i], NicRate(group, inside ? e.all_to_all : e.m2n), row_bytes, cut, slow_nic[used[i]]);
    }
  };
  fill(owner_group, rows.owners, owner_costs);
  fill(holder_group, rows.holders, holder_costs);
}

// Point to point: worker i of one group to worker i of the next.
void ClusterCosts::Tables::FillSend(int route, int boundary, int part, int from, int to) {
  const double tokens = TokensOfOwner();
  const std::vector<int> from_nodes = NodesOfGroup(from);
  const std::vector<int> to_nodes = NodesOfGroup(to);
  for (const int group : {from, to}) {
    for (size_t w = 0; w < from_nodes.size(); ++w) {
      const bool near = from_nodes[w] == to_nodes[w];
      const SideRows rows{near ? 0 : tokens, near ? tokens : 0, 0};
      const int c = members_of[Ranks(group)[w]];
      const TransferCost cost = Cost(rows, NicRate(group, job.cluster.efficiency.point_to_point),
                                     2 * static_cast<double>(model.hidden_size), s.boundary_parts(boundary), slow_nic[c]);
      (group == from ? holder : owner)[Row(route, boundary, part) + static_cast<size_t>(c - first_class[group])] = cost;
    }
  }
}

void ClusterCosts::Tables::FillTransfers() {
  const size_t size = stage.size();
  for (auto* table : {&owner, &holder, &local_owner[0], &local_owner[1], &local_holder[0], &local_holder[1]}) {
    table->resize(size);
  }
  two_phases.resize(static_cast<size_t>(s.num_routes) * stages);
  for (int route = 0; route < s.num_routes; ++route) {
    for (int boundary = 0; boundary + 1 < stages; ++boundary) {
      for (int part = 0; part < s.boundary_parts(boundary); ++part) FillBoundary(route, boundary, part);
    }
  }
}

// Parameters that each class holds, and what follows: state, gradient sums, optimizer.
void ClusterCosts::Tables::FillEnds() {
  const ClusterSpec& c = job.cluster;
  const double replicas = job.replicas();
  const double collective = c.efficiency.collective;
  for (size_t k = 0; k < classes.size(); ++k) {
    const int group = classes[k].group;
    const auto workers = static_cast<double>(Ranks(group).size());
    double shared = 0;   // replicated in the group
    double experts = 0;  // its own
    for (int i = 0; i < stages * s.num_routes; ++i) {
      const int at = i % stages;
      const int layer = at / 2;
      for (int part = 0; part < s.parts(at); ++part) {
        if (s.group(at, MicroBatchOf(i / stages), part) != group) continue;
        const bool once = part == 0;
        if (at == stages - 1) {
          shared += static_cast<double>(model.HeadParams());
        } else if (at % 2 == 0) {
          if (once) shared += static_cast<double>(model.AttentionParams(layer) + (layer == 0 ? model.EmbeddingParams() : 0));
        } else {
          const double all = Routed(layer) ? static_cast<double>(model.num_experts * model.ExpertParams()) : 0;
          if (once) shared += static_cast<double>(model.FfnParams(layer)) - all;
          const double a = job.attention_expert_share;
          const double share = s.part_group.empty() ? (once ? 1 : 0) : part == 0 ? 1 - a : a;
          if (all > 0) {
            // The largest share where workers do not divide the experts.
            const double whole = share * static_cast<double>(model.num_experts);
            experts += std::ceil(whole / workers - 1e-9) * static_cast<double>(model.ExpertParams());
          }
        }
      }
    }
    const double holders = workers * replicas * s.num_routes;
    const double expert_holders = replicas * s.num_routes;
    static_bytes.push_back(Round(StateBytes(job, shared, holders) + StateBytes(job, experts, expert_holders) +
                                 job.reserved_gb * 1e9));
    // Gradients are summed and weights gathered: over NVLink among the group's workers on a node, of what is left each
    // NIC carries its share.
    const std::vector<int> group_nodes = NodesOfGroup(group);
    const auto near = static_cast<double>(std::count(group_nodes.begin(), group_nodes.end(), group_nodes[0]));
    const double bytes = job.gradient_bytes + job.weight_bytes;
    const double nodes_of = holders / near;
    StepEndCost end;
    double ns = shared * bytes * (near - 1) / near / (c.nvlink_gbytes_s * c.efficiency.nvlink);
    ns += shared * bytes / near * (nodes_of - 1) / nodes_of / NicRate(group, collective);
    ns += experts * bytes * (expert_holders - 1) / expert_holders / NicRate(group, collective);
    end.reduce_ns = Round(ns * slow_nic[k]);
    const double updated = job.shard_optimizer ? shared / holders + experts / expert_holders : shared + experts;
    // Reads gradient and state, writes state and weight.
    const double traffic = job.gradient_bytes + 2 * job.state_bytes + job.weight_bytes;
    end.optimizer_ns = Round(updated * traffic / (c.gpu.memory_gbytes_s * c.efficiency.memory) * slow_compute[k]);
    ends.push_back(end);
  }
}

ClusterCosts::ClusterCosts(const Job& job, const Schedule& schedule) : t_(std::make_unique<Tables>(job, schedule)) {
  t_->nodes = NodesOf(job);
  t_->MakeClasses();
  t_->FillStages();
  t_->FillTransfers();
  t_->FillEnds();
}

ClusterCosts::~ClusterCosts() = default;

const std::vector<WorkerClass>& ClusterCosts::classes() const { return t_->classes; }

int64_t ClusterCosts::ComputeNs(const Op& op, int c) const {
  const StageCost& cost = t_->stage[t_->At(op, c)];
  const int64_t ns = op.kind == OpKind::kForward    ? cost.forward_ns
                     : op.kind == OpKind::kBackward ? cost.backward_ns
                                                    : cost.weight_ns;
  if (t_->job.jitter <= 0) return ns;
  // The mean of four uniform numbers, scaled to the wanted deviation: bell-shaped, never negative below 50 %.
  const auto id = static_cast<uint64_t>(OpIds(t_->s)(op));
  Rng random(Mix64(t_->job.seed ^ Mix64(id * 0x9e3779b9 + static_cast<uint64_t>(c))));
  double sum = 0;
  for (int i = 0; i < 4; ++i) sum += random.Uniform() - 0.5;
  return std::max<int64_t>(0, Round(static_cast<double>(ns) * (1 + t_->job.jitter * sum * std::sqrt(3.0))));
}

TransferCost ClusterCosts::Transfer(const Op& send, int c, bool sending) const {
  const bool dispatch = send.stage % 2 == 0;
  const bool is_owner = dispatch == (sending != IsBackward(send.kind));
  return (is_owner ? t_->owner : t_->holder)[t_->At(send, c)];
}

bool ClusterCosts::HasLocalPhase(const Op& send) const {
  return t_->two_phases[t_->s.route(send.micro_batch) * t_->stages + send.stage];
}

TransferCost ClusterCosts::LocalPhase(const Op& send, int c, bool sending) const {
  const bool backward = IsBackward(send.kind);
  return (sending == backward ? t_->local_owner : t_->local_holder)[backward][t_->At(send, c)];
}

StepEndCost ClusterCosts::StepEnd(int c) const { return t_->ends[c]; }

int64_t ClusterCosts::StaticBytes(int c) const { return t_->static_bytes[c]; }

int64_t ClusterCosts::ActivationBytes(const Op& forward, int c, bool after_backward) const {
  const StageCost& cost = t_->stage[t_->At(forward, c)];
  return after_backward ? cost.kept_for_weight_bytes : cost.kept_bytes;
}

int64_t ClusterCosts::WorkspaceBytes(const Op& compute, int c) const { return t_->stage[t_->At(compute, c)].workspace_bytes; }

int64_t ClusterCosts::MessageBytes(const Op& send, int c) const {
  const TransferCost cost = Transfer(send, c, false);
  return cost.nic_bytes + cost.nvlink_bytes;
}

int64_t ClusterCosts::MemoryLimit(int) const { return Round(t_->job.cluster.gpu.memory_gb * 1e9); }

}  // namespace disagmoe
