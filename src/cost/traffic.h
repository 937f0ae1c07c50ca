// What an exchange between the owners of tokens and the holders of experts moves, in rows (one row: a token's H
// values). A dispatch goes from owners to holders, a combine the same ways back.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/job.h"

namespace disagmoe {

// How a token chooses its k experts in a layer. Balanced: each set of k experts is as likely as any other; with limited
// groups (DeepSeek-V3), each choice of groups and then of k experts of theirs. Uneven: the sets of k that give each
// expert its probability and assume nothing else (largest entropy; Chen, Dempster, Liu, Biometrika 81, 1994): a set's
// likelihood is the product of its experts' odds. Limits on groups are not modelled there: a token then visits as many
// workers as if there were none.
struct Routing {
  int64_t k = 0;
  int64_t groups = 0, groups_per_token = 0;  // 0: no limit
  std::vector<double> probability;           // of each expert to be among a token's k; they sum to k, none is above 1
  std::vector<double> odds;                  // uneven only; infinite: an expert of every token
  double all_products = 0;                   // the sum of the products of all sets' odds; uneven only
  std::vector<char> shadowed;                // held by everyone: nothing travels to it. Empty: none
};
// By rank of popularity, the most popular first: as in Job; those that would exceed 1 are 1 and the rest shared out.
// Balanced where the job has the loads of each layer.
Routing RankRouting(const Job& job);
// By expert, of one layer: its own loads, or uneven experts in another order in each layer. The job.shadow_experts
// hottest are shadowed.
Routing RoutingOf(const Routing& by_rank, const Job& job, int64_t layer);
// Probability that a token has an expert in the set (by expert: whether it is in it).
double VisitProbability(const Routing& routing, const std::vector<char>& set);

// A worker that holds experts.
struct Holder {
  int node = 0;
  int64_t experts = 0;
  double pairs = 0;  // (token, expert) pairs a token brings it: sum of its experts' probabilities
  double visit = 0;  // probability that a token sends it a row. Uniform: 1 - C(E - e, k) / C(E, k) for its e experts
  double node_visit = 0;  // the same of all holders on its node
};

// Contiguous shares of experts [first, last): worker i has counts[i] of them, or (no counts) those of PartBegin.
// `nodes` by worker.
std::vector<Holder> HoldersOf(const Routing& routing, int64_t first, int64_t last, const std::vector<int>& nodes,
                              const std::vector<int>& counts = {});

struct SideRows {
  double nic = 0;     // rows over its NIC
  double nvlink = 0;  // rows over NVLink (node dedup: with those that it spreads over its node)
  double spine = 0;   // of nic: rows that leave their rail, over the spine
};
struct ExchangeRows {
  std::vector<SideRows> owners, holders;  // by worker
};
// tokens: of each owner. same_group: owner i and holder i are one worker, nothing travels between the two. Rails: rows
// go to all rails alike, also where the pools' own positions on their nodes would favour some. Owners and holders on
// machines of their own share the leaf switches: NIC i of every node is on leaf i. Of the side with more NICs a node
// the workers on rails that the other side lacks count; what comes from or goes to a flat network leaves its rail.
ExchangeRows RowsOf(const std::vector<int>& owner_nodes, double tokens, const std::vector<Holder>& holders,
                    bool same_group, Dedup dedup, const ClusterSpec& owner_cluster, const ClusterSpec& holder_cluster);

}  // namespace disagmoe
