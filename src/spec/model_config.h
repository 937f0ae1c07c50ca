// The [model] table: all that decides what a model computes. Keys are those of Hugging Face config.json files where a
// family has one; what a family calls otherwise, or has built in, is translated by ReadHfModel (spec/hf_config.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace disagmoe {

struct ModelConfig {
  // A preset, a config.json or a folder with one: the other keys are taken from it when a configuration is
  // loaded. Printed configurations have those instead.
  std::string from = "";
  // The family that it is exported as: "qwen3_moe", "gpt_oss", ...; "" = none, as the runtime's own models.
  std::string model_type = "";
  int64_t vocab_size = 257;
  int64_t hidden_size = 128;            // H
  int64_t num_hidden_layers = 2;        // L
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;     // head and embedding are one parameter

  // Attention.
  int64_t num_attention_heads = 4;
  int64_t num_key_value_heads = 2;
  int64_t head_dim = 32;                // d; even. Of no meaning with latent attention
  bool qk_norm = false;                 // RMSNorm over each head's query and key, before RoPE
  bool qk_norm_all_heads = false;       // that norm is over all heads of a token together (OLMoE)
  bool attention_bias = false;          // of the projections to queries, keys, values
  bool output_bias = false;             // of the output projection
  bool attention_sinks = false;         // one learned logit a head that takes part in the softmax
  int64_t sliding_window = 0;           // a query sees itself and the sliding_window - 1 tokens before it; 0 = all
  // By layer "full_attention" or "sliding_attention"; []: the window is everywhere.
  std::vector<std::string> layer_types = {};
  // Multi-head latent attention (arXiv 2405.04434, section 2.1); kv_lora_rank 0 = none, q_lora_rank 0 = whole queries.
  int64_t kv_lora_rank = 0;
  int64_t q_lora_rank = 0;
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;
  int64_t v_head_dim = 0;
  double latent_norm_eps = 1e-6;        // of the norms of compressed queries, keys and values

  // Rotary embedding: pairs (i, i + half).
  double rope_theta = 10000;
  std::string rope_type = "default";    // "default", "linear" (positions / factor), "yarn" (arXiv 2309.00071)
  double rope_factor = 1;
  double rope_beta_fast = 32, rope_beta_slow = 1;
  int64_t rope_original_length = 0;     // original_max_position_embeddings
  bool rope_truncate = true;            // ends of yarn's ramp are whole numbers
  double rope_attention_factor = 1;     // yarn: of cos and sin
  bool rope_interleave = false;         // published weights pair neighbours; they are permuted on reading and writing
  double attention_scale_factor = 1;    // of the logits, beside 1 / sqrt(d): DeepSeek's mscale, squared

  // Experts and router.
  int64_t num_experts = 8;              // E
  int64_t num_experts_per_tok = 2;      // k
  int64_t moe_intermediate_size = 128;  // De
  bool norm_topk_prob = true;           // renormalise the chosen gates to sum 1
  double routed_scaling_factor = 1;     // of the gates, after that
  std::string scoring_func = "softmax"; // "softmax", "sigmoid": logits to scores; gates are scores of the chosen
  // "greedy": the k largest scores; "group_limited_greedy": within the topk_group best of n_group equal groups of
  // experts, a group being as good as its best expert (DeepSeek-V2); "noaux_tc": the same with scores plus a correction
  // that only chooses, a group being as good as its two best (DeepSeek-V3); it learns from loads.
  std::string topk_method = "greedy";
  int64_t n_group = 1;
  int64_t topk_group = 1;
  double router_bias_update_rate = 0.001;  // noaux_tc: a step adds this to an expert below the mean load, takes it above
  bool router_bias = false;             // of the logits, learned (gpt-oss)
  bool expert_bias = false;             // of both projections of an expert
  // 0: silu(gate) up; else gpt-oss's, gate at most limit and up within +-limit: gate sigmoid(1.702 gate) (1 + up).
  double swiglu_limit = 0;
  int64_t n_shared_experts = 0;         // one SwiGLU of n_shared_experts * moe_intermediate_size, at the token's home
  int64_t shared_expert_intermediate_size = 0;  // or of this width
  bool shared_expert_gate = false;      // its result times sigmoid of a projection to one number (Qwen2-MoE)
  int64_t first_k_dense_replace = 0;    // leading layers with a dense SwiGLU instead of experts
  std::vector<int64_t> mlp_only_layers = {};  // further such layers
  int64_t intermediate_size = 512;      // of those
  double router_aux_loss_coef = 0.01;
  // "none"; "sequence": balance within each sequence; "global": over all sequences of a micro-batch, on all workers.
  std::string router_aux_loss = "sequence";

  bool is_dense(int64_t layer) const {
    return layer < first_k_dense_replace ||
           std::find(mlp_only_layers.begin(), mlp_only_layers.end(), layer) != mlp_only_layers.end();
  }
  int64_t shared_intermediate() const {
    return n_shared_experts > 0 ? n_shared_experts * moe_intermediate_size : shared_expert_intermediate_size;
  }
  bool latent() const { return kv_lora_rank > 0; }
  int64_t kv_heads() const { return latent() ? num_attention_heads : num_key_value_heads; }
  int64_t qk_dim() const { return latent() ? qk_nope_head_dim + qk_rope_head_dim : head_dim; }  // of a query, a key
  int64_t value_dim() const { return latent() ? v_head_dim : head_dim; }
  int64_t rope_dim() const { return latent() ? qk_rope_head_dim : head_dim; }  // the last of qk_dim
  int64_t window(int64_t layer) const {
    return layer_types.empty() || layer_types[layer] == "sliding_attention" ? sliding_window : 0;
  }
  bool corrected_router() const { return topk_method == "noaux_tc"; }
};

}  // namespace disagmoe
