#include "cost/traffic.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "base/rng.h"
#include "spec/params.h"

namespace disagmoe {
namespace {

Job MakeJob(int64_t experts, int64_t k) {
  Job job;
  job.model.num_experts = experts;
  job.model.experts_per_token = k;
  return job;
}

Routing Of(const Job& job, int64_t layer = 0) { return RoutingOf(RankRouting(job), job, layer); }

ClusterSpec Flat() {
  ClusterSpec c;
  c.topology = "flat";
  return c;
}

double Sum(const std::vector<double>& x) { return std::accumulate(x.begin(), x.end(), 0.0); }

// field.md: 10 experts on 3 workers are 4 + 3 + 3; with k = 2 a token misses 4 of them with C(6,2) / C(10,2) = 1/3,
// 3 of them with C(7,2) / C(10,2) = 7/15: 2/3 + 2 * 8/15 = 26/15 = 1.733 workers. (PartBegin gives the 4 to the last.)
TEST(Traffic, VisitsOfUnevenShares) {
  const std::vector<Holder> holders = HoldersOf(Of(MakeJob(10, 2)), 0, 10, {0, 0, 1});
  double visits = 0, pairs = 0;
  int64_t experts = 0;
  for (const Holder& h : holders) visits += h.visit, pairs += h.pairs, experts += h.experts;
  EXPECT_NEAR(visits, 26.0 / 15, 1e-12);
  EXPECT_NEAR(pairs, 2, 1e-12);
  EXPECT_EQ(experts, 10);
  // The first two share a node: 6 experts, missed with C(4,2) / C(10,2) = 6/45.
  EXPECT_NEAR(holders[0].node_visit, 39.0 / 45, 1e-12);
  EXPECT_NEAR(holders[1].node_visit, 39.0 / 45, 1e-12);
  EXPECT_EQ(holders[2].experts, 4);
  EXPECT_NEAR(holders[2].node_visit, 2.0 / 3, 1e-12);
}

TEST(Traffic, ProbabilitiesAddUpToK) {
  for (double skew : {0.0, 1e-9, 0.3, 1.0, 2.0, 10.0}) {
    for (const auto& [experts, k] : {std::pair{8, 2}, {64, 6}, {128, 8}, {256, 8}, {5, 5}, {3, 1}}) {
      Job job = MakeJob(experts, k);
      job.routing_skew = skew;
      const Routing r = Of(job, 3);
      EXPECT_NEAR(Sum(r.probability), k, 1e-9) << skew;
      for (double p : r.probability) {
        EXPECT_GE(p, 0);
        EXPECT_LE(p, 1);
      }
      // Every expert is visited as often as it should be, alone and all together.
      for (int e = 0; e < experts; ++e) {
        std::vector<char> set(experts, 0);
        set[e] = 1;
        EXPECT_NEAR(VisitProbability(r, set), r.probability[e], 1e-9) << skew << ", expert " << e << " of " << experts;
      }
      EXPECT_NEAR(VisitProbability(r, std::vector<char>(experts, 1)), 1, 1e-12);
    }
  }
}

// Loads 6, 1, 1, 1, 1 and k = 2: the first would have 2 * 6/10 > 1, so it has 1 and the others a quarter each.
TEST(Traffic, LoadsOfARecordedRun) {
  Job job = MakeJob(5, 2);
  job.expert_loads = {{1, 1, 6, 1, 1}};
  std::vector<double> p = RankRouting(job).probability;
  EXPECT_DOUBLE_EQ(p[0], 1);
  for (int r = 1; r < 5; ++r) EXPECT_DOUBLE_EQ(p[r], 0.25);
  // Loads 4, 2, 1, 1 and k = 2: 1, then 1 * 2/4, 1/4, 1/4.
  job = MakeJob(4, 2);
  job.expert_loads = {{1, 2, 4, 1}};
  p = RankRouting(job).probability;
  EXPECT_EQ(p, (std::vector<double>{1, 0.5, 0.25, 0.25}));
}

TEST(Traffic, LayersHaveTheirExpertsInOtherOrders) {
  Job job = MakeJob(64, 6);
  job.routing_skew = 1;
  EXPECT_EQ(Of(job, 3).probability, Of(job, 3).probability);
  EXPECT_NE(Of(job, 3).probability, Of(job, 4).probability);
  std::vector<double> a = Of(job, 3).probability, b = RankRouting(job).probability;
  std::sort(a.rbegin(), a.rend());
  EXPECT_EQ(a, b);
  job.seed = 2;
  EXPECT_NE(Of(job, 3).probability, Of([&] { Job other = job; other.seed = 1; return other; }(), 3).probability);
}

// A little unevenness moves little: no step between balanced and uneven.
TEST(Traffic, UnevenRoutingGoesOverIntoBalanced) {
  Job even = MakeJob(64, 6), odd = even;
  odd.routing_skew = 1e-6;
  std::vector<int> nodes(8);
  std::iota(nodes.begin(), nodes.end(), 0);
  const std::vector<Holder> a = HoldersOf(Of(even), 0, 64, nodes), b = HoldersOf(Of(odd), 0, 64, nodes);
  for (int w = 0; w < 8; ++w) EXPECT_NEAR(a[w].visit, b[w].visit, 1e-5);
}

// All sets of k experts, as bits, and how likely each is.
std::vector<std::pair<uint32_t, double>> AllSets(const Routing& r) {
  const auto experts = static_cast<int>(r.probability.size());
  std::vector<std::pair<uint32_t, double>> out;
  const int size = r.groups > 0 ? experts / static_cast<int>(r.groups) : experts;
  for (uint32_t groups = 0; groups < (1u << std::max<int64_t>(1, r.groups)); ++groups) {
    if (std::popcount(groups) != std::max<int64_t>(1, r.groups_per_token)) continue;
    for (uint32_t set = 0; set < (1u << experts); ++set) {
      if (std::popcount(set) != r.k) continue;
      double likely = 1;
      for (int e = 0; e < experts; ++e) {
        if (!(set >> e & 1)) likely *= !r.odds.empty() && std::isinf(r.odds[e]) ? 0 : 1;
        if (!(set >> e & 1)) continue;
        likely *= groups >> (e / size) & 1;
        if (!r.odds.empty() && !std::isinf(r.odds[e])) likely *= r.odds[e];
      }
      if (likely > 0) out.push_back({set, likely});
    }
  }
  double all = 0;
  for (const auto& [set, likely] : out) all += likely;
  for (auto& [set, likely] : out) likely /= all;
  return out;
}

// Rows of one token of each owner, sent one by one. A row that a node gets once lands on each of its holders as often.
ExchangeRows SendOneByOne(const Routing& r, const std::vector<int>& owners, const std::vector<int>& holders,
                          bool same_group, Dedup dedup) {
  const auto experts = static_cast<int64_t>(r.probability.size());
  const auto n = static_cast<int64_t>(holders.size());
  ExchangeRows out;
  out.owners.resize(owners.size());
  out.holders.resize(holders.size());
  for (const auto& [set, likely] : AllSets(r)) {
    for (size_t i = 0; i < owners.size(); ++i) {
      std::multiset<int64_t> to;
      for (int64_t e = 0; e < experts; ++e) {
        if (!(set >> e & 1) || (!r.shadowed.empty() && r.shadowed[e])) continue;
        int64_t w = 0;
        while (PartBegin(experts, n, w + 1) <= e) ++w;
        if (dedup == Dedup::kExpert || !to.contains(w)) to.insert(w);
      }
      std::set<int> nodes;
      for (int64_t w : to) {
        if (same_group && w == static_cast<int64_t>(i)) continue;
        if (holders[w] == owners[i]) {
          out.owners[i].nvlink += likely;
          out.holders[w].nvlink += likely;
        } else if (dedup != Dedup::kNode) {
          out.owners[i].nic += likely;
          out.holders[w].nic += likely;
        } else {
          nodes.insert(holders[w]);
        }
      }
      for (int node : nodes) {
        out.owners[i].nic += likely;
        const auto landings = static_cast<double>(std::count(holders.begin(), holders.end(), node));
        for (int64_t landing = 0; landing < n; ++landing) {
          if (holders[landing] != node) continue;
          out.holders[landing].nic += likely / landings;
          for (int64_t w : to) {
            if (holders[w] == node && w != landing) out.holders[w].nvlink += likely / landings;
          }
        }
      }
    }
  }
  return out;
}

void ExpectEqual(const std::vector<SideRows>& a, const std::vector<SideRows>& b, double tokens,
                 const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_NEAR(a[i].nic, tokens * b[i].nic, 1e-6) << what << " " << i;
    EXPECT_NEAR(a[i].nvlink, tokens * b[i].nvlink, 1e-6) << what << " " << i;
  }
}

// Random layouts of 9 experts or fewer against every choice of experts; and what owners send over NICs is what holders
// receive, over NVLink too except for what a node spreads.
TEST(Traffic, RowsOneByOne) {
  Rng random(7);
  for (int round = 0; round < 120; ++round) {
    const int64_t experts = 4 + static_cast<int64_t>(random.Below(6));
    Job job = MakeJob(experts, 1 + static_cast<int64_t>(random.Below(4)));
    if (round % 3 == 1) job.routing_skew = 0.2 + 3 * random.Uniform();
    if (round % 3 == 2) job.expert_loads.assign(1, std::vector<double>(experts, 0));
    for (std::vector<double>& loads : job.expert_loads) {
      for (double& x : loads) x = random.Uniform();
    }
    if (round % 4 == 3) job.shadow_experts = 1 + static_cast<int>(random.Below(2));
    const bool same = random.Below(2) == 0;
    std::vector<int> holders(1 + random.Below(static_cast<uint64_t>(std::min<int64_t>(experts, 5))));
    std::vector<int> owners(same ? holders.size() : 1 + random.Below(4));
    for (int& node : holders) node = static_cast<int>(random.Below(3));
    for (int& node : owners) node = static_cast<int>(random.Below(3));
    if (same) owners = holders;
    const Routing routing = Of(job, round);
    const std::vector<Holder> h = HoldersOf(routing, 0, experts, holders);
    for (Dedup dedup : {Dedup::kExpert, Dedup::kWorker, Dedup::kNode}) {
      const std::string what = "round " + std::to_string(round) + ", dedup " + std::to_string(static_cast<int>(dedup));
      const ExchangeRows rows = RowsOf(owners, 10, h, same, dedup, Flat(), Flat());
      const ExchangeRows expected = SendOneByOne(routing, owners, holders, same, dedup);
      ExpectEqual(rows.owners, expected.owners, 10, what + ", owner");
      ExpectEqual(rows.holders, expected.holders, 10, what + ", holder");
      double sent = 0, received = 0;
      for (const SideRows& x : rows.owners) sent += x.nic + (dedup == Dedup::kNode ? 0 : x.nvlink);
      for (const SideRows& x : rows.owners) EXPECT_EQ(x.spine, 0);
      for (const SideRows& x : rows.holders) received += x.nic + (dedup == Dedup::kNode ? 0 : x.nvlink);
      EXPECT_NEAR(sent, received, 1e-9) << what;
    }
  }
}

// Groups of experts of which a token uses some only, against every choice.
TEST(Traffic, LimitedGroupsOneByOne) {
  Job job = MakeJob(12, 3);
  job.model.expert_groups = 4;
  for (int64_t limit : {1, 2, 3, 4}) {
    job.model.groups_per_token = limit;
    const Routing routing = Of(job);
    const std::vector<std::vector<int>> layouts{{0, 0, 1, 1}, {0, 1, 2}, {0, 0, 1, 1, 2}, {0, 1, 0, 1, 0, 1}};
    for (const std::vector<int>& nodes : layouts) {
      const std::vector<Holder> h = HoldersOf(routing, 0, 12, nodes);
      for (Dedup dedup : {Dedup::kExpert, Dedup::kWorker, Dedup::kNode}) {
        const ExchangeRows expected = SendOneByOne(routing, {0, 1, 2, 3}, nodes, false, dedup);
        const ExchangeRows rows = RowsOf({0, 1, 2, 3}, 1, h, false, dedup, Flat(), Flat());
        ExpectEqual(rows.owners, expected.owners, 1, "owner");
        ExpectEqual(rows.holders, expected.holders, 1, "holder");
      }
    }
  }
}

// DeepSeek-V3 (arXiv 2412.19437, sections 2.1.2 and 3.2.2): 256 experts over 64 GPUs of 8 nodes, 8 of them a token, on
// at most 4 nodes. A node is one of a token's 4 of 8 with 1/2, and then misses all 8 of the 128 experts of those nodes
// with prod (96 - i) / (128 - i). Without the limit, 8 (1 - prod (224 - i) / (256 - i)).
TEST(Traffic, DeepseekV3SendsToFourNodes) {
  Job job;
  job.model = LoadModelShape("deepseek-v3");
  std::vector<int> nodes(64), far(8, 100);
  for (int w = 0; w < 64; ++w) nodes[w] = w / 8;
  const auto rows = [&] {
    const std::vector<Holder> holders = HoldersOf(Of(job), 0, 256, nodes);
    const ClusterSpec c = LoadCluster("h800x128");
    return RowsOf(far, 1, holders, false, Dedup::kNode, c, c).owners[0].nic;
  };
  double limited = 1, free = 1;
  for (int i = 0; i < 8; ++i) limited *= (96.0 - i) / (128 - i), free *= (224.0 - i) / (256 - i);
  EXPECT_NEAR(rows(), 8 * 0.5 * (1 - limited), 1e-12);
  EXPECT_LE(rows(), 4);
  EXPECT_GT(rows(), 3.5);
  job.model.groups_per_token = 0;
  EXPECT_NEAR(rows(), 8 * (1 - free), 1e-12);
  EXPECT_GT(rows(), 5);
}

// schedule.md section 6: of a colocated group over two nodes, half of the copies leave the node; 1/16 stays on the
// worker.
TEST(Traffic, HalfLeavesTheNode) {
  std::vector<int> nodes(16, 0);
  std::fill(nodes.begin() + 8, nodes.end(), 1);
  const std::vector<Holder> holders = HoldersOf(Of(MakeJob(64, 6)), 0, 64, nodes);
  const ClusterSpec c = LoadCluster("h800x16");
  const ExchangeRows rows = RowsOf(nodes, 1000, holders, true, Dedup::kExpert, c, c);
  for (int w = 0; w < 16; ++w) {
    for (const SideRows& side : {rows.owners[w], rows.holders[w]}) {
      EXPECT_NEAR(side.nic, 1000 * 6 / 2.0, 1e-9);
      EXPECT_NEAR(side.nvlink, 1000 * 6 * 7 / 16.0, 1e-9);
      EXPECT_NEAR(side.spine, 1000 * 6 / 2.0 * 7 / 8, 1e-9);  // all rails but one's own, of eight NICs
    }
  }
  // Four NICs a node are four rails; a node's rows stay on theirs; one node sends nothing.
  ClusterSpec four = LoadCluster("h800x16");
  four.nics_per_node = 4;
  EXPECT_NEAR(RowsOf(nodes, 1000, holders, true, Dedup::kExpert, four, four).owners[0].spine, 3000 * 3 / 4.0, 1e-9);
  EXPECT_EQ(RowsOf(nodes, 1000, holders, true, Dedup::kNode, four, four).owners[0].spine, 0);
  // Eight rails here and four there: of the four, a row's other end is on the same one of eight; the workers on the
  // other four rails have nobody on theirs. With node dedup rows go over all eight alike, half on the wrong one.
  for (const auto& [dedup, few, many] : {std::tuple{Dedup::kExpert, 7 / 8.0, 1.0}, {Dedup::kNode, 0.5, 1.0}}) {
    const ExchangeRows up = RowsOf(nodes, 1000, holders, false, dedup, four, c);
    const ExchangeRows down = RowsOf(nodes, 1000, holders, false, dedup, c, four);
    EXPECT_NEAR(up.owners[3].spine, few * up.owners[3].nic, 1e-9);
    EXPECT_NEAR(up.holders[3].spine, many * up.holders[3].nic, 1e-9);
    EXPECT_NEAR(down.owners[3].spine, many * down.owners[3].nic, 1e-9);
    EXPECT_NEAR(down.holders[3].spine, few * down.holders[3].nic, 1e-9);
    EXPECT_GT(up.owners[3].nic, 0);
    // To a flat network everything leaves its rail; that has no spine.
    const ExchangeRows flat = RowsOf(nodes, 1000, holders, false, dedup, c, Flat());
    EXPECT_EQ(flat.owners[3].spine, flat.owners[3].nic);
    EXPECT_EQ(flat.holders[3].spine, 0);
  }
  const std::vector<int> one(16, 5);
  const std::vector<Holder> near = HoldersOf(Of(MakeJob(64, 6)), 0, 64, one);
  EXPECT_EQ(RowsOf(one, 1000, near, true, Dedup::kExpert, four, four).owners[0].nic, 0);
}

// Experts that everyone holds get no rows; the others all of theirs.
TEST(Traffic, ShadowedExpertsGetNoRows) {
  Job job = MakeJob(16, 4);
  job.routing_skew = 1;
  job.shadow_experts = 3;
  const Routing r = Of(job, 2);
  double hot = 0;
  std::vector<double> sorted = r.probability;
  std::sort(sorted.rbegin(), sorted.rend());
  for (int e = 0; e < 16; ++e) hot += r.shadowed[e] ? r.probability[e] : 0;
  EXPECT_NEAR(hot, sorted[0] + sorted[1] + sorted[2], 1e-12);
  double pairs = 0;
  for (const Holder& h : HoldersOf(r, 0, 16, {0, 0, 1, 1})) pairs += h.pairs;
  EXPECT_NEAR(pairs, 4 - hot, 1e-12);
  job.routing_skew = 0;  // none is hot: spread over the experts, and so over the workers
  const Routing even = Of(job);
  EXPECT_EQ(std::count(even.shadowed.begin(), even.shadowed.end(), 1), 3);
  EXPECT_TRUE(even.shadowed[0] && even.shadowed[5] && even.shadowed[10]);
}

// 4 A and 12 F workers on two nodes of eight: A 0..3 | F 0..11 apart; mixed, two A and six F on each. Positions of A
// along the line are 3/24, 9/24, 15/24, 21/24, of F 1/24, 3/24, ..., A first where equal:
//   F0 A0 F1 F2 F3 A1 F4 F5 | F6 A2 F7 F8 F9 A3 F10 F11
TEST(Traffic, MixedNodes) {
  Job job;
  job.cluster = LoadCluster("h800x16");
  job.m = 4;
  job.n = 12;
  EXPECT_EQ(NodesOf(job), (std::vector<int>{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1}));
  job.mixed_nodes = true;
  EXPECT_EQ(NodesOf(job), (std::vector<int>{0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1}));
  // Half of the rows stay on their node.
  job.model.num_experts = 24;
  job.model.experts_per_token = 2;
  const std::vector<int> nodes = NodesOf(job);
  const std::vector<Holder> holders = HoldersOf(Of(job), 0, 24, {nodes.begin() + 4, nodes.end()});
  const ExchangeRows rows = RowsOf({nodes.begin(), nodes.begin() + 4}, 1, holders, false, Dedup::kExpert,
                                   job.cluster, job.cluster);
  for (const SideRows& owner : rows.owners) {
    EXPECT_NEAR(owner.nic, 1, 1e-12);
    EXPECT_NEAR(owner.nvlink, 1, 1e-12);
  }
}

}  // namespace
}  // namespace disagmoe
