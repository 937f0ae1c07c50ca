// Copying and summing of rows on the CPU.
#include <ATen/ATen.h>

#include <cstring>

#include "layers/kernels_cpu.h"
#include "layers/lanes.h"

namespace disagmoe::cpu {
namespace {

// Rows that a sum reads, with their weights. kWeighted: else all weights are 1.
template <bool kWeighted, class T>
struct Terms {
  const T* src;
  const int32_t* position;
  const float* weight;
  template <class Span>
  Lanes At(int32_t j, int64_t h, int64_t column, Span span) const {
    const Lanes row = Load(src + position[j] * h + column, span);
    if constexpr (kWeighted) return row * weight[j];
    return row;
  }
};

// out (+)= sum of the terms [begin, end). Four blocks at a time share one walk over the positions.
template <bool kWeighted, class T>
void SumRow(const Terms<kWeighted, T>& terms, int32_t begin, int32_t end, int64_t h, T* out, bool add) {
  int64_t i = 0;
  for (; i + 4 * kLanes <= h; i += 4 * kLanes) {
    Lanes sum[4] = {};
    for (int32_t j = begin; j < end; ++j) {
      for (int64_t b = 0; b < 4; ++b) sum[b] += terms.At(j, h, i + b * kLanes, Full{});
    }
    for (int64_t b = 0; b < 4; ++b) {
      T* to = out + i + b * kLanes;
      Store(to, add ? Load(to, Full{}) + sum[b] : sum[b], Full{});
    }
  }
  ForLanes(h - i, [&](int64_t tail, auto span) {
    Lanes sum{};
    for (int32_t j = begin; j < end; ++j) sum += terms.At(j, h, i + tail, span);
    T* to = out + i + tail;
    Store(to, add ? Load(to, span) + sum : sum, span);
  });
}

// sums += weighted rows of src [n, h], columns [first, last) only.
template <class T>
void AddSegment(const T* src, const float* weight, int64_t n, int64_t h, int64_t first, int64_t last, float* sums) {
  const auto factor = [&](int64_t r) { return weight ? weight[r] : 1.0f; };
  int64_t i = first;
  for (; i + 4 * kLanes <= last; i += 4 * kLanes) {
    Lanes sum[4] = {};
    for (int64_t r = 0; r < n; ++r) {
      for (int64_t b = 0; b < 4; ++b) sum[b] += Load(src + r * h + i + b * kLanes, Full{}) * factor(r);
    }
    for (int64_t b = 0; b < 4; ++b) Store(sums + i + b * kLanes, Load(sums + i + b * kLanes, Full{}) + sum[b], Full{});
  }
  ForLanes(last - i, [&](int64_t tail, auto span) {
    Lanes sum{};
    for (int64_t r = 0; r < n; ++r) sum += Load(src + r * h + i + tail, span) * factor(r);
    Store(sums + i + tail, Load(sums + i + tail, span) + sum, span);
  });
}

// Ranges of offset[t] within `positions`, positions within `rows`.
void CheckPositions(const int32_t* from, const int32_t* offset, int64_t t, int64_t positions, int64_t rows) {
  DM_CHECK(offset[t] >= 0 && offset[t] <= offset[t + 1] && offset[t + 1] <= positions,
           "offsets of token " + std::to_string(t));
  for (int32_t j = offset[t]; j < offset[t + 1]; ++j) {
    DM_CHECK(from[j] >= 0 && from[j] < rows, "row " + std::to_string(from[j]) + " of " + std::to_string(rows));
  }
}

int64_t MeanTerms(int64_t tokens, int64_t positions) { return tokens > 0 ? 1 + positions / tokens : 1; }

}  // namespace

void GatherRows(const Tensor& src, const Tensor& index, Tensor& out) {
  const int64_t rows = src.size(0);
  const int64_t bytes = src.size(1) * static_cast<int64_t>(src.element_size());
  const int32_t* from = index.const_data_ptr<int32_t>();
  const auto* in = static_cast<const char*>(src.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  at::parallel_for(0, index.size(0), Grain(src.size(1)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      DM_CHECK(from[i] >= 0 && from[i] < rows, "row " + std::to_string(from[i]) + " of " + std::to_string(rows));
      std::memcpy(to + i * bytes, in + from[i] * bytes, static_cast<size_t>(bytes));
    }
  });
}

void SumRows(const Tensor& src, const Tensor& position, const Tensor& offsets, Tensor& out, bool add,
             const Tensor& weight) {
  const int64_t rows = src.size(0), h = src.size(1), positions = position.size(0), tokens = out.size(0);
  const int32_t* from = position.const_data_ptr<int32_t>();
  const int32_t* offset = offsets.const_data_ptr<int32_t>();
  const auto run = [&](const auto& terms, auto* to) {
    at::parallel_for(0, tokens, Grain(MeanTerms(tokens, positions) * h), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        CheckPositions(from, offset, t, positions, rows);
        SumRow(terms, offset[t], offset[t + 1], h, to + t * h, add);
      }
    });
  };
  ForType(src.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* in = src.const_data_ptr<T>();
    if (weight.defined()) {
      run(Terms<true, T>{in, from, weight.const_data_ptr<float>()}, out.mutable_data_ptr<T>());
    } else {
      run(Terms<false, T>{in, from, nullptr}, out.mutable_data_ptr<T>());
    }
  });
}

void AddRowDots(const Tensor& d_out, const Tensor& src, const Tensor& position, const Tensor& offsets,
                Tensor& d_weight) {
  const int64_t rows = src.size(0), h = src.size(1), positions = position.size(0), tokens = d_out.size(0);
  const int32_t* from = position.const_data_ptr<int32_t>();
  const int32_t* offset = offsets.const_data_ptr<int32_t>();
  float* dots = d_weight.mutable_data_ptr<float>();
  ForType(src.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* a = d_out.const_data_ptr<T>();
    const T* b = src.const_data_ptr<T>();
    at::parallel_for(0, tokens, Grain(MeanTerms(tokens, positions) * h), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        CheckPositions(from, offset, t, positions, rows);
        for (int32_t j = offset[t]; j < offset[t + 1]; ++j) {
          const T* row = b + from[j] * h;
          dots[j] += SumLanes(h, [&](int64_t i, auto span) { return Load(a + t * h + i, span) * Load(row + i, span); });
        }
      }
    });
  });
}

void AddSegments(const Tensor& src, const Tensor& weight, const std::vector<int64_t>& begin, Tensor& sums) {
  constexpr int64_t kColumns = 16 * kLanes;  // of a piece of work
  const int64_t h = src.size(1), pieces = (h + kColumns - 1) / kColumns, segments = sums.size(0);
  const float* factor = weight.defined() ? weight.const_data_ptr<float>() : nullptr;
  float* to = sums.mutable_data_ptr<float>();
  ForType(src.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* from = src.const_data_ptr<T>();
    const int64_t grain = Grain(MeanTerms(segments, src.size(0)) * kColumns);
    at::parallel_for(0, segments * pieces, grain, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t e = i / pieces, row = begin[e], column = i % pieces * kColumns;
        AddSegment(from + row * h, factor ? factor + row : nullptr, begin[e + 1] - row, h, column,
                   std::min(h, column + kColumns), to + e * h);
      }
    });
  });
}

}  // namespace disagmoe::cpu
