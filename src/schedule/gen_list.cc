// AF-Pipe with p_a != p_f, by list scheduling. The ring has 2 max(p_a, p_f) columns, as if the smaller pool had as many
// groups as the larger; a group runs every column whose stages it holds. A group that is idle takes the oldest ready
// backward, else the oldest ready forward. A forward must be among the first w_r + 1 of its column's list that follow
// the backwards done: so each column keeps AF-Pipe's bound on activations, and a forward is never kept waiting by a
// younger one. The clock is a model: pools are balanced, so a group of the smaller pool computes faster. What comes
// out is the order of an actual execution, so it cannot deadlock whatever the real times are.
#include <algorithm>
#include <map>
#include <queue>
#include <set>
#include <tuple>

#include "base/error.h"
#include "schedule/order.h"

namespace disagmoe {
namespace {

using MinHeap = std::priority_queue<int64_t, std::vector<int64_t>, std::greater<int64_t>>;

// The units of one column that one group holds and whose inputs are there, by place in the column's list.
struct Ready {
  int column = 0;
  MinHeap units[2];  // [backward]
};

struct Event {
  int64_t time;
  int64_t seq;   // breaks ties
  bool arrival;  // the input of a unit is there; else its computation is done
  bool backward;
  int stage;
  int micro_batch;
  friend bool operator>(const Event& a, const Event& b) { return std::tie(a.time, a.seq) > std::tie(b.time, b.seq); }
};

class ListScheduler {
 public:
  ListScheduler(Schedule* s, const Ring& ring, int stages, int p_a, int p_f, double transfer_ratio);
  void Run();
  int slots_of(int boundary, bool backward) const;

 private:
  bool TryStart(int group, bool backward);
  bool MayStart(int column, int64_t place) const;
  void Handle(const Event& event);
  void Push(int64_t delay, bool arrival, bool backward, int stage, int micro_batch);
  void MakeReady(bool backward, int stage, int micro_batch);
  void Parked(bool backward, int stage, int change);
  int64_t PlaceInList(bool backward, int stage, int micro_batch) const;
  Unit AtPlace(bool backward, int64_t place) const;
  int Column(int stage) const { return stage % ring_.positions; }

