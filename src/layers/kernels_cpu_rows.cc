// Copying and summing of rows on the CPU.
#include <ATen/ATen.h>

#include <cstring>

#include "layers/kernels_cpu.h"
#include "layers/lanes.h"

namespace disagmoe::cpu {
namespace {

// out (+)= sum of src[position[j]] for j in [begin, end). Four blocks at a time share one walk over the positions.
template <class T>
void SumRow(const T* src, const int32_t* position, int32_t begin, int32_t end, int64_t h, T* out, bool add) {
  int64_t i = 0;
  for (; i + 4 * kLanes <= h; i += 4 * kLanes) {
    Lanes sum[4] = {};
    for (int32_t j = begin; j < end; ++j) {
      const T* row = src + position[j] * h + i;
      for (int64_t b = 0; b < 4; ++b) sum[b] += Load(row + b * kLanes, Full{});
    }
    for (int64_t b = 0; b < 4; ++b) {
      T* to = out + i + b * kLanes;
      Store(to, add ? Load(to, Full{}) + sum[b] : sum[b], Full{});
    }
  }
  ForLanes(h - i, [&](int64_t tail, auto span) {
    Lanes sum{};
    for (int32_t j = begin; j < end; ++j) sum += Load(src + position[j] * h + i + tail, span);
    T* to = out + i + tail;
    Store(to, add ? Load(to, span) + sum : sum, span);
  });
}

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

void SumRows(const Tensor& src, const Tensor& position, const Tensor& offsets, Tensor& out, bool add) {
  const int64_t rows = src.size(0);
  const int64_t h = src.size(1);
  const int64_t positions = position.size(0);
  const int32_t* from = position.const_data_ptr<int32_t>();
  const int32_t* offset = offsets.const_data_ptr<int32_t>();
  const int64_t tokens = out.size(0);
  const int64_t mean = tokens > 0 ? 1 + positions / tokens : 1;
  ForType(src.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* in = src.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    at::parallel_for(0, tokens, Grain(mean * h), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        DM_CHECK(offset[t] >= 0 && offset[t] <= offset[t + 1] && offset[t + 1] <= positions,
                 "offsets of token " + std::to_string(t));
        for (int32_t j = offset[t]; j < offset[t + 1]; ++j) {
          DM_CHECK(from[j] >= 0 && from[j] < rows, "row " + std::to_string(from[j]) + " of " + std::to_string(rows));
        }
        SumRow(in, from, offset[t], offset[t + 1], h, to + t * h, add);
      }
    });
  });
}

}  // namespace disagmoe::cpu
