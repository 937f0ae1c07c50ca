#include "io/tensor_view.h"

#include <algorithm>

#include "base/error.h"

namespace disagmoe {
namespace {

constexpr int64_t kPieceElements = 256 * 1024;
constexpr int64_t kTile = 64;  // of a transposition: 16 KB of floats

bool Mul(int64_t a, int64_t b, int64_t* product) { return !__builtin_mul_overflow(a, b, product); }

// The two directions of a view: lines run along the one, and follow one another along the other.
struct Direction {
  int64_t count, stride, value_stride;
};

void AddPieces(const TensorView& view, Direction line, Direction next, std::vector<ViewPiece>* pieces) {
  const bool transposed = line.value_stride != 1 && line.count > 1;
  // Transposed, some sixteen lines must fit, so that runs of values fill cache lines.
  const int64_t room = transposed ? kPieceElements / 16 : kPieceElements;
  const int64_t length = std::min(line.count, std::max<int64_t>(1, room / line.stride));
  const int64_t span = (length - 1) * line.stride + 1;
  const bool near = next.stride <= 2 * span || next.stride <= 512;
  const bool together = length == line.count && next.count > 1 && near && next.stride <= kPieceElements / 2;
  int64_t lines = std::max<int64_t>(1, kPieceElements / (together ? next.stride : span));
  if (lines > 16) lines -= lines % 16;
  for (int64_t at = 0; at < next.count; at += lines) {
    for (int64_t along = 0; along < line.count; along += length) {
      pieces->push_back({view.begin + at * next.stride + along * line.stride, std::min(lines, next.count - at), next.stride,
                         std::min(length, line.count - along), line.stride, at * next.value_stride + along * line.value_stride,
                         next.value_stride, line.value_stride, together});
    }
  }
}

}  // namespace

void CheckView(const std::string& name, const TensorView& v, int64_t elements) {
  int64_t last_row = 0, last_column = 0;
  const bool sane = v.begin >= 0 && v.rows >= 0 && v.columns >= 0 && (v.rows <= 1 || v.row_stride > 0) &&
                    (v.columns <= 1 || v.column_stride > 0);
  const bool empty = v.rows == 0 || v.columns == 0;
  const bool fits = sane && (empty || (Mul(v.rows - 1, v.rows > 1 ? v.row_stride : 0, &last_row) &&
                                       Mul(v.columns - 1, v.columns > 1 ? v.column_stride : 0, &last_column) &&
                                       v.begin <= elements && last_row <= elements - v.begin &&
                                       last_column < elements - v.begin - last_row));
  DM_CHECK(fits, name + ": a view of " + std::to_string(v.rows) + " x " + std::to_string(v.columns) + " from " +
                     std::to_string(v.begin) + " with strides " + std::to_string(v.row_stride) + " and " +
                     std::to_string(v.column_stride) + " in " + std::to_string(elements) + " elements");
}

std::vector<ViewPiece> CutView(const TensorView& view) {
  std::vector<ViewPiece> pieces;
  if (view.rows == 0 || view.columns == 0) return pieces;
  Direction row = {view.columns, view.columns > 1 ? view.column_stride : 1, 1};
  Direction column = {view.rows, view.rows > 1 ? view.row_stride : 1, view.columns};
  if (row.count > 1 && (column.count == 1 || column.stride == row.count * row.stride)) {
    row.count *= column.count;  // one line: the rows follow one another
    column = {1, 1, 1};
  }
  const bool by_rows = column.count == 1 || (row.count > 1 && row.stride <= column.stride);
  by_rows ? AddPieces(view, row, column, &pieces) : AddPieces(view, column, row, &pieces);
  return pieces;
}

void PieceToValues(const ViewPiece& p, FloatType type, const void* buffer, float* values) {
  const char* bytes = static_cast<const char*>(buffer);
  const int64_t element = FloatBytes(type);
  if (p.value_stride == 1 || p.length == 1) {
    for (int64_t l = 0; l < p.lines; ++l) {
      ToFloats(type, bytes + l * p.Pitch() * element, p.stride, p.length, values + p.value + l * p.value_line_stride);
    }
    return;
  }
  float tile[kTile][kTile];  // lines run down the values' columns: value_line_stride is 1
  for (int64_t begin = 0; begin < p.length; begin += kTile) {
    const int64_t length = std::min(kTile, p.length - begin);
    for (int64_t first = 0; first < p.lines; first += kTile) {
      const int64_t lines = std::min(kTile, p.lines - first);
      for (int64_t l = 0; l < lines; ++l) {
        ToFloats(type, bytes + ((first + l) * p.Pitch() + begin * p.stride) * element, p.stride, length, tile[l]);
      }
      for (int64_t i = 0; i < length; ++i) {
        float* out = values + p.value + (begin + i) * p.value_stride + first;
        for (int64_t l = 0; l < lines; ++l) out[l] = tile[l][i];
      }
    }
  }
}

void ValuesToPiece(const ViewPiece& p, FloatType type, const float* values, void* buffer, ConversionLosses* losses) {
  char* bytes = static_cast<char*>(buffer);
  const int64_t element = FloatBytes(type);
  if (p.value_stride == 1 || p.length == 1) {
    for (int64_t l = 0; l < p.lines; ++l) {
      FromFloats(type, values + p.value + l * p.value_line_stride, p.length, bytes + l * p.Pitch() * element, p.stride, losses);
    }
    return;
  }
  float tile[kTile][kTile];  // lines run down the values' columns: value_line_stride is 1
  for (int64_t begin = 0; begin < p.length; begin += kTile) {
    const int64_t length = std::min(kTile, p.length - begin);
    for (int64_t first = 0; first < p.lines; first += kTile) {
      const int64_t lines = std::min(kTile, p.lines - first);
      for (int64_t i = 0; i < length; ++i) {
        const float* in = values + p.value + (begin + i) * p.value_stride + first;
        for (int64_t l = 0; l < lines; ++l) tile[l][i] = in[l];
      }
      for (int64_t l = 0; l < lines; ++l) {
        FromFloats(type, tile[l], length, bytes + ((first + l) * p.Pitch() + begin * p.stride) * element, p.stride, losses);
      }
    }
  }
}

// The sum of base^place over all places, in the field of 2^61 - 1 elements: two different sets of places (with their
// counts) agree for at most as many bases as there are elements, so hardly for this one. A view's sum is a product of two
// geometric sums.
namespace {

constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;
constexpr uint64_t kBase = 0x0f3a9c6d21e58b47;  // any number

uint64_t Times(uint64_t a, uint64_t b) { return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b % kPrime); }
uint64_t Plus(uint64_t a, uint64_t b) { return (a + b) % kPrime; }

uint64_t Power(uint64_t base, uint64_t exponent) {
  uint64_t result = 1;
  for (; exponent > 0; exponent >>= 1, base = Times(base, base)) {
    if (exponent & 1) result = Times(result, base);
  }
  return result;
}

// 1 + q + ... + q^(n - 1)
uint64_t GeometricSum(uint64_t q, int64_t n) {
  if (q == 1) return static_cast<uint64_t>(n) % kPrime;
  const uint64_t top = Plus(Power(q, static_cast<uint64_t>(n)), kPrime - 1);
  return Times(top, Power(Plus(q, kPrime - 1), kPrime - 2));
}

uint64_t SumOf(const TensorView& v) {
  const uint64_t rows = GeometricSum(Power(kBase, static_cast<uint64_t>(v.row_stride)), v.rows);
  const uint64_t columns = GeometricSum(Power(kBase, static_cast<uint64_t>(v.column_stride)), v.columns);
  return Times(Power(kBase, static_cast<uint64_t>(v.begin)), Times(rows, columns));
}

}  // namespace

void WrittenElements::Add(const TensorView& view) {
  count_ += view.rows * view.columns;
  sum_ = Plus(sum_, SumOf(view));
}

std::string WrittenElements::Problem(int64_t elements) const {
  const std::string counts = std::to_string(count_) + " of " + std::to_string(elements) + " elements written";
  if (count_ != elements) return counts;
  return sum_ == SumOf(WholeTensor(elements)) ? "" : counts + ", but some twice and some never";
}

}  // namespace disagmoe
