// The search of SearchLayouts.
#include <algorithm>
#include <cmath>
#include <set>

#include "base/error.h"
#include "cost/cluster_costs.h"
#include "plan/evaluate.h"
#include "schedule/ready.h"

namespace disagmoe {
namespace {

constexpr int kMostSimulated = 60;

struct Candidate {
  Job job;
  double bound_ns = 0;
  int64_t least_bytes = 0;  // that its fullest worker holds at least
  bool may_fit = true;
};

std::vector<int> Divisors(int n, int most) {
  std::vector<int> out;
  for (int d = 1; d <= std::min(n, most); ++d) {
    if (n % d == 0) out.push_back(d);
  }
  return out;
}

// Bytes that the first position of a ring holds at least: its state, and the activations of its warm-up (schedule.md
// section 2) at the smallest round that fills the ring. 0 where the order is another.
int64_t LeastBytes(const Job& job, const Schedule& s, const ClusterCosts& costs) {
  const std::set<std::string> rings{"megatron-1f1b", "megatron-overlap", "tutel", "comet", "fastermoe"};
  const bool two_pools = (job.schedule == "af-pipe" || job.schedule == "af-pipe-zb") && job.p_a == job.p_f;
  if (!two_pools && (!rings.contains(job.schedule) || job.p_a == 1)) return 0;
  const int64_t layers = job.model.num_layers;
  const int64_t positions = two_pools ? 2 * job.p_a : job.p_a;
  const int64_t chunks = two_pools ? (2 * layers + positions - 1) / positions : job.virtual_stages;
  const int64_t micro_batches = job.micro_batches();
  const int64_t round = job.round > 0 ? job.round : std::min(positions, micro_batches);
  int64_t most = 0;
  for (int r = 0; r < (two_pools ? 2 : 1); ++r) {
    const int64_t held = std::min(micro_batches * chunks, (chunks - 1) * round + job.slope * (positions - 1 - r));
    // A layer in the middle; colocated: the layers of a chunk.
    const int stage = 2 * static_cast<int>(layers / 2);
    int64_t kept = 0;
    for (int part_of = 0; part_of < 2; ++part_of) {
      if (two_pools && part_of != r) continue;
      const int at = stage + part_of;
      int c = 0;
      while (costs.classes()[c].group != s.group(at, 0)) ++c;
      for (int part = 0; part < s.parts(at); ++part) {
        kept += costs.ActivationBytes({OpKind::kForward, at, 0, part}, c, false);
      }
    }
    if (!two_pools) kept *= layers / (positions * chunks);
    int c = 0;
    while (costs.classes()[c].group != (two_pools && r == 1 ? job.p_a : 0)) ++c;
    most = std::max(most, costs.StaticBytes(c) + held * kept);
  }
  return most;
}

// No step is faster: the busiest worker's computations; its exchanges too, where they hold it. False: too few
// micro-batches for this layout.
bool Bound(Candidate* c) {
  Job one = c->job;
  const int64_t micro_batches = one.micro_batches();
  if (micro_batches < 1) return false;
  // Costs do not depend on how many micro-batches there are: as few as the generator takes.
  const bool dual = one.schedule == "dualpipe" || one.schedule == "dualpipe-v";
  if (dual && micro_batches < 2 * one.p_a) return false;
  const int64_t few = dual ? 2 * one.p_a : 1;
  one.global_batch = few * one.replicas() * one.m * one.sequences;
  one.round = 0;
  GenerateOptions options;
  options.num_micro_batches = static_cast<int>(few);
  options.parts = one.schedule == "hetermoe" && one.attention_expert_share > 0 ? 2 : one.parts;
  const Schedule s = Generate(one.schedule, PlacementOf(one), options);
  const ClusterCosts costs(one, s);
  std::vector<double> busy(costs.classes().size(), 0), sent(busy), received(busy);
  for (size_t k = 0; k < busy.size(); ++k) {
    const int cls = static_cast<int>(k);
    c->least_bytes = std::max(c->least_bytes, costs.StaticBytes(cls));
    for (const Op& op : s.groups[costs.classes()[k].group].compute) {
      busy[k] += static_cast<double>(costs.ComputeNs(op, cls));
      const TransferRange sends = SendsAfter(s, op);
      for (int i = 0; i < sends.count; ++i) {
        const TransferCost t = costs.HasLocalPhase(sends[i]) ? costs.LocalPhase(sends[i], cls, true)
                                                              : costs.Transfer(sends[i], cls, true);
        sent[k] += static_cast<double>(t.nic_ns);
        if (s.sync_exchange && s.max_parts() == 1) busy[k] += static_cast<double>(std::max(t.nic_ns, t.nvlink_ns) + t.latency_ns);
      }
      const TransferRange receives = ReceivesFor(s, op);
      for (int i = 0; i < receives.count; ++i) {
        Op send = receives[i];
        send.kind = op.kind == OpKind::kForward ? OpKind::kSendForward : OpKind::kSendBackward;
        received[k] += static_cast<double>(costs.Transfer(send, cls, false).nic_ns);
      }
    }
    const StepEndCost end = costs.StepEnd(cls);
    const double scale = static_cast<double>(micro_batches) / static_cast<double>(few);
    c->bound_ns = std::max(c->bound_ns, scale * std::max({busy[k], sent[k], received[k]}) +
                                            static_cast<double>(end.reduce_ns + end.optimizer_ns));
  }
  c->least_bytes = std::max(c->least_bytes, LeastBytes(c->job, s, costs));
  c->may_fit = c->least_bytes <= costs.MemoryLimit(0);
  return true;
}

// Values of one setting: those to try, or only the one that was given.
std::vector<int> Choices(const Fixed& fixed, const char* name, int given, std::vector<int> choices) {
  return fixed.contains(name) ? std::vector<int>{given} : choices;
}

class Enumeration {
 public:
  Enumeration(const Job& base, const Fixed& fixed) : base_(base), fixed_(fixed) {
    base.colocated() ? Colocated() : TwoPools();
  }
  std::vector<Job> jobs;

