#include "plan/sizing.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <string>

#include "base/error.h"
#include "cost/memory.h"
#include "cost/traffic.h"
#include "cost/work.h"

namespace disagmoe {
namespace {

constexpr double kBf16 = 2;
constexpr double kIdBytes = 6;      // of each expert of a row that is dispatched: its number, its gate
constexpr double kManyRows = 1e18;  // grouped products at full speed
constexpr Pass kForward{.forward = true};
constexpr Pass kBackward{.input_gradient = true, .weight_gradient = true};

bool Routed(const ModelShape& m, int64_t layer) { return !m.dense[layer]; }

Job Calm(Job job) {
  job.stragglers.clear();
  job.jitter = job.routing_skew = 0;
  job.expert_loads.clear();
  job.expert_counts.clear();
  job.recompute = false;
  return job;
}

// Launches of a stage: forward once, backward twice, and the forward again.
double Launches(bool recompute) { return recompute ? 4 : 3; }

double ByteNs(const ClusterSpec& c, double far, double nics) {
  return std::max(far / (nics * c.nic_gbytes_s * c.efficiency.m2n),
                  (1 - far) / (c.nvlink_gbytes_s * c.efficiency.nvlink));
}

// Adds an item unless another is at least as large in all; drops those that it makes superfluous.
template <typename T, typename NoLess>
void AddLargest(std::vector<T>* all, const T& x, const NoLess& no_less) {
  for (const T& other : *all) {
    if (no_less(other, x)) return;
  }
  std::erase_if(*all, [&](const T& other) { return no_less(x, other); });
  all->push_back(x);
}

}  // namespace

double SizingTimes::worst() const { return std::max({attention, ffn, nic_a, nic_f}); }

double SizingTimes::second() const {
  std::array<double, 4> t{attention, ffn, nic_a, nic_f};
  std::sort(t.begin(), t.end());
  return t[2];
}

double HeldActivations(int layers, int p_a, int p_f, int round, int slope, bool ffn) {
  const int p = std::max(p_a, p_f), own = ffn ? p_f : p_a;
  const int chunks = (layers + p - 1) / p;
  // A group of the fewer has p / own places of the ring, every 2 own-th: p - own further on, on average.
  const double of_place = (chunks - 1) * static_cast<double>(round) + slope * (p + own - 1 - (ffn ? 1 : 0)) + 1;
  return of_place * p / own;
}

// Written by whoever asks first; a value that is not there yet is made again, the same.
struct SizingModel::Seen {
  static constexpr int kNodes = 64;
  explicit Seen(int layers) : groups(std::min(layers, 32)), shares(size_t{2} * groups * groups * kNodes) {
    for (auto& x : shares) x.store(kUnknown, std::memory_order_relaxed);
  }
  static constexpr double kUnknown = -1;
  int groups;
  std::vector<std::atomic<double>> shares;
};

SizingModel::SizingModel(const Job& base)
    : base_(Calm(base)),
      tokens_(static_cast<double>(base.seq_length)),
      layers_(static_cast<int>(base.model.num_layers)) {
  const ModelShape& m = base_.model;
  if (m.num_experts <= 0) {
    throw Error({"a model without experts", "model " + m.name, "num_experts " + std::to_string(m.num_experts),
                 "experts, to put on a pool of their own", ""});
  }
  FillAttention();
  FillFfn();
  FillGroups();
  FillRows();
  seen_ = std::make_shared<Seen>(layers_);
}

void SizingModel::FillAttention() {
  const ModelShape& m = base_.model;
  const ClusterSpec& c = attention_cluster();
  const auto passes = [&](const Work& work) {
    const double forward = TimeNs(work, kForward, c, kManyRows);
    const double plain = forward + TimeNs(work, kBackward, c, kManyRows);
    return Passes{plain, plain + forward};
  };
  for (int l = 0; l < layers_; ++l) attention_.push_back(passes(AttentionWork(m, l, base_.sequence(), 0)));
  Work copy;
  copy.memory_bytes = AttentionWork(m, 0, 1, 1).memory_bytes - AttentionWork(m, 0, 1, 0).memory_bytes;
  copy_ = passes(copy);
  launch_a_ = c.efficiency.op_overhead_us * 1e3;
  for (const bool recompute : {false, true}) {
    Job job = base_;
    job.recompute = recompute;
    for (int l = 0; l < layers_; ++l) attention_kept_[recompute] += AttentionActivationBytes(job, l) / layers_;
    row_kept_[recompute] = FfnRowBytes(job);
    pair_kept_[recompute] = FfnPairBytes(job);
    common_kept_[recompute] = CommonFfnBytes(job, layers_ - 1);
  }
}

void SizingModel::FillFfn() {
  const ModelShape& m = base_.model;
  const ClusterSpec& c = ffn_cluster();
  const auto passes = [&](const Work& work) {
    const double plain = TimeNs(work, kForward, c, kManyRows) + TimeNs(work, kBackward, c, kManyRows);
    return Passes{plain, plain + TimeNs(FfnRecomputeWork(work), kForward, c, kManyRows)};
  };
  const Work pair = ExpertPairWork(m);
  pair_ = passes(pair);
  row_ = passes(FfnRowWork(m));
  // A grouped product of r rows takes as long as one of r + half_rows at full speed.
  Work load;
  load.expert_flops = pair.expert_flops * c.efficiency.grouped_gemm_half_rows;
  load_ = passes(load);
  for (int l = 0; l < layers_; ++l) {
    const bool routed = Routed(m, l);
    (routed ? shared_ : dense_) = passes(CommonFfnWork(m, l));
    const int64_t experts = routed ? m.num_experts * m.ExpertParams() : 0;
    (routed ? shared_params_ : dense_params_) = static_cast<double>(m.FfnParams(l) - experts);
  }
  launch_f_ = c.efficiency.op_overhead_us * 1e3;
  const auto head = [&](const ClusterSpec& cluster) {
    const Work work = HeadWork(m);
    return TimeNs(work, {.forward = true, .weight_gradient = true}, cluster, 0) +
           TimeNs(work, {.weight_gradient = true}, cluster, 0);
  };
  head_a_ = head(attention_cluster());
  head_f_ = head(ffn_cluster());
}

void SizingModel::FillGroups() {
  const ModelShape& m = base_.model;
  attention_groups_.resize(layers_ + 1);
  ffn_groups_.resize(layers_ + 1);
  attention_params_.resize(layers_ + 1);
  const auto attention_no_less = [](const AttentionGroup& a, const AttentionGroup& b) {
    return a.work.plain >= b.work.plain && a.work.again >= b.work.again && a.layers >= b.layers &&
           a.routed >= b.routed && a.dense >= b.dense && a.sends_routed >= b.sends_routed &&
           a.sends_dense >= b.sends_dense && a.ids >= b.ids && a.head >= b.head;
  };
  const auto ffn_no_less = [](const FfnGroup& a, const FfnGroup& b) {
    return a.routed >= b.routed && a.dense >= b.dense && a.head >= b.head;
  };
  for (int p = 1; p <= layers_; ++p) {
    for (const bool head : {false, true}) {  // on attention
      for (int g = 0; g < p; ++g) {
        AttentionGroup a;
        FfnGroup f;
        a.head = head && g == layers_ % p;
        f.head = !head && g == (layers_ - 1) % p;
        double params = static_cast<double>((g == 0 ? m.EmbeddingParams() : 0) + (a.head ? m.HeadParams() : 0));
        for (int l = g; l < layers_; l += p) {
          a.work.plain += attention_[l].plain;
          a.work.again += attention_[l].again;
          ++a.layers;
          ++(Routed(m, l) ? a.routed : a.dense);
          ++(Routed(m, l) ? f.routed : f.dense);
          params += static_cast<double>(m.AttentionParams(l));
          if (l > 0) ++(Routed(m, l - 1) ? a.sends_routed : a.sends_dense);  // gradients of what came
        }
        if (a.head) ++(Routed(m, layers_ - 1) ? a.sends_routed : a.sends_dense);
        a.sends_routed += a.routed;
        a.sends_dense += a.dense;
        a.ids = a.routed;
        AddLargest(&attention_groups_[p][head], a, attention_no_less);
        AddLargest(&ffn_groups_[p][head], f, ffn_no_less);
        attention_params_[p][head] = std::max(attention_params_[p][head], params);
      }
    }
  }
}

void SizingModel::FillRows() {
  const auto most = static_cast<int>(base_.model.num_experts);
  const Routing routing = RoutingOf(RankRouting(base_), base_, 0);
  rows_.assign(most + 1, 0);
  visits_ = share_ = rows_;
  for (int n = 1; n <= most; ++n) {
    std::vector<int> nodes(n);
    for (int w = 0; w < n; ++w) nodes[w] = w / ffn_cluster().gpus_per_node;
    int last = -1;
    for (const Holder& x : HoldersOf(routing, 0, most, nodes)) {
      const double row = base_.dedup == Dedup::kExpert ? x.pairs : x.visit;
      rows_[n] += base_.dedup != Dedup::kNode ? row : x.node != last ? x.node_visit : 0;
      visits_[n] = std::max(visits_[n], row);
      last = x.node;
    }
    share_[n] = static_cast<double>((most + n - 1) / n) / most;
  }
}

SizingModel::Line SizingModel::AttentionLine(const AttentionGroup& g, const Pools& x) const {
  const double copy = copy_.of(x.recompute);
  const double launches = launch_a_ * (Launches(x.recompute) * g.layers + (g.head ? 2 : 0));
  const double own = tokens_ * (g.work.of(x.recompute) + copy * g.dense + (g.head ? head_a_ : 0));
  const double workers = static_cast<double>(x.replicas) * x.m;
  return {(own + launches / x.sequences) / workers, tokens_ * copy * g.routed / workers};
}

SizingModel::Line SizingModel::FfnLine(const FfnGroup& g, const Pools& x) const {
  const ModelShape& m = base_.model;
  const double row = row_.of(x.recompute);
  const double routed = share_[x.n] * (static_cast<double>(m.experts_per_token) * pair_.of(x.recompute) +
                                       (m.shared_hidden > 0 ? shared_.of(x.recompute) : 0)) + visits_[x.n] * row;
  const double dense = (dense_.of(x.recompute) + row) / x.n;
  const double experts = share_[x.n] * static_cast<double>(m.num_experts);
  const double launches = launch_f_ * (Launches(x.recompute) * (g.routed + g.dense) + (g.head ? 2 : 0));
  return {tokens_ * (g.routed * routed + g.dense * dense + (g.head ? head_f_ / x.n : 0)) / x.replicas,
          (g.routed * experts * load_.of(x.recompute) + launches) / x.replicas};
}

double SizingModel::NicBytes(const AttentionGroup& g, double rows) const {
  const double row = kBf16 * static_cast<double>(base_.model.hidden_size);
  return row * (g.sends_routed * rows + g.sends_dense) +
         g.ids * kIdBytes * static_cast<double>(base_.model.experts_per_token);
}

double SizingModel::AttentionNs(const Pools& x) const {
  double ns = 0;
  for (const AttentionGroup& g : attention_groups_[x.p_a][x.head_on_attention]) {
    ns = std::max(ns, AttentionLine(g, x).constant);
  }
  return ns;
}

double SizingModel::ExpertsNs(int p_f, int n, bool recompute) const {
  const Pools x{.p_f = p_f, .n = n, .recompute = recompute, .head_on_attention = true};
  double ns = 0;
  for (const FfnGroup& g : ffn_groups_[p_f][true]) ns = std::max(ns, FfnLine(g, x).constant);
  return ns;
}

double SizingModel::RowNs(bool ffn) const {
  const ClusterSpec& c = ffn ? ffn_cluster() : attention_cluster();
  return (kBf16 * static_cast<double>(base_.model.hidden_size) + kIdBytes) / (c.nic_gbytes_s * c.efficiency.m2n);
}

SizingModel::Lines SizingModel::AttentionLines(const Pools& x) const {
  Lines out;
  for (const AttentionGroup& g : attention_groups_[x.p_a][x.head_on_attention]) out.push_back(AttentionLine(g, x));
  return out;
}

SizingModel::Lines SizingModel::FfnLines(const Pools& x) const {
  Lines out;
  for (const FfnGroup& g : ffn_groups_[x.p_f][x.head_on_attention]) out.push_back(FfnLine(g, x));
  return out;
}

SizingModel::Lines SizingModel::AttentionNicLines(const Pools& x, double byte_ns) const {
  Lines out;
  const double ns = tokens_ * byte_ns / (static_cast<double>(x.replicas) * x.m);
  for (const AttentionGroup& g : attention_groups_[x.p_a][x.head_on_attention]) {
    const double fixed = NicBytes(g, 0);
    out.push_back({ns * fixed, ns * (NicBytes(g, 1) - fixed)});
  }
  return out;
}

double SizingModel::FfnNicNs(const Pools& x, double byte_ns) const {
  const double row = kBf16 * static_cast<double>(base_.model.hidden_size);
  const double ids = kIdBytes * static_cast<double>(base_.model.experts_per_token) * share_[x.n];
  const double rows = base_.dedup == Dedup::kNode ? rows_[x.n] * share_[x.n] : visits_[x.n];
  double most = 0;
  for (const FfnGroup& g : ffn_groups_[x.p_f][x.head_on_attention]) {
    most = std::max(most, g.routed * (2 * row * rows + ids) + g.dense * 2 * row / x.n);
  }
  return most * tokens_ * byte_ns / x.replicas;
}

int64_t SizingModel::NodesOf(const Pools& x) const {
  const int64_t node = attention_cluster().gpus_per_node;
  return (int64_t{x.p_a} * x.m + int64_t{x.p_f} * x.n + node - 1) / node;
}

SizingModel::Each SizingModel::MixedFar(int p_a, int p_f, int64_t nodes) const {
  if (nodes <= 1) return {0, 0};
  if (std::max(p_a, p_f) > seen_->groups || nodes > Seen::kNodes) return FindMixedFar(p_a, p_f, nodes);
  const int64_t groups = int64_t{p_a - 1} * seen_->groups + p_f - 1;
  std::atomic<double>* at = &seen_->shares[static_cast<size_t>(2 * (groups * Seen::kNodes + nodes - 1))];
  Each far{at[0].load(std::memory_order_relaxed), at[1].load(std::memory_order_relaxed)};
  if (far.attention == Seen::kUnknown || far.ffn == Seen::kUnknown) {
    far = FindMixedFar(p_a, p_f, nodes);
    at[0].store(far.attention, std::memory_order_relaxed);
    at[1].store(far.ffn, std::memory_order_relaxed);
  }
  return far;
}

SizingModel::Each SizingModel::FindMixedFar(int p_a, int p_f, int64_t nodes) const {
  // Of p groups of a pool, group g is on the line of nodes from g * nodes / p to (g + 1) * nodes / p. What of group h
  // of the other pool is on the node of a worker of g is least on the first or the last of g's nodes.
  const auto near = [nodes](int64_t p, int64_t g, int64_t p_other, int64_t h) {
    const double from = static_cast<double>(h * nodes) / static_cast<double>(p_other);
    const double to = static_cast<double>((h + 1) * nodes) / static_cast<double>(p_other);
    const auto on = [&](int64_t node) {
      const double begin = std::max(from, static_cast<double>(node));
      return std::max(0.0, std::min(to, static_cast<double>(node + 1)) - begin);
    };
    return std::min(on(g * nodes / p), on(((g + 1) * nodes + p - 1) / p - 1)) / (to - from);
  };
  const int count = std::min(layers_, std::lcm(p_a, p_f));  // then it is the same again
  double a = 0, f = 0;
  for (int l = 0; l < count; ++l) {
    const int at = l % p_a, next = (l + 1) % p_a, ffn = l % p_f;
    a += near(p_a, at, p_f, ffn) + near(p_a, next, p_f, ffn);
    f += near(p_f, ffn, p_a, at) + near(p_f, ffn, p_a, next);
  }
  return {1 - a / (2 * count), 1 - f / (2 * count)};
}

SizingModel::Each SizingModel::NicsOf(const Pools& x, int64_t nodes) const {
  const auto nics = [&](double given, int of_node, double workers, const ClusterSpec& c) {
    if (given > 0) return given;
    if (!x.mixed || of_node == 0) return static_cast<double>(c.nics_per_node) / c.gpus_per_node;
    return of_node / std::max(1.0, workers / static_cast<double>(nodes));
  };
  return {nics(base_.nics_a, x.node_nics_a, static_cast<double>(x.p_a) * x.m, attention_cluster()),
          nics(base_.nics_f, x.node_nics_f, static_cast<double>(x.p_f) * x.n, ffn_cluster())};
}

SizingModel::Each SizingModel::ByteNsOf(const Pools& x, int64_t nodes) const {
  Each far{1, 1};
  if (!own_clusters() && (nodes == 1 || x.mixed)) far = MixedFar(x.p_a, x.p_f, nodes);
  const Each nics = NicsOf(x, nodes);
  return {ByteNs(attention_cluster(), far.attention, nics.attention), ByteNs(ffn_cluster(), far.ffn, nics.ffn)};
}

SizingTimes SizingModel::Times(const Pools& x) const {
  SizingTimes t;
  const Each byte = ByteNsOf(x);
  const double rows = rows_[x.n];
  double bytes = 0;
  for (const AttentionGroup& g : attention_groups_[x.p_a][x.head_on_attention]) {
    t.attention = std::max(t.attention, AttentionLine(g, x).at(rows));
    bytes = std::max(bytes, NicBytes(g, rows));
  }
  const double micro_batches = 1.0 / (static_cast<double>(x.m) * x.sequences);
  for (const FfnGroup& g : ffn_groups_[x.p_f][x.head_on_attention]) {
    t.ffn = std::max(t.ffn, FfnLine(g, x).at(micro_batches));
  }
  t.nic_a = bytes * tokens_ * byte.attention / (static_cast<double>(x.replicas) * x.m);
  t.nic_f = FfnNicNs(x, byte.ffn);
  return t;
}

double SizingModel::AttentionBytes(const Pools& x, double held) const {
  const double holders = base_.shard_optimizer ? static_cast<double>(x.replicas) * x.m : 1;
  return attention_params_[x.p_a][x.head_on_attention] *
             (base_.weight_bytes + base_.gradient_bytes + base_.state_bytes / holders) +
         base_.reserved_gb * 1e9 + held * attention_kept_[x.recompute] * tokens_ * x.sequences;
}

double SizingModel::FfnBytes(const Pools& x, double held) const {
  const ModelShape& m = base_.model;
  const double each = base_.weight_bytes + base_.gradient_bytes;
  const double shard = base_.shard_optimizer ? x.replicas : 1;
  const double shard_common = base_.shard_optimizer ? static_cast<double>(x.replicas) * x.n : 1;
  const double all = static_cast<double>(m.num_experts * m.ExpertParams());
  double most = 0;
  for (const FfnGroup& g : ffn_groups_[x.p_f][x.head_on_attention]) {
    const double common = g.routed * shared_params_ + g.dense * dense_params_ +
                          (g.head ? static_cast<double>(m.HeadParams()) : 0);
    most = std::max(most, g.routed * share_[x.n] * all * (each + base_.state_bytes / shard) +
                              common * (each + base_.state_bytes / shard_common));
  }
  const double token = visits_[x.n] * row_kept_[x.recompute] +
                       share_[x.n] * (static_cast<double>(m.experts_per_token) * pair_kept_[x.recompute] +
                                      common_kept_[x.recompute]);
  return most + base_.reserved_gb * 1e9 + held * token * tokens_ * static_cast<double>(int64_t{x.m} * x.sequences);
}

}  // namespace disagmoe
