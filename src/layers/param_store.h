// The parameters that one worker holds: fp32 master weights, fp32 gradient sums, and the weights that computation
// uses, each one flat array with a view per parameter.
//
// Not thread-safe; layers read `value` and add to `grad`.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "spec/params.h"

namespace disagmoe {

// A parameter as held here. Of a per-expert parameter: experts [first, first + count) only.
struct HeldParam {
  ParamSpec spec;
  int64_t first = 0;
  int64_t count = 0;  // 0 with per_expert = false
  std::vector<int64_t> local_shape() const;
  int64_t numel() const;
};

struct Param {
  at::Tensor value;   // of computation: fp32 (then the master itself) or bf16; always fp32 where the table of parameters says so
  at::Tensor grad;    // fp32, summed over micro-batches
  at::Tensor master;  // fp32
  bool defined() const { return value.defined(); }
};

class ParamStore {
 public:
  // `held` in the order of the flat arrays. dtype: at::kFloat or at::kBFloat16.
  ParamStore(std::vector<HeldParam> held, at::ScalarType dtype, at::Device device);

  // Normal (or one, for norms) from the seed and the name, per expert: the same values in every layout.
  void Initialise(uint64_t seed);
  const Param* Find(const std::string& name) const;  // null if not held
  const Param& Get(const std::string& name) const;
  const std::vector<HeldParam>& held() const { return held_; }
  int64_t offset(size_t i) const { return offsets_[i]; }  // of held()[i] in the flat arrays
  int64_t numel() const { return offsets_.back(); }
  at::Tensor flat_master() const { return master_; }
  at::Tensor flat_grad() const { return grad_; }
  // After the master weights in [begin, end) changed: refresh what computation uses.
  void Refresh(int64_t begin, int64_t end);
  void ZeroGrad();

 private:
  std::vector<HeldParam> held_;
  std::vector<int64_t> offsets_;  // one more than held
  std::map<std::string, Param> params_;
  at::Tensor master_, grad_, compute_;
};

// Everything, as one process holds it.
std::vector<HeldParam> HoldAll(const ModelConfig& model);

}  // namespace disagmoe
