// The proof that a schedule is complete and cannot deadlock, whatever the times are.
//
// Bounded receive slots need no edges in the graph. A slot is freed by a computation that comes before the message's
// user in the same group, and no send keeps its sender waiting; so a message that waits for a slot delays nothing
// that its user's place in the order would not delay as well. One slot is enough, or as many as a computation that
// takes all parts has messages from one group; more cost memory and gain overlap.
#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "base/error.h"
#include "schedule/order.h"
#include "schedule/ready.h"

namespace disagmoe {
namespace {

constexpr int64_t kNone = -1;

class Validator {
 public:
  explicit Validator(const Schedule& s) : s_(s) {}
  ScheduleFacts Run();

 private:
  void CheckShape();
  void CheckParts();
  void CheckCompute(int g);
  void CheckComm(int g);
  void CheckCommOrder(int g);
  void CheckComplete();
  void CheckLinks();
  void CheckInFlight(int g, ScheduleFacts* facts);
  void CheckAcyclic();
  std::vector<int64_t> FindCycle(const std::vector<int>& waiting);
  std::string DescribeCycle(const std::vector<int64_t>& cycle) const;

  template <typename Visit>
  void VisitPredecessors(int64_t id, Visit visit) const;

  int64_t Id(const Op& op) const { return (*ids_)(op); }
  std::string Name(int64_t id) const { return PrintOp(ids_->at(id)); }
  std::string GroupName(int64_t id) const { return s_.groups[GroupOf(s_, ids_->at(id))].name; }
  [[noreturn]] void Fail(const std::string& what, int g, const std::vector<Op>& list, size_t at,
                         const std::string& expected) const;

