#include "spec/hf_rope.h"

#include <cmath>

namespace disagmoe {
namespace {

struct Rope {
  double theta = 0;  // 0: not said
  std::string type = "default";
  double factor = 1, beta_fast = 32, beta_slow = 1, attention_factor = 1, scale_factor = 1;
  int64_t original_length = 0;
  bool truncate = true;
  bool operator==(const Rope&) const = default;
};

// transformers, yarn_get_mscale; arXiv 2309.00071, section 3.4.
double MScale(double factor, double mscale) { return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1; }

void ReadYarn(JsonReader& r, JsonReader& file, bool deepseek, Rope* rope) {
  rope->original_length = r.Int("original_max_position_embeddings", 1, 1 << 30);
  rope->factor = r.NumberOr("factor", 0, 0);
  if (rope->factor == 0) {
    rope->factor = static_cast<double>(file.Int("max_position_embeddings", 1, 1 << 30)) / static_cast<double>(rope->original_length);
  }
  rope->beta_fast = r.NumberOr("beta_fast", 32, 0);
  rope->beta_slow = r.NumberOr("beta_slow", 1, 0);
  rope->truncate = r.BoolOr("truncate", true);
  const double mscale = r.NumberOr("mscale", 0, -1), all_dim = r.NumberOr("mscale_all_dim", 0, -1);
  const double ratio = mscale != 0 && all_dim != 0 ? MScale(rope->factor, mscale) / MScale(rope->factor, all_dim) : MScale(rope->factor, 1);
  rope->attention_factor = r.NumberOr("attention_factor", ratio, 0);
  if (deepseek && all_dim != 0) rope->scale_factor = std::pow(MScale(rope->factor, all_dim), 2);
}

Rope Read(JsonReader& r, JsonReader& file, bool deepseek) {
  Rope rope;
  rope.theta = r.NumberOr("rope_theta", 0, 0);
  const std::string known = "\"default\", \"linear\" or \"yarn\"";
  if (r.Has("type")) rope.type = r.String("type", known);  // its name before transformers 4.43
  if (r.Has("rope_type")) {
    const std::string type = r.String("rope_type", known);
    if (r.Has("type") && type != rope.type) r.Contradiction("rope_type", "\"" + type + "\"", "type = \"" + rope.type + "\"");
    rope.type = type;
  }
  if (rope.type == "linear") {
    rope.factor = r.NumberOr("factor", 0, 0);
    if (rope.factor == 0) throw Error({"missing key", r.At("factor"), {}, "a number above 0", {}});
  } else if (rope.type == "yarn") {
    ReadYarn(r, file, deepseek, &rope);
  } else if (rope.type != "default") {
    throw Error({"not computed here", r.At("rope_type"), "\"" + rope.type + "\"", known, {}});
  }
  r.RefuseUnknown();
  return rope;
}

}  // namespace

void ReadRope(JsonReader& file, ModelConfig& m, double default_theta) {
  const bool deepseek = m.latent();
  Rope rope;
  rope.theta = file.NumberOr("rope_theta", 0, 0);
  const bool scaling = file.Has("rope_scaling"), parameters = file.Has("rope_parameters");
  if (scaling) {
    JsonReader r(file.Object("rope_scaling"), file.At("rope_scaling"));
    const double theta = rope.theta;
    rope = Read(r, file, deepseek);
    if (rope.theta == 0) rope.theta = theta;
  }
  if (parameters) {
    JsonReader r(file.Object("rope_parameters"), file.At("rope_parameters"));
    Rope newer = Read(r, file, deepseek);
    if (newer.theta == 0) newer.theta = rope.theta;
    if ((scaling && newer != rope) || (rope.theta != 0 && newer.theta != rope.theta)) {
      file.Contradiction("rope_parameters", file.Object("rope_parameters").dump(), "the same as rope_theta and rope_scaling");
    }
    rope = newer;
  }
  m.rope_theta = rope.theta == 0 ? default_theta : rope.theta;
  m.rope_type = rope.type;
  m.rope_factor = rope.factor;
  m.rope_beta_fast = rope.beta_fast;
  m.rope_beta_slow = rope.beta_slow;
  m.rope_original_length = rope.original_length;
  m.rope_truncate = rope.truncate;
  m.rope_attention_factor = rope.attention_factor;
  m.attention_scale_factor = rope.scale_factor;
}

Json RopeScaling(const ModelConfig& m) {
  if (m.rope_type == "default") return nullptr;
  Json out = {{"rope_type", m.rope_type}, {"factor", m.rope_factor}};
  if (m.rope_type != "yarn") return out;
  out["beta_fast"] = m.rope_beta_fast;
  out["beta_slow"] = m.rope_beta_slow;
  out["original_max_position_embeddings"] = m.rope_original_length;
  out["truncate"] = m.rope_truncate;
  out["attention_factor"] = m.rope_attention_factor;
  // Its square is the factor of the logits.
  if (m.attention_scale_factor != 1) {
    out["mscale_all_dim"] = (std::sqrt(m.attention_scale_factor) - 1) / (0.1 * std::log(m.rope_factor));
  }
  return out;
}

}  // namespace disagmoe
