// RMS norm, rotary embedding and SwiGLU: fused, generic and fp64 against formulas differentiated by autograd.
#include "layers/kernels.h"

#include <array>
#include <cmath>

#include "base/error.h"
#include "layers/kernels_testing.h"

namespace disagmoe {
namespace {

using testing::Close;
using testing::Double;
using testing::Dot;
using testing::FiniteDifference;
using testing::Leaf;
using testing::SameBits;
using testing::SumType;
using testing::Types;

class KernelsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    at::manual_seed(7);
    at::set_num_threads(1);
  }
};

constexpr double kEps = 1e-3;  // large, so that leaving it out shows

Tensor NaiveRmsNorm(const Tensor& x, const Tensor& w) { return x / (x.pow(2).mean(1, true) + kEps).sqrt() * w; }

TEST_F(KernelsTest, RmsNormAndItsGradientMatchAutograd) {
  for (const at::ScalarType type : Types()) {
    for (const auto& [rows, h] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 1}, {3, 5}, {7, 16}, {0, 8}, {33, 31}, {130, 33}, {100, 512}, {1300, 48}}) {
      SCOPED_TRACE(::testing::Message() << type << " " << rows << " x " << h);
      const Tensor x = (at::randn({rows, h}) + 0.3).to(type);
      const Tensor w = at::randn({h}).to(type);
      const Tensor dy = at::randn({rows, h}).to(type);
      const Tensor leaf_x = Leaf(x);
      const Tensor leaf_w = Leaf(w);
      const Tensor expected = NaiveRmsNorm(leaf_x, leaf_w);
      const auto grads = testing::Grad(expected, dy, {leaf_x, leaf_w});

      Tensor y = at::full_like(x, NAN);
      Tensor rstd = at::full({rows}, NAN, SumType(type));
      RmsNorm(x, w, kEps, y, rstd);
      EXPECT_TRUE(Close(y, expected));
      EXPECT_TRUE(Close(rstd, (Double(x).pow(2).mean(1) + kEps).rsqrt()));

      Tensor dx = at::full_like(x, NAN);
      Tensor dw = at::full({h}, 2.0, SumType(type));
      RmsNormBackward(dy, x, w, rstd, dx, /*add_dx=*/false, dw);
      // dx is a difference of terms of the size of rstd dy w; for few columns it is much smaller than these.
      testing::Tolerance tolerance = testing::ToleranceOf(type);
      if (rows > 0) {
        const Tensor terms = Double(rstd).unsqueeze(1) * Double(dy) * Double(w);
        tolerance.of_max *= std::max(1.0, (terms.abs().max() / grads[0].abs().max()).item<double>());
      }
      EXPECT_TRUE(Close(dx, grads[0], tolerance));
      EXPECT_TRUE(Close(dw, grads[1] + 2.0));

      const Tensor before = at::randn({rows, h}).to(type);
      dx = before.clone();
      RmsNormBackward(dy, x, w, rstd, dx, /*add_dx=*/true, dw);
      EXPECT_TRUE(Close(dx, grads[0] + Double(before)));
      EXPECT_TRUE(Close(dw, 2 * grads[1] + 2.0));
    }
  }
}

TEST_F(KernelsTest, RmsNormGradientMatchesFiniteDifferences) {
  Tensor x = at::randn({3, 5}, at::kDouble);
  Tensor w = at::randn({5}, at::kDouble);
  const Tensor dy = at::randn({3, 5}, at::kDouble);
  Tensor y = at::empty_like(x);
  Tensor rstd = at::empty({3}, at::kDouble);
  const auto f = [&] {
    generic::RmsNorm(x, w, kEps, y, rstd);
    return Dot(y, dy);
  };
  f();
  Tensor dx = at::empty_like(x);
  Tensor dw = at::zeros_like(w);
  generic::RmsNormBackward(dy, x, w, rstd, dx, false, dw);
  EXPECT_TRUE(Close(FiniteDifference(f, x), dx, {1e-8, 0}));
  EXPECT_TRUE(Close(FiniteDifference(f, w), dw, {1e-8, 0}));
}

