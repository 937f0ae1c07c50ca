// Tests: a tiny run on random text, in any layout with ranks as threads, and in one process.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "runtime/trainer.h"

namespace disagmoe {

struct TestRun {
  RunResult result;
  std::map<std::string, at::Tensor> gradients;  // of the last step, whole parameters
  std::map<std::string, at::Tensor> corrections;  // of routers, as they were in the last step
};

RunConfig TinyRun();
// The same, on a blend of long documents and of short ones, many to a sample, that are apart.
RunConfig TinyPackedRun();
TestRun TrainInproc(const RunConfig& config, const std::function<void(ParamStore&)>& on_start = {});
TestRun TrainReferenceForTest(const RunConfig& config, const std::function<void(ParamStore&)>& on_start = {});
void ExpectSameTraining(const TestRun& got, const TestRun& want, double loss_tolerance = 1e-5, double gradient_tolerance = 1e-4);

}  // namespace disagmoe
