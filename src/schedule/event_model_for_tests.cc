#include "schedule/event_model_for_tests.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace disagmoe {
namespace {

struct Message {
  int src, dst, boundary, micro_batch;
  bool backward;
  double ready;
};

class Model {
 public:
  Model(const Schedule& s, const ModelTimes& times);
  ModelResult Run();

 private:
  using Key = std::tuple<bool, int, int>;  // backward, stage, micro-batch

  double TimeOf(const Op& op) const;
  bool InputsThere(const Op& op) const;
  bool SlotFree(const Message& m) const;
  bool StartComputations();
  bool StartTransfers();
  void Finish(int group);
  void Arrive(const Message& m);

  const Schedule& s_;
  ModelTimes times_;
  int last_;  // the head
  double now_ = 0;
  ModelResult result_;
  std::map<Key, bool> there_;  // inputs that have arrived
  std::map<Key, bool> done_;
  std::vector<size_t> next_;
  std::vector<double> until_;  // of a group: end of the running computation, -1 if idle
  std::vector<int> held_;
  std::vector<char> sending_, receiving_;
  std::vector<Message> waiting_;
  std::vector<std::pair<double, Message>> moving_;
  std::map<std::tuple<int, int, bool>, int> slots_;
  std::map<std::tuple<int, int, bool>, std::vector<Op>> users_;  // of a link's messages, in the order used
  std::map<std::tuple<bool, int, int>, size_t> rank_in_link_;
};

Model::Model(const Schedule& s, const ModelTimes& times) : s_(s), times_(times), last_(2 * s.num_layers) {
  const size_t groups = s.groups.size();
  next_.resize(groups);
  until_.assign(groups, -1);
  held_.resize(groups);
  sending_.resize(groups);
  receiving_.resize(groups);
  result_.peak.resize(groups);
  result_.busy.resize(groups);
  for (int b = 0; b < s.num_micro_batches; ++b) there_[{false, 0, b}] = true;
  for (const Link& link : s.links) slots_[{link.src_group, link.dst_group, link.backward}] = link.slots;
  for (const GroupSchedule& group : s.groups) {
    for (const Op& op : group.compute) {
      const bool backward = op.kind == OpKind::kBackward;
      const int from = backward ? op.stage + 1 : op.stage - 1;
      if (from < 0 || from > last_) continue;
      std::vector<Op>& users = users_[{s.stage_group[from], s.stage_group[op.stage], backward}];
      rank_in_link_[{backward, op.stage, op.micro_batch}] = users.size();
      users.push_back(op);
    }
  }
}

double Model::TimeOf(const Op& op) const {
  if (op.stage == last_) return 0;
  return (op.stage % 2 == 0 ? times_.attention : times_.ffn) * (op.kind == OpKind::kBackward ? 2 : 1);
}

bool Model::InputsThere(const Op& op) const {
  if (op.kind == OpKind::kForward) return there_.contains({false, op.stage, op.micro_batch});
  return done_.contains({false, op.stage, op.micro_batch}) &&
         (op.stage == last_ || there_.contains({true, op.stage, op.micro_batch}));
}

bool Model::SlotFree(const Message& m) const {
  if (!times_.bounded) return true;
  const std::tuple link{m.src, m.dst, m.backward};
  const int user = m.backward ? m.boundary : m.boundary + 1;
  const size_t rank = rank_in_link_.at({m.backward, user, m.micro_batch});
  const size_t slots = slots_.at(link);
  if (rank < slots) return true;
  const Op& giver = users_.at(link)[rank - slots];
  return done_.contains({giver.kind == OpKind::kBackward, giver.stage, giver.micro_batch});
}

bool Model::StartComputations() {
  bool any = false;
  for (size_t g = 0; g < s_.groups.size(); ++g) {
    const std::vector<Op>& list = s_.groups[g].compute;
    if (until_[g] >= 0 || next_[g] == list.size() || !InputsThere(list[next_[g]])) continue;
    const Op& op = list[next_[g]];
    until_[g] = now_ + TimeOf(op);
    result_.busy[g] += TimeOf(op);
    if (op.kind == OpKind::kForward && op.stage != last_) {
      result_.peak[g] = std::max(result_.peak[g], ++held_[g]);
    }
    any = true;
  }
  return any;
}

void Model::Arrive(const Message& m) { there_[{m.backward, m.backward ? m.boundary : m.boundary + 1, m.micro_batch}] = true; }

bool Model::StartTransfers() {
  std::stable_sort(waiting_.begin(), waiting_.end(), [](const Message& a, const Message& b) {
    return a.backward != b.backward ? a.backward : a.ready < b.ready;
  });
  bool any = false;
  for (size_t i = 0; i < waiting_.size();) {
    const Message m = waiting_[i];
    if (m.src == m.dst || m.boundary == last_ - 1) {
      Arrive(m);
    } else if (!sending_[m.src] && !receiving_[m.dst] && SlotFree(m)) {
      sending_[m.src] = receiving_[m.dst] = 1;
      moving_.push_back({now_ + times_.transfer, m});
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
  done_[{backward, op.stage, op.micro_batch}] = true;
  if (backward && op.stage != last_) --held_[g];
  const int to = backward ? op.stage - 1 : op.stage + 1;
  if (to < 0 || to > last_) return;
  waiting_.push_back({g, s_.stage_group[to], std::min(op.stage, to), op.micro_batch, backward, now_});
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
      Arrive(m);
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