TEST_F(KernelsTest, RopeTableHoldsTheAngles) {
  Tensor cos;
  Tensor sin;
  RopeTable(50, RopeFrequencies(4, 10000), 1, cos, sin);
  ASSERT_EQ(cos.sizes(), (at::IntArrayRef{50, 2}));
  // theta^(-2i/d) is 1 and 1/100: position 3 turns the pairs by 3 and by 0.03.
  EXPECT_FLOAT_EQ(cos[3][0].item<float>(), std::cos(3.0));
  EXPECT_FLOAT_EQ(sin[3][0].item<float>(), std::sin(3.0));
  EXPECT_FLOAT_EQ(cos[3][1].item<float>(), std::cos(0.03));
  EXPECT_FLOAT_EQ(sin[3][1].item<float>(), std::sin(0.03));
  EXPECT_FLOAT_EQ(sin[49][1].item<float>(), std::sin(0.49));
  EXPECT_TRUE(at::equal(cos[0], at::ones({2})));
  EXPECT_TRUE(at::equal(sin[0], at::zeros({2})));
}

// Pair (x_i, x_{i + d/2}) as a complex number times e^{+-i angle}.
Tensor NaiveRope(const Tensor& x, int64_t seq, double theta, bool inverse) {
  const int64_t d = x.size(2);
  const Tensor z = at::complex(Double(x).narrow(2, 0, d / 2).contiguous(), Double(x).narrow(2, d / 2, d / 2).contiguous());
  const Tensor position = at::arange(x.size(0), at::kDouble).remainder(seq).view({-1, 1, 1});
  const Tensor angle = position * at::pow(theta, at::arange(d / 2, at::kDouble) * (-2.0 / d)) * (inverse ? -1 : 1);
  const Tensor turned = z * at::polar(at::ones_like(angle), angle);
  return at::cat({at::real(turned), at::imag(turned)}, 2);
}

TEST_F(KernelsTest, RopeTurnsPairsOfASliceAndNothingElse) {
  for (const at::ScalarType type : Types()) {
    for (const auto& [batch, seq, heads, d] : std::vector<std::array<int64_t, 4>>{
             {1, 1, 1, 2}, {2, 3, 2, 8}, {3, 5, 3, 6}, {2, 7, 2, 64}, {1, 40, 4, 96}, {0, 4, 2, 8}}) {
      SCOPED_TRACE(::testing::Message() << type << " " << batch << " " << seq << " " << heads << " " << d);
      const int64_t before = 5;
      const Tensor rows = at::randn({batch * seq, before + heads * d + 3}).to(type);
      Tensor cos;
      Tensor sin;
      RopeTable(seq, RopeFrequencies(d, 100), 1, cos, sin);
      for (const bool inverse : {false, true}) {
        Tensor work = rows.clone();
        const auto slice = [&](const Tensor& t) { return t.narrow(1, before, heads * d).view({-1, heads, d}); };
        Rope(slice(work), cos, sin, inverse);
        // fp64 runs with the fp32 table too.
        const testing::Tolerance tolerance =
            type == at::kDouble ? testing::Tolerance{2e-7, 0} : testing::ToleranceOf(type);
        EXPECT_TRUE(Close(slice(work), NaiveRope(slice(rows), seq, 100, inverse), tolerance));
        EXPECT_TRUE(at::equal(work.narrow(1, 0, before), rows.narrow(1, 0, before)));
        EXPECT_TRUE(at::equal(work.narrow(1, before + heads * d, 3), rows.narrow(1, before + heads * d, 3)));
      }
    }
  }
}

// The last part of each head only, and of a table times 1.25.
TEST_F(KernelsTest, RopeOfTheEndOfEachHead) {
  for (const at::ScalarType type : Types()) {
    const int64_t seq = 5, heads = 3, d = 20, whole = 28;
    Tensor cos, sin;
    RopeTable(seq, RopeFrequencies(d, 100), 1.25, cos, sin);
    const Tensor rows = at::randn({2 * seq, heads, whole}).to(type), work = rows.clone();
    Rope(work.narrow(2, whole - d, d), cos, sin, false);
    const testing::Tolerance tolerance = type == at::kDouble ? testing::Tolerance{2e-7, 0} : testing::ToleranceOf(type);
    EXPECT_TRUE(Close(work.narrow(2, whole - d, d), 1.25 * NaiveRope(rows.narrow(2, whole - d, d), seq, 100, false), tolerance));
    EXPECT_TRUE(at::equal(work.narrow(2, 0, whole - d), rows.narrow(2, 0, whole - d)));
  }
}

