// A step without simulating all of it: a deep model over many micro-batches is the same again and again.
#pragma once

#include <cstdint>

#include "plan/evaluate.h"

namespace disagmoe {

struct StepEstimate {
  double step_ns = 0;
  double full = 0;         // peak memory over the limit, of the worker where it is largest
  int64_t operations = 0;  // simulated for it
  bool exact = false;      // all of the step was
  bool fits() const { return full <= 1; }
};
// Simulates the same groups with fewer layers and fewer rounds of micro-batches, and goes on along the lines through
// them: in an order of rounds the step is linear in both. Throws Error as CheckJob and the generators do.
// whole: nothing is left out.
StepEstimate EstimateStep(const Job& job, bool whole = false);
// As Evaluate; of a step of many rounds, two and three of them are simulated and every time goes on along its line
// (memory is that of three). Throws Error as Evaluate does.
Evaluation EvaluateRounds(const Job& job);
// Operations of the whole step, roughly: what a simulation costs.
int64_t OperationsOf(const Job& job);

}  // namespace disagmoe
