// Reader of Hugging Face's config.json. What a key means is taken from the model code that reads it (transformers 5.24, and
// for deepseek the modeling_deepseek.py beside the weights).
#include "spec/hf_config.h"

#include <algorithm>
#include <cmath>

#include "spec/hf_rope.h"
#include "spec/json_reader.h"

namespace disagmoe {
namespace {

using Reader = JsonReader;

// Keys of public configurations of all these families that change nothing in training.
// (quantization_config: how published weights are stored; training holds the same parameters unpacked.)
const std::set<std::string>& IrrelevantKeys() {
  static const std::set<std::string> keys = {
      "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "ep_size",
      "head_dim", "id2label", "initial_context_length", "is_encoder_decoder", "label2id", "max_position_embeddings",
      "model_max_length", "norm_eps", "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp",
      "problem_type", "quantization_config", "return_dict", "tokenizer_class", "torch_dtype", "transformers_version",
      "use_cache", "use_return_dict"};
  return keys;
}

// Limits as of the runtime's own keys: products of a few stay far from overflow.
constexpr int64_t kMaxHidden = 1 << 17, kMaxHeads = 4096, kMaxWidth = 1 << 20, kMaxLayers = 4096, kMaxExperts = 1 << 16;

// What all families have. Fields as in transformers' attention classes.
void ReadCommon(Reader& r, ModelConfig& m) {
  m.vocab_size = r.Int("vocab_size", 2, 1 << 24);
  m.hidden_size = r.Int("hidden_size", 1, kMaxHidden);
  m.num_hidden_layers = r.Int("num_hidden_layers", 1, kMaxLayers);
  m.num_attention_heads = r.Int("num_attention_heads", 1, kMaxHeads);
  m.tie_word_embeddings = r.BoolOr("tie_word_embeddings", false);
  const bool five = m.model_type == "mixtral" || m.model_type == "olmoe" || m.model_type == "gpt_oss";
  m.rms_norm_eps = r.NumberOr("rms_norm_eps", five ? 1e-5 : 1e-6, 0);
  m.initializer_range = r.NumberOr("initializer_range", 0.02, -1);
  if (r.Has("hidden_act") && r.String("hidden_act", "\"silu\"") != "silu") {
    throw Error({"not computed here", r.At("hidden_act"), r.String("hidden_act", ""), "\"silu\"", {}});
  }
  for (const char* key : {"attention_dropout", "hidden_dropout", "router_jitter_noise", "mlp_bias", "clip_qkv"}) r.RequireOff(key);
  m.router_aux_loss = "none";
  m.router_aux_loss_coef = 0;
}

void ReadHeads(Reader& r, ModelConfig& m, int64_t default_head_dim = 0) {
  const bool needed = m.model_type != "olmoe" && m.model_type != "deepseek";  // those default to num_attention_heads
  m.num_key_value_heads = needed ? r.Int("num_key_value_heads", 1, kMaxHeads)
                                 : r.IntOr("num_key_value_heads", m.num_attention_heads, 1, kMaxHeads);
  if (m.num_attention_heads % m.num_key_value_heads != 0) {
    r.Contradiction("num_key_value_heads", std::to_string(m.num_key_value_heads),
                    "a divisor of num_attention_heads = " + std::to_string(m.num_attention_heads));
  }
  if (!r.Has("head_dim") && default_head_dim == 0 && m.hidden_size % m.num_attention_heads != 0) {
    r.Contradiction("num_attention_heads", std::to_string(m.num_attention_heads),
                    "a divisor of hidden_size = " + std::to_string(m.hidden_size), "or give head_dim");
  }
  const int64_t otherwise = default_head_dim > 0 ? default_head_dim : m.hidden_size / m.num_attention_heads;
  m.head_dim = r.IntOr("head_dim", otherwise, 1, 4096);
}

void ReadMla(Reader& r, ModelConfig& m) {
  m.q_lora_rank = r.IntOr("q_lora_rank", 0, 1, kMaxWidth);
  m.kv_lora_rank = r.Int("kv_lora_rank", 1, kMaxWidth);
  m.qk_rope_head_dim = r.Int("qk_rope_head_dim", 1, 4096);
  m.qk_nope_head_dim = r.Int("qk_nope_head_dim", 1, 4096);
  m.v_head_dim = r.Int("v_head_dim", 1, 4096);
  m.num_key_value_heads = r.IntOr("num_key_value_heads", m.num_attention_heads, 1, kMaxHeads);
  if (m.num_key_value_heads != m.num_attention_heads) {
    r.Contradiction("num_key_value_heads", std::to_string(m.num_key_value_heads),
                    "num_attention_heads = " + std::to_string(m.num_attention_heads) + " (latent attention has no groups)");
  }
  if (r.Has("qk_head_dim") && r.Int("qk_head_dim", 1, 8192) != m.qk_dim()) {
    r.Contradiction("qk_head_dim", std::to_string(r.Int("qk_head_dim", 1, 8192)),
                    "qk_nope_head_dim + qk_rope_head_dim = " + std::to_string(m.qk_dim()));
  }
  m.rope_interleave = m.model_type == "deepseek_v2" || r.BoolOr("rope_interleave", true);
  if (r.BoolOr("attention_bias", false)) {
    throw Error({"not computed here", r.At("attention_bias"), "true", "false with latent attention", {}});
  }
}

void ReadExperts(Reader& r, ModelConfig& m, const std::vector<std::string>& count, const std::string& width) {
  m.num_experts = r.Alias(count, 1, kMaxExperts);
  m.num_experts_per_tok = r.Alias({"num_experts_per_tok", "experts_per_token"}, 1, 1024);
  if (m.num_experts_per_tok > m.num_experts) {
    r.Contradiction("num_experts_per_tok", std::to_string(m.num_experts_per_tok),
                    "at most " + count.front() + " = " + std::to_string(m.num_experts));
  }
  m.moe_intermediate_size = r.Int(width, 1, kMaxWidth);
}

// The leading ones as a number, the others by name.
void SetDense(ModelConfig& m, const std::vector<bool>& dense) {
  m.first_k_dense_replace = std::find(dense.begin(), dense.end(), false) - dense.begin();
  m.mlp_only_layers.clear();
  for (int64_t l = m.first_k_dense_replace; l < m.num_hidden_layers; ++l) {
    if (dense[l]) m.mlp_only_layers.push_back(l);
  }
}

// transformers, Qwen3MoeDecoderLayer.
void ReadQwenDense(Reader& r, ModelConfig& m) {
  const int64_t step = r.IntOr("decoder_sparse_step", 1, 1, kMaxLayers);
  std::vector<bool> dense(m.num_hidden_layers);
  for (int64_t l = 0; l < m.num_hidden_layers; ++l) dense[l] = (l + 1) % step != 0;
  if (r.Has("mlp_only_layers")) {
    const std::string expected = "numbers of layers from 0 to " + std::to_string(m.num_hidden_layers - 1);
    for (const Json& layer : r.Array("mlp_only_layers", expected)) {
      const bool good = layer.is_number_unsigned() && layer.get<uint64_t>() < static_cast<uint64_t>(m.num_hidden_layers);
      if (!good) r.Contradiction("mlp_only_layers", layer.dump(), expected);
      dense[layer.get<uint64_t>()] = true;
    }
  }
  SetDense(m, dense);
}

// modeling_deepseek.py, DeepseekDecoderLayer (all versions).
void ReadDeepseekDense(Reader& r, ModelConfig& m) {
  const int64_t first = r.Int("first_k_dense_replace", 0, kMaxLayers);
  if (first > m.num_hidden_layers) {
    r.Contradiction("first_k_dense_replace", std::to_string(first),
                    "at most num_hidden_layers = " + std::to_string(m.num_hidden_layers));
  }
  const int64_t frequency = r.IntOr("moe_layer_freq", 1, 1, kMaxLayers);
  std::vector<bool> dense(m.num_hidden_layers);
  for (int64_t l = 0; l < m.num_hidden_layers; ++l) dense[l] = l < first || l % frequency != 0;
  SetDense(m, dense);
}

// Width of dense layers. Needed only if there are some: elsewhere the key is a leftover.
void ReadDenseWidth(Reader& r, ModelConfig& m) {
  const bool any = m.first_k_dense_replace > 0 || !m.mlp_only_layers.empty();
  const int64_t width = any ? r.Int("intermediate_size", 1, kMaxWidth) : r.IntOr("intermediate_size", 0, 0, kMaxWidth);
  if (any) m.intermediate_size = width;
}

void ReadLayerTypes(Reader& r, ModelConfig& m) {
  if (!r.Has("layer_types")) return;
  const std::string expected = "num_hidden_layers = " + std::to_string(m.num_hidden_layers) + " entries";
  const Json& types = r.Array("layer_types", expected);
  if (static_cast<int64_t>(types.size()) != m.num_hidden_layers) {
    r.Contradiction("layer_types", std::to_string(types.size()) + " entries", expected);
  }
  m.layer_types.clear();
  for (int64_t l = 0; l < m.num_hidden_layers; ++l) {
    const bool sliding = types[l] == "sliding_attention";
    if (!sliding && types[l] != "full_attention") {
      throw Error({"value not allowed", r.At("layer_types[" + std::to_string(l) + "]"), types[l].dump(),
                   "\"sliding_attention\" or \"full_attention\"", {}});
    }
    if (sliding && m.sliding_window == 0) {
      r.Contradiction("layer_types[" + std::to_string(l) + "]", types[l].dump(),
                      "\"full_attention\", as no sliding_window is in use");
    }
    m.layer_types.push_back(types[l].get<std::string>());
  }
  // One form of each: no window, or the same in all layers.
  const auto is = [&](const char* type) { return std::count(m.layer_types.begin(), m.layer_types.end(), type) == m.num_hidden_layers; };
  if (is("full_attention")) m.sliding_window = 0;
  if (is("full_attention") || is("sliding_attention")) m.layer_types.clear();
}

void ReadQwenWindows(Reader& r, ModelConfig& m) {
  const bool use = r.BoolOr("use_sliding_window", false);
  const int64_t window = r.IntOr("sliding_window", 0, 0, 1 << 30);
  r.IntOr("max_window_layers", 0, 0, kMaxLayers);
  if (use && window == 0) r.Contradiction("use_sliding_window", "true", "a sliding_window with it");
  if (use && !r.Has("layer_types")) {
    r.Contradiction("use_sliding_window", "true", "layer_types with it",
                    "releases of transformers differ in which layers have the window");
  }
  m.sliding_window = use ? window : 0;
  ReadLayerTypes(r, m);
}

// transformers' loss has this part where output_router_logits is on: a mean over the layers of a value that is the number of
// experts per token where load is even. Ours is a sum over the layers of 1 there.
void ReadAuxLoss(Reader& r, ModelConfig& m) {
  const double coefficient = r.NumberOr("router_aux_loss_coef", 0, -1);
  if (!r.BoolOr("output_router_logits", false) || coefficient == 0) return;
  int64_t layers = 0;
  for (int64_t l = 0; l < m.num_hidden_layers; ++l) layers += !m.is_dense(l);
  if (layers == 0) return;
  m.router_aux_loss = "global";
  m.router_aux_loss_coef = coefficient * static_cast<double>(m.num_experts_per_tok) / static_cast<double>(layers);
}

// Which experts a token may choose. The keys of the published code; transformers' own has no topk_method for V3.
void ReadGroups(Reader& r, ModelConfig& m) {
  const bool third = m.model_type == "deepseek_v3";
  const std::string choices = third ? "\"noaux_tc\"" : "\"greedy\" or \"group_limited_greedy\"";
  m.topk_method = r.Has("topk_method") ? r.String("topk_method", choices) : third ? "noaux_tc" : "greedy";
  if (third ? m.topk_method != "noaux_tc" : m.topk_method != "greedy" && m.topk_method != "group_limited_greedy") {
    throw Error({"value not allowed", r.At("topk_method"), "\"" + m.topk_method + "\"", choices, {}});
  }
  const int64_t groups = r.IntOr("n_group", 1, 1, kMaxExperts), top = r.IntOr("topk_group", groups, 1, kMaxExperts);
  if (m.topk_method == "greedy") return;
  const std::string of = "n_group = " + std::to_string(groups);
  if (top > groups) r.Contradiction("topk_group", std::to_string(top), "at most " + of);
  if (m.num_experts % groups != 0) {
    r.Contradiction("n_group", std::to_string(groups), "a divisor of n_routed_experts = " + std::to_string(m.num_experts));
  }
  if (top * (m.num_experts / groups) < m.num_experts_per_tok) {
    r.Contradiction("topk_group", std::to_string(top),
                    "groups with room for num_experts_per_tok = " + std::to_string(m.num_experts_per_tok) + " experts");
  }
  m.n_group = groups;
  m.topk_group = top;
}

void ReadDeepseekRouter(Reader& r, ModelConfig& m) {
  const bool third = m.model_type == "deepseek_v3";
  m.scoring_func = third ? "sigmoid" : "softmax";
  if (r.Has("scoring_func") && r.String("scoring_func", m.scoring_func) != m.scoring_func) {
    throw Error({"not computed here", r.At("scoring_func"), r.String("scoring_func", ""), "\"" + m.scoring_func + "\" in this family", {}});
  }
  m.norm_topk_prob = r.BoolOr("norm_topk_prob", third);
  m.routed_scaling_factor = m.model_type == "deepseek" ? 1 : r.NumberOr("routed_scaling_factor", third ? 2.5 : 1, 0);
  // transformers scales and never renormalises in V2, the published code does either.
  if (m.model_type == "deepseek_v2" && m.norm_topk_prob) {
    throw Error({"not computed here", r.At("norm_topk_prob"), "true", "false in this family", "releases of its code differ"});
  }
  const double alpha = r.NumberOr("aux_loss_alpha", 0, -1);
  const bool by_sequence = r.BoolOr("seq_aux", true);
  r.BoolOr("output_router_logits", false);
  if (alpha == 0) return;
  m.router_aux_loss = by_sequence ? "sequence" : "global";
  m.router_aux_loss_coef = alpha;
}

std::string ReadDeepseek(Reader& r, ModelConfig& m) {
  if (m.model_type == "deepseek") {
    ReadHeads(r, m);
    m.attention_bias = m.output_bias = r.BoolOr("attention_bias", false);
  } else {
    ReadMla(r, m);
  }
  ReadExperts(r, m, {"n_routed_experts", "num_experts", "num_local_experts"}, "moe_intermediate_size");
  m.n_shared_experts = r.IntOr("n_shared_experts", 0, 0, 1024);
  ReadDeepseekDense(r, m);
  ReadDenseWidth(r, m);
  ReadDeepseekRouter(r, m);
  if (m.model_type != "deepseek") ReadGroups(r, m);
  const int64_t predicted = m.model_type == "deepseek_v3" ? r.IntOr("num_nextn_predict_layers", 0, 0, 64) : 0;
  if (predicted == 0) return "";
  return "; not modelled: num_nextn_predict_layers = " + std::to_string(predicted) + " (multi-token prediction)";
}

std::string ReadQwen(Reader& r, ModelConfig& m) {
  const bool third = m.model_type == "qwen3_moe";
  ReadHeads(r, m);
  m.qk_norm = third;
  // Qwen2 has the bias before the attention only; Qwen3's switch is for all four projections.
  m.attention_bias = third ? r.BoolOr("attention_bias", false) : r.BoolOr("qkv_bias", true);
  m.output_bias = third && m.attention_bias;
  ReadExperts(r, m, {"num_experts", "num_local_experts"}, "moe_intermediate_size");
  m.norm_topk_prob = r.BoolOr("norm_topk_prob", false);
  if (!third) {
    m.shared_expert_intermediate_size = r.Int("shared_expert_intermediate_size", 1, kMaxWidth);
    m.shared_expert_gate = true;
  }
  ReadQwenDense(r, m);
  ReadDenseWidth(r, m);
  ReadQwenWindows(r, m);
  ReadAuxLoss(r, m);
  return "";
}

std::string ReadMixtral(Reader& r, ModelConfig& m) {
  ReadHeads(r, m);
  ReadExperts(r, m, {"num_local_experts", "num_experts"}, "intermediate_size");
  m.sliding_window = r.IntOr("sliding_window", 0, 0, 1 << 30);
  ReadAuxLoss(r, m);
  return "";
}

std::string ReadOlmoe(Reader& r, ModelConfig& m) {
  ReadHeads(r, m);
  m.qk_norm = m.qk_norm_all_heads = true;
  m.attention_bias = m.output_bias = r.BoolOr("attention_bias", false);
  ReadExperts(r, m, {"num_experts", "num_local_experts"}, "intermediate_size");
  m.norm_topk_prob = r.BoolOr("norm_topk_prob", false);
  ReadAuxLoss(r, m);
  return "";
}

std::string ReadGptOss(Reader& r, ModelConfig& m) {
  ReadHeads(r, m, /*default_head_dim=*/64);
  m.attention_bias = m.output_bias = r.BoolOr("attention_bias", true);
  m.attention_sinks = m.expert_bias = m.router_bias = true;
  ReadExperts(r, m, {"num_local_experts", "num_experts"}, "intermediate_size");
  m.norm_topk_prob = true;  // a softmax over the chosen logits is the softmax over all, renormalised
  m.swiglu_limit = r.NumberOr("swiglu_limit", 7, 0);
  if (r.NumberOr("swiglu_alpha", 1.702, 0) != 1.702) {
    throw Error({"not computed here", r.At("swiglu_alpha"), TomlNumber(r.NumberOr("swiglu_alpha", 0, 0)), "1.702", {}});
  }
  m.sliding_window = r.IntOr("sliding_window", 0, 0, 1 << 30);
  // Without layer_types every other layer slides, the first one too.
  for (int64_t l = 0; l < m.num_hidden_layers && m.sliding_window > 0; ++l) {
    m.layer_types.push_back(l % 2 == 0 ? "sliding_attention" : "full_attention");
  }
  ReadLayerTypes(r, m);
  ReadAuxLoss(r, m);
  return "";
}

struct Family {
  const char* name;
  std::string (*read)(Reader&, ModelConfig&);  // returns what is not modelled
  double rope_theta;                           // where the file has none
};
constexpr Family kFamilies[] = {
    {"qwen3_moe", ReadQwen, 1e4},   {"qwen2_moe", ReadQwen, 1e4},       {"mixtral", ReadMixtral, 1e6},
    {"olmoe", ReadOlmoe, 1e4},      {"gpt_oss", ReadGptOss, 150000},    {"deepseek", ReadDeepseek, 1e4},
    {"deepseek_v2", ReadDeepseek, 1e4}, {"deepseek_v3", ReadDeepseek, 1e4}};

Json Parse(const std::string& text, const std::string& where) {
  Json object;
  try {
    object = Json::parse(text);
  } catch (const Json::parse_error& error) {
    std::string reason = error.what();
    reason.erase(0, reason.find("] ") + 2);
    throw Error({"not valid JSON", where, reason, {}, {}});
  }
  if (!object.is_object()) throw Error({"wrong type", where, object.dump().substr(0, 60), "an object {...}", {}});
  return object;
}

}  // namespace

const std::vector<std::string_view>& HfFamilies() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> all;
    for (const Family& family : kFamilies) all.push_back(family.name);
    return all;
  }();
  return names;
}