TEST_F(KernelsTest, RopeInverseIsItsBackward) {  // <Rope u, v> = <u, inverse v>
  Tensor cos;
  Tensor sin;
  RopeTable(6, RopeFrequencies(10, 100), 1, cos, sin);
  const Tensor u = at::randn({12, 2, 10});
  const Tensor v = at::randn({12, 2, 10});
  const Tensor turned = u.clone();
  const Tensor back = v.clone();
  Rope(turned, cos, sin, false);
  Rope(back, cos, sin, true);
  EXPECT_NEAR(Dot(turned, v), Dot(u, back), 1e-5);
  Rope(turned, cos, sin, true);
  EXPECT_TRUE(Close(turned, u));
}

Tensor NaiveSwiGlu(const Tensor& gate_up, const Tensor& scale, double limit) {
  const auto halves = gate_up.chunk(2, 1);
  if (limit == 0) return scale.unsqueeze(1) * halves[0] / (1 + (-halves[0]).exp()) * halves[1];
  const Tensor gate = halves[0].clamp_max(limit), up = halves[1].clamp(-limit, limit);
  return scale.unsqueeze(1) * gate / (1 + (-1.702 * gate).exp()) * (up + 1);
}

TEST_F(KernelsTest, SwiGluAndItsGradientMatchAutograd) {
  for (const at::ScalarType type : Types()) {
    for (const auto& [rows, d] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 1}, {3, 5}, {7, 16}, {0, 8}, {33, 31}, {130, 48}, {100, 512}}) {
      for (const auto& [scaled, limit] : std::vector<std::pair<bool, double>>{{false, 0}, {true, 0}, {false, 2}, {true, 2}}) {
        SCOPED_TRACE(::testing::Message() << type << " " << rows << " x " << d << " scaled " << scaled << limit);
        Tensor gate_up = (at::randn({rows, 2 * d}) * 3).to(type);
        // Some at the limits themselves, where torch.clamp passes gradients on.
        if (limit > 0) gate_up = at::where(gate_up > 4, limit, at::where(gate_up < -4, -limit, gate_up)).to(type);
        const Tensor d_act = at::randn({rows, d}).to(type);
        const Tensor scale = scaled ? at::rand({rows}).to(SumType(type)) : Tensor();
        const Tensor leaf = Leaf(gate_up);
        const Tensor leaf_scale = Leaf(scaled ? scale : at::ones({rows}));
        const Tensor expected = NaiveSwiGlu(leaf, leaf_scale, limit);
        const auto grads = testing::Grad(expected, d_act, {leaf, leaf_scale});

        Tensor act = at::full_like(d_act, NAN);
        SwiGlu(gate_up, scale, limit, act);
        EXPECT_TRUE(Close(act, expected));

        act = at::full_like(d_act, NAN);
        Tensor d_scale = scaled ? at::full_like(scale, NAN) : Tensor();
        Tensor d_gate_up = gate_up.clone();
        SwiGluBackward(d_act, /*in place*/ d_gate_up, scale, limit, d_gate_up, act, d_scale);
        EXPECT_TRUE(Close(act, expected));
        EXPECT_TRUE(Close(d_gate_up, grads[0]));
        if (scaled) {
          EXPECT_TRUE(Close(d_scale, grads[1]));
        }

        Tensor apart = at::full_like(gate_up, NAN);
        SwiGluBackward(d_act, gate_up, scale, limit, apart, act, d_scale);
        EXPECT_TRUE(SameBits(apart, d_gate_up));
        if (limit > 0) {
          const Tensor clamped = (gate_up > limit) | ((gate_up < -limit) & (at::arange(2 * d) >= d));
          EXPECT_FALSE((apart * clamped).any().item<bool>());
        }
        generic::SwiGluBackward(d_act, gate_up, scale, limit, apart, act, d_scale);
        EXPECT_TRUE(Close(apart, grads[0]));
      }
    }
  }
}

TEST_F(KernelsTest, SwiGluGradientMatchesFiniteDifferences) {
  for (const double limit : {0.0, 1.0}) {
    Tensor gate_up = at::randn({3, 8}, at::kDouble);
    Tensor scale = at::rand({3}, at::kDouble);
    const Tensor d_act = at::randn({3, 4}, at::kDouble);
    Tensor act = at::empty_like(d_act);
    const auto f = [&] {
      generic::SwiGlu(gate_up, scale, limit, act);
      return Dot(act, d_act);
    };
    Tensor d_gate_up = at::empty_like(gate_up);
    Tensor d_scale = at::empty_like(scale);
    generic::SwiGluBackward(d_act, gate_up, scale, limit, d_gate_up, act, d_scale);
    EXPECT_TRUE(Close(FiniteDifference(f, gate_up), d_gate_up, {1e-8, 0}));
    EXPECT_TRUE(Close(FiniteDifference(f, scale), d_scale, {1e-8, 0}));
  }
}

