// What happened: timed events of workers, written as Chrome/Perfetto JSON and summed up.
// The runtime and the simulator write the same events.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace disagmoe {

// kWait: "exposed" or "bubble". kStep: "step" spans the whole step; anything else on it is a part of the step.
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

// What a worker has of something from a moment on, in parts that add up: its memory, say.
struct TraceCounter {
  int rank = 0;
  int64_t ns = 0;    // on the events' clock
  std::string name;  // of the track: "memory"
  std::vector<std::pair<std::string, int64_t>> parts;  // bytes
};

// Per worker and step. compute + exposed + bubble = step, exactly.
struct WorkerTimes {
  int64_t step_ns = 0;
  int64_t compute_ns = 0;
  int64_t exposed_ns = 0;  // waiting for a message that its sender has already posted
  int64_t bubble_ns = 0;   // waiting with nothing on its way
};

// From the "step" event of the rank and its waits. All zero if the step was not traced.
WorkerTimes TimesOf(const std::vector<TraceEvent>& events, int rank, int64_t step);
// Steps that have events, ascending.
std::vector<int64_t> TracedSteps(const std::vector<TraceEvent>& events);

struct WorkerName {
  int rank = 0;
  std::string name;  // "A0.1": group A0, worker 1
};

// Chrome trace event JSON: a process per worker, a track per stream (more where its events overlap), an arrow (flow)
// per transfer from the sender's event to the receiver's. The two have the same step and opposite ranks, and the same
// name but for a leading > or <. A counter per worker and name, whose parts chrome://tracing stacks. Times start at 0.
std::string PerfettoJson(const std::vector<TraceEvent>& events, const std::vector<WorkerName>& workers,
                         const std::vector<TraceCounter>& counters = {});
// Events of one rank as JSON lines, and back: what each worker writes and the launcher merges.
void WriteEvents(const std::string& path, const std::vector<TraceEvent>& events);
std::vector<TraceEvent> ReadEvents(const std::string& path);
std::string EventsPath(const std::string& out, int rank);  // OUT/trace/rank-00000.jsonl
// Events of all ranks of a run, rank by rank. Throws Error if there are none.
std::vector<TraceEvent> ReadRunEvents(const std::string& out);
// Writes OUT/trace.json from all ranks' events, and returns its path; "" if no rank wrote any.
std::string MergeTrace(const std::string& out, const std::vector<WorkerName>& workers);

// A timeline for people: one row a worker, forward/backward/exposed/bubble as characters, over the whole step. Throws
// Error if the step was not traced.
std::string DrawTimeline(const std::vector<TraceEvent>& events, const std::vector<WorkerName>& workers, int64_t step,
                         int columns);
// The same as an SVG picture, with transfers and a time axis; for light and dark pages.
std::string TimelineSvg(const std::vector<TraceEvent>& events, const std::vector<WorkerName>& workers, int64_t step);

}  // namespace disagmoe
