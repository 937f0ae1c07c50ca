#include "plan/sizing_choices.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <tuple>

#include "base/error.h"

namespace disagmoe {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr int64_t kMany = 1'000'000'000;

double Largest(const SizingModel::Lines& lines, double x) {
  double out = 0;
  for (const SizingModel::Line& line : lines) out = std::max(out, line.at(x));
  return out;
}

std::vector<int> Sorted(const std::vector<int>& numbers, int64_t most) {
  std::set<int> out;
  for (int x : numbers) {
    if (x >= 1 && x <= most) out.insert(x);
  }
  return {out.begin(), out.end()};
}

auto Order(const Pools& x) {
  return std::tuple(x.replicas, x.p_a, x.m, x.p_f, x.n, x.sequences, x.recompute, x.head_on_attention, x.mixed,
                    x.node_nics_a, x.node_nics_f);
}

}  // namespace

SizingChoices::SizingChoices(const SizingProgram& program) : p_(program) {
  DM_CHECK(p_.model != nullptr, "a sizing program without its model");
  const Job& base = model().base();
  const auto given = [&](const char* name) { return p_.fixed.contains(name); };
  const int64_t layers = base.model.num_layers;
  std::vector<int> a = Sorted(p_.group_counts_a, layers), f = Sorted(p_.group_counts_f, layers);
  if (given("p") || given("p_a")) a = Sorted({base.p_a}, layers);
  if (given("p") || given("p_f")) f = Sorted({base.p_f}, layers);
  for (int p_a : a) {
    for (int p_f : f) groups.emplace_back(p_a, p_f);
  }
  sequences = given("b") ? std::vector<int>{base.sequences} : Sorted(p_.sequences, kMany);
  const int64_t experts = p_.most_n > 0 ? std::min<int64_t>(p_.most_n, base.model.num_experts) : base.model.num_experts;
  for (int i = 1; i <= experts; ++i) n.push_back(i);
  if (given("n")) n = Sorted({base.n}, experts);
  if (given("m")) m = {base.m};
  const auto both = [&](const char* name, bool of_base, bool may) {
    return given(name) ? std::vector<bool>{of_base} : may ? std::vector<bool>{false, true} : std::vector<bool>{false};
  };
  recompute = both("recompute", base.recompute, p_.may_recompute);
  head = both("head", base.head_on_attention, p_.may_move_head);
  mixed = both("mixed_nodes", base.mixed_nodes, p_.may_mix);
  if (model().own_clusters()) mixed = {false};
  most_replicas = static_cast<int>(model().own_clusters() ? std::min(p_.gpus, p_.ffn_gpus) : p_.gpus / 2);
  if (p_.most_replicas > 0) most_replicas = std::min(most_replicas, p_.most_replicas);
}

int64_t SizingChoices::MostM(const Pools& x, int64_t b) const {
  return p_.batch / (x.replicas * b * 2 * std::max(x.p_a, x.p_f));
}

double SizingChoices::Held(const Pools& x, bool ffn) const {
  const Job& base = model().base();
  return HeldActivations(static_cast<int>(base.model.num_layers), x.p_a, x.p_f, 2 * std::max(x.p_a, x.p_f), base.slope,
                         ffn);
}

bool SizingChoices::FitsAttention(const Pools& x) const {
  return model().AttentionBytes(x, Held(x, false)) <= model().attention_limit();
}

bool SizingChoices::FitsFfn(const Pools& x) const {
  return model().FfnBytes(x, Held(x, true)) <= model().ffn_limit();
}

int64_t SizingChoices::MostSequences(const Pools& pools) const {
  Pools x = pools;
  x.sequences = 1;
  const auto bytes = [&](int64_t m) {
    x.m = static_cast<int>(m);
    return model().FfnBytes(x, Held(x, true));
  };
  const double one = bytes(1), each = bytes(2) - one;
  if (one > model().ffn_limit()) return 0;
  if (each <= 0) return kMany;
  int64_t most = 1 + static_cast<int64_t>(std::min<double>((model().ffn_limit() - one) / each, kMany - 2));
  while (bytes(most) > model().ffn_limit()) --most;  // rounding
  while (most < kMany && bytes(most + 1) <= model().ffn_limit()) ++most;
  return most;
}

