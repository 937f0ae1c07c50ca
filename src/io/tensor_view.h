// Strided views of tensors, cut into pieces that are read or written at once. Used by io/tensor_folder.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/float_types.h"

namespace disagmoe {

// A rectangle of elements within a tensor: element (i, j) is at begin + i * row_stride + j * column_stride (in elements).
struct TensorView {
  int64_t begin = 0, rows = 0, row_stride = 0, columns = 0, column_stride = 1;
};

// All of a tensor, as one row.
inline TensorView WholeTensor(int64_t elements) { return {0, 1, elements, elements, 1}; }

// Throws InternalError unless the view lies within a tensor of so many elements. `name` is for the message.
void CheckView(const std::string& name, const TensorView& view, int64_t elements);

// Lines of elements, along whichever direction of the view is nearer in the tensor. Values of a view lie row by row.
struct ViewPiece {
  int64_t begin = 0;                               // element of the tensor
  int64_t lines = 0, line_stride = 0;              // in the tensor
  int64_t length = 0, stride = 0;                  // of a line
  int64_t value = 0, value_line_stride = 0, value_stride = 0;  // the same elements among the view's values
  bool together = false;  // the lines lie so near to each other that one span of the tensor is moved, else one a line

  int64_t LineSpan() const { return (length - 1) * stride + 1; }
  // Distance of two lines, and size in elements, of the buffer that holds what is moved.
  int64_t Pitch() const { return together ? line_stride : LineSpan(); }
  int64_t BufferElements() const { return (lines - 1) * Pitch() + LineSpan(); }
  // Nothing lies between the elements.
  bool Dense() const { return stride == 1 && (lines == 1 || Pitch() == length); }
};

// Pieces whose buffers hold about 256 Ki elements at most.
std::vector<ViewPiece> CutView(const TensorView& view);

// From a piece's buffer to the view's values, and back.
void PieceToValues(const ViewPiece& piece, FloatType type, const void* buffer, float* values);
void ValuesToPiece(const ViewPiece& piece, FloatType type, const float* values, void* buffer, ConversionLosses* losses);

// Which elements were written: a sum over a hash of their places that does not depend on the order, of O(1) size and cost.
// Right when complete and nothing was written twice; wrong otherwise but for a chance below 1e-8.
class WrittenElements {
 public:
  void Add(const TensorView& view);
  // Nothing ("") if each of so many elements was written exactly once, else what is wrong.
  std::string Problem(int64_t elements) const;

 private:
  int64_t count_ = 0;
  uint64_t sum_ = 0;
};

}  // namespace disagmoe
