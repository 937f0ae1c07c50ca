// A checkpoint as a Hugging Face folder.
#include <filesystem>
#include <map>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/checkpoint_reader.h"
#include "io/file.h"
#include "io/hf_weights.h"
#include "spec/hf_config.h"

namespace disagmoe {
namespace {

using Ordered = nlohmann::ordered_json;

struct Dtype {
  const char* option;  // and in our configurations
  const char* stored;  // in safetensors
  const char* hf;      // in config.json
};
constexpr Dtype kDtypes[] = {{"bf16", "BF16", "bfloat16"}, {"fp16", "F16", "float16"}, {"fp32", "F32", "float32"}};

// The first of the option, what config.json says, and bf16.
const Dtype& DtypeOf(const std::string& option, const Ordered& config) {
  for (const Dtype& d : kDtypes) {
    if (option == d.option) return d;
  }
  if (!option.empty()) throw Error({"value not allowed", "--dtype", "\"" + option + "\"", "bf16, fp16 or fp32", {}});
  for (const char* key : {"dtype", "torch_dtype"}) {
    for (const Dtype& d : kDtypes) {
      if (config.contains(key) && config[key] == d.hf) return d;
    }
  }
  return kDtypes[0];
}

// The companions' config.json with what an export changes, or one made for the model.
Ordered ConfigOf(const HfExport& what, ModelConfig* model) {
  const std::string path = what.companions + "/config.json";
  std::error_code error;
  if (!what.companions.empty() && std::filesystem::exists(path, error)) {
    RequireHfConfig(what.companions, *model);
    Ordered config = Ordered::parse(ReadTextFile(path, 64 << 20));
    config.erase("quantization_config");  // the weights are written plain
    if (config.contains("num_nextn_predict_layers")) config["num_nextn_predict_layers"] = 0;
    return config;
  }
  const std::string text = WriteHfConfig(*model, "bfloat16");
  model->model_type = ReadHfModel(text, "config.json").model.model_type;
  return Ordered::parse(text);
}

void WriteConfig(Ordered config, const Dtype& dtype, const std::string& path) {
  const bool newer = config.contains("dtype");
  config[newer ? "dtype" : "torch_dtype"] = dtype.hf;
  if (newer) config.erase("torch_dtype");
  WriteTextFile(path, config.dump(2) + "\n");
}

int64_t Numel(const ParamSpec& param) {
  int64_t n = 1;
  for (int64_t size : param.shape) n *= size;
  return n;
}

}  // namespace

HfExportReport ExportHf(const HfExport& what, void (*progress)(int64_t, int64_t)) {
  std::error_code error;
  if (!what.companions.empty() && std::filesystem::equivalent(what.companions, what.out, error)) {
    throw Error({"cannot export here", what.out, "the folder that config.json and tokenizer are taken from", "another folder", {}});
  }
  CheckpointReader checkpoint(what.checkpoint);
  HfExportReport report;
  report.step = checkpoint.manifest().step;
  report.model = ParseConfig(checkpoint.manifest().config, what.checkpoint + "/manifest.json").model;
  const Ordered config = ConfigOf(what, &report.model);
  const Dtype& dtype = DtypeOf(what.dtype, config);
  report.dtype = dtype.stored;
  std::vector<TensorFolderWriter::Tensor> tensors;
  for (const HfTensor& t : HfTensors(report.model)) tensors.push_back({t.name, t.fp32 ? "F32" : dtype.stored, t.shape});
  TensorFolderWriter writer(what.out, tensors, what.max_shard_bytes);

  const std::vector<ParamSpec> table = ParamTable(report.model);
  int64_t total = 0, done = 0;
  for (const ParamSpec& param : table) total += Numel(param);
  std::vector<float> values;
  for (const ParamSpec& param : table) {
    const int64_t experts = param.per_expert ? param.shape[0] : 1, size = Numel(param) / experts;
    values.resize(static_cast<size_t>(size));
    for (int64_t e = 0; e < experts; ++e) {
      checkpoint.Fill("weight/" + param.name + (param.per_expert ? "#" + std::to_string(e) : ""), 0, size, values.data());
      for (const HfPiece& p : HfPieces(report.model, param, e)) {
        writer.Write(p.tensor, {p.begin, p.rows, p.row_stride, p.columns, p.column_stride}, values.data() + p.offset);
      }
      done += size;
      if (progress != nullptr) progress(done, total);
    }
  }
  report.weights = writer.Finish();
  if (const int64_t lost = report.weights.losses.overflowed; lost > 0) {
    for (const auto& file : report.weights.files) std::filesystem::remove(what.out + "/" + file.name);
    throw Error({"values too large for this type", what.out, std::to_string(lost) + " that would be infinite in " + dtype.option,
                 "none", "--dtype bf16"});
  }
  if (!what.companions.empty()) report.copied = CopyHfFiles(what.companions, what.out);
  WriteConfig(config, dtype, what.out + "/config.json");
  return report;
}

}  // namespace disagmoe
