// Times and memory of computations.
#include "cost/cluster_tables.h"
#include "cost/memory.h"

namespace disagmoe {
namespace {

constexpr double kBf16 = 2;

// The slowest, largest member of a class counts.
void Raise(StageCost* to, const StageCost& x, double slow) {
  const auto raise = [](int64_t* a, int64_t b) { *a = std::max(*a, b); };
  raise(&to->forward_ns, RoundToInt(slow * static_cast<double>(x.forward_ns)));
  raise(&to->backward_ns, RoundToInt(slow * static_cast<double>(x.backward_ns)));
  raise(&to->weight_ns, RoundToInt(slow * static_cast<double>(x.weight_ns)));
  to->forward_scores_ns = std::max(to->forward_scores_ns, slow * x.forward_scores_ns);
  to->backward_scores_ns = std::max(to->backward_scores_ns, slow * x.backward_scores_ns);
  raise(&to->kept_bytes, x.kept_bytes);
  raise(&to->kept_for_weight_bytes, x.kept_for_weight_bytes);
  raise(&to->forward_workspace_bytes, x.forward_workspace_bytes);
  raise(&to->backward_workspace_bytes, x.backward_workspace_bytes);
}

}  // namespace

// Where exchanges hold the computation, only stages in parts run beside one.
double ClusterCosts::Tables::SlowerBy(int at, int group) const {
  const bool overlaps = !s.sync_exchange || s.parts(at) > 1;
  return overlaps ? 1 + beside[group] * job.cluster_of(group).efficiency.overlap_slowdown : 1;
}

// Of one micro-batch: the time that a group's links send, over that of the computations that may run beside it; of its
// busiest worker, as if none were slow. What is hidden cannot be more than either.
void ClusterCosts::Tables::FillBeside() {
  std::vector<double> sending(s.groups.size(), 0), computing(sending);
  const auto most = [&](int group, const auto& of_class) {
    double out = 0;
    const size_t first = first_class[group];
    for (size_t c = first; c < classes.size() && classes[c].group == group; ++c) out = std::max(out, of_class(c, c - first));
    return out;
  };
  const auto send = [&](int group, const std::vector<TransferCost>& table, size_t row) {
    sending[group] += most(group, [&](size_t c, size_t local) {
      return static_cast<double>(std::max(table[row + local].nic_ns, table[row + local].nvlink_ns)) / slow_nic[c];
    });
  };
  for (int route = 0; route < s.num_routes; ++route) {
    const int b = MicroBatchOf(route);
    for (int at = 0; at < stages; ++at) {
      for (int part = 0; part < s.parts(at) && (!s.sync_exchange || s.parts(at) > 1); ++part) {
        computing[s.group(at, b, part)] += most(s.group(at, b, part), [&](size_t c, size_t local) {
          const StageCost& cost = stage[Row(route, at, part) + local];
          return static_cast<double>(cost.forward_ns + cost.backward_ns + cost.weight_ns) / slow_compute[c];
        });
      }
      if (at + 1 == stages) continue;
      for (int part = 0; part < s.boundary_parts(at); ++part) {
        const int from = s.group(at, b, s.parts(at) > 1 ? part : 0), to = s.group(at + 1, b, s.parts(at + 1) > 1 ? part : 0);
        const bool dispatch = at % 2 == 0;
        const size_t row = Row(route, at, part);
        send(from, dispatch ? owner : holder, row);  // forward
        send(to, dispatch ? holder : owner, row);    // backward
        if (!two_phases[route * stages + at]) continue;
        send(from, local_holder[0], row);
        send(to, local_owner[1], row);
      }
    }
  }
  for (size_t g = 0; g < beside.size(); ++g) {
    beside[g] = computing[g] > 0 ? std::min(1.0, sending[g] / computing[g]) : 0;
  }
}

StageCost ClusterCosts::Tables::Timed(int group, const Work& work, const Work& again, double rows_per_expert,
                                      double launches, double slower) const {
  const ClusterSpec& c = job.cluster_of(group);
  const double launch = c.efficiency.op_overhead_us * 1e3 * launches;
  StageCost out;
  out.forward_ns = RoundToInt(slower * TimeNs(work, {.forward = true}, c, rows_per_expert) + launch);
  double backward = slower * TimeNs(work, {.input_gradient = true, .weight_gradient = !s.split_backward}, c,
                                    rows_per_expert) + launch * (s.split_backward ? 1 : 2);
  if (job.recompute) backward += slower * TimeNs(again, {.forward = true}, c, rows_per_expert) + launch;
  out.backward_ns = RoundToInt(backward);
  const Work scores{work.attention_flops, 0, 0, 0};
  out.forward_scores_ns = slower * TimeNs(scores, {.forward = true}, c, 0);
  out.backward_scores_ns = slower * TimeNs(scores, {.input_gradient = true}, c, 0);
  if (job.recompute) out.backward_scores_ns += out.forward_scores_ns;
  if (s.split_backward) {
    out.weight_ns = RoundToInt(slower * TimeNs(work, {.weight_gradient = true}, c, rows_per_expert) + launch);
  }
  return out;
}

StageCost ClusterCosts::Tables::AttentionCost(int group, int layer, int route, double slower) {
  const int cut = s.parts(2 * layer);
  double copies = 0;
  for (int part = 0; part < (OwnExperts() ? s.parts(2 * layer + 1) : 1); ++part) {
    copies += RowsOfToken(Holders(layer, s.group(2 * layer + 1, MicroBatchOf(route), part), part));
  }
  const double tokens = TokensOfOwner() / cut;
  const Work work = AttentionWork(model, layer, job.sequence(), copies) * tokens;
  StageCost out = Timed(group, work, work, 0, 1, slower);
  const double rows = copies * kBf16 * static_cast<double>(model.hidden_size);  // on their way out
  const double kept = AttentionActivationBytes(job, layer);
  out.kept_bytes = RoundToInt(tokens * kept);
  out.kept_for_weight_bytes = RoundToInt(tokens * AttentionWeightBytes(job, layer));
  out.forward_workspace_bytes = RoundToInt(tokens * rows);
  out.backward_workspace_bytes = RoundToInt(
      tokens * (rows + AttentionGradientBytes(job, layer) + AttentionActivationBytes(keeps_all, layer) - kept));
  return out;
}

// Of a holder: `equal` is its share of its group's workers, all_pairs what a token brings to all of them.
StageCost ClusterCosts::Tables::FfnCost(int group, int layer, const Holder& h, double equal, double all_pairs,
                                        int part, double slower) const {
  const int cut = OwnExperts() ? 1 : s.parts(2 * layer + 1);
  const bool tiles = job.schedule == "comet";  // one kernel for all parts
  const double tokens = TokensOfMicroBatch() / cut;
  double pairs = 0;
  double rows_per_expert = 0;
  double rows = tokens * h.visit;
  double home = equal;  // share of the tokens
  Work work;
  if (Routed(layer)) {
    // Everyone computes those that go to shadowed experts of its own tokens.
    const double shadowed = job.shadow_experts > 0 ? static_cast<double>(model.experts_per_token) - all_pairs : 0;
    pairs = (h.pairs + shadowed * equal) * tokens;
    rows = (job.dedup == Dedup::kExpert ? h.pairs : h.visit) * tokens;
    // A token's home is the worker of its first expert; colocated, its owner.
    if (!colocated && all_pairs > 0) home = h.pairs / all_pairs;
    const auto experts = static_cast<double>(std::max<int64_t>(1, h.experts + job.shadow_experts));
    rows_per_expert = pairs * (tiles ? cut : 1) / experts;
    work += ExpertPairWork(model) * pairs;
  }
  const bool common = !OwnExperts() || part == 0;  // shared experts are with part 0
  const double home_tokens = common ? home * tokens : 0;
  work += CommonFfnWork(model, layer) * home_tokens;
  if (!colocated) work += FfnRowWork(model) * rows;

  StageCost out = Timed(group, work, FfnRecomputeWork(work), rows_per_expert, tiles ? 1.0 / cut : 1, slower);
  const auto keeps = [&](const Job& j) {
    return rows * FfnRowBytes(j) + pairs * FfnPairBytes(j) + home_tokens * CommonFfnBytes(j, layer);
  };
  const double on_the_way = kBf16 * static_cast<double>(model.hidden_size) * rows;
  const double gradients = pairs * FfnPairGradientBytes(job) + home_tokens * CommonFfnGradientBytes(job, layer);
  out.kept_bytes = RoundToInt(keeps(job));
  out.kept_for_weight_bytes =
      RoundToInt(pairs * FfnPairWeightBytes(job) + home_tokens * CommonFfnWeightBytes(job, layer));
  // Forward: what the experts return, before it is summed, and the sums.
  out.forward_workspace_bytes = RoundToInt(on_the_way + pairs * kBf16 * static_cast<double>(model.hidden_size));
  out.backward_workspace_bytes =
      RoundToInt(on_the_way + gradients + std::max(0.0, keeps(keeps_all) - keeps(job)));
  return out;
}

// Its forward also computes the gradient of its input (schedule.h), so the backward is the weight gradient. Of the
// forward's second product the weight gradient stands for the time: HeadWork has the memory traffic of both.
StageCost ClusterCosts::Tables::HeadCost(int group, double slower) const {
  const double tokens = TokensOfMicroBatch() / static_cast<double>(Ranks(group).size());
  const Work work = HeadWork(model) * tokens;
  const ClusterSpec& c = job.cluster_of(group);
  const double launch = c.efficiency.op_overhead_us * 1e3;
  StageCost out;
  out.forward_ns = RoundToInt(slower * TimeNs(work, {.forward = true, .weight_gradient = s.backward}, c, 0) + launch);
  const int64_t weight = RoundToInt(slower * TimeNs(work, {.weight_gradient = true}, c, 0) + launch);
  (s.split_backward ? out.weight_ns : out.backward_ns) = weight;
  out.kept_bytes = out.kept_for_weight_bytes = RoundToInt(tokens * HeadActivationBytes(job));
  out.forward_workspace_bytes = RoundToInt(tokens * HeadWorkspaceBytes(job));
  return out;
}

void ClusterCosts::Tables::FillStages() {
  stage.assign(static_cast<size_t>(s.num_routes) * stages * parts * stride, {});
  for (int route = 0; route < s.num_routes; ++route) {
    for (int i = 0; i < stages; ++i) {
      const bool ffn = i % 2 == 1;
      for (int part = 0; part < s.parts(i); ++part) {
        const int group = s.group(i, MicroBatchOf(route), part);
        StageCost* row = &stage[Row(route, i, part)];
        const double slower = SlowerBy(i, group);
        const StageCost same = ffn               ? StageCost{}
                               : i == stages - 1 ? HeadCost(group, slower)
                                                 : AttentionCost(group, i / 2, route, slower);
        const std::vector<Holder>* holders = ffn ? &Holders(i / 2, group, part) : nullptr;
        double pairs = 0;
        if (ffn) {
          for (const Holder& h : *holders) pairs += h.pairs;
        }
        const size_t workers = Ranks(group).size();
        for (size_t w = 0; w < workers; ++w) {
          Raise(&row[LocalClass(group, w)],
                ffn ? FfnCost(group, i / 2, (*holders)[w], 1 / static_cast<double>(workers), pairs, part, slower)
                    : same,
                slow_compute[members_of[Ranks(group)[w]]]);
        }
      }
    }
  }
}

}  // namespace disagmoe
