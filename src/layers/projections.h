// What lies before and after attention itself: queries, keys and values out of n1 = norm1(x), and the way back, of the two
// kinds of attention. Private to this folder.
//
// B sequences of s, T = B s tokens; other shapes as in attention.h.
#pragma once

#include <ATen/ATen.h>

#include "layers/attention.h"
#include "layers/attention_core.h"

namespace disagmoe {

inline Tensor EmptyLike(std::vector<int64_t> shape, const Tensor& like) { return at::empty(shape, like.options()); }
inline Tensor EmptyFp32(std::vector<int64_t> shape, const Tensor& like) {
  return at::empty(shape, like.options().dtype(at::kFloat));
}

// The parts of AttentionForward, from saved.x: before attention itself; from saved.o to saved.h; the router.
void ProjectInputs(const ModelConfig& c, const AttentionParams& p, AttentionSaved& saved);
void ProjectOutput(const AttentionParams& p, AttentionSaved& saved);
AttentionOutput RouteOutput(const ModelConfig& c, const AttentionParams& p, AttentionSaved& saved);

// x W^T + bias, which may be undefined.
Tensor Project(const Tensor& x, const Param& w, const Param& bias = {});
// grad += sum of rows in fp32.
void AddColumnSums(Tensor grad, const Tensor& rows);

// Fused projection, QK-norm. Project: sets qkv, and q and k with QK-norm. Inputs: views of these.
void PlainProject(const ModelConfig& c, const AttentionParams& p, const Tensor& n1, AttentionSaved& saved);
AttentionInputs PlainInputs(const ModelConfig& c, int64_t s, const AttentionSaved& saved);
// Room for gradients of the inputs: `kept` is what will be saved between the two steps.
AttentionInputs PlainRoom(const ModelConfig& c, int64_t s, const Tensor& like, AttentionSaved& kept);
// From d, which PlainRoom gave: d_n1 written, gradients of norms and bias added to.
void PlainBackward(const ModelConfig& c, const AttentionParams& p, const AttentionSaved& saved, AttentionInputs& d,
                   AttentionSaved& kept, Tensor& d_n1);

// Multi-head latent attention. Project: sets kv_a and q_a (or q). Inputs: made from these.
void LatentProject(const ModelConfig& c, const AttentionParams& p, const Tensor& n1, AttentionSaved& saved);
AttentionInputs LatentInputs(const ModelConfig& c, const AttentionParams& p, const AttentionSaved& saved);
AttentionInputs LatentRoom(const ModelConfig& c, int64_t s, const AttentionSaved& saved, AttentionSaved& kept);
void LatentBackward(const ModelConfig& c, const AttentionParams& p, AttentionSaved& kept, Tensor& d_n1);
void LatentBackwardWeights(const ModelConfig& c, const AttentionParams& p, const AttentionSaved& kept,
                           const Tensor& n1);
// For generation, with heads' keys not expanded from the latents: normed latents and the keys' RoPE part [T, rk + dr];
// of one token, queries that fit these [nh, rk + dr]; means of latents [nh, rk] as values of the heads [1, nh dv].
Tensor LatentKeys(const ModelConfig& c, const AttentionParams& p, const AttentionSaved& saved);
Tensor LatentQueries(const ModelConfig& c, const AttentionParams& p, const AttentionSaved& saved);
Tensor LatentValues(const ModelConfig& c, const AttentionParams& p, const Tensor& means);

}  // namespace disagmoe
