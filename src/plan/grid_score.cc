// What a candidate takes, without simulating it.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cost/memory.h"
#include "plan/grid.h"

namespace disagmoe {
namespace {

// What unequal pools leave idle: found by simulating many.
constexpr double kUnequal = 1.15;

// What is hidden of an exchange: all of it behind all computation, or behind the experts' alone, or nothing.
enum class Hidden : uint8_t { kAll, kExperts, kNothing };
Hidden HiddenBy(const std::string& schedule) {
  if (schedule == "megatron-1f1b") return Hidden::kNothing;
  if (schedule == "tutel" || schedule == "comet" || schedule == "fastermoe") return Hidden::kExperts;
  return Hidden::kAll;
}

}  // namespace

// Dispatch and combine, forward and backward, of all layers, over NICs and NVLink.
double Grid::ExchangeNs(const Pools& x) const {
  const ClusterSpec& c = request_.base.cluster;
  const EfficiencySpec& e = c.efficiency;
  const double node = std::min<double>(x.m, c.gpus_per_node);
  const double nics =
      request_.base.nics_a > 0 ? request_.base.nics_a : static_cast<double>(c.nics_per_node) / c.gpus_per_node;
  const double nic = model_.RowNs(false) * e.m2n / (e.all_to_all * nics);
  const double nvlink = model_.RowNs(false) * e.m2n * c.nic_gbytes_s / (c.nvlink_gbytes_s * e.nvlink);
  const double rows = static_cast<double>(request_.base.seq_length) * layers_ / x.p_a * model_.Rows(x.m) /
                      (static_cast<double>(x.replicas) * x.m);
  return 4 * rows * std::max((1 - node / x.m) * nic, (node - 1) / x.m * nvlink);
}

// Sums of gradients and weights back, of the pool that takes longer.
double Grid::EndNs(const Pools& x) const {
  const Job& base = request_.base;
  const ClusterSpec& c = base.cluster;
  const ModelShape& m = base.model;
  const double bytes = base.gradient_bytes + (base.shard_optimizer ? base.weight_bytes : base.gradient_bytes);
  const double nic = c.nic_gbytes_s * c.efficiency.collective * c.nics_per_node / c.gpus_per_node;
  const auto sum = [&](double params, double holders, double near) {
    near = std::clamp(near, 1.0, holders);
    return params * bytes / near * (holders - near) / holders / nic;
  };
  const double workers = static_cast<double>(x.p_a * x.m + (colocated_ ? 0 : x.p_f * x.n));
  const double of_node = std::max(1.0, c.gpus_per_node / workers);
  const double shared =
      static_cast<double>(m.AttentionParams(layers_ - 1)) * std::ceil(layers_ / static_cast<double>(x.p_a)) +
      static_cast<double>(m.EmbeddingParams());
  const double experts = static_cast<double>(m.ExpertParams()) * std::ceil(m.num_experts / static_cast<double>(x.n)) *
                         std::ceil(layers_ / static_cast<double>(x.p_f));
  const double attention_ns =
      sum(shared, static_cast<double>(x.m) * x.replicas, std::min<double>(x.m, c.gpus_per_node) * of_node);
  const double experts_ns = sum(experts, x.replicas, of_node);
  return colocated_ ? attention_ns + experts_ns : std::max(attention_ns, experts_ns);
}

void Grid::Score(Candidate* c) const {
  const Job& base = request_.base;
  const Pools& x = c->pools;
  const SizingTimes t = model_.Times(x);
  const double batch = static_cast<double>(c->micro_batches) * x.replicas * x.m * x.sequences;
  double ns = 0, held_a = 0, held_f = 0, held_last = 0;
  if (colocated_) {
    const double compute = t.attention + t.ffn;
    const double exchange = ExchangeNs(x);
    const Hidden hidden = HiddenBy(base.schedule);
    ns = hidden == Hidden::kNothing ? compute + exchange
         : hidden == Hidden::kAll   ? std::max(compute, exchange)
                                    : t.attention + std::max(t.ffn, exchange);
    const int chunks = dual_ ? 2 : c->virtual_stages;
    ns *= 1 + (x.p_a - 1) / (static_cast<double>(c->micro_batches) * chunks);
    const double of_chunk = static_cast<double>(layers_) / (static_cast<double>(x.p_a) * chunks);
    // Where some chunks have a layer more, about half of what the others would wait for them is left as waiting.
    ns *= 1 + 0.5 * (std::ceil(of_chunk) / of_chunk - 1);
    int64_t round = std::min<int64_t>(x.p_a, c->micro_batches);
    while (c->micro_batches % round != 0) ++round;
    held_a = x.p_a == 1 ? layers_ : of_chunk * ((chunks - 1) * static_cast<double>(round) + 2 * (x.p_a - 1) + 1);
    held_last = x.p_a == 1 ? layers_ : of_chunk * ((chunks - 1) * static_cast<double>(round) + 1);
  } else {
    const int p = std::max(x.p_a, x.p_f);
    const int chunks = (layers_ + p - 1) / p;
    ns = t.worst() * (1 + (2 * p - 1) / (static_cast<double>(c->micro_batches) * chunks));
    if (x.p_a != x.p_f) ns *= kUnequal;
    const int64_t round = c->round > 0 ? c->round : c->micro_batches;
    ns *= std::max(1.0, 2.0 * p / static_cast<double>(round) * (base.schedule == "hetermoe" ? 0 : 1));
    // schedule.md section 2: transfers as long as computations want rounds of two rings; one ring costs 16 %.
    const double compute = std::max(t.attention, t.ffn), transfer = std::max(t.nic_a, t.nic_f);
    const double wanted = 1 + std::min(1.0, transfer / compute);
    ns *= 1 + 0.16 * std::max(0.0, wanted - static_cast<double>(round) / (2 * p));
    held_a = HeldActivations(layers_, x.p_a, x.p_f, static_cast<int>(round), c->slope, false);
    held_f = HeldActivations(layers_, x.p_a, x.p_f, static_cast<int>(round), c->slope, true);
    const double all_a = static_cast<double>(c->micro_batches) * ((layers_ + x.p_a - 1) / x.p_a);
    const double all_f = static_cast<double>(c->micro_batches) * ((layers_ + x.p_f - 1) / x.p_f);
    held_a = std::min(held_a, all_a), held_f = std::min(held_f, all_f);
  }
  // Logits, and the head's activations until its backward.
  const double logits =
      (HeadWorkspaceBytes(base) + HeadActivationBytes(base)) * static_cast<double>(base.seq_length) * x.sequences;
  if (colocated_) {
    // The first group holds most activations, the last has the head.
    const auto bytes = [&](double held) {
      return model_.AttentionBytes(x, held) + model_.FfnBytes(x, held) - base.reserved_gb * 1e9;
    };
    c->full = std::max(bytes(held_a), bytes(held_last) + logits) / model_.attention_limit();
  } else {
    const double a = model_.AttentionBytes(x, held_a) + (x.head_on_attention ? logits : 0);
    const double f = model_.FfnBytes(x, held_f) + (x.head_on_attention ? 0 : logits * x.m / x.n);
    c->full = std::max(a / model_.attention_limit(), f / model_.ffn_limit());
  }
  c->score = ns + EndNs(x) / batch;
}

double Grid::ScoreFloor(const Pools& shape) const {
  Pools x = shape;
  x.sequences = 1;
  double least = std::numeric_limits<double>::max();
  for (const bool head : choices_.head) {
    x.head_on_attention = head;
    const double attention = model_.AttentionNs(x);
    const double ffn = model_.ExpertsNs(x.p_f, x.n, false) / x.replicas;
    least = std::min(least, colocated_ ? attention + ffn : std::max(attention, ffn));
  }
  return least;
}

// With NICs, and no launches or loads to speak of.
double Grid::Quickest(const Pools& shape) const {
  if (colocated_) return 0;
  Pools x = shape;
  x.sequences = kMostSequences;
  double least = std::numeric_limits<double>::max();
  for (const bool mixed : choices_.mixed) {
    for (const bool head : choices_.head) {
      x.mixed = mixed, x.head_on_attention = head;
      least = std::min(least, model_.Times(x).worst());
    }
  }
  return least;
}

}  // namespace disagmoe
