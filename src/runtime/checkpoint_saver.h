// Saves checkpoints: each rank writes what it owns, on a thread of its own, while training goes on; rank 0 publishes
// what is complete and removes old ones, on another.
//
// The figures of a finished file travel to rank 0 with those of a step (Report, Take), so that no step waits. At most
// one checkpoint is in progress: Begin waits for the one before. What fails is thrown by the next call here.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/background.h"
#include "runtime/run_log.h"
#include "runtime/state_io.h"
#include "runtime/waits.h"

namespace disagmoe {

// How the ranks of a run meet. Not used with one rank.
struct SaverLinks {
  std::function<std::vector<std::vector<double>>(const std::vector<double>& mine)> gather;  // at rank 0, in rank order
  std::function<double(double value)> broadcast;  // rank 0's value, at all ranks
};

// Used by one thread.
class CheckpointSaver {
 public:
  // resume_key: see ResumeKey. on_published: at rank 0, called by the functions below. The status must outlive it.
  CheckpointSaver(const RunConfig& config, int rank, int world, std::string resume_key, Status& status,
                  SaverLinks links, std::function<void(const CheckpointRecord&)> on_published);

  // Collective. Takes the state after `step` (see StateParts) and begins to write it. Without `copy` the state must not
  // change before Finish.
  void Begin(int64_t step, bool copy, const ParamStore& store, const AdamW& optimizer,
             const std::vector<Range>& owned);
  // Collective. Returns when the last checkpoint that was begun is published.
  void Finish();

  // What this rank has to tell rank 0, often nothing: empty.
  std::vector<double> Report();
  // At rank 0: what all ranks have told.
  void Take(const std::vector<std::vector<double>>& reports);
  // After each step: goes on with what has ended meanwhile.
  void Poll();

 private:
  std::vector<double> Figures() const;
  bool Complete() const;
  void Settle();
  void Publish();
  void RequireInTime(const std::string& what, int64_t since_ns, uint64_t bytes) const;

  const RunConfig& config_;
  const int rank_, world_;
  const std::string resume_key_, root_;
  Status& status_;
  const SaverLinks links_;
  const std::function<void(const CheckpointRecord&)> on_published_;

  // The checkpoint that was begun last. What threads use is shared with them.
  int64_t step_ = -1;
  bool copied_ = false, reported_ = false, publishing_ = false;
  int64_t began_ns_ = 0, publish_ns_ = 0;
  double held_up_s_ = 0;
  std::string path_;
  std::shared_ptr<StateParts> parts_;
  std::shared_ptr<CheckpointFile> file_;
  std::vector<CheckpointFile> files_;  // at rank 0, by rank; without a name: not there yet
  std::shared_ptr<CheckpointRecord> record_;
  Background writing_, publish_;
};

}  // namespace disagmoe
