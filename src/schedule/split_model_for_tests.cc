#include "schedule/split_model_for_tests.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace disagmoe {
namespace {

constexpr double kSame = 1e-9;

using Key = std::tuple<int, int, int, int>;  // kind of the computation, stage, micro-batch, part

struct Transfer {
  Key from, to;
  int src, dst;
  bool backward;
  double ready, takes;
};

class Model {
 public:
  Model(const Schedule& s, const SplitTimes& times) : s_(s), times_(times), head_(2 * s.num_layers) {}
  SplitResult Run();

 private:
  static Key KeyOf(const Op& op) { return {static_cast<int>(op.kind), op.stage, op.micro_batch, op.part}; }
  double TimeOf(const Op& op) const;
  void Expect();
  void Done(int group, const Op& op);
  bool StartComputations();
  bool StartTransfers();

  const Schedule& s_;
  SplitTimes times_;
  int head_;
  double now_ = 0;
  SplitResult result_;
  std::map<Key, int> missing_;  // inputs of a computation that are not there yet
  std::vector<size_t> next_;
  std::vector<double> until_;  // -1: idle
  std::vector<int> held_;
  std::vector<double> sending_, receiving_;  // by group: until when
  std::vector<Transfer> waiting_, moving_;
};

double Model::TimeOf(const Op& op) const {
  if (op.stage == head_) return 0;
  const double forward = (op.stage % 2 == 0 ? times_.attention : times_.ffn) / s_.parts(op.stage);
  switch (op.kind) {
    case OpKind::kForward:
      return forward;
    case OpKind::kWeight:
      return 2 * forward * times_.weight_share;
    default:
      return s_.split_backward ? 2 * forward * (1 - times_.weight_share) : 2 * forward;
  }
}

// How many inputs each computation waits for: messages of the neighbouring stage, its own F or B.
void Model::Expect() {
  for (const GroupSchedule& group : s_.groups) {
    for (const Op& op : group.compute) {
      const bool backward = op.kind == OpKind::kBackward;
      const int from = op.stage + (backward ? 1 : -1);
      int inputs = op.kind == OpKind::kForward ? 0 : 1;
      if (op.kind != OpKind::kWeight && from >= 0 && from <= head_) {
        inputs += s_.parts(op.stage) == s_.parts(from)
                      ? 1
                      : std::max(s_.parts(from), s_.parts(op.stage)) / s_.parts(op.stage);
      }
      missing_[KeyOf(op)] = inputs;
    }
  }
}

void Model::Done(int g, const Op& op) {
  if (op.kind == OpKind::kForward && s_.backward)
    --missing_[{static_cast<int>(OpKind::kBackward), op.stage, op.micro_batch, op.part}];
  if (op.kind == OpKind::kBackward && s_.split_backward)
    --missing_[{static_cast<int>(OpKind::kWeight), op.stage, op.micro_batch, op.part}];
  const OpKind last = s_.split_backward ? OpKind::kWeight : OpKind::kBackward;
  if (op.kind == last && op.stage != head_) --held_[g];
  if (op.kind == OpKind::kWeight) return;
  const bool backward = op.kind == OpKind::kBackward;
  const int to = op.stage + (backward ? -1 : 1);
  if (to < 0 || to > head_) return;
  const int messages = std::max(s_.parts(op.stage), s_.parts(to));
  for (int part = 0; part < messages; ++part) {
    if (s_.parts(op.stage) > 1 && part != op.part) continue;
    const int to_part = s_.parts(to) > 1 ? part : 0;
    const int dst = s_.group(to, op.micro_batch, to_part);
    const double takes =
        to == head_ || op.stage == head_ || (dst == g && !times_.within_groups) ? 0 : times_.transfer / messages;
    waiting_.push_back(
        {KeyOf(op), {static_cast<int>(op.kind), to, op.micro_batch, to_part}, g, dst, backward, now_, takes});
  }
}

bool Model::StartComputations() {
  bool any = false;
  for (size_t g = 0; g < s_.groups.size(); ++g) {
    const std::vector<Op>& list = s_.groups[g].compute;
    if (until_[g] >= 0 || next_[g] == list.size() || missing_.at(KeyOf(list[next_[g]])) > 0) continue;
    const Op& op = list[next_[g]];
    if (result_.first[g] < 0) result_.first[g] = now_;
    until_[g] = now_ + TimeOf(op);
    result_.busy[g] += TimeOf(op);
    if (op.kind == OpKind::kForward && op.stage != head_) result_.peak[g] = std::max(result_.peak[g], ++held_[g]);
    any = true;
  }
  return any;
}

bool Model::StartTransfers() {
  std::stable_sort(waiting_.begin(), waiting_.end(), [](const Transfer& a, const Transfer& b) {
    return a.backward != b.backward ? a.backward : a.ready < b.ready;
  });
  bool any = false;
  for (size_t i = 0; i < waiting_.size();) {
    Transfer t = waiting_[i];
    const bool holds = times_.queues && t.src != t.dst && t.takes > 0;
    if (holds && (sending_[t.src] > now_ + kSame || receiving_[t.dst] > now_ + kSame)) {
      ++i;
      continue;
    }
    t.ready = now_ + t.takes;
    if (holds) sending_[t.src] = receiving_[t.dst] = t.ready;
    moving_.push_back(t);
    waiting_.erase(waiting_.begin() + static_cast<long>(i));
    any = true;
  }
  return any;
}

SplitResult Model::Run() {
  const size_t groups = s_.groups.size();
  next_.resize(groups);
  until_.assign(groups, -1);
  held_.resize(groups);
  sending_.resize(groups);
  receiving_.resize(groups);
  result_.busy.resize(groups);
  result_.first.assign(groups, -1);
  result_.peak.resize(groups);
  Expect();
  for (;;) {
    while (StartTransfers() || StartComputations()) {
    }
    double next = -1;
    const auto at = [&](double t) { next = t >= 0 && (next < 0 || t < next) ? t : next; };
    for (double t : until_) at(t);
    for (const Transfer& t : moving_) at(t.ready);
    if (next < 0) break;
    now_ = next;
    for (size_t g = 0; g < groups; ++g) {
      if (until_[g] < 0 || until_[g] > now_ + kSame) continue;
      until_[g] = -1;
      Done(static_cast<int>(g), s_.groups[g].compute[next_[g]++]);
    }
    for (size_t i = 0; i < moving_.size();) {
      if (moving_[i].ready > now_ + kSame) {
        ++i;
        continue;
      }
      --missing_[moving_[i].to];
      moving_.erase(moving_.begin() + static_cast<long>(i));
    }
  }
  result_.step = now_;
  for (size_t g = 0; g < groups; ++g) result_.deadlock |= next_[g] < s_.groups[g].compute.size();
  return result_;
}

}  // namespace

SplitResult RunSplitModel(const Schedule& schedule, const SplitTimes& times) { return Model(schedule, times).Run(); }

}  // namespace disagmoe
