// AF-Pipe with p_a != p_f, by list scheduling. The ring has 2 max(p_a, p_f) columns, as if the smaller pool had as many
// groups as the larger; a group runs every column whose stages it holds. Each column keeps the order of AF-Pipe
// (forwards in order, backwards in order, at most w_r + 1 activations), which is free of deadlock wherever the ring
// is; a group takes, whenever it is idle, the oldest ready backward of its columns, else the oldest ready forward.
// The clock is a model: pools are balanced, so a group of the smaller pool computes faster. What comes out is the
// order of an actual execution, so it cannot deadlock whatever the real times are.
#include <algorithm>
#include <queue>
#include <set>
#include <tuple>

#include "base/error.h"
#include "schedule/order.h"

namespace disagmoe {
namespace {

struct Column {
  std::vector<Unit> forward;
  std::vector<Unit> backward;
  size_t next_forward = 0;
  size_t next_backward = 0;
  int in_flight = 0;
  int limit = 0;
};

struct Event {
  int64_t time;
  int64_t seq;  // breaks ties
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
  void Start(int group);
  bool TryStart(int group, bool backward);
  void Handle(const Event& event);
  void Push(int64_t delay, bool arrival, bool backward, int stage, int micro_batch);
  void Touch(int column);
  void Parked(bool backward, int stage, int change);
  int StageOf(int column, const Unit& unit) const { return unit.chunk * ring_.positions + column; }
  size_t Cell(int stage, int micro_batch) const { return size_t(stage) * ring_.micro_batches + micro_batch; }

