// Time of a simulated step, by the number of its operations: AF-Pipe over 8 + 8 groups, a model of 94 layers, more and
// more micro-batches. The costs are constants: what is measured is the engine. Made schedules are not counted.
//   sim_bench [--benchmark_filter=...]
// 64 micro-batches are a step of Qwen3-235B on 128 GPUs; 3,969 make 1.5 million computations.
#include <benchmark/benchmark.h>

#include <cstdio>
#include <string>
#include <vector>

#include "cost/step_costs.h"
#include "schedule/schedule.h"
#include "sim/simulate.h"

namespace disagmoe {
namespace {

class ConstantCosts : public StepCosts {
 public:
  ConstantCosts(const Schedule& s, int classes) {
    for (size_t g = 0; g < s.groups.size(); ++g) {
      for (int c = 0; c < classes; ++c) classes_.push_back({static_cast<int>(g), 1, c});
    }
  }
  const std::vector<WorkerClass>& classes() const override { return classes_; }
  int64_t ComputeNs(const Op& op, int) const override { return op.kind == OpKind::kForward ? 1000 : 2000; }
  TransferCost Transfer(const Op&, int, bool) const override {
    return {.nic_ns = 400, .nvlink_ns = 100, .latency_ns = 5, .nic_bytes = 20000, .nvlink_bytes = 16000};
  }
  int64_t ActivationBytes(const Op&, int, bool) const override { return 1000; }
  int64_t WorkspaceBytes(const Op&, int) const override { return 100; }
  int64_t MessageBytes(const Op&, int) const override { return 10; }

 private:
  std::vector<WorkerClass> classes_;
};

int64_t PeakMegabytes() {
  int64_t kilobytes = 0;
  if (std::FILE* file = std::fopen("/proc/self/status", "r")) {
    char line[256];
    while (std::fgets(line, sizeof line, file) != nullptr) std::sscanf(line, "VmHWM: %ld", &kilobytes);
    std::fclose(file);
  }
  return kilobytes / 1024;
}

// Arguments: micro-batches, classes of each group.
void Step(benchmark::State& state) {
  const int micro_batches = static_cast<int>(state.range(0));
  const int classes = static_cast<int>(state.range(1));
  GenerateOptions options;
  options.num_micro_batches = micro_batches;
  options.round = micro_batches % 64 == 0 ? 32 : micro_batches % 63 == 0 ? 63 : micro_batches;
  const Schedule s = Generate("af-pipe", {.num_layers = 94, .p_a = 8, .p_f = 8, .m = classes, .n = classes}, options);
  const ConstantCosts costs(s, classes);
  int64_t ops = 0;
  for (auto _ : state) {
    const SimResult result = Simulate(s, costs);
    benchmark::DoNotOptimize(result.step_ns);
    ops = result.num_ops;
  }
  state.counters["operations"] = static_cast<double>(ops);
  const auto per_second = benchmark::Counter::kIsIterationInvariantRate;
  state.counters["per_operation"] =
      benchmark::Counter(static_cast<double>(ops), per_second | benchmark::Counter::kInvert);
  state.counters["peak_MB"] = static_cast<double>(PeakMegabytes());
}
BENCHMARK(Step)->ArgNames({"micro_batches", "classes"})->Unit(benchmark::kMillisecond)
    ->Args({64, 1})->Args({128, 1})->Args({256, 1})->Args({512, 1})->Args({1024, 1})->Args({2048, 1})->Args({3969, 1})
    ->Args({64, 8})->Args({64, 64});

}  // namespace
}  // namespace disagmoe

BENCHMARK_MAIN();
