// From traces of short runs to a profile.
#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "base/error.h"
#include "cost/profile.h"
#include "spec/layout.h"
#include "spec/params.h"

namespace disagmoe {
namespace {

// Of sorted values.
double Quantile(const std::vector<int64_t>& sorted, double q) {
  const double at = q * static_cast<double>(sorted.size() - 1);
  const size_t i = static_cast<size_t>(at);
  const size_t j = std::min(i + 1, sorted.size() - 1);
  return static_cast<double>(sorted[i]) + (at - static_cast<double>(i)) * static_cast<double>(sorted[j] - sorted[i]);
}

bool IsComputation(const TraceEvent& e) { return e.stream == Stream::kForward || e.stream == Stream::kBackward; }

// "F3.0" -> 3.
int StageOf(const TraceEvent& e) { return std::stoi(e.name.substr(1)); }

std::map<int, std::vector<const TraceEvent*>> ByRank(const std::vector<TraceEvent>& events) {
  std::map<int, std::vector<const TraceEvent*>> out;
  for (const TraceEvent& e : events) out[e.rank].push_back(&e);
  return out;
}

Curve CurveOf(std::vector<std::pair<int64_t, double>> points, bool ascending_times) {
  std::sort(points.begin(), points.end());
  Curve curve;
  for (const auto& [x, ns] : points) {
    int64_t time = static_cast<int64_t>(ns + 0.5);
    if (ascending_times && !curve.ns.empty()) time = std::max(time, curve.ns.back());
    curve.x.push_back(x);
    curve.ns.push_back(time);
  }
  return curve;
}

}  // namespace

void ProfileBuilder::Keep(std::vector<Point>* points, int64_t x, std::vector<int64_t> times) {
  if (times.empty()) return;
  std::sort(times.begin(), times.end());
  const double median = Quantile(times, 0.5);
  const Point point{x, median, median > 0 ? (Quantile(times, 0.75) - Quantile(times, 0.25)) / median : 0};
  for (Point& p : *points) {
    if (p.x != x) continue;
    if (median < p.median) p = point;
    return;
  }
  points->push_back(point);
}

void ProfileBuilder::KeepStage(const RunConfig& config, StageKind kind, bool backward, std::vector<int64_t> times) {
  StageTimes of;
  of.kind = kind;
  of.recompute = config.train.recompute == "layer";
  if (kind <= StageKind::kDenseAttention) of.seq_length = config.train.seq_length;
  if (kind == StageKind::kExperts) {
    of.experts = config.model.num_experts;
    of.per_row = config.model.num_experts_per_tok;
  }
  std::vector<Point> one;
  Keep(&one, config.train.micro_batch_size * config.train.seq_length, std::move(times));
  for (StagePoint& p : stages_) {
    if (std::tie(p.of.kind, p.of.recompute, p.of.seq_length, p.of.experts, p.of.per_row, p.backward, p.point.x) !=
        std::tie(of.kind, of.recompute, of.seq_length, of.experts, of.per_row, backward, one[0].x))
      continue;
    if (one[0].median < p.point.median) p.point = one[0];
    return;
  }
  stages_.push_back({of, backward, one[0]});
}

void ProfileBuilder::AddStages(const RunConfig& config, const std::vector<TraceEvent>& events) {
  std::map<std::pair<StageKind, bool>, std::vector<int64_t>> times;
  std::vector<int64_t> gaps;
  for (const auto& [rank, list] : ByRank(events)) {
    const TraceEvent* last = nullptr;  // computation, with no wait after it
    for (const TraceEvent* e : list) {
      if (e->stream == Stream::kWait || e->stream == Stream::kStep) last = nullptr;
      if (!IsComputation(*e)) continue;
      times[{StageKindOf(config.model, StageOf(*e)), e->stream == Stream::kBackward}].push_back(e->end_ns -
                                                                                                e->begin_ns);
      if (last != nullptr && last->step == e->step) gaps.push_back(e->begin_ns - last->end_ns);
      last = e;
    }
  }
  const bool experts_only = config.model.num_experts != config_.model.num_experts ||
                            config.model.num_experts_per_tok != config_.model.num_experts_per_tok;
  for (auto& [key, list] : times) {
    if (experts_only && key.first != StageKind::kExperts) continue;
    KeepStage(config, key.first, key.second, std::move(list));
  }
  Keep(&gap_, 0, std::move(gaps));
}

void ProfileBuilder::AddMessages(const RunConfig& config, const std::vector<TraceEvent>& events) {
  std::map<int64_t, std::vector<int64_t>> by_bytes;
  std::vector<int64_t> wakes, lates;
  const TransportConfig& nic = config.transport;
  for (const auto& [rank, list] : ByRank(events)) {
    const TraceEvent* before = nullptr;
    for (const TraceEvent* e : list) {
      if (e->stream == Stream::kReceive) {
        const int64_t took = e->end_ns - e->begin_ns;
        if (nic.paced && nic.paced_latency_us > 0) {
          const double model = nic.paced_latency_us * 1e3 + static_cast<double>(e->bytes) * 8 / nic.paced_gbps;
          lates.push_back(std::max<int64_t>(0, took - std::llround(model)));
        } else {
          by_bytes[e->bytes].push_back(took);
        }
        const bool waited = before != nullptr && before->stream == Stream::kWait;
        if (waited && before->end_ns >= e->end_ns) wakes.push_back(before->end_ns - e->end_ns);
      }
      before = e;
    }
  }
  // Messages of one micro-batch differ by some metadata only: nearly equal sizes are one point.
  std::vector<Point>* points = config.transport.paced ? &paced_message_ : &message_;
  for (auto it = by_bytes.begin(); it != by_bytes.end();) {
    const int64_t first = it->first;
    int64_t bytes = 0;
    std::vector<int64_t> times;
    for (; it != by_bytes.end() && it->first <= first + first / 4; ++it) {
      bytes += it->first * static_cast<int64_t>(it->second.size());
      times.insert(times.end(), it->second.begin(), it->second.end());
    }
    const int64_t mean = bytes / static_cast<int64_t>(times.size());
    Keep(points, mean, std::move(times));
  }
  Keep(&wake_, 0, std::move(wakes));
  Keep(&late_, 0, std::move(lates));
}

void ProfileBuilder::AddEnds(const RunConfig& config, const std::vector<TraceEvent>& events) {
  const std::vector<StepEndWork> work = StepEndWorkOf(config, TrainingSchedule(config));
  std::map<int64_t, const TraceEvent*> last_to_sum;  // by step
  std::map<int64_t, int64_t> first_begin, end;       // rank 0's begin, everybody's end
  std::map<int, std::vector<int64_t>> optimizer;     // by rank
  for (const TraceEvent& e : events) {
    if (e.stream != Stream::kStep) continue;
    if (e.name == "optimizer") optimizer[e.rank].push_back(e.end_ns - e.begin_ns);
    if (e.name == "reduce") {
      const TraceEvent*& last = last_to_sum[e.step];
      if (last == nullptr || e.begin_ns > last->begin_ns) last = &e;
    }
    if (e.name != "step") continue;
    if (e.rank == 0) first_begin[e.step] = e.begin_ns;
    end[e.step] = std::max(end[e.step], e.end_ns);
  }
  for (auto& [rank, times] : optimizer) Keep(&optimizer_, work.at(rank).elements, std::move(times));
  std::vector<int64_t> sums, reports;
  for (const auto& [step, e] : last_to_sum) sums.push_back(e->end_ns - e->begin_ns);
  for (const auto& [step, begin] : first_begin) {
    if (end.contains(step - 1)) reports.push_back(std::max<int64_t>(0, begin - end[step - 1]));
  }
  int64_t bytes = 0;
  for (const StepEndWork& w : work) bytes = std::max(bytes, w.sent_bytes);
  Keep(&sums_, bytes, std::move(sums));
  Keep(&report_, 0, std::move(reports));
}

void ProfileBuilder::Add(const RunConfig& config, const std::vector<TraceEvent>& events) {
  AddEnds(config, events);
  if (config.layout.colocated || config.layout.workers() != 2) return;
  if (!config.transport.paced) AddStages(config, events);
  AddMessages(config, events);
}

Profile ProfileBuilder::Build() const {
  Profile p;
  p.threads = config_.device.threads;
  p.dtype = config_.train.dtype;
  p.model = config_.model;
  auto curve = [](const std::vector<Point>& points, bool ascending) {
    std::vector<std::pair<int64_t, double>> list;
    for (const Point& point : points) list.emplace_back(point.x, point.median);
    return CurveOf(list, ascending);
  };
  using Key = std::tuple<StageKind, bool, int64_t, int64_t, int64_t>;
  std::map<Key, std::pair<std::vector<Point>, std::vector<Point>>> tables;
  for (const StagePoint& s : stages_) {
    auto& table = tables[{s.of.kind, s.of.recompute, s.of.seq_length, s.of.experts, s.of.per_row}];
    (s.backward ? table.second : table.first).push_back(s.point);
  }
  for (const auto& [key, points] : tables) {
    StageTimes t;
    std::tie(t.kind, t.recompute, t.seq_length, t.experts, t.per_row) = key;
    t.forward = curve(points.first, false);
    t.backward = curve(points.second, false);
    DM_CHECK(t.forward.x == t.backward.x, "forwards and backwards of other sizes");
    for (const auto* list : {&points.first, &points.second}) {
      for (const Point& point : *list) t.spread = std::max(t.spread, point.spread);
    }
    p.stages.push_back(std::move(t));
  }
  p.message = curve(message_, true);
  p.paced_message = curve(paced_message_, true);
  p.optimizer = curve(optimizer_, true);
  p.sums = curve(sums_, true);
  auto single = [](const std::vector<Point>& points) {
    return points.empty() ? 0 : static_cast<int64_t>(points[0].median);
  };
  p.wake_ns = single(wake_);
  p.late_ns = single(late_);
  p.gap_ns = single(gap_);
  p.report_ns = single(report_);
  return p;
}

namespace {

// Elements that a set of ranks holds together. Experts are summed apart from all else, with those of the worker's like
// in the other replicas.
struct Holders {
  bool experts = false;
  std::vector<int> ranks;
  auto operator<=>(const Holders&) const = default;
};

std::map<Holders, int64_t> ElementsByHolders(const RunConfig& config, const Schedule& schedule) {
  const int pipeline = config.layout.pipeline_workers();
  std::map<Holders, int64_t> shared;
  // Of ranks in replica 0.
  const auto add = [&](bool experts, const std::vector<int>& ranks, int64_t elements) {
    Holders all{experts, {}};
    for (int r = 0; r < config.layout.replicas; ++r)
      for (int rank : ranks) all.ranks.push_back(rank + r * pipeline);
    shared[all] += elements;
  };
  for (const ParamSpec& spec : ParamTable(config.model)) {
    int64_t elements = 1;
    for (int64_t n : spec.shape) elements *= n;
    std::vector<int> ranks = schedule.groups[schedule.group(spec.stage, 0)].ranks;
    if (spec.per_expert) {
      const std::vector<int64_t> begin = ExpertBegins(config, spec.stage / 2);
      const int64_t each = elements / spec.shape[0];
      for (size_t i = 0; i < ranks.size(); ++i) add(true, {ranks[i]}, each * (begin[i + 1] - begin[i]));
      continue;
    }
    if (spec.also_stage >= 0) {
      const std::vector<int>& more = schedule.groups[schedule.group(spec.also_stage, 0)].ranks;
      ranks.insert(ranks.end(), more.begin(), more.end());
      std::sort(ranks.begin(), ranks.end());
      ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    }
    add(false, ranks, elements);
  }
  return shared;
}

}  // namespace

std::vector<StepEndWork> StepEndWorkOf(const RunConfig& config, const Schedule& schedule) {
  std::vector<StepEndWork> work(config.layout.workers());
  for (const auto& [of, elements] : ElementsByHolders(config, schedule)) {
    const int64_t holders = std::ssize(of.ranks), blocks = (elements + 15) / 16;
    for (int64_t i = 0; i < holders; ++i) {  // parts as the runtime cuts them: multiples of 16
      const int64_t own =
          std::min(elements, PartBegin(blocks, holders, i + 1) * 16) - PartBegin(blocks, holders, i) * 16;
      StepEndWork& w = work[of.ranks[i]];
      w.elements += config.train.shard_optimizer ? own : elements;
      w.sent_bytes += ((elements - own) + own * (holders - 1)) * (holders > 1 ? 4 : 0);
    }
  }
  return work;
}

}  // namespace disagmoe
