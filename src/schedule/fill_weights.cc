#include "schedule/fill_weights.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <queue>
#include <set>
#include <tuple>

#include "base/error.h"
#include "schedule/order.h"
#include "schedule/ready.h"

namespace disagmoe {
namespace {

constexpr int64_t kUnknown = -1;
constexpr double kTick = 1 << 20;  // ticks of a unit of time

struct Event {
  int64_t time;
  int64_t seq;  // breaks ties
  int64_t id;   // of a computation or a receive that ends; kUnknown: look at the group again
  int group;
  friend bool operator>(const Event& a, const Event& b) { return std::tie(a.time, a.seq) > std::tie(b.time, b.seq); }
};

// When a group fills. Whole: never, B is the whole backward. Eager: every W directly after its B. Gaps: a gap is given
// to a W if at least `least` of it fits.
struct Rule {
  enum Kind { kWhole, kEager, kGaps } kind;
  double least = 0;
};

class Filler {
 public:
  Filler(const Schedule& s, const FillTimes& times, const std::vector<int>& limit, const Rule& rule);
  void Run();
  int64_t step() const { return step_; }
  std::vector<std::vector<Op>> TakeOrders() { return std::move(orders_); }

 private:
  int64_t Duration(const Op& op) const;
  int64_t TransferTime(const Op& transfer) const;
  int64_t InputsAt(const Op& op) const;
  void Handle(const Event& event);
  void LookAt(int group);
  void StartTransfers(int src, bool forward);
  bool MustFree(int group, const Op& next) const;
  bool GapFits(int group, int64_t inputs_at) const;
  void Start(int group, const Op& op);
  void StartWeight(int group);
  void Touch(int group) {
    if (!is_touched_[group]) touched_.push_back(group);
    is_touched_[group] = 1;
  }
  bool IsFusedHead(const Op& op) const { return fused_ && op.stage == s_.num_stages() - 1; }
  void Push(int64_t time, int64_t id, int group) { events_.push({time, seq_++, id, group}); }

