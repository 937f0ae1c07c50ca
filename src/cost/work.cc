#include "cost/work.h"

#include <algorithm>

namespace disagmoe {
namespace {

constexpr double kBf16 = 2;

bool HasExperts(const ModelShape& m, int64_t layer) { return m.num_experts > 0 && !m.dense[layer]; }

// Weights of the attention projections of a layer.
double ProjectionParams(const ModelShape& m) {
  const double h = static_cast<double>(m.hidden_size);
  const auto heads = static_cast<double>(m.num_heads);
  const auto d = static_cast<double>(m.head_dim);
  const auto dv = static_cast<double>(m.value_dim);
  if (m.kv_lora_rank > 0) {
    const auto c = static_cast<double>(m.kv_lora_rank);
    const auto rope = static_cast<double>(m.rope_dim);
    const auto cq = static_cast<double>(m.q_lora_rank);
    const double q = cq > 0 ? h * cq + cq * heads * d : h * heads * d;
    return q + h * (c + rope) + c * heads * (d - rope + dv) + heads * dv * h;
  }
  return h * heads * d + h * static_cast<double>(m.num_kv_heads) * (d + dv) + heads * dv * h;
}

}  // namespace

Work& Work::operator+=(const Work& o) {
  attention_flops += o.attention_flops;
  gemm_flops += o.gemm_flops;
  expert_flops += o.expert_flops;
  memory_bytes += o.memory_bytes;
  return *this;
}

Work Work::operator*(double x) const {
  return {attention_flops * x, gemm_flops * x, expert_flops * x, memory_bytes * x};
}

double MeanKeys(int64_t text, int64_t window) {
  const auto s = static_cast<double>(text);
  if (window <= 0 || window >= text) return (s + 1) / 2;
  // The first `window` tokens see 1, 2, ..., window keys, the others window.
  const auto w = static_cast<double>(window);
  return (w * (w + 1) / 2 + (s - w) * w) / s;
}

double MeanKeys(const Sequence& sequence, int64_t window) {
  if (sequence.documents.empty()) return MeanKeys(sequence.tokens, window);
  double keys = 0, tokens = 0;
  const auto add = [&](double count, int64_t text) {
    if (text == 0) return;
    tokens += count * static_cast<double>(text);
    keys += count * static_cast<double>(text) * MeanKeys(text, window);
  };
  for (const auto& [length, share] : sequence.documents) {
    const Pieces pieces(length, sequence.tokens);
    add(share * static_cast<double>(pieces.whole), sequence.tokens);
    add(share, pieces.rest);
  }
  return keys / tokens;
}

Work AttentionWork(const ModelShape& m, int64_t layer, const Sequence& sequence, double copies) {
  const auto h = static_cast<double>(m.hidden_size);
  const auto heads = static_cast<double>(m.num_heads);
  const auto d = static_cast<double>(m.head_dim);
  const auto dv = static_cast<double>(m.value_dim);
  Work w;
  w.attention_flops = 2 * MeanKeys(sequence, m.window[layer]) * heads * (d + dv);
  w.gemm_flops = 2 * ProjectionParams(m);
  if (HasExperts(m, layer)) w.gemm_flops += 2 * h * static_cast<double>(m.num_experts);
  const double kv = static_cast<double>(m.num_kv_heads) * d;
  // Both norms read and write, RoPE reads and writes queries and keys, the residual reads two and writes one, packing
  // reads the row and writes its copies, the sum of what comes back reads the copies and writes the row.
  const double elements = 4 * h + 2 * (heads * d + kv) * (m.qk_norm ? 2 : 1) + 3 * h + 2 * (1 + copies) * h;
  w.memory_bytes = elements * kBf16;
  return w;
}

Work ExpertPairWork(const ModelShape& m) {
  const auto h = static_cast<double>(m.hidden_size);
  const auto de = static_cast<double>(m.expert_hidden);
  Work w;
  w.expert_flops = 6 * h * de;
  // Permutation there and back (read and write a row each), SwiGLU (reads two, writes one).
  w.memory_bytes = (4 * h + 3 * de) * kBf16;
  return w;
}

Work CommonFfnWork(const ModelShape& m, int64_t layer) {
  const auto h = static_cast<double>(m.hidden_size);
  const auto d = static_cast<double>(m.dense[layer] || m.num_experts == 0 ? m.dense_hidden : m.shared_hidden);
  Work w;
  w.gemm_flops = 6 * h * d;
  w.memory_bytes = (3 * h + 3 * d) * kBf16;  // norm, sum; SwiGLU
  return w;
}

Work FfnRowWork(const ModelShape& m) {
  Work w;
  w.memory_bytes = 2 * static_cast<double>(m.hidden_size) * kBf16;
  return w;
}

Work FfnRecomputeWork(Work w) {
  w.gemm_flops *= 2.0 / 3;
  w.expert_flops *= 2.0 / 3;
  return w;
}

Work HeadWork(const ModelShape& m) {
  const auto h = static_cast<double>(m.hidden_size);
  const auto v = static_cast<double>(m.vocab_size);
  Work w;
  w.gemm_flops = 2 * h * v;
  // Forward and backward together: the norm; the loss reads logits twice and writes their gradient, in fp32.
  w.memory_bytes = 6 * h * kBf16 + 3 * v * 4;
  return w;
}

double TrainFlopsPerToken(const ModelShape& m, const Sequence& sequence) {
  Work w = HeadWork(m);
  for (int64_t l = 0; l < m.num_layers; ++l) {
    w += AttentionWork(m, l, sequence, 1);
    w += CommonFfnWork(m, l);
    if (HasExperts(m, l)) w += ExpertPairWork(m) * static_cast<double>(m.experts_per_token);
  }
  return 3 * (w.attention_flops + w.gemm_flops + w.expert_flops);
}

Intensities ExactIntensities(const ModelShape& m, int64_t layer, const Sequence& sequence, double rows) {
  const double bytes = rows * static_cast<double>(m.hidden_size) * kBf16;
  const Work a = AttentionWork(m, layer, sequence, rows);
  Work f = CommonFfnWork(m, layer);
  if (HasExperts(m, layer)) f += ExpertPairWork(m) * static_cast<double>(m.experts_per_token);
  return {(a.attention_flops + a.gemm_flops) / bytes, (f.gemm_flops + f.expert_flops) / bytes};
}

Intensities PrintedIntensities(const ModelShape& m, int64_t seq_length) {
  const auto h = static_cast<double>(m.hidden_size);
  const double g = static_cast<double>(m.num_heads) / static_cast<double>(m.num_kv_heads);
  return {(h * (2 + 2 / g) + 4 * static_cast<double>(seq_length)) / (2 * static_cast<double>(m.experts_per_token)),
          2 * static_cast<double>(m.expert_hidden)};
}

double TimeNs(const Work& w, const Pass& pass, const ClusterSpec& cluster, double rows_per_expert) {
  const EfficiencySpec& e = cluster.efficiency;
  const double peak = cluster.gpu.peak_tflops * 1e3;  // FLOPs a nanosecond
  const double products = pass.forward + pass.input_gradient + pass.weight_gradient;
  const double grouped = e.grouped_gemm * rows_per_expert / (rows_per_expert + e.grouped_gemm_half_rows);
  double ns = products * w.gemm_flops / (peak * e.gemm);
  if (w.expert_flops > 0) ns += products * w.expert_flops / (peak * grouped);
  if (pass.forward) ns += w.attention_flops / (peak * e.attention_forward);
  if (pass.input_gradient) ns += 2.5 * w.attention_flops / (peak * e.attention_backward);
  // What is not a product: once forward, twice backward (with the input gradients).
  const double passes = pass.forward + 2.0 * pass.input_gradient;
  return ns + passes * w.memory_bytes / (cluster.gpu.memory_gbytes_s * e.memory);  // 1 GB/s = 1 byte a nanosecond
}

}  // namespace disagmoe
