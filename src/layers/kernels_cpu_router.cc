// The router on the CPU: softmax, choice of experts, gates. All fp32.
#include <ATen/ATen.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "layers/kernels_cpu.h"
#include "layers/lanes_math.h"

namespace disagmoe::cpu {
namespace {

constexpr int64_t kTaken = std::numeric_limits<int64_t>::min();

// Larger key = earlier choice: the logit in the high half in an order-preserving form (-0 = 0, NaN above infinity),
// the complement of the index in the low half.
int64_t Key(float logit, int64_t index) {
  int32_t bits = std::bit_cast<int32_t>(logit);
  if (logit != logit) {
    bits = std::numeric_limits<int32_t>::max();
  } else if (logit == 0) {
    bits = 0;
  } else if (bits < 0) {
    bits ^= 0x7fffffff;
  }
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(bits)) << 32) | (0xffffffff - index);
}

void TopKRow(const float* logits, int64_t experts, int64_t k, int64_t* keys, int32_t* ids) {
  for (int64_t e = 0; e < experts; ++e) keys[e] = Key(logits[e], e);
  for (int64_t j = 0; j < k; ++j) {
    int64_t best = kTaken;
    for (int64_t e = 0; e < experts; ++e) best = std::max(best, keys[e]);
    const int64_t id = 0xffffffff - (best & 0xffffffff);
    ids[j] = static_cast<int32_t>(id);
    keys[id] = kTaken;
  }
}

void SoftmaxRow(const float* logits, int64_t n, float* probs) {
  float max = -std::numeric_limits<float>::infinity();
  for (int64_t e = 0; e < n; ++e) max = std::max(max, logits[e]);
  ForLanes(n, [&](int64_t i, auto span) { Store(probs + i, Exp(Load(logits + i, span) - max), span); });
  const float sum = SumLanes(n, [&](int64_t i, auto span) { return Load(probs + i, span); });
  ForLanes(n, [&](int64_t i, auto span) { Store(probs + i, Load(probs + i, span) / sum, span); });
}

// d_logits holds the gradient of the probabilities while they are summed.
void RouterRowBackward(const float* d_gates, const float* d_probs, const float* probs, const int32_t* ids, int64_t n,
                       int64_t k, bool renormalise, float* d_logits) {
  if (d_probs) {
    std::copy_n(d_probs, n, d_logits);
  } else {
    std::fill_n(d_logits, n, 0.0f);
  }
  float sum = 1;
  float mean = 0;
  if (renormalise) {
    float dot = 0;
    sum = 0;
    for (int64_t j = 0; j < k; ++j) {
      sum += probs[ids[j]];
      dot += d_gates[j] * probs[ids[j]];
    }
    mean = dot / sum;
  }
  for (int64_t j = 0; j < k; ++j) d_logits[ids[j]] += (d_gates[j] - mean) / sum;
  const float dot = SumLanes(n, [&](int64_t i, auto span) { return Load(d_logits + i, span) * Load(probs + i, span); });
  ForLanes(n, [&](int64_t i, auto span) {
    Store(d_logits + i, Load(probs + i, span) * (Load(d_logits + i, span) - dot), span);
  });
}

void CheckIds(const int32_t* ids, int64_t k, int64_t experts) {
  for (int64_t j = 0; j < k; ++j) {
    DM_CHECK(ids[j] >= 0 && ids[j] < experts, "expert " + std::to_string(ids[j]) + " of " + std::to_string(experts));
  }
}

}  // namespace

void SoftmaxTopK(const Tensor& logits, Tensor& probs, Tensor& ids) {
  const int64_t n = logits.size(1);
  const int64_t k = ids.size(1);
  const float* in = logits.const_data_ptr<float>();
  float* p = probs.mutable_data_ptr<float>();
  int32_t* id = ids.mutable_data_ptr<int32_t>();
  at::parallel_for(0, logits.size(0), Grain(n * (k + 4)), [&](int64_t begin, int64_t end) {
    std::vector<int64_t> keys(static_cast<size_t>(n));
    for (int64_t t = begin; t < end; ++t) {
      SoftmaxRow(in + t * n, n, p + t * n);
      TopKRow(in + t * n, n, k, keys.data(), id + t * k);
    }
  });
}

void Gates(const Tensor& probs, const Tensor& ids, bool renormalise, Tensor& gates) {
  const int64_t n = probs.size(1);
  const int64_t k = ids.size(1);
  const float* p = probs.const_data_ptr<float>();
  const int32_t* id = ids.const_data_ptr<int32_t>();
  float* g = gates.mutable_data_ptr<float>();
  at::parallel_for(0, probs.size(0), Grain(4 * k), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      CheckIds(id + t * k, k, n);
      float sum = 0;
      for (int64_t j = 0; j < k; ++j) sum += p[t * n + id[t * k + j]];
      for (int64_t j = 0; j < k; ++j) g[t * k + j] = p[t * n + id[t * k + j]] / (renormalise ? sum : 1.0f);
    }
  });
}

void RouterBackward(const Tensor& d_gates, const Tensor& d_probs, const Tensor& probs, const Tensor& ids,
                    bool renormalise, Tensor& d_logits) {
  const int64_t n = probs.size(1);
  const int64_t k = ids.size(1);
  const float* dg = d_gates.const_data_ptr<float>();
  const float* dp = d_probs.defined() ? d_probs.const_data_ptr<float>() : nullptr;
  const float* p = probs.const_data_ptr<float>();
  const int32_t* id = ids.const_data_ptr<int32_t>();
  float* out = d_logits.mutable_data_ptr<float>();
  at::parallel_for(0, probs.size(0), Grain(4 * n), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      CheckIds(id + t * k, k, n);
      RouterRowBackward(dg + t * k, dp ? dp + t * n : nullptr, p + t * n, id + t * k, n, k, renormalise, out + t * n);
    }
  });
}

}  // namespace disagmoe::cpu
