// Weights of a Hugging Face folder as parameters of ours, and back.
#pragma once

#include <string>
#include <vector>

#include "io/tensor_folder.h"
#include "spec/hf_tensors.h"
#include "spec/model_config.h"

namespace disagmoe {

class HfWeights {
 public:
  // Checks that the folder has every tensor of the model, of its shape, and no other. model.model_type says the form.
  // Throws Error. Reads headers alone.
  HfWeights(const std::string& folder, const ModelConfig& model);
  // All values of a parameter, or of one expert of it, as fp32. Threads may read at the same time.
  void Read(const ParamSpec& param, int64_t expert, float* values) const;
  // What of the folder is left out, and what is odd: lines for the user.
  const std::vector<std::string>& notes() const { return notes_; }
  const TensorFolder& files() const { return files_; }

 private:
  const ModelConfig model_;
  TensorFolder files_;
  std::vector<std::string> notes_;
};

// Folder `from` (with config.json) must be of the model, but for weights of auxiliary losses. Throws Error.
void RequireHfConfig(const std::string& from, const ModelConfig& model);

// config.json, tokenizer and the like, which an export takes along: `from` to `to`, which is created. Returns the names.
std::vector<std::string> CopyHfFiles(const std::string& from, const std::string& to);

struct HfExport {
  std::string checkpoint;   // a folder with a manifest
  std::string companions = "";  // a folder with the config.json and tokenizer that it goes with; "": none, config.json is made
  std::string out;          // must not have weights
  std::string dtype = "";   // "bf16", "fp16", "fp32"; "": as config.json says, else bf16
  int64_t max_shard_bytes = int64_t{5} * 1000 * 1000 * 1000;
};
struct HfExportReport {
  ModelConfig model;        // with the family that it was written as
  int64_t step = 0;
  std::string dtype;        // "BF16"
  TensorFolderSummary weights;
  std::vector<std::string> copied;
};
// A checkpoint as a Hugging Face folder. progress(done, total) counts values and may be null. Throws Error.
HfExportReport ExportHf(const HfExport& what, void (*progress)(int64_t, int64_t));

}  // namespace disagmoe
