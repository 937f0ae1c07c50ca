// export: a checkpoint as a Hugging Face folder.
#include <unistd.h>

#include <cstdio>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/time.h"
#include "cli/commands.h"
#include "io/checkpoint.h"
#include "io/hf_weights.h"

namespace disagmoe {
namespace {

namespace fs = std::filesystem;

void ShowProgress(int64_t done, int64_t total) {
  static int64_t shown = 0;
  if (NowNs() - shown < 200'000'000 && done != total) return;
  shown = NowNs();
  std::fprintf(stderr, "\r%.2f of %.2f billion values%s", static_cast<double>(done) * 1e-9, static_cast<double>(total) * 1e-9,
               done == total ? "\n" : "");
}

// The folder of a run, whose latest checkpoint it is then, or of a checkpoint.
std::string Checkpoint(const std::string& from) {
  if (!fs::is_directory(from)) {
    throw Error({"no such folder", from, "", "the folder of a run (its out=) or of a checkpoint", ""});
  }
  return fs::exists(from + "/manifest.json") ? from : ResolveCheckpoint(from + "/checkpoints", "latest");
}

// hf/ of the run that wrote the checkpoint: the files that its model came with.
std::string Companions(const std::string& checkpoint) {
  const fs::path run = fs::weakly_canonical(checkpoint).parent_path().parent_path();
  return fs::is_directory(run / "hf") ? (run / "hf").string() : "";
}

void PrintJson(const ExportArguments& a, const HfExportReport& r) {
  nlohmann::ordered_json files = nlohmann::ordered_json::array();
  for (const auto& f : r.weights.files) files.push_back({{"name", f.name}, {"bytes", f.bytes}, {"sha256", f.sha256}});
  const nlohmann::ordered_json json = {{"out", a.out},
                                       {"step", r.step},
                                       {"model_type", r.model.model_type},
                                       {"dtype", r.dtype},
                                       {"tensors", r.weights.tensors},
                                       {"values", r.weights.elements},
                                       {"inexact", r.weights.losses.inexact},
                                       {"files", files},
                                       {"copied", r.copied}};
  std::puts(json.dump().c_str());
}

}  // namespace

int ExportCommand(const ExportArguments& a) {
  HfExport what;
  what.checkpoint = Checkpoint(a.from);
  what.companions = a.companions.empty() ? Companions(what.checkpoint) : a.companions;
  what.out = a.out;
  what.dtype = a.dtype;
  what.max_shard_bytes = static_cast<int64_t>(a.shard_gb * 1e9);
  const int64_t begin = NowNs();
  const HfExportReport r = ExportHf(what, isatty(STDERR_FILENO) ? ShowProgress : nullptr);
  const double seconds = static_cast<double>(NowNs() - begin) * 1e-9;
  if (!a.no_check) VerifyTensorFolder(a.out, r.weights);
  if (a.json) {
    PrintJson(a, r);
    return 0;
  }
  double bytes = 0;
  for (const auto& f : r.weights.files) bytes += static_cast<double>(f.bytes);
  std::printf("%s: %s of step %lld, %lld tensors, %lld values in %s, %.1f MB in %zu file%s, %.1f s\n", a.out.c_str(),
              r.model.model_type.c_str(), static_cast<long long>(r.step), static_cast<long long>(r.weights.tensors),
              static_cast<long long>(r.weights.elements), r.dtype.c_str(), bytes * 1e-6, r.weights.files.size(),
              r.weights.files.size() == 1 ? "" : "s", seconds);
  if (r.weights.losses.inexact > 0) {
    std::printf("rounded to %s: %lld values\n", r.dtype.c_str(), static_cast<long long>(r.weights.losses.inexact));
  }
  std::string copied;
  for (const std::string& name : r.copied) copied += (copied.empty() ? "" : ", ") + name;
  std::printf("beside them: %s\n", copied.empty() ? "config.json, made from the run's [model]" : (copied + ", from " + what.companions).c_str());
  if (!a.no_check) std::puts("read again: names, shapes and hashes are those that were written");
  return 0;
}

}  // namespace disagmoe
