#include "spec/trainable.h"

#include <algorithm>

#include "base/error.h"
#include "spec/config_keys.h"

namespace disagmoe {
namespace {

bool HasWindow(const ModelShape& s) {
  return std::any_of(s.window.begin(), s.window.end(), [](int64_t w) { return w != 0; });
}

int64_t LeadingDense(const ModelShape& s) { return std::find(s.dense.begin(), s.dense.end(), false) - s.dense.begin(); }

std::string Missing(const ModelShape& s) {
  std::string text;
  const auto add = [&](bool missing, const char* what) {
    if (missing) text += (text.empty() ? "" : ", ") + std::string(what);
  };
  add(s.kv_lora_rank > 0, "latent attention");
  const bool one_width = s.value_dim == s.head_dim && s.rope_dim == s.head_dim;
  add(s.kv_lora_rank == 0 && !one_width, "values or RoPE of another width");
  add(s.head_dim % 2 != 0, "heads of an odd width");
  add(HasWindow(s), "sliding windows");
  add(s.sinks, "attention sinks");
  add(s.attention_bias || s.output_bias || s.expert_bias, "biases");
  add(s.qk_norm_all_heads, "one norm over all heads");
  add(s.router_bias, "a router's bias");
  add(s.expert_groups > 0, "groups of experts");
  add(s.shared_gate, "a gate of the shared experts");
  add(s.expert_hidden == 0 || s.shared_hidden % s.expert_hidden != 0, "shared experts of another width");
  add(std::find(s.dense.begin() + LeadingDense(s), s.dense.end(), true) != s.dense.end(),
      "dense layers after those with experts");
  add(s.tied_embeddings, "tied embeddings");
  return text;
}

}  // namespace

ModelConfig ModelOf(const ModelShape& s, std::string* missing) {
  ModelConfig m;
  m.vocab_size = s.vocab_size;
  m.hidden_size = s.hidden_size;
  m.num_hidden_layers = s.num_layers;
  m.num_attention_heads = s.num_heads;
  m.num_key_value_heads = s.num_kv_heads;
  m.head_dim = s.head_dim + s.head_dim % 2;
  m.qk_norm = s.qk_norm;
  m.num_experts = s.num_experts;
  m.num_experts_per_tok = s.experts_per_token;
  m.moe_intermediate_size = s.expert_hidden;
  m.n_shared_experts = s.expert_hidden > 0 ? s.shared_hidden / s.expert_hidden : 0;
  m.first_k_dense_replace = LeadingDense(s);
  if (s.dense_hidden > 0) m.intermediate_size = s.dense_hidden;
  const std::string lacks = Missing(s);
  if (missing) *missing = lacks;
  if (lacks.empty()) {
    ModelShape own = ShapeOf(m, s.name);
    own.family = s.family;
    own.source = s.source;
    DM_CHECK(own == s, s.name);
  }
  return m;
}

std::string MissingForSchedule(const std::string& name) {
  if (name == "dualpipe") return "two routes at once, with every layer in two groups";
  if (name == "hetermoe") return "experts of one layer in both pools";
  if (name == "tutel" || name == "comet" || name == "fastermoe" || name == "lancet") return "stages cut into parts";
  return "";
}

void RequireTrainable(const RunConfig& config, const std::string& path) {
  const std::string simulate = "`disagmoe simulate` does";
  if (!config.plan.model.empty()) {
    std::string missing;
    ModelOf(LoadModelShape(config.plan.model), &missing);
    const std::string needs = missing.empty() ? "" : " needs " + missing;
    throw Error({"the runtime does not train this model", path + ", plan.model", "'" + config.plan.model + "'" + needs,
                 "a table [model]: grouped-query attention, experts, shared experts, leading dense layers", simulate});
  }
  const std::string& name = config.schedule.name;
  const std::string missing = MissingForSchedule(name);
  if (!missing.empty()) {
    std::string known = "\"auto\"";
    for (const ScheduleName& s : ScheduleNames()) {
      if (MissingForSchedule(s.name).empty()) known += ", \"" + s.name + "\"";
    }
    throw Error({"the runtime does not execute this schedule", path + ", schedule.name", TomlString(name),
                 known.replace(known.rfind(", "), 2, " or "), name + " needs " + missing + "; " + simulate});
  }
  for (const std::string& setting : config.plan.settings) {
    if (!setting.starts_with("delay_weights=") || setting == "delay_weights=true") continue;
    throw Error({"the runtime does not execute this schedule", path + ", plan.settings", TomlString(setting),
                 "weight gradients as operations of their own", simulate});
  }
}

}  // namespace disagmoe
