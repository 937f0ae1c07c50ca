#include "trace/timeline.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>

#include "base/error.h"

namespace disagmoe {
namespace {

// The step of the whole is no activity; its parts (optimizer, sums) are.
bool ActivityOf(const TraceEvent& event, Activity* activity) {
  switch (event.stream) {
    case Stream::kForward: *activity = Activity::kForward; break;
    case Stream::kBackward: *activity = Activity::kBackward; break;
    case Stream::kSend: *activity = Activity::kSend; break;
    case Stream::kReceive: *activity = Activity::kReceive; break;
    case Stream::kWait: *activity = event.name == "exposed" ? Activity::kExposed : Activity::kBubble; break;
    case Stream::kStep: *activity = Activity::kOther; return event.name != "step";
  }
  return true;
}

constexpr const char* kColumns = "FBo!.";  // by Activity

char Busiest(const std::vector<int64_t>& share, int64_t width) {
  const auto most = std::max_element(share.begin(), share.end());
  // A column that is mostly untraced stays empty.
  return *most * 2 * static_cast<int64_t>(share.size()) < width ? ' ' : kColumns[most - share.begin()];
}

std::string DrawRow(const Row& row, const Timeline& timeline, int columns) {
  const int64_t length = timeline.end_ns - timeline.begin_ns;
  auto edge = [&](int64_t column) { return timeline.begin_ns + length * column / columns; };
  std::string line;
  for (int c = 0; c < columns; ++c) {
    std::vector<int64_t> share(5);
    for (const Span& span : row.spans) {
      if (span.activity >= Activity::kSend) continue;
      const int64_t overlap = std::min(span.event->end_ns, edge(c + 1)) - std::max(span.event->begin_ns, edge(c));
      if (overlap > 0) share[static_cast<size_t>(span.activity)] += overlap;
    }
    line += Busiest(share, edge(c + 1) - edge(c));
  }
  return line;
}

}  // namespace

WorkerTimes TimesOf(const std::vector<TraceEvent>& events, int rank, int64_t step) {
  WorkerTimes times;
  for (const TraceEvent& event : events) {
    if (event.rank != rank || event.step != step) continue;
    const int64_t length = event.end_ns - event.begin_ns;
    if (event.stream == Stream::kStep && event.name == "step") times.step_ns += length;
    if (event.stream == Stream::kWait) (event.name == "exposed" ? times.exposed_ns : times.bubble_ns) += length;
  }
  times.compute_ns = times.step_ns - times.exposed_ns - times.bubble_ns;
  return times;
}

std::vector<int64_t> TracedSteps(const std::vector<TraceEvent>& events) {
  std::set<int64_t> steps;
  for (const TraceEvent& event : events) steps.insert(event.step);
  return {steps.begin(), steps.end()};
}

Timeline TimelineOf(const std::vector<TraceEvent>& events, const std::vector<WorkerName>& workers, int64_t step) {
  Timeline timeline{.step = step, .begin_ns = INT64_MAX, .end_ns = INT64_MIN, .rows = {}};
  for (const TraceEvent& event : events) {
    if (event.step != step) continue;
    timeline.begin_ns = std::min(timeline.begin_ns, event.begin_ns);
    timeline.end_ns = std::max(timeline.end_ns, event.end_ns);
  }
  if (timeline.begin_ns > timeline.end_ns) {
    std::string traced;
    for (int64_t s : TracedSteps(events)) traced += (traced.empty() ? "" : ", ") + std::to_string(s);
    throw Error({"the step was not traced", "timeline", std::to_string(step),
                 traced.empty() ? "a run with trace.steps > 0" : "one of " + traced, {}});
  }
  for (const WorkerName& worker : workers) {
    Row row{.name = worker.name, .spans = {}, .times = TimesOf(events, worker.rank, step)};
    for (const TraceEvent& event : events) {
      Activity activity = Activity::kOther;
      if (event.rank == worker.rank && event.step == step && ActivityOf(event, &activity)) {
        row.spans.push_back({activity, &event});
      }
    }
    std::stable_sort(row.spans.begin(), row.spans.end(),
                     [](const Span& a, const Span& b) { return a.event->begin_ns < b.event->begin_ns; });
    timeline.rows.push_back(std::move(row));
  }
  return timeline;
}

std::string Percent(int64_t part, int64_t whole) {
  const double percent = whole == 0 ? 0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
  return std::to_string(std::lround(percent)) + " %";
}

std::string Duration(int64_t ns) {
  double value = static_cast<double>(ns) / 1e3;
  const char* unit = "us";
  for (const char* larger : {"ms", "s"}) {
    if (value < 999.5) break;
    value /= 1e3;
    unit = larger;
  }
  char text[40];
  std::snprintf(text, sizeof text, "%.*f %s", value < 9.995 ? 2 : value < 99.95 ? 1 : 0, value, unit);
  return text;
}

std::string DrawTimeline(const std::vector<TraceEvent>& events, const std::vector<WorkerName>& workers, int64_t step,
                         int columns) {
  const Timeline timeline = TimelineOf(events, workers, step);
  columns = std::max(columns, 1);
  size_t width = 0;
  for (const Row& row : timeline.rows) width = std::max(width, row.name.size());
  const int64_t length = timeline.end_ns - timeline.begin_ns;
  std::string text = "step " + std::to_string(step) + ": " + Duration(length) + ", " + Duration(length / columns) + " a column\n";
  for (const Row& row : timeline.rows) {
    text += row.name + std::string(width - row.name.size(), ' ') + " |" + DrawRow(row, timeline, columns) + "| compute " +
            Percent(row.times.compute_ns, row.times.step_ns) + ", exposed " + Percent(row.times.exposed_ns, row.times.step_ns) +
            ", bubble " + Percent(row.times.bubble_ns, row.times.step_ns) + "\n";
  }
  return text + "F forward  B backward  o optimizer, sums  ! exposed communication  . bubble\n";
}

}  // namespace disagmoe
