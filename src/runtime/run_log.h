// What a run tells: metrics.jsonl, progress on the terminal, the record of its steps.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "spec/config.h"

namespace disagmoe {

struct WorkerReport {
  std::string name;
  double compute_s = 0, exposed_s = 0, bubble_s = 0;
  double bytes_sent = 0, bytes_received = 0;  // in this step, payload
  double row_bytes_sent = 0;                  // of these: activation and gradient rows
  double peak_memory = 0;                     // bytes, resident, of the process so far
  double expert_load_max = 0;                 // busiest expert here over a fair share; 0 without experts
};

struct StepRecord {
  int64_t step = 0;
  double loss = 0;        // mean token loss
  double aux_loss = 0;    // weighted, as added to the loss that is minimised
  double lr = 0;
  double grad_norm = 0;   // before clipping
  double step_seconds = 0;
  double tokens_per_second = 0;
  std::vector<WorkerReport> workers;
};

struct HeldOutRecord {
  int64_t step = 0;
  double loss = 0;
};

struct CheckpointRecord {
  int64_t step = 0;
  std::string folder;
  uint64_t bytes = 0;
  double seconds = 0;    // from the end of the step until `latest` names it
  double held_up_s = 0;  // of these, training waited, at the rank that waited longest
  bool async = false;
  std::string warning;   // of the removal of older ones
};

// Used by one rank (0). Appends when a run is resumed; drops lines of later steps then.
class RunLog {
 public:
  RunLog(const RunConfig& config, int64_t first_step, bool json);
  ~RunLog();
  void Step(const StepRecord& record);
  void HeldOut(const HeldOutRecord& record);
  void Checkpoint(const CheckpointRecord& record);
  void Note(const std::string& line);  // on the terminal
  const std::vector<StepRecord>& steps() const { return steps_; }
  const std::vector<HeldOutRecord>& held_out() const { return held_out_; }

 private:
  void Write(const std::string& line);  // of metrics.jsonl
  void Print(const StepRecord& record);
  const RunConfig& config_;
  const bool json_;
  const bool terminal_;
  std::FILE* file_ = nullptr;
  int64_t start_ns_, last_print_ns_ = 0;
  bool line_open_ = false;
  double mean_step_s_ = 0;
  std::vector<StepRecord> steps_;
  std::vector<HeldOutRecord> held_out_;
};

}  // namespace disagmoe
