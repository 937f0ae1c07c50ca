// Tests: weights of which none is zero or one.
#pragma once

#include <ATen/ATen.h>

#include "layers/param_store.h"

namespace disagmoe {

// As initialised, but norm weights are not one, and biases, sinks and corrections not zero.
inline void RandomWeights(ParamStore& store, uint64_t seed) {
  store.Initialise(seed);
  at::manual_seed(seed);
  for (const HeldParam& p : store.held()) {
    at::Tensor w = store.Get(p.spec.name).master;
    if (p.spec.norm_weight) {
      w.mul_(at::linspace(0.5, 1.5, w.numel()));
    } else if (p.spec.init_std == 0) {
      w.copy_(at::randn(w.sizes()) * 0.3);
    }
  }
  store.Refresh(0, store.numel());
}

}  // namespace disagmoe
