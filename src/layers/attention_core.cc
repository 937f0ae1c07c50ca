// The CPU's flash kernel, called for each group of heads and block of queries. D: the larger of d and dv.
#include "layers/attention_core.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

#include "layers/attention_blocks.h"

namespace disagmoe {
namespace {

// [B, s, n, w] -> [B, n, s, w], the order libtorch's kernels take; a view.
Tensor Heads(const Tensor& x, int64_t first, int64_t count) { return x.narrow(2, first, count).transpose(1, 2); }

// Zeros after the last dimension: the kernel has one width for queries, keys and values.
Tensor Pad(const Tensor& x, int64_t width) {
  if (x.size(3) == width) return x;
  Tensor wide = at::zeros({x.size(0), x.size(1), x.size(2), width}, x.options());
  wide.narrow(3, 0, x.size(3)).copy_(x);
  return wide;
}

// What the kernel takes for KV head i and its g query heads.
struct Group {
  Group(const AttentionInputs& in, int64_t i, int64_t g, int64_t D) : q(Pad(Heads(in.q, i * g, g), D)) {
    Tensor key = Heads(in.k, i, 1);
    if (in.tail.defined()) key = at::cat({key, in.tail.transpose(1, 2)}, 3);
    k = Pad(key, D);
    v = Pad(Heads(in.v, i, 1), D);
  }
  Tensor q, k, v;  // [B, g, s, D], [B, 1, s, D]
};

// One call a group of query heads: the kernel does not know of grouped queries, and a stride of 0 needs no copy.
Tensor Shared(const Tensor& x, int64_t g) { return x.expand({-1, g, -1, -1}); }

struct Call {
  Call(const AttentionInputs& in, const AttentionShape& shape)
      : g(in.q.size(2) / in.k.size(2)), D(std::max(in.q.size(3), in.v.size(3))), blocks(AttentionBlocks(in.q, shape, 0)) {
    if (shape.scale != 0) scale = shape.scale;
    else if (D != in.q.size(3)) scale = 1 / std::sqrt(static_cast<double>(in.q.size(3)));
  }
  int64_t g, D;
  std::optional<double> scale;  // none: that of the width
  std::vector<AttentionBlock> blocks;
};

std::optional<Tensor> Mask(const AttentionBlock& b) { return b.mask.defined() ? std::optional(b.mask) : std::nullopt; }

// total (+)= part [B, g, keys, D], summed over the group in fp32: in bf16 this alone doubles the error.
void AddKeys(Tensor& total, const Tensor& part, const AttentionBlock& b, bool only) {
  const Tensor sum = part.size(1) == 1 ? part : part.sum(1, /*keepdim=*/true, at::kFloat);
  if (only) {
    total = sum;
  } else {
    b.Keys(total, 2).add_(sum);
  }
}

}  // namespace

Tensor CausalAttention(const AttentionInputs& in, const AttentionShape& shape, Tensor& o) {
  CheckAttention(in, shape, o);
  if (!in.q.is_cpu()) {
    generic::CausalAttention(in, shape, o);
    return {};
  }
  const Call call(in, shape);
  const int64_t B = in.q.size(0), s = in.q.size(1), nh = in.q.size(2), dv = in.v.size(3), g = call.g;
  Tensor lse = at::empty({B, nh, s}, in.q.options().dtype(at::kFloat));
  for (int64_t i = 0; i < in.k.size(2); ++i) {
    const Group group(in, i, g, call.D);
    const Tensor oi = Heads(o, i * g, g), li = lse.narrow(1, i * g, g);
    for (const AttentionBlock& b : call.blocks) {
      auto [ob, lb] = at::_scaled_dot_product_flash_attention_for_cpu(
          b.Queries(group.q, 2), Shared(b.Keys(group.k, 2), g), Shared(b.Keys(group.v, 2), g), 0.0,
          /*is_causal=*/!b.mask.defined(), Mask(b), call.scale);
      b.Queries(oi, 2).copy_(ob.narrow(3, 0, dv));
      b.Queries(li, 2).copy_(lb);
    }
  }
  if (!shape.sinks.defined()) return lse;
  const Tensor with_sinks = at::logaddexp(lse, shape.sinks.view({1, nh, 1}));
  o.mul_((lse - with_sinks).exp_().transpose(1, 2).unsqueeze(-1));
  return with_sinks;
}

void CausalAttentionBackward(const Tensor& d_o, const AttentionInputs& in, const AttentionShape& shape, const Tensor& o,
                             const Tensor& lse, AttentionInputs& d, Tensor d_sinks) {
  if (!in.q.is_cpu()) return generic::CausalAttentionBackward(d_o, in, shape, d, d_sinks);
  const Call call(in, shape);
  const int64_t nh = in.q.size(2), g = call.g, D = call.D;
  const bool only = call.blocks.size() == 1;
  if (shape.sinks.defined()) {
    const Tensor dot = (d_o.to(at::kFloat) * o).sum(-1).transpose(1, 2);  // [B, nh, s]
    d_sinks.sub_(((shape.sinks.view({1, nh, 1}) - lse).exp_() * dot).sum(at::IntArrayRef{0, 2}));
  }
  Tensor d_tail;
  for (int64_t i = 0; i < in.k.size(2); ++i) {
    const Group group(in, i, g, D);
    const Tensor go = Pad(Heads(d_o, i * g, g), D), oi = Pad(Heads(o, i * g, g), D), li = lse.narrow(1, i * g, g);
    Tensor dk, dv;  // [B, 1, s, D]
    if (!only) {
      dk = at::zeros(group.k.sizes(), go.options().dtype(at::kFloat));
      dv = at::zeros_like(dk);
    }
    for (const AttentionBlock& b : call.blocks) {
      auto [dqb, dkb, dvb] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          b.Queries(go, 2), b.Queries(group.q, 2), Shared(b.Keys(group.k, 2), g), Shared(b.Keys(group.v, 2), g),
          b.Queries(oi, 2), b.Queries(li, 2), 0.0, /*is_causal=*/!b.mask.defined(), Mask(b), call.scale);
      b.Queries(Heads(d.q, i * g, g), 2).copy_(dqb.narrow(3, 0, in.q.size(3)));
      AddKeys(dk, dkb, b, only);
      AddKeys(dv, dvb, b, only);
    }
    const int64_t own = in.k.size(3);  // without the tail
    Heads(d.k, i, 1).copy_(dk.narrow(3, 0, own));
    Heads(d.v, i, 1).copy_(dv.narrow(3, 0, in.v.size(3)));
    if (!in.tail.defined()) continue;
    const Tensor part = dk.narrow(3, own, in.tail.size(3));
    d_tail = d_tail.defined() ? d_tail.add_(part) : part.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  }
  if (in.tail.defined()) d.tail.transpose(1, 2).copy_(d_tail);
}

}  // namespace disagmoe
