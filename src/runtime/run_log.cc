#include "runtime/run_log.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/time.h"
#include "spec/params.h"

namespace disagmoe {
namespace {

using nlohmann::json;

// Keeps the lines of steps before `first_step`, so that a resumed run has each step once.
void DropLaterLines(const std::string& path, int64_t first_step) {
  std::ifstream in(path);
  std::string kept, line;
  while (std::getline(in, line)) {
    const json j = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!j.is_discarded() && j.value("step", int64_t{0}) < first_step) kept += line + "\n";
  }
  in.close();
  std::ofstream out(path + ".tmp", std::ios::trunc);
  out << kept;
  out.close();
  std::error_code error;
  if (out) std::filesystem::rename(path + ".tmp", path, error);  // a kill must not lose them
  if (!out || error) throw Error({"cannot write the metrics", path + ".tmp", "", "", "is the disk full?"});
}

std::string Duration(double s) {
  const int64_t t = static_cast<int64_t>(s + 0.5);
  char text[32];
  if (t >= 3600) {
    std::snprintf(text, sizeof text, "%ldh %02ldm", t / 3600, t / 60 % 60);
  } else {
    std::snprintf(text, sizeof text, "%ldm %02lds", t / 60, t % 60);
  }
  return text;
}

}  // namespace

RunLog::RunLog(const RunConfig& config, int64_t first_step, bool as_json)
    : config_(config), json_(as_json), terminal_(isatty(STDOUT_FILENO) != 0), start_ns_(NowNs()) {
  std::error_code ignored;
  std::filesystem::create_directories(config.out, ignored);
  const std::string path = config.out + "/metrics.jsonl";
  if (first_step > 1) DropLaterLines(path, first_step);
  file_ = std::fopen(path.c_str(), first_step > 1 ? "a" : "w");
  if (file_ == nullptr) {
    throw Error({"cannot write the metrics", path, std::strerror(errno), "a folder that can be written", "set out=DIR"});
  }
}

RunLog::~RunLog() {
  if (line_open_) std::printf("\n");
  if (file_ != nullptr) std::fclose(file_);
}

void RunLog::Write(const std::string& line) {
  std::fprintf(file_, "%s\n", line.c_str());
  std::fflush(file_);
  if (!json_) return;
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

void RunLog::Step(const StepRecord& r) {
  steps_.push_back(r);
  json workers = json::array();
  for (size_t i = 0; i < r.workers.size(); ++i) {
    const WorkerReport& w = r.workers[i];
    workers.push_back({{"rank", i}, {"worker", w.name}, {"compute_seconds", w.compute_s}, {"exposed_seconds", w.exposed_s},
                       {"bubble_seconds", w.bubble_s}, {"bytes_sent", w.bytes_sent}, {"bytes_received", w.bytes_received},
                       {"row_bytes_sent", w.row_bytes_sent}, {"peak_memory_bytes", w.peak_memory}, {"expert_load_max", w.expert_load_max}});
  }
  const json line = {{"step", r.step}, {"loss", r.loss}, {"lr", r.lr}, {"grad_norm", r.grad_norm}, {"aux_loss", r.aux_loss},
                     {"tokens_per_second", r.tokens_per_second}, {"step_seconds", r.step_seconds}, {"workers", workers}};
  Write(line.dump());
  if (!json_) Print(r);
}

void RunLog::HeldOut(const HeldOutRecord& r) {
  held_out_.push_back(r);
  Write(json{{"step", r.step}, {"held_out_loss", r.loss}}.dump());
  char line[96];
  std::snprintf(line, sizeof line, "step %5ld/%ld | held-out loss %.4f", r.step, std::max(config_.train.steps, r.step), r.loss);
  Note(line);
}

void RunLog::Checkpoint(const CheckpointRecord& r) {
  Write(json{{"step", r.step}, {"checkpoint", r.folder}, {"bytes", r.bytes}, {"seconds", r.seconds}, {"held_up_seconds", r.held_up_s},
             {"async", r.async}}.dump());
  const double rate = static_cast<double>(r.bytes) * 1e-6 / std::max(r.seconds, 1e-9);
  char figures[96];
  std::snprintf(figures, sizeof figures, r.async ? " (%.2f s, %.0f MB/s; training waited %.3f s)" : " (%.2f s, %.0f MB/s)", r.seconds, rate, r.held_up_s);
  Note("checkpoint  " + r.folder + figures);
  if (!r.warning.empty()) Note("older checkpoints were not removed: " + r.warning);
}

void RunLog::Note(const std::string& line) {
  if (json_) return;
  if (line_open_) std::printf("\n");
  line_open_ = false;
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

void RunLog::Print(const StepRecord& r) {
  mean_step_s_ = mean_step_s_ == 0 ? r.step_seconds : 0.9 * mean_step_s_ + 0.1 * r.step_seconds;
  const int64_t now = NowNs();
  const bool last = r.step == config_.train.steps;
  // A log file gets a line every two seconds at most, a terminal one line that changes.
  if (!last && !terminal_ && steps_.size() > 3 && now - last_print_ns_ < 2'000'000'000) return;
  last_print_ns_ = now;
  double exposed = 0, bubble = 0;
  for (const auto& w : r.workers) {
    exposed += w.exposed_s;
    bubble += w.bubble_s;
  }
  const double all = r.step_seconds * static_cast<double>(std::max<size_t>(1, r.workers.size()));
  const double flops = StepFlops(config_.model, config_.train) / r.step_seconds;
  std::printf("%sstep %5ld/%ld | loss %.4f | lr %.2e | grad norm %.3f | aux %.4f | %.0f tokens/s | %.1f GFLOP/s | exposed %.1f %% "
              "bubble %.1f %% | %s left%s",
              terminal_ ? "\r\033[K" : "", r.step, config_.train.steps, r.loss, r.lr, r.grad_norm, r.aux_loss, r.tokens_per_second,
              flops * 1e-9, 100 * exposed / all, 100 * bubble / all,
              Duration(mean_step_s_ * static_cast<double>(config_.train.steps - r.step)).c_str(), terminal_ ? "" : "\n");
  line_open_ = terminal_;
  std::fflush(stdout);
}

}  // namespace disagmoe
