// One step away from a candidate.
#include <algorithm>

#include "plan/grid.h"

namespace disagmoe {

std::vector<Candidate> Grid::Neighbours(const Candidate& from) const {
  std::vector<Candidate> out;
  const auto add = [&](const auto& change) {
    Candidate c = from;
    change(c);
    if (Complete(&c) && !(c == from) && std::find(out.begin(), out.end(), c) == out.end()) out.push_back(c);
  };
  // Fewer replicas: less to sum over a slow network, more micro-batches each.
  for (const int replicas : {from.pools.replicas - 1, from.pools.replicas / 2}) {
    Candidate c = from;
    if (replicas >= 1 && Complete(&c, replicas) && std::find(out.begin(), out.end(), c) == out.end()) out.push_back(c);
  }
  const auto steps = [&](int value) { return std::vector<int>{value - 1, value + 1, value / 2, 2 * value}; };
  const Pools& x = from.pools;
  const bool m_free = !Given("m") && !Given("ep"), n_free = !Given("n");
  const bool p_a_free = !Given("p") && !Given("p_a"), p_f_free = !Given("p") && !Given("p_f");
  const auto most_m = [&](Pools y) { return static_cast<int>(MostM(y)); };
  const auto most_n = [&](Pools y) { return static_cast<int>(MostN(y)); };
  if (colocated_) {
    for (int value : steps(x.m))
      if (m_free) add([&](Candidate& c) { c.pools.m = value; });
    for (int value : steps(x.p_a)) {
      if (!p_a_free || value < 1) continue;
      add([&](Candidate& c) { c.pools.p_a = value; });
      add([&](Candidate& c) {
        c.pools.p_a = value, c.virtual_stages = std::max(1, from.virtual_stages * x.p_a / value);
      });
      add([&](Candidate& c) { c.pools.p_a = value, c.pools.m = std::max(1, x.p_a * x.m / std::max(1, value)); });
    }
    if (choices_.virtual_stages.size() > 1 && x.p_a > 1) {
      for (int value : steps(from.virtual_stages)) add([&](Candidate& c) { c.virtual_stages = value; });
    }
    for (int parts : choices_.parts) add([&](Candidate& c) { c.parts = parts; });
  } else {
    for (int value : steps(x.n)) {
      if (!n_free) break;
      add([&](Candidate& c) { c.pools.n = value; });
      if (m_free) add([&](Candidate& c) { c.pools.n = value, c.pools.m = most_m(c.pools); });
      if (m_free && choices_.head.size() > 1) {
        add([&](Candidate& c) {
          c.pools.n = value, c.pools.m = most_m(c.pools);
          c.pools.head_on_attention = !x.head_on_attention;
        });
      }
    }
    for (int value : steps(x.m)) {
      if (!m_free) break;
      add([&](Candidate& c) { c.pools.m = value; });
      if (n_free) add([&](Candidate& c) { c.pools.m = value, c.pools.n = most_n(c.pools); });
    }
    for (int value : steps(x.p_a)) {
      if (!p_a_free || value < 1) continue;
      if (p_f_free) {
        add([&](Candidate& c) { c.pools.p_a = c.pools.p_f = value; });
        add([&](Candidate& c) {
          c.pools.p_a = c.pools.p_f = value;
          if (m_free) c.pools.m = std::max(1, x.p_a * x.m / value);
          if (n_free) c.pools.n = std::max(1, x.p_f * x.n / value);
        });
      }
      add([&](Candidate& c) { c.pools.p_a = value; });
      if (m_free) add([&](Candidate& c) { c.pools.p_a = value, c.pools.m = most_m(c.pools); });
    }
    for (int value : steps(x.p_f)) {
      if (!p_f_free || value < 1) continue;
      add([&](Candidate& c) { c.pools.p_f = value; });
      if (n_free) add([&](Candidate& c) { c.pools.p_f = value, c.pools.n = most_n(c.pools); });
    }
    if (choices_.head.size() > 1) add([](Candidate& c) { c.pools.head_on_attention = !c.pools.head_on_attention; });
    const int nics = request_.base.cluster.nics_per_node;
    if (choices_.mixed.size() > 1) {
      add([&](Candidate& c) {
        c.pools.mixed = !x.mixed;
        c.pools.node_nics_a =
            x.mixed || nics < 2 ? 0 : std::clamp(nics * x.p_a * x.m / (x.p_a * x.m + x.p_f * x.n), 1, nics - 1);
        c.pools.node_nics_f = x.mixed || nics < 2 ? 0 : nics - c.pools.node_nics_a;
      });
    }
    for (int step : {-1, 1}) {
      const int a = x.node_nics_a + step;
      if (x.mixed && a >= 1 && a < nics)
        add([&](Candidate& c) { c.pools.node_nics_a = a, c.pools.node_nics_f = nics - a; });
    }
    std::vector<Candidate> rounds;
    Rounds(from, true, &rounds);
    for (const Candidate& r : rounds) {
      if (r.round <= 4 * std::max(1, from.round)) add([&](Candidate& c) { c = r; });
    }
  }
  if (request_.base.uneven() && request_.base.expert_counts.empty())
    add([](Candidate& c) { c.balanced = !c.balanced; });
  for (int value : steps(x.sequences)) {
    if (Given("b")) break;
    add([&](Candidate& c) { c.pools.sequences = value; });
    if (choices_.head.size() < 2) continue;
    add([&](Candidate& c) { c.pools.sequences = value, c.pools.head_on_attention = !x.head_on_attention; });
  }
  for (int64_t value : MicroBatches(x, colocated_ ? x.p_a : 2 * std::max(x.p_a, x.p_f), false)) {
    add([&](Candidate& c) { c.micro_batches = value; });
  }
  if (choices_.recompute.size() > 1) add([](Candidate& c) { c.pools.recompute = !c.pools.recompute; });
  return out;
}

}  // namespace disagmoe