 private:
  void Colocated() {
    const int gpus = base_.cluster.gpus;
    const bool dual = base_.schedule == "dualpipe" || base_.schedule == "dualpipe-v";
    const int layers = static_cast<int>(base_.model.num_layers);
    for (int p : Choices(fixed_, "p", base_.p_a, Divisors(gpus, layers))) {
      if (dual && p % 2 == 1) continue;
      for (int ep : Choices(fixed_, "ep", base_.m, Divisors(gpus / p, static_cast<int>(base_.model.num_experts)))) {
        // An attention worker per expert worker; groups below a node only where they are all there is.
        if (!fixed_.contains("ep") && ep < 8 && ep < gpus / p) continue;
        std::vector<int> v{1};
        if (!dual && p > 1) {
          for (int x : {2, 3, 4, 6, 8, 12}) {
            if (p * x <= layers) v.push_back(x);
          }
        }
        for (int virtual_stages : Choices(fixed_, "v", base_.virtual_stages, v)) {
          Job job = base_;
          job.p_a = p, job.m = ep, job.virtual_stages = virtual_stages;
          Batches(job);
        }
      }
    }
  }

  void TwoPools() {
    const int gpus = base_.cluster.gpus;
    const bool hetermoe = base_.schedule == "hetermoe";
    const bool groups_fixed = fixed_.contains("p") || fixed_.contains("p_a") || fixed_.contains("p_f");
    std::vector<int> groups{1};
    for (int p : {2, 3, 4, 6, 8, 12, 16, 24, 32}) {
      if (!hetermoe && p <= static_cast<int>(base_.model.num_layers)) groups.push_back(p);
    }
    if (groups_fixed) groups = {base_.p_a};
    if (groups_fixed && fixed_.contains("m") && fixed_.contains("n")) {
      Workers(base_.p_a, base_.p_f, base_.m, base_.n);
      return;
    }
    for (int p : groups) {
      const int p_f = groups_fixed ? base_.p_f : p;
      for (int replicas : Divisors(gpus, 64)) {
        const int of_one = gpus / replicas;
        if (fixed_.contains("m") && fixed_.contains("n")) {
          if (p * base_.m + p_f * base_.n == of_one) Workers(p, p_f, base_.m, base_.n);
        } else if (p == p_f) {
          if (of_one % p == 0 && of_one / p >= 2) Splits(p, of_one / p);
        }
      }
    }
  }

  // Around the split that balances the pools' computation, and even ones.
  void Splits(int p, int workers) {
    std::set<int> sizes{workers / 2};
    const double share = AttentionShare();
    for (int d = -2; d <= 2; ++d) sizes.insert(static_cast<int>(std::lround(share * workers)) + d);
    for (int eighths = 3; eighths <= 7; ++eighths) sizes.insert(workers * eighths / 8);
    for (int m : sizes) {
      if (m < 1 || m >= workers || workers - m > base_.model.num_experts) continue;
      if (fixed_.contains("m") && m != base_.m) continue;
      if (fixed_.contains("n") && workers - m != base_.n) continue;
      Workers(p, p, m, workers - m);
    }
  }

  void Workers(int p_a, int p_f, int m, int n) {
    Job job = base_;
    job.p_a = p_a, job.p_f = p_f, job.m = m, job.n = n;
    Batches(job);
    if (fixed_.contains("head") || base_.schedule == "hetermoe") return;
    job.head_on_attention = !job.head_on_attention;
    Batches(job);
  }

