// Reader of Hugging Face's config.json. What a key means is taken from the model code that reads it (transformers, and
// for deepseek the modeling_deepseek.py beside the weights).
#include <algorithm>
#include <limits>
#include <optional>
#include <set>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "spec/hf_config.h"
#include "spec/model_shape.h"
#include "spec/presets.h"

namespace disagmoe {
namespace {

using Json = nlohmann::json;

// Keys of public configurations of all these families that change neither work nor bytes of a training step.
// (quantization_config: how published weights are stored; training in bf16 holds the same parameters unpacked.)
const std::set<std::string>& IrrelevantKeys() {
  static const std::set<std::string> keys = {
      "architectures", "attention_dropout", "auto_map", "aux_loss_alpha", "bos_token_id", "clip_qkv", "dtype",
      "eos_token_id", "ep_size", "hidden_act", "hidden_dropout", "initial_context_length", "initializer_range",
      "max_position_embeddings", "model_max_length", "norm_eps", "norm_topk_prob", "output_router_logits",
      "pad_token_id", "pretraining_tp", "quantization_config", "rms_norm_eps", "rope_interleave", "rope_parameters",
      "rope_scaling", "rope_theta", "routed_scaling_factor", "router_aux_loss_coef", "router_jitter_noise",
      "scoring_func", "seq_aux", "swiglu_alpha", "swiglu_limit", "tokenizer_class", "torch_dtype",
      "transformers_version", "use_cache", "use_return_dict"};
  return keys;
}

class Reader {
 public:
  Reader(Json object, std::string where) : object_(std::move(object)), where_(std::move(where)) {}

  std::string At(const std::string& key) const { return where_ + ", " + key; }
  // A key with null counts as missing.
  bool Has(const std::string& key) {
    used_.insert(key);
    return object_.contains(key) && !object_[key].is_null();
  }

  int64_t Int(const std::string& key, int64_t min, int64_t max) {
    if (!Has(key)) throw Error({"missing key", At(key), {}, Expected(min, max), {}});
    const Json& value = object_[key];
    if (!value.is_number_integer()) throw Error({"wrong type", At(key), value.dump(), Expected(min, max), {}});
    const bool big = value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(max);
    if (big || value.get<int64_t>() < min || value.get<int64_t>() > max) {
      throw Error({"value not allowed", At(key), value.dump(), Expected(min, max), {}});
    }
    return value.get<int64_t>();
  }
  int64_t IntOr(const std::string& key, int64_t otherwise, int64_t min, int64_t max) {
    return Has(key) ? Int(key, min, max) : otherwise;
  }

  bool BoolOr(const std::string& key, bool otherwise) {
    if (!Has(key)) return otherwise;
    if (!object_[key].is_boolean()) throw Error({"wrong type", At(key), object_[key].dump(), "true or false", {}});
    return object_[key].get<bool>();
  }

  std::string String(const std::string& key, const std::string& expected) {
    if (!Has(key)) throw Error({"missing key", At(key), {}, expected, {}});
    if (!object_[key].is_string()) throw Error({"wrong type", At(key), object_[key].dump(), expected, {}});
    return object_[key].get<std::string>();
  }

  const Json& Array(const std::string& key, const std::string& expected) {
    if (!object_[key].is_array()) throw Error({"wrong type", At(key), object_[key].dump(), expected, {}});
    return object_[key];
  }

  // Other names of a value: the one that is there, and all must agree.
  int64_t Alias(const std::vector<std::string>& keys, int64_t min, int64_t max) {
    std::optional<int64_t> value;
    std::string first;
    for (const std::string& key : keys) {
      if (!Has(key)) continue;
      const int64_t next = Int(key, min, max);
      if (value && next != *value) Contradiction(key, std::to_string(next), first + " = " + std::to_string(*value));
      if (!value) value = next, first = key;
    }
    return value ? *value : Int(keys.front(), min, max);
  }

