#include "layers/rotary.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace disagmoe {

std::vector<double> RopeFrequencies(const ModelConfig& c) {
  std::vector<double> frequencies = RopeFrequencies(c.rope_dim(), c.rope_theta);
  if (c.rope_type == "linear") {
    for (double& f : frequencies) f /= c.rope_factor;
  }
  if (c.rope_type != "yarn") return frequencies;
  // The pair, as a real number, that turns so often in the original length.
  const auto pair = [&](double turns) {
    return static_cast<double>(c.rope_dim()) *
           std::log(static_cast<double>(c.rope_original_length) / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(c.rope_theta));
  };
  double begin = pair(c.rope_beta_fast), end = pair(c.rope_beta_slow);
  if (c.rope_truncate) {
    begin = std::floor(begin);
    end = std::ceil(end);
  }
  begin = std::max(begin, 0.0);
  end = std::min(end, static_cast<double>(c.rope_dim() - 1));  // not the last pair: as published
  if (begin == end) end += 0.001;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double slow = std::clamp((static_cast<double>(i) - begin) / (end - begin), 0.0, 1.0);
    frequencies[i] *= 1 - slow + slow / c.rope_factor;
  }
  return frequencies;
}

Rotary::Rotary(const ModelConfig& model, int64_t s, at::Device device) {
  RopeTable(s, RopeFrequencies(model), model.rope_attention_factor, cos, sin);
  cos = cos.to(device);
  sin = sin.to(device);
}

}  // namespace disagmoe
