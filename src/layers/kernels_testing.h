// Shared by the tests of the kernels: comparison, the autograd reference and finite differences.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstring>
#include <functional>
#include <vector>

namespace disagmoe::testing {

using at::Tensor;

inline Tensor Double(const Tensor& t) { return t.detach().to(at::kDouble); }

// A copy in fp64 that gradients are taken for.
inline Tensor Leaf(const Tensor& t) { return Double(t).clone().requires_grad_(true); }

inline std::vector<Tensor> Grad(const Tensor& out, const Tensor& d_out, const std::vector<Tensor>& inputs) {
  return torch::autograd::grad({out}, inputs, {Double(d_out)});
}

// Error allowed relative to the largest value (sums), and to each value (rounding of the result).
struct Tolerance {
  double of_max;
  double of_value;
};
inline Tolerance ToleranceOf(at::ScalarType type) {
  if (type == at::kDouble) return {1e-12, 0};
  if (type == at::kFloat) return {1e-6, 0};
  return {1e-6, 1.0 / 256};  // bf16: 8 bits of mantissa, half a unit is 2^-9 at most
}

inline ::testing::AssertionResult Close(const Tensor& got, const Tensor& expected, Tolerance tolerance) {
  if (got.sizes() != expected.sizes()) {
    return ::testing::AssertionFailure() << "shape " << got.sizes() << " expected " << expected.sizes();
  }
  if (got.numel() == 0) return ::testing::AssertionSuccess();
  const Tensor e = Double(expected);
  const Tensor excess =
      (Double(got) - e).abs() - e.abs() * tolerance.of_value - e.abs().max() * tolerance.of_max - 1e-30;
  if ((excess <= 0).all().item<bool>()) return ::testing::AssertionSuccess();  // false for NaN
  const int64_t at = excess.argmax().item<int64_t>();
  return ::testing::AssertionFailure() << "element " << at << " is " << Double(got).flatten()[at].item<double>()
                                       << " expected " << e.flatten()[at].item<double>() << ", too far by "
                                       << excess.max().item<double>();
}
inline ::testing::AssertionResult Close(const Tensor& got, const Tensor& expected) {
  return Close(got, expected, ToleranceOf(got.scalar_type()));
}

// Same bits, NaN included.
inline ::testing::AssertionResult SameBits(const Tensor& a, const Tensor& b) {
  if (a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && a.is_contiguous() && b.is_contiguous() &&
      (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0)) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "bits differ";
}

// df/dx by central differences; x fp64.
inline Tensor FiniteDifference(const std::function<double()>& f, Tensor& x) {
  const double step = 1e-5;
  Tensor d = at::empty_like(x);
  double* p = x.mutable_data_ptr<double>();
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double value = p[i];
    p[i] = value + step;
    const double up = f();
    p[i] = value - step;
    const double down = f();
    p[i] = value;
    d.mutable_data_ptr<double>()[i] = (up - down) / (2 * step);
  }
  return d;
}

inline double Dot(const Tensor& a, const Tensor& b) { return (Double(a) * Double(b)).sum().item<double>(); }

// Runs body on one thread and on two, and compares what it returns bit by bit.
inline void ExpectSameOnTwoThreads(const std::function<std::vector<Tensor>()>& body) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const std::vector<Tensor> one = body();
  at::set_num_threads(2);
  const std::vector<Tensor> two = body();
  at::set_num_threads(threads);
  ASSERT_EQ(one.size(), two.size());
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(SameBits(one[i], two[i])) << "output " << i;
}

inline const std::vector<at::ScalarType>& Types() {
  static const std::vector<at::ScalarType> types = {at::kFloat, at::kBFloat16, at::kDouble};
  return types;
}

// The type of statistics and sums beside tensors of the type.
inline at::ScalarType SumType(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

}  // namespace disagmoe::testing
