#include "layers/kernels.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace disagmoe {
namespace {

TEST(Kernels, SumRowsAddsSegmentsInOrder) {
  const Tensor src = at::arange(6, at::kFloat).view({3, 2});
  const Tensor position = at::tensor({2, 0, 1}, at::kInt);
  const Tensor offsets = at::tensor({0, 2, 2, 3}, at::kInt);
  Tensor out = at::full({3, 2}, 1.0f);
  SumRows(src, position, offsets, out, /*add=*/true);
  EXPECT_TRUE(at::equal(out, at::tensor({5.f, 7.f, 1.f, 1.f, 3.f, 4.f}).view({3, 2}))) << out;
}

}  // namespace
}  // namespace disagmoe
