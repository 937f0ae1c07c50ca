// SwiGLU and cross entropy on the CPU.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "layers/kernels.h"
#include "layers/kernels_cpu.h"
#include "layers/lanes_math.h"

namespace disagmoe::cpu {
namespace {

// The next row's element: a row of fp32 is about a page, and the processor's own prefetch stops at the end of one.
inline void Prefetch(const void* p) { __builtin_prefetch(p); }

// a = glu(gate) * factor(up). What follows from the inputs:
struct Activated {
  Lanes glu, slope, factor;  // slope = d glu / d gate
};

struct Silu {
  Lanes Act(Lanes gate, Lanes up) const { return gate * Sigmoid(gate) * up; }
  Activated Parts(Lanes gate, Lanes up) const {
    const Lanes sigmoid = Sigmoid(gate);
    const Lanes silu = gate * sigmoid;
    return {silu, sigmoid + silu * (1.0f - sigmoid), up};
  }
  Lanes Passes(Lanes d_up, Lanes) const { return d_up; }
};

// gpt-oss's: see kernels.h.
struct Clamped {
  float limit;
  static constexpr float kAlpha = 1.702f;
  static constexpr float kLowest = -std::numeric_limits<float>::infinity();
  Lanes Act(Lanes gate, Lanes up) const {
    const Lanes g = Clamp(gate, kLowest, limit);
    return g * Sigmoid(kAlpha * g) * (Clamp(up, -limit, limit) + 1.0f);
  }
  Activated Parts(Lanes gate, Lanes up) const {
    const Lanes g = Clamp(gate, kLowest, limit);
    const Lanes sigmoid = Sigmoid(kAlpha * g);
    const Lanes glu = g * sigmoid;
    const Lanes slope = sigmoid + kAlpha * glu * (1.0f - sigmoid);
    return {glu, gate > limit ? Lanes{} : slope, Clamp(up, -limit, limit) + 1.0f};
  }
  Lanes Passes(Lanes d_up, Lanes up) const { return Clamp(up, -limit, limit) == up ? d_up : Lanes{}; }
};

template <class A, class T>
void SwiGluRow(const A& f, const T* gate, const T* up, int64_t d, float scale, T* act) {
  ForLanes(d, [&](int64_t i, auto span) {
    Prefetch(gate + 2 * d + i);
    Prefetch(up + 2 * d + i);
    Store(act + i, f.Act(Load(gate + i, span), Load(up + i, span)) * scale, span);
  });
}

// Returns sum d_act * a. Reads each element of gate and up before it writes it: d_gate may be gate.
template <class A, class T>
float SwiGluRowBackward(const A& f, const T* d_act, const T* gate, const T* up, int64_t d, float scale, T* d_gate,
                        T* d_up, T* act) {
  return SumLanes(d, [&](int64_t i, auto span) {
    Prefetch(gate + 2 * d + i);
    Prefetch(up + 2 * d + i);
    Prefetch(d_act + d + i);
    const Lanes u = Load(up + i, span);
    const Lanes da = Load(d_act + i, span);
    const Activated in = f.Parts(Load(gate + i, span), u);
    const Lanes a = in.glu * in.factor;
    const Lanes scaled = da * scale;
    Store(act + i, a * scale, span);
    Store(d_gate + i, scaled * in.factor * in.slope, span);
    Store(d_up + i, f.Passes(scaled * in.glu, u), span);
    return da * a;
  });
}

// Calls f with the activation.
template <class F>
void ForActivation(double limit, F f) {
  if (limit == 0) {
    f(Silu{});
  } else {
    f(Clamped{static_cast<float>(limit)});
  }
}

template <class T>
float RowMax(const T* row, int64_t n) {
  const float lowest = -std::numeric_limits<float>::infinity();
  Lanes max = Splat(lowest);
  ForLanes(n, [&](int64_t i, auto span) {
    if constexpr (std::is_same_v<decltype(span), Full>) {
      const Lanes v = Load(row + i, span);
      max = v > max ? v : max;
    } else {
      for (int64_t j = 0; j < span.n; ++j) max[j] = std::max(max[j], static_cast<float>(row[i + j]));
    }
  });
  return Max(max);
}

// The loss of a row; the row becomes scale (softmax - onehot) if gradient.
template <class T>
double CrossEntropyRow(T* row, int64_t n, int64_t label, float scale, bool gradient) {
  const float max = RowMax(row, n);
  const float picked = static_cast<float>(row[label]);
  const float sum = SumLanes(n, [&](int64_t i, auto span) {
    Lanes e = Exp(Load(row + i, span) - max);
    for (int64_t j = span.n; j < kLanes; ++j) e[j] = 0;
    return e;
  });
  if (gradient) {
    const float factor = scale / sum;
    const float at_label = scale * (std::exp(picked - max) / sum - 1.0f);
    ForLanes(n, [&](int64_t i, auto span) { Store(row + i, Exp(Load(row + i, span) - max) * factor, span); });
    row[label] = static_cast<T>(at_label);
  }
  return std::log(static_cast<double>(sum)) + (static_cast<double>(max) - static_cast<double>(picked));
}

}  // namespace

void SwiGlu(const Tensor& gate_up, const Tensor& scale, double limit, Tensor& act) {
  const int64_t d = act.size(1);
  const float* factor = scale.defined() ? scale.const_data_ptr<float>() : nullptr;
  const auto run = [&](const auto& activation, auto zero) {
    using T = decltype(zero);
    const T* in = gate_up.const_data_ptr<T>();
    T* out = act.mutable_data_ptr<T>();
    at::parallel_for(0, act.size(0), Grain(2 * d), [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        SwiGluRow(activation, in + 2 * p * d, in + (2 * p + 1) * d, d, factor ? factor[p] : 1.0f, out + p * d);
      }
    });
  };
  ForActivation(limit, [&](auto activation) {
    ForType(gate_up.scalar_type(), [&](auto zero) { run(activation, zero); });
  });
}