  [[noreturn]] void Contradiction(const std::string& key, const std::string& got, const std::string& expected,
                                  const std::string& hint = "") const {
    throw Error({"contradiction", At(key), got, expected, hint});
  }

  // The first key that was neither read nor is known to be without effect.
  void RefuseUnknown() const {
    for (const auto& [key, value] : object_.items()) {
      if (key.starts_with("_") || used_.contains(key) || IrrelevantKeys().contains(key)) continue;
      std::string nearest;
      int best = 1 + static_cast<int>(key.size()) / 4;
      for (const std::string& known : used_) {
        const int distance = EditDistance(key, known);
        if (distance <= best && distance < static_cast<int>(key.size())) best = distance - 1, nearest = known;
      }
      throw Error({"unknown key", At(key), value.dump().substr(0, 60), "a key that this family is known to have",
                   nearest.empty() ? "if it decides no cost, take it out or begin its name with '_'"
                                   : "did you mean '" + nearest + "'?"});
    }
  }

 private:
  static std::string Expected(int64_t min, int64_t max) {
    return "an integer from " + std::to_string(min) + " to " + std::to_string(max);
  }

  Json object_;
  std::string where_;
  std::set<std::string> used_;
};

// Limits as of the runtime's own keys: products of a few stay far from overflow.
constexpr int64_t kMaxHidden = 1 << 17, kMaxHeads = 4096, kMaxWidth = 1 << 20, kMaxLayers = 4096, kMaxExperts = 1 << 16;

// What all families have. Fields as in transformers' attention classes.
void ReadCommon(Reader& r, ModelShape& s) {
  s.vocab_size = r.Int("vocab_size", 2, 1 << 24);
  s.hidden_size = r.Int("hidden_size", 1, kMaxHidden);
  s.num_layers = r.Int("num_hidden_layers", 1, kMaxLayers);
  s.num_heads = r.Int("num_attention_heads", 1, kMaxHeads);
  s.tied_embeddings = r.BoolOr("tie_word_embeddings", false);
  s.window.assign(s.num_layers, 0);
  s.dense.assign(s.num_layers, false);
}

void ReadHeads(Reader& r, ModelShape& s, int64_t default_head_dim = 0) {
  const bool needed = s.family != "olmoe" && s.family != "deepseek";  // those default to num_attention_heads
  s.num_kv_heads = needed ? r.Int("num_key_value_heads", 1, kMaxHeads)
                          : r.IntOr("num_key_value_heads", s.num_heads, 1, kMaxHeads);
  if (s.num_heads % s.num_kv_heads != 0) {
    r.Contradiction("num_key_value_heads", std::to_string(s.num_kv_heads),
                    "a divisor of num_attention_heads = " + std::to_string(s.num_heads));
  }
  if (!r.Has("head_dim") && default_head_dim == 0 && s.hidden_size % s.num_heads != 0) {
    r.Contradiction("num_attention_heads", std::to_string(s.num_heads),
                    "a divisor of hidden_size = " + std::to_string(s.hidden_size), "or give head_dim");
  }
  const int64_t otherwise = default_head_dim > 0 ? default_head_dim : s.hidden_size / s.num_heads;
  s.head_dim = s.value_dim = s.rope_dim = r.IntOr("head_dim", otherwise, 1, 4096);
}

void ReadMla(Reader& r, ModelShape& s) {
  s.q_lora_rank = r.IntOr("q_lora_rank", 0, 1, kMaxWidth);
  s.kv_lora_rank = r.Int("kv_lora_rank", 1, kMaxWidth);
  s.rope_dim = r.Int("qk_rope_head_dim", 1, 4096);
  s.head_dim = r.Int("qk_nope_head_dim", 1, 4096) + s.rope_dim;
  s.value_dim = r.Int("v_head_dim", 1, 4096);
  s.num_kv_heads = r.IntOr("num_key_value_heads", s.num_heads, 1, kMaxHeads);
  if (s.num_kv_heads != s.num_heads) {
    r.Contradiction("num_key_value_heads", std::to_string(s.num_kv_heads),
                    "num_attention_heads = " + std::to_string(s.num_heads) + " (latent attention has no groups)");
  }
  if (r.Has("qk_head_dim") && r.Int("qk_head_dim", 1, 8192) != s.head_dim) {
    r.Contradiction("qk_head_dim", std::to_string(r.Int("qk_head_dim", 1, 8192)),
                    "qk_nope_head_dim + qk_rope_head_dim = " + std::to_string(s.head_dim));
  }
  r.Has("head_dim");  // newer files: that of the RoPE part
}

void ReadExperts(Reader& r, ModelShape& s, const std::vector<std::string>& count, const std::string& width) {
  s.num_experts = r.Alias(count, 1, kMaxExperts);
  s.experts_per_token = r.Alias({"num_experts_per_tok", "experts_per_token"}, 1, 1024);
  if (s.experts_per_token > s.num_experts) {
    r.Contradiction("num_experts_per_tok", std::to_string(s.experts_per_token),
                    "at most " + count.front() + " = " + std::to_string(s.num_experts));
  }
  s.expert_hidden = r.Int(width, 1, kMaxWidth);
}

// transformers, Qwen3MoeDecoderLayer.
void ReadQwenDense(Reader& r, ModelShape& s) {
  const int64_t step = r.IntOr("decoder_sparse_step", 1, 1, kMaxLayers);
  for (int64_t l = 0; l < s.num_layers; ++l) s.dense[l] = (l + 1) % step != 0;
  if (r.Has("mlp_only_layers")) {
    const std::string expected = "numbers of layers from 0 to " + std::to_string(s.num_layers - 1);
    for (const Json& layer : r.Array("mlp_only_layers", expected)) {
      const bool good = layer.is_number_unsigned() && layer.get<uint64_t>() < static_cast<uint64_t>(s.num_layers);
      if (!good) r.Contradiction("mlp_only_layers", layer.dump(), expected);
      s.dense[layer.get<uint64_t>()] = true;
    }
  }
}

// modeling_deepseek.py, DeepseekDecoderLayer (all versions).
void ReadDeepseekDense(Reader& r, ModelShape& s) {
  const int64_t first = r.Int("first_k_dense_replace", 0, kMaxLayers);
  if (first > s.num_layers) {
    r.Contradiction("first_k_dense_replace", std::to_string(first),
                    "at most num_hidden_layers = " + std::to_string(s.num_layers));
  }
  const int64_t frequency = r.IntOr("moe_layer_freq", 1, 1, kMaxLayers);
  for (int64_t l = 0; l < s.num_layers; ++l) s.dense[l] = l < first || l % frequency != 0;
}

// Width of dense layers. Needed only if there are some: elsewhere the key is a leftover.
void ReadDenseWidth(Reader& r, ModelShape& s) {
  const bool any = std::find(s.dense.begin(), s.dense.end(), true) != s.dense.end();
  const int64_t width = any ? r.Int("intermediate_size", 1, kMaxWidth) : r.IntOr("intermediate_size", 0, 0, kMaxWidth);
  s.dense_hidden = any ? width : 0;
}

// layer_types decides if it is there. Otherwise: all layers from `first` on.
void ReadWindows(Reader& r, ModelShape& s, int64_t window, int64_t first) {
  for (int64_t l = first; l < s.num_layers; ++l) s.window[l] = window;
  if (!r.Has("layer_types")) return;
  const std::string expected = "num_hidden_layers = " + std::to_string(s.num_layers) + " entries";
  const Json& types = r.Array("layer_types", expected);
  if (static_cast<int64_t>(types.size()) != s.num_layers) {
    r.Contradiction("layer_types", std::to_string(types.size()) + " entries", expected);
  }
  for (int64_t l = 0; l < s.num_layers; ++l) {
    const bool sliding = types[l] == "sliding_attention";
    if (!sliding && types[l] != "full_attention") {
      throw Error({"value not allowed", r.At("layer_types[" + std::to_string(l) + "]"), types[l].dump(),
                   "\"sliding_attention\" or \"full_attention\"", {}});
    }
    if (sliding && window == 0) {
      r.Contradiction("layer_types[" + std::to_string(l) + "]", types[l].dump(),
                      "\"full_attention\", as no sliding_window is in use");
    }
    s.window[l] = sliding ? window : 0;
  }
}

// The documented meaning: the first max_window_layers have full attention, the others the window (releases of
// transformers differ; no published file of these families has use_sliding_window = true).
void ReadQwenWindows(Reader& r, ModelShape& s) {
  const bool use = r.BoolOr("use_sliding_window", false);
  const int64_t window = r.IntOr("sliding_window", 0, 1, 1 << 30);
  const bool layers = r.Has("layer_types");
  const int64_t full =
      use && !layers ? r.Int("max_window_layers", 0, kMaxLayers) : r.IntOr("max_window_layers", 0, 0, kMaxLayers);
  if (use && window == 0) r.Contradiction("use_sliding_window", "true", "a sliding_window with it");
  ReadWindows(r, s, use ? window : 0, std::min(full, s.num_layers));
}

// Shared experts are n_shared_experts times the width of one; null or 0: none.
void ReadDeepseekExperts(Reader& r, ModelShape& s) {
  ReadExperts(r, s, {"n_routed_experts", "num_experts", "num_local_experts"}, "moe_intermediate_size");
  s.shared_hidden = r.IntOr("n_shared_experts", 0, 0, 1024) * s.expert_hidden;
  if (r.BoolOr("mlp_bias", false))
    r.Contradiction("mlp_bias", "true", "false", "biases of the FFN are not modelled here");
}

// Which experts a token may choose decides how many nodes it visits.
void ReadGroups(Reader& r, ModelShape& s) {
  const std::string otherwise = s.family == "deepseek_v3" ? "noaux_tc" : "greedy";
  const std::string choices = "\"greedy\", \"group_limited_greedy\" or \"noaux_tc\"";
  const std::string method = r.Has("topk_method") ? r.String("topk_method", choices) : otherwise;
  if (method != "greedy" && method != "group_limited_greedy" && method != "noaux_tc") {
    throw Error({"value not allowed", r.At("topk_method"), "\"" + method + "\"", choices, {}});
  }
  s.router_bias = method == "noaux_tc";
  const int64_t groups = r.IntOr("n_group", 1, 1, kMaxExperts), top = r.IntOr("topk_group", groups, 1, kMaxExperts);
  if (method == "greedy" || top == groups) return;
  const std::string of = "n_group = " + std::to_string(groups);
  if (top > groups) r.Contradiction("topk_group", std::to_string(top), "at most " + of);
  if (s.num_experts % groups != 0) {
    r.Contradiction("n_group", std::to_string(groups),
                    "a divisor of n_routed_experts = " + std::to_string(s.num_experts));
  }
  if (top * (s.num_experts / groups) < s.experts_per_token) {
    r.Contradiction("topk_group", std::to_string(top),
                    "groups with room for num_experts_per_tok = " + std::to_string(s.experts_per_token) + " experts");
  }
  s.expert_groups = groups;
  s.groups_per_token = top;
}

void ReadDeepseek(Reader& r, ModelShape& s) {
  if (s.family == "deepseek") {
    ReadHeads(r, s);
  } else {
    ReadMla(r, s);
  }
  s.attention_bias = s.output_bias = r.BoolOr("attention_bias", false);
  ReadDeepseekExperts(r, s);
  ReadDeepseekDense(r, s);
  ReadDenseWidth(r, s);
  if (s.family != "deepseek") ReadGroups(r, s);
  const int64_t predicted = s.family == "deepseek_v3" ? r.IntOr("num_nextn_predict_layers", 0, 0, 64) : 0;
  if (predicted > 0) {
    s.source += "; not modelled: num_nextn_predict_layers = " + std::to_string(predicted) + " (multi-token prediction)";
  }
}

void ReadQwen(Reader& r, ModelShape& s) {
  const bool third = s.family == "qwen3_moe";
  ReadHeads(r, s);
  s.qk_norm = third;
  // Qwen2 has the bias before the attention only; Qwen3's switch is for all four projections.
  s.attention_bias = third ? r.BoolOr("attention_bias", false) : r.BoolOr("qkv_bias", true);
  s.output_bias = third && s.attention_bias;
  ReadExperts(r, s, {"num_experts", "num_local_experts"}, "moe_intermediate_size");
  if (!third) {
    s.shared_hidden = r.Int("shared_expert_intermediate_size", 0, kMaxWidth);
    s.shared_gate = s.shared_hidden > 0;
  }
  ReadQwenDense(r, s);
  ReadDenseWidth(r, s);
  ReadQwenWindows(r, s);
}

void ReadMixtral(Reader& r, ModelShape& s) {
  ReadHeads(r, s);
  ReadExperts(r, s, {"num_local_experts", "num_experts"}, "intermediate_size");
  ReadWindows(r, s, r.IntOr("sliding_window", 0, 1, 1 << 30), 0);
}

void ReadOlmoe(Reader& r, ModelShape& s) {
  ReadHeads(r, s);
  s.qk_norm = s.qk_norm_all_heads = true;
  s.attention_bias = s.output_bias = r.BoolOr("attention_bias", false);
  ReadExperts(r, s, {"num_experts", "num_local_experts"}, "intermediate_size");
}

void ReadGptOss(Reader& r, ModelShape& s) {
  ReadHeads(r, s, /*default_head_dim=*/64);
  s.attention_bias = s.output_bias = r.BoolOr("attention_bias", true);
  s.sinks = s.expert_bias = s.router_bias = true;
  ReadExperts(r, s, {"num_local_experts", "num_experts"}, "intermediate_size");
  const int64_t window = r.IntOr("sliding_window", 0, 1, 1 << 30);
  ReadWindows(r, s, window, 0);
  // Without layer_types every other layer slides, the first one too.
  if (!r.Has("layer_types"))
    for (int64_t l = 1; l < s.num_layers; l += 2) s.window[l] = 0;
}

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
  static const std::vector<std::string_view> names = {"qwen3_moe", "qwen2_moe", "mixtral",     "olmoe",
                                                      "gpt_oss",   "deepseek",  "deepseek_v2", "deepseek_v3"};
  return names;
}

ModelShape ReadHfConfig(const std::string& json, const std::string& where) {
  struct Family {
    const char* name;
    void (*read)(Reader&, ModelShape&);
  };
  static constexpr Family families[] = {{"qwen3_moe", ReadQwen},       {"qwen2_moe", ReadQwen},
                                        {"mixtral", ReadMixtral},      {"olmoe", ReadOlmoe},
                                        {"gpt_oss", ReadGptOss},       {"deepseek", ReadDeepseek},
                                        {"deepseek_v2", ReadDeepseek}, {"deepseek_v3", ReadDeepseek}};
  std::string known;
  for (const Family& family : families) known += (known.empty() ? "" : ", ") + std::string(family.name);
  Reader r(Parse(json, where), where);
  ModelShape s;
  s.name = where;
  s.family = r.String("model_type", known);
  s.source = r.Has("_source") ? r.String("_source", "a text") : where;
  const auto* family =
      std::find_if(std::begin(families), std::end(families), [&](const Family& f) { return s.family == f.name; });
  if (family == std::end(families))
    throw Error({"unknown model family", r.At("model_type"), "\"" + s.family + "\"", known, {}});
  ReadCommon(r, s);
  family->read(r, s);
  r.RefuseUnknown();
  // The limits of single keys leave room for absurd products.
  const double layer = static_cast<double>(s.num_experts) * static_cast<double>(s.ExpertParams());
  if (layer * static_cast<double>(s.num_layers) > 1e16) {
    throw Error({"value not allowed", where, "more than 1e16 parameters", "a model that could exist", {}});
  }
  return s;
}

}  // namespace disagmoe
