// Weights and optimizer state to and from checkpoints, independent of the layout.
//
// An array is "<kind>/<parameter>" with kind weight, exp_avg or exp_avg_sq; of a per-expert parameter one array an
// expert, "<kind>/<parameter>#<expert>". A rank that owns only part of one writes "<...>@begin:end", flat.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "layers/optimizer.h"

namespace disagmoe {

// What must be equal to continue a run: model, batch, sequence length, dtype, seed, data (Corpus::Fingerprint). As text.
std::string ResumeKey(const RunConfig& config, const std::string& data);

// What a rank writes to a checkpoint, as arrays in host memory.
class StateParts {
 public:
  // The `weights` ranges of the store and the `moments` ranges of the optimizer (both flat; the moments must be owned).
  // copy: training may go on; costs 12 bytes a parameter, kept for the next time. Else they are read where they are.
  void Take(const ParamStore& store, const AdamW& optimizer, const std::vector<Range>& weights,
            const std::vector<Range>& moments, bool copy);
  const std::vector<NamedArray>& arrays() const { return arrays_; }
  uint64_t bytes() const;

 private:
  void Add(const std::string& kind, const ParamStore& store, const at::Tensor& flat, int64_t flat_begin, const Range& wanted);
  at::Tensor memory_;  // of the copies
  int64_t used_ = 0;
  bool copy_ = false;
  std::vector<at::Tensor> keep_;  // what the arrays point into
  std::vector<NamedArray> arrays_;
};

// May be called on any thread.
CheckpointFile WriteParts(const std::string& path, const StateParts& parts);
// Fills everything that the store holds, and the optimizer's owned ranges (optimizer may be null: weights only), from
// all the files of a checkpoint folder. Throws Error if something is missing or does not fit; verifies the hash of
// each file that it reads from.
void LoadState(const std::string& folder, ParamStore& store, AdamW* optimizer);

// The weights that train.init names, or random ones: fills the master weights that `store` holds, and no others are read.
void SetInitialWeights(const RunConfig& config, ParamStore& store);

}  // namespace disagmoe
