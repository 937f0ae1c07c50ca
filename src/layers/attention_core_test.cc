// Attention against a slow, obvious one: fp64, autograd, an s x s matrix of what each query sees.
#include "layers/attention_core.h"

#include <malloc.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include "base/error.h"
#include "layers/kernels_testing.h"

namespace disagmoe {
namespace {

using testing::Double;
using testing::Leaf;

// What `query` sees among the rows of its sequence, from the definitions of windows and documents.
Tensor Seen(int64_t s, int64_t sequence, const AttentionShape& shape) {
  Tensor seen = at::zeros({s, s}, at::kBool);
  auto document = [&](int64_t row) {  // the last that begins at or before a row
    int64_t d = sequence * s;
    for (int64_t first : shape.documents) {
      if (first <= sequence * s + row) d = std::max(d, first);
    }
    return d;
  };
  for (int64_t i = 0; i < s; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      seen[i][j] = document(i) == document(j) && (shape.window == 0 || i - j < shape.window);
    }
  }
  return seen;
}

Tensor Naive(const AttentionInputs& in, const AttentionShape& shape, const Tensor& sinks, const std::vector<Tensor>& seen) {
  const int64_t s = in.q.size(1), nh = in.q.size(2), nkv = in.k.size(2);
  std::vector<Tensor> sequences;
  for (int64_t b = 0; b < in.q.size(0); ++b) {
    std::vector<Tensor> heads;
    for (int64_t n = 0; n < nh; ++n) {
      const Tensor q = in.q[b].select(1, n), v = in.v[b].select(1, n / (nh / nkv));
      Tensor k = in.k[b].select(1, n / (nh / nkv));
      if (in.tail.defined()) k = at::cat({k, in.tail[b].select(1, 0)}, 1);
      const double scale = shape.scale != 0 ? shape.scale : 1 / std::sqrt(static_cast<double>(q.size(1)));
      const Tensor weights = at::where(seen[b], at::exp(at::matmul(q, k.t()) * scale), at::zeros({}, at::kDouble));
      Tensor sum = weights.sum(1, true);
      if (sinks.defined()) sum = sum + sinks[n].exp();
      heads.push_back(at::matmul(weights / sum, v));
    }
    sequences.push_back(at::stack(heads, 1));
  }
  return at::stack(sequences).view({in.q.size(0), s, nh, in.v.size(3)});
}

// Of the largest value; gradients that are zero (a window of one row) have no such.
double Error(const Tensor& got, const Tensor& want) {
  return (Double(got) - want).abs().max().item<double>() / std::max(1.0, want.abs().max().item<double>());
}

struct Sizes {
  int64_t nh, nkv, d, dv, tail;
};

// q, k, v as slices of wider rows, as layers have them.
AttentionInputs Random(const Sizes& z, int64_t B, int64_t s, at::ScalarType type) {
  const auto slice = [&](int64_t n, int64_t w) { return at::randn({B, s, n, w + 8}).to(type).narrow(3, 8, w); };
  return {slice(z.nh, z.d), slice(z.nkv, z.d - z.tail), slice(z.nkv, z.dv), z.tail > 0 ? slice(1, z.tail) : Tensor()};
}

AttentionInputs Like(const AttentionInputs& in) {
  const auto like = [](const Tensor& x) { return x.defined() ? at::full_like(x, NAN) : Tensor(); };
  return {like(in.q), like(in.k), like(in.v), like(in.tail)};
}

struct Tolerances {
  double out, gradient;
};

void Compare(const Sizes& z, const AttentionShape& shape, at::ScalarType type, Tolerances tolerance) {
  const int64_t B = 2, s = 100;
  const AttentionInputs in = Random(z, B, s, type);
  const AttentionInputs leaf{Leaf(in.q), Leaf(in.k), Leaf(in.v), in.tail.defined() ? Leaf(in.tail) : Tensor()};
  const Tensor sinks = shape.sinks.defined() ? Leaf(shape.sinks) : Tensor();
  const Tensor go = at::randn({B, s, z.nh, z.dv}).to(type);
  const Tensor want = Naive(leaf, shape, sinks, {Seen(s, 0, shape), Seen(s, 1, shape)});
  std::vector<Tensor> leaves = {leaf.q, leaf.k, leaf.v};
  if (leaf.tail.defined()) leaves.push_back(leaf.tail);
  if (sinks.defined()) leaves.push_back(sinks);
  const auto grads = testing::Grad(want, go, leaves);
  for (const bool own : {true, false}) {
    SCOPED_TRACE(own ? "cpu" : "generic");
    Tensor o = at::full_like(go, NAN), d_sinks = sinks.defined() ? at::full({z.nh}, 2.0, at::kFloat) : Tensor();
    AttentionInputs d = Like(in);
    if (own) {
      const Tensor lse = CausalAttention(in, shape, o);
      CausalAttentionBackward(go, in, shape, o, lse, d, d_sinks);
    } else {
      generic::CausalAttention(in, shape, o);
      generic::CausalAttentionBackward(go, in, shape, d, d_sinks);
    }
    EXPECT_LT(Error(o, want), tolerance.out);
    EXPECT_LT(Error(d.q, grads[0]), tolerance.gradient);
    EXPECT_LT(Error(d.k, grads[1]), tolerance.gradient);
    EXPECT_LT(Error(d.v, grads[2]), tolerance.gradient);
    if (in.tail.defined()) {
      EXPECT_LT(Error(d.tail, grads[3]), tolerance.gradient);
    }
    if (sinks.defined()) {
      EXPECT_LT(Error(d_sinks - 2, grads.back()), tolerance.gradient);
    }
  }
}

class CausalAttentionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    at::manual_seed(3);
    at::set_num_threads(1);
  }
};

