// Steps of real runs on this machine: starts the program on a configuration for a few steps and reads what they took.
// Leaves nothing behind: no folder, no process, also at a time limit, an error or Ctrl-C.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace disagmoe {

struct MeasureOptions {
  int64_t warm_up = 2;                 // first steps of a run, not counted
  int64_t steps = 5;                   // those that are
  double time_limit_s = 300;           // of a run
  std::string data;                    // prefix of a .bin/.idx pair; empty: the file's data.path
  std::vector<std::string> overrides;  // of the configuration, such as "transport.kind=inproc"
  std::string program = "/proc/self/exe";  // disagmoe
};

struct MeasuredStep {
  std::vector<double> seconds;  // of each counted step, in order of time
  std::string error;            // why there are none: one line
  bool interrupted = false;     // by a signal, whose handler returned

  bool ok() const { return error.empty() && !seconds.empty(); }
  double median() const;
  double fastest() const;
  double spread() const;        // (upper - lower quartile) / median
};

// `disagmoe train FILE` in a temporary folder, without checkpoints, evaluation and trace. Its errors come back, they are
// not thrown. Signals that end this process (SIGINT, SIGTERM, SIGHUP) first end the run, then take their course. To be
// called by the main thread while there is no other (they would get its signals).
MeasuredStep MeasureStep(const std::string& file, const MeasureOptions& options);

struct MeasuredFile {
  std::string name;  // in progress lines
  std::string path;
};
// Each of the files in turn, so many rounds: if the machine gets slower, all do. Steps of all rounds together; one that
// failed is not tried again. Progress on stderr.
std::vector<MeasuredStep> MeasureAll(const std::vector<MeasuredFile>& files, int rounds, const MeasureOptions& options);

}  // namespace disagmoe
