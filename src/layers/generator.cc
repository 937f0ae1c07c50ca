#include "layers/generator.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "base/error.h"

namespace disagmoe {

Generator::Generator(const RunConfig& config, at::Device device, int64_t most)
    : model_(config.model),
      store_(HoldAll(config.model), config.train.dtype == "bf16" ? at::kBFloat16 : at::kFloat, device),
      rotary_(config.model, most > 0 ? most : config.train.seq_length, device) {
  const Tensor& embed = store_.Get("embed").value;
  for (int64_t l = 0; l < model_.num_hidden_layers; ++l) {
    attention_.emplace_back(store_, model_, l, rotary_);
    ffn_.emplace_back(store_, model_, l);
    caches_.emplace_back(model_, attention_.back(), this->most(), embed);
  }
  head_ = std::make_unique<HeadParams>(store_);
}

Tensor Generator::Embed(const std::vector<int64_t>& tokens) const {
  const Param& embed = store_.Get("embed");
  for (int64_t t : tokens) {
    DM_CHECK(t >= 0 && t < model_.vocab_size, "token " + std::to_string(t) + " of " + std::to_string(model_.vocab_size));
  }
  Tensor x = at::empty({std::ssize(tokens), model_.hidden_size}, embed.value.options());
  EmbedForward(embed, at::tensor(tokens, at::kLong).to(x.device()), x);
  return x;
}

Tensor Generator::Ffn(int64_t layer, const AttentionOutput& a) const {
  FfnSaved saved;
  Tensor out = at::empty_like(a.h);
  FfnForward(model_, ffn_[layer], a.h, AllPairs(a.ids, a.gates, a.h.size(0)), saved, out);
  return out;
}

Tensor Generator::Logits(const Tensor& x) const {
  const Tensor last = x.narrow(0, x.size(0) - 1, 1);
  Tensor u = at::empty_like(last), rstd = at::empty({1}, x.options().dtype(at::kFloat));
  RmsNorm(last, head_->norm.value, model_.rms_norm_eps, u, rstd);
  return at::mm(u, head_->head.value.t()).view({-1}).to(at::kFloat).cpu();
}

Tensor Generator::Prefill(const std::vector<int64_t>& tokens) {
  c10::NoGradGuard no_grad;
  const int64_t n = std::ssize(tokens);
  DM_CHECK(n > 0 && n <= most(), "a prompt of " + std::to_string(n) + " tokens, room for " + std::to_string(most()));
  Tensor x = Embed(tokens);
  for (int64_t l = 0; l < model_.num_hidden_layers; ++l) {
    AttentionParams p = attention_[l];
    p.rotary.cos = rotary_.cos.narrow(0, 0, n);
    p.rotary.sin = rotary_.sin.narrow(0, 0, n);
    AttentionSaved saved;
    const AttentionOutput a = AttentionForward(model_, p, x, saved);
    caches_[l].Fill(model_, p, saved);
    x = Ffn(l, a);
  }
  length_ = n;
  return Logits(x);
}

Tensor Generator::Step(int64_t token) {
  c10::NoGradGuard no_grad;
  DM_CHECK(length_ < most(), "no room for another token");
  Tensor x = Embed({token});
  for (int64_t l = 0; l < model_.num_hidden_layers; ++l) x = Ffn(l, caches_[l].Step(model_, attention_[l], x));
  ++length_;
  return Logits(x);
}

}  // namespace disagmoe
