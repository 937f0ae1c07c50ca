// What crosses between the stages, as messages (system.md section 4). One message per pair of workers, layer, micro-batch
// and direction, also when it has no rows; sizes travel inside. Rows are in the dtype of computation.
//
//   dispatch  A(l) -> F(l)     one row per token and distinct FFN worker; token ids, (expert, gate) pairs, home rows
//   combine   F(l) -> A(l+1) or head     one row per received row, to the worker that owns the token
//   backward over a combine: the gradient rows, in the order in which the rows came
//   backward over a dispatch: the gradient rows, the gate gradients, and the experts' token counts
//
// n rows, H hidden, P pairs, e experts of the FFN worker. Everything is little-endian int32/float32, rows 64-byte aligned.
#pragma once

#include <cstdint>
#include <vector>

#include "layers/blocks.h"
#include "runtime/topology.h"
#include "transport/transport.h"

namespace disagmoe {

using AllocateFn = std::function<Buffer(size_t)>;

// Where one worker's tokens go: for each FFN worker of the next stage.
struct Route {
  std::vector<int32_t> token;  // rows: index in the slice, ascending
  RowPairs pairs;              // experts local to the FFN worker
  std::vector<int32_t> slot;   // of each pair: token * K + k in the slice, to bring gate gradients home
  Tensor token_index;          // `token` as a tensor; undefined if the route has every token of the slice
};
// ids, gates [T, K] (undefined: a dense layer, tokens go home); first_token: of the slice within the micro-batch.
std::vector<Route> MakeRoutes(const Topology& topology, int64_t layer, const Tensor& ids, const Tensor& gates,
                              int64_t tokens, int64_t first_token);

struct Dispatch {
  std::vector<int32_t> token;  // index in the micro-batch
  RowPairs pairs;
  Tensor rows;                 // [n, H], a view of the message
};
Buffer PackDispatch(const Route& route, int64_t first_token, const Tensor& h, const AllocateFn& allocate);
Dispatch UnpackDispatch(const Buffer& message, int64_t hidden, at::ScalarType dtype, at::Device device);

struct Combine {
  std::vector<int32_t> token;
  Tensor rows;
};
// Rows [begin, end) of out, and their tokens.
Buffer PackCombine(const std::vector<int32_t>& token, const Tensor& out, int64_t begin, int64_t end,
                   const AllocateFn& allocate);
Combine UnpackCombine(const Buffer& message, int64_t hidden, at::ScalarType dtype, at::Device device);

// Gradient rows: rows of d picked by index (undefined: all), in order.
Buffer PackRows(const Tensor& d, const Tensor& index, const AllocateFn& allocate);
Tensor UnpackRows(const Buffer& message, int64_t rows, int64_t hidden, at::ScalarType dtype, at::Device device);

struct DispatchGradient {
  Tensor rows;                 // [n, H]
  std::vector<float> d_gates;  // [P]
  std::vector<float> counts;   // [e], or empty
};
Buffer PackDispatchGradient(const Tensor& d, int64_t begin, int64_t end, const float* d_gates, int64_t pairs,
                            const std::vector<float>& counts, const AllocateFn& allocate);
DispatchGradient UnpackDispatchGradient(const Buffer& message, int64_t hidden, at::ScalarType dtype, at::Device device);

// Bytes of rows alone, for n rows: what the formula d H (bytes per element) counts.
inline int64_t RowBytes(int64_t rows, int64_t hidden, at::ScalarType dtype) {
  return rows * hidden * static_cast<int64_t>(c10::elementSize(dtype));
}

}  // namespace disagmoe