TEST_F(KernelsTest, SwiGluStaysFiniteForLargeGates) {
  // silu(x) -> x for large x, -> 0 for very negative x.
  const Tensor gate_up = at::tensor({200.f, -200.f, 90.f, -90.f, 1.f, 1.f, 1.f, 1.f}).view({1, 8});
  Tensor act = at::empty({1, 4});
  SwiGlu(gate_up, {}, 0, act);
  EXPECT_TRUE(Close(act, at::tensor({200.f, 0.f, 90.f, 0.f}).view({1, 4})));
  Tensor d_gate_up = at::empty_like(gate_up);
  Tensor none;
  SwiGluBackward(at::ones({1, 4}), gate_up, {}, 0, d_gate_up, act, none);
  EXPECT_TRUE(Close(d_gate_up, at::tensor({1.f, 0.f, 1.f, 0.f, 200.f, 0.f, 90.f, 0.f}).view({1, 8})));
}

TEST_F(KernelsTest, ResultsDoNotDependOnThreads) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const Tensor x = at::randn({777, 250}).to(type);
    const Tensor w = at::randn({250}).to(type);
    const Tensor dy = at::randn({777, 250}).to(type);
    testing::ExpectSameOnTwoThreads([&] {
      Tensor y = at::empty_like(x);
      Tensor rstd = at::empty({777});
      Tensor dx = at::zeros_like(x);
      Tensor dw = at::zeros({250});
      RmsNorm(x, w, kEps, y, rstd);
      RmsNormBackward(dy, x, w, rstd, dx, true, dw);
      return std::vector<Tensor>{y, rstd, dx, dw};
    });
    testing::ExpectSameOnTwoThreads([&] {
      Tensor cos;
      Tensor sin;
      RopeTable(777, RopeFrequencies(50, 1e4), 1, cos, sin);
      Tensor turned = x.clone();
      Rope(turned.view({777, 5, 50}), cos, sin, false);
      return std::vector<Tensor>{turned};
    });
    const Tensor scale = at::rand({777});
    testing::ExpectSameOnTwoThreads([&] {
      Tensor act = at::empty({777, 125}, type);
      SwiGlu(x, scale, 0, act);
      Tensor recomputed = at::empty_like(act);
      Tensor d_gate_up = at::empty_like(x);
      Tensor d_scale = at::empty_like(scale);
      SwiGluBackward(act, x, scale, 0, d_gate_up, recomputed, d_scale);
      return std::vector<Tensor>{act, recomputed, d_gate_up, d_scale};
    });
  }
}

TEST_F(KernelsTest, StridedTensorsTakeTheGenericWay) {
  const Tensor x = at::randn({40, 6}).t();
  const Tensor w = at::randn({40});
  Tensor y = at::empty({6, 40});
  Tensor rstd = at::empty({6});
  RmsNorm(x, w, kEps, y, rstd);
  EXPECT_TRUE(Close(y, NaiveRmsNorm(Double(x), Double(w))));
}

TEST_F(KernelsTest, WrongShapesAreRefused) {
  Tensor x = at::randn({4, 6});
  Tensor w = at::randn({6});
  Tensor rstd = at::empty({4});
  Tensor short_y = at::empty({3, 6});
  EXPECT_THROW(RmsNorm(x, w, kEps, short_y, rstd), InternalError);
  Tensor act = at::empty({4, 4});
  EXPECT_THROW(SwiGlu(x, {}, 0, act), InternalError);
  Tensor cos;
  Tensor sin;
  RopeTable(3, RopeFrequencies(6, 1e4), 1, cos, sin);
  EXPECT_THROW(Rope(x.view({4, 1, 6}), cos, sin, false), InternalError);  // 4 rows, sequences of 3
  Tensor d_scale = at::empty({4});
  Tensor small_act = at::empty({4, 3});
  EXPECT_THROW(SwiGluBackward(small_act, x, {}, 0, x, small_act, d_scale), InternalError);
}

}  // namespace
}  // namespace disagmoe
