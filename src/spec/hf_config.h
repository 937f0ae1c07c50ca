// Hugging Face's config.json and the runtime's [model] table.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "spec/model_config.h"

namespace disagmoe {

// model_type of the families that are known.
const std::vector<std::string_view>& HfFamilies();

struct HfModel {
  ModelConfig model;
  std::string source;  // "_source" of the file, else the file; with what of it is not modelled (multi-token prediction)
};

// From Hugging Face's config.json, in the form of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters). A key is
// read, or known to decide nothing in training, or throws Error, as do missing, contradictory and absurd values, and what
// the runtime does not compute (dropout, clipped queries, ...). Keys that begin with '_' are comments.
HfModel ReadHfModel(const std::string& json, const std::string& where);
// The same for a preset's name (presets/models, built in), a .json file, or a folder with a config.json.
struct NamedModel {
  HfModel hf;
  std::string name;    // "qwen3-235b-a22b"
  std::string folder;  // that has the config.json; "" of a preset
};
NamedModel LoadHfModel(const std::string& name_or_path);

// A config.json of the model's family, or if model_type is "" of the first that can say what the model does. It reads back
// to the same model, but for what a file has no place for (weights of auxiliary losses, rate of the router's correction).
// dtype: "bfloat16", "float16" or "float32". Throws Error where no family, or not this one, can say it.
std::string WriteHfConfig(const ModelConfig& model, const std::string& dtype);
// What two models say differently, of what a config.json decides: "rope_theta = 10000.0 and 500.0", or "".
std::string HfDifference(const ModelConfig& a, const ModelConfig& b);

}  // namespace disagmoe
