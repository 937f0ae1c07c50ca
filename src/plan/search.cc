#include "plan/search.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <memory>
#include <thread>

#include "base/error.h"
#include "plan/estimate.h"

namespace disagmoe {
namespace {

constexpr size_t kEverything = 80'000;     // layouts, of which all are simulated
constexpr int64_t kEverythingEffort = 20;  // and the effort that may take
constexpr size_t kBatch = 8;               // looked at together, whatever the number of threads
constexpr size_t kSimulated = 6;           // of the estimated ones
constexpr int kRounds = 8;                 // of simulations, before the climbs
constexpr size_t kKept = 24;               // whole simulations that are kept
constexpr int kMostSteps = 40;             // of a climb
constexpr int kStarts = 3;                 // of climbs, from different numbers of groups

struct Tried {
  Candidate candidate;
  StepEstimate estimate;
  double per_sequence = std::numeric_limits<double>::max();
  bool valid = false;
};

class Search {
 public:
  Search(const GridRequest& request, const SearchControl& control)
      : any_memory_(request.any_memory), colocated_(request.base.colocated()), control_(control), grid_(request) {}

  ScheduleSearch Run(const std::vector<Candidate>& seeds, const std::string& schedule, const Grid::Ranked* given);
  ScheduleSearch GoOn(ScheduleSearch found, const std::vector<Candidate>& seeds);

 private:
  void Estimate(std::vector<Candidate> batch, bool whole = false);
  std::vector<Found> Simulate(const std::vector<Candidate>& batch);
  void SimulateBest();
  std::optional<Found> BestSince(size_t first, double than);
  std::vector<Candidate> Affordable(std::vector<Candidate> candidates) const;
  void Climb();
  bool Rows(const std::vector<Candidate>& order, size_t seeds, int64_t effort);
  bool Everything(const std::vector<Candidate>& seeds);
  void Smallest(const std::vector<Candidate>& smallest);
  bool Known(const Candidate& c) const;
  bool Spent() const { return spent_ >= control_.effort || control_.stopped(); }
  void Report();

  // How much more memory candidates like this one need than the sizing program says.
  double MoreMemory(const Candidate& c) const;

