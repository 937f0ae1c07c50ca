// t cached tokens, g = nh / nkv query heads a KV head; other shapes as in attention.h.
#include "layers/kv_cache.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "layers/projections.h"

namespace disagmoe {
namespace {

// [nh, t] fp32 logits to the weights of values.
Tensor Softmax(const AttentionParams& p, const Tensor& logits) {
  if (!p.sinks.defined()) return logits.softmax(-1);
  return at::cat({logits, p.sinks.value.unsqueeze(1)}, 1).softmax(-1).narrow(1, 0, logits.size(1));
}

}  // namespace

KvCache::KvCache(const ModelConfig& c, const AttentionParams& p, int64_t most, const Tensor& like) {
  const int64_t room = p.window > 0 ? std::min(p.window, most) : most;
  if (c.latent()) {
    keys_ = EmptyLike({1, room, c.kv_lora_rank + c.qk_rope_head_dim}, like);
  } else {
    keys_ = EmptyLike({c.num_key_value_heads, room, c.head_dim}, like);
    values_ = at::empty_like(keys_);
  }
}

void KvCache::Fill(const ModelConfig& c, const AttentionParams& p, const AttentionSaved& saved) {
  length_ = 0;
  Append(c, p, saved);
}

void KvCache::Append(const ModelConfig& c, const AttentionParams& p, const AttentionSaved& saved) {
  const int64_t n = saved.x.size(0), room = keys_.size(1), last = std::min(n, room);  // older ones are not seen again
  DM_CHECK(p.window > 0 || length_ + n <= room, "more tokens than there is room for");
  const Tensor place = at::arange(length_ + n - last, length_ + n, keys_.options().dtype(at::kLong)).remainder(room);
  if (c.latent()) {
    keys_.index_copy_(1, place, LatentKeys(c, p, saved).narrow(0, n - last, last).unsqueeze(0));
  } else {
    const AttentionInputs in = PlainInputs(c, n, saved);
    keys_.index_copy_(1, place, in.k[0].narrow(0, n - last, last).transpose(0, 1));
    values_.index_copy_(1, place, in.v[0].narrow(0, n - last, last).transpose(0, 1));
  }
  length_ += n;
}

Tensor KvCache::Attend(const ModelConfig& c, const AttentionParams& p, const AttentionSaved& saved) const {
  const int64_t t = std::min(length_, keys_.size(1)), nh = c.num_attention_heads;
  const double scale = p.scale != 0 ? p.scale : 1 / std::sqrt(static_cast<double>(c.qk_dim()));
  const Tensor keys = keys_.narrow(1, 0, t);
  if (c.latent()) {
    // A key's part without RoPE is W c of the latent c: q W c instead of expanding every c. Values alike.
    const Tensor q = LatentQueries(c, p, saved);  // [nh, rk + dr]
    const Tensor weights = Softmax(p, at::mm(q, keys[0].t()).to(at::kFloat) * scale).to(keys.scalar_type());
    return LatentValues(c, p, at::mm(weights, keys[0].narrow(1, 0, c.kv_lora_rank)));
  }
  const int64_t nkv = c.num_key_value_heads;
  const Tensor q = PlainInputs(c, 1, saved).q.reshape({nkv, nh / nkv, c.head_dim});
  const Tensor logits = at::bmm(q, keys.transpose(1, 2)).to(at::kFloat).view({nh, t}) * scale;
  const Tensor weights = Softmax(p, logits).to(keys.scalar_type()).reshape({nkv, nh / nkv, t});
  return at::bmm(weights, values_.narrow(1, 0, t)).view({1, nh * c.head_dim});
}

AttentionOutput KvCache::Step(const ModelConfig& c, const AttentionParams& p, const Tensor& x) {
  DM_CHECK(x.size(0) == 1 && length_ < p.s(), "one token, within the rotary table");
  AttentionParams here = p;
  here.rotary.cos = p.rotary.cos.narrow(0, length_, 1);
  here.rotary.sin = p.rotary.sin.narrow(0, length_, 1);
  AttentionSaved saved;
  saved.x = x;
  ProjectInputs(c, here, saved);
  Append(c, here, saved);
  saved.o = Attend(c, here, saved);
  ProjectOutput(here, saved);
  return RouteOutput(c, here, saved);
}

}  // namespace disagmoe
