// What an exchange between the owners of tokens and the holders of experts moves, in rows (one row: a token's H values).
// A dispatch goes from owners to holders, a combine the same ways back.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/job.h"

namespace disagmoe {

// Probability of each expert to be among a token's k, by expert. Uniform: k / E. Popularity as in Job; those that would
// exceed 1 are 1 and the rest shared out. Another order of experts in each layer.
std::vector<double> ExpertProbabilities(const Job& job, int64_t layer);

// A worker that holds experts.
struct Holder {
  int node = 0;
  double pairs = 0;  // (token, expert) pairs a token brings it: sum of its experts' probabilities
  double visit = 0;  // probability that a token sends it a row. Uniform: 1 - C(E - e, k) / C(E, k) for its e experts
  double node_visit = 0;  // the same of all holders on its node
};

// Contiguous share of experts [first, last) over `workers`, worker i has those of PartBegin. `nodes` by worker.
std::vector<Holder> HoldersOf(const std::vector<double>& probabilities, int64_t k, int64_t first, int64_t last,
                              const std::vector<int>& nodes);

struct SideRows {
  double nic = 0;     // rows over its NIC
  double nvlink = 0;  // rows over NVLink (node dedup: with those that it spreads over its node)
  double spine = 0;   // of nic: rows that leave their rail, over the spine
};
struct ExchangeRows {
  std::vector<SideRows> owners, holders;  // by worker
};
// tokens: of each owner. same_group: owner i and holder i are one worker, nothing travels between the two.
ExchangeRows RowsOf(const std::vector<int>& owner_nodes, double tokens, const std::vector<Holder>& holders, bool same_group,
                    Dedup dedup, const ClusterSpec& cluster);

}  // namespace disagmoe
