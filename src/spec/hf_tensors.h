// Parameters in the form in which each family publishes them: names, shapes, and where each of our values is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec/model_config.h"
#include "spec/params.h"

namespace disagmoe {

struct HfTensor {
  std::string name;  // "model.layers.3.mlp.experts.7.gate_proj.weight"
  std::vector<int64_t> shape;
  bool fp32 = false;  // published in fp32 whatever the others are
};

// Part of a parameter of ours, or of one expert of it: `rows` rows of `columns` values from `offset` on, one after the
// other. In the tensor, value (i, j) is element begin + i * row_stride + j * column_stride.
struct HfPiece {
  std::string tensor;
  int64_t offset = 0, rows = 0, columns = 0;
  int64_t begin = 0, row_stride = 0, column_stride = 1;
};

// model_type must be one of HfFamilies(). In the order of the layers; each name once.
std::vector<HfTensor> HfTensors(const ModelConfig& model);
// The pieces cover the parameter exactly once; those of all parameters cover all tensors exactly once. expert: of a
// per-expert parameter, else ignored.
std::vector<HfPiece> HfPieces(const ModelConfig& model, const ParamSpec& param, int64_t expert);

}  // namespace disagmoe
