#include "plan/lengths_plan.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "base/error.h"
#include "plan/estimate.h"

namespace disagmoe {
namespace {

constexpr size_t kOfASearch = 10;     // layouts of one search that may become candidates
constexpr int64_t kFixedEffort = 16;  // a search of a layout's settings has such a part of a whole search's effort
constexpr size_t kEstimated = 4;      // settings of a layout that are looked at first
constexpr size_t kFinalists = 4;      // besides the best of each length

// Who holds which parameters.
struct Layout {
  size_t schedule = 0;  // in the request
  int replicas = 1, p_a = 1, m = 1, p_f = 1, n = 1, virtual_stages = 1;
  bool head_on_attention = false, mixed_nodes = false;
  double nics_a = 0, nics_f = 0;
  std::vector<std::vector<int>> expert_counts = {};
  auto Key() const {
    return std::tie(schedule, replicas, p_a, m, p_f, n, virtual_stages, head_on_attention, mixed_nodes, nics_a, nics_f,
                    expert_counts);
  }
};

Layout LayoutOf(size_t schedule, const Job& j) {
  const bool two = !j.colocated();
  Layout out;
  out.schedule = schedule, out.replicas = j.replicas(), out.p_a = j.p_a, out.m = j.m;
  if (two) {
    out.p_f = j.p_f, out.n = j.n, out.head_on_attention = j.head_on_attention, out.mixed_nodes = j.mixed_nodes;
  } else {
    out.virtual_stages = j.virtual_stages;
  }
  out.nics_a = j.nics_a, out.nics_f = j.nics_f, out.expert_counts = j.expert_counts;
  return out;
}

// The text without what changes with the length.
std::string LayoutOnly(const Evaluation& e) {
  const std::string all = LayoutText(e);
  std::string out = all.substr(0, all.find(", b "));
  if (!e.job.colocated() && e.job.head_on_attention) out += ", head on A";
  if (!e.job.colocated() && e.job.mixed_nodes) out += ", mixed nodes";
  return out;
}

class Planner {
 public:
  Planner(const LengthsRequest& request, const SearchControl& control) : request_(request), control_(control) {
    const Job& base = request.schedules.at(0).base;
    out_.tokens_a_step =
        static_cast<double>(request.schedules[0].batch_wanted()) * static_cast<double>(base.seq_length);
    out_.phases = request.phases;
    FindLengths();
  }

  LengthsPlan Run();

 private:
  bool AnyMemory() const { return request_.schedules[0].any_memory; }
  void FindLengths();
  GridRequest RequestAt(size_t schedule, int64_t tokens) const;
  ScheduleSearch Searched(const GridRequest& request, const SearchControl& control);
  std::vector<std::pair<size_t, Evaluation>> Search(int64_t tokens);
  void Propose(const std::vector<std::vector<std::pair<size_t, Evaluation>>>& found);
  GridRequest Fixed(size_t layout, size_t length) const;
  double Estimate(size_t layout, size_t length) const;
  void KeepFinalists();
  void Improve(size_t layout, size_t length);
  void Offer(LayoutAt* at, const Evaluation& e) const;
  void Rank();
  void Moves();
  void Changes();