HfModel ReadHfModel(const std::string& json, const std::string& where) {
  std::string known;
  for (const std::string_view name : HfFamilies()) known += (known.empty() ? "" : ", ") + std::string(name);
  Reader r(Parse(json, where), where);
  HfModel out;
  ModelConfig& m = out.model;
  m.model_type = r.String("model_type", known);
  out.source = r.Has("_source") ? r.String("_source", "a text") : where;
  const auto* family = std::find_if(std::begin(kFamilies), std::end(kFamilies), [&](const Family& f) { return m.model_type == f.name; });
  if (family == std::end(kFamilies)) {
    throw Error({"unknown model family", r.At("model_type"), "\"" + m.model_type + "\"", known, {}});
  }
  ReadCommon(r, m);
  out.source += family->read(r, m);
  ReadRope(r, m, family->rope_theta);
  r.RefuseUnknown(IrrelevantKeys());
  // The limits of single keys leave room for absurd products.
  const double expert = 3.0 * static_cast<double>(m.hidden_size) * static_cast<double>(m.moe_intermediate_size);
  if (expert * static_cast<double>(m.num_experts) * static_cast<double>(m.num_hidden_layers) > 1e16) {
    throw Error({"value not allowed", where, "more than 1e16 parameters", "a model that could exist", {}});
  }
  return out;
}

}  // namespace disagmoe
