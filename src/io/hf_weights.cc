#include "io/hf_weights.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/file.h"
#include "spec/hf_config.h"

namespace disagmoe {
namespace {

namespace fs = std::filesystem;

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t n : shape) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}

// Names that other programs write and this model has no parameter for; "" if it is one that should not be there.
std::string WhyLeftOut(const std::string& name, const ModelConfig& model) {
  if (name.ends_with(".rotary_emb.inv_freq")) return "rotary frequencies, which follow from the configuration";
  if (name == "lm_head.weight" && model.tie_word_embeddings) return "lm_head.weight, as embeddings are tied";
  const std::string layers = "model.layers.";
  if (!name.starts_with(layers)) return "";
  const int64_t layer = std::strtoll(name.c_str() + layers.size(), nullptr, 10);
  const bool beyond = model.model_type == "deepseek_v3" && layer >= model.num_hidden_layers;
  return beyond ? "layers after the last one (multi-token prediction), which are not trained" : "";
}

}  // namespace

HfWeights::HfWeights(const std::string& folder, const ModelConfig& model) : model_(model), files_(folder) {
  const std::string hint = "is it of another model? config.json beside it says which";
  std::set<std::string> known;
  for (const HfTensor& tensor : HfTensors(model)) {
    known.insert(tensor.name);
    if (!files_.Has(tensor.name)) {
      throw Error({"a weight is missing", folder, "no " + tensor.name, ShapeText(tensor.shape), hint});
    }
    if (files_.shape(tensor.name) != tensor.shape) {
      throw Error({"a weight of another shape", folder + ": " + tensor.name, ShapeText(files_.shape(tensor.name)), ShapeText(tensor.shape), hint});
    }
  }
  std::set<std::string> reasons;
  for (const std::string& name : files_.names()) {
    if (known.contains(name)) continue;
    const std::string reason = WhyLeftOut(name, model);
    if (reason.empty()) {
      throw Error({"a weight that the model has no place for", folder, name, std::to_string(known.size()) + " tensors of " + model.model_type, hint});
    }
    reasons.insert(reason);
  }
  for (const std::string& reason : reasons) notes_.push_back("left out: " + reason);
  notes_.insert(notes_.end(), files_.warnings().begin(), files_.warnings().end());
}

void HfWeights::Read(const ParamSpec& param, int64_t expert, float* values) const {
  for (const HfPiece& p : HfPieces(model_, param, expert)) {
    files_.Read(p.tensor, {p.begin, p.rows, p.row_stride, p.columns, p.column_stride}, values + p.offset);
    float zero = 0;  // NaN and infinity times zero stay what they are, or become NaN
    for (int64_t i = 0; i < p.rows * p.columns; ++i) zero += values[p.offset + i] * 0.0f;
    if (zero != 0) {
      throw Error({"weights that are not finite", files_.path() + ": " + p.tensor, "NaN or infinity", "numbers", {}});
    }
  }
}

void RequireHfConfig(const std::string& from, const ModelConfig& model) {
  const std::string path = from + "/config.json";
  const std::string difference = HfDifference(model, ReadHfModel(ReadTextFile(path, 64 << 20), path).model);
  if (difference.empty()) return;
  throw Error({"the weights are of another model", path, difference.substr(difference.rfind(" and ") + 5), difference.substr(0, difference.rfind(" and ")),
               "model.from=" + from + " takes the model from there"});
}

std::vector<std::string> CopyHfFiles(const std::string& from, const std::string& to) {
  static const std::set<std::string> kNames = {"config.json", "generation_config.json", "chat_template.json", "chat_template.jinja",
                                               "merges.txt", "vocab.json", "vocab.txt", "special_tokens_map.json", "added_tokens.json"};
  std::vector<std::string> copied;
  std::error_code error;
  fs::create_directories(to, error);
  for (fs::directory_iterator it(from, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    const bool code = name.ends_with(".py") && (name.starts_with("configuration_") || name.starts_with("modeling_") || name.starts_with("tokenization_"));
    if (!kNames.contains(name) && !name.starts_with("tokenizer") && !code) continue;
    if (!fs::is_regular_file(it->path(), error)) continue;  // follows links, as hub caches have
    fs::copy_file(it->path(), to + "/" + name, fs::copy_options::overwrite_existing, error);
    if (error) break;
    copied.push_back(name);
  }
  if (error) throw Error({"cannot copy the files beside the weights", from + " to " + to, error.message(), {}, {}});
  std::sort(copied.begin(), copied.end());
  return copied;
}

}  // namespace disagmoe
