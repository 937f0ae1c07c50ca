#include "plan/bounds.h"

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "cost/cluster_costs.h"
#include "schedule/ready.h"

namespace disagmoe {
namespace {

bool IsDual(const Job& job) { return job.schedule == "dualpipe" || job.schedule == "dualpipe-v"; }

class Bounds {
 public:
  // `few`: the job with as few micro-batches as its generator takes; costs do not depend on how many there are.
  Bounds(const Job& few, const Schedule& s) : job_(few), s_(s), costs_(few, s) {
    for (size_t c = 0; c < costs_.classes().size(); ++c) {
      const auto g = static_cast<size_t>(costs_.classes()[c].group);
      if (g >= first_class_.size()) first_class_.resize(g + 1, static_cast<int>(c));
    }
  }

  double StepNs(double scale) const;
  void BoundMemory(const Job& job, JobBounds* out) const;

 private:
  // Of one class, over the micro-batches of `few`.
  struct Load {
    double forward_backward = 0, weights = 0, sent = 0, received = 0;
    double longest_hold = 0;
  };
  Load LoadOf(int c) const;
  double WayNs(int group) const;
  double SlowestNs(const Op& op) const;
  double MessageNs(const Op& send, int without = -1) const;
  int64_t KeptBytes(int group, bool ffn) const;