  const Schedule& s_;
  std::vector<int> limit_;
  Rule rule_;
  OpIds ids_;
  bool fused_;
  int64_t forward_[2];  // attention, FFN
  int64_t transfer_;
  double share_;
  std::vector<int64_t> end_;             // by id of a computation or receive; kUnknown before it starts
  std::vector<size_t> next_;             // by group: place in its order of F and B
  std::vector<int64_t> free_;            // by group
  std::vector<int> held_;                // by group
  std::vector<std::deque<Op>> pending_;  // by group: W whose B is done
  std::vector<std::vector<Op>> orders_;
  // [forward][sender]: messages that wait, in the order made; id of the receive.
  std::vector<std::set<std::pair<int64_t, int64_t>>> waiting_[2];
  std::vector<int64_t> sending_, receiving_;
  std::vector<std::vector<int>> senders_;  // by group: who sends to it
  std::vector<int> touched_;               // groups to look at
  std::vector<char> is_touched_;
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
  int64_t now_ = 0;
  int64_t seq_ = 0;
  int64_t step_ = 0;
};

Filler::Filler(const Schedule& s, const FillTimes& times, const std::vector<int>& limit, const Rule& rule)
    : s_(s),
      limit_(limit),
      rule_(rule),
      ids_(s),
      fused_(HeadIsFused(s)),
      forward_{std::llround(times.attention * kTick), std::llround(times.ffn * kTick)},
      transfer_(std::llround(times.transfer * kTick)),
      share_(times.weight_share),
      end_(ids_.size(), kUnknown) {
  const size_t groups = s.groups.size();
  next_.resize(groups);
  free_.resize(groups);
  held_.resize(groups);
  pending_.resize(groups);
  orders_.resize(groups);
  for (auto& waiting : waiting_) waiting.resize(groups);
  sending_.resize(groups);
  receiving_.resize(groups);
  senders_.resize(groups);
  is_touched_.resize(groups);
  for (const Link& link : s.links) {
    std::vector<int>& senders = senders_[link.dst_group];
    if (link.src_group != link.dst_group && std::count(senders.begin(), senders.end(), link.src_group) == 0) {
      senders.push_back(link.src_group);
    }
  }
}

int64_t Filler::Duration(const Op& op) const {
  if (op.stage == s_.num_stages() - 1) return 0;
  const int64_t forward = forward_[op.stage % 2] / s_.parts(op.stage);
  if (op.kind == OpKind::kForward) return forward;
  if (rule_.kind == Rule::kWhole) return 2 * forward;
  const int64_t weight = std::llround(2.0 * static_cast<double>(forward) * share_);
  return op.kind == OpKind::kWeight ? weight : 2 * forward - weight;
}

int64_t Filler::TransferTime(const Op& transfer) const {
  const bool travels = SenderOf(s_, transfer) != ReceiverOf(s_, transfer) && transfer.stage != s_.num_stages() - 2;
  return travels ? transfer_ / s_.boundary_parts(transfer.stage) : 0;
}

// When an operation's inputs are there; kUnknown as long as one is neither made nor on its way.
int64_t Filler::InputsAt(const Op& op) const {
  int64_t at = op.kind == OpKind::kBackward ? end_[ids_(FormerOf(op))] : 0;
  const TransferRange receives = ReceivesFor(s_, op);
  for (int i = 0; i < receives.count; ++i) {
    const int64_t end = end_[ids_(receives[i])];
    at = at == kUnknown || end == kUnknown ? kUnknown : std::max(at, end);
  }
  return at;
}

void Filler::Start(int g, const Op& op) {
  orders_[g].push_back(op);
  const int64_t id = ids_(op);
  end_[id] = free_[g] = now_ + Duration(op);
  step_ = std::max(step_, free_[g]);
  Push(free_[g], id, g);
  if (op.kind == OpKind::kBackward && rule_.kind != Rule::kWhole)
    pending_[g].push_back({OpKind::kWeight, op.stage, op.micro_batch, op.part});
  if (IsFusedHead(op)) return;
  if (op.kind == OpKind::kForward) ++held_[g];
  if (op.kind == (rule_.kind == Rule::kWhole ? OpKind::kBackward : OpKind::kWeight)) --held_[g];
}

void Filler::StartTransfers(int src, bool forward) {
  std::set<std::pair<int64_t, int64_t>>& waiting = waiting_[forward][src];
  for (auto it = waiting.begin(); it != waiting.end() && sending_[src] <= now_;) {
    const int64_t id = it->second;
    const int dst = ReceiverOf(s_, ids_.at(id));
    if (receiving_[dst] > now_) {
      ++it;
      continue;
    }
    end_[id] = sending_[src] = receiving_[dst] = now_ + TransferTime(ids_.at(id));
    Push(end_[id], id, dst);
    it = waiting.erase(it);
  }
}

// What has ended hands on its results; what may start then is seen to once all that ends at this time has.
void Filler::Handle(const Event& e) {
  Touch(e.group);
  if (e.id == kUnknown) return;
  const Op op = ids_.at(e.id);
  if (!IsCompute(op.kind)) {
    Touch(SenderOf(s_, op));
    for (int src : senders_[e.group]) Touch(src);
    return;
  }
  const TransferRange sends = SendsAfter(s_, op);
  for (int i = 0; i < sends.count; ++i) {
    const int64_t id = ids_(PeerOf(sends[i]));
    if (TransferTime(sends[i]) > 0) {
      waiting_[op.kind == OpKind::kForward][e.group].emplace(seq_++, id);
    } else {
      end_[id] = now_;
      Touch(ReceiverOf(s_, sends[i]));
    }
  }
}

// A fused head's W, which takes no time here, goes with that of the stage before it.
void Filler::StartWeight(int g) {
  bool head = true;
  while (head && !pending_[g].empty()) {
    const Op op = pending_[g].front();
    pending_[g].pop_front();
    head = IsFusedHead(op);
    Start(g, op);
  }
}

bool Filler::MustFree(int g, const Op& next) const {
  return next.kind == OpKind::kForward && !IsFusedHead(next) && held_[g] >= limit_[g] && !pending_[g].empty();
}

bool Filler::GapFits(int g, int64_t inputs_at) const {
  if (pending_[g].empty()) return false;
  if (inputs_at == kUnknown) return true;
  return static_cast<double>(inputs_at - now_) >= rule_.least * static_cast<double>(Duration(pending_[g].front()));
}

void Filler::LookAt(int g) {
  if (free_[g] > now_) return;
  const std::vector<Op>& order = s_.groups[g].compute;
  if (next_[g] == order.size()) {
    if (!pending_[g].empty()) StartWeight(g);
    return;
  }
  const Op& next = order[next_[g]];
  const bool in_unit = next.kind == OpKind::kBackward && next_[g] > 0 && IsFusedHead(order[next_[g] - 1]);
  if ((rule_.kind == Rule::kEager && !pending_[g].empty() && !in_unit) || MustFree(g, next)) return StartWeight(g);
  const int64_t inputs_at = InputsAt(next);
  if (inputs_at != kUnknown && inputs_at <= now_) {
    ++next_[g];
    return Start(g, next);
  }
  if (GapFits(g, inputs_at)) return StartWeight(g);
  if (inputs_at != kUnknown) Push(inputs_at, kUnknown, g);
}

void Filler::Run() {
  for (size_t g = 0; g < s_.groups.size(); ++g) Push(0, kUnknown, static_cast<int>(g));
  while (!events_.empty()) {
    now_ = events_.top().time;
    for (int g : touched_) is_touched_[g] = 0;
    touched_.clear();
    while (!events_.empty() && events_.top().time == now_) {
      const Event event = events_.top();
      events_.pop();
      Handle(event);
    }
    std::sort(touched_.begin(), touched_.end());
    for (bool forward : {false, true}) {
      for (int g : touched_) StartTransfers(g, forward);
    }
    for (int g : touched_) LookAt(g);
  }
  for (size_t g = 0; g < s_.groups.size(); ++g) {
    if (next_[g] == s_.groups[g].compute.size()) continue;
    throw Error({"the schedule does not run to its end", "group " + s_.groups[g].name,
                 "it stops before " + PrintOp(s_.groups[g].compute[next_[g]]), "", ""});
  }
}

void Check(const Schedule& s, const FillTimes& times, const std::vector<int>& limit) {
  if (!s.backward || s.split_backward) {
    throw Error({"weight gradients can be split off whole backwards only", s.name,
                 s.backward ? "a split backward" : "a forward-only schedule", "whole backwards", ""});
  }
  if (!(times.attention > 0 && times.ffn > 0 && times.transfer >= 0 && times.weight_share >= 0 &&
        times.weight_share <= 1)) {
    throw Error({"value out of range", "times of " + s.name,
                 "attention " + std::to_string(times.attention) + ", ffn " + std::to_string(times.ffn) + ", transfer " +
                     std::to_string(times.transfer) + ", weight share " + std::to_string(times.weight_share),
                 "times above 0, a transfer of at least 0, a share from 0 to 1", ""});
  }
  DM_CHECK(limit.size() == s.groups.size(), s.name);
  for (size_t g = 0; g < limit.size(); ++g) {
    if (limit[g] >= s.groups[g].max_in_flight) continue;
    throw Error({"too few activations allowed", "group " + s.groups[g].name, std::to_string(limit[g]),
                 "at least " + std::to_string(s.groups[g].max_in_flight), ""});
  }
}

}  // namespace

bool FillWithWeightGradients(Schedule* s, const FillTimes& times, const std::vector<int>& limit) {
  Check(*s, times, limit);
  Filler whole(*s, times, limit, {Rule::kWhole});
  whole.Run();
  std::vector<std::vector<Op>> best;
  int64_t best_step = whole.step();
  for (const Rule& rule : {Rule{Rule::kGaps, 0}, Rule{Rule::kGaps, 0.5}, Rule{Rule::kEager}}) {
    Filler filler(*s, times, limit, rule);
    filler.Run();
    if (best.empty() ? filler.step() > best_step : filler.step() >= best_step) continue;
    best_step = filler.step();
    best = filler.TakeOrders();
  }
  if (best.empty()) return false;
  s->split_backward = true;
  for (size_t g = 0; g < s->groups.size(); ++g) {
    s->groups[g].compute = std::move(best[g]);
    s->groups[g].max_in_flight = PeakInFlight(*s, static_cast<int>(g));
  }
  return true;
}

}  // namespace disagmoe
