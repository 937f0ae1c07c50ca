// AdamW (Loshchilov and Hutter 2019) over flat ranges of a ParamStore, and the learning rate of a step.
//
// A router's correction (ParamSpec::counts_load) is not learned by it. Where others have gradients it has the load: how many
// tokens each expert got in the step, of all replicas. A step adds router_bias_update_rate to it where the load is below the
// mean (tokens k / E exactly, no rounding), takes it away where it is above (arXiv 2408.15664, algorithm 1; 2412.19437,
// section 2.1.2). Loads are no part of the gradient norm and are not clipped. They are exact up to 2^24 tokens an expert.
#pragma once

#include <cstdint>
#include <vector>

#include "layers/param_store.h"

namespace disagmoe {

struct Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

class AdamW {
 public:
  // State exists only for the ranges `owned` (ascending, disjoint) of the store's flat arrays. The store must outlive it.
  // `model` is needed if the store has corrections.
  AdamW(ParamStore& store, std::vector<Range> owned, const TrainConfig& train, const ModelConfig* model = nullptr);
  // Updates the owned ranges with gradients times `coefficient` (of clipping), then refreshes the computing weights.
  // `step` counts from 1. The gradients are used up.
  void Step(int64_t step, double lr, double coefficient);
  // Moments of owned()[i], flat fp32.
  const std::vector<Range>& owned() const { return owned_; }
  at::Tensor exp_avg(size_t i) const { return exp_avg_[i]; }
  at::Tensor exp_avg_sq(size_t i) const { return exp_avg_sq_[i]; }

 private:
  struct Lists {
    std::vector<at::Tensor> weight, grad, m, v, step;
  };
  struct Load {
    at::Tensor correction, load;
  };
  void MoveCorrections();

  ParamStore& store_;
  std::vector<Range> owned_;
  TrainConfig train_;
  std::vector<at::Tensor> exp_avg_, exp_avg_sq_;
  Lists decay_, plain_;
  std::vector<Load> loads_;
  double pairs_ = 0, experts_ = 0, rate_ = 0;  // of a step and layer: pairs; of the model: E, router_bias_update_rate
};

// Linear warm-up to lr over lr_warmup_steps, then cosine to min_lr at lr_decay_steps (0: the last step). Steps from 1.
double LearningRate(const TrainConfig& train, int64_t step);
// Sum of squares of a flat fp32 tensor, in fp64, independent of the number of threads.
double SumOfSquares(const at::Tensor& flat);
// Of the gradients in this range of a store, loads left out.
double GradSquares(const ParamStore& store, const Range& range);
// Gradients are multiplied by this: min(1, clip / norm); 1 if clip is 0.
double ClipCoefficient(double clip, double norm);

}  // namespace disagmoe
