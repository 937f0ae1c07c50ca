#include "cli/measure.h"

#include <poll.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/time.h"
#include "cli/launch_process.h"
#include "cli/temporary_folder.h"

namespace disagmoe {
namespace {

constexpr int64_t kEndNs = 5'000'000'000;  // that a run may take to end its workers before it is killed

double Quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double at = q * static_cast<double>(values.size() - 1);
  const auto low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

std::vector<std::string> Words(const std::string& file, const MeasureOptions& o, const std::string& out) {
  std::vector<std::string> words = {"train", file};
  words.insert(words.end(), o.overrides.begin(), o.overrides.end());
  if (!o.data.empty()) words.insert(words.end(), {"data.path=" + o.data, "data.blend=[]"});
  for (const char* word : {"train.save=false", "train.save_interval=0", "train.eval_micro_batches=0",
                           "train.eval_interval=0", "train.resume=", "trace.steps=0"}) {
    words.push_back(word);
  }
  words.push_back("train.steps=" + std::to_string(o.warm_up + o.steps));
  words.push_back("out=" + out);
  return words;
}

// By step, from a run's metrics.jsonl; a line that is not complete yet ends it.
std::vector<double> ReadSteps(const std::string& out) {
  std::vector<double> seconds;
  std::ifstream file(out + "/metrics.jsonl");
  for (std::string line; std::getline(file, line);) {
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) break;
    if (json.contains("step_seconds")) seconds.push_back(json["step_seconds"].get<double>());
  }
  return seconds;
}

// The first reason that the program gave; without one its last words.
std::string ErrorLine(const std::string& log) {
  const std::string mark = "disagmoe: error: ";
  std::ifstream file(log);
  std::string last;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(mark)) return line.substr(mark.size());
    if (!line.empty()) last = line;
  }
  return last;
}

struct Ended {
  std::string how;  // of a child that was not well
  bool late = false;
  int signal = 0;   // that we got meanwhile
};

// Until the child has ended, by itself or since it had to.
Ended WaitFor(Children& children, SignalWatch& signals, double limit_s) {
  Ended ended;
  int64_t end_ns = NowNs() + static_cast<int64_t>(limit_s * 1e9), kill_ns = 0;
  while (children.running() > 0) {
    pollfd p = {signals.fd(), POLLIN, 0};
    poll(&p, 1, 50);
    while (const int signal = signals.Take()) {
      if (signal != SIGCHLD) ended.signal = signal;
    }
    for (const ExitedChild& child : children.Reap()) {
      if (!child.clean) ended.how = child.how;
    }
    const int64_t now = NowNs();
    if (kill_ns == 0 && children.running() > 0 && (ended.signal != 0 || now >= end_ns)) {
      ended.late = ended.signal == 0;
      children.Signal(SIGTERM);
      children.Signal(SIGCONT);  // one that is stopped could not end
      kill_ns = now + kEndNs;
    }
    if (kill_ns > 0 && now >= kill_ns) children.Signal(SIGKILL);
  }
  return ended;
}

// What one run gave; all that was started or made for it is gone when this returns.
MeasuredStep Run(const std::string& file, const MeasureOptions& o, int* signal) {
  SignalWatch signals;
  const TemporaryFolder folder("disagmoe-measure");
  const std::string out = folder.path + "/run", log = folder.path + "/log";
  MeasuredStep measured;
  Ended ended;
  try {
    Children children(signals.old_mask());
    // A run of its own, also inside of a job's step.
    children.Start(o.program, Words(file, o, out),
                   EnvironmentWith({}, {}, {"RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"}), log);
    ended = WaitFor(children, signals, o.time_limit_s);
  } catch (const Error& error) {
    measured.error = error.what();
    return measured;
  }
  *signal = ended.signal;
  std::vector<double> seconds = ReadSteps(out);
  const auto done = static_cast<int64_t>(seconds.size());
  char text[120];
  if (ended.signal != 0) {
    measured.error = "interrupted by signal " + std::to_string(ended.signal);
  } else if (ended.late) {
    std::snprintf(text, sizeof text, "the time limit of %g s: %lld of %lld steps were done", o.time_limit_s,
                  static_cast<long long>(done), static_cast<long long>(o.warm_up + o.steps));
    measured.error = text;
  } else if (!ended.how.empty()) {
    const std::string reason = ErrorLine(log);
    measured.error = reason.empty() ? "the run ended: " + ended.how : reason;
  } else if (done < o.warm_up + o.steps) {
    measured.error = "the run ended after " + std::to_string(done) + " steps";
  } else {
    measured.seconds.assign(seconds.begin() + o.warm_up, seconds.end());
  }
  return measured;
}

}  // namespace

double MeasuredStep::median() const { return Quantile(seconds, 0.5); }
double MeasuredStep::fastest() const { return Quantile(seconds, 0); }
double MeasuredStep::spread() const {
  return seconds.empty() ? 0 : (Quantile(seconds, 0.75) - Quantile(seconds, 0.25)) / median();
}

MeasuredStep MeasureStep(const std::string& file, const MeasureOptions& options) {
  DM_CHECK(options.steps >= 1 && options.warm_up >= 0, "steps to measure");
  int signal = 0;
  MeasuredStep measured = Run(file, options, &signal);
  if (signal != 0) {
    raise(signal);  // nothing is held any more: ends this process, if it does not handle it
    measured.interrupted = true;
  }
  return measured;
}

std::vector<MeasuredStep> MeasureAll(const std::vector<MeasuredFile>& files, int rounds, const MeasureOptions& options) {
  std::vector<MeasuredStep> all(files.size());
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < files.size(); ++i) {
      if (!all[i].error.empty()) continue;
      std::fprintf(stderr, "round %d/%d, %zu/%zu: %s: ", round + 1, rounds, i + 1, files.size(), files[i].name.c_str());
      std::fflush(stderr);
      const MeasuredStep one = MeasureStep(files[i].path, options);
      if (one.ok()) {
        std::fprintf(stderr, "%.4f s\n", one.median());
        all[i].seconds.insert(all[i].seconds.end(), one.seconds.begin(), one.seconds.end());
        continue;
      }
      std::fprintf(stderr, "%s\n", one.error.c_str());
      all[i] = one;
      if (one.interrupted) return all;
    }
  }
  return all;
}

}  // namespace disagmoe
