#include "cost/memory.h"

#include <cmath>

namespace disagmoe {
namespace {

constexpr double kBf16 = 2;

bool Routed(const ModelShape& m, int64_t layer) { return m.num_experts > 0 && !m.dense[layer]; }

double CommonHidden(const ModelShape& m, int64_t layer) {
  return static_cast<double>(Routed(m, layer) ? m.shared_hidden : m.dense_hidden);
}

// Queries, keys and values as attention reads them: with latent attention keys and values are expanded for all heads.
double Qkv(const ModelShape& m) {
  const int64_t kv = m.kv_lora_rank > 0 ? m.num_heads : m.num_kv_heads;
  return static_cast<double>(m.num_heads * m.head_dim + kv * (m.head_dim + m.value_dim));
}

double Latent(const ModelShape& m) { return static_cast<double>(m.q_lora_rank + m.kv_lora_rank); }

double Values(const ModelShape& m) { return static_cast<double>(m.num_heads * m.value_dim); }

}  // namespace

double AttentionActivationBytes(const Job& job, int64_t layer) {
  const ModelShape& m = job.model;
  const auto h = static_cast<double>(m.hidden_size);
  const bool routed = Routed(m, layer);
  const double choice = routed ? 8.0 * static_cast<double>(m.experts_per_token) : 0;  // index and gate
  if (job.recompute) return kBf16 * h + choice;
  const double probabilities = routed ? 4 * static_cast<double>(m.num_experts) : 0;
  const double log_sums = 4 * static_cast<double>(m.num_heads);
  return kBf16 * (4 * h + Qkv(m) + Latent(m) + Values(m)) + log_sums + choice + probabilities;
}

double FfnRowBytes(const Job& job) {
  return job.colocated() && !job.recompute ? 0 : kBf16 * static_cast<double>(job.model.hidden_size);
}

double FfnPairBytes(const Job& job) {
  if (job.recompute) return 0;
  return kBf16 * static_cast<double>((job.colocated() ? job.model.hidden_size : 0) + 3 * job.model.expert_hidden);
}

double CommonFfnBytes(const Job& job, int64_t layer) {
  return job.recompute ? 0 : kBf16 * 3 * CommonHidden(job.model, layer);
}

double HeadActivationBytes(const Job& job) {
  return kBf16 * static_cast<double>(job.model.hidden_size + job.model.vocab_size);
}

double HeadWorkspaceBytes(const Job& job) { return 4 * static_cast<double>(job.model.vocab_size); }

// Of the latent rows and what comes from them, of queries, keys and values, of the output projection, of the logits.
double AttentionGradientBytes(const Job& job, int64_t layer) {
  const ModelShape& m = job.model;
  const double latent = m.kv_lora_rank > 0 ? Latent(m) + static_cast<double>(m.rope_dim) : 0;
  const double logits = Routed(m, layer) ? 2 * static_cast<double>(m.num_experts) : 0;  // fp32
  return kBf16 * (Qkv(m) + latent + static_cast<double>(m.hidden_size) + logits);
}

double AttentionWeightBytes(const Job& job, int64_t layer) {
  const ModelShape& m = job.model;
  const double rows = Routed(m, layer) ? 2 : 1;  // normed, of attention and of the router
  return AttentionGradientBytes(job, layer) +
         kBf16 * (rows * static_cast<double>(m.hidden_size) + Latent(m) + Values(m));
}

// Of the product down (H) and of gate and up (2 De).
double FfnPairGradientBytes(const Job& job) {
  return kBf16 * static_cast<double>(job.model.hidden_size + 2 * job.model.expert_hidden);
}

double FfnPairWeightBytes(const Job& job) {
  return FfnPairGradientBytes(job) + kBf16 * static_cast<double>(job.model.hidden_size + job.model.expert_hidden);
}

double CommonFfnGradientBytes(const Job& job, int64_t layer) {
  const double d = CommonHidden(job.model, layer);
  return d > 0 ? kBf16 * (static_cast<double>(job.model.hidden_size) + 2 * d) : 0;
}

double CommonFfnWeightBytes(const Job& job, int64_t layer) {
  const double d = CommonHidden(job.model, layer);
  return CommonFfnGradientBytes(job, layer) + (d > 0 ? kBf16 * (static_cast<double>(job.model.hidden_size) + d) : 0);
}

StaticMemory StaticMemoryOf(const Job& job, double params, double updated) {
  const auto round = [](double bytes) { return static_cast<int64_t>(std::llround(bytes)); };
  return {round(params * job.weight_bytes), round(params * job.gradient_bytes), round(updated * job.state_bytes),
          round(job.reserved_gb * 1e9)};
}

}  // namespace disagmoe
