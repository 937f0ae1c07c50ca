#include "layers/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace disagmoe {

AdamW::AdamW(ParamStore& store, std::vector<Range> owned, const TrainConfig& train, const ModelConfig* model)
    : store_(store), owned_(std::move(owned)), train_(train) {
  if (model != nullptr) {
    const int64_t tokens = train.micro_batches * train.micro_batch_size * train.seq_length;
    pairs_ = static_cast<double>(tokens * model->num_experts_per_tok);
    experts_ = static_cast<double>(model->num_experts);
    rate_ = model->router_bias_update_rate;
  }
  const at::Tensor weight = store.flat_master(), grad = store.flat_grad();
  for (const Range& range : owned_) {
    exp_avg_.push_back(at::zeros({range.size()}, weight.options()));
    exp_avg_sq_.push_back(at::zeros({range.size()}, weight.options()));
    // Neighbours with the same decay become one slice.
    int64_t begin = range.begin;
    bool decay = false;
    auto flush = [&](int64_t end) {
      if (end <= begin) return;
      Lists& lists = decay ? decay_ : plain_;
      lists.weight.push_back(weight.narrow(0, begin, end - begin));
      lists.grad.push_back(grad.narrow(0, begin, end - begin));
      lists.m.push_back(exp_avg_.back().narrow(0, begin - range.begin, end - begin));
      lists.v.push_back(exp_avg_sq_.back().narrow(0, begin - range.begin, end - begin));
      lists.step.push_back(at::zeros({}, weight.options()));
      begin = end;
    };
    for (size_t i = 0; i < store.held().size(); ++i) {
      const int64_t from = std::max(store.offset(i), range.begin), to = std::min(store.offset(i + 1), range.end);
      if (from >= to) continue;
      if (store.held()[i].spec.counts_load) {
        DM_CHECK(model != nullptr, "corrections without the model");
        flush(from);
        const int64_t size = std::min(store.offset(i) + store.held()[i].numel(), range.end) - from;
        if (size > 0) loads_.push_back({weight.narrow(0, from, size), grad.narrow(0, from, size)});
        begin = to;
        continue;
      }
      if (store.held()[i].spec.decay != decay) {
        flush(from);
        decay = store.held()[i].spec.decay;
      }
    }
    flush(range.end);
  }
}

void AdamW::Step(int64_t step, double lr, double coefficient) {
  at::Tensor scale;  // libtorch divides gradients by it
  if (coefficient != 1) scale = at::full({}, 1 / coefficient, store_.flat_grad().options());
  for (Lists* lists : {&decay_, &plain_}) {
    if (lists->weight.empty()) continue;
    for (auto& t : lists->step) t.fill_(static_cast<double>(step));
    at::_fused_adamw_(lists->weight, lists->grad, lists->m, lists->v, {}, lists->step, lr, train_.adam_beta1,
                      train_.adam_beta2, lists == &decay_ ? train_.weight_decay : 0.0, train_.adam_eps, /*amsgrad=*/false,
                      /*maximize=*/false, scale.defined() ? std::optional<at::Tensor>(scale) : std::nullopt,
                      /*found_inf=*/std::nullopt);
  }
  MoveCorrections();
  for (const Range& range : owned_) store_.Refresh(range.begin, range.end);
}

// All in whole numbers: below the mean if load * E < pairs.
void AdamW::MoveCorrections() {
  for (Load& c : loads_) {
    const at::Tensor below = (pairs_ - c.load.to(at::kDouble) * experts_).sign().to(at::kFloat);
    c.correction.add_(below, rate_);
  }
}

double LearningRate(const TrainConfig& t, int64_t step) {
  if (step <= t.lr_warmup_steps) return t.lr * static_cast<double>(step) / static_cast<double>(t.lr_warmup_steps);
  const int64_t last = t.lr_decay_steps > 0 ? t.lr_decay_steps : t.steps;
  if (step >= last) return t.min_lr;
  const double part = static_cast<double>(step - t.lr_warmup_steps) / static_cast<double>(last - t.lr_warmup_steps);
  return t.min_lr + (t.lr - t.min_lr) * 0.5 * (1 + std::cos(std::numbers::pi * part));
}

double SumOfSquares(const at::Tensor& flat) {
  if (!flat.is_cpu()) return at::linalg_vector_norm(flat, 2, {}, false, at::kDouble).square().item<double>();
  constexpr int64_t kBlock = 1 << 15;
  const int64_t n = flat.numel(), blocks = (n + kBlock - 1) / kBlock;
  const float* x = flat.const_data_ptr<float>();
  std::vector<double> sums(blocks);
  at::parallel_for(0, blocks, 4, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      double lanes[8] = {};
      const int64_t end = std::min(n, (b + 1) * kBlock);
      int64_t i = b * kBlock;
      for (; i + 8 <= end; i += 8) {
        for (int64_t j = 0; j < 8; ++j) lanes[j] += static_cast<double>(x[i + j]) * x[i + j];
      }
      for (; i < end; ++i) lanes[0] += static_cast<double>(x[i]) * x[i];
      for (double lane : lanes) sums[b] += lane;
    }
  });
  double total = 0;
  for (double s : sums) total += s;
  return total;
}

double GradSquares(const ParamStore& store, const Range& range) {
  double total = 0;
  int64_t begin = range.begin;
  const auto add = [&](int64_t end) {
    if (end > begin) total += SumOfSquares(store.flat_grad().narrow(0, begin, end - begin));
  };
  for (size_t i = 0; i < store.held().size(); ++i) {
    if (!store.held()[i].spec.counts_load || store.offset(i + 1) <= begin) continue;
    add(std::min(store.offset(i), range.end));
    begin = store.offset(i + 1);
  }
  add(range.end);
  return total;
}

double ClipCoefficient(double clip, double norm) {
  if (clip <= 0 || !(norm > clip)) return 1;
  return clip / norm;
}

}  // namespace disagmoe
