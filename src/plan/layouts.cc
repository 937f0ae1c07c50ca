// The search of SearchLayouts.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "base/error.h"
#include "cost/cluster_costs.h"
#include "plan/bounds.h"
#include "plan/evaluate.h"

namespace disagmoe {
namespace {

// Of one search; far above what the bounds leave, so that a search ends.
constexpr int kMostSimulated = 400;
// Of those that cannot fit, to find the smallest.
constexpr int kMostThatCannotFit = 40;

struct Candidate {
  Job job;
  JobBounds bounds;
  double per_sequence() const { return bounds.step_ns / static_cast<double>(job.global_batch); }
};

double PerSequence(const Evaluation& e) { return e.step_seconds * 1e9 / static_cast<double>(e.job.global_batch); }

std::vector<int> Divisors(int n, int most) {
  std::vector<int> out;
  for (int d = 1; d <= std::min(n, most); ++d) {
    if (n % d == 0) out.push_back(d);
  }
  return out;
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
    const int gpus = base_.cluster.gpus - base_.idle_gpus;
    const bool dual = base_.schedule == "dualpipe" || base_.schedule == "dualpipe-v";
    const int layers = static_cast<int>(base_.model.num_layers);
    for (int p : Choices(fixed_, "p", base_.p_a, Divisors(gpus, layers))) {
      if (dual && p % 2 == 1 && !fixed_.contains("p")) continue;
      const std::vector<int> sizes = Divisors(gpus / p, static_cast<int>(base_.model.num_experts));
      for (int ep : Choices(fixed_, "ep", base_.m, sizes)) {
        // An attention worker per expert worker; groups below a node only where they are the largest there can be.
        const int least = std::min(std::min(8, base_.cluster.gpus_per_node), sizes.empty() ? 1 : sizes.back());
        if (!fixed_.contains("ep") && ep < least) continue;
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
    const int gpus = base_.cluster.gpus - base_.idle_gpus;
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
    if (base_.ffn_cluster) return TwoClusters(groups);
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

  // Pools of machines of their own: the workers of a group follow from how many groups and replicas there are.
  void TwoClusters(const std::vector<int>& groups) {
    const int a = base_.cluster.gpus - base_.idle_gpus;
    const int f = base_.ffn_cluster->gpus - base_.idle_ffn_gpus;
    for (int p : groups) {
      const int p_f = groups.size() == 1 ? base_.p_f : p;
      for (int replicas : Divisors(std::gcd(a, f), 64)) {
        if (a / replicas % p != 0 || f / replicas % p_f != 0) continue;
        const int m = a / replicas / p, n = f / replicas / p_f;
        const bool other = (fixed_.contains("m") && m != base_.m) || (fixed_.contains("n") && n != base_.n);
        if (!other && n <= base_.model.num_experts) Workers(p, p_f, m, n);
      }
    }
  }

  // Around the split that balances the pools' computation, and even ones.
  void Splits(int p, int workers) {
    std::set<int> sizes{workers / 2};
    if (fixed_.contains("m")) {
      sizes = {base_.m};
    } else if (fixed_.contains("n")) {
      sizes = {workers - base_.n};
    } else {
      const double share = AttentionShare();
      for (int d = -2; d <= 2; ++d) sizes.insert(static_cast<int>(std::lround(share * workers)) + d);
      for (int eighths = 3; eighths <= 7; ++eighths) sizes.insert(workers * eighths / 8);
    }
    for (int m : sizes) {
      if (m >= 1 && m < workers && workers - m <= base_.model.num_experts) Workers(p, p, m, workers - m);
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
    job.stragglers.clear();  // of groups that are not here
    job.jitter = 0;
    job.cluster.gpus -= job.idle_gpus;
    job.idle_gpus = 0;
    job.expert_counts.clear();  // of groups of another size
    job.p_a = job.p_f = 1;
    job.m = job.n = std::min<int>(job.cluster.gpus / 2, static_cast<int>(job.model.num_experts));
    GenerateOptions one;
    const auto layers = static_cast<int>(job.model.num_layers);
    const Schedule s = Generate("af-pipe", {.num_layers = layers, .m = job.m, .n = job.n}, one);
    const ClusterCosts costs(job, s);
    const int layer = layers / 2;
    double time[2] = {0, 0};
    for (int ffn : {0, 1}) {
      for (OpKind kind : {OpKind::kForward, OpKind::kBackward}) {
        time[ffn] += static_cast<double>(costs.ComputeNs({kind, 2 * layer + ffn, 0}, ffn));
      }
    }
    return time[0] / (time[0] + time[1]);
  }

  void Batches(const Job& layout) {
    if (layout.replicas() < 1) return jobs.push_back(layout);  // CheckJob says what is wrong
    const std::vector<int> own{layout.parts};
    const bool tutel = base_.schedule == "tutel";
    for (int b : Choices(fixed_, "b", layout.sequences, {1, 2, 4})) {
      for (int degree : tutel ? Choices(fixed_, "parts", layout.parts, {1, 2, 4, 8}) : own) {
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

// Candidates that may fit by the bound of their step, those that cannot by that of their memory.
struct Candidates {
  std::vector<Candidate> may, cannot;
};

Candidates BoundAll(const std::vector<Job>& jobs, bool any_memory, LayoutSearch* out) {
  Candidates all;
  for (const Job& job : jobs) {
    ++out->considered;
    try {
      CheckJob(job);
      const std::optional<JobBounds> bounds = BoundsOf(job);
      if (!bounds) continue;
      const bool may = any_memory || bounds->may_fit;
      (may ? all.may : all.cannot).push_back({job, *bounds});
    } catch (const Error& error) {  // a layout that the generator does not take
      if (!out->mistake) out->mistake = error.parts();
    }
  }
  std::stable_sort(all.may.begin(), all.may.end(),
                   [](const Candidate& a, const Candidate& b) { return a.per_sequence() < b.per_sequence(); });
  std::stable_sort(all.cannot.begin(), all.cannot.end(),
                   [](const Candidate& a, const Candidate& b) { return a.bounds.peak_bytes < b.bounds.peak_bytes; });
  return all;
}

void SimulateOne(const Job& job, bool any_memory, LayoutSearch* out) {
  try {
    Evaluation e = Evaluate(job);
    ++out->simulated;
    if (e.fits || any_memory) {
      if (!out->best || PerSequence(e) < PerSequence(*out->best)) out->best = std::move(e);
    } else if (!out->best_over || e.peak_bytes < out->best_over->peak_bytes) {
      out->best_over = std::move(e);
    }
  } catch (const Error& error) {
    if (!out->mistake) out->mistake = error.parts();
  }
}

}  // namespace

LayoutSearch SearchLayouts(const Job& base, const Fixed& fixed, bool any_memory) {
  CheckLoads(base);
  LayoutSearch out;
  std::vector<Job> jobs = Enumeration(base, fixed).jobs;
  // To recompute is slower, but may leave room for a faster layout.
  if (!fixed.contains("recompute")) {
    const size_t count = jobs.size();
    for (size_t i = 0; i < count; ++i) jobs[i].recompute = false;
    for (size_t i = 0; i < count && !any_memory; ++i) {
      jobs.push_back(jobs[i]);
      jobs.back().recompute = true;
    }
  }
  const Candidates candidates = BoundAll(jobs, any_memory, &out);
  for (const Candidate& c : candidates.may) {
    if (out.best && c.per_sequence() >= PerSequence(*out.best)) break;
    if (out.simulated >= kMostSimulated) break;
    SimulateOne(c.job, any_memory, &out);
  }
  for (size_t i = 0; i < candidates.cannot.size() && i < kMostThatCannotFit && !out.best; ++i) {
    const Candidate& c = candidates.cannot[i];
    if (out.best_over && c.bounds.peak_bytes >= out.best_over->peak_bytes) break;
    SimulateOne(c.job, any_memory, &out);
  }
  return out;
}

}  // namespace disagmoe
