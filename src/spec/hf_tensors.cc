// H hidden, E experts, De expert hidden, d width of a query, dn and dr without and with RoPE.
#include "spec/hf_tensors.h"

#include <functional>
#include <map>

#include "base/error.h"

namespace disagmoe {
namespace {

struct Part {
  HfTensor tensor;
  HfPiece piece;
};

int64_t Numel(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t size : shape) n *= size;
  return n;
}

class Mapper {
 public:
  explicit Mapper(const ModelConfig& model) : m_(model), gpt_oss_(model.model_type == "gpt_oss") {
    if (model.model_type == "mixtral") moe_ = "block_sparse_moe.";
  }

  std::vector<Part> Parts(const ParamSpec& param, int64_t expert) {
    parts_.clear();
    param_ = &param;
    offset_ = 0;
    expert_ = expert;
    if (param.name == "embed") Whole("model.embed_tokens.weight");
    else if (param.name == "final_norm") Whole("model.norm.weight");
    else if (param.name == "head") Whole("lm_head.weight");
    else Layer();
    const int64_t size = Numel(param.shape) / (param.per_expert ? param.shape[0] : 1);
    DM_CHECK(offset_ == size, "parts of " + param.name);
    return std::move(parts_);
  }

 private:
  using Shape = std::vector<int64_t>;

  // All of a tensor, in its own order, is the next part of ours.
  void Next(const std::string& name, const Shape& shape) {
    const int64_t columns = shape.back(), rows = Numel(shape) / columns;
    Add(name, shape, rows, columns, 0, columns, 1);
  }
  void Add(const std::string& name, const Shape& shape, int64_t rows, int64_t columns, int64_t begin, int64_t row_stride,
           int64_t column_stride) {
    parts_.push_back({{name, shape, param_->counts_load}, {name, offset_, rows, columns, begin, row_stride, column_stride}});
    offset_ += rows * columns;
  }
  void Whole(const std::string& name) { Next(name, param_->shape); }

  void Layer() {
    const size_t dot = param_->name.find('.', std::string("layers.").size());
    layer_ = "model." + param_->name.substr(0, dot + 1);
    const std::string leaf = param_->name.substr(dot + 1);
    static const std::map<std::string, const char*> whole = {
        {"norm1", "input_layernorm.weight"},
        {"norm2", "post_attention_layernorm.weight"},
        {"q_norm", "self_attn.q_norm.weight"},
        {"k_norm", "self_attn.k_norm.weight"},
        {"sinks", "self_attn.sinks"},
        {"out", "self_attn.o_proj.weight"},
        {"out_bias", "self_attn.o_proj.bias"},
        {"q_a", "self_attn.q_a_proj.weight"},
        {"q_a_norm", "self_attn.q_a_layernorm.weight"},
        {"kv_a_norm", "self_attn.kv_a_layernorm.weight"},
        {"kv_b", "self_attn.kv_b_proj.weight"},
        {"router_bias", "mlp.router.bias"},
        {"router_correction", "mlp.gate.e_score_correction_bias"},
        {"shared.gate", "mlp.shared_expert_gate.weight"},
        {"dense.down", "mlp.down_proj.weight"}};
    if (const auto it = whole.find(leaf); it != whole.end()) return Whole(layer_ + it->second);
    const std::string shared = m_.model_type == "qwen2_moe" ? "mlp.shared_expert." : "mlp.shared_experts.";
    if (leaf == "qkv") Qkv(".weight", {m_.hidden_size});
    else if (leaf == "qkv_bias") Qkv(".bias", {});
    else if (leaf == "q") Heads("self_attn.q_proj.weight");
    else if (leaf == "q_b") Heads("self_attn.q_b_proj.weight");
    else if (leaf == "kv_a") Rotated(layer_ + "self_attn.kv_a_proj_with_mqa.weight", 1, m_.kv_lora_rank);
    else if (leaf == "router") Whole(layer_ + (gpt_oss_ ? "mlp.router.weight" : moe_ + "gate.weight"));
    else if (leaf.starts_with("experts.")) gpt_oss_ ? Fused(leaf.substr(8)) : Expert(leaf.substr(8));
    else if (leaf == "dense.gate_up") GateUp("mlp.", "gate_proj", "up_proj", m_.intermediate_size);
    else if (leaf == "shared.gate_up") GateUp(shared, "gate_proj", "up_proj", m_.shared_intermediate());
    else if (leaf == "shared.down") Whole(layer_ + shared + "down_proj.weight");
    else DM_CHECK(false, "no published form of " + param_->name);
  }

