// Times measured on one machine: what `disagmoe profile` writes and `disagmoe simulate` reads (docs/formats.md).
//
// An operation's time is that of the whole operation as the runtime executes it: unpacking its messages, the layer, and
// packing and posting what it sends; waiting is not in it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "spec/config.h"
#include "trace/trace.h"

namespace disagmoe {

// Measured points, ascending in x. Between them straight lines; beyond the ends the nearest line goes on. One point
// alone: in proportion. None: 0.
struct Curve {
  std::vector<int64_t> x;
  std::vector<int64_t> ns;
  double At(double at) const;
};

enum class StageKind : uint8_t {
  kFirstAttention,  // layer 0, with the embedding
  kAttention,       // with a router
  kDenseAttention,  // of a dense layer other than the first
  kExperts,         // shared experts included
  kDense,
  kHead,
};
const char* StageKindName(StageKind kind);
StageKind StageKindOf(const ModelConfig& model, int stage);

// One kind of stage, by tokens (experts: rows, that is distinct tokens received).
struct StageTimes {
  StageKind kind = StageKind::kAttention;
  int64_t seq_length = 0;  // of attention, else 0
  int64_t experts = 0;     // held by the worker, of kExperts
  int64_t per_row = 0;     // (row, expert) pairs a row, of kExperts
  bool recompute = false;
  Curve forward, backward;
  double spread = 0;  // the largest of its points' (upper quartile - lower quartile) / median
};

struct Profile {
  std::string cpu;    // processor's name
  int cores = 0;      // that the measuring processes could use
  int threads = 1;    // of a worker
  std::string dtype;  // train.dtype
  ModelConfig model;  // less num_hidden_layers: dimensions alone
  std::vector<StageTimes> stages;
  // By bytes, between two workers on this machine: from posted to there, over UCX alone and through the emulated NIC
  // with nothing to hold it up. A waiting computation goes on wake_ns later.
  Curve message, paced_message;
  int64_t wake_ns = 0;
  int64_t late_ns = 0;    // that the emulated NIC hands over a message after its time has come
  int64_t gap_ns = 0;     // between two computations neither of which waits
  Curve optimizer;        // by elements updated
  Curve sums;             // gradient sums and norm, by bytes that a worker sends for it
  int64_t report_ns = 0;  // between the end of a step and the beginning of the next
};

// Keys of [model] that decide times beside the dimensions of the first models, without "model.", and their values as TOML.
// A profile has those that are not the default.
std::vector<std::pair<std::string, std::string>> LaterModelKeys(const ModelConfig& model);

std::string ProfileJson(const Profile& profile);
// Throws Error that names the file and what is wrong with it.
Profile ReadProfile(const std::string& path);

// Takes the traces of short runs; of every figure the run with the smallest median counts, what else ran on the machine
// only ever adds time.
class ProfileBuilder {
 public:
  // Whose model, dtype and threads the profile is of.
  explicit ProfileBuilder(const RunConfig& config) : config_(config) {}
  // One attention and one FFN worker: computations, messages, gaps, optimizer. Others: sums and optimizer only. Runs
  // with fewer experts, or fewer a token, tell about experts.
  void Add(const RunConfig& config, const std::vector<TraceEvent>& events);
  Profile Build() const;

 private:
  struct Point {
    int64_t x = 0;
    double median = 0, spread = 0;
  };
  struct StagePoint {
    StageTimes of;
    bool backward = false;
    Point point;
  };
  static void Keep(std::vector<Point>* points, int64_t x, std::vector<int64_t> times);
  void KeepStage(const RunConfig& config, StageKind kind, bool backward, std::vector<int64_t> times);
  void AddStages(const RunConfig& config, const std::vector<TraceEvent>& events);
  void AddMessages(const RunConfig& config, const std::vector<TraceEvent>& events);
  void AddEnds(const RunConfig& config, const std::vector<TraceEvent>& events);

  std::vector<StagePoint> stages_;
  std::vector<Point> message_, paced_message_, wake_, late_, gap_, optimizer_, sums_, report_;
  const RunConfig config_;
};

// What a worker (by rank) holds and sums in the run of this configuration.
struct StepEndWork {
  int64_t elements = 0;    // that its optimizer updates
  int64_t sent_bytes = 0;  // for sums, and to gather them or the weights
};
std::vector<StepEndWork> StepEndWorkOf(const RunConfig& config, const Schedule& schedule);

}  // namespace disagmoe
