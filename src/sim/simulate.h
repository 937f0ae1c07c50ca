// Runs a schedule in modelled time. Integer nanoseconds; same input, same bytes out: events at one time are handled in
// the order in which they were made.
//
// Each class of workers goes through its group's compute list. A computation starts when the one before it has ended,
// its inputs have arrived, and (schedule.sync_exchange) no exchange of another unit holds it. A message is posted when
// its producer has ended. It holds the sender's part of each fabric it uses (NIC and NVLink, each direction a resource
// of its own), gradients before activations, then by time posted; the receiver's part from when the first sender
// started on; it has arrived when both have ended, and after the latency. It starts only while the receiver has
// a free slot (schedule.links). A message within one worker (no bytes) arrives at once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cost/step_costs.h"
#include "schedule/schedule.h"
#include "trace/trace.h"

namespace disagmoe {

struct SimOptions {
  bool trace = false;           // record events and memory over time (about 200 bytes an operation)
  bool bounded_slots = true;    // a receive slot is a resource; false: a send never waits for its receiver
  bool sync_exchange = true;    // honour schedule.sync_exchange; false: as the runtime executes it
};

// Of one worker of a class, over the step. compute + overlapped + exposed + bubble = the step, exactly.
struct ClassTimes {
  int64_t compute_ns = 0;     // computing, NIC and NVLink idle (the optimizer's time included)
  int64_t overlapped_ns = 0;  // computing while one of its links moves data
  int64_t exposed_ns = 0;     // waiting for a message that is posted, held by an exchange, or summing gradients
  int64_t bubble_ns = 0;      // waiting with nothing on its way
  int64_t optimizer_ns = 0;   // of compute_ns
  int64_t reduce_ns = 0;      // of exposed_ns
  // Busy times of its resources.
  int64_t nic_send_ns = 0, nic_receive_ns = 0, nvlink_send_ns = 0, nvlink_receive_ns = 0;
  int64_t nic_bytes_sent = 0, nvlink_bytes_sent = 0;
  int64_t busy_ns() const { return compute_ns + overlapped_ns; }
};

// What a worker holds beside its static part, from a moment on.
struct MemoryPoint {
  int64_t ns = 0;
  int64_t activation_bytes = 0, message_bytes = 0, workspace_bytes = 0;
  int64_t bytes() const { return activation_bytes + message_bytes + workspace_bytes; }
  friend bool operator==(const MemoryPoint&, const MemoryPoint&) = default;
};

struct ClassMemory {
  StaticMemory parts;
  int64_t static_bytes = 0;    // their sum
  int64_t peak_bytes = 0;      // static + the largest sum of activations, messages, workspace
  int64_t peak_at_ns = 0;
  std::string peak_op;         // what ran or arrived then, e.g. "F12.3"
  int64_t peak_activation_bytes = 0, peak_message_bytes = 0;  // of that moment; the rest is workspace
  int64_t peak_workspace_bytes() const {
    return peak_bytes - static_bytes - peak_activation_bytes - peak_message_bytes;
  }
  int64_t limit_bytes = 0;     // 0 = unknown
  // First moment above the limit; -1: never.
  int64_t over_at_ns = -1;
  std::string over_op;
  // With options.trace: from 0 on, each moment at which one of the three changes, once.
  std::vector<MemoryPoint> timeline;
  bool fits() const { return over_at_ns < 0; }
};

struct SimResult {
  int64_t step_ns = 0;
  std::vector<ClassTimes> times;    // by class
  std::vector<ClassMemory> memory;  // by class
  // The busiest resource of all classes: no order of the same operations is faster.
  int64_t limit_ns = 0;
  std::string limit;                // "compute of F0.0", "NIC receive of A1.0"
  int64_t num_ops = 0;              // computations and transfers
  std::vector<TraceEvent> events;   // of the first worker of each class, by rank; with options.trace. step is 1.
};

// The schedule must be valid (ValidateSchedule); one that deadlocks throws Error with what waits for what.
SimResult Simulate(const Schedule& schedule, const StepCosts& costs, const SimOptions& options = {});

// A timeline as counters of the worker of that rank, "memory": static, activations, messages, workspace.
std::vector<TraceCounter> MemoryCounters(const ClassMemory& memory, int rank);

// "A0.1" of a class: group and first worker; "A0" if the class is the whole group of several.
std::string ClassName(const Schedule& schedule, const WorkerClass& c);

}  // namespace disagmoe
