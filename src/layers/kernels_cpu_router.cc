// The router on the CPU: scores, choice of experts, gates. All fp32.
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

int64_t IndexOf(int64_t key) { return 0xffffffff - (key & 0xffffffff); }

// Takes the experts outside the best groups out of `keys` [experts], which are those of `values`. group: scratch, [groups].
void KeepBestGroups(const RouterRule& rule, const float* values, int64_t experts, bool two_best, int64_t* keys,
                    int64_t* group) {
  const int64_t size = experts / rule.groups;
  for (int64_t g = 0; g < rule.groups; ++g) {
    int64_t best = kTaken, second = kTaken;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      second = std::max(second, std::min(best, keys[e]));
      best = std::max(best, keys[e]);
    }
    const float value = values[IndexOf(best)];
    group[g] = Key(two_best ? value + values[IndexOf(second)] : value, g);
  }
  for (int64_t left = rule.groups - rule.top_groups; left > 0; --left) {  // the worst goes, the later of equals
    int64_t worst = 0;
    for (int64_t g = 1; g < rule.groups; ++g) {
      if (group[worst] == kTaken || (group[g] != kTaken && group[g] < group[worst])) worst = g;
    }
    group[worst] = kTaken;
    std::fill_n(keys + worst * size, size, kTaken);
  }
}

// Takes the k largest of `keys`.
void TopKRow(int64_t experts, int64_t k, int64_t* keys, int32_t* ids) {
  for (int64_t j = 0; j < k; ++j) {
    int64_t best = kTaken;
    for (int64_t e = 0; e < experts; ++e) best = std::max(best, keys[e]);
    const int64_t id = IndexOf(best);
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

void SigmoidRow(const float* logits, int64_t n, float* scores) {
  ForLanes(n, [&](int64_t i, auto span) { Store(scores + i, Sigmoid(Load(logits + i, span)), span); });
}

constexpr float kTiny = 1e-20f;

// d_logits holds the gradient of the scores while they are summed.
void RouterRowBackward(const RouterRule& rule, const float* d_gates, const float* d_scores, const float* scores,
                       const int32_t* ids, int64_t n, int64_t k, float* d_logits) {
  if (d_scores) {
    std::copy_n(d_scores, n, d_logits);
  } else {
    std::fill_n(d_logits, n, 0.0f);
  }
  const auto scale = static_cast<float>(rule.scale);
  float sum = 1;
  float mean = 0;
  if (rule.renormalise) {
    float dot = 0;
    sum = 0;
    for (int64_t j = 0; j < k; ++j) {
      sum += scores[ids[j]];
      dot += d_gates[j] * scores[ids[j]];
    }
    sum += kTiny;
    mean = dot / sum;
  }
  for (int64_t j = 0; j < k; ++j) d_logits[ids[j]] += (d_gates[j] - mean) / sum * scale;
  if (rule.sigmoid) {
    ForLanes(n, [&](int64_t i, auto span) {
      const Lanes s = Load(scores + i, span);
      Store(d_logits + i, Load(d_logits + i, span) * s * (1.0f - s), span);
    });
    return;
  }
  const float dot = SumLanes(n, [&](int64_t i, auto span) { return Load(d_logits + i, span) * Load(scores + i, span); });
  ForLanes(n, [&](int64_t i, auto span) {
    Store(d_logits + i, Load(scores + i, span) * (Load(d_logits + i, span) - dot), span);
  });
}

void CheckIds(const int32_t* ids, int64_t k, int64_t experts) {
  for (int64_t j = 0; j < k; ++j) {
    DM_CHECK(ids[j] >= 0 && ids[j] < experts, "expert " + std::to_string(ids[j]) + " of " + std::to_string(experts));
  }
}

}  // namespace

void ScoreTopK(const RouterRule& rule, const Tensor& logits, const Tensor& correction, Tensor& scores, Tensor& ids) {
  const int64_t n = logits.size(1);
  const int64_t k = ids.size(1);
  const float* in = logits.const_data_ptr<float>();
  const float* add = correction.defined() ? correction.const_data_ptr<float>() : nullptr;
  float* out = scores.mutable_data_ptr<float>();
  int32_t* id = ids.mutable_data_ptr<int32_t>();
  at::parallel_for(0, logits.size(0), Grain(n * (k + 4)), [&](int64_t begin, int64_t end) {
    std::vector<int64_t> keys(static_cast<size_t>(n)), group(static_cast<size_t>(rule.groups));
    std::vector<float> corrected(static_cast<size_t>(add ? n : 0));
    for (int64_t t = begin; t < end; ++t) {
      const float* values = in + t * n;
      float* of_token = out + t * n;
      (rule.sigmoid ? SigmoidRow : SoftmaxRow)(values, n, of_token);
      if (add) {
        for (int64_t e = 0; e < n; ++e) corrected[e] = of_token[e] + add[e];
        values = corrected.data();
      }
      for (int64_t e = 0; e < n; ++e) keys[e] = Key(values[e], e);
      if (rule.top_groups < rule.groups) KeepBestGroups(rule, values, n, add != nullptr, keys.data(), group.data());
      TopKRow(n, k, keys.data(), id + t * k);
    }
  });
}

void Gates(const RouterRule& rule, const Tensor& scores, const Tensor& ids, Tensor& gates) {
  const int64_t n = scores.size(1);
  const int64_t k = ids.size(1);
  const float* p = scores.const_data_ptr<float>();
  const int32_t* id = ids.const_data_ptr<int32_t>();
  float* g = gates.mutable_data_ptr<float>();
  const auto scale = static_cast<float>(rule.scale);
  at::parallel_for(0, scores.size(0), Grain(4 * k), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      CheckIds(id + t * k, k, n);
      float sum = 0;
      for (int64_t j = 0; j < k; ++j) sum += p[t * n + id[t * k + j]];
      const float divisor = rule.renormalise ? sum + kTiny : 1.0f;
      for (int64_t j = 0; j < k; ++j) g[t * k + j] = p[t * n + id[t * k + j]] / divisor * scale;
    }
  });
}

void RouterBackward(const RouterRule& rule, const Tensor& d_gates, const Tensor& d_scores, const Tensor& scores,
                    const Tensor& ids, Tensor& d_logits) {
  const int64_t n = scores.size(1);
  const int64_t k = ids.size(1);
  const float* dg = d_gates.const_data_ptr<float>();
  const float* ds = d_scores.defined() ? d_scores.const_data_ptr<float>() : nullptr;
  const float* s = scores.const_data_ptr<float>();
  const int32_t* id = ids.const_data_ptr<int32_t>();
  float* out = d_logits.mutable_data_ptr<float>();
  at::parallel_for(0, scores.size(0), Grain(4 * n), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      CheckIds(id + t * k, k, n);
      RouterRowBackward(rule, dg + t * k, ds ? ds + t * n : nullptr, s + t * n, id + t * k, n, k, out + t * n);
    }
  });
}

}  // namespace disagmoe::cpu
