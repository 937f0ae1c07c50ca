// A model's dimensions, as far as they decide what it costs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec/config.h"

namespace disagmoe {

struct ModelShape {
  std::string name;        // "qwen3-235b-a22b"
  std::string family;      // model_type of config.json: "qwen3_moe", "gpt_oss", "deepseek_v3", ...
  std::string source;      // where its numbers are from
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;     // H
  int64_t num_layers = 0;      // L
  int64_t num_heads = 0;       // n_h
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;        // d of queries and keys (with MLA: without and with RoPE together)
  int64_t value_dim = 0;       // d of values
  bool qk_norm = false;
  bool qk_norm_all_heads = false;  // OLMoE: one norm over all heads together instead of over each
  bool attention_bias = false;     // of the projections to queries, keys, values
  bool output_bias = false;        // of the output projection
  bool sinks = false;              // one logit a head
  // Multi-head latent attention; 0 = none. q_lora_rank 0 with kv_lora_rank > 0: queries are not compressed.
  int64_t q_lora_rank = 0;
  int64_t kv_lora_rank = 0;
  int64_t rope_dim = 0;        // of head_dim
  std::vector<int64_t> window; // by layer: sliding window in tokens, 0 = full causal attention
  int64_t num_experts = 0;          // E
  int64_t experts_per_token = 0;    // k
  int64_t expert_hidden = 0;        // De
  bool expert_bias = false;
  bool router_bias = false;         // gpt-oss's router; DeepSeek-V3's correction of the scores
  // Experts are in so many groups of equal size, and a token's are in at most groups_per_token of them; 0 = no limit.
  int64_t expert_groups = 0;
  int64_t groups_per_token = 0;
  int64_t shared_hidden = 0;        // hidden size of the shared experts together; 0 = none
  bool shared_gate = false;         // Qwen2-MoE
  std::vector<bool> dense;          // by layer: a dense FFN instead of experts
  int64_t dense_hidden = 0;
  bool tied_embeddings = false;     // head and embedding are one parameter

  // Parameters of each stage (schedule.h); a norm before the experts counts with the attention stage. Tied: both ends.
  int64_t AttentionParams(int64_t layer) const;  // embedding not included
  int64_t FfnParams(int64_t layer) const;        // experts, shared experts or dense FFN; router is with attention
  int64_t ExpertParams() const;                  // one expert of one layer
  int64_t EmbeddingParams() const { return vocab_size * hidden_size; }
  int64_t HeadParams() const;                    // final norm and projection
  int64_t TotalParams() const;                   // tied parameters once
  int64_t ActiveParams() const;                  // used by a token: k experts of E; embedding and head are whole
  bool operator==(const ModelShape&) const = default;
};

ModelShape ShapeOf(const ModelConfig& model, const std::string& name);
// That of a configuration read from `path`, by whose name it goes where model.from has none.
ModelShape ShapeOfRun(const RunConfig& config, const std::string& path);
// A preset's name (presets/models, built in), a .json file, a folder with a config.json, or a run's .toml. Throws Error
// with the presets that exist.
ModelShape LoadModelShape(const std::string& name_or_path);
struct Preset {
  std::string name;
  std::string summary;
};
std::vector<Preset> ModelPresets();

}  // namespace disagmoe
