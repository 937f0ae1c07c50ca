// Which queries are computed with which keys. Private to this folder.
#pragma once

#include <vector>

#include "layers/attention_core.h"

namespace disagmoe {

// Queries [row, row + rows) of sequences [sequence, sequence + sequences) against keys [key, key + keys).
struct AttentionBlock {
  int64_t sequence = 0, sequences = 0, row = 0, rows = 0, key = 0, keys = 0;
  Tensor mask;  // [rows, keys], zeros and -infinity; undefined: causal, with key = row

  // The block's part of x, sequences first and rows in `dim`.
  Tensor Queries(const Tensor& x, int64_t dim) const { return Part(x, dim, row, rows); }
  Tensor Keys(const Tensor& x, int64_t dim) const { return Part(x, dim, key, keys); }

 private:
  Tensor Part(const Tensor& x, int64_t dim, int64_t first, int64_t count) const {
    if (sequences == x.size(0) && count == x.size(dim)) return x;  // views cost as much as short sequences
    return x.narrow(0, sequence, sequences).narrow(dim, first, count);
  }
};

// All of them, for inputs q [B, s, ...]. at_once: so many queries at most in a block with a mask; without a window
// there is no mask if it is 0.
std::vector<AttentionBlock> AttentionBlocks(const Tensor& q, const AttentionShape& shape, int64_t at_once);

// The shapes of the arguments, checked.
void CheckAttention(const AttentionInputs& in, const AttentionShape& shape, const Tensor& o);

}  // namespace disagmoe