double SizingChoices::AttentionShare(const Pools& x) const {
  return model().AttentionBytes(x, Held(x, false)) / model().attention_limit();
}

double SizingChoices::FfnShare(const Pools& x) const {
  return model().FfnBytes(x, Held(x, true)) / model().ffn_limit();
}

std::vector<std::pair<int, int>> SizingChoices::Nics(bool is_mixed) const {
  const Job& base = model().base();
  const int nics = base.cluster.nics_per_node;
  if (!is_mixed || nics < 2 || (base.nics_a > 0 && base.nics_f > 0)) return {{0, 0}};
  std::vector<std::pair<int, int>> out;
  for (int a = 1; a < nics; ++a) out.emplace_back(a, nics - a);
  return out;
}

bool SizingChoices::Allowed(const Pools& x) const {
  const bool own = model().own_clusters();
  if (own ? x.attention_gpus() > p_.gpus || x.ffn_gpus() > p_.ffn_gpus : x.gpus() > p_.gpus) return false;
  if (x.m > MostM(x, x.sequences)) return false;
  // On one node, mixed says nothing and NICs do nothing.
  const bool one_node = !own && model().NodesOf(x) == 1;
  if (x.mixed && one_node && (mixed.size() > 1 || x.node_nics_a > 0)) return false;
  if (x.mixed && !one_node && x.node_nics_a == 0 && Nics(true)[0].first > 0) return false;
  return FitsAttention(x) && FitsFfn(x);
}

std::vector<SizingFrame> SizingChoices::Frames(int replicas, int p_a, int p_f, double workers) const {
  std::vector<SizingFrame> out;
  SizingFrame f;
  f.pools.replicas = replicas, f.pools.p_a = p_a, f.pools.p_f = p_f;
  const bool own = model().own_clusters();
  const int64_t room = p_.gpus / replicas;
  f.most_a = own ? room : room - p_f;
  f.most_f = own ? p_.ffn_gpus / replicas : room - p_a;
  if (f.most_a < p_a || f.most_f < p_f) return out;
  const int64_t node = model().attention_cluster().gpus_per_node;
  const auto add = [&](int64_t nodes, int64_t least, int64_t most) {
    f.nodes = nodes;
    f.least = least;
    f.most = most;
    if (std::max<int64_t>(least, p_a + p_f) <= most && workers <= static_cast<double>(most)) out.push_back(f);
  };
  for (const bool again : recompute) {
    for (const bool on_attention : head) {
      for (const bool is_mixed : mixed) {
        f.pools.recompute = again, f.pools.head_on_attention = on_attention, f.pools.mixed = is_mixed;
        f.pools.node_nics_a = f.pools.node_nics_f = 0;
        if (own) {
          add(2, 0, kMany);
          continue;
        }
        if (!is_mixed || mixed.size() == 1) add(1, 0, std::min(node, room));
        if (!is_mixed) {
          add(2, node + 1, room);
          continue;
        }
        for (const auto& [a, b] : Nics(true)) {
          f.pools.node_nics_a = a, f.pools.node_nics_f = b;
          for (int64_t nodes = (room + node - 1) / node; nodes > 1; --nodes) {
            if (workers > static_cast<double>(nodes * node)) break;
            add(nodes, (nodes - 1) * node + 1, std::min(nodes * node, room));
          }
        }
      }
    }
  }
  return out;
}

SizingTies::SizingTies(const SizingChoices* choices)
    : choices_(choices), ns_(kInfinite), second_(kInfinite) {}

void SizingTies::Add(const Pools& pools, const SizingTimes& times) {
  const double worst = times.worst();
  if (worst > ns_ * (1 + kSizingTie)) return;
  ties_.push_back({pools, times});
  if (worst < ns_) {
    ns_ = worst;
    std::erase_if(ties_, [&](const Tie& t) { return t.times.worst() > ns_ * (1 + kSizingTie); });
    second_ = kInfinite;
    for (const Tie& t : ties_) second_ = std::min(second_, t.times.second());
  } else {
    second_ = std::min(second_, times.second());
  }
}

