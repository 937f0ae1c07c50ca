#include "schedule/order.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "base/error.h"
#include "schedule/ready.h"

namespace disagmoe {
namespace {

void RequireAtLeast(const char* key, int value, int least) {
  if (value >= least) return;
  throw Error({"value out of range", key, std::to_string(value), "at least " + std::to_string(least), ""});
}

void AddGroups(Schedule* s, const char* prefix, int count, int workers, int* next_rank) {
  for (int g = 0; g < count; ++g) {
    GroupSchedule group;
    group.name = prefix + std::to_string(g);
    group.ranks.resize(workers);
    std::iota(group.ranks.begin(), group.ranks.end(), *next_rank);
    *next_rank += workers;
    s->groups.push_back(std::move(group));
  }
}

std::string DivisorsOf(int n) {
  std::string out;
  for (int d = 1; d <= n; ++d) {
    if (n % d == 0) out += (out.empty() ? "" : ", ") + std::to_string(d);
  }
  return out;
}

}  // namespace

Schedule PlaceStages(const PlacementSpec& p, const GenerateOptions& options) {
  RequireAtLeast("number of layers", p.num_layers, 1);
  RequireAtLeast("p_a", p.p_a, 1);
  RequireAtLeast("m", p.m, 1);
  if (!p.colocated) {
    RequireAtLeast("p_f", p.p_f, 1);
    RequireAtLeast("n", p.n, 1);
  }
  RequireAtLeast("number of micro-batches", options.num_micro_batches, 1);
  RequireAtLeast("round", options.round, 0);
  RequireAtLeast("slope", options.slope, 0);
  if (!(options.transfer_ratio >= 0)) {
    throw Error({"value out of range", "transfer ratio", std::to_string(options.transfer_ratio), "at least 0", ""});
  }
  Schedule s;
  s.num_layers = p.num_layers;
  s.num_micro_batches = options.num_micro_batches;
  s.slope = options.slope;
  s.backward = options.backward;
  int next_rank = 0;
  AddGroups(&s, p.colocated ? "C" : "A", p.p_a, p.m, &next_rank);
  if (!p.colocated) AddGroups(&s, "F", p.p_f, p.n, &next_rank);
  s.stage_group.resize(s.num_stages());
  const std::vector<int> units = p.colocated ? UnitLayers(p) : std::vector<int>{};
  int unit = 0;
  for (int l = 0; l < p.num_layers; ++l) {
    if (p.colocated && l >= units[unit + 1]) ++unit;
    s.stage_group[2 * l] = (p.colocated ? unit : l) % p.p_a;
    s.stage_group[2 * l + 1] = p.colocated ? s.stage_group[2 * l] : p.p_a + l % p.p_f;
  }
  s.stage_group.back() = p.head_on_attention ? p.num_layers % p.p_a : s.stage_group[2 * p.num_layers - 1];
  for (size_t g = 0; g < s.groups.size(); ++g) {
    if (std::count(s.stage_group.begin(), s.stage_group.end(), static_cast<int>(g)) > 0) continue;
    const bool attention = static_cast<int>(g) < p.p_a;
    throw Error({"more groups than layers: group " + s.groups[g].name + " would hold nothing", attention ? "p_a" : "p_f",
                 std::to_string(attention ? p.p_a : p.p_f), "at most " + std::to_string(p.num_layers),
                 "use fewer groups with more workers each"});
  }
  return s;
}

std::vector<int> UnitLayers(const PlacementSpec& p) {
  RequireAtLeast("virtual stages", p.virtual_stages, 0);
  const int units = p.virtual_stages > 0 ? p.virtual_stages * p.p_a : p.num_layers;
  std::vector<int> begin;
  if (units > p.num_layers) {
    throw Error({"more chunks than layers", "virtual stages", std::to_string(p.virtual_stages) + " on each of " +
                 std::to_string(p.p_a) + " groups", "at most " + std::to_string(p.num_layers) + " chunks in all", ""});
  }
  if (p.virtual_stages > 0 && p.head_on_attention) {
    throw Error({"the head of chunks of layers is with the last chunk", "layout.head", "attention", "ffn", ""});
  }
  // Embedding and head count as a layer each where the layers do not divide evenly.
  const bool even = p.num_layers % units == 0 || units == 1;
  const int64_t all = even ? p.num_layers : p.num_layers + 2;
  for (int u = 0; u <= units; ++u) {
    const auto at = static_cast<int>(all * u / units) - (even || u == 0 ? 0 : 1);
    begin.push_back(std::min(at, p.num_layers));
  }
  // With hardly more layers than chunks an end could come out empty.
  for (int u = 1; u < units; ++u) begin[u] = std::max(begin[u], begin[u - 1] + 1);
  for (int u = units - 1; u > 0; --u) begin[u] = std::min(begin[u], begin[u + 1] - 1);
  return begin;
}

void RequirePlacement(const PlacementSpec& p, bool colocated, const std::string& name) {
  if (p.colocated == colocated) return;
  if (colocated) throw Error({name + " needs groups that hold both parts", "layout", "two pools", "", "use af-pipe"});
  throw Error({name + " needs two pools", "layout", "a colocated one", "", "use megatron-1f1b"});
}

Ring MakeRing(int positions, int units, const GenerateOptions& options) {
  Ring ring;
  ring.positions = positions;
  ring.chunks = (units + positions - 1) / positions;
  ring.micro_batches = options.num_micro_batches;
  ring.slope = options.slope;
  const int m = options.num_micro_batches;
  if (options.round > 0) {
    if (m % options.round != 0) {
      throw Error({"the round does not divide the number of micro-batches", "round", std::to_string(options.round),
                   "a divisor of " + std::to_string(m), "possible rounds: " + DivisorsOf(m)});
    }
    ring.round = options.round;
    return ring;
  }
  const double least = positions * (1 + options.transfer_ratio) - 1e-9;
  ring.round = m;
  for (int q = m; q >= 1; --q) {
    if (m % q == 0 && q >= least) ring.round = q;
  }
  return ring;
}

std::vector<Unit> ForwardList(const Ring& ring) {
  std::vector<Unit> list;
  for (int first = 0; first < ring.micro_batches; first += ring.round) {
    for (int c = 0; c < ring.chunks; ++c) {
      for (int b = first; b < first + ring.round; ++b) list.push_back({false, c, b});
    }
  }
  return list;
}

std::vector<Unit> BackwardList(const Ring& ring) {
  std::vector<Unit> list;
  for (int first = 0; first < ring.micro_batches; first += ring.round) {
    for (int c = ring.chunks - 1; c >= 0; --c) {
      for (int b = first; b < first + ring.round; ++b) list.push_back({true, c, b});
    }
  }
  return list;
}

int WarmUp(const Ring& ring, int position) {
  const int64_t w = int64_t{ring.chunks - 1} * ring.round + int64_t{ring.slope} * (ring.positions - 1 - position);
  return static_cast<int>(std::min(w, int64_t{ring.micro_batches} * ring.chunks));
}

std::vector<Unit> PositionOrder(const Ring& ring, int position, bool backward) {
  const std::vector<Unit> forward = ForwardList(ring);
  if (!backward) return forward;
  const std::vector<Unit> back = BackwardList(ring);
  const size_t warm_up = WarmUp(ring, position);
  std::vector<Unit> order(forward.begin(), forward.begin() + warm_up);
  for (size_t k = 0; k < back.size(); ++k) {
    if (warm_up + k < forward.size()) order.push_back(forward[warm_up + k]);
    order.push_back(back[k]);
  }
  return order;
}

int WrapSlots(const Ring& ring) { return std::max(2, ring.round - ring.positions + 1); }

bool ProvablyFree(const Ring& ring) {
  return ring.micro_batches <= ring.round ||
         int64_t{ring.slope} * (ring.positions - 1) <= int64_t{2} * ring.round;
}

void ThrowDeadlock(const Ring& ring) {
  throw Error({"this round and slope deadlock", "pipeline of " + std::to_string(ring.positions) + " positions",
               "round " + std::to_string(ring.round) + ", slope " + std::to_string(ring.slope),
               "slope * (positions - 1) <= 2 * round, or one round",
               "give a larger round (schedule.round) or a smaller slope (schedule.slope)"});
}

bool HeadIsFused(const Schedule& s) { return s.stage_group[2 * s.num_layers] == s.stage_group[2 * s.num_layers - 1]; }

void AppendCompute(Schedule* s, OpKind kind, int stage, int micro_batch, int part) {
  std::vector<Op>& order = s->groups[s->group(stage, micro_batch, part)].compute;
  const int head = 2 * s->num_layers;
  const bool forward = kind == OpKind::kForward;
  const bool with_head = stage == head - 1 && HeadIsFused(*s) && part == (forward ? s->parts(stage) - 1 : 0);
  if (with_head && !forward) order.push_back({kind, head, micro_batch});
  order.push_back({kind, stage, micro_batch, part});
  if (with_head && forward) order.push_back({kind, head, micro_batch});
}

bool HasHead(const Schedule& s, const LayerSpan& span) {
  return span.last == s.num_layers && (span.first < span.last) == HeadIsFused(s);
}

void AppendPair(Schedule* s, const LayerSpan& forward, const LayerSpan& backward, bool with_weights) {
  const int head = 2 * s->num_layers;
  const auto push = [&](OpKind kind, int stage, int micro_batch) {
    DM_CHECK(s->parts(stage) == 1, "stage " + std::to_string(stage));
    s->groups[s->group(stage, micro_batch)].compute.push_back({kind, stage, micro_batch});
  };
  const auto push_backward = [&](int stage) {
    push(OpKind::kBackward, stage, backward.micro_batch);
    if (with_weights) push(OpKind::kWeight, stage, backward.micro_batch);
  };
  if (HasHead(*s, backward)) push_backward(head);
  const int forwards = 2 * (forward.last - forward.first);
  const int backwards = 2 * (backward.last - backward.first);
  for (int i = 0; i < std::max(forwards, backwards); ++i) {
    if (i < forwards) push(OpKind::kForward, 2 * forward.first + i, forward.micro_batch);
    if (i < backwards) push_backward(2 * backward.last - 1 - i);
  }
  if (HasHead(*s, forward)) push(OpKind::kForward, head, forward.micro_batch);
}

int PeakInFlight(const Schedule& s, int group) {
  if (!s.backward) return 1;
  const int uncounted = HeadIsFused(s) ? 2 * s.num_layers : -1;
  int held = 0;
  int peak = 0;
  for (const Op& op : s.groups[group].compute) {
    if (op.stage == uncounted) continue;
    if (op.kind == OpKind::kForward) {
      ++held;
    } else if (op.kind == OpKind::kWeight || !s.split_backward) {
      --held;
    }
    peak = std::max(peak, held);
  }
  return peak;
}

void FinishSchedule(Schedule* s, const std::function<int(int, bool)>& slots_of) {
  for (size_t g = 0; g < s->groups.size(); ++g) {
    GroupSchedule& group = s->groups[g];
    for (const Op& op : group.compute) {
      const TransferRange receives = ReceivesFor(*s, op);
      for (int i = 0; i < receives.count; ++i) group.comm.push_back(receives[i]);
      const TransferRange sends = SendsAfter(*s, op);
      for (int i = 0; i < sends.count; ++i) group.comm.push_back(sends[i]);
    }
    group.max_in_flight = PeakInFlight(*s, static_cast<int>(g));
  }
  std::map<std::tuple<int, int, bool>, size_t> known;
  for (int boundary = 0; boundary < s->num_stages() - 1; ++boundary) {
    for (bool backward : {false, true}) {
      if (backward && !s->backward) continue;
      const OpKind kind = backward ? OpKind::kSendBackward : OpKind::kSendForward;
      const int parts = s->boundary_parts(boundary);
      for (int route = 0; route < s->num_routes; ++route) {
        // The first micro-batch of the route.
        const int b = (s->num_micro_batches * route + s->num_routes - 1) / s->num_routes;
        if (b >= s->num_micro_batches || s->route(b) != route) continue;
        for (int part = 0; part < parts; ++part) {
          const Op send{kind, boundary, b, part};
          const Link link{SenderOf(*s, send), ReceiverOf(*s, send), backward, slots_of(boundary, backward) * parts};
          auto [it, added] = known.try_emplace({link.src_group, link.dst_group, backward}, s->links.size());
          if (added) s->links.push_back(link);
          Link& kept = s->links[it->second];
          kept.slots = std::max(kept.slots, link.slots);
        }
      }
    }
  }
}

}  // namespace disagmoe
