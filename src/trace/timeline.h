// What both pictures of a step are drawn from.
#pragma once

#include <string>
#include <vector>

#include "trace/trace.h"

namespace disagmoe {

enum class Activity : uint8_t { kForward, kBackward, kOther, kExposed, kBubble, kSend, kReceive };

struct Span {
  Activity activity = Activity::kOther;
  const TraceEvent* event = nullptr;
};

struct Row {
  std::string name;
  std::vector<Span> spans;  // of the step, in order of begin
  WorkerTimes times;
};

struct Timeline {
  int64_t step = 0;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  std::vector<Row> rows;  // in order of rank
};

// Holds pointers into `events`. Throws Error if the step has none.
Timeline TimelineOf(const std::vector<TraceEvent>& events, const std::vector<WorkerName>& workers, int64_t step);

// "12 %"; a whole of nothing is 0 %.
std::string Percent(int64_t part, int64_t whole);
// "1.23 ms", three digits, in the unit that suits.
std::string Duration(int64_t ns);

}  // namespace disagmoe
