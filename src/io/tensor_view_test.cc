// Views against the definition, element by element, and what counts as written exactly once.
#include "io/tensor_view.h"

#include <algorithm>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/rng.h"
#include "io/tensor_packed.h"

namespace disagmoe {
namespace {

int64_t Last(const TensorView& v) { return v.begin + (v.rows - 1) * v.row_stride + (v.columns - 1) * v.column_stride; }

// Some of each kind: rows, columns, transposed, interleaved, with gaps, single lines, larger than a piece.
std::vector<TensorView> Views() {
  std::vector<TensorView> views = {
      {0, 1, 0, 700000, 1},        {5, 700, 1000, 1000, 1},   {3, 300, 2000, 100, 1},     {0, 10, 100000, 90000, 1},
      {0, 1000, 1, 700, 1000},     {1, 100, 2, 70, 200},      {0, 65, 2, 129, 130},       {7, 3000, 1, 3, 300000},
      {0, 2, 1, 100, 2},           {0, 100, 2, 2, 1},         {4, 1, 77, 50, 13},         {4, 50, 13, 1, 77},
      {0, 3, 400000, 2, 300000},   {0, 40000, 2, 17, 80000},  {0, 1, 0, 1, 1},            {9, 0, 5, 3, 1},
      {0, 20000, 1, 20, 20000},    {0, 500, 600, 64, 9},      {0, 64, 9, 500, 600},       {0, 1000, 513, 1, 1},
  };
  Rng rng(3);
  for (int i = 0; i < 60; ++i) {
    const auto any = [&](uint64_t n) { return static_cast<int64_t>(1 + rng.Below(n)); };
    views.push_back({any(50) - 1, any(90), any(300), any(90), any(300)});
  }
  return views;
}

TEST(TensorView, PiecesAreTheViewForEveryType) {
  for (const TensorView& v : Views()) {
    const size_t size = static_cast<size_t>(v.rows == 0 ? 10 : Last(v) + 1);
    for (FloatType type : {FloatType::kBF16, FloatType::kF32, FloatType::kE4M3}) {
      const size_t element = static_cast<size_t>(FloatBytes(type));
      std::vector<char> stored(size * element);
      Rng rng(size);
      for (char& c : stored) c = static_cast<char>(rng.Below(0x70));  // no NaN in any of the types
      std::vector<float> all(size), values(static_cast<size_t>(v.rows * v.columns), -1);
      ToFloats(type, stored.data(), 1, static_cast<int64_t>(size), all.data());
      uint64_t moved = 0;
      const BytesOf bytes = [&](uint64_t offset, void* data, size_t n) {
        ASSERT_LE(offset + n, stored.size());
        std::copy_n(stored.data() + offset, n, static_cast<char*>(data));
        moved += n;
      };
      ReadView(bytes, type, v, values.data());
      for (int64_t i = 0; i < v.rows; ++i) {
        for (int64_t j = 0; j < v.columns; ++j) {
          ASSERT_EQ(values[static_cast<size_t>(i * v.columns + j)],
                    all[static_cast<size_t>(v.begin + i * v.row_stride + j * v.column_stride)])
              << i << "," << j << " of " << v.rows << "x" << v.columns << " " << v.row_stride << " " << v.column_stride;
        }
      }
      EXPECT_LE(moved, stored.size() * 3);  // overlapping views of random strides aside, not much more than there is
    }
  }
}

TEST(TensorView, PiecesAreSmall) {
  for (const TensorView& v : Views()) {
    for (const ViewPiece& p : CutView(v)) EXPECT_LE(p.BufferElements(), 2 * 256 * 1024);
  }
  const TensorView large{0, 1, 0, int64_t{1} << 30, 1};
  for (const ViewPiece& p : CutView(large)) ASSERT_LE(p.BufferElements(), 256 * 1024);
}

TEST(TensorView, ValuesGoWhereTheyCameFrom) {
  for (const TensorView& v : Views()) {
    std::set<int64_t> places;
    for (int64_t i = 0; i < v.rows; ++i) {
      for (int64_t j = 0; j < v.columns; ++j) places.insert(v.begin + i * v.row_stride + j * v.column_stride);
    }
    if (static_cast<int64_t>(places.size()) < v.rows * v.columns || v.rows == 0) continue;  // an element twice
    std::vector<float> values(places.size());
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    std::vector<float> stored(static_cast<size_t>(Last(v) + 1), -5);
    ConversionLosses losses;
    for (const ViewPiece& p : CutView(v)) {
      std::vector<float> buffer(static_cast<size_t>(p.BufferElements()));
      const int64_t lines = p.together ? 1 : p.lines, span = p.together ? p.BufferElements() : p.LineSpan();
      for (int64_t l = 0; l < lines; ++l) {
        std::copy_n(stored.data() + p.begin + l * p.line_stride, span, buffer.data() + l * p.Pitch());
      }
      ValuesToPiece(p, FloatType::kF32, values.data(), buffer.data(), &losses);
      for (int64_t l = 0; l < lines; ++l) {
        std::copy_n(buffer.data() + l * p.Pitch(), span, stored.data() + p.begin + l * p.line_stride);
      }
    }
    for (int64_t i = 0; i < v.rows; ++i) {
      for (int64_t j = 0; j < v.columns; ++j) {
        ASSERT_EQ(stored[static_cast<size_t>(v.begin + i * v.row_stride + j * v.column_stride)], i * v.columns + j);
      }
    }
    EXPECT_EQ(std::count(stored.begin(), stored.end(), -5.f), static_cast<int64_t>(stored.size() - places.size()));
  }
}

TEST(TensorView, OutsideIsRefused) {
  const int64_t most = INT64_MAX;
  for (const TensorView& v : {TensorView{0, 1, 0, 11, 1}, {-1, 1, 0, 1, 1}, {0, 2, 10, 1, 1}, {0, 2, 5, 6, 1}, {10, 1, 0, 1, 1},
                              {0, 2, 0, 2, 1}, {0, 2, -1, 2, 1}, {0, -1, 1, 1, 1}, {0, most, most, 2, 1}, {0, 2, most, 2, most},
                              {most, 1, 0, 2, most}}) {
    EXPECT_THROW(CheckView("x", v, 10), InternalError) << v.begin << " " << v.rows << " " << v.columns;
  }
  for (const TensorView& v : {TensorView{0, 1, 0, 10, 1}, {9, 1, -7, 1, -7}, {0, 2, 5, 5, 1}, {0, 5, 1, 2, 5}, {10, 0, 0, 0, 0}}) {
    EXPECT_NO_THROW(CheckView("x", v, 10));
  }
}

TEST(WrittenElements, ExactlyOnceInAnyOrderAndForm) {
  // A matrix of 6 x 8, as rows, columns, interleaved columns, and quarters.
  const std::vector<std::vector<TensorView>> right = {
      {{0, 6, 8, 8, 1}},
      {WholeTensor(48)},
      {{8, 5, 8, 8, 1}, {0, 1, 0, 8, 1}},
      {{0, 8, 1, 6, 8}},
      {{1, 4, 2, 6, 8}, {0, 4, 2, 6, 8}},
      {{0, 3, 8, 4, 1}, {28, 3, 8, 4, 1}, {4, 3, 8, 4, 1}, {24, 3, 8, 4, 1}},
  };
  const std::vector<std::vector<TensorView>> wrong = {
      {},
      {{0, 5, 8, 8, 1}},
      {{0, 6, 8, 8, 1}, {0, 1, 0, 1, 1}},
      {{0, 3, 8, 8, 1}, {0, 3, 8, 8, 1}},              // half of it twice
      {{0, 4, 2, 6, 8}, {0, 4, 2, 6, 8}},              // the even columns twice
      {{0, 3, 8, 4, 1}, {28, 3, 8, 4, 1}, {4, 3, 8, 4, 1}, {25, 3, 8, 4, 1}},  // a quarter beside its place
      {{0, 6, 7, 8, 1}},                               // overlaps itself
  };
  const auto problem = [](const std::vector<TensorView>& views) {
    WrittenElements written;
    for (const TensorView& v : views) written.Add(v);
    return written.Problem(48);
  };
  for (const auto& views : right) EXPECT_EQ(problem(views), "");
  for (const auto& views : wrong) EXPECT_NE(problem(views), "");
  EXPECT_EQ(problem({{0, 5, 8, 8, 1}}), "40 of 48 elements written");
  EXPECT_EQ(WrittenElements().Problem(0), "");
}

// Random cuts of a large tensor; one element moved makes them wrong.
TEST(WrittenElements, LargeOnes) {
  Rng rng(9);
  for (int round = 0; round < 200; ++round) {
    const int64_t rows = 1 + static_cast<int64_t>(rng.Below(100000)), columns = 2 + static_cast<int64_t>(rng.Below(100000));
    const int64_t cut = static_cast<int64_t>(rng.Below(static_cast<uint64_t>(rows))), n = rows * columns;
    WrittenElements good, bad;
    for (WrittenElements* w : {&good, &bad}) w->Add({0, columns, 1, cut, columns});
    good.Add({cut * columns, rows - cut, columns, columns, 1});
    bad.Add({cut * columns, 1, 0, n - cut * columns - 1, 1});
    bad.Add({static_cast<int64_t>(rng.Below(static_cast<uint64_t>(n - 1))), 1, 0, 1, 1});
    EXPECT_EQ(good.Problem(n), "");
    EXPECT_NE(bad.Problem(n), "");
  }
}

}  // namespace
}  // namespace disagmoe
