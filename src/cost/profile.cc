// The profile as a file, and its curves.
#include "cost/profile.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "spec/config_keys.h"

namespace disagmoe {
namespace {

using nlohmann::ordered_json;

constexpr const char* kKinds[] = {"first_attention", "attention", "dense_attention", "experts", "dense", "head"};
constexpr int kVersion = 1;

// Dimensions that decide times, by their names in a configuration.
struct Dimension {
  const char* name;
  int64_t ModelConfig::*value;
};
constexpr Dimension kDimensions[] = {
    {"vocab_size", &ModelConfig::vocab_size},
    {"hidden_size", &ModelConfig::hidden_size},
    {"num_attention_heads", &ModelConfig::num_attention_heads},
    {"num_key_value_heads", &ModelConfig::num_key_value_heads},
    {"head_dim", &ModelConfig::head_dim},
    {"num_experts", &ModelConfig::num_experts},
    {"num_experts_per_tok", &ModelConfig::num_experts_per_tok},
    {"moe_intermediate_size", &ModelConfig::moe_intermediate_size},
    {"n_shared_experts", &ModelConfig::n_shared_experts},
    {"first_k_dense_replace", &ModelConfig::first_k_dense_replace},
    {"intermediate_size", &ModelConfig::intermediate_size},
};

// What models of other families have beside.
constexpr const char* kLater[] = {
    "qk_norm_all_heads", "attention_bias",   "output_bias",      "attention_sinks", "sliding_window", "kv_lora_rank",
    "q_lora_rank",       "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",      "n_group",        "topk_group",
    "router_bias",       "expert_bias",      "swiglu_limit",     "shared_expert_intermediate_size",   "shared_expert_gate"};

ConfigValue LaterValue(const char* key, RunConfig& config) {
  return FindConfigKey(std::string("model.") + key)->value(config);
}

ordered_json LaterJson(const ModelConfig& model, ordered_json object) {
  RunConfig config, plain;
  config.model = model;
  for (const char* key : kLater) {
    const ConfigValue value = LaterValue(key, config);
    if (TomlValue(value) == TomlValue(LaterValue(key, plain))) continue;
    if (auto* const* flag = std::get_if<bool*>(&value)) object[key] = **flag;
    if (auto* const* whole = std::get_if<int64_t*>(&value)) object[key] = **whole;
    if (auto* const* real = std::get_if<double*>(&value)) object[key] = **real;
  }
  return object;
}

void ReadLater(const ordered_json& object, ModelConfig* model) {
  RunConfig config;
  config.model = *model;
  for (const char* key : kLater) {
    if (!object.contains(key)) continue;
    const ConfigValue value = LaterValue(key, config);
    if (auto* const* flag = std::get_if<bool*>(&value)) **flag = object.at(key).get<bool>();
    if (auto* const* whole = std::get_if<int64_t*>(&value)) **whole = object.at(key).get<int64_t>();
    if (auto* const* real = std::get_if<double*>(&value)) **real = object.at(key).get<double>();
  }
  *model = config.model;
}

ordered_json CurveJson(const char* of, const Curve& curve) { return {{of, curve.x}, {"ns", curve.ns}}; }

void CheckCurve(const Curve& curve, const std::string& where) {
  const bool ascending = std::adjacent_find(curve.x.begin(), curve.x.end(), std::greater_equal<>()) == curve.x.end();
  const bool positive = std::all_of(curve.ns.begin(), curve.ns.end(), [](int64_t ns) { return ns >= 0; });
  if (curve.x.size() == curve.ns.size() && ascending && positive) return;
  throw Error({"not a measured curve", where, {}, "as many ascending sizes as times of at least 0", {}});
}

Curve ReadCurve(const ordered_json& object, const char* of, const std::string& where) {
  Curve curve{object.at(of).get<std::vector<int64_t>>(), object.at("ns").get<std::vector<int64_t>>()};
  CheckCurve(curve, where);
  return curve;
}

ordered_json StageJson(const StageTimes& s) {
  ordered_json object = {{"kind", StageKindName(s.kind)}};
  if (s.seq_length > 0) object["seq_length"] = s.seq_length;
  if (s.experts > 0) object.update({{"experts", s.experts}, {"per_row", s.per_row}});
  object["recompute"] = s.recompute;
  object["tokens"] = s.forward.x;
  object["forward_ns"] = s.forward.ns;
  object["backward_ns"] = s.backward.ns;
  object["spread"] = s.spread;
  return object;
}

StageTimes ReadStage(const ordered_json& object, const std::string& where) {
  StageTimes s;
  const std::string kind = object.at("kind").get<std::string>();
  const auto at = std::find(std::begin(kKinds), std::end(kKinds), kind);
  if (at == std::end(kKinds)) throw Error({"unknown kind of stage", where, "'" + kind + "'", {}, {}});
  s.kind = static_cast<StageKind>(at - std::begin(kKinds));
  s.seq_length = object.value("seq_length", int64_t{0});
  s.experts = object.value("experts", int64_t{0});
  s.per_row = object.value("per_row", int64_t{0});
  s.recompute = object.at("recompute").get<bool>();
  const auto tokens = object.at("tokens").get<std::vector<int64_t>>();
  s.forward = {tokens, object.at("forward_ns").get<std::vector<int64_t>>()};
  s.backward = {tokens, object.at("backward_ns").get<std::vector<int64_t>>()};
  s.spread = object.at("spread").get<double>();
  CheckCurve(s.forward, where);
  CheckCurve(s.backward, where);
  return s;
}

Profile Parse(const ordered_json& json, const std::string& where) {
  if (json.value("format", "") != "disagmoe-profile" || json.value("version", 0) != kVersion) {
    throw Error({"not a profile of this version",
                 where,
                 {},
                 "format disagmoe-profile, version " + std::to_string(kVersion),
                 "disagmoe profile CONFIG.toml --out FILE makes one"});
  }
  Profile p;
  const ordered_json& machine = json.at("machine");
  p.cpu = machine.at("cpu").get<std::string>();
  p.cores = machine.at("cores").get<int>();
  p.threads = machine.at("threads").get<int>();
  p.dtype = json.at("dtype").get<std::string>();
  for (const Dimension& d : kDimensions) p.model.*d.value = json.at("model").at(d.name).get<int64_t>();
  p.model.qk_norm = json.at("model").at("qk_norm").get<bool>();
  ReadLater(json.at("model"), &p.model);
  for (const ordered_json& stage : json.at("stages")) p.stages.push_back(ReadStage(stage, where + ", stages"));
  p.message = ReadCurve(json.at("message"), "bytes", where + ", message");
  p.paced_message = ReadCurve(json.at("paced_message"), "bytes", where + ", paced_message");
  p.wake_ns = json.at("wake_ns").get<int64_t>();
  p.late_ns = json.at("late_ns").get<int64_t>();
  p.gap_ns = json.at("gap_ns").get<int64_t>();
  p.optimizer = ReadCurve(json.at("optimizer"), "elements", where + ", optimizer");
  p.sums = ReadCurve(json.at("sums"), "bytes", where + ", sums");
  p.report_ns = json.at("report_ns").get<int64_t>();
  return p;
}

}  // namespace

double Curve::At(double at) const {
  if (x.empty()) return 0;
  if (x.size() == 1)
    return x[0] > 0 ? static_cast<double>(ns[0]) * at / static_cast<double>(x[0]) : static_cast<double>(ns[0]);
  size_t i = 1;
  while (i + 1 < x.size() && at > static_cast<double>(x[i])) ++i;
  const double x0 = static_cast<double>(x[i - 1]), x1 = static_cast<double>(x[i]);
  const double y0 = static_cast<double>(ns[i - 1]), y1 = static_cast<double>(ns[i]);
  return std::max(0.0, y0 + (y1 - y0) * (at - x0) / (x1 - x0));
}

const char* StageKindName(StageKind kind) { return kKinds[static_cast<int>(kind)]; }

StageKind StageKindOf(const ModelConfig& model, int stage) {
  if (stage == 2 * model.num_hidden_layers) return StageKind::kHead;
  const bool dense = model.is_dense(stage / 2);
  if (stage % 2 == 1) return dense ? StageKind::kDense : StageKind::kExperts;
  if (stage == 0) return StageKind::kFirstAttention;
  return dense ? StageKind::kDenseAttention : StageKind::kAttention;
}

std::vector<std::pair<std::string, std::string>> LaterModelKeys(const ModelConfig& model) {
  RunConfig config;
  config.model = model;
  std::vector<std::pair<std::string, std::string>> keys;
  for (const char* key : kLater) keys.emplace_back(key, TomlValue(LaterValue(key, config)));
  return keys;
}

std::string ProfileJson(const Profile& p) {
  ordered_json model;
  for (const Dimension& d : kDimensions) model[d.name] = p.model.*d.value;
  model["qk_norm"] = p.model.qk_norm;
  ordered_json json = {{"format", "disagmoe-profile"},
                       {"version", kVersion},
                       {"machine", {{"cpu", p.cpu}, {"cores", p.cores}, {"threads", p.threads}}},
                       {"dtype", p.dtype},
                       {"model", LaterJson(p.model, model)},
                       {"stages", ordered_json::array()}};
  for (const StageTimes& s : p.stages) json["stages"].push_back(StageJson(s));
  json["message"] = CurveJson("bytes", p.message);
  json["paced_message"] = CurveJson("bytes", p.paced_message);
  json["wake_ns"] = p.wake_ns;
  json["late_ns"] = p.late_ns;
  json["gap_ns"] = p.gap_ns;
  json["optimizer"] = CurveJson("elements", p.optimizer);
  json["sums"] = CurveJson("bytes", p.sums);
  json["report_ns"] = p.report_ns;
  return json.dump(1);
}

Profile ReadProfile(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    throw Error({"cannot read the profile",
                 path,
                 std::strerror(errno),
                 {},
                 "disagmoe profile CONFIG.toml --out FILE makes one"});
  }
  ordered_json json;
  try {
    json = ordered_json::parse(file);
    return Parse(json, path);
  } catch (const ordered_json::exception& error) {
    throw Error({"not a profile", path, error.what(), {}, "disagmoe profile CONFIG.toml --out FILE makes one"});
  }
}

}  // namespace disagmoe