  Schedule* s_;
  Ring ring_;
  int stages_;
  int64_t time_of_[2];  // of a forward, on an A-group and an F-group
  int64_t transfer_;
  std::vector<Column> columns_;
  std::vector<std::vector<int>> columns_of_;  // of a group
  std::vector<char> ready_[2];                // [backward][stage, micro-batch]: the input is there
  std::vector<char> busy_;                    // of a group
  std::set<int> touched_;                     // groups to look at again
  std::vector<int> parked_[2];                // [backward][group]: arrived, not consumed; a link is known by its receiver
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
  columns_.resize(ring.positions);
  columns_of_.resize(s->groups.size());
  busy_.resize(s->groups.size());
  for (int r = 0; r < ring.positions; ++r) {
    Column& column = columns_[r];
    column.limit = s->backward ? WarmUp(ring, r) + 1 : ring.micro_batches * ring.chunks;
    column.forward = ForwardList(ring);
    if (s->backward) column.backward = BackwardList(ring);
    const auto missing = [&](const Unit& unit) { return StageOf(r, unit) >= stages_; };
    std::erase_if(column.forward, missing);
    std::erase_if(column.backward, missing);
    left_ += static_cast<int64_t>(column.forward.size() + column.backward.size());
    for (int stage = r; stage < stages_; stage += ring.positions) {
      std::vector<int>& columns = columns_of_[s->stage_group[stage]];
      if (columns.empty() || columns.back() != r) columns.push_back(r);
    }
  }
  for (int d : {0, 1}) {
    ready_[d].resize(size_t(stages_) * ring.micro_batches);
    parked_[d].resize(s->num_stages());
    peak_[d].resize(s->num_stages());
  }
  for (int b = 0; b < ring.micro_batches; ++b) ready_[0][Cell(0, b)] = 1;
  for (size_t g = 0; g < s->groups.size(); ++g) touched_.insert(static_cast<int>(g));
}

void ListScheduler::Push(int64_t delay, bool arrival, bool backward, int stage, int micro_batch) {
  events_.push({now_ + delay, seq_++, arrival, backward, stage, micro_batch});
}

// The next units of a column may have become possible.
void ListScheduler::Touch(int r) {
  const Column& column = columns_[r];
  if (column.next_forward < column.forward.size()) {
    touched_.insert(s_->stage_group[StageOf(r, column.forward[column.next_forward])]);
  }
  if (column.next_backward < column.backward.size()) {
    touched_.insert(s_->stage_group[StageOf(r, column.backward[column.next_backward])]);
  }
}

// Starts the oldest ready unit of the kind: earliest round, then the chunk the pass comes to first, then micro-batch.
bool ListScheduler::TryStart(int group, bool backward) {
  int best = -1;
  std::tuple<int, int, int> best_key;
  for (int r : columns_of_[group]) {
    const Column& column = columns_[r];
    const std::vector<Unit>& list = backward ? column.backward : column.forward;
    const size_t next = backward ? column.next_backward : column.next_forward;
    if (next == list.size() || (!backward && column.in_flight >= column.limit)) continue;
    const Unit& unit = list[next];
    const int stage = StageOf(r, unit);
    if (s_->stage_group[stage] != group || !ready_[backward][Cell(stage, unit.micro_batch)]) continue;
    const std::tuple key{unit.micro_batch / ring_.round, backward ? -unit.chunk : unit.chunk, unit.micro_batch};
    if (best < 0 || key < best_key) {
      best = r;
      best_key = key;
    }
  }
  if (best < 0) return false;
  Column& column = columns_[best];
  const Unit unit = backward ? column.backward[column.next_backward++] : column.forward[column.next_forward++];
  const int stage = StageOf(best, unit);
  if (!backward && s_->backward) ++column.in_flight;
  busy_[group] = 1;
  AppendCompute(s_, backward, stage, unit.micro_batch);
  Push(time_of_[stage % 2] * (backward ? 2 : 1), false, backward, stage, unit.micro_batch);
  Touch(best);
  return true;
}

void ListScheduler::Start(int group) {
  if (!busy_[group] && !TryStart(group, true)) TryStart(group, false);
}

// Boundaries that share a link are counted together: under the first of them.
void ListScheduler::Parked(bool backward, int stage, int change) {
  const int boundary = backward ? stage : stage - 1;
  if (boundary < 0 || boundary >= stages_ - 1) return;
  int first = boundary % 2;
  while (s_->stage_group[first] != s_->stage_group[boundary] ||
         s_->stage_group[first + 1] != s_->stage_group[boundary + 1]) {
    first += 2;
  }
  parked_[backward][first] += change;
  peak_[backward][first] = std::max(peak_[backward][first], parked_[backward][first]);
}

void ListScheduler::Handle(const Event& e) {
  const int r = e.stage % ring_.positions;
  if (e.arrival) {
    ready_[e.backward][Cell(e.stage, e.micro_batch)] = 1;
    Parked(e.backward, e.stage, 1);
    Touch(r);
    return;
  }
  --left_;
  Parked(e.backward, e.stage, -1);
  busy_[s_->stage_group[e.stage]] = 0;
  touched_.insert(s_->stage_group[e.stage]);
  if (e.backward) {
    --columns_[r].in_flight;
    if (e.stage > 0) Push(transfer_, true, true, e.stage - 1, e.micro_batch);
  } else if (e.stage + 1 < stages_) {
    Push(transfer_, true, false, e.stage + 1, e.micro_batch);
  } else if (s_->backward) {
    ready_[1][Cell(e.stage, e.micro_batch)] = 1;
  }
  Touch(r);
}

void ListScheduler::Run() {
  for (;;) {
    while (!touched_.empty()) {
      const int group = *touched_.begin();
      touched_.erase(touched_.begin());
      Start(group);
    }
    if (events_.empty()) break;
    now_ = events_.top().time;
    while (!events_.empty() && events_.top().time == now_) {
      const Event event = events_.top();
      events_.pop();
      Handle(event);
    }
  }
  if (left_ > 0) ThrowDeadlock(ring_, "give a larger round or a smaller slope");
}

int ListScheduler::slots_of(int boundary, bool backward) const {
  return boundary < stages_ - 1 ? std::max(2, peak_[backward][boundary]) : 2;
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
