#include "schedule/event_model_for_tests.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

namespace disagmoe {
namespace {

struct Message {
  int src, dst, boundary, micro_batch, part;
  bool backward;
  double ready;
};

class Model {
 public:
  Model(const Schedule& s, const ModelTimes& times);
  ModelResult Run();

 private:
  using Key = std::tuple<int, int, int, int>;  // kind or direction, stage or boundary, micro-batch, part

  double TimeOf(const Op& op) const;
  double TimeOf(const Message& m) const;
  int PartsAcross(int boundary) const { return std::max(s_.parts(boundary), s_.parts(boundary + 1)); }
  std::vector<int> PartsFor(const Op& op, int boundary) const;
  bool InputsThere(const Op& op) const;
  bool Held(int group, const Op& op) const;
  bool SlotFree(const Message& m) const;
  bool StartComputations();
  bool StartTransfers();
  void Finish(int group);
  bool Done(OpKind kind, const Op& op) const {
    return done_.contains({static_cast<int>(kind), op.stage, op.micro_batch, op.part});
  }

  const Schedule& s_;
  ModelTimes times_;
  int last_;  // the head
  double now_ = 0;
  ModelResult result_;
  std::set<Key> arrived_;  // messages
  std::set<Key> done_;     // computations
  std::vector<size_t> next_;
  std::vector<double> until_;  // of a group: end of the running computation, -1 if idle
  std::vector<int> held_;
  std::vector<char> sending_, receiving_;
  std::vector<Message> waiting_;
  std::vector<std::pair<double, Message>> moving_;
  std::map<std::tuple<int, int, bool>, int> slots_;
  std::map<std::tuple<int, int, bool>, std::vector<Op>> users_;  // of a link's messages, in the order used
  std::map<Key, size_t> rank_in_link_;
};

// The input of a computation comes over this boundary, its result leaves over the other one.
int InputBoundary(const Op& op) {
  return op.kind == OpKind::kForward ? op.stage - 1 : op.kind == OpKind::kBackward ? op.stage : -1;
}

Model::Model(const Schedule& s, const ModelTimes& times) : s_(s), times_(times), last_(2 * s.num_layers) {
  const size_t groups = s.groups.size();
  next_.resize(groups);
  until_.assign(groups, -1);
  held_.resize(groups);
  sending_.resize(groups);
  receiving_.resize(groups);
  result_.peak.resize(groups);
  result_.busy.resize(groups);
  for (const Link& link : s.links) slots_[{link.src_group, link.dst_group, link.backward}] = link.slots;
  for (const GroupSchedule& group : s.groups) {
    for (const Op& op : group.compute) {
      const bool backward = op.kind == OpKind::kBackward;
      const int boundary = InputBoundary(op);
      if (boundary < 0 || boundary >= last_) continue;
      const int from = backward ? op.stage + 1 : op.stage - 1;
      for (int part : PartsFor(op, boundary)) {
        const int src = s.group(from, op.micro_batch, s.parts(from) > 1 ? part : 0);
        std::vector<Op>& users = users_[{src, s.group(op.stage, op.micro_batch, op.part), backward}];
        rank_in_link_[{backward, boundary, op.micro_batch, part}] = users.size();
        users.push_back(op);
      }
    }
  }
}

double Model::TimeOf(const Op& op) const {
  if (op.stage == last_) return 0;
  const double forward = (op.stage % 2 == 0 ? times_.attention : times_.ffn) / s_.parts(op.stage);
  switch (op.kind) {
    case OpKind::kForward: return forward;
    case OpKind::kBackward: return forward * 2 * (s_.split_backward ? 1 - times_.weight_share : 1);
    default: return forward * 2 * times_.weight_share;
  }
}

double Model::TimeOf(const Message& m) const {
  const double whole = m.src == m.dst ? times_.exchange : m.boundary == last_ - 1 ? 0 : times_.transfer;
  return whole / PartsAcross(m.boundary);
}

// The parts of the messages over a boundary that a computation at one of its ends uses or makes.
std::vector<int> Model::PartsFor(const Op& op, int boundary) const {
  if (s_.parts(op.stage) > 1) return {op.part};
  std::vector<int> all(PartsAcross(boundary));
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
  return all;
}

bool Model::InputsThere(const Op& op) const {
  if (op.kind == OpKind::kBackward && !Done(OpKind::kForward, op)) return false;
  if (op.kind == OpKind::kWeight) return Done(OpKind::kBackward, op);
  const int boundary = InputBoundary(op);
  if (boundary < 0 || boundary >= last_) return true;
  for (int part : PartsFor(op, boundary)) {
    if (!arrived_.contains({op.kind == OpKind::kBackward, boundary, op.micro_batch, part})) return false;
  }
  return true;
}

// By an all-to-all of another micro-batch or layer.
bool Model::Held(int group, const Op& op) const {
  if (!s_.sync_exchange) return false;
  const auto holds = [&](const Message& m) {
    return m.src == group && m.dst == group &&
           !(op.micro_batch == m.micro_batch && (op.stage == m.boundary || op.stage == m.boundary + 1));
  };
  for (const Message& m : waiting_) {
    if (holds(m)) return true;
  }
  for (const auto& [t, m] : moving_) {
    if (holds(m)) return true;
  }
  return false;
}

bool Model::SlotFree(const Message& m) const {
  if (!times_.bounded) return true;
  const std::tuple link{m.src, m.dst, m.backward};
  const size_t rank = rank_in_link_.at({m.backward, m.boundary, m.micro_batch, m.part});
  const size_t slots = slots_.at(link);
  if (rank < slots) return true;
  const Op& giver = users_.at(link)[rank - slots];
  return Done(giver.kind, giver);
}

bool Model::StartComputations() {
  bool any = false;
  for (size_t g = 0; g < s_.groups.size(); ++g) {
    const std::vector<Op>& list = s_.groups[g].compute;
    if (until_[g] >= 0 || next_[g] == list.size()) continue;
    const Op& op = list[next_[g]];
    if (!InputsThere(op) || Held(static_cast<int>(g), op)) continue;
    until_[g] = now_ + TimeOf(op);
    result_.busy[g] += TimeOf(op);
    if (op.kind == OpKind::kForward && op.stage != last_) {
      result_.peak[g] = std::max(result_.peak[g], ++held_[g]);
    }
    any = true;
  }
  return any;
}

bool Model::StartTransfers() {
  std::stable_sort(waiting_.begin(), waiting_.end(), [](const Message& a, const Message& b) {
    return a.backward != b.backward ? a.backward : a.ready < b.ready;
  });
  bool any = false;
  for (size_t i = 0; i < waiting_.size();) {
    const Message m = waiting_[i];
    if ((m.src == m.dst || m.boundary == last_ - 1) && TimeOf(m) == 0) {
      arrived_.insert({m.backward, m.boundary, m.micro_batch, m.part});
    } else if (!sending_[m.src] && !receiving_[m.dst] && SlotFree(m)) {
      sending_[m.src] = receiving_[m.dst] = 1;
      moving_.push_back({now_ + TimeOf(m), m});
    } else {
      ++i;
      continue;
    }
    waiting_.erase(waiting_.begin() + static_cast<long>(i));
    any = true;
  }
  return any;
}

void Model::Finish(int g) {
  const Op op = s_.groups[g].compute[next_[g]++];
  until_[g] = -1;
  const bool backward = op.kind == OpKind::kBackward;
  done_.insert({static_cast<int>(op.kind), op.stage, op.micro_batch, op.part});
  if (op.kind == (s_.split_backward ? OpKind::kWeight : OpKind::kBackward) && op.stage != last_) --held_[g];
  if (op.kind == OpKind::kWeight) return;
  const int to = backward ? op.stage - 1 : op.stage + 1;
  if (to < 0 || to > last_) return;
  const int boundary = std::min(op.stage, to);
  for (int part : PartsFor(op, boundary)) {
    const int dst = s_.group(to, op.micro_batch, s_.parts(to) > 1 ? part : 0);
    waiting_.push_back({g, dst, boundary, op.micro_batch, part, backward, now_});
  }
}

ModelResult Model::Run() {
  for (;;) {
    while (StartTransfers() || StartComputations()) {
    }
    double next = -1;
    for (double t : until_) {
      if (t >= 0 && (next < 0 || t < next)) next = t;
    }
    for (const auto& [t, m] : moving_) next = next < 0 ? t : std::min(next, t);
    if (next < 0) break;
    now_ = next;
    for (size_t g = 0; g < until_.size(); ++g) {
      if (until_[g] >= 0 && until_[g] <= now_) Finish(static_cast<int>(g));
    }
    for (size_t i = 0; i < moving_.size();) {
      const auto [t, m] = moving_[i];
      if (t > now_) {
        ++i;
        continue;
      }
      sending_[m.src] = receiving_[m.dst] = 0;
      arrived_.insert({m.backward, m.boundary, m.micro_batch, m.part});
      moving_.erase(moving_.begin() + static_cast<long>(i));
    }
  }
  result_.step = now_;
  for (size_t g = 0; g < s_.groups.size(); ++g) result_.deadlock |= next_[g] < s_.groups[g].compute.size();
  return result_;
}

}  // namespace

ModelResult RunModel(const Schedule& schedule, const ModelTimes& times) { return Model(schedule, times).Run(); }

}  // namespace disagmoe