  const bool any_memory_, colocated_;
  const SearchControl& control_;
  Grid grid_;
  int64_t spent_ = 0;
  double best_ = std::numeric_limits<double>::max();  // estimate that fits, a sequence
  std::vector<Tried> tried_;
  std::vector<Candidate> simulated_;
  ScheduleSearch out_;
};

bool Search::Known(const Candidate& c) const {
  return std::any_of(tried_.begin(), tried_.end(), [&](const Tried& t) { return t.candidate == c; });
}

double Search::MoreMemory(const Candidate& c) const {
  double sum = 0, count = 0;
  for (const Tried& t : tried_) {
    const Pools& x = t.candidate.pools;
    if (!t.valid || x.recompute != c.pools.recompute || x.head_on_attention != c.pools.head_on_attention) continue;
    sum += t.estimate.full / t.candidate.full;
    ++count;
  }
  return count >= 4 ? sum / count : 0;
}

void Search::Report() {
  if (control_.progress) control_.progress(out_.schedule, out_.counts, out_.best() ? out_.best()->tokens_per_gpu : 0);
}

void Search::Estimate(std::vector<Candidate> batch, bool whole) {
  std::vector<Tried> results(batch.size());
  std::vector<std::optional<ErrorParts>> mistakes(batch.size());
  // Stopped early, the first is tried all the same: an answer is better than none.
  const size_t in_any_case = tried_.empty() ? 1 : 0;
  ParallelFor(batch.size(), control_.threads, [&](size_t i) {
    Tried& t = results[i];
    t.candidate = batch[i];
    if (i >= in_any_case && control_.stopped()) return;
    try {
      const Job job = grid_.JobOf(batch[i]);
      t.estimate = EstimateStep(job, whole);
      t.per_sequence = t.estimate.step_ns / static_cast<double>(job.global_batch);
      t.valid = true;
    } catch (const Error& error) {  // an order that the generator does not take
      mistakes[i] = error.parts();
    }
  });
  for (size_t i = 0; i < batch.size(); ++i) {
    spent_ += results[i].estimate.operations;
    const bool fits = results[i].valid && (results[i].estimate.fits() || any_memory_);
    if (fits) best_ = std::min(best_, results[i].per_sequence);
    out_.counts.estimated += results[i].valid;
    if (mistakes[i] && !out_.mistake) out_.mistake = mistakes[i];
    tried_.push_back(std::move(results[i]));
  }
}

// Whole steps; what they give is kept.
std::vector<Found> Search::Simulate(const std::vector<Candidate>& batch) {
  std::vector<std::optional<Found>> found(batch.size());
  ParallelFor(batch.size(), control_.threads, [&](size_t i) {
    if (control_.stopped() && !out_.fitting.empty()) return;
    try {
      found[i] = Found{batch[i], EvaluateRounds(grid_.JobOf(batch[i]))};
    } catch (const Error&) {  // said by its estimate
    }
  });
  std::vector<Found> out;
  for (size_t i = 0; i < batch.size(); ++i) {
    simulated_.push_back(batch[i]);
    if (!found[i]) continue;
    ++out_.counts.simulated;
    spent_ += OperationsOf(found[i]->e.job) / (found[i]->e.whole ? 1 : 3);
    out_.Keep(*found[i], any_memory_);
    out.push_back(std::move(*found[i]));
  }
  Report();
  return out;
}

// Of the best estimates that have no whole step yet, as long as one may be the best; of those that may not fit, too,
// where they would be faster.
void Search::SimulateBest() {
  for (int round = 0; round < kRounds; ++round) {
    std::vector<const Tried*> order;
    for (const Tried& t : tried_) {
      if (t.valid && std::find(simulated_.begin(), simulated_.end(), t.candidate) == simulated_.end())
        order.push_back(&t);
    }
    std::stable_sort(order.begin(), order.end(),
                     [](const Tried* a, const Tried* b) { return a->per_sequence < b->per_sequence; });
    std::vector<Candidate> batch;
    size_t over = 0;
    for (const Tried* t : order) {
      if (batch.size() >= kSimulated) break;
      if (!t->estimate.fits() && !any_memory_ && (t->estimate.full > 1.02 || ++over > 2)) continue;
      // The first round also finds what follows the best.
      const double margin = round == 0 ? 1.05 : 1;
      if (!out_.fitting.empty() && t->per_sequence > margin * 1e9 * out_.fitting.front().per_sequence()) break;
      batch.push_back(t->candidate);
    }
    if (batch.empty()) return;
    // One after the other where each is a good part of the effort.
    if (OperationsOf(grid_.JobOf(batch[0])) * 8 * static_cast<int64_t>(batch.size()) > control_.effort) batch.resize(1);
    Simulate(batch);
    if (Spent()) return;
  }
}

// Those that are new, by score, as far as the effort goes.
std::vector<Candidate> Search::Affordable(std::vector<Candidate> candidates) const {
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.score < b.score; });
  std::vector<Candidate> out;
  int64_t operations = spent_;
  for (const Candidate& c : candidates) {
    if (operations > control_.effort) break;
    if (Known(c) || (c.full > kHopeless && !any_memory_)) continue;
    operations += OperationsOf(grid_.JobOf(c)) / 4;
    out.push_back(c);
  }
  return out;
}

// Steepest descent over the neighbours of the best, then of the best with other numbers of groups.
void Search::Climb() {
  std::vector<std::pair<int, int>> climbed;
  for (int start = 0; start < kStarts && !out_.fitting.empty() && !Spent(); ++start) {
    const Found* from = nullptr;
    for (const Found& f : out_.fitting) {
      const std::pair groups{f.candidate.pools.p_a, f.candidate.pools.p_f};
      if (std::find(climbed.begin(), climbed.end(), groups) != climbed.end()) continue;
      from = &f;
      break;
    }
    if (!from) return;
    Found at = *from;
    climbed.push_back({at.candidate.pools.p_a, at.candidate.pools.p_f});
    for (int step = 0; step < kMostSteps && !Spent(); ++step) {
      std::vector<Candidate> fresh = Affordable(grid_.Neighbours(at.candidate));
      const size_t before = tried_.size();
      Estimate(std::move(fresh));
      const std::optional<Found> better = BestSince(before, at.per_sequence());
      if (!better) break;
      at = *better;
    }
  }
}