std::optional<SizingAnswer> SizingTies::Best() const {
  if (ties_.empty()) return std::nullopt;
  std::vector<Tie> left = ties_;
  const auto keep = [&](const auto& value) {
    double least = kInfinite;
    for (const Tie& t : left) least = std::min(least, value(t));
    std::erase_if(left, [&](const Tie& t) { return value(t) > least + kSizingTie * std::max(1.0, least); });
  };
  const double scale = 1 / ns_;
  keep([&](const Tie& t) { return t.times.second() * scale; });
  const SizingModel& model = choices_->model();
  keep([&](const Tie& t) {
    const SizingModel::Each nics = model.NicsOf(t.pools, model.NodesOf(t.pools));
    return std::abs(nics.attention - 1) + std::abs(nics.ffn - 1);
  });
  keep([&](const Tie& t) {
    return std::max(choices_->AttentionShare(t.pools), choices_->FfnShare(t.pools));
  });
  const Tie& best = *std::min_element(left.begin(), left.end(),
                                      [](const Tie& a, const Tie& b) { return Order(a.pools) < Order(b.pools); });
  SizingAnswer out;
  out.pools = best.pools;
  out.times = best.times;
  out.ns = best.times.worst();
  const SizingTimes& t = best.times;
  out.binding = out.ns == t.attention ? "attention"
                : out.ns == t.ffn     ? "FFN"
                : out.ns == t.nic_a   ? "NICs of attention"
                                      : "NICs of FFN";
  return out;
}

int64_t LargestM(const SizingChoices& c, const SizingFrame& frame, int n, int b) {
  Pools x = frame.pools;
  x.n = n, x.sequences = b;
  if (int64_t{x.p_f} * n > frame.most_f) return 0;
  int64_t most = std::min({(frame.most - int64_t{x.p_f} * n) / x.p_a, frame.most_a / x.p_a, c.MostM(x, b),
                           c.MostSequences(x) / b});
  if (!c.m.empty()) most = most >= c.m[0] ? c.m[0] : 0;
  if (most < 1 || x.p_a * most + int64_t{x.p_f} * n < frame.least) return 0;
  x.m = static_cast<int>(most);
  return c.FitsAttention(x) ? most : 0;
}

void ScanFrame(const SizingChoices& c, const SizingFrame& frame, SizingBounds::Smallest smallest, bool all,
               SizingTies* ties) {
  for (const int n : c.n) {
    if (n < smallest.n) continue;
    if (frame.pools.p_a * smallest.m + int64_t{frame.pools.p_f} * n > frame.most) break;
    for (const int b : c.sequences) {
      Pools x = frame.pools;
      x.n = n, x.sequences = b;
      for (int64_t m = LargestM(c, frame, n, b); m >= smallest.m; --m) {
        x.m = static_cast<int>(m);
        if (x.p_a * m + int64_t{x.p_f} * n < frame.least) break;
        const SizingTimes t = c.model().Times(x);
        // With a smaller m each of the times is the same or longer, and attention needs more memory.
        const double worst = t.worst();
        if (worst > ties->ns() * (1 + kSizingTie)) break;
        if (worst >= ties->ns() * (1 - kSizingTie) && t.second() > ties->second() + kSizingTie * ties->ns()) break;
        if (!c.FitsAttention(x)) break;
        ties->Add(x, t);
        if (!all || !c.m.empty()) break;
      }
    }
  }
}

SizingBounds::SizingBounds(const SizingChoices& choices) : choices_(choices) {
  const SizingModel& model = choices.model();
  int most = 0;
  for (const auto& [p_a, p_f] : choices.groups) most = std::max({most, p_a, p_f});
  attention_.resize(4 * static_cast<size_t>(most + 1));
  ffn_.resize(attention_.size());
  const auto experts = static_cast<int>(model.base().model.num_experts);
  rows_.assign(experts + 2, kInfinite);
  for (int n = experts; n >= 1; --n) rows_[n] = std::min(rows_[n + 1], model.Rows(n));
  for (const auto& [p_a, p_f] : choices.groups) {
    for (const bool recompute : choices.recompute) {
      for (const bool head : choices.head) {
        Pools x{.p_a = p_a, .p_f = p_f, .recompute = recompute, .head_on_attention = head};
        if (!choices.sequences.empty()) x.sequences = choices.sequences.back();
        attention_[Index(p_a, x)] = {model.AttentionLines(x), model.AttentionNicLines(x, 1)};
        Ffn& f = ffn_[Index(p_f, x)];
        if (!f.ns.empty()) continue;
        f.ns.assign(experts + 1, kInfinite);
        f.bytes = f.ns;
        for (int n = 1; n <= experts; ++n) {
          x.n = n;
          f.ns[n] = std::min(f.ns[n - 1], Largest(model.FfnLines(x), 0));
          f.bytes[n] = std::min(f.bytes[n - 1], model.FfnNicNs(x, 1));
        }
      }
    }
  }
}

