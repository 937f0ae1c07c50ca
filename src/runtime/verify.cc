#include "runtime/verify.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/tokenizer.h"
#include "runtime/generate.h"
#include "runtime/state_io.h"
#include "runtime/trainer.h"

namespace disagmoe {
namespace {

using nlohmann::json;

struct Recorded {
  std::map<int64_t, json> steps;
  std::map<int64_t, double> held_out;
};

Recorded ReadMetrics(const std::string& out) {
  std::ifstream in(out + "/metrics.jsonl");
  if (!in) throw Error({"no metrics of a run", out + "/metrics.jsonl", "", "", "name the folder of a run: its out="});
  Recorded r;
  std::string line;
  while (std::getline(in, line)) {
    const json j = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (j.is_discarded()) break;  // cut off when the run was killed
    if (j.contains("held_out_loss")) {
      r.held_out[j["step"]] = j["held_out_loss"];
    } else if (j.contains("loss")) {
      r.steps[j["step"]] = j;
    }
  }
  if (r.steps.empty()) throw Error({"the run has no steps", out + "/metrics.jsonl", "", "", ""});
  return r;
}

RunConfig ConfigOf(const std::string& out) { return LoadConfig(out + "/config.toml", {}); }

double Relative(double a, double b) { return std::abs(a - b) / std::max(std::abs(b), 1e-12); }

struct Comparison {
  std::string what;
  double run = 0, reference = 0, difference = 0, tolerance = 0;
  int64_t step = 0;
  bool ok() const { return difference <= tolerance; }
};

// The largest difference over the steps of one figure.
Comparison Largest(const std::string& what, const char* key, const Recorded& recorded, const std::vector<StepRecord>& steps,
                   double (*get)(const StepRecord&), double tolerance) {
  Comparison worst{what, 0, 0, -1, tolerance, 0};
  for (const auto& s : steps) {
    const auto it = recorded.steps.find(s.step);
    if (it == recorded.steps.end()) continue;
    const double run = it->second[key], reference = get(s), difference = Relative(run, reference);
    if (!(difference <= worst.difference)) worst = {what, run, reference, difference, tolerance, s.step};
  }
  return worst;
}

void Print(const std::vector<Comparison>& rows, const RunConfig& config, int64_t steps, const std::string& checkpoint, const std::string& sample) {
  std::printf("\nthe run and the one-process reference, on the same batches (%ld steps trained again)\n", steps);
  std::printf("  %-30s %6s %12s %12s %12s %10s\n", "largest relative difference of", "step", "run", "reference", "difference", "tolerance");
  for (const auto& r : rows) {
    std::printf("  %-30s %6ld %12.7f %12.7f %12.1e %10.0e  %s\n", r.what.c_str(), r.step, r.run, r.reference, r.difference,
                r.tolerance, r.ok() ? "ok" : "DIFFERS");
  }
  if (!sample.empty()) {
    std::printf("\nwritten by the model:\n");
    std::string line = "  | ";
    for (char c : sample) {
      line += (c == '\n' || (c >= 32 && c < 127)) ? c : '?';
      if (c == '\n') line += "  | ";
    }
    std::printf("%s\n", line.c_str());
  }
  std::printf("\nmetrics     %s/metrics.jsonl\ntrace       %s/trace.json (open in https://ui.perfetto.dev)\n", config.out.c_str(), config.out.c_str());
  if (!checkpoint.empty()) std::printf("checkpoint  %s\n", checkpoint.c_str());
}

}  // namespace

int Verify(const VerifyOptions& options) {
  const Recorded recorded = ReadMetrics(options.out);
  RunConfig config = ConfigOf(options.out);
  config.out = options.out;
  config.train.resume.clear();
  // As many threads as a worker had: other numbers of threads round differently, a router choice flips for it sooner or
  // later, and after that the difference grows tenfold every few steps.
  if (options.threads > 0) config.device.threads = options.threads;
  const bool bf16 = config.train.dtype == "bf16";
  const double loss_tolerance = bf16 ? 2e-2 : 1e-5, norm_tolerance = bf16 ? 5e-2 : 1e-4;

  RunConfig again = config;
  again.train.steps = std::min({options.steps, config.train.steps, recorded.steps.rbegin()->first});
  again.train.eval_interval = 0;
  Status status;
  RankContext context;
  context.status = &status;
  context.write_files = false;
  // As recorded: a run that was continued had another learning rate schedule in its first steps.
  context.learning_rate = [&](int64_t step) {
    const auto it = recorded.steps.find(step);
    return it == recorded.steps.end() ? LearningRate(config.train, step) : it->second["lr"].get<double>();
  };
  const RunResult reference = TrainReference(again, context);
  for (int64_t step = 1; step <= again.train.steps; ++step) {
    if (!recorded.steps.contains(step)) {
      throw Error({"the run's first steps are not recorded", options.out + "/metrics.jsonl", "no step " + std::to_string(step),
                   "steps 1 to " + std::to_string(again.train.steps), "verify the run from its start, or fewer steps: --steps"});
    }
  }
  std::vector<Comparison> rows;
  rows.push_back(Largest("training loss", "loss", recorded, reference.steps, [](const StepRecord& s) { return s.loss; }, loss_tolerance));
  rows.push_back(Largest("auxiliary loss", "aux_loss", recorded, reference.steps, [](const StepRecord& s) { return s.aux_loss; }, loss_tolerance * 10));
  rows.push_back(Largest("gradient norm", "grad_norm", recorded, reference.steps, [](const StepRecord& s) { return s.grad_norm; }, norm_tolerance));
  auto held_out = [&](const std::string& what, int64_t step, double loss) {
    const auto it = recorded.held_out.find(step);
    if (it != recorded.held_out.end()) rows.push_back({what, it->second, loss, Relative(it->second, loss), loss_tolerance, step});
  };
  for (const auto& h : reference.held_out) {
    if (h.step == 0) held_out("held-out loss before training", 0, h.loss);
  }
  std::string checkpoint, sample;
  if (std::filesystem::exists(options.out + "/checkpoints/latest")) {
    checkpoint = ResolveCheckpoint(options.out + "/checkpoints", "latest");
    RunConfig last = config;
    last.train.resume = checkpoint;
    last.train.steps = ReadManifest(checkpoint).step;
    if (config.train.eval_micro_batches > 0) {
      for (const auto& h : TrainReference(last, context).held_out) held_out("held-out loss after training", h.step, h.loss);
    }
    if (options.sample > 0 && config.model.vocab_size == kByteVocab) {
      sample = Generate({.from = checkpoint, .tokens = options.sample}).text;
    }
  }
  const bool ok = std::all_of(rows.begin(), rows.end(), [](const Comparison& r) { return r.ok(); });
  if (options.json) {
    json list = json::array();
    for (const auto& r : rows) {
      list.push_back({{"what", r.what}, {"step", r.step}, {"run", r.run}, {"reference", r.reference}, {"relative_difference", r.difference}, {"tolerance", r.tolerance}, {"ok", r.ok()}});
    }
    std::printf("%s\n", json{{"steps", again.train.steps}, {"comparisons", list}, {"ok", ok}, {"sample", sample}, {"checkpoint", checkpoint}}
                            .dump(-1, ' ', true, json::error_handler_t::replace).c_str());
  } else {
    Print(rows, config, again.train.steps, checkpoint, sample);
  }
  return ok ? 0 : 1;
}

}  // namespace disagmoe
