#include "spec/model_shape.h"

#include <cstdio>
#include <filesystem>

#include "base/error.h"
#include "spec/hf_config.h"
#include "spec/presets.h"

namespace disagmoe {
namespace {

// Queries, keys and values from compressed rows, each with a norm (arXiv 2405.04434, section 2.1). The biases are where
// the published code has them: on the projections from and to the hidden size.
int64_t MlaParams(const ModelShape& s) {
  const int64_t h = s.hidden_size, heads = s.num_heads, nope = s.head_dim - s.rope_dim;
  const int64_t queries = heads * s.head_dim;
  int64_t params = s.q_lora_rank > 0 ? s.q_lora_rank * (h + 1 + queries) : h * queries;
  params += h * (s.kv_lora_rank + s.rope_dim) + s.kv_lora_rank;
  params += s.kv_lora_rank * heads * (nope + s.value_dim);
  params += heads * s.value_dim * h;
  if (s.attention_bias) params += s.q_lora_rank + s.kv_lora_rank + s.rope_dim;
  if (s.output_bias) params += h;
  return params;
}

int64_t GqaParams(const ModelShape& s) {
  const int64_t h = s.hidden_size, q = s.num_heads * s.head_dim, k = s.num_kv_heads * s.head_dim;
  const int64_t v = s.num_kv_heads * s.value_dim;
  int64_t params = h * (q + k + v) + s.num_heads * s.value_dim * h;
  if (s.attention_bias) params += q + k + v;
  if (s.output_bias) params += h;
  if (s.qk_norm) params += s.qk_norm_all_heads ? q + k : 2 * s.head_dim;
  if (s.sinks) params += s.num_heads;
  return params;
}

std::string Billions(int64_t params) {
  char text[40];
  std::snprintf(text, sizeof text, "%.2f B", static_cast<double>(params) / 1e9);
  return text;
}

std::string Summary(const ModelShape& s) {
  int64_t dense = 0;
  for (const bool d : s.dense) dense += d;
  std::string text = std::to_string(s.num_layers) + " layers";
  if (dense > 0) text += " (" + std::to_string(dense) + " dense)";
  text += ", " + std::to_string(s.num_experts) + " experts top-" + std::to_string(s.experts_per_token);
  if (s.shared_hidden > 0) text += " + shared";
  text += ", hidden " + std::to_string(s.hidden_size) + "/" + std::to_string(s.expert_hidden);
  return text + ", " + Billions(s.TotalParams()) + " parameters, " + Billions(s.ActiveParams()) + " active";
}

ModelShape ShapeOfHf(const HfModel& hf, const std::string& name) {
  ModelShape shape = ShapeOf(hf.model, name);
  shape.source = hf.source;
  return shape;
}

}  // namespace

int64_t ModelShape::AttentionParams(int64_t layer) const {
  int64_t params = (kv_lora_rank > 0 ? MlaParams(*this) : GqaParams(*this)) + 2 * hidden_size;
  if (!dense[layer]) params += num_experts * (hidden_size + (router_bias ? 1 : 0));
  return params;
}

int64_t ModelShape::ExpertParams() const {
  return 3 * hidden_size * expert_hidden + (expert_bias ? 2 * expert_hidden + hidden_size : 0);
}

int64_t ModelShape::FfnParams(int64_t layer) const {
  if (dense[layer]) return 3 * hidden_size * dense_hidden;
  return num_experts * ExpertParams() + 3 * hidden_size * shared_hidden + (shared_gate ? hidden_size : 0);
}

int64_t ModelShape::HeadParams() const { return hidden_size + vocab_size * hidden_size; }

int64_t ModelShape::TotalParams() const {
  int64_t params = EmbeddingParams() + HeadParams() - (tied_embeddings ? EmbeddingParams() : 0);
  for (int64_t l = 0; l < num_layers; ++l) params += AttentionParams(l) + FfnParams(l);
  return params;
}

int64_t ModelShape::ActiveParams() const {
  int64_t params = TotalParams();
  for (int64_t l = 0; l < num_layers; ++l)
    if (!dense[l]) params -= (num_experts - experts_per_token) * ExpertParams();
  return params;
}

ModelShape ShapeOf(const ModelConfig& model, const std::string& name) {
  ModelShape s;
  s.name = name;
  s.family = model.model_type.empty() ? "disagmoe" : model.model_type;
  s.source = "the run's [model] table";
  s.vocab_size = model.vocab_size;
  s.hidden_size = model.hidden_size;
  s.num_layers = model.num_hidden_layers;
  s.num_heads = model.num_attention_heads;
  s.num_kv_heads = model.kv_heads();
  s.head_dim = model.qk_dim();
  s.value_dim = model.value_dim();
  s.qk_norm = model.qk_norm;
  s.qk_norm_all_heads = model.qk_norm_all_heads;
  s.attention_bias = model.attention_bias;
  s.output_bias = model.output_bias;
  s.sinks = model.attention_sinks;
  s.q_lora_rank = model.q_lora_rank;
  s.kv_lora_rank = model.kv_lora_rank;
  s.rope_dim = model.rope_dim();
  s.num_experts = model.num_experts;
  s.experts_per_token = model.num_experts_per_tok;
  s.expert_hidden = model.moe_intermediate_size;
  s.expert_bias = model.expert_bias;
  s.router_bias = model.router_bias || model.corrected_router();
  const bool grouped = model.topk_method != "greedy" && model.topk_group < model.n_group;
  s.expert_groups = grouped ? model.n_group : 0;
  s.groups_per_token = grouped ? model.topk_group : 0;
  s.shared_hidden = model.shared_intermediate();
  s.shared_gate = model.shared_expert_gate;
  s.tied_embeddings = model.tie_word_embeddings;
  for (int64_t l = 0; l < s.num_layers; ++l) {
    s.window.push_back(model.window(l));
    s.dense.push_back(model.is_dense(l));
    if (model.is_dense(l)) s.dense_hidden = model.intermediate_size;
  }
  return s;
}

NamedModel LoadHfModel(const std::string& name_or_path) {
  namespace fs = std::filesystem;
  if (const PresetFile* preset = FindPreset(ModelPresetFiles(), name_or_path)) {
    return {ReadHfModel(std::string(preset->text), "preset " + name_or_path), name_or_path, ""};
  }
  const fs::path path(name_or_path);
  const bool folder = fs::is_directory(path);
  if (!folder && path.extension() != ".json") {
    throw Error({"unknown model", {}, "'" + name_or_path + "'",
                 PresetNames(ModelPresetFiles()) + "; or a config.json, a folder with one, or a run's .toml",
                 NearestPreset(ModelPresetFiles(), name_or_path)});
  }
  const fs::path file = folder ? path / "config.json" : path;
  const std::string parent = fs::weakly_canonical(file).parent_path().filename().string();
  const bool named_by_folder = folder || (path.filename() == "config.json" && !parent.empty());
  return {ReadHfModel(ReadSpecFile(file.string(), "model", "a config.json"), file.string()),
          named_by_folder ? parent : path.stem().string(), folder ? path.string() : file.parent_path().string()};
}

ModelShape ShapeOfRun(const RunConfig& config, const std::string& path) {
  const std::string& from = config.model.from;
  ModelShape shape = ShapeOf(config.model, from.empty() ? std::filesystem::path(path).stem().string() : LoadHfModel(from).name);
  shape.source = path;
  return shape;
}

ModelShape LoadModelShape(const std::string& name_or_path) {
  if (!name_or_path.ends_with(".toml")) {
    const NamedModel named = LoadHfModel(name_or_path);
    return ShapeOfHf(named.hf, named.name);
  }
  return ShapeOfRun(LoadConfig(name_or_path, {}), name_or_path);
}

std::vector<Preset> ModelPresets() {
  std::vector<Preset> presets;
  for (const PresetFile& file : ModelPresetFiles()) {
    const std::string name(file.name);
    presets.push_back({name, Summary(LoadModelShape(name))});
  }
  return presets;
}

}  // namespace disagmoe