// The best of what was tried from `first` on, simulated, if it fits and is better than `than`.
std::optional<Found> Search::BestSince(size_t first, double than) {
  std::vector<const Tried*> order;
  for (size_t i = first; i < tried_.size(); ++i) {
    if (tried_[i].valid && tried_[i].per_sequence < 1.01e9 * than) order.push_back(&tried_[i]);
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const Tried* a, const Tried* b) { return a->per_sequence < b->per_sequence; });
  std::vector<Candidate> batch;
  int64_t operations = 0;
  for (const Tried* t : order) {
    if (t->estimate.full > 1.02 && !any_memory_) continue;
    if (batch.size() >= kSimulated || operations > control_.effort / 8) break;
    operations += OperationsOf(grid_.JobOf(t->candidate)) / 3;
    batch.push_back(t->candidate);
  }
  std::optional<Found> best;
  for (Found& f : Simulate(batch)) {
    if ((f.e.fits || any_memory_) && f.per_sequence() < than) {
      than = f.per_sequence();
      best = std::move(f);
    }
  }
  return best;
}

// Nothing fits: those that need least.
void Search::Smallest(const std::vector<Candidate>& smallest) {
  std::vector<Candidate> batch;
  for (const Candidate& c : smallest) {
    if (!Known(c) && batch.size() < 2 * kBatch) batch.push_back(c);
  }
  Estimate(batch);
  std::vector<const Tried*> order;
  for (const Tried& t : tried_) {
    if (t.valid) order.push_back(&t);
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const Tried* a, const Tried* b) { return a->estimate.full < b->estimate.full; });
  for (size_t i = 0; i < order.size() && i < 2; ++i) {
    try {
      out_.Keep({order[i]->candidate, EvaluateRounds(grid_.JobOf(order[i]->candidate))}, any_memory_);
      ++out_.counts.simulated;
    } catch (const Error&) {
    }
  }
}

// Small enough to simulate all that there is.
bool Search::Everything(const std::vector<Candidate>& seeds) {
  const std::optional<std::vector<Candidate>> all = grid_.All(kEverything);
  if (!all) return false;
  int64_t operations = 0;
  for (const Candidate& c : *all) operations += OperationsOf(grid_.JobOf(c));
  if (operations > kEverythingEffort * control_.effort) return false;
  out_.counts.considered = static_cast<int64_t>(all->size());
  Estimate(seeds, true);
  Estimate(*all, true);
  SimulateBest();
  if (out_.fitting.empty()) Smallest({});
  out_.stopped = control_.stopped();
  out_.complete = !out_.stopped;
  Report();
  return true;
}

// Estimates in order until so much is spent; whether one fits.
bool Search::Rows(const std::vector<Candidate>& order, size_t seeds, int64_t effort) {
  const double may_fit = colocated_ ? 1.1 : 1.04;  // the sizing program knows the memory of pools better
  for (size_t i = 0; i < order.size() && (!control_.stopped() || tried_.empty()) && spent_ < effort;) {
    // The times of the sizing program are about what the busiest resource needs: few steps are shorter.
    if (order[i].score * 0.8 > best_) {
      ++i;
      continue;
    }
    std::vector<Candidate> batch;
    int64_t operations = 0;
    for (; i < order.size() && batch.size() < kBatch && operations < control_.effort / 4; ++i) {
      if (Known(order[i]) || (i >= seeds && !any_memory_ && order[i].full * MoreMemory(order[i]) >= may_fit)) continue;
      batch.push_back(order[i]);
      operations += OperationsOf(grid_.JobOf(order[i])) / 4;  // about what an estimate saves
    }
    Estimate(std::move(batch));
  }
  return best_ < std::numeric_limits<double>::max();
}

ScheduleSearch Search::Run(const std::vector<Candidate>& seeds, const std::string& schedule,
                           const Grid::Ranked* given) {
  out_.schedule = schedule;
  if (control_.exhaust && Everything(seeds)) return std::move(out_);
  const Grid::Ranked ranked = given ? *given : grid_.Rank(kShapes, control_.stop);
  out_.counts.considered = ranked.considered;
  std::vector<Candidate> order = seeds;
  for (const Candidate& c : ranked.fitting) {
    if (std::find(seeds.begin(), seeds.end(), c) == seeds.end()) order.push_back(c);
  }
  // Half of the effort for what is ranked, the rest for what is around the best of it. Where nothing fits for long,
  // what needs least memory comes first.
  if (!Rows(order, seeds.size(), control_.effort / 4) && !any_memory_) Rows(ranked.smallest, 0, control_.effort / 2);
  Rows(order, seeds.size(), control_.effort / 2);
  SimulateBest();
  spent_ = std::min(spent_, control_.effort * 3 / 5);  // the climb has its share, whatever was spent
  Climb();
  if (out_.fitting.empty()) {
    Smallest(ranked.smallest);
    Climb();
  }
  out_.stopped = control_.stopped();
  Report();
  return std::move(out_);
}