  const Schedule& s_;
  std::optional<OpIds> ids_;  // once the shape is known to be sound
  std::vector<int64_t> place_;   // by op id: index in its group's list, kNone if absent
  std::vector<int64_t> before_;  // by op id: computation before it in its group's order
};

// The list around one of its operations, which is marked.
std::string Excerpt(const std::vector<Op>& list, size_t at) {
  const size_t first = at > 4 ? at - 4 : 0;
  const size_t last = std::min(list.size(), at + 5);
  std::string out = first > 0 ? "..." : "";
  for (size_t i = first; i < last; ++i) {
    out += (out.empty() ? "" : " ") + (i == at ? "[" + PrintOp(list[i]) + "]" : PrintOp(list[i]));
  }
  return out + (last < list.size() ? " ..." : "");
}

void Validator::Fail(const std::string& what, int g, const std::vector<Op>& list, size_t at,
                     const std::string& expected) const {
  const GroupSchedule& group = s_.groups[g];
  const char* which = &list == &group.compute ? "compute" : "comm";
  throw Error({what, "group " + group.name + ", " + which + " operation " + std::to_string(at + 1) + " of " +
                         std::to_string(list.size()),
               PrintOp(list[at]), expected, "near " + Excerpt(list, at)});
}

void Validator::CheckShape() {
  if (s_.num_layers < 1 || s_.num_micro_batches < 1) {
    throw Error({"a schedule needs layers and micro-batches", s_.name,
                 std::to_string(s_.num_layers) + " layers, " + std::to_string(s_.num_micro_batches) + " micro-batches",
                 "at least 1 each", ""});
  }
  const int64_t stages = int64_t{2} * s_.num_layers + 1;
  if (s_.num_routes < 1 || s_.num_routes > 2) {
    throw Error({"a schedule has one route or two", s_.name, std::to_string(s_.num_routes), "1 or 2", ""});
  }
  if (static_cast<int64_t>(s_.stage_group.size()) != stages * s_.num_routes) {
    throw Error({"wrong number of stages", s_.name, std::to_string(s_.stage_group.size()),
                 std::to_string(stages * s_.num_routes), "two a layer and the head, for each route"});
  }
  CheckParts();
  // Before memory is taken for all of them; which ones are missing is said later.
  size_t operations = 0;
  for (const GroupSchedule& group : s_.groups) operations += group.compute.size();
  if (stages * s_.num_micro_batches > int64_t{1000} * static_cast<int64_t>(operations + 1)) {
    throw Error({"most operations are missing", s_.name, std::to_string(operations),
                 std::to_string(stages * s_.num_micro_batches * (s_.backward ? 2 : 1)), ""});
  }
  std::vector<char> holds(s_.groups.size());
  std::vector<int> of_stages = s_.stage_group;
  of_stages.insert(of_stages.end(), s_.part_group.begin(), s_.part_group.end());
  for (int g : of_stages) {
    if (g < 0 || g >= static_cast<int>(s_.groups.size())) {
      throw Error({"a stage has no group", s_.name, "group " + std::to_string(g),
                   "one of " + std::to_string(s_.groups.size()) + " groups", ""});
    }
    holds[g] = 1;
  }
  std::set<int> ranks;
  for (size_t g = 0; g < s_.groups.size(); ++g) {
    const GroupSchedule& group = s_.groups[g];
    if (!holds[g]) throw Error({"a group holds no stage", "group " + group.name, "", "", ""});
    if (group.ranks.empty()) throw Error({"a group has no workers", "group " + group.name, "", "", ""});
    for (int rank : group.ranks) {
      if (rank < 0 || !ranks.insert(rank).second) {
        throw Error({"a rank is negative or twice there", "group " + group.name, "rank " + std::to_string(rank), "", ""});
      }
    }
  }
}

void Validator::CheckParts() {
  const int stages = s_.num_stages();
  if (!s_.stage_parts.empty()) {
    if (static_cast<int>(s_.stage_parts.size()) != stages) {
      throw Error({"wrong number of stages with parts", s_.name, std::to_string(s_.stage_parts.size()),
                   std::to_string(stages), ""});
    }
    for (int i = 0; i < stages; ++i) {
      const std::string stage = "stage " + std::to_string(i);
      if (s_.parts(i) < 1) throw Error({"a stage without parts", stage, std::to_string(s_.parts(i)), "at least 1", ""});
      if (i == 0 || s_.parts(i) == s_.parts(i - 1) || s_.parts(i) == 1 || s_.parts(i - 1) == 1) continue;
      throw Error({"parts that do not match", stage, std::to_string(s_.parts(i)) + " parts",
                   std::to_string(s_.parts(i - 1)) + " as the stage before, or 1", ""});
    }
  }
  if (s_.split_backward && !s_.backward) throw Error({"a split backward without a backward", s_.name, "", "", ""});
  if (s_.part_group.empty()) return;
  if (s_.num_routes > 1) throw Error({"parts with groups of their own and several routes", s_.name, "", "one route", ""});
  if (static_cast<int>(s_.part_group.size()) != stages * s_.max_parts()) {
    throw Error({"wrong number of groups of parts", s_.name, std::to_string(s_.part_group.size()),
                 std::to_string(stages * s_.max_parts()), ""});
  }
}

void Validator::CheckCompute(int g) {
  const std::vector<Op>& list = s_.groups[g].compute;
  for (size_t i = 0; i < list.size(); ++i) {
    const Op& op = list[i];
    if (!IsCompute(op.kind)) Fail("a transfer among the computations", g, list, i, "F or B");
    if (!InRange(s_, op)) Fail("no such stage or micro-batch", g, list, i, "");
    if (op.kind != OpKind::kForward && !s_.backward) Fail("backward in a forward-only schedule", g, list, i, "F");
    if (op.kind == OpKind::kWeight && !s_.split_backward) Fail("W, but the backward is not split", g, list, i, "F or B");
    if (GroupOf(s_, op) != g) {
      Fail("operation in the wrong group", g, list, i, "it in group " + s_.groups[GroupOf(s_, op)].name);
    }
    const int64_t id = Id(op);
    if (place_[id] != kNone) Fail("operation twice", g, list, i, "once");
    place_[id] = static_cast<int64_t>(i);
    before_[id] = i > 0 ? Id(list[i - 1]) : kNone;
  }
}

void Validator::CheckComm(int g) {
  const std::vector<Op>& list = s_.groups[g].comm;
  for (size_t i = 0; i < list.size(); ++i) {
    const Op& op = list[i];
    if (IsCompute(op.kind)) Fail("a computation among the transfers", g, list, i, "a send or receive");
    if (!InRange(s_, op)) Fail("no such boundary or micro-batch", g, list, i, "");
    if (IsBackward(op.kind) && !s_.backward) Fail("backward in a forward-only schedule", g, list, i, "");
    if (GroupOf(s_, op) != g) {
      Fail("transfer in the wrong group", g, list, i, "it in group " + s_.groups[GroupOf(s_, op)].name);
    }
    const int64_t id = Id(op);
    if (place_[id] != kNone) Fail("transfer twice", g, list, i, "once");
    place_[id] = static_cast<int64_t>(i);
  }
}

void Validator::CheckComplete() {
  const auto require = [&](const Op& op) {
    if (place_[Id(op)] != kNone) return;
    const std::string group = "group " + s_.groups[GroupOf(s_, op)].name;
    if (IsCompute(op.kind)) throw Error({"missing operation", group, "none", PrintOp(op), ""});
    const bool peer = place_[Id(PeerOf(op))] != kNone;
    const std::string other = s_.groups[GroupOf(s_, PeerOf(op))].name;
    throw Error({IsSend(op.kind) ? "missing send" : "missing receive", group, "none", PrintOp(op),
                 peer ? "its other end is in group " + other : "its other end, in group " + other + ", is missing too"});
  };
  for (int b = 0; b < s_.num_micro_batches; ++b) {
    for (int stage = 0; stage < s_.num_stages(); ++stage) {
      for (int part = 0; part < s_.parts(stage); ++part) {
        require({OpKind::kForward, stage, b, part});
        if (s_.backward) require({OpKind::kBackward, stage, b, part});
        if (s_.split_backward) require({OpKind::kWeight, stage, b, part});
      }
      if (stage == s_.num_stages() - 1) continue;
      for (int part = 0; part < s_.boundary_parts(stage); ++part) {
        require({OpKind::kSendForward, stage, b, part});
        require({OpKind::kRecvForward, stage, b, part});
        if (!s_.backward) continue;
        require({OpKind::kSendBackward, stage, b, part});
        require({OpKind::kRecvBackward, stage, b, part});
      }
    }
  }
}

// Each transfer belongs to a place in the compute order: a receive before its computation, a send after it.
void Validator::CheckCommOrder(int g) {
  const std::vector<Op>& list = s_.groups[g].comm;
  int64_t last_send = -1;
  int64_t last_receive = -1;
  for (size_t i = 0; i < list.size(); ++i) {
    if (IsSend(list[i].kind)) {
      const int64_t at = place_[Id(ProducerOf(s_, list[i]))];
      if (at < last_send) Fail("sends are not in the order produced", g, list, i, "it earlier");
      last_send = at;
      continue;
    }
    const Op user = ConsumerOf(s_, list[i]);
    const int64_t at = place_[Id(user)];
    if (at < last_receive) Fail("receives are not in the order used", g, list, i, "it earlier");
    if (at <= last_send) {
      Fail("receive after its use, or a send before its production", g, list, i,
           "it before the sends that follow " + PrintOp(user));
    }
    last_receive = at;
  }
}

void Validator::CheckLinks() {
  const auto describe = [&](int src, int dst, bool backward) {
    return "link " + s_.groups[src].name + " -> " + s_.groups[dst].name + (backward ? " backward" : " forward");
  };
  std::map<std::tuple<int, int, bool>, int> slots;
  const int groups = static_cast<int>(s_.groups.size());
  for (const Link& link : s_.links) {
    if (link.src_group < 0 || link.src_group >= groups || link.dst_group < 0 || link.dst_group >= groups) {
      throw Error({"a link of an unknown group", s_.name,
                   std::to_string(link.src_group) + " -> " + std::to_string(link.dst_group), "", ""});
    }
    const std::string name = describe(link.src_group, link.dst_group, link.backward);
    if (link.slots < 1) throw Error({"a link without slots", name, std::to_string(link.slots), "at least 1", ""});
    if (!slots.try_emplace({link.src_group, link.dst_group, link.backward}, link.slots).second) {
      throw Error({"a link twice", name, "", "", ""});
    }
  }
  for (bool backward : {false, true}) {
    if (backward && !s_.backward) continue;
    for (int i = 0; i < s_.num_stages() - 1; ++i) {
      for (int b : {0, s_.num_micro_batches - 1}) {  // one of each route
        std::map<std::pair<int, int>, int> together;  // by link: messages of a computation that takes all parts
        for (int part = 0; part < s_.boundary_parts(i); ++part) {
          const Op transfer{backward ? OpKind::kSendBackward : OpKind::kSendForward, i, b, part};
          const int src = SenderOf(s_, transfer);
          const int dst = ReceiverOf(s_, transfer);
          const auto link = slots.find({src, dst, backward});
          if (link == slots.end()) {
            throw Error({"a boundary without a link", "boundary " + std::to_string(i), "none",
                         describe(src, dst, backward), ""});
          }
          const bool whole = s_.parts(ConsumerOf(s_, transfer).stage) == 1;
          if (!whole || ++together[{src, dst}] <= link->second) continue;
          throw Error({"fewer slots than a computation has messages", describe(src, dst, backward),
                       std::to_string(link->second), "one for each part of boundary " + std::to_string(i), ""});
        }
      }
    }
  }
}

template <typename Visit>
void Validator::VisitPredecessors(int64_t id, Visit visit) const {
  const Op op = ids_->at(id);
  if (IsCompute(op.kind)) {
    if (before_[id] != kNone) visit(before_[id]);
    const TransferRange receives = ReceivesFor(s_, op);
    for (int i = 0; i < receives.count; ++i) visit(Id(receives[i]));
    if (op.kind != OpKind::kForward) visit(Id(FormerOf(op)));
  } else {
    visit(Id(IsSend(op.kind) ? ProducerOf(s_, op) : PeerOf(op)));
  }
}

// Kahn's algorithm; what cannot be removed contains a cycle.
void Validator::CheckAcyclic() {
  const int64_t n = ids_->size();
  std::vector<int> waiting(n);  // predecessors not done yet
  std::vector<int64_t> first(n + 1);
  for (int64_t id = 0; id < n; ++id) {
    if (place_[id] == kNone) continue;
    VisitPredecessors(id, [&](int64_t p) {
      ++waiting[id];
      ++first[p + 1];
    });
  }
  for (int64_t id = 0; id < n; ++id) first[id + 1] += first[id];
  std::vector<int64_t> successors(first[n]);
  std::vector<int64_t> fill(first.begin(), first.end() - 1);
  std::vector<int64_t> done;
  done.reserve(n);
  int64_t present = 0;
  for (int64_t id = 0; id < n; ++id) {
    if (place_[id] == kNone) continue;
    ++present;
    if (waiting[id] == 0) done.push_back(id);
    VisitPredecessors(id, [&](int64_t p) { successors[fill[p]++] = id; });
  }
  for (size_t k = 0; k < done.size(); ++k) {
    for (int64_t i = first[done[k]]; i < first[done[k] + 1]; ++i) {
      if (--waiting[successors[i]] == 0) done.push_back(successors[i]);
    }
  }
  if (static_cast<int64_t>(done.size()) == present) return;
  const std::vector<int64_t> cycle = FindCycle(waiting);
  throw Error({"the schedule deadlocks: a cycle of waiting operations",
               "group " + GroupName(cycle.front()) + ", " + Name(cycle.front()), DescribeCycle(cycle),
               "no cycle", "`disagmoe schedule FILE --grid` draws how far it runs"});
}

// The shortest cycle through one of its members, each operation after the one it waits for.
std::vector<int64_t> Validator::FindCycle(const std::vector<int>& waiting) {
  const auto stuck_predecessor = [&](int64_t id) {
    int64_t found = kNone;
    VisitPredecessors(id, [&](int64_t p) {
      if (found == kNone && waiting[p] > 0) found = p;
    });
    return found;
  };
  int64_t at = kNone;
  for (size_t id = 0; at == kNone; ++id) {
    if (waiting[id] > 0) at = static_cast<int64_t>(id);
  }
  std::vector<char> seen(waiting.size());
  for (; !seen[at]; at = stuck_predecessor(at)) seen[at] = 1;
  std::vector<int64_t> next(waiting.size(), kNone);  // the one that waits for it, on the way back to `at`
  std::vector<int64_t> queue{at};
  for (size_t k = 0; k < queue.size() && next[at] == kNone; ++k) {
    VisitPredecessors(queue[k], [&](int64_t p) {
      if (waiting[p] == 0 || next[p] != kNone) return;
      next[p] = queue[k];
      queue.push_back(p);
    });
  }
  std::vector<int64_t> cycle;
  for (int64_t id = next[at]; id != at; id = next[id]) cycle.push_back(id);
  cycle.push_back(at);
  return cycle;
}

// "A0: F0.1 ... B3.0 -> F1: ..."; operations between two of a group's order are left out.
std::string Validator::DescribeCycle(const std::vector<int64_t>& cycle) const {
  std::string out;
  int steps = 0;
  for (size_t i = 0; i < cycle.size(); ++i) {
    const bool before = i > 0 && before_[cycle[i]] == cycle[i - 1];
    const bool after = i + 1 < cycle.size() && before_[cycle[i + 1]] == cycle[i];
    if (before && after) {
      if (!out.ends_with("...")) out += " ...";
      continue;
    }
    if (++steps > 24) return out + " -> ... (" + std::to_string(cycle.size()) + " operations)";
    out += (i == 0 ? "" : before ? " " : " -> ") + (before ? "" : GroupName(cycle[i]) + ": ") + Name(cycle[i]);
  }
  return out + " -> " + GroupName(cycle.front()) + ": " + Name(cycle.front());
}

void Validator::CheckInFlight(int g, ScheduleFacts* facts) {
  const int peak = PeakInFlight(s_, g);
  facts->peak_in_flight.push_back(peak);
  if (peak <= s_.groups[g].max_in_flight) return;
  throw Error({"more activations in flight than the schedule states", "group " + s_.groups[g].name,
               std::to_string(peak), "at most " + std::to_string(s_.groups[g].max_in_flight), ""});
}

ScheduleFacts Validator::Run() {
  CheckShape();
  ids_.emplace(s_);
  place_.assign(ids_->size(), kNone);
  before_.assign(ids_->size(), kNone);
  const int groups = static_cast<int>(s_.groups.size());
  ScheduleFacts facts;
  for (int g = 0; g < groups; ++g) {
    CheckCompute(g);
    CheckComm(g);
    facts.num_ops += static_cast<int64_t>(s_.groups[g].compute.size() + s_.groups[g].comm.size());
  }
  CheckComplete();
  for (int g = 0; g < groups; ++g) CheckCommOrder(g);
  CheckLinks();
  CheckAcyclic();
  for (int g = 0; g < groups; ++g) CheckInFlight(g, &facts);
  return facts;
}

}  // namespace

ScheduleFacts ValidateSchedule(const Schedule& schedule) { return Validator(schedule).Run(); }

}  // namespace disagmoe
