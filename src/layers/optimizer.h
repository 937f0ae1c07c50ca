// AdamW (Loshchilov and Hutter 2019) over flat ranges of a ParamStore, and the learning rate of a step.
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
  AdamW(ParamStore& store, std::vector<Range> owned, const TrainConfig& train);
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
  ParamStore& store_;
  std::vector<Range> owned_;
  TrainConfig train_;
  std::vector<at::Tensor> exp_avg_, exp_avg_sq_;
  Lists decay_, plain_;
};

// Linear warm-up to lr over lr_warmup_steps, then cosine to min_lr at lr_decay_steps (0: the last step). Steps from 1.
double LearningRate(const TrainConfig& train, int64_t step);
// Sum of squares of a flat fp32 tensor, in fp64, independent of the number of threads.
double SumOfSquares(const at::Tensor& flat);
// Gradients are multiplied by this: min(1, clip / norm); 1 if clip is 0.
double ClipCoefficient(double clip, double norm);

}  // namespace disagmoe
