#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <cmath>

#include "layers/attention_blocks.h"

namespace disagmoe::generic {
namespace {

constexpr int64_t kQueriesAtOnce = 256;

// [B, s, n, w] -> [B, nh, s, w], KV heads repeated for their groups.
Tensor Heads(const Tensor& x, int64_t nh) {
  const int64_t g = nh / x.size(2);
  return (g == 1 ? x : x.repeat_interleave(g, 2)).transpose(1, 2);
}

Tensor Keys(const AttentionInputs& in) {
  return in.tail.defined() ? at::cat({in.k, in.tail.expand({-1, -1, in.k.size(2), -1})}, 3) : in.k;
}

Tensor Wide(const Tensor& x) { return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat); }

// Attention of one block, [b, rows, nh, dv].
Tensor Compute(const AttentionInputs& in, const Tensor& sinks, double scale, const Tensor& mask) {
  const int64_t nh = in.q.size(2), b = in.q.size(0), rows = in.q.size(1);
  const Tensor q = in.q.transpose(1, 2), k = Heads(Keys(in), nh), v = Heads(in.v, nh);
  if (!mask.defined()) {
    return at::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true, scale).transpose(1, 2);
  }
  Tensor logits = at::matmul(Wide(q), Wide(k).transpose(2, 3)) * scale + mask;
  if (sinks.defined()) logits = at::cat({logits, sinks.view({1, nh, 1, 1}).expand({b, nh, rows, 1})}, 3);
  return at::matmul(logits.softmax(-1).narrow(3, 0, k.size(2)), Wide(v)).transpose(1, 2).to(in.q.scalar_type());
}

// Calls f(inputs of a block, its mask, the block).
template <class F>
void ForBlocks(const AttentionInputs& in, const AttentionShape& shape, F f) {
  const bool plain = shape.window == 0 && !shape.sinks.defined() && shape.documents.empty();
  for (const AttentionBlock& b : AttentionBlocks(in.q, shape, plain ? 0 : kQueriesAtOnce)) {
    f(AttentionInputs{b.Queries(in.q, 1), b.Keys(in.k, 1), b.Keys(in.v, 1), in.tail.defined() ? b.Keys(in.tail, 1) : Tensor()},
      b);
  }
}

double Scale(const AttentionInputs& in, const AttentionShape& shape) {
  return shape.scale != 0 ? shape.scale : 1 / std::sqrt(static_cast<double>(in.q.size(3)));
}

}  // namespace

void CausalAttention(const AttentionInputs& in, const AttentionShape& shape, Tensor& o) {
  ForBlocks(in, shape, [&](const AttentionInputs& part, const AttentionBlock& b) {
    b.Queries(o, 1).copy_(Compute(part, shape.sinks, Scale(in, shape), b.mask));
  });
}

void CausalAttentionBackward(const Tensor& d_o, const AttentionInputs& in, const AttentionShape& shape,
                             AttentionInputs& d, Tensor d_sinks) {
  const auto sum = [](const Tensor& x) { return x.defined() ? at::zeros_like(Wide(x)) : Tensor(); };
  Tensor dk = sum(in.k), dv = sum(in.v), d_tail = sum(in.tail);
  const auto leaf = [](const Tensor& x) { return x.detach().requires_grad_(); };
  ForBlocks(in, shape, [&](const AttentionInputs& part, const AttentionBlock& b) {
    AttentionInputs own{leaf(part.q), leaf(part.k), leaf(part.v), {}};
    std::vector<Tensor> leaves = {own.q, own.k, own.v};
    if (part.tail.defined()) leaves.push_back(own.tail = leaf(part.tail));
    const Tensor sinks = shape.sinks.defined() ? leaf(shape.sinks) : Tensor();
    if (sinks.defined()) leaves.push_back(sinks);
    Tensor out;
    {
      at::AutoGradMode enable(true);
      out = Compute(own, sinks, Scale(in, shape), b.mask);
    }
    const auto grads = torch::autograd::grad({out}, leaves, {b.Queries(d_o, 1)});
    b.Queries(d.q, 1).copy_(grads[0]);
    b.Keys(dk, 1).add_(grads[1]);
    b.Keys(dv, 1).add_(grads[2]);
    if (d_tail.defined()) b.Keys(d_tail, 1).add_(grads[3]);
    if (sinks.defined()) d_sinks.add_(grads.back());
  });
  d.k.copy_(dk);
  d.v.copy_(dv);
  if (d_tail.defined()) d.tail.copy_(d_tail);
}

}  // namespace disagmoe::generic