  const LengthsRequest& request_;
  const SearchControl& control_;
  std::vector<Layout> layouts_;
  LengthsPlan out_;
};

void Planner::FindLengths() {
  std::map<int64_t, double> shares;
  for (size_t i = 0; i < request_.lengths.buckets.size(); ++i) {
    shares[request_.lengths.buckets[i].tokens] += request_.phases.empty() ? request_.lengths.StepShare(i) : 0;
  }
  if (request_.lengths.longest > 0) shares.try_emplace(request_.lengths.longest, 0);
  double steps = 0;
  for (const Phase& p : request_.phases) steps += static_cast<double>(p.steps);
  for (const Phase& p : request_.phases) shares[p.tokens] += static_cast<double>(p.steps) / steps;
  DM_CHECK(!shares.empty(), "lengths or phases");
  for (const auto& [tokens, share] : shares) {
    out_.lengths.push_back(tokens);
    out_.shares.push_back(share);
  }
}

GridRequest Planner::RequestAt(size_t schedule, int64_t tokens) const {
  GridRequest out = request_.schedules[schedule];
  const double scale = static_cast<double>(out.base.seq_length) / static_cast<double>(tokens);
  const auto sequences = [&](int64_t batch, double by) { return static_cast<double>(batch) * scale * by; };
  const double wanted = sequences(out.base.global_batch, 1);
  out.base.global_batch = std::max<int64_t>(1, std::llround(wanted));
  const double least = sequences(out.batch_least, 1 - request_.batch_slack),
               most = sequences(out.batch_most, 1 + request_.batch_slack);
  out.batch_least = std::clamp<int64_t>(static_cast<int64_t>(std::ceil(least - 1e-9)), 1, out.base.global_batch);
  out.batch_most = std::max<int64_t>(out.base.global_batch, static_cast<int64_t>(std::floor(most + 1e-9)));
  out.base.seq_length = tokens;
  return out;
}

ScheduleSearch Planner::Searched(const GridRequest& request, const SearchControl& control) {
  ScheduleSearch out;
  try {
    out = SearchSchedule(request, control);
  } catch (const Error& e) {  // nothing can be at this length
    out.mistake = e.parts();
  }
  out_.counts += out.counts;
  out_.stopped |= out.stopped;
  if (out.mistake && !out_.mistake) out_.mistake = out.mistake;
  return out;
}

// The best layouts of all schedules at a length, each once.
std::vector<std::pair<size_t, Evaluation>> Planner::Search(int64_t tokens) {
  std::vector<std::pair<size_t, Evaluation>> all, out;
  for (size_t s = 0; s < request_.schedules.size(); ++s) {
    const ScheduleSearch search = Searched(RequestAt(s, tokens), control_);
    for (const Found& f : search.fitting) all.emplace_back(s, f.e);
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const auto& a, const auto& b) { return a.second.tokens_per_gpu > b.second.tokens_per_gpu; });
  for (auto& [s, e] : all) {
    const Layout layout = LayoutOf(s, e.job);
    const bool known = std::any_of(
        out.begin(), out.end(), [&](const auto& x) { return LayoutOf(x.first, x.second.job).Key() == layout.Key(); });
    if (!known && out.size() < kOfASearch) out.emplace_back(s, std::move(e));
  }
  return out;
}

// The best of each search, then the second of each, and so on.
void Planner::Propose(const std::vector<std::vector<std::pair<size_t, Evaluation>>>& found) {
  for (size_t rank = 0; rank < kOfASearch; ++rank) {
    for (size_t k = 0; k < found.size(); ++k) {
      if (rank >= found[k].size()) continue;
      const auto& [s, e] = found[k][rank];
      const Layout layout = LayoutOf(s, e.job);
      size_t i = 0;
      while (i < layouts_.size() && layouts_[i].Key() != layout.Key()) ++i;
      if (i == layouts_.size()) {
        if (i >= request_.most_layouts) continue;
        layouts_.push_back(layout);
        out_.layouts.push_back({e.job.schedule, LayoutOnly(e), std::vector<LayoutAt>(out_.lengths.size()), kCannot});
      }
      if (k < out_.lengths.size()) Offer(&out_.layouts[i].at[k], e);  // the last search is of the mean
    }
  }
}

void Planner::Offer(LayoutAt* at, const Evaluation& e) const {
  const double tokens = static_cast<double>(e.job.global_batch) * static_cast<double>(e.job.seq_length);
  const double seconds = e.step_seconds * out_.tokens_a_step / tokens;
  if (!(e.fits || AnyMemory()) || seconds >= at->step_seconds) return;
  *at = {e.fits, e.job, LayoutText(e), seconds, e.tokens_per_gpu, e.peak_bytes};
}

// A request that leaves a layout only its settings.
GridRequest Planner::Fixed(size_t layout, size_t length) const {
  const Layout& x = layouts_[layout];
  GridRequest request = RequestAt(x.schedule, out_.lengths[length]);
  Job& base = request.base;
  base.p_a = x.p_a, base.m = x.m, base.virtual_stages = x.virtual_stages;
  if (!base.colocated()) base.p_f = x.p_f, base.n = x.n;
  base.head_on_attention = x.head_on_attention, base.mixed_nodes = x.mixed_nodes;
  base.nics_a = x.nics_a, base.nics_f = x.nics_f;
  base.expert_counts = x.expert_counts;
  const int attention = x.replicas * x.p_a * x.m, ffn = base.colocated() ? 0 : x.replicas * x.p_f * x.n;
  base.idle_gpus = base.cluster.gpus - attention - (base.ffn_cluster ? 0 : ffn);
  base.idle_ffn_gpus = base.ffn_cluster ? base.ffn_cluster->gpus - ffn : 0;
  for (const char* name : {"p", "p_a", "p_f", "m", "ep", "n", "v", "head", "mixed_nodes", "nics_a", "nics_f"}) {
    request.fixed.insert(name);
  }
  return request;
}

// About the seconds of a step, with the best of a few settings; kCannot where none of them fits.
double Planner::Estimate(size_t layout, size_t length) const {
  const Grid grid(Fixed(layout, length));
  const Grid::Ranked ranked = grid.Rank(1);
  double best = kCannot;
  for (size_t i = 0; i < ranked.fitting.size() && i < kEstimated; ++i) {
    const Job job = grid.JobOf(ranked.fitting[i]);
    if (LayoutOf(layouts_[layout].schedule, job).Key() != layouts_[layout].Key()) continue;
    try {
      const StepEstimate e = EstimateStep(job);
      const double tokens = static_cast<double>(job.global_batch) * static_cast<double>(job.seq_length);
      if (e.full < 1.02 || AnyMemory()) best = std::min(best, e.step_ns * 1e-9 * out_.tokens_a_step / tokens);
    } catch (const Error&) {  // an order that the generator does not take
    }
  }
  return best;
}

// Of the candidates: the best in expectation, by estimates, and the best of each length.
void Planner::KeepFinalists() {
  const size_t lengths = out_.lengths.size();
  std::vector<double> seconds(layouts_.size() * lengths, kCannot);
  ParallelFor(seconds.size(), control_.threads, [&](size_t i) {
    const LayoutAt& known = out_.layouts[i / lengths].at[i % lengths];
    seconds[i] = known.step_seconds;
    if (seconds[i] == kCannot && !control_.stopped()) seconds[i] = Estimate(i / lengths, i % lengths);
  });
  std::vector<std::pair<double, size_t>> order;
  std::vector<char> keep(layouts_.size(), 0);
  for (size_t i = 0; i < layouts_.size(); ++i) {
    double expected = 0;
    for (size_t k = 0; k < lengths; ++k) expected += std::max(1e-9, out_.shares[k]) * seconds[i * lengths + k];
    order.emplace_back(expected, i);
  }
  std::sort(order.begin(), order.end());
  for (size_t i = 0; i < order.size() && i < kFinalists; ++i) keep[order[i].second] = 1;
  for (size_t k = 0; k < lengths; ++k) {
    size_t best = 0;
    for (size_t i = 1; i < layouts_.size(); ++i) {
      best = seconds[i * lengths + k] < seconds[best * lengths + k] ? i : best;
    }
    if (!keep.empty()) keep[best] = 1;
  }
  size_t kept = 0;
  for (size_t i = 0; i < layouts_.size(); ++i) {
    if (!keep[i]) continue;
    layouts_[kept] = layouts_[i];
    if (kept != i) out_.layouts[kept] = std::move(out_.layouts[i]);
    ++kept;
  }
  layouts_.resize(kept);
  out_.layouts.resize(kept);
}

// The best settings of a layout at a length.
void Planner::Improve(size_t layout, size_t length) {
  SearchControl control = control_;
  control.effort = std::max<int64_t>(1, control_.effort / kFixedEffort);
  control.progress = nullptr;
  control.exhaust = false;
  const ScheduleSearch search = Searched(Fixed(layout, length), control);
  for (const Found& f : search.fitting) {
    if (LayoutOf(layouts_[layout].schedule, f.e.job).Key() == layouts_[layout].Key()) {
      Offer(&out_.layouts[layout].at[length], f.e);
    }
  }
}

// The best in expectation first. A length of share 0, the longest, must be possible as well.
void Planner::Rank() {
  for (LayoutRow& row : out_.layouts) {
    row.expected = 0;
    for (size_t k = 0; k < out_.lengths.size(); ++k) {
      if (row.at[k].step_seconds == kCannot) {
        row.expected = kCannot;
        break;
      }
      row.expected += out_.shares[k] * row.at[k].step_seconds;
    }
  }
  std::stable_sort(out_.layouts.begin(), out_.layouts.end(),
                   [](const LayoutRow& a, const LayoutRow& b) { return a.expected < b.expected; });
  out_.ideal = 0;
  for (size_t k = 0; k < out_.lengths.size(); ++k) {
    int best = -1;
    double seconds = kCannot;
    for (size_t i = 0; i < out_.layouts.size(); ++i) {
      if (out_.layouts[i].at[k].step_seconds < seconds) {
        best = static_cast<int>(i), seconds = out_.layouts[i].at[k].step_seconds;
      }
    }
    out_.best.push_back(best);
    if (out_.shares[k] > 0) out_.ideal += out_.shares[k] * seconds;
  }
}

// Of each pair; who holds what does not depend on the length.
void Planner::Moves() {
  std::vector<const Job*> jobs;
  std::vector<Holdings> holdings;
  for (const LayoutRow& row : out_.layouts) {
    size_t k = 0;
    while (row.at[k].step_seconds == kCannot) ++k;
    jobs.push_back(&row.at[k].job);
    holdings.push_back(HoldingsOf(*jobs.back()));
  }
  out_.moves.assign(jobs.size(), std::vector<MoveCost>(jobs.size()));
  ParallelFor(jobs.size() * jobs.size(), control_.threads, [&](size_t i) {
    const size_t from = i / jobs.size(), to = i % jobs.size();
    out_.moves[from][to] = CostOfMoving(*jobs[from], holdings[from], *jobs[to], holdings[to], request_.restart_seconds);
  });
}

void Planner::Changes() {
  if (out_.layouts.empty()) return;
  const LayoutCosts costs = out_.Costs();
  if (!out_.phases.empty()) {
    std::vector<int> length_of;
    for (const Phase& p : out_.phases) {
      length_of.push_back(out_.LengthOf(p.tokens));
      if (out_.best[length_of.back()] < 0) return;
    }
    out_.resizes = PlanResizes(costs, out_.phases, length_of);
    for (size_t k = 1; k < out_.phases.size(); ++k) {
      out_.break_even.push_back(BreakEvenOf(costs, out_.resizes->layout[k - 1], length_of[k], false));
    }
    return;
  }
  if (!out_.single()) return;
  for (size_t k = 0; k < out_.lengths.size(); ++k) {
    out_.break_even.push_back(BreakEvenOf(costs, 0, static_cast<int>(k), true));
    out_.expected_run.push_back(out_.shares[k] < 1 ? 1 / (1 - out_.shares[k]) : kCannot);
  }
}

LengthsPlan Planner::Run() {
  std::vector<std::vector<std::pair<size_t, Evaluation>>> found;
  double mean = 0;
  for (size_t k = 0; k < out_.lengths.size(); ++k) {
    found.push_back(Search(out_.lengths[k]));
    mean += out_.shares[k] * static_cast<double>(out_.lengths[k]);
  }
  const auto middle = static_cast<int64_t>(std::llround(mean));
  if (std::find(out_.lengths.begin(), out_.lengths.end(), middle) == out_.lengths.end()) {
    found.push_back(Search(middle));
  }
  Propose(found);
  found.clear();
  KeepFinalists();
  for (size_t i = 0; i < layouts_.size(); ++i) {
    for (size_t k = 0; k < out_.lengths.size() && !control_.stopped(); ++k) Improve(i, k);
  }
  // A layout of the mean that no length can have, with sequences that do not divide.
  std::erase_if(out_.layouts, [](const LayoutRow& row) {
    return std::all_of(row.at.begin(), row.at.end(), [](const LayoutAt& at) { return at.step_seconds == kCannot; });
  });
  if (out_.layouts.empty() && out_.counts.estimated == 0 && out_.mistake) throw Error(*out_.mistake);
  Rank();
  Moves();
  Changes();
  return std::move(out_);
}

}  // namespace

LayoutCosts LengthsPlan::Costs() const {
  LayoutCosts out;
  for (size_t i = 0; i < layouts.size(); ++i) {
    out.step.emplace_back();
    out.move.emplace_back();
    for (const LayoutAt& at : layouts[i].at) out.step.back().push_back(at.step_seconds);
    for (const MoveCost& m : moves[i]) out.move.back().push_back(m.seconds());
  }
  return out;
}

int LengthsPlan::LengthOf(int64_t tokens) const {
  const auto at = std::lower_bound(lengths.begin(), lengths.end(), tokens);
  DM_CHECK(at != lengths.end() && *at == tokens, "a length of the plan");
  return static_cast<int>(at - lengths.begin());
}

LengthsPlan PlanForLengths(const LengthsRequest& request, const SearchControl& control) {
  DM_CHECK(!request.schedules.empty(), "schedules to try");
  return Planner(request, control).Run();
}

}  // namespace disagmoe
