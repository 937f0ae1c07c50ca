#include "spec/params.h"

namespace disagmoe {

namespace {

class Table {
 public:
  explicit Table(const ModelConfig& c) : c_(c) {}

  std::vector<ParamSpec> Make() {
    const int head = static_cast<int>(2 * c_.num_hidden_layers);
    Matrix("embed", {c_.vocab_size, c_.hidden_size}, 0).also_stage = c_.tie_word_embeddings ? head : -1;
    for (int64_t l = 0; l < c_.num_hidden_layers; ++l) {
      layer_ = "layers." + std::to_string(l) + ".";
      Attention(static_cast<int>(2 * l), c_.is_dense(l));
      Ffn(static_cast<int>(2 * l + 1), c_.is_dense(l));
    }
    layer_.clear();
    Norm("final_norm", c_.hidden_size, head);
    if (!c_.tie_word_embeddings) Matrix("head", {c_.vocab_size, c_.hidden_size}, head);
    return std::move(table_);
  }

 private:
  ParamSpec& Add(const std::string& name, std::vector<int64_t> shape, int stage) {
    table_.push_back({.name = layer_ + name, .shape = std::move(shape), .stage = stage});
    return table_.back();
  }
  ParamSpec& Matrix(const std::string& name, std::vector<int64_t> shape, int stage) {
    ParamSpec& p = Add(name, std::move(shape), stage);
    p.init_std = c_.initializer_range;
    return p;
  }
  ParamSpec& Norm(const std::string& name, int64_t size, int stage) {
    ParamSpec& p = Add(name, {size}, stage);
    p.decay = false;
    p.norm_weight = true;
    return p;
  }
  ParamSpec& Bias(const std::string& name, std::vector<int64_t> shape, int stage) {
    ParamSpec& p = Add(name, std::move(shape), stage);
    p.decay = false;
    return p;
  }

  void Attention(int stage, bool dense) {
    const int64_t h = c_.hidden_size, nh = c_.num_attention_heads;
    Norm("norm1", h, stage);
    if (c_.latent()) Latent(stage);
    else Projections(stage);
    if (c_.attention_sinks) {
      ParamSpec& sinks = Bias("sinks", {nh}, stage);
      sinks.init_std = c_.initializer_range;
      sinks.fp32 = true;
    }
    Matrix("out", {h, nh * c_.value_dim()}, stage);
    if (c_.output_bias) Bias("out_bias", {h}, stage);
    Norm("norm2", h, stage).also_stage = stage + 1;
    if (dense) return;
    Matrix("router", {c_.num_experts, h}, stage).fp32 = true;
    if (c_.router_bias) Bias("router_bias", {c_.num_experts}, stage).fp32 = true;
    if (c_.corrected_router()) {
      ParamSpec& correction = Bias("router_correction", {c_.num_experts}, stage);
      correction.fp32 = true;
      correction.counts_load = true;
    }
  }

  void Projections(int stage) {
    const int64_t d = c_.head_dim, q = c_.num_attention_heads * d, k = c_.num_key_value_heads * d;
    Matrix("qkv", {q + 2 * k, c_.hidden_size}, stage);
    if (c_.attention_bias) Bias("qkv_bias", {q + 2 * k}, stage);
    if (!c_.qk_norm) return;
    Norm("q_norm", c_.qk_norm_all_heads ? q : d, stage);
    Norm("k_norm", c_.qk_norm_all_heads ? k : d, stage);
  }

  void Latent(int stage) {
    const int64_t h = c_.hidden_size, nh = c_.num_attention_heads, rq = c_.q_lora_rank, rk = c_.kv_lora_rank;
    if (rq == 0) {
      Matrix("q", {nh * c_.qk_dim(), h}, stage);
    } else {
      Matrix("q_a", {rq, h}, stage);
      Norm("q_a_norm", rq, stage);
      Matrix("q_b", {nh * c_.qk_dim(), rq}, stage);
    }
    Matrix("kv_a", {rk + c_.qk_rope_head_dim, h}, stage);
    Norm("kv_a_norm", rk, stage);
    Matrix("kv_b", {nh * (c_.qk_nope_head_dim + c_.v_head_dim), rk}, stage);
  }

  void Ffn(int stage, bool dense) {
    const int64_t h = c_.hidden_size, e = c_.num_experts, de = c_.moe_intermediate_size;
    if (dense) {
      Matrix("dense.gate_up", {2 * c_.intermediate_size, h}, stage);
      Matrix("dense.down", {h, c_.intermediate_size}, stage);
      return;
    }
    Matrix("experts.gate_up", {e, 2 * de, h}, stage).per_expert = true;
    if (c_.expert_bias) Bias("experts.gate_up_bias", {e, 2 * de}, stage).per_expert = true;
    Matrix("experts.down", {e, h, de}, stage).per_expert = true;
    if (c_.expert_bias) Bias("experts.down_bias", {e, h}, stage).per_expert = true;
    if (const int64_t ds = c_.shared_intermediate(); ds > 0) {
      Matrix("shared.gate_up", {2 * ds, h}, stage);
      Matrix("shared.down", {h, ds}, stage);
      if (c_.shared_expert_gate) Matrix("shared.gate", {1, h}, stage);
    }
  }

  const ModelConfig& c_;
  std::string layer_;
  std::vector<ParamSpec> table_;
};

// Sum over the queries of a sequence of the keys that each sees, by query.
double MeanKeys(int64_t s, int64_t window) {
  if (window == 0 || window >= s) return static_cast<double>(s + 1) / 2;
  const double w = static_cast<double>(window), n = static_cast<double>(s);
  return w - w * (w - 1) / (2 * n);
}

}  // namespace

std::vector<ParamSpec> ParamTable(const ModelConfig& model) { return Table(model).Make(); }

double StepFlops(const ModelConfig& c, const TrainConfig& t) {
  // Per token, forward: 2 FLOPs a multiply-add of every weight that a token meets, and of queries with keys and values.
  double per_token = 0;
  for (const ParamSpec& p : ParamTable(c)) {
    if (p.shape.size() < 2 || p.name == "embed" || p.name.ends_with("_bias")) continue;
    double weights = 2;
    for (int64_t n : p.shape) weights *= static_cast<double>(n);
    per_token += p.per_expert ? weights * static_cast<double>(c.num_experts_per_tok) / static_cast<double>(c.num_experts) : weights;
  }
  if (c.tie_word_embeddings) per_token += 2 * static_cast<double>(c.hidden_size * c.vocab_size);
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    const double width = static_cast<double>(c.num_attention_heads * (c.qk_dim() + c.value_dim()));
    per_token += 2 * width * MeanKeys(t.seq_length, c.window(l));
  }
  return 3 * per_token * static_cast<double>(t.seq_length * t.micro_batch_size * t.micro_batches);
}

}  // namespace disagmoe