  const Job& job_;
  const Schedule& s_;
  const ClusterCosts costs_;
  std::vector<int> first_class_;  // by group
};

Bounds::Load Bounds::LoadOf(int c) const {
  Load load;
  for (const Op& op : s_.groups[costs_.classes()[c].group].compute) {
    (op.kind == OpKind::kWeight ? load.weights : load.forward_backward) += static_cast<double>(costs_.ComputeNs(op, c));
    const TransferRange sends = SendsAfter(s_, op);
    for (int i = 0; i < sends.count; ++i) {
      const TransferCost t = costs_.HasLocalPhase(sends[i]) ? costs_.LocalPhase(sends[i], c, true)
                                                             : costs_.Transfer(sends[i], c, true);
      load.sent += static_cast<double>(t.nic_ns);
      // An exchange holds the worker until it has ended.
      if (!s_.sync_exchange || s_.max_parts() > 1) continue;
      const auto hold = static_cast<double>(std::max(t.nic_ns, t.nvlink_ns) + t.latency_ns);
      load.forward_backward += hold;
      load.longest_hold = std::max(load.longest_hold, hold);
    }
    const TransferRange receives = ReceivesFor(s_, op);
    for (int i = 0; i < receives.count; ++i) {
      Op send = receives[i];
      send.kind = op.kind == OpKind::kForward ? OpKind::kSendForward : OpKind::kSendBackward;
      load.received += static_cast<double>(costs_.Transfer(send, c, false).nic_ns);
    }
  }
  return load;
}

double Bounds::SlowestNs(const Op& op) const {
  const int g = s_.group(op.stage, op.micro_batch, op.part);
  int64_t most = 0;
  for (size_t c = first_class_[g]; c < costs_.classes().size() && costs_.classes()[c].group == g; ++c) {
    most = std::max(most, costs_.ComputeNs(op, static_cast<int>(c)));
  }
  return static_cast<double>(most);
}

// From posted to arrived, at least; without an exchange inside group `without`.
double Bounds::MessageNs(const Op& send, int without) const {
  const int g = SenderOf(s_, send);
  double ns = 0;
  for (const bool local : {true, false}) {
    if (local && (g == without || !costs_.HasLocalPhase(send))) continue;
    const int c = first_class_[g];
    const TransferCost t = local ? costs_.LocalPhase(send, c, true) : costs_.Transfer(send, c, true);
    ns += static_cast<double>(std::max(t.nic_ns, t.nvlink_ns) + t.latency_ns);
  }
  return ns;
}

// Forward from the first stage to the lowest of a group, and back: nothing of that happens in the group, and all of it
// before its first operation or after its last. (Of stages in parts, the way of one part. An exchange in the group
// after its last operation is not counted.)
double Bounds::WayNs(int group) const {
  if (s_.num_routes > 1) return 0;
  double ns = 0;
  for (int stage = 0; s_.group(stage, 0) != group; ++stage) {
    ns += SlowestNs({OpKind::kForward, stage, 0}) + MessageNs({OpKind::kSendForward, stage, 0});
    ns += SlowestNs({OpKind::kBackward, stage, 0}) + MessageNs({OpKind::kSendBackward, stage, 0}, group);
  }
  return ns;
}

double Bounds::StepNs(double scale) const {
  double most = 0;
  const auto end_of = [&](int c) {
    const StepEndCost end = costs_.StepEnd(c);
    return static_cast<double>(end.reduce_ns + end.optimizer_ns);
  };
  const double first_end = end_of(first_class_[s_.group(0, 0)]);
  for (size_t k = 0; k < costs_.classes().size(); ++k) {
    const int c = static_cast<int>(k);
    const Load load = LoadOf(c);
    // The last exchange and the last send may lie beside the end of the step.
    const double computes = scale * (load.forward_backward + load.weights) - load.longest_hold;
    const double through = scale * load.forward_backward - load.longest_hold + WayNs(costs_.classes()[k].group);
    most = std::max({most, std::max(computes, scale * load.received) + end_of(c), scale * load.sent,
                     through + first_end});
  }
  return most;
}

// Of the stage of a group that keeps least: a dense layer keeps less than one of experts, or more.
int64_t Bounds::KeptBytes(int group, bool ffn) const {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int stage = ffn; stage + 1 < s_.num_stages(); stage += 2) {
    if (s_.group(stage, 0) != group) continue;
    int64_t kept = 0;
    for (int part = 0; part < s_.parts(stage); ++part) {
      kept += costs_.ActivationBytes({OpKind::kForward, stage, 0, part}, first_class_[group], false);
    }
    least = std::min(least, kept);
  }
  return least;
}

void Bounds::BoundMemory(const Job& job, JobBounds* out) const {
  const auto holds = [&](int c, int64_t bytes) {
    out->peak_bytes = std::max(out->peak_bytes, bytes);
    out->may_fit = out->may_fit && bytes <= costs_.MemoryLimit(c);
  };
  for (size_t c = 0; c < costs_.classes().size(); ++c) {
    holds(static_cast<int>(c), costs_.StaticBytes(static_cast<int>(c)));
  }
  const std::set<std::string> rings{"megatron-1f1b", "megatron-overlap", "tutel", "comet", "fastermoe"};
  const bool two_pools = (job.schedule == "af-pipe" || job.schedule == "af-pipe-zb") && job.p_a == job.p_f;
  if (!two_pools && (!rings.contains(job.schedule) || job.p_a == 1)) return;
  const int64_t layers = job.model.num_layers;
  const int64_t positions = two_pools ? 2 * job.p_a : job.p_a;
  const int64_t chunks = two_pools ? (2 * layers + positions - 1) / positions : job.virtual_stages;
  const int64_t micro_batches = job.micro_batches();
  const int64_t round = job.round > 0 ? job.round : std::min(positions, micro_batches);
  for (int r = 0; r < (two_pools ? 2 : 1); ++r) {
    const int group = r == 0 ? 0 : job.p_a;
    const int64_t held = std::min(micro_batches * chunks, (chunks - 1) * round + job.slope * (positions - 1 - r));
    const int64_t kept = two_pools ? KeptBytes(group, r == 1)
                                   : (KeptBytes(0, false) + KeptBytes(0, true)) * (layers / (positions * chunks));
    holds(first_class_[group], costs_.StaticBytes(first_class_[group]) + held * kept);
  }
}

}  // namespace

std::optional<JobBounds> BoundsOf(const Job& job) {
  const int64_t micro_batches = job.micro_batches();
  const int64_t few = IsDual(job) ? 2 * job.p_a : 1;
  if (micro_batches < few) return std::nullopt;
  Job one = job;
  one.global_batch = few * one.replicas() * one.m * one.sequences;
  one.round = 0;
  one.jitter = 0;
  GenerateOptions options;
  options.num_micro_batches = static_cast<int>(few);
  options.parts = one.schedule == "hetermoe" && one.attention_expert_share > 0 ? 2 : one.parts;
  const Schedule s = Generate(one.schedule, PlacementOf(one), options);
  const Bounds bounds(one, s);
  JobBounds out{.step_ns = bounds.StepNs(static_cast<double>(micro_batches) / static_cast<double>(few))};
  bounds.BoundMemory(job, &out);
  return out;
}

}  // namespace disagmoe
