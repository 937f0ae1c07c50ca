// Documents of each slice of a micro-batch, drawn one after another: what attention takes beside the mean.
#include <map>

#include "base/rng.h"
#include "cost/cluster_tables.h"

namespace disagmoe {
namespace {

// An endless stream of documents, cut into pieces where they are longer than a sequence.
class Stream {
 public:
  Stream(const Sequence& sequence, int64_t window, uint64_t seed)
      : sequence_(sequence), window_(window), random_(SeedFor(seed, "documents")) {
    for (const auto& [length, share] : sequence.documents) shares_ += share;
  }

  // The sum of the keys that the next tokens see. A piece that ends in another slice counts in both by its tokens.
  double Next(int64_t tokens) {
    double keys = 0;
    while (tokens > 0) {
      if (left_ == 0) Draw();
      const int64_t taken = std::min(tokens, left_);
      keys += static_cast<double>(taken) * keys_;
      tokens -= taken;
      left_ -= taken;
    }
    return keys;
  }

 private:
  void Draw() {
    if (whole_ == 0 && rest_ == 0) {
      double at = random_.Uniform() * shares_;
      size_t i = 0;
      const Documents& of = sequence_.documents;
      while (i + 1 < of.size() && at >= of[i].second) at -= of[i++].second;
      const Pieces pieces(of[i].first, sequence_.tokens);
      whole_ = pieces.whole, rest_ = pieces.rest;
    }
    left_ = whole_ > 0 ? sequence_.tokens : rest_;
    if (whole_ > 0) {
      --whole_;
    } else {
      rest_ = 0;
    }
    keys_ = MeanKeys(left_, window_);
  }

  const Sequence& sequence_;
  const int64_t window_;
  Rng random_;
  double shares_ = 0, keys_ = 0;
  int64_t whole_ = 0, rest_ = 0, left_ = 0;  // pieces to come; tokens of this one
};

}  // namespace

// The same documents for every window; over all slices the mean is 1, so that a step has its FLOPs whatever is drawn.
void ClusterCosts::Tables::DrawDocuments() {
  const Sequence sequence = job.sequence();
  const size_t slices = static_cast<size_t>(s.num_micro_batches) * static_cast<size_t>(job.m);
  std::map<int64_t, int> rows;
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    const auto [at, is_new] = rows.try_emplace(model.window[layer], static_cast<int>(document_factors.size()));
    factors_of.push_back(at->second);
    if (!is_new) continue;
    Stream stream(sequence, model.window[layer], job.seed);
    std::vector<double> keys(slices);
    double all = 0;
    for (double& x : keys) all += x = stream.Next(int64_t{job.sequences} * job.seq_length);
    for (double& x : keys) x *= static_cast<double>(slices) / all;
    document_factors.push_back(std::move(keys));
  }
}

double ClusterCosts::Tables::ScoresBeyondMean(const Op& op, int c) const {
  if (op.stage % 2 != 0 || op.stage == stages - 1 || op.kind == OpKind::kWeight) return 0;
  const StageCost& cost = stage[At(op, c)];
  const size_t slice = static_cast<size_t>(op.micro_batch) * static_cast<size_t>(job.m) + classes[c].first_worker;
  const double beyond = document_factors[factors_of[op.stage / 2]][slice] - 1;
  return beyond * (op.kind == OpKind::kForward ? cost.forward_scores_ns : cost.backward_scores_ns);
}

}  // namespace disagmoe
