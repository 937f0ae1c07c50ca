#include "plan/sizing.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "cost/memory.h"
#include "cost/traffic.h"
#include "cost/work.h"

namespace disagmoe {
namespace {

constexpr double kBf16 = 2;
constexpr double kRowMetadata = 6;
constexpr double kManyRows = 1e18;
constexpr double kMessages = 2;  // over each boundary and direction of a NIC: forward and backward

bool Routed(const ModelShape& m, int64_t layer) { return m.num_experts > 0 && !m.dense[layer]; }

double Passes(const Work& work, const ClusterSpec& c) {
  return TimeNs(work, {.forward = true}, c, kManyRows) +
         TimeNs(work, {.input_gradient = true, .weight_gradient = true}, c, kManyRows);
}

Job Calm(Job job) {
  job.stragglers.clear();
  job.jitter = job.routing_skew = 0;
  job.expert_load.clear();
  job.recompute = false;
  return job;
}

// Layers g, g + p, ... of group g.
int LayersOf(int layers, int p, int g) { return (layers - g + p - 1) / p; }

}  // namespace

double SizingTimes::worst() const { return std::max({attention, ffn, nic_a, nic_f}); }

double SizingTimes::second() const {
  std::array<double, 4> t{attention, ffn, nic_a, nic_f};
  std::sort(t.begin(), t.end());
  return t[2];
}

double HeldActivations(int layers, int p_a, int p_f, int round, int slope, bool ffn) {
  const int p = std::max(p_a, p_f);
  const int chunks = (layers + p - 1) / p;
  return (chunks - 1) * static_cast<double>(round) + slope * (2 * p - 1 - (ffn ? 1 : 0)) + 1;
}

SizingModel::SizingModel(const Job& base) : base_(Calm(base)), tokens_(base.seq_length) {
  const ModelShape& m = base_.model;
  if (m.num_experts <= 0) {
    throw Error({"a model without experts", "model " + m.name, "num_experts " + std::to_string(m.num_experts),
                 "experts, to put on a pool of their own", ""});
  }
  const ClusterSpec& a = base_.cluster;
  const ClusterSpec& f = base_.cluster;
  Job recompute = base_;
  recompute.recompute = true;
  const auto h = static_cast<double>(m.hidden_size);
  for (int64_t l = 0; l < m.num_layers; ++l) {
    const Work work = AttentionWork(m, l, tokens_, 0);
    const double plain = Passes(work, a);
    attention_.push_back({plain, plain + TimeNs(work, {.forward = true}, a, kManyRows)});
    const Work common = CommonFfnWork(m, l);
    const double passes = m.shared_hidden > 0 || !Routed(m, l) ? Passes(common, f) : 0;
    common_.push_back({passes, passes + (passes > 0 ? TimeNs(FfnRecomputeWork(common), {.forward = true}, f, kManyRows) : 0)});
    attention_params_.push_back(static_cast<double>(m.AttentionParams(l)));
    routed_.push_back(Routed(m, l));
    const double experts = routed_[l] ? static_cast<double>(m.num_experts * m.ExpertParams()) : 0;
    common_params_.push_back(static_cast<double>(m.FfnParams(l)) - experts);
    attention_kept_.push_back(AttentionActivationBytes(base_, l));
    attention_kept_recompute_.push_back(AttentionActivationBytes(recompute, l));
  }
  const Work copied = AttentionWork(m, m.num_layers - 1, tokens_, 1);
  Work none = AttentionWork(m, m.num_layers - 1, tokens_, 0);
  const Work copy{0, 0, 0, copied.memory_bytes - none.memory_bytes};
  copy_ = {Passes(copy, a), Passes(copy, a) + TimeNs(copy, {.forward = true}, a, kManyRows)};
  const auto with_again = [&](const Work& work) {
    const double plain = Passes(work, f);
    return Side{plain, plain + TimeNs(FfnRecomputeWork(work), {.forward = true}, f, kManyRows)};
  };
  pair_ = with_again(ExpertPairWork(m));
  row_ = with_again(FfnRowWork(m));
  // A grouped product of r rows takes as long as one of r + half_rows at full speed.
  Work load{0, 0, ExpertPairWork(m).expert_flops * f.efficiency.grouped_gemm_half_rows, 0};
  load_ = with_again(load);
  launch_a_ = 3 * a.efficiency.op_overhead_us * 1e3;
  launch_f_ = 3 * f.efficiency.op_overhead_us * 1e3;
  const ClusterSpec& head = base_.head_on_attention ? a : f;
  head_ns_ = TimeNs(HeadWork(m), {.forward = true, .weight_gradient = true}, head, 0) +
             TimeNs(HeadWork(m), {.weight_gradient = true}, head, 0);

  const Routing routing = RoutingOf(RankRouting(base_), base_, 0);
  const int most = static_cast<int>(m.num_experts);
  rows_.assign(most + 1, 0);
  share_.assign(most + 1, 0);
  for (int n = 1; n <= most; ++n) {
    std::vector<int> nodes(n);
    for (int w = 0; w < n; ++w) nodes[w] = w / f.gpus_per_node;
    const std::vector<Holder> holders = HoldersOf(routing, 0, m.num_experts, nodes);
    int last_node = -1;
    for (const Holder& x : holders) {
      const bool first = x.node != last_node;
      last_node = x.node;
      rows_[n] += base_.dedup == Dedup::kExpert ? x.pairs : base_.dedup == Dedup::kWorker ? x.visit : first ? x.node_visit : 0;
    }
    share_[n] = static_cast<double>((most + n - 1) / n) / most;
  }
  const double bytes = kBf16 * h + kRowMetadata;
  row_ns_a_ = bytes / (a.nic_gbytes_s * a.efficiency.m2n);
  row_ns_f_ = bytes / (f.nic_gbytes_s * f.efficiency.m2n);
  limit_a_ = a.gpu.memory_gb * 1e9;
  limit_f_ = f.gpu.memory_gb * 1e9;
}

double SizingModel::GroupSum(const std::vector<Side>& layers, int p, bool recompute) const {
  double most = 0;
  const int count = static_cast<int>(layers.size());
  for (int g = 0; g < std::min(p, count); ++g) {
    double sum = 0;
    for (int l = g; l < count; l += p) sum += recompute ? layers[l].recompute : layers[l].plain;
    most = std::max(most, sum);
  }
  return most;
}

double SizingModel::AttentionNs(const Pools& x) const {
  const int layers = static_cast<int>(attention_.size());
  const auto tokens = static_cast<double>(tokens_);
  const double launches = launch_a_ * LayersOf(layers, x.p_a, 0) / x.sequences;
  double ns = tokens * GroupSum(attention_, x.p_a, x.recompute) + launches;
  if (x.head_on_attention) {
    const int g = layers % x.p_a;
    double own = tokens * head_ns_;
    for (int l = g; l < layers; l += x.p_a) own += tokens * (x.recompute ? attention_[l].recompute : attention_[l].plain);
    ns = std::max(ns, own + launches);
  }
  return ns / (static_cast<double>(x.replicas) * x.m);
}

double SizingModel::CopiesNs(const Pools& x) const {
  const int layers = LayersOf(static_cast<int>(attention_.size()), x.p_a, 0);
  return static_cast<double>(tokens_) * layers * (x.recompute ? copy_.recompute : copy_.plain) /
         (static_cast<double>(x.replicas) * x.m);
}

double SizingModel::ExpertsNs(int p_f, int n, bool recompute) const {
  const ModelShape& m = base_.model;
  const int layers = LayersOf(static_cast<int>(m.num_layers), p_f, 0);
  const double k = static_cast<double>(m.experts_per_token);
  const double pair = recompute ? pair_.recompute : pair_.plain;
  const double row = recompute ? row_.recompute : row_.plain;
  const double routed = k * share_[n] * pair + rows_[n] * share_[n] * row;
  return static_cast<double>(tokens_) * (layers * routed + GroupSum(common_, p_f, recompute) * share_[n]);
}

double SizingModel::LoadNs(int p_f, int n, bool recompute) const {
  const ModelShape& m = base_.model;
  const int layers = LayersOf(static_cast<int>(m.num_layers), p_f, 0);
  const double experts = share_[n] * static_cast<double>(m.num_experts);
  return layers * (experts * (recompute ? load_.recompute : load_.plain) + launch_f_);
}

SizingModel::Far SizingModel::FarOf(const Pools& x) const {
  const ClusterSpec& c = base_.cluster;
  const int64_t a = int64_t{x.p_a} * x.m, f = int64_t{x.p_f} * x.n;
  const double node = c.gpus_per_node;
  const auto layers = static_cast<int>(base_.model.num_layers);
  if (a + f <= c.gpus_per_node) return {0, 0};
  // Positions on a line of the replica's GPUs, from 0 to 1; a worker's node is a piece of it.
  const double all = static_cast<double>(a + f);
  const double cut = x.mixed ? 0 : static_cast<double>(a) / all;
  const auto span = [&](bool ffn, int g) {
    const double p = ffn ? x.p_f : x.p_a;
    const double from = x.mixed ? 0 : ffn ? cut : 0, to = x.mixed ? 1 : ffn ? 1 : cut;
    return std::pair<double, double>{from + (to - from) * g / p, from + (to - from) * (g + 1) / p};
  };
  const auto near = [&](std::pair<double, double> me, std::pair<double, double> others) {
    const double middle = (me.first + me.second) / 2;
    const double begin = std::floor(middle * all / node) * node / all;
    const double end = begin + node / all;
    const double both = std::min(end, others.second) - std::max(begin, others.first);
    return std::clamp(both / (others.second - others.first), 0.0, 1.0);
  };
  double near_a = 0, near_f = 0;
  for (int l = 0; l < layers; ++l) {
    const auto attention = span(false, l % x.p_a), ffn = span(true, l % x.p_f), next = span(false, (l + 1) % x.p_a);
    near_a += near(attention, ffn) + near(next, ffn);
    near_f += near(ffn, attention) + near(ffn, next);
  }
  return {1 - near_a / (2 * layers), 1 - near_f / (2 * layers)};
}

SizingTimes SizingModel::Times(const Pools& x) const {
  const ClusterSpec& a = base_.cluster;
  const ClusterSpec& f = base_.cluster;
  const double r = x.replicas;
  SizingTimes t;
  t.attention = AttentionNs(x) + rows_[x.n] * CopiesNs(x);
  t.ffn = ExpertsNs(x.p_f, x.n, x.recompute) / r + LoadNs(x.p_f, x.n, x.recompute) / (r * x.m * x.sequences);
  if (!x.head_on_attention) {
    const auto layers = static_cast<int>(base_.model.num_layers);
    // Its own group, which may be the fullest or have a layer less.
    const double own = LayersOf(layers, x.p_f, (layers - 1) % x.p_f);
    const double fullest = LayersOf(layers, x.p_f, 0);
    t.ffn = std::max(t.ffn, t.ffn * own / fullest + static_cast<double>(tokens_) * head_ns_ / (r * x.n));
  }
  const Far far = FarOf(x);
  const double all = static_cast<double>(x.p_a * x.m + x.p_f * x.n);
  const auto nics = [&](const ClusterSpec& c, int of_node, double workers) {
    const double equal = static_cast<double>(c.nics_per_node) / c.gpus_per_node;
    return x.mixed && of_node > 0 ? of_node / std::max(1.0, c.gpus_per_node * workers / all) : equal;
  };
  const double nics_a = base_.nics_a > 0 ? base_.nics_a : nics(a, x.node_nics_a, static_cast<double>(x.p_a) * x.m);
  const double nics_f = base_.nics_f > 0 ? base_.nics_f : nics(f, x.node_nics_f, static_cast<double>(x.p_f) * x.n);
  const auto layers = static_cast<int>(base_.model.num_layers);
  const double rows = kMessages * static_cast<double>(tokens_) * rows_[x.n];
  const auto link = [&](double rows_each, double away, double row_ns, double nics, const ClusterSpec& c) {
    const double nvlink = row_ns * c.nic_gbytes_s * c.efficiency.m2n / (c.nvlink_gbytes_s * c.efficiency.nvlink);
    return rows_each * std::max(away * row_ns / nics, (1 - away) * nvlink);
  };
  t.nic_a = link(rows * LayersOf(layers, x.p_a, 0) / (r * x.m), far.attention, row_ns_a_, nics_a, a);
  t.nic_f = link(rows * share_[x.n] * LayersOf(layers, x.p_f, 0) / r, far.ffn, row_ns_f_, nics_f, f);
  return t;
}

double SizingModel::AttentionBytes(const Pools& x, double held) const {
  const ModelShape& m = base_.model;
  const auto layers = static_cast<int>(m.num_layers);
  double most = 0;
  for (int g = 0; g < std::min(x.p_a, layers); ++g) {
    double params = g == 0 ? static_cast<double>(m.EmbeddingParams()) : 0;
    if (x.head_on_attention && g == layers % x.p_a) params += static_cast<double>(m.HeadParams());
    for (int l = g; l < layers; l += x.p_a) params += attention_params_[l];
    most = std::max(most, params);
  }
  const double holders = base_.shard_optimizer ? static_cast<double>(x.replicas) * x.m : 1;
  const std::vector<double>& kept = x.recompute ? attention_kept_recompute_ : attention_kept_;
  const double mean = std::accumulate(kept.begin(), kept.end(), 0.0) / layers;
  return most * (base_.weight_bytes + base_.gradient_bytes + base_.state_bytes / holders) + base_.reserved_gb * 1e9 +
         held * mean * static_cast<double>(tokens_) * x.sequences;
}

double SizingModel::FfnBytes(const Pools& x, double held) const {
  const ModelShape& m = base_.model;
  const auto layers = static_cast<int>(m.num_layers);
  Job job = base_;
  job.recompute = x.recompute;
  double experts = 0, common = 0;
  for (int g = 0; g < std::min(x.p_f, layers); ++g) {
    double own = 0, shared = 0;
    for (int l = g; l < layers; l += x.p_f) {
      if (routed_[l]) own += share_[x.n] * static_cast<double>(m.num_experts * m.ExpertParams());
      shared += common_params_[l];
    }
    if (!x.head_on_attention && g == (layers - 1) % x.p_f) shared += static_cast<double>(m.HeadParams());
    if (own + shared > experts + common) experts = own, common = shared;
  }
  const double shard = base_.shard_optimizer ? x.replicas : 1;
  const double shard_common = base_.shard_optimizer ? static_cast<double>(x.replicas) * x.n : 1;
  const double each = base_.weight_bytes + base_.gradient_bytes;
  const double k = static_cast<double>(m.experts_per_token);
  const double token = share_[x.n] * (rows_[x.n] * FfnRowBytes(job) + k * FfnPairBytes(job) +
                                      CommonFfnBytes(job, m.num_layers - 1));
  return experts * (each + base_.state_bytes / shard) + common * (each + base_.state_bytes / shard_common) +
         base_.reserved_gb * 1e9 + held * token * static_cast<double>(tokens_) * x.m * x.sequences;
}

}  // namespace disagmoe
