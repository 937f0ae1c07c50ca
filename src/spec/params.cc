#include "spec/params.h"

namespace disagmoe {

std::vector<ParamSpec> ParamTable(const ModelConfig& c) {
  const int64_t h = c.hidden_size, d = c.head_dim, nh = c.num_attention_heads, nkv = c.num_key_value_heads;
  const double std = c.initializer_range;
  std::vector<ParamSpec> table;
  auto matrix = [&](std::string name, std::vector<int64_t> shape, int stage, bool per_expert = false) {
    table.push_back({.name = std::move(name), .shape = std::move(shape), .stage = stage, .per_expert = per_expert, .init_std = std});
  };
  auto norm = [&](std::string name, int64_t size, int stage, bool also_ffn = false) {
    table.push_back({.name = std::move(name), .shape = {size}, .stage = stage, .decay = false, .norm_weight = true, .also_ffn = also_ffn});
  };
  matrix("embed", {c.vocab_size, h}, 0);
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    const std::string p = "layers." + std::to_string(l) + ".";
    const int a = static_cast<int>(2 * l), f = a + 1;
    norm(p + "norm1", h, a);
    matrix(p + "qkv", {(nh + 2 * nkv) * d, h}, a);
    if (c.qk_norm) {
      norm(p + "q_norm", d, a);
      norm(p + "k_norm", d, a);
    }
    matrix(p + "out", {h, nh * d}, a);
    norm(p + "norm2", h, a, /*also_ffn=*/true);
    if (c.is_dense(l)) {
      matrix(p + "dense.gate_up", {2 * c.intermediate_size, h}, f);
      matrix(p + "dense.down", {h, c.intermediate_size}, f);
      continue;
    }
    matrix(p + "router", {c.num_experts, h}, a);
    matrix(p + "experts.gate_up", {c.num_experts, 2 * c.moe_intermediate_size, h}, f, /*per_expert=*/true);
    matrix(p + "experts.down", {c.num_experts, h, c.moe_intermediate_size}, f, /*per_expert=*/true);
    if (c.n_shared_experts > 0) {
      matrix(p + "shared.gate_up", {2 * c.shared_intermediate(), h}, f);
      matrix(p + "shared.down", {h, c.shared_intermediate()}, f);
    }
  }
  norm("final_norm", h, static_cast<int>(2 * c.num_hidden_layers));
  matrix("head", {c.vocab_size, h}, static_cast<int>(2 * c.num_hidden_layers));
  return table;
}

double StepFlops(const ModelConfig& c, const TrainConfig& t) {
  const double h = c.hidden_size, q = c.num_attention_heads * c.head_dim, kv = c.num_key_value_heads * c.head_dim;
  // Per token, forward: 2 FLOPs a multiply-add; causal attention sees (s + 1) / 2 keys on average.
  double per_token = 2 * h * static_cast<double>(c.vocab_size);
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    per_token += 2 * h * (2 * q + 2 * kv) + 4 * q * (t.seq_length + 1) / 2.0;
    if (c.is_dense(l)) {
      per_token += 6 * h * c.intermediate_size;
    } else {
      per_token += 2 * h * c.num_experts + 6 * h * (c.num_experts_per_tok * c.moe_intermediate_size + c.shared_intermediate());
    }
  }
  return 3 * per_token * static_cast<double>(t.seq_length * t.micro_batch_size * t.micro_batches);
}

}  // namespace disagmoe
