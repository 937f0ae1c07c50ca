#include "runtime/run_rules.h"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "base/error.h"
#include "io/checkpoint.h"
#include "layers/reference.h"
#include "runtime/state_io.h"

namespace disagmoe {
namespace {

std::string StageName(int64_t stage, int64_t layers) {
  if (stage < 0) return "the embedding";
  if (stage == 2 * layers) return "the head";
  return (stage % 2 == 0 ? "attention of layer " : "experts of layer ") + std::to_string(stage / 2);
}

// "table.key" of a printed configuration to its value.
std::map<std::string, std::string> Values(const std::string& text) {
  std::map<std::string, std::string> out;
  std::istringstream lines(text);
  std::string line, table;
  while (std::getline(lines, line)) {
    const size_t equals = line.find(" = ");
    if (line.starts_with('[')) table = line.substr(1, line.find(']') - 1) + ".";
    if (equals != line.npos) out[table + line.substr(0, equals)] = line.substr(equals + 3);
  }
  return out;
}

// A key that one side does not know, because it is younger, is at its default there.
void RequireSameRun(const std::string& theirs_text, const std::string& ours_text, const std::string& folder) {
  const auto theirs = Values(theirs_text), ours = Values(ours_text), defaults = Values(PrintConfig({}));
  std::map<std::string, std::string> all = ours;
  all.insert(theirs.begin(), theirs.end());
  for (const auto& [key, any] : all) {
    const auto value = [&](const std::map<std::string, std::string>& values) -> std::string {
      for (const auto* from : {&values, &defaults}) {
        const auto it = from->find(key);
        if (it != from->end()) return key.substr(key.find('.') + 1) + " = " + it->second;
      }
      return "nothing";
    };
    if (value(ours) == value(theirs)) continue;
    throw Error({"the checkpoint is of another run", folder, value(ours), value(theirs),
                 "model, batch, dtype, data and seed must stay the same; or start anew without train.resume"});
  }
}

}  // namespace

// The CPU, or the accelerator that libtorch finds; sets the number of threads of this thread's work.
at::Device PickDevice(const DeviceConfig& config, int local_rank) {
  at::set_num_threads(config.threads);
  const auto accelerator = at::getAccelerator(/*checked=*/false);
  const bool there = accelerator.has_value() && at::globalContext().getAcceleratorHooksInterface(accelerator).deviceCount() > 0;
  if (config.type == "cpu" || (config.type == "auto" && !there)) return at::kCPU;
  if (!there) throw Error({"no accelerator", "device.type", "none that libtorch finds", "\"" + config.type + "\"", "device.type=cpu"});
  const int count = at::globalContext().getAcceleratorHooksInterface(accelerator).deviceCount();
  return at::Device(*accelerator, static_cast<at::DeviceIndex>(local_rank % count));
}

std::string Describe(const at::Device& device, int threads) {
  if (!device.is_cpu()) return device.str();
  return "cpu (" + std::to_string(threads) + (threads == 1 ? " thread" : " threads") + " a worker)";
}

double PeakMemory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024;
}

void CheckFinite(const RunConfig& config, int64_t step, double loss, double norm, int64_t bad) {
  if (std::isfinite(loss) && std::isfinite(norm)) return;
  const int64_t L = config.model.num_hidden_layers, stages = 2 * L + 2;
  const std::string what = std::isfinite(loss) ? "the gradient norm is not finite" : "the loss is not finite";
  std::string where = "step " + std::to_string(step) + ", first seen in the backward";
  if (bad != kAllFinite) {
    where = "step " + std::to_string(step) + ", first seen in the output of " + StageName(bad % stages - 1, L) + ", micro-batch " +
            std::to_string(bad / stages);
  }
  throw Error({what, where, std::to_string(std::isfinite(loss) ? norm : loss), "a finite number",
               "lower train.lr or set train.clip_grad, and resume from a checkpoint well before this step"});
}

Resume FindCheckpoint(const RunConfig& config, const Corpus& data) {
  if (config.train.resume.empty()) return {};
  Resume r;
  r.folder = ResolveCheckpoint(config.out + "/checkpoints", config.train.resume);
  const CheckpointManifest manifest = ReadManifest(r.folder);
  r.step = manifest.step;
  RequireSameRun(manifest.layout, ResumeKey(config, data.Fingerprint()), r.folder);
  if (r.step > LastStep(config.train, r)) {
    throw Error({"the checkpoint is beyond the last step", r.folder, "step " + std::to_string(r.step),
                 "at most " + std::to_string(config.train.steps), "raise train.steps; 0 only loads, evaluates and saves"});
  }
  return r;
}

RunFolder::RunFolder(const RunConfig& config, bool resumed) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::create_directories(config.out, error);
  const std::string lock = config.out + "/.lock";
  lock_ = open(lock.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644);
  if (lock_ < 0) throw Error({"cannot write to the folder of the run", config.out, std::strerror(errno), "", "set out=DIR"});
  if (flock(lock_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    close(lock_);
    throw Error({"another run is using this folder", config.out, "", "", "wait for it, or set out=DIR"});
  }
  fs::remove_all(config.out + "/trace", error);
  fs::remove(config.out + "/trace.json", error);
  fs::remove(config.out + "/expert_load.json", error);
  const std::string checkpoints = config.out + "/checkpoints";
  if (resumed || !fs::exists(checkpoints + "/latest")) return;
  // Not deleted: they may be somebody's only copy. Not left: "latest" would go on with another run.
  for (int i = 1; moved_.empty(); ++i) {
    if (!fs::exists(checkpoints + "." + std::to_string(i))) moved_ = checkpoints + "." + std::to_string(i);
  }
  fs::rename(checkpoints, moved_, error);
  if (error) throw Error({"cannot move the checkpoints of an earlier run", checkpoints, error.message(), "", "set out=DIR"});
}

RunFolder::~RunFolder() { close(lock_); }

void WriteText(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::trunc);
  file << text;
  if (!file.flush()) throw Error({"cannot write", path, "", "", "is the disk full?"});
}

}  // namespace disagmoe