// Windows of less than a block of queries, of more than one, and of the whole sequence; documents of one row, within and
// over blocks; one that begins where a sequence does, one sequence without.
TEST_F(CausalAttentionTest, EverythingTogether) {
  const std::vector<std::vector<int64_t>> documents = {{}, {0, 1, 40, 41, 99, 100, 160}, {70}};
  for (const Sizes& z : {Sizes{4, 4, 16, 16, 0}, Sizes{6, 2, 16, 16, 0}, Sizes{2, 2, 24, 16, 8}, Sizes{2, 2, 8, 16, 4}}) {
    for (int64_t window : {0, 1, 20, 80, 100}) {
      for (bool sinks : {false, true}) {
        for (const auto& first : documents) {
          AttentionShape shape{window, sinks ? 0.31 : 0, sinks ? at::randn({z.nh}) * 2 : Tensor(), first};
          SCOPED_TRACE(::testing::Message() << "heads " << z.nh << "/" << z.nkv << " of " << z.d << "+" << z.dv << " window "
                                            << window << " sinks " << sinks << " documents " << first.size());
          Compare(z, shape, at::kFloat, {2e-6, 5e-6});
        }
      }
    }
  }
}

TEST_F(CausalAttentionTest, Bf16) {
  for (int64_t window : {0, 20}) {
    const AttentionShape shape{window, 0, at::randn({6}), {0, 30, 100}};
    Compare({6, 2, 16, 16, 0}, shape, at::kBFloat16, {1e-2, 2e-2});
    Compare({6, 6, 24, 16, 8}, shape, at::kBFloat16, {1e-2, 2e-2});
  }
}

// Sinks far below and far above the logits take nothing, or all.
TEST_F(CausalAttentionTest, ExtremeSinks) {
  const AttentionShape shape{0, 0, at::tensor({-1e4, -30.0, 4.0, 90.0}).to(at::kFloat), {}};
  Compare({4, 2, 16, 16, 0}, shape, at::kFloat, {1e-5, 1e-5});
}

