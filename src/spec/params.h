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
  bool decay = true;           // weight decay: matrices, not norms, biases and sinks
  bool per_expert = false;     // first dimension is the expert: divided over the F-group's workers
  bool norm_weight = false;    // starts at one
  double init_std = 0;         // of a normal initialisation otherwise
  int also_stage = -1;         // another stage that holds it too
  bool fp32 = false;           // computation uses the fp32 master
  // No gradient: where gradients of others are, it has the pairs that each expert got in a step (see optimizer.h).
  bool counts_load = false;
};

// In order of stages. Names and shapes (nh, nkv heads; d, dv width of a query and of a value; D = intermediate size):
//   embed [V, H]                               stage 0; with tied embeddings also the head
//   layers.l.norm1 [H]                         attention
//   layers.l.qkv [(nh + nkv) d + nkv dv, H], qkv_bias [...]   rows: queries, keys, values; bias with attention_bias
//   layers.l.q_norm, k_norm [d]                with qk_norm; [nh d], [nkv d] with qk_norm_all_heads
//   layers.l.sinks [nh]                        with attention_sinks
//   latent attention, instead of qkv (dn, dr width without and with RoPE, d = dn + dr; rq, rk ranks):
//   layers.l.q [nh d, H], or q_a [rq, H], q_a_norm [rq], q_b [nh d, rq]     rows of a head: without, with RoPE
//   layers.l.kv_a [rk + dr, H], kv_a_norm [rk], kv_b [nh (dn + dv), rk]     kv_a: latent, the keys' RoPE part
//   layers.l.out [H, nh dv], out_bias [H]
//   layers.l.norm2 [H]                         attention and FFN
//   layers.l.router [E, H], router_bias [E], router_correction [E]    attention; not in dense layers
//   layers.l.experts.gate_up [E, 2 De, H], gate_up_bias [E, 2 De]     FFN, per expert; rows: gate, up
//   layers.l.experts.down [E, H, De], down_bias [E, H]                FFN, per expert
//   layers.l.shared.gate_up [2 Ds, H], .down [H, Ds], .gate [1, H]    FFN, with shared experts (and their gate)
//   layers.l.dense.gate_up [2 D, H], .down [H, D]                     FFN, dense layers
//   final_norm [H], head [V, H]                head; without `head` if embeddings are tied
std::vector<ParamSpec> ParamTable(const ModelConfig& model);

// Contiguous partition of `total` things over `parts`: part i has [Begin(i), Begin(i + 1)).
inline int64_t PartBegin(int64_t total, int64_t parts, int64_t i) { return total * i / parts; }

// FLOPs of one training step of the whole model (forward 1, backward 2, causal attention counted as half,
// active experts only), for MFU.
double StepFlops(const ModelConfig& model, const TrainConfig& train);

}  // namespace disagmoe
