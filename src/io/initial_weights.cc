#include "io/initial_weights.h"

#include <filesystem>

#include "base/error.h"
#include "io/checkpoint.h"
#include "io/hf_weights.h"
#include "spec/hf_config.h"

namespace disagmoe {
namespace {

namespace fs = std::filesystem;

void RequireSameModel(const ModelConfig& ours, const std::string& folder) {
  const ModelConfig theirs = ParseConfig(ReadManifest(folder).config, folder + "/manifest.json").model;
  ModelConfig a = ours, b = theirs;
  a.model_type = b.model_type = "";  // a name alone
  const std::string difference = HfDifference(a, b);
  if (difference.empty()) return;
  throw Error({"the checkpoint is of another model", folder, difference.substr(difference.rfind(" and ") + 5),
               difference.substr(0, difference.rfind(" and ")), "train.init=random starts anew"});
}

}  // namespace

InitialWeights KindOfInit(const std::string& init) {
  if (init == "auto" || init == "random") return InitialWeights::kRandom;
  if (!fs::is_directory(init)) {
    throw Error({"no such folder", "train.init", "\"" + init + "\"", "\"random\", or a Hugging Face or checkpoint folder", {}});
  }
  return fs::exists(init + "/manifest.json") || fs::exists(init + "/checkpoints/latest") ? InitialWeights::kCheckpoint : InitialWeights::kHuggingFace;
}

std::string InitialCheckpoint(const std::string& init) {
  return fs::exists(init + "/manifest.json") ? ResolveCheckpoint(init, init) : ResolveCheckpoint(init + "/checkpoints", "latest");
}

std::vector<std::string> CheckInitialWeights(const RunConfig& config) {
  const std::string& init = config.train.init;
  switch (KindOfInit(init)) {
    case InitialWeights::kRandom: return {};
    case InitialWeights::kCheckpoint: {
      const std::string folder = InitialCheckpoint(init);
      RequireSameModel(config.model, folder);
      // A new run sets the checkpoints of its folder aside.
      std::error_code error;
      if (fs::equivalent(fs::path(folder).parent_path(), config.out + "/checkpoints", error)) {
        throw Error({"contradiction", "train.init", "\"" + init + "\"", "a checkpoint of another folder than out = \"" + config.out + "\"",
                     "out=DIR names another; train.resume=latest goes on with that run"});
      }
      return {"weights of " + folder + " (not its optimizer state)"};
    }
    case InitialWeights::kHuggingFace: break;
  }
  RequireHfConfig(init, config.model);
  std::vector<std::string> notes = HfWeights(init, config.model).notes();
  notes.insert(notes.begin(), "weights of " + init + " (" + config.model.model_type + ")");
  return notes;
}

void KeepCompanions(const RunConfig& config, const std::string& resumed) {
  const std::string to = config.out + "/hf";
  const std::string& init = config.train.init;
  // hf/ of the run that wrote a checkpoint.
  const auto beside = [](const std::string& checkpoint) {
    return (fs::weakly_canonical(checkpoint).parent_path().parent_path() / "hf").string();
  };
  std::string from;
  if (!resumed.empty()) from = beside(resumed);
  else if (KindOfInit(init) == InitialWeights::kHuggingFace) from = init;
  else if (KindOfInit(init) == InitialWeights::kCheckpoint) from = beside(InitialCheckpoint(init));
  std::error_code error;
  if (!from.empty() && fs::equivalent(from, to, error)) return;
  fs::remove_all(to, error);
  if (!from.empty() && fs::is_directory(from)) CopyHfFiles(from, to);
}

}  // namespace disagmoe
