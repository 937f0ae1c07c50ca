// The loop, and the computations.
#include "sim/engine.h"

#include <algorithm>

#include "base/error.h"

namespace disagmoe {

Engine::Engine(const Schedule& schedule, const StepCosts& costs, const SimOptions& options)
    : s_(schedule),
      costs_(costs),
      options_(options),
      plan_(MakePlan(schedule)),
      sync_(schedule.sync_exchange && options.sync_exchange),
      flight_of_(plan_.messages.size(), -1),
      classes_done_(plan_.ops.size()),
      used_of_link_(schedule.links.size()) {
  const std::vector<WorkerClass>& classes = costs.classes();
  const int groups = static_cast<int>(schedule.groups.size());
  workers_.resize(classes.size());
  accounts_.resize(classes.size());
  events_.resize(options.trace ? classes.size() : 0);
  ends_.resize(classes.size() * kFabrics * 2);
  first_class_.assign(groups + 1, 0);
  for (size_t c = 0; c < classes.size(); ++c) {
    const int g = classes[c].group;
    DM_CHECK(g >= 0 && g < groups && (c == 0 || g >= classes[c - 1].group), "worker classes are not in order of group");
    ++first_class_[g + 1];
    workers_[c].group = g;
    workers_[c].next = plan_.group_begin[g];
    workers_[c].end = plan_.group_begin[g + 1];
    accounts_[c].Begin(RankOf(static_cast<int>(c)), costs.StaticParts(static_cast<int>(c)),
                       costs.MemoryLimit(static_cast<int>(c)), options.trace ? &events_[c] : nullptr);
  }
  for (int g = 0; g < groups; ++g) {
    DM_CHECK(first_class_[g + 1] > 0, "no worker class of group " + schedule.groups[g].name);
    first_class_[g + 1] += first_class_[g];
  }
}

int Engine::RankOf(int c) const {
  const WorkerClass& worker_class = costs_.classes()[c];
  const std::vector<int>& ranks = s_.groups[worker_class.group].ranks;
  DM_CHECK(worker_class.first_worker >= 0 && worker_class.first_worker < static_cast<int>(ranks.size()),
           "a worker class outside its group " + s_.groups[worker_class.group].name);
  return ranks[worker_class.first_worker];
}

void Engine::Loop() {
  for (int c = 0; c < static_cast<int>(workers_.size()); ++c) Await(c);
  for (;;) {
    for (size_t i = 0; i < to_compute_.size(); ++i) StartComputing(to_compute_[i]);
    to_compute_.clear();
    if (queue_.empty() || queue_.next_time() > now_) {
      for (int32_t end : to_send_) StartLink(end);
      to_send_.clear();
      for (int32_t end : to_receive_) StartLink(end);
      to_receive_.clear();
      for (int32_t c : to_look_) accounts_[c].Look(now_);
      to_look_.clear();
      if (queue_.empty()) return;
      now_ = queue_.next_time();
    }
    while (!queue_.empty() && queue_.next_time() == now_) Handle(queue_.Pop());
  }
}

void Engine::Handle(const Event& event) {
  if (event.who < 0) return Arrive(event.flight, ~event.who);
  const int c = event.who / kWays;
  const int way = event.who % kWays;
  way == 0 ? EndComputing(c) : EndLink(c * kFabrics * 2 + way - 1);
}

void Engine::List(int c) {
  if (workers_[c].listed) return;
  workers_[c].listed = true;
  to_compute_.push_back(c);
}

// Has come to `next`: what is missing for it?
void Engine::Await(int c) {
  Worker& w = workers_[c];
  w.since = now_;
  if (w.next == w.end) return accounts_[c].EndStep(now_, costs_.StepEnd(c));
  w.missing = 0;
  for (int32_t i = plan_.receive_begin[w.next]; i < plan_.receive_begin[w.next + 1]; ++i) {
    const int32_t f = flight_of_[plan_.receives[i]];
    if (f < 0 || !ReceiverSide(flights_[f], c).arrived) ++w.missing;
  }
  w.arrived = w.posted = -1;
  w.held = Held(w);
  w.held_until = now_;
  List(c);
}

bool Engine::Held(const Worker& w) const {
  if (w.holds.empty()) return false;
  const Op& op = plan_.ops[w.next];
  return std::any_of(w.holds.begin(), w.holds.end(), [&](int32_t m) {
    const Op& exchange = plan_.messages[m].send;
    return op.micro_batch != exchange.micro_batch || op.stage < exchange.stage || op.stage > exchange.stage + 1;
  });
}

void Engine::Unhold(int c, int32_t message) {
  Worker& w = workers_[c];
  const auto it = std::find(w.holds.begin(), w.holds.end(), message);
  DM_CHECK(it != w.holds.end(), "an exchange that holds nothing");
  w.holds.erase(it);
  if (w.computing || !w.held || Held(w)) return;
  w.held = false;
  w.held_until = now_;
  List(c);
}

void Engine::Take(int c, MemoryUse use, int64_t bytes, const Op& op) {
  if (accounts_[c].Take(use, bytes, op)) to_look_.push_back(c);
}

void Engine::StartComputing(int c) {
  Worker& w = workers_[c];
  w.listed = false;
  if (w.missing > 0 || w.held || w.next == plan_.impossible[w.group]) return;
  const Op& op = plan_.ops[w.next];
  if (now_ > w.since) accounts_[c].Waited(w.since, w.held_until, w.posted, now_);
  w.since = now_;
  w.computing = true;
  accounts_[c].StartComputing(now_);
  w.workspace = costs_.WorkspaceBytes(op, c);
  Take(c, MemoryUse::kWorkspace, w.workspace, op);
  if (op.kind == OpKind::kForward) Take(c, MemoryUse::kActivation, costs_.ActivationBytes(op, c, false), op);
  const int64_t ns = costs_.ComputeNs(op, c);
  DM_CHECK(ns >= 0, "a negative time of " + PrintOp(op));
  queue_.Push(now_ + ns, c * kWays);
}

void Engine::FreeMemory(int c, const Op& op) {
  ClassAccount& account = accounts_[c];
  account.Give(MemoryUse::kWorkspace, workers_[c].workspace);
  const Op forward{OpKind::kForward, op.stage, op.micro_batch, op.part};
  if (op.kind == OpKind::kForward) {
    if (!s_.backward) account.Give(MemoryUse::kActivation, costs_.ActivationBytes(forward, c, false));
    return;
  }
  const int64_t kept = s_.split_backward ? costs_.ActivationBytes(forward, c, true) : 0;
  if (op.kind == OpKind::kWeight) return account.Give(MemoryUse::kActivation, kept);
  account.Give(MemoryUse::kActivation, costs_.ActivationBytes(forward, c, false) - kept);
}

// Class c has used the messages of a position.
void Engine::UseMessages(int c, int32_t position) {
  for (int32_t i = plan_.receive_begin[position]; i < plan_.receive_begin[position + 1]; ++i) {
    const int32_t m = plan_.receives[i];
    Flight& f = flights_[flight_of_[m]];
    accounts_[c].Give(MemoryUse::kMessage, ReceiverSide(f, c).memory);
    if (--f.receivers_left > 0) continue;
    CloseFlight(flight_of_[m]);
    flight_of_[m] = -2;
  }
}

// All classes have used the messages of a position.
void Engine::FreeSlots(int32_t position) {
  for (int32_t i = plan_.receive_begin[position]; i < plan_.receive_begin[position + 1]; ++i) {
    const int32_t link = plan_.messages[plan_.receives[i]].link;
    const int64_t turn = int64_t{used_of_link_[link]++} + s_.links[link].slots;
    const int64_t at = plan_.link_begin[link] + turn;
    if (at < plan_.link_begin[link + 1]) Release(plan_.turns[at]);
  }
}

void Engine::EndComputing(int c) {
  Worker& w = workers_[c];
  const int32_t position = w.next;
  const Op& op = plan_.ops[position];
  w.computing = false;
  accounts_[c].EndComputing(w.since, now_, op);
  FreeMemory(c, op);
  UseMessages(c, position);
  if (options_.trace) to_look_.push_back(c);
  if (++classes_done_[position] == ClassesOf(w.group)) FreeSlots(position);
  for (int32_t m = plan_.send_begin[position]; m < plan_.send_begin[position + 1]; ++m) Post(m, c);
  ++w.next;
  Await(c);
}

}  // namespace disagmoe