  Schedule* s_;
  Ring ring_;
  int stages_;
  int64_t time_of_[2];  // of a forward, on an A-group and an F-group
  int64_t transfer_;
  std::vector<int64_t> limit_;                 // by column: forwards of its list that may be started
  std::vector<std::vector<Ready>> ready_;      // by group
  std::vector<int> ready_index_;               // by stage: index in ready_[group]
  std::vector<std::vector<int>> groups_of_;    // by column
  std::vector<char> busy_;                     // by group
  std::set<int> touched_;                      // groups to look at again
  std::vector<int> link_of_;                   // by boundary: the first boundary of the same link
  std::vector<int> parked_[2];                 // [backward][link]: messages arrived and not yet consumed
  std::vector<int> peak_[2];
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
  int64_t now_ = 0;
  int64_t seq_ = 0;
  int64_t left_ = 0;
};

constexpr int64_t kTick = 1024;

ListScheduler::ListScheduler(Schedule* s, const Ring& ring, int stages, int p_a, int p_f, double transfer_ratio)
    : s_(s), ring_(ring), stages_(stages), time_of_{p_a * kTick, p_f * kTick} {
  transfer_ = static_cast<int64_t>(transfer_ratio * static_cast<double>(std::max(time_of_[0], time_of_[1])));
  ready_.resize(s->groups.size());
  busy_.resize(s->groups.size());
  ready_index_.resize(stages);
  groups_of_.resize(ring.positions);
  for (int r = 0; r < ring.positions; ++r) {
    limit_.push_back(s->backward ? WarmUp(ring, r) + 1 : int64_t{ring.micro_batches} * ring.chunks);
    for (int stage = r; stage < stages; stage += ring.positions) {
      std::vector<Ready>& ready = ready_[s->stage_group[stage]];
      if (ready.empty() || ready.back().column != r) {
        ready.emplace_back().column = r;
        groups_of_[r].push_back(s->stage_group[stage]);
      }
      ready_index_[stage] = static_cast<int>(ready.size()) - 1;
    }
  }
  std::map<std::pair<int, int>, int> first;
  for (int i = 0; i + 1 < stages; ++i) {
    link_of_.push_back(first.try_emplace({s->stage_group[i], s->stage_group[i + 1]}, i).first->second);
  }
  for (int d : {0, 1}) {
    parked_[d].resize(stages);
    peak_[d].resize(stages);
  }
  left_ = int64_t{stages} * ring.micro_batches * (s->backward ? 2 : 1);
  for (int b = 0; b < ring.micro_batches; ++b) MakeReady(false, 0, b);
}

// Places in the lists of schedule.md section 2: by round, then chunk, then micro-batch.
int64_t ListScheduler::PlaceInList(bool backward, int stage, int micro_batch) const {
  const int chunk = stage / ring_.positions;
  const int64_t row = int64_t{micro_batch / ring_.round} * ring_.chunks + (backward ? ring_.chunks - 1 - chunk : chunk);
  return row * ring_.round + micro_batch % ring_.round;
}

Unit ListScheduler::AtPlace(bool backward, int64_t place) const {
  const int64_t row = place / ring_.round;
  const int chunk = static_cast<int>(row % ring_.chunks);
  const int micro_batch = static_cast<int>(row / ring_.chunks * ring_.round + place % ring_.round);
  return {backward, backward ? ring_.chunks - 1 - chunk : chunk, micro_batch};
}

void ListScheduler::Push(int64_t delay, bool arrival, bool backward, int stage, int micro_batch) {
  events_.push({now_ + delay, seq_++, arrival, backward, stage, micro_batch});
}

void ListScheduler::MakeReady(bool backward, int stage, int micro_batch) {
  const int group = s_->stage_group[stage];
  ready_[group][ready_index_[stage]].units[backward].push(PlaceInList(backward, stage, micro_batch));
  touched_.insert(group);
}

// A column without a stage in the last chunk has a shorter list.
bool ListScheduler::MayStart(int column, int64_t place) const {
  const Unit unit = AtPlace(false, place);
  const int chunks = (stages_ - column + ring_.positions - 1) / ring_.positions;
  const int64_t row = int64_t{unit.micro_batch / ring_.round} * chunks + unit.chunk;
  return row * ring_.round + unit.micro_batch % ring_.round < limit_[column];
}

bool ListScheduler::TryStart(int group, bool backward) {
  Ready* best = nullptr;
  for (Ready& ready : ready_[group]) {
    const MinHeap& units = ready.units[backward];
    if (units.empty() || (!backward && !MayStart(ready.column, units.top()))) continue;
    if (!best || units.top() < best->units[backward].top()) best = &ready;
  }
  if (!best) return false;
  const Unit unit = AtPlace(backward, best->units[backward].top());
  best->units[backward].pop();
  const int stage = unit.chunk * ring_.positions + best->column;
  busy_[group] = 1;
  AppendCompute(s_, backward ? OpKind::kBackward : OpKind::kForward, stage, unit.micro_batch);
  Push(time_of_[stage % 2] * (backward ? 2 : 1), false, backward, stage, unit.micro_batch);
  return true;
}

void ListScheduler::Parked(bool backward, int stage, int change) {
  const int boundary = backward ? stage : stage - 1;
  if (boundary < 0 || boundary >= stages_ - 1) return;
  const int link = link_of_[boundary];
  parked_[backward][link] += change;
  peak_[backward][link] = std::max(peak_[backward][link], parked_[backward][link]);
}

void ListScheduler::Handle(const Event& e) {
  if (e.arrival) {
    Parked(e.backward, e.stage, 1);
    MakeReady(e.backward, e.stage, e.micro_batch);
    return;
  }
  --left_;
  Parked(e.backward, e.stage, -1);
  busy_[s_->stage_group[e.stage]] = 0;
  touched_.insert(s_->stage_group[e.stage]);
  if (e.backward) {
    ++limit_[Column(e.stage)];
    touched_.insert(groups_of_[Column(e.stage)].begin(), groups_of_[Column(e.stage)].end());
    if (e.stage > 0) Push(transfer_, true, true, e.stage - 1, e.micro_batch);
  } else if (e.stage + 1 < stages_) {
    Push(transfer_, true, false, e.stage + 1, e.micro_batch);
  } else if (s_->backward) {
    MakeReady(true, e.stage, e.micro_batch);
  }
}

void ListScheduler::Run() {
  for (;;) {
    for (int group : touched_) {
      if (!busy_[group] && !TryStart(group, true)) TryStart(group, false);
    }
    touched_.clear();
    if (events_.empty()) break;
    now_ = events_.top().time;
    while (!events_.empty() && events_.top().time == now_) {
      const Event event = events_.top();
      events_.pop();
      Handle(event);
    }
  }
  if (left_ > 0) ThrowDeadlock(ring_);
}

int ListScheduler::slots_of(int boundary, bool backward) const {
  return boundary < stages_ - 1 ? std::max(2, peak_[backward][link_of_[boundary]]) : 2;
}

}  // namespace

Schedule BuildAfPipeList(const PlacementSpec& placement, const GenerateOptions& options) {
  Schedule s = PlaceStages(placement, options);
  s.name = "af-pipe";
  const int stages = 2 * s.num_layers + (placement.head_on_attention ? 1 : 0);
  const Ring ring = MakeRing(2 * std::max(placement.p_a, placement.p_f), stages, options);
  s.round = ring.round;
  ListScheduler scheduler(&s, ring, stages, placement.p_a, placement.p_f, options.transfer_ratio);
  scheduler.Run();
  FinishSchedule(&s, [&](int boundary, bool backward) { return scheduler.slots_of(boundary, backward); });
  return s;
}

}  // namespace disagmoe
