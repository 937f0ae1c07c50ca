// Writer of Hugging Face's config.json.
#include <algorithm>
#include <cmath>

#include "spec/config_keys.h"
#include "spec/hf_config.h"
#include "spec/hf_rope.h"

namespace disagmoe {
namespace {

using Ordered = nlohmann::ordered_json;

const char* Architecture(const std::string& family) {
  const std::pair<const char*, const char*> known[] = {
      {"qwen3_moe", "Qwen3MoeForCausalLM"},     {"qwen2_moe", "Qwen2MoeForCausalLM"},
      {"mixtral", "MixtralForCausalLM"},        {"olmoe", "OlmoeForCausalLM"},
      {"gpt_oss", "GptOssForCausalLM"},         {"deepseek", "DeepseekForCausalLM"},
      {"deepseek_v2", "DeepseekV2ForCausalLM"}, {"deepseek_v3", "DeepseekV3ForCausalLM"}};
  for (const auto& [name, architecture] : known) {
    if (family == name) return architecture;
  }
  throw Error({"unknown model family", "model.model_type", TomlString(family), "one of `disagmoe train --help`", {}});
}

void Deepseek(const ModelConfig& m, Ordered& out) {
  out["n_routed_experts"] = m.num_experts;
  // The published code of the first has none for null; that of the others always has some.
  out["n_shared_experts"] = m.n_shared_experts > 0 ? Ordered(m.n_shared_experts) : Ordered(nullptr);
  out["moe_intermediate_size"] = m.moe_intermediate_size;
  out["intermediate_size"] = m.intermediate_size;
  out["first_k_dense_replace"] = m.first_k_dense_replace;
  out["moe_layer_freq"] = 1;
  out["norm_topk_prob"] = m.norm_topk_prob;
  out["scoring_func"] = m.scoring_func;
  if (m.model_type == "deepseek") {
    out["head_dim"] = m.head_dim;
    out["attention_bias"] = m.attention_bias;
    return;
  }
  out["q_lora_rank"] = m.q_lora_rank > 0 ? Ordered(m.q_lora_rank) : Ordered(nullptr);
  out["kv_lora_rank"] = m.kv_lora_rank;
  out["qk_nope_head_dim"] = m.qk_nope_head_dim;
  out["qk_rope_head_dim"] = m.qk_rope_head_dim;
  out["v_head_dim"] = m.v_head_dim;
  out["routed_scaling_factor"] = m.routed_scaling_factor;
  out["topk_method"] = m.topk_method;
  out["n_group"] = m.n_group;
  out["topk_group"] = m.topk_group;
  if (m.model_type == "deepseek_v3") {
    out["num_nextn_predict_layers"] = 0;
    out["rope_interleave"] = m.rope_interleave;
  }
}

void Qwen(const ModelConfig& m, Ordered& out) {
  out["head_dim"] = m.head_dim;
  out["num_experts"] = m.num_experts;
  out["moe_intermediate_size"] = m.moe_intermediate_size;
  out["intermediate_size"] = m.intermediate_size;
  out["norm_topk_prob"] = m.norm_topk_prob;
  out["decoder_sparse_step"] = 1;
  out["mlp_only_layers"] = Ordered::array();
  for (int64_t l = 0; l < m.num_hidden_layers; ++l) {
    if (m.is_dense(l)) out["mlp_only_layers"].push_back(l);
  }
  out["use_sliding_window"] = m.sliding_window > 0;
  out["sliding_window"] = m.sliding_window > 0 ? Ordered(m.sliding_window) : Ordered(nullptr);
  if (m.model_type == "qwen3_moe") {
    out["attention_bias"] = m.attention_bias;
  } else {
    out["qkv_bias"] = m.attention_bias;
    out["shared_expert_intermediate_size"] = m.shared_intermediate();
  }
}

// The other families: the width of experts is intermediate_size.
void Plain(const ModelConfig& m, Ordered& out) {
  out["head_dim"] = m.head_dim;
  out["intermediate_size"] = m.moe_intermediate_size;
  if (m.model_type == "olmoe") {
    out["num_experts"] = m.num_experts;
    out["norm_topk_prob"] = m.norm_topk_prob;
  } else {
    out["num_local_experts"] = m.num_experts;
    out["sliding_window"] = m.sliding_window > 0 ? Ordered(m.sliding_window) : Ordered(nullptr);
  }
  if (m.model_type != "mixtral") out["attention_bias"] = m.attention_bias;
  if (m.model_type == "gpt_oss") out["swiglu_limit"] = m.swiglu_limit;
}

Ordered Write(const ModelConfig& m, const std::string& dtype) {
  Ordered out = {{"architectures", {Architecture(m.model_type)}},
                 {"model_type", m.model_type},
                 {"vocab_size", m.vocab_size},
                 {"hidden_size", m.hidden_size},
                 {"num_hidden_layers", m.num_hidden_layers},
                 {"num_attention_heads", m.num_attention_heads},
                 {"num_key_value_heads", m.kv_heads()},
                 {"num_experts_per_tok", m.num_experts_per_tok},
                 {"hidden_act", "silu"},
                 {"rms_norm_eps", m.rms_norm_eps},
                 {"initializer_range", m.initializer_range},
                 {"tie_word_embeddings", m.tie_word_embeddings}};
  if (m.model_type.starts_with("deepseek")) Deepseek(m, out);
  else if (m.model_type.starts_with("qwen")) Qwen(m, out);
  else Plain(m, out);
  const bool windows = m.model_type == "gpt_oss" || m.model_type.starts_with("qwen");
  if (windows && (m.sliding_window > 0 || m.model_type == "gpt_oss")) {
    out["layer_types"] = Ordered::array();
    for (int64_t l = 0; l < m.num_hidden_layers; ++l) {
      out["layer_types"].push_back(m.window(l) > 0 ? "sliding_attention" : "full_attention");
    }
  }
  out["rope_theta"] = m.rope_theta;
  out["rope_scaling"] = RopeScaling(m);
  // What the file's users may ask for beyond the model: as far as it was made for.
  out["max_position_embeddings"] = m.rope_type == "yarn" ? static_cast<int64_t>(m.rope_factor * static_cast<double>(m.rope_original_length)) : 32768;
  out["torch_dtype"] = dtype;
  return out;
}

}  // namespace

std::string HfDifference(const ModelConfig& a, const ModelConfig& b) {
  RunConfig one, other;
  one.model = a;
  other.model = b;
  // Of no meaning there, or no place in a file.
  for (ModelConfig* m : {&one.model, &other.model}) {
    const ModelConfig none;
    m->from.clear();
    m->router_aux_loss = none.router_aux_loss;
    m->router_aux_loss_coef = none.router_aux_loss_coef;
    m->router_bias_update_rate = none.router_bias_update_rate;
    if (m->latent()) m->head_dim = none.head_dim;
    if (m->latent()) m->num_key_value_heads = m->num_attention_heads;
    if (m->first_k_dense_replace == 0 && m->mlp_only_layers.empty()) m->intermediate_size = none.intermediate_size;
    // Two ways to say each.
    std::vector<int64_t> dense;
    for (int64_t l = 0; l < m->num_hidden_layers; ++l) {
      if (m->is_dense(l)) dense.push_back(l);
    }
    m->first_k_dense_replace = 0;
    m->mlp_only_layers = dense;
    if (m->shared_expert_intermediate_size == 0) m->shared_expert_intermediate_size = m->shared_intermediate();
    m->n_shared_experts = 0;
    std::vector<std::string> types;
    for (int64_t l = 0; l < m->num_hidden_layers; ++l) types.push_back(std::to_string(m->window(l)));
    m->layer_types = types;
    m->sliding_window = 0;
    if (m->rope_type != "yarn") {
      m->rope_beta_fast = none.rope_beta_fast;
      m->rope_beta_slow = none.rope_beta_slow;
      m->rope_original_length = 0;
      m->rope_truncate = true;
    }
    if (m->rope_type == "default") m->rope_factor = 1;
    if (m->topk_group == m->n_group && !m->corrected_router()) m->n_group = m->topk_group = 1, m->topk_method = "greedy";
  }
  // Written as its cause, a logarithm away.
  const double factor = one.model.attention_scale_factor;
  if (std::abs(other.model.attention_scale_factor / factor - 1) < 1e-12) other.model.attention_scale_factor = factor;
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string x = TomlValue(key.value(one)), y = TomlValue(key.value(other));
    if (key.table() == "model" && x != y) return std::string(key.leaf()) + " = " + x + " and " + y;
  }
  return "";
}

std::string WriteHfConfig(const ModelConfig& model, const std::string& dtype) {
  std::string first;
  for (const std::string_view family : HfFamilies()) {
    ModelConfig m = model;
    if (m.model_type.empty()) m.model_type = family;
    if (m.model_type != family) continue;
    const std::string text = Write(m, dtype).dump(2) + "\n";
    std::string difference;
    if (m.latent() && m.shared_intermediate() == 0) {
      difference = "no shared experts";
    } else try {
      difference = HfDifference(m, ReadHfModel(text, "config.json").model);
    } catch (const Error& error) {
      difference = error.what();
    }
    if (difference.empty()) return text;
    if (first.empty() || !model.model_type.empty()) first = "in " + std::string(family) + ": " + difference;
  }
  throw Error({"no Hugging Face family can say what this model does", "model.model_type", TomlString(model.model_type),
               "a model of one of the families of `disagmoe train --help`", first});
}

}  // namespace disagmoe
