#include "trace/compare.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"

namespace disagmoe {
namespace {

using Names = std::vector<std::string>;
using Orders = std::map<std::string, Names>;  // by stream

std::string StreamName(const TraceEvent& e, const std::vector<int>& group_of_rank) {
  if (e.stream == Stream::kForward || e.stream == Stream::kBackward) return "computations";
  if (e.stream != Stream::kSend && e.stream != Stream::kReceive) return "";
  DM_CHECK(e.peer >= 0 && e.peer < static_cast<int>(group_of_rank.size()), e.name + " without its peer");
  return std::string(e.stream == Stream::kSend ? "sends" : "receives") +
         (e.name[1] == 'B' ? " of gradients" : " of activations") + (e.stream == Stream::kSend ? " to" : " from") +
         " group " + std::to_string(group_of_rank[e.peer]);
}

Orders OrdersOf(std::vector<const TraceEvent*> events, const std::vector<int>& group_of_rank) {
  std::stable_sort(events.begin(), events.end(),
                   [](const TraceEvent* a, const TraceEvent* b) { return a->begin_ns < b->begin_ns; });
  Orders orders;
  std::map<std::string, std::set<std::string>> seen;
  for (const TraceEvent* e : events) {
    const std::string stream = StreamName(*e, group_of_rank);
    if (!stream.empty() && seen[stream].insert(e->name).second) orders[stream].push_back(e->name);
  }
  return orders;
}

std::string FirstDifference(Orders simulated, Orders measured, int64_t step) {
  for (const auto& [stream, names] : measured) simulated[stream];  // a stream may be missing on one side
  for (const auto& [stream, a] : simulated) {
    const Names& b = measured[stream];
    const size_t n = std::max(a.size(), b.size());
    for (size_t i = 0; i < n; ++i) {
      if (i < a.size() && i < b.size() && a[i] == b[i]) continue;
      auto name = [i](const Names& names) { return i < names.size() ? names[i] : "nothing"; };
      return stream + ", number " + std::to_string(i + 1) + ": simulated " + name(a) + ", measured " + name(b) +
             " (step " + std::to_string(step) + ")";
    }
  }
  return "";
}

std::string KindOf(const TraceEvent& e, int head_stage) {
  if (e.stream == Stream::kStep) return e.name == "step" ? "" : e.name;
  if (e.stream == Stream::kWait) return e.name;
  if (e.stream != Stream::kForward && e.stream != Stream::kBackward) return "";
  const int stage = std::stoi(e.name.substr(1));
  const std::string direction = e.name[0] == 'F' ? " forward" : e.name[0] == 'B' ? " backward" : " weights";
  return (stage == head_stage ? "head" : stage % 2 == 0 ? "attention" : "FFN") + direction;
}

int64_t Median(std::vector<int64_t> values) {
  DM_CHECK(!values.empty(), "a median of nothing");
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

using ByStep = std::map<int64_t, std::vector<const TraceEvent*>>;

std::map<std::string, std::pair<int64_t, int64_t>> KindsOf(const std::vector<const TraceEvent*>& events,
                                                           int head_stage) {
  std::map<std::string, std::pair<int64_t, int64_t>> kinds;  // operations, time
  for (const TraceEvent* e : events) {
    const std::string kind = KindOf(*e, head_stage);
    if (kind.empty()) continue;
    ++kinds[kind].first;
    kinds[kind].second += e->end_ns - e->begin_ns;
  }
  return kinds;
}

WorkerComparison CompareWorker(int rank, const std::vector<const TraceEvent*>& simulated, const ByStep& measured,
                               const std::vector<int>& group_of_rank, int head_stage) {
  WorkerComparison out;
  out.rank = rank;
  const auto order = OrdersOf(simulated, group_of_rank);
  std::map<std::string, KindTimes> kinds;
  std::map<std::string, std::vector<int64_t>> times;
  for (const auto& [kind, sum] : KindsOf(simulated, head_stage)) kinds[kind] = {kind, sum.first, sum.second, 0};
  size_t steps = 0;
  for (const auto& [step, events] : measured) {
    if (out.difference.empty()) out.difference = FirstDifference(order, OrdersOf(events, group_of_rank), step);
    for (const auto& [kind, sum] : KindsOf(events, head_stage)) {
      times[kind].resize(steps);  // zeros for steps without this kind
      times[kind].push_back(sum.second);
    }
    ++steps;
  }
  for (auto& [kind, list] : times) {
    list.resize(steps);
    kinds[kind].kind = kind;
    kinds[kind].measured_ns = Median(list);
  }
  for (auto& [name, kind] : kinds) out.kinds.push_back(std::move(kind));
  return out;
}

}  // namespace

bool StepComparison::same_order() const {
  return std::all_of(workers.begin(), workers.end(), [](const WorkerComparison& w) { return w.difference.empty(); });
}

StepComparison CompareSteps(const std::vector<TraceEvent>& simulated, const std::vector<TraceEvent>& measured,
                            const std::vector<int>& group_of_rank, int head_stage) {
  std::map<int, std::vector<const TraceEvent*>> by_rank;
  std::map<int, ByStep> by_rank_and_step;
  std::map<int64_t, int64_t> step_ns;
  StepComparison out;
  for (const TraceEvent& e : simulated) {
    by_rank[e.rank].push_back(&e);
    if (e.stream == Stream::kStep && e.name == "step")
      out.simulated_ns = std::max(out.simulated_ns, e.end_ns - e.begin_ns);
  }
  for (const TraceEvent& e : measured) {
    by_rank_and_step[e.rank][e.step].push_back(&e);
    if (e.stream == Stream::kStep && e.name == "step")
      step_ns[e.step] = std::max(step_ns[e.step], e.end_ns - e.begin_ns);
  }
  if (step_ns.empty()) throw Error({"no traced step to compare with", "", "", "", "train with trace.steps above 0"});
  std::vector<int64_t> times;
  for (const auto& [step, ns] : step_ns) times.push_back(ns);
  out.measured_ns = Median(times);
  out.fastest_ns = *std::min_element(times.begin(), times.end());
  out.slowest_ns = *std::max_element(times.begin(), times.end());
  out.steps = static_cast<int64_t>(times.size());
  for (const auto& [rank, steps] : by_rank_and_step) by_rank[rank];  // a worker that was not simulated differs at once
  for (const auto& [rank, events] : by_rank)
    out.workers.push_back(CompareWorker(rank, events, by_rank_and_step[rank], group_of_rank, head_stage));
  for (WorkerComparison& w : out.workers) {
    if (by_rank_and_step[w.rank].empty()) w.difference = "rank " + std::to_string(w.rank) + " has no traced step";
  }
  return out;
}

}  // namespace disagmoe