  void Qkv(const std::string& suffix, const Shape& more) {
    const int64_t q = m_.num_attention_heads * m_.head_dim, k = m_.num_key_value_heads * m_.head_dim;
    for (const auto& [name, rows] : {std::pair{"q_proj", q}, {"k_proj", k}, {"v_proj", k}}) {
      Shape shape = {rows};
      shape.insert(shape.end(), more.begin(), more.end());
      Next(layer_ + "self_attn." + name + suffix, shape);
    }
  }

  void Heads(const std::string& name) { Rotated(layer_ + name, m_.num_attention_heads, m_.qk_nope_head_dim); }

  // Heads of `plain` rows and then those that RoPE turns: pairs are neighbours there and halves apart here.
  void Rotated(const std::string& name, int64_t heads, int64_t plain) {
    const int64_t columns = param_->shape[1], turned = m_.qk_rope_head_dim;
    if (!m_.rope_interleave) return Whole(name);
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t begin = head * (plain + turned) * columns, rope = begin + plain * columns;
      Add(name, param_->shape, plain, columns, begin, columns, 1);
      Add(name, param_->shape, turned / 2, columns, rope, 2 * columns, 1);
      Add(name, param_->shape, turned / 2, columns, rope + columns, 2 * columns, 1);
    }
  }

  void GateUp(const std::string& of, const std::string& gate, const std::string& up, int64_t width) {
    Next(layer_ + of + gate + ".weight", {width, m_.hidden_size});
    Next(layer_ + of + up + ".weight", {width, m_.hidden_size});
  }

  void Expert(const std::string& leaf) {
    const bool mixtral = m_.model_type == "mixtral";
    const std::string of = moe_ + "experts." + std::to_string(expert_) + ".";
    if (leaf == "gate_up") {
      GateUp(of, mixtral ? "w1" : "gate_proj", mixtral ? "w3" : "up_proj", m_.moe_intermediate_size);
    } else {
      DM_CHECK(leaf == "down", "no published form of " + param_->name);
      Next(layer_ + of + (mixtral ? "w2" : "down_proj") + ".weight", {m_.hidden_size, m_.moe_intermediate_size});
    }
  }

  // gpt-oss: all experts in one tensor, transposed, gate and up in turn.
  void Fused(const std::string& leaf) {
    const int64_t E = m_.num_experts, H = m_.hidden_size, De = m_.moe_intermediate_size;
    const std::string of = layer_ + "mlp.experts.";
    if (leaf == "gate_up") {
      for (int64_t up : {0, 1}) Add(of + "gate_up_proj", {E, H, 2 * De}, De, H, expert_ * H * 2 * De + up, 2, 2 * De);
    } else if (leaf == "gate_up_bias") {
      for (int64_t up : {0, 1}) Add(of + "gate_up_proj_bias", {E, 2 * De}, 1, De, expert_ * 2 * De + up, 0, 2);
    } else if (leaf == "down") {
      Add(of + "down_proj", {E, De, H}, H, De, expert_ * De * H, 1, H);
    } else {
      Add(of + "down_proj_bias", {E, H}, 1, H, expert_ * H, 0, 1);
    }
  }

  const ModelConfig& m_;
  const bool gpt_oss_;
  std::string moe_ = "mlp.";
  const ParamSpec* param_ = nullptr;
  std::string layer_;
  int64_t expert_ = 0, offset_ = 0;
  std::vector<Part> parts_;
};

}  // namespace

std::vector<HfTensor> HfTensors(const ModelConfig& model) {
  Mapper mapper(model);
  std::vector<HfTensor> tensors;
  std::map<std::string, std::vector<int64_t>> seen;
  for (const ParamSpec& param : ParamTable(model)) {
    for (int64_t e = 0; e < (param.per_expert ? model.num_experts : 1); ++e) {
      for (const Part& part : mapper.Parts(param, e)) {
        if (seen.emplace(part.tensor.name, part.tensor.shape).second) tensors.push_back(part.tensor);
      }
    }
  }
  return tensors;
}

std::vector<HfPiece> HfPieces(const ModelConfig& model, const ParamSpec& param, int64_t expert) {
  std::vector<HfPiece> pieces;
  for (Part& part : Mapper(model).Parts(param, expert)) pieces.push_back(std::move(part.piece));
  return pieces;
}

}  // namespace disagmoe
