// A training run: one rank's part of it, and the same training in one process.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "layers/param_store.h"
#include "runtime/run_log.h"
#include "runtime/waits.h"
#include "spec/config.h"
#include "transport/transport.h"

namespace disagmoe {

// What surrounds a rank. Lives as long as its trainer.
struct RankContext {
  int rank = 0;
  int local_rank = 0;                   // on this host: which accelerator
  Transport* transport = nullptr;       // null with one worker
  std::vector<int64_t> clock_offsets;   // per rank
  Status* status = nullptr;
  bool json = false;
  bool write_files = true;              // metrics, trace, checkpoints; false in tests and benches
  // Tests: called at every step when the summed gradients of all held parameters are there, before clipping.
  std::function<void(int64_t step, const ParamStore& store)> on_gradients;
  // The reference: instead of the schedule in the configuration.
  std::function<double(int64_t step)> learning_rate;
  // Tests: called before the first step.
  std::function<void(ParamStore& store)> on_start;
};

struct RunResult {
  std::vector<StepRecord> steps;        // at rank 0
  std::vector<HeldOutRecord> held_out;  // at rank 0
  std::string checkpoint;               // last one written, at rank 0
};

// Runs on the calling thread until the last step. Throws Error or InternalError; the caller ends the other ranks.
RunResult TrainRank(const RunConfig& config, const RankContext& context);

// OUT/trace.json, from what the ranks have written (of other hosts: if the folder is shared). When all have finished.
void WriteRunTrace(const RunConfig& config);

// The judge: no schedule, no exchange, no other worker.
RunResult TrainReference(const RunConfig& config, const RankContext& context);

}  // namespace disagmoe
