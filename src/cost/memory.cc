#include "cost/memory.h"

namespace disagmoe {

double AttentionActivationBytes(const Job& job, int64_t layer) {
  const ModelShape& m = job.model;
  const auto h = static_cast<double>(m.hidden_size);
  const auto heads = static_cast<double>(m.num_heads);
  const bool routed = !m.dense[layer];
  const double choice = routed ? 8.0 * static_cast<double>(m.experts_per_token) : 0;  // index and gate
  if (job.recompute) return 2 * h + choice;
  // With latent attention keys and values are expanded for all heads.
  const auto kv = static_cast<double>(m.kv_lora_rank > 0 ? m.num_heads : m.num_kv_heads);
  const double qkv = heads * static_cast<double>(m.head_dim) + kv * static_cast<double>(m.head_dim + m.value_dim);
  const double latent = static_cast<double>(m.q_lora_rank + m.kv_lora_rank);
  const double probabilities = routed ? 4 * static_cast<double>(m.num_experts) : 0;
  return 2 * (4 * h + qkv + latent + heads * static_cast<double>(m.value_dim)) + 4 * heads + choice + probabilities;
}

double FfnRowBytes(const Job& job) { return 2 * static_cast<double>(job.model.hidden_size); }

double FfnPairBytes(const Job& job) {
  if (job.recompute) return 0;
  return 2 * static_cast<double>(job.model.hidden_size + 3 * job.model.expert_hidden);
}

double CommonFfnBytes(const Job& job, int64_t layer) {
  const ModelShape& m = job.model;
  const auto hidden = static_cast<double>(m.dense[layer] ? m.dense_hidden : m.shared_hidden);
  return job.recompute ? 0 : 2 * 3 * hidden;
}

double HeadActivationBytes(const Job& job) {
  return 2 * static_cast<double>(job.model.hidden_size) + 2 * static_cast<double>(job.model.vocab_size);
}

double HeadWorkspaceBytes(const Job& job) { return 4 * static_cast<double>(job.model.vocab_size); }

double AttentionWeightBytes(const Job& job, int64_t layer) {
  const ModelShape& m = job.model;
  const auto heads = static_cast<double>(m.num_heads);
  const auto kv = static_cast<double>(m.kv_lora_rank > 0 ? m.num_heads : m.num_kv_heads);
  const double qkv = heads * static_cast<double>(m.head_dim) + kv * static_cast<double>(m.head_dim + m.value_dim);
  const double router = m.dense[layer] ? 0 : static_cast<double>(m.hidden_size) + 2 * static_cast<double>(m.num_experts);
  return 2 * (2 * static_cast<double>(m.hidden_size) + qkv + heads * static_cast<double>(m.value_dim) + router);
}

double FfnPairWeightBytes(const Job& job) {
  return 2 * static_cast<double>(2 * job.model.hidden_size + 3 * job.model.expert_hidden);
}

double StateBytes(const Job& job, double params, double holders) {
  const double state = job.shard_optimizer ? job.state_bytes / holders : job.state_bytes;
  return params * (job.weight_bytes + job.gradient_bytes + state);
}

}  // namespace disagmoe
