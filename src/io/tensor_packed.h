// Stored bytes of a tensor as values: plain numbers, and the two packed forms that published models use. Private to this
// folder.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "io/float_types.h"
#include "io/safetensors_header.h"
#include "io/tensor_view.h"

namespace disagmoe {

enum class Packing {
  kNone,
  kFp8Blocks,  // F8_E4M3 [.., r, c] times a scale for each block of 128 x 128
  kMxfp4,      // U8 [.., r, g, 16]: 32 numbers of 4 bits, the lower half of a byte first; U8 [.., r, g]: their power of two
};

// Fills `data` with bytes of a stored tensor.
using BytesOf = std::function<void(uint64_t offset, void* data, size_t bytes)>;

void ReadView(const BytesOf& bytes, FloatType type, const TensorView& view, float* values);

// Throws Error unless dtypes and shapes are what the packing needs.
void CheckPacking(const std::string& path, Packing packing, const SafetensorsEntry& data, const SafetensorsEntry& scales);
// Multiplies the view's values by the factors of their blocks.
void ScaleBlocks(const std::vector<int64_t>& shape, const std::vector<float>& factors, const TensorView& view, float* values);

// The shape of the parameter that lies as `blocks`: [.., 32 g, r].
std::vector<int64_t> Mxfp4Shape(const std::vector<int64_t>& blocks);
// A view of that parameter. Fastest where columns run along the groups.
void ReadMxfp4(const BytesOf& blocks, const BytesOf& scales, const std::vector<int64_t>& blocks_shape, const TensorView& view,
               float* values);

}  // namespace disagmoe
