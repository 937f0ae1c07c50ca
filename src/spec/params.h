// The table of parameters: our name, shape, who holds it. layers/ builds the same tensors (a test compares).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec/config.h"

namespace disagmoe {

struct ParamSpec {
  std::string name;            // "layers.3.experts.gate_up"
  std::vector<int64_t> shape;  // of the whole parameter
  int stage = 0;               // the stage that it belongs to
  bool decay = true;           // weight decay: matrices, not norms
  bool per_expert = false;     // first dimension is the expert: divided over the F-group's workers
  bool norm_weight = false;    // starts at one
  double init_std = 0;         // of a normal initialisation otherwise
  // Also held by the FFN stage of the same layer (the norm before the experts).
  bool also_ffn = false;
};

// In order of stages. Names and shapes (nh, nkv heads; d = head_dim; D = intermediate size):
//   embed [V, H]                               stage 0
//   layers.l.norm1 [H]                         attention
//   layers.l.qkv [(nh + 2 nkv) d, H]           rows: queries, keys, values
//   layers.l.q_norm, k_norm [d]                with qk_norm
//   layers.l.out [H, nh d]
//   layers.l.norm2 [H]                         attention and FFN
//   layers.l.router [E, H]                     attention; not in dense layers
//   layers.l.experts.gate_up [E, 2 De, H]      FFN, per expert; rows: gate, up
//   layers.l.experts.down [E, H, De]           FFN, per expert
//   layers.l.shared.gate_up [2 Ds, H], .down [H, Ds]     FFN, with shared experts
//   layers.l.dense.gate_up [2 D, H], .down [H, D]        FFN, dense layers
//   final_norm [H], head [V, H]                head
std::vector<ParamSpec> ParamTable(const ModelConfig& model);

// Contiguous partition of `total` things over `parts`: part i has [Begin(i), Begin(i + 1)).
inline int64_t PartBegin(int64_t total, int64_t parts, int64_t i) { return total * i / parts; }

// FLOPs of one training step of the whole model (forward 1, backward 2, causal attention counted as half,
// active experts only), for MFU.
double StepFlops(const ModelConfig& model, const TrainConfig& train);

}  // namespace disagmoe
