// A job simulated and summed up, and the best layout among those that a schedule allows.
#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "cost/job.h"
#include "sim/simulate.h"

namespace disagmoe {

struct Evaluation {
  Job job;
  int round = 0;  // q of the schedule
  int parts = 1;  // pieces of an FFN stage
  std::vector<std::string> class_names;
  std::vector<WorkerClass> classes;
  SimResult sim;

  double step_seconds = 0;
  double tokens_per_gpu = 0;    // a second
  double mfu = 0;               // of the dense peak, active experts only
  double tflops_per_gpu = 0;    // model FLOPs
  // Shares of the step, mean over workers; they add up to 1.
  double compute = 0, overlapped = 0, exposed = 0, bubble = 0;
  int64_t peak_bytes = 0;       // of the fullest worker
  int fullest = 0;              // its class
  bool fits = true;
  bool whole = true;            // every micro-batch was simulated (estimate.h)
  // Of the whole cluster, whatever part of it is used.
  double tokens_per_second() const {
    return static_cast<double>(job.global_batch) * static_cast<double>(job.seq_length) / step_seconds;
  }
  double over_limit() const { return static_cast<double>(sim.step_ns) / static_cast<double>(sim.limit_ns); }
};

// Schedule, costs, simulation. Throws Error as CheckJob and the generators do.
Evaluation Evaluate(const Job& job, const SimOptions& options = {});
// Shares, speeds and memory from job, classes and sim.
void SumUp(Evaluation* e);
// "p 2, 32 A + 32 F, b 1, q 8" or "PP 8, EP 16, v 4, b 1"; with "x N" for replicas.
std::string LayoutText(const Evaluation& e);

// Settings that were given and must stay, by their name in SetKnob.
using Fixed = std::set<std::string>;

struct LayoutSearch {
  int simulated = 0;   // layouts that were simulated
  int considered = 0;  // groups and workers that were looked at
  std::optional<Evaluation> best;          // that fits
  std::optional<Evaluation> best_over;     // if none fits: the one with the smallest peak
  std::optional<ErrorParts> mistake;       // if none can be: why not, of one of them
};
// The best layout of one schedule (search.h), with a batch within 5 % of base's. What is in `fixed` stays as in `base`.
// With any_memory, layouts that do not fit count as well. Throws Error only where no layout can help (CheckLoads).
LayoutSearch SearchLayouts(const Job& base, const Fixed& fixed, bool any_memory = false);

}  // namespace disagmoe
