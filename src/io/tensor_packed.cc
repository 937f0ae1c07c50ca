#include "io/tensor_packed.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/error.h"

namespace disagmoe {
namespace {

constexpr int64_t kBlock = 128;  // rows and columns that share a scale
constexpr int64_t kGroup = 32;   // MXFP4 numbers that share one, in 16 bytes

int64_t Blocks(int64_t n) { return n / kBlock + (n % kBlock != 0); }

Error BadPacking(const std::string& path, const SafetensorsEntry& got, const std::string& expected) {
  return Error({"packed tensor that does not fit its scales", path, ShownName(got.name) + " " + got.dtype + " " + ShapeText(got.shape),
                expected, {}});
}

}  // namespace

void ReadView(const BytesOf& bytes, FloatType type, const TensorView& view, float* values) {
  const int64_t element = FloatBytes(type);
  const std::vector<ViewPiece> pieces = CutView(view);
  int64_t largest = 0;
  for (const ViewPiece& p : pieces) largest = std::max(largest, p.BufferElements());
  const auto buffer = std::make_unique_for_overwrite<char[]>(static_cast<size_t>(largest * element));
  for (const ViewPiece& p : pieces) {
    const int64_t lines = p.together ? 1 : p.lines, span = p.together ? p.BufferElements() : p.LineSpan();
    for (int64_t l = 0; l < lines; ++l) {
      bytes(static_cast<uint64_t>((p.begin + l * p.line_stride) * element), buffer.get() + l * p.Pitch() * element,
            static_cast<size_t>(span * element));
    }
    PieceToValues(p, type, buffer.get(), values);
  }
}

void CheckPacking(const std::string& path, Packing packing, const SafetensorsEntry& data, const SafetensorsEntry& scales) {
  std::vector<int64_t> shape = data.shape;
  if (packing == Packing::kFp8Blocks) {
    if (data.dtype != "F8_E4M3" || shape.size() < 2) throw BadPacking(path, data, "F8_E4M3 [.., rows, columns], as it has _scale_inv");
    for (size_t i = shape.size() - 2; i < shape.size(); ++i) shape[i] = Blocks(shape[i]);
    const auto type = FindFloatType(scales.dtype);
    if (!type || type == FloatType::kE4M3 || scales.shape != shape) {
      throw BadPacking(path, scales, "F32 " + ShapeText(shape) + " for blocks of 128 x 128 of " + ShapeText(data.shape));
    }
    return;
  }
  const bool shaped = shape.size() >= 3 && shape.back() == kGroup / 2 && shape[shape.size() - 2] <= INT64_MAX / kGroup;
  if (data.dtype != "U8" || !shaped) {
    throw BadPacking(path, data, "U8 [.., rows, groups, 16]");
  }
  shape.pop_back();
  if (scales.dtype != "U8" || scales.shape != shape) throw BadPacking(path, scales, "U8 " + ShapeText(shape));
}

void ScaleBlocks(const std::vector<int64_t>& shape, const std::vector<float>& factors, const TensorView& view, float* values) {
  const int64_t rows = shape[shape.size() - 2], columns = shape.back();
  for (int64_t i = 0; i < view.rows; ++i) {
    for (int64_t j = 0; j < view.columns;) {
      const int64_t at = view.begin + i * view.row_stride + j * view.column_stride;
      const int64_t column = at % columns, row = at / columns % rows, matrix = at / columns / rows;
      int64_t run = 1;  // values that share the factor
      if (view.column_stride == 1) run = std::min({kBlock - column % kBlock, columns - column, view.columns - j});
      const float factor =
          factors[static_cast<size_t>((matrix * Blocks(rows) + row / kBlock) * Blocks(columns) + column / kBlock)];
      float* v = values + i * view.columns + j;
      for (int64_t k = 0; k < run; ++k) v[k] *= factor;
      j += run;
    }
  }
}

std::vector<int64_t> Mxfp4Shape(const std::vector<int64_t>& blocks) {
  std::vector<int64_t> shape(blocks.begin(), blocks.end() - 3);
  shape.push_back(blocks[blocks.size() - 2] * kGroup);
  shape.push_back(blocks[blocks.size() - 3]);
  return shape;
}

void ReadMxfp4(const BytesOf& blocks, const BytesOf& scales, const std::vector<int64_t>& blocks_shape, const TensorView& view,
               float* values) {
  if (view.rows == 0 || view.columns == 0) return;
  const int64_t rows = blocks_shape[blocks_shape.size() - 3], groups = blocks_shape[blocks_shape.size() - 2];
  const int64_t depth = groups * kGroup, matrix_size = rows * depth;
  // One matrix in memory at a time.
  std::vector<uint8_t> numbers(static_cast<size_t>(matrix_size / 2)), powers(static_cast<size_t>(rows * groups));
  int64_t loaded = -1;
  const auto load = [&](int64_t matrix) {
    if (matrix == std::exchange(loaded, matrix)) return;
    blocks(static_cast<uint64_t>(matrix) * numbers.size(), numbers.data(), numbers.size());
    scales(static_cast<uint64_t>(matrix) * powers.size(), powers.data(), powers.size());
  };
  const auto power = [&](int64_t row, int64_t k) { return FromE8M0(powers[static_cast<size_t>(row * groups + k / kGroup)]); };
  const auto number = [&](int64_t row, int64_t k) {
    const uint8_t byte = numbers[static_cast<size_t>((row * depth + k) / 2)];
    return FromE2M1(k % 2 == 0 ? byte : static_cast<uint8_t>(byte >> 4));
  };
  for (int64_t i = 0; i < view.rows; ++i) {
    float* out = values + i * view.columns;
    const int64_t begin = view.begin + i * view.row_stride;
    const int64_t row = begin % rows, k = begin / rows % depth;
    if (view.column_stride == rows && k + view.columns <= depth) {  // along the groups
      load(begin / matrix_size);
      for (int64_t j = 0; j < view.columns;) {
        const int64_t end = std::min(view.columns, j + kGroup - (k + j) % kGroup);
        for (const float factor = power(row, k + j); j < end; ++j) out[j] = number(row, k + j) * factor;
      }
      continue;
    }
    for (int64_t j = 0; j < view.columns; ++j) {
      const int64_t at = begin + j * view.column_stride;
      load(at / matrix_size);
      out[j] = number(at % rows, at / rows % depth) * power(at % rows, at / rows % depth);
    }
  }
}

}  // namespace disagmoe
