// The rotary embedding of a model: angles by rope_type, for all layers.
#pragma once

#include <vector>

#include "layers/kernels.h"
#include "spec/model_config.h"

namespace disagmoe {

// Radians a position, of each pair: theta^(-2i/d), "linear": over the factor, "yarn" (arXiv 2309.00071, section 3.2): over
// the factor where a pair turns less than rope_beta_slow times in rope_original_length positions, as it is where it
// turns more than rope_beta_fast times, and in between a mixture that is linear in i.
std::vector<double> RopeFrequencies(const ModelConfig& model);

// cos and sin times rope_attention_factor, [s, rope_dim / 2] fp32.
struct Rotary {
  Rotary(const ModelConfig& model, int64_t s, at::Device device);
  Tensor cos, sin;
};

}  // namespace disagmoe