TEST_F(CausalAttentionTest, SinksMatchFiniteDifferences) {
  const int64_t B = 2, s = 9, nh = 4;
  const AttentionInputs in{at::randn({B, s, nh, 8}, at::kDouble), at::randn({B, s, 2, 8}, at::kDouble),
                           at::randn({B, s, 2, 8}, at::kDouble), {}};
  AttentionShape shape{4, 0, at::randn({nh}, at::kDouble), {0, 5}};
  const Tensor go = at::randn({B, s, nh, 8}, at::kDouble);
  Tensor o = at::empty_like(go);
  const Tensor expected = testing::FiniteDifference(
      [&] {
        generic::CausalAttention(in, shape, o);
        return testing::Dot(o, go);
      },
      shape.sinks);
  AttentionShape single = shape;
  single.sinks = shape.sinks.to(at::kFloat);
  const auto to_float = [](const Tensor& x) { return x.to(at::kFloat); };
  const AttentionInputs in32{to_float(in.q), to_float(in.k), to_float(in.v), {}};
  AttentionInputs d = Like(in32);
  Tensor o32 = at::empty_like(to_float(go)), d_sinks = at::zeros({nh});
  const Tensor lse = CausalAttention(in32, single, o32);
  CausalAttentionBackward(to_float(go), in32, single, o32, lse, d, d_sinks);
  EXPECT_LT(Error(d_sinks, expected), 2e-6);
}

TEST_F(CausalAttentionTest, OneAndTwoThreadsGiveTheSameBits) {
  const AttentionInputs in = Random({4, 2, 24, 16, 8}, 2, 300, at::kFloat);
  const AttentionShape shape{100, 0, at::randn({4}), {0, 77, 300}};
  const Tensor go = at::randn({2, 300, 4, 16});
  testing::ExpectSameOnTwoThreads([&] {
    Tensor o = at::empty_like(go), d_sinks = at::zeros({4});
    const Tensor lse = CausalAttention(in, shape, o);
    AttentionInputs d = Like(in);
    CausalAttentionBackward(go, in, shape, o, lse, d, d_sinks);
    return std::vector<Tensor>{o, d.q.contiguous(), d.k.contiguous(), d.v.contiguous(), d.tail.contiguous(), d_sinks};
  });
}

TEST_F(CausalAttentionTest, RefusesWhatDoesNotFit) {
  const AttentionInputs in = Random({4, 2, 16, 16, 0}, 1, 8, at::kFloat);
  Tensor o = at::empty({1, 8, 4, 16}), narrow = at::empty({1, 8, 4, 8});
  EXPECT_ANY_THROW(CausalAttention(in, {}, narrow));
  EXPECT_ANY_THROW(CausalAttention({in.q, in.k.narrow(3, 0, 8), in.v, {}}, {}, o));
  EXPECT_ANY_THROW(CausalAttention(in, {0, 0, at::zeros({2}), {}}, o));
  EXPECT_ANY_THROW(CausalAttention(in, {0, 0, {}, {3, 1}}, o));
  EXPECT_ANY_THROW(CausalAttention(in, {0, 0, {}, {8}}, o));
}

int64_t PeakKilobytes() {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6));
  }
  return 0;
}

// 16,384 rows: a matrix of what they see would be 1 GiB in fp32; q, k, v, o and their gradients are 32 MiB.
TEST_F(CausalAttentionTest, MemoryOfAWindowIsLinear) {
  const int64_t s = 16384;
  const AttentionInputs in = Random({2, 1, 32, 32, 0}, 1, s, at::kFloat);
  const Tensor go = at::randn({1, s, 2, 32});
  AttentionInputs d = Like(in);
  Tensor o = at::empty_like(go), d_sinks = at::zeros({2});
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak begins anew
  const int64_t before = PeakKilobytes();
  const AttentionShape shape{128, 0, at::zeros({2}), {0, 5000}};
  const Tensor lse = CausalAttention(in, shape, o);
  CausalAttentionBackward(go, in, shape, o, lse, d, d_sinks);
  const int64_t added = PeakKilobytes() - before;
  RecordProperty("added_KiB", std::to_string(added));
  EXPECT_GT(before, 0);
  EXPECT_LT(added, 100 * 1024);
}

}  // namespace
}  // namespace disagmoe
