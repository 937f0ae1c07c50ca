#include "layers/param_store.h"

#include <ATen/ATen.h>

#include <cmath>
#include <numbers>

#include "base/error.h"
#include "base/rng.h"

namespace disagmoe {
namespace {

constexpr int64_t kAlign = 16;  // floats: a cache line

void FillNormal(float* out, int64_t n, double std, uint64_t seed) {
  Rng rng(seed);
  for (int64_t i = 0; i < n; i += 2) {  // Box and Muller 1958
    const double radius = std * std::sqrt(-2 * std::log(1 - rng.Uniform()));
    const double angle = 2 * std::numbers::pi * rng.Uniform();
    out[i] = static_cast<float>(radius * std::cos(angle));
    if (i + 1 < n) out[i + 1] = static_cast<float>(radius * std::sin(angle));
  }
}

}  // namespace

std::vector<int64_t> HeldParam::local_shape() const {
  auto shape = spec.shape;
  if (spec.per_expert) shape[0] = count;
  return shape;
}

int64_t HeldParam::numel() const {
  int64_t n = 1;
  for (int64_t s : local_shape()) n *= s;
  return n;
}

ParamStore::ParamStore(std::vector<HeldParam> held, at::ScalarType dtype, at::Device device) : held_(std::move(held)) {
  int64_t total = 0;
  for (const auto& p : held_) {
    offsets_.push_back(total);
    total += (p.numel() + kAlign - 1) / kAlign * kAlign;
  }
  offsets_.push_back(total);
  const auto options = at::TensorOptions().device(device);
  master_ = at::zeros({total}, options.dtype(at::kFloat));
  grad_ = at::zeros({total}, options.dtype(at::kFloat));
  compute_ = dtype == at::kFloat ? master_ : at::zeros({total}, options.dtype(dtype));
  for (size_t i = 0; i < held_.size(); ++i) {
    const auto shape = held_[i].local_shape();
    auto view = [&](const at::Tensor& flat) { return flat.narrow(0, offsets_[i], held_[i].numel()).view(shape); };
    Param p{view(held_[i].spec.fp32 ? master_ : compute_), view(grad_), view(master_)};
    DM_CHECK(params_.emplace(held_[i].spec.name, p).second, "parameter held twice: " + held_[i].spec.name);
  }
}

void ParamStore::Initialise(uint64_t seed) {
  at::Tensor host = at::zeros({numel()}, at::kFloat);
  float* base = host.data_ptr<float>();
  for (size_t i = 0; i < held_.size(); ++i) {
    const auto& p = held_[i];
    float* out = base + offsets_[i];
    if (p.spec.norm_weight) {
      std::fill(out, out + p.numel(), 1.0f);
    } else if (p.spec.per_expert) {
      const int64_t each = p.count == 0 ? 0 : p.numel() / p.count;
      for (int64_t e = 0; e < p.count; ++e) {
        FillNormal(out + e * each, each, p.spec.init_std, SeedFor(seed, p.spec.name + "#" + std::to_string(p.first + e)));
      }
    } else {
      FillNormal(out, p.numel(), p.spec.init_std, SeedFor(seed, p.spec.name));
    }
  }
  master_.copy_(host);
  Refresh(0, numel());
}

const Param* ParamStore::Find(const std::string& name) const {
  auto it = params_.find(name);
  return it == params_.end() ? nullptr : &it->second;
}

const Param& ParamStore::Get(const std::string& name) const {
  const Param* p = Find(name);
  DM_CHECK(p != nullptr, "parameter not held here: " + name);
  return *p;
}

void ParamStore::Refresh(int64_t begin, int64_t end) {
  if (compute_.is_same(master_) || begin == end) return;
  compute_.narrow(0, begin, end - begin).copy_(master_.narrow(0, begin, end - begin));
}

void ParamStore::ZeroGrad() { grad_.zero_(); }

std::vector<HeldParam> HoldAll(const ModelConfig& model) {
  std::vector<HeldParam> held;
  for (auto& spec : ParamTable(model)) {
    const int64_t experts = spec.per_expert ? spec.shape[0] : 0;
    held.push_back({spec, 0, experts});
  }
  return held;
}

}  // namespace disagmoe
