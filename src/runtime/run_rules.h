// What a disaggregated run and a reference run do alike: device, resuming, when to evaluate and save, what is an error.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "io/batches.h"
#include "spec/config.h"

namespace disagmoe {

// The CPU, or the accelerator that libtorch finds; sets the number of threads of this thread's work. Throws Error.
at::Device PickDevice(const DeviceConfig& config, int local_rank);
std::string Describe(const at::Device& device, int threads);
double PeakMemory();  // bytes, resident, of this process so far

// Throws Error that names the step and the stage where values were first not finite. bad: a BadKey, or kAllFinite.
void CheckFinite(const RunConfig& config, int64_t step, double loss, double norm, int64_t bad);

struct Resume {
  int64_t step = 0;    // last step done
  std::string folder;  // "": a new run
};
// What train.resume names. Throws Error if it is of another run (see ResumeKey).
Resume FindCheckpoint(const RunConfig& config, const Corpus& data);

// Where the run ends. Without steps of its own (train.steps = 0) where it begins: it loads, evaluates and saves.
inline int64_t LastStep(const TrainConfig& t, const Resume& resume) { return t.steps == 0 ? resume.step : t.steps; }
inline bool EvaluateAfter(const TrainConfig& t, int64_t step, int64_t last) {
  if (t.eval_micro_batches == 0) return false;
  return step == 0 || step == last || (t.eval_interval > 0 && step % t.eval_interval == 0);
}
inline bool SaveAfter(const TrainConfig& t, int64_t step, int64_t last) {
  return t.save && (step == last || (t.save_interval > 0 && step % t.save_interval == 0));
}

// The folder of a run, taken by rank 0 before anything is written: no other run may use it meanwhile (a lock file),
// traces of earlier runs go, checkpoints of an earlier run are moved aside if this one starts anew.
class RunFolder {
 public:
  RunFolder(const RunConfig& config, bool resumed);
  ~RunFolder();
  const std::string& moved() const { return moved_; }  // where earlier checkpoints went; "" if there were none

 private:
  int lock_ = -1;
  std::string moved_;
};

void WriteText(const std::string& path, const std::string& text);

}  // namespace disagmoe