void SwiGluBackward(const Tensor& d_act, const Tensor& gate_up, const Tensor& scale, double limit, Tensor& d_gate_up,
                    Tensor& act, Tensor& d_scale) {
  const int64_t d = act.size(1);
  const float* factor = scale.defined() ? scale.const_data_ptr<float>() : nullptr;
  float* d_factor = scale.defined() ? d_scale.mutable_data_ptr<float>() : nullptr;
  const auto run = [&](const auto& activation, auto zero) {
    using T = decltype(zero);
    const T* da = d_act.const_data_ptr<T>();
    const T* in = gate_up.const_data_ptr<T>();
    T* din = d_gate_up.mutable_data_ptr<T>();
    T* out = act.mutable_data_ptr<T>();
    at::parallel_for(0, act.size(0), Grain(3 * d), [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const int64_t gate = 2 * p * d;
        const float dot = SwiGluRowBackward(activation, da + p * d, in + gate, in + gate + d, d,
                                            factor ? factor[p] : 1.0f, din + gate, din + gate + d, out + p * d);
        if (d_factor) d_factor[p] = dot;
      }
    });
  };
  ForActivation(limit, [&](auto activation) {
    ForType(gate_up.scalar_type(), [&](auto zero) { run(activation, zero); });
  });
}

double CrossEntropy(Tensor& logits, const Tensor& labels, double scale, bool gradient) {
  const int64_t rows = logits.size(0);
  const int64_t n = logits.size(1);
  const int64_t* label = labels.const_data_ptr<int64_t>();
  const std::unique_ptr<double[]> losses(new double[static_cast<size_t>(rows)]);
  ForType(logits.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    T* p = logits.mutable_data_ptr<T>();
    at::parallel_for(0, rows, Grain(n), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        if (label[t] == kNoLabel) {
          losses[t] = 0;
          if (gradient) std::fill_n(p + t * n, n, T(0));
          continue;
        }
        DM_CHECK(label[t] >= 0 && label[t] < n, "label " + std::to_string(label[t]) + " of " + std::to_string(n));
        losses[t] = CrossEntropyRow(p + t * n, n, label[t], static_cast<float>(scale), gradient);
      }
    });
  });
  double sum = 0;
  for (int64_t t = 0; t < rows; ++t) sum += losses[t];
  return sum;
}

}  // namespace disagmoe::cpu