ScheduleSearch Search::GoOn(ScheduleSearch found, const std::vector<Candidate>& seeds) {
  if (found.complete) return found;
  out_ = std::move(found);
  for (const auto* list : {&out_.fitting, &out_.over}) {
    for (const Found& f : *list) simulated_.push_back(f.candidate);
  }
  const double before = out_.fitting.empty() ? std::numeric_limits<double>::max() : out_.fitting.front().per_sequence();
  std::vector<Candidate> fresh;
  for (Candidate c : seeds) {
    const bool known = std::find(simulated_.begin(), simulated_.end(), c) != simulated_.end();
    if (!known && grid_.Complete(&c) && std::find(fresh.begin(), fresh.end(), c) == fresh.end()) fresh.push_back(c);
  }
  spent_ = control_.effort / 2;
  Estimate(std::move(fresh));
  SimulateBest();
  if (!out_.fitting.empty() && out_.fitting.front().per_sequence() < before) Climb();
  out_.stopped |= control_.stopped();
  return std::move(out_);
}

}  // namespace

void ScheduleSearch::Keep(Found found, bool any_memory) {
  const auto insert = [&](std::vector<Found>* list, const auto& before) {
    list->insert(std::upper_bound(list->begin(), list->end(), found, before), found);
    if (list->size() > kKept) list->pop_back();
  };
  if (found.e.fits || any_memory) {
    insert(&fitting, [](const Found& a, const Found& b) { return a.per_sequence() < b.per_sequence(); });
  } else {
    insert(&over, [](const Found& a, const Found& b) { return a.e.peak_bytes < b.e.peak_bytes; });
  }
}

ScheduleSearch Continue(ScheduleSearch found, const GridRequest& request, const SearchControl& control,
                        const std::vector<Candidate>& seeds) {
  return Search(request, control).GoOn(std::move(found), seeds);
}

SearchCounts& SearchCounts::operator+=(const SearchCounts& o) {
  considered += o.considered;
  estimated += o.estimated;
  simulated += o.simulated;
  return *this;
}

ScheduleSearch SearchSchedule(const GridRequest& request, const SearchControl& control,
                              const std::vector<Candidate>& seeds, const Grid::Ranked* ranked) {
  return Search(request, control).Run(seeds, request.base.schedule, ranked);
}

LayoutSearch SearchLayouts(const Job& base, const Fixed& fixed, bool any_memory) {
  const SearchControl control;
  const int64_t near = fixed.contains("batch") ? 0 : base.global_batch / 20;
  LayoutSearch out;
  CheckLoads(base);
  ScheduleSearch found;
  try {
    found = SearchSchedule({base, fixed, base.global_batch - near, base.global_batch + near, any_memory}, control);
  } catch (const Error& error) {
    out.mistake = error.parts();
    return out;
  }
  out.considered = static_cast<int>(found.counts.considered);
  out.simulated = static_cast<int>(found.counts.simulated);
  out.mistake = found.mistake;
  if (!found.fitting.empty()) out.best = std::move(found.fitting.front().e);
  if (!found.over.empty()) out.best_over = std::move(found.over.front().e);
  if (!out.best && !out.best_over && !out.mistake) {
    try {  // what is wrong with what is given
      Evaluate(base);
    } catch (const Error& error) {
      out.mistake = error.parts();
    }
  }
  return out;
}

void ParallelFor(size_t count, int threads, const std::function<void(size_t)>& fn) {
  std::atomic<size_t> next{0};
  std::exception_ptr first;
  std::mutex mutex;
  const auto work = [&] {
    for (size_t i = next++; i < count; i = next++) {
      try {
        fn(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    }
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads && static_cast<size_t>(t) < count; ++t) others.emplace_back(work);
  work();
  for (std::thread& t : others) t.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace disagmoe
