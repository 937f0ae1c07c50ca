#include "layers/attention_blocks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "base/error.h"

namespace disagmoe {
namespace {

// Rows of whole sequences, or of one document.
struct Piece {
  int64_t sequence, sequences, row, rows;
};

std::vector<Piece> Pieces(int64_t B, int64_t s, const std::vector<int64_t>& documents) {
  if (documents.empty()) return {{0, B, 0, s}};
  std::vector<Piece> pieces;
  auto next = documents.begin();
  for (int64_t begin = 0; begin < B * s;) {
    next = std::upper_bound(next, documents.end(), begin);
    const int64_t sequence = begin / s, sequence_end = (sequence + 1) * s;
    const int64_t end = next == documents.end() ? sequence_end : std::min(*next, sequence_end);
    pieces.push_back({sequence, 1, begin - sequence * s, end - begin});
    begin = end;
  }
  return pieces;
}

// Masks of blocks, one for all of a shape.
class Masks {
 public:
  explicit Masks(const Tensor& like)
      : options_(like.options().dtype(like.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)) {}

  // Query i sees key j if 0 <= before + i - j < window.
  Tensor Get(int64_t rows, int64_t before, int64_t window) {
    Tensor& mask = masks_[{rows, before, window}];
    if (!mask.defined()) {
      const Tensor seen = at::ones({rows, before + rows}, options_.dtype(at::kBool)).tril_(before).triu_(before - window + 1);
      mask = at::zeros({rows, before + rows}, options_).masked_fill_(seen.logical_not_(), -INFINITY);
    }
    return mask;
  }

 private:
  at::TensorOptions options_;
  std::map<std::array<int64_t, 3>, Tensor> masks_;
};

}  // namespace

std::vector<AttentionBlock> AttentionBlocks(const Tensor& q, const AttentionShape& shape, int64_t at_once) {
  std::vector<AttentionBlock> blocks;
  Masks masks(q);
  for (const Piece& p : Pieces(q.size(0), q.size(1), shape.documents)) {
    const bool windowed = shape.window > 0 && shape.window < p.rows;
    if (!windowed && at_once == 0) {
      blocks.push_back({p.sequence, p.sequences, p.row, p.rows, p.row, p.rows, {}});
      continue;
    }
    const int64_t window = windowed ? shape.window : p.rows;
    // Small blocks waste less on masked keys, large ones less on calls: docs/attention.md has times.
    int64_t step = std::max<int64_t>(64, window / 4);
    if (at_once > 0) step = std::min(step, at_once);
    for (int64_t row = 0; row < p.rows; row += step) {
      const int64_t rows = std::min(step, p.rows - row), key = std::max<int64_t>(0, row - window + 1);
      blocks.push_back({p.sequence, p.sequences, p.row + row, rows, p.row + key, row + rows - key,
                        masks.Get(rows, row - key, window)});
    }
  }
  return blocks;
}

void CheckAttention(const AttentionInputs& in, const AttentionShape& shape, const Tensor& o) {
  const Tensor &q = in.q, &k = in.k, &v = in.v;
  DM_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && o.dim() == 4, "dimensions");
  const int64_t B = q.size(0), s = q.size(1), nh = q.size(2), nkv = k.size(2), dr = in.tail.defined() ? in.tail.size(3) : 0;
  DM_CHECK(B > 0 && s > 0 && nkv > 0 && nh % nkv == 0, "no rows, or heads that do not divide");
  DM_CHECK(k.sizes() == at::IntArrayRef({B, s, nkv, q.size(3) - dr}), "keys");
  DM_CHECK(v.sizes() == at::IntArrayRef({B, s, nkv, v.size(3)}), "values");
  DM_CHECK(o.sizes() == at::IntArrayRef({B, s, nh, v.size(3)}), "results");
  DM_CHECK(dr == 0 || in.tail.sizes() == at::IntArrayRef({B, s, 1, dr}), "the keys' common part");
  DM_CHECK(!shape.sinks.defined() || shape.sinks.sizes() == at::IntArrayRef({nh}), "sinks");
  const auto& documents = shape.documents;
  DM_CHECK(std::is_sorted(documents.begin(), documents.end()) &&
               (documents.empty() || (documents.front() >= 0 && documents.back() < B * s)),
           "first rows of documents");
}

}  // namespace disagmoe
