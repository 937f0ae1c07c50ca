// What happened: timed events of workers, written as Chrome/Perfetto JSON and summed up.
// The runtime and (later) the simulator write the same events.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace disagmoe {

enum class Stream : uint8_t { kForward = 0, kBackward = 1, kSend = 2, kReceive = 3, kWait = 4, kStep = 5 };

struct TraceEvent {
  int rank = 0;
  Stream stream = Stream::kForward;
  std::string name;       // "F3.0" as PrintOp has it; "exposed", "bubble" for waits; "optimizer", "reduce", ...
  int64_t begin_ns = 0;   // on the run's one clock
  int64_t end_ns = 0;
  int64_t step = 0;
  int64_t bytes = 0;      // of a transfer
  int peer = -1;          // of a transfer
};

// Per worker and step. compute + exposed + bubble = step, exactly.
struct WorkerTimes {
  int64_t step_ns = 0;
  int64_t compute_ns = 0;
  int64_t exposed_ns = 0;  // waiting for a message that its sender has already posted
  int64_t bubble_ns = 0;   // waiting with nothing on its way
};

struct WorkerName {
  int rank = 0;
  std::string name;  // "A0.1": group A0, worker 1
};

// Chrome trace event JSON: a process per worker, a track per stream, an arrow (flow) per transfer. Times start at 0.
std::string PerfettoJson(const std::vector<TraceEvent>& events, const std::vector<WorkerName>& workers);
// Events of one rank as JSON lines, and back: what each worker writes and the launcher merges.
void WriteEvents(const std::string& path, const std::vector<TraceEvent>& events);
std::vector<TraceEvent> ReadEvents(const std::string& path);

// A timeline for people: one row a worker, forward/backward/exposed/bubble as characters, over [begin, end].
std::string DrawTimeline(const std::vector<TraceEvent>& events, const std::vector<WorkerName>& workers, int64_t step,
                         int columns);
// The same as an SVG picture.
std::string TimelineSvg(const std::vector<TraceEvent>& events, const std::vector<WorkerName>& workers, int64_t step);

}  // namespace disagmoe