  double AttentionShare() const {
    Job job = base_;
    job.p_a = job.p_f = 1;
    job.m = job.n = std::min<int>(job.cluster.gpus / 2, static_cast<int>(job.model.num_experts));
    GenerateOptions one;
    const Schedule s = Generate("af-pipe", {.num_layers = static_cast<int>(job.model.num_layers), .m = job.m, .n = job.n}, one);
    const std::string name = job.schedule;
    const ClusterCosts costs(job, s);
    const int layer = static_cast<int>(job.model.num_layers) / 2;
    double time[2] = {0, 0};
    for (int ffn : {0, 1}) {
      for (OpKind kind : {OpKind::kForward, OpKind::kBackward}) {
        time[ffn] += static_cast<double>(costs.ComputeNs({kind, 2 * layer + ffn, 0}, ffn));
      }
    }
    return time[0] / (time[0] + time[1]);
  }

  void Batches(const Job& layout) {
    for (int b : Choices(fixed_, "b", layout.sequences, {1, 2, 4})) {
      for (int degree : base_.schedule == "tutel" ? Choices(fixed_, "parts", layout.parts, {1, 2, 4, 8}) : std::vector<int>{layout.parts}) {
        Job job = layout;
        job.sequences = b, job.parts = degree;
        const int64_t wave = std::max<int64_t>(1, int64_t{job.replicas()} * job.m * b);
        if (job.global_batch % wave != 0) {
          // Pools of odd sizes: the nearest batch that divides, if it is near.
          const int64_t near = (job.global_batch + wave / 2) / wave * wave;
          const bool close = near > 0 && std::abs(near - job.global_batch) * 20 <= job.global_batch;
          if (close && !fixed_.contains("batch")) job.global_batch = near;  // else CheckJob says what is wrong
        }
        jobs.push_back(job);
        // The least round that fills the ring: less memory than the one that also hides the transfers.
        if (job.colocated() || fixed_.contains("round")) continue;
        const int64_t micro_batches = job.micro_batches();
        if (job.schedule == "hetermoe") {  // all micro-batches are one round unless said
          for (int q : {2, 4, 8}) {
            if (q >= micro_batches || micro_batches % q != 0) continue;
            job.round = q;
            jobs.push_back(job);
          }
          continue;
        }
        for (int64_t q = 2 * std::max(job.p_a, job.p_f); q <= micro_batches; ++q) {
          if (micro_batches % q != 0) continue;
          job.round = static_cast<int>(q);
          jobs.push_back(job);
          break;
        }
      }
    }
  }

  const Job& base_;
  const Fixed& fixed_;
};

void Try(const std::vector<Job>& jobs, bool recompute, bool any_memory, LayoutSearch* out) {
  std::vector<Candidate> candidates;
  std::optional<Candidate> smallest;  // of those that cannot fit
  for (Job job : jobs) {
    job.recompute = recompute;
    Candidate c{job};
    ++out->considered;
    try {
      CheckJob(c.job);
      if (!Bound(&c)) continue;
      c.bound_ns /= static_cast<double>(c.job.global_batch);
      if (any_memory || c.may_fit) {
        candidates.push_back(std::move(c));
      } else if (!smallest || c.least_bytes < smallest->least_bytes) {
        smallest = std::move(c);
      }
    } catch (const Error& error) {  // a layout that the generator does not take
      if (!out->mistake) out->mistake = error.parts();
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) { return a.bound_ns < b.bound_ns; });
  int runs = 0;
  for (const Candidate& c : candidates) {
    const auto per_sequence = [](const Evaluation& e) { return e.step_seconds * 1e9 / static_cast<double>(e.job.global_batch); };
    if (out->best && c.bound_ns >= per_sequence(*out->best)) break;
    if (++runs > kMostSimulated && out->best) break;
    try {
      Evaluation e = Evaluate(c.job);
      ++out->simulated;
      if (!e.fits && !any_memory) {
        if (!out->best_over || e.peak_bytes < out->best_over->peak_bytes) out->best_over = std::move(e);
      } else if (!out->best || per_sequence(e) < per_sequence(*out->best)) {
        out->best = std::move(e);
      }
    } catch (const Error& error) {
      if (!out->mistake) out->mistake = error.parts();
    }
  }
  if (!out->best && smallest) {
    Evaluation e = Evaluate(smallest->job);
    ++out->simulated;
    if (!out->best_over || e.peak_bytes < out->best_over->peak_bytes) out->best_over = std::move(e);
  }
}

}  // namespace

LayoutSearch SearchLayouts(const Job& base, const Fixed& fixed, bool any_memory) {
  LayoutSearch out;
  const Enumeration all(base, fixed);
  if (fixed.contains("recompute")) {
    Try(all.jobs, base.recompute, any_memory, &out);
  } else {
    Try(all.jobs, false, any_memory, &out);
    if (!out.best) Try(all.jobs, true, any_memory, &out);
  }
  return out;
}

}  // namespace disagmoe