// With m and n real numbers, a pool's time falls no faster than as one over its workers.
double SizingBounds::Least(int replicas, int p_a, int p_f) const {
  const SizingChoices& c = choices_;
  Pools x{.replicas = replicas, .p_a = p_a, .p_f = p_f, .recompute = c.recompute[0]};
  const double room = static_cast<double>(c.program().gpus / replicas);
  const double room_f = static_cast<double>(c.program().ffn_gpus / replicas);
  double least = kInfinite;
  for (const bool head : c.head) {
    x.head_on_attention = head;
    const double a = Largest(attention_[Index(p_a, x)].ns, rows_[1]), f = ffn_[Index(p_f, x)].ns[1];
    const bool own = c.model().own_clusters();
    const double both = own ? std::max(p_a * a / room, p_f * f / room_f) : (p_a * a + p_f * f) / room;
    const double m = static_cast<double>(c.sequences.empty() ? 0 : c.MostM(x, c.sequences[0]));
    const double n = c.n.empty() ? 0 : c.n.back();
    if (m < 1 || n < 1) continue;
    least = std::min(least, std::max({both, a / m, f / n}) / replicas);
  }
  return least;
}

double SizingBounds::LeastWorkers(int replicas, int p_a, int p_f, double limit) const {
  Pools x{.replicas = replicas, .p_a = p_a, .p_f = p_f, .recompute = choices_.recompute[0]};
  double least = kInfinite;
  for (const bool head : choices_.head) {
    x.head_on_attention = head;
    least = std::min(least, p_a * Largest(attention_[Index(p_a, x)].ns, rows_[1]) + p_f * ffn_[Index(p_f, x)].ns[1]);
  }
  return least / (limit * (1 + kSizingTie) * replicas);
}

std::optional<SizingBounds::Smallest> SizingBounds::SmallestOf(const SizingFrame& frame, double limit) const {
  const SizingChoices& c = choices_;
  const Pools& x = frame.pools;
  const SizingModel::Each byte = c.model().ByteNsOf(x, frame.nodes);  // of one worker a group: more have no more NICs
  const double most = limit * (1 + kSizingTie) * x.replicas;
  const Ffn& f = ffn_[Index(x.p_f, x)];
  const auto first = [&](const std::vector<double>& least, double at_most) {
    const auto at = std::lower_bound(least.begin() + 1, least.end(), at_most, [](double v, double y) { return v > y; });
    return static_cast<int>(at - least.begin());
  };
  const int by_time = std::max(first(f.ns, most), byte.ffn > 0 ? first(f.bytes, most / byte.ffn) : 1);
  const auto n = std::lower_bound(c.n.begin(), c.n.end(), by_time);
  if (n == c.n.end() || int64_t{x.p_f} * *n > frame.most_f) return std::nullopt;
  const Attention& a = attention_[Index(x.p_a, x)];
  const double rows = rows_[*n];
  const double workers = std::max(Largest(a.ns, rows), Largest(a.bytes, rows) * byte.attention) / most;
  if (!(workers < static_cast<double>(frame.most))) return std::nullopt;
  Smallest out{*n, std::max<int64_t>(1, static_cast<int64_t>(std::ceil(workers * (1 - 1e-12))))};
  if (!c.m.empty()) {
    if (c.m[0] < out.m) return std::nullopt;
    out.m = c.m[0];
  }
  if (x.p_a * out.m + int64_t{x.p_f} * out.n > frame.most || x.p_a * out.m > frame.most_a) return std::nullopt;
  if (out.m > c.MostM(x, c.sequences[0])) return std::nullopt;
  return out;
}

}  // namespace disagmoe
