#include "sim/slow_model_for_tests.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

#include "schedule/ready.h"

namespace disagmoe {
namespace {

constexpr int64_t kNever = -1;

// What one class does in one leg of a message, on one fabric.
struct Use {
  int64_t ns = 0;
  int64_t begin = kNever;
};
struct End {
  int c = 0;
  Use use[2];
  int64_t posted = kNever;   // of a sender
  int64_t arrived = kNever;  // of a receiver
  int64_t memory = 0;
};
// A message, or the local phase before it.
struct Leg {
  int message = 0;
  Op send;
  bool local = false, backward = false, own = false, nothing = true;
  std::vector<End> senders, receivers;
  int64_t latency = 0;
  int64_t cleared = kNever;  // has a slot since
};
struct Message {
  Op send;
  int link = 0, turn = 0;
  Leg leg;
  bool has_local = false;
  Leg local;
  std::map<int, int64_t> made;  // by class: when its computation ended
};

class SlowModel {
 public:
  SlowModel(const Schedule& s, const StepCosts& costs, const SimOptions& options);
  SlowResult Run();

 private:
  Leg MakeLeg(int message, const Op& send, bool local, int src, int dst);
  std::vector<Message*> Needs(const Op& op);
  bool Done(int c, const Op& op) const;
  bool AllDone(int group, const Op& op) const;
  bool SlotFree(const Message& m) const;
  std::vector<const Leg*> Holds(int c, int64_t now);
  bool MayStart(int c, int64_t now);
  bool Finish();
  bool Move(Message& m);
  bool MoveLeg(Leg& leg, bool cleared);
  bool Compute();
  void StartUses(bool receive);
  int64_t Eligible(const Leg& leg, const End& end, int fabric, bool receive) const;
  int64_t NextTime();
  template <typename F>
  void EachLeg(F f) {
    for (Message& m : messages_) {
      f(m.leg);
      if (m.has_local) f(m.local);
    }
  }
  void Account(int c, SlowResult* result);
  void Memory(int c, SlowClass* out);

  const Schedule& s_;
  const StepCosts& costs_;
  SimOptions options_;
  int64_t now_ = 0;
  std::vector<Message> messages_;
  std::map<std::tuple<OpKind, int, int, int>, int> by_send_;
  std::map<std::pair<int, int>, Op> users_;  // of a link's message of a turn
  std::vector<std::vector<Interval>> ran_;   // by class
  std::vector<char> running_;
};

std::tuple<OpKind, int, int, int> Key(const Op& op) { return {op.kind, op.stage, op.micro_batch, op.part}; }

SlowModel::SlowModel(const Schedule& s, const StepCosts& costs, const SimOptions& options)
    : s_(s), costs_(costs), options_(options), ran_(costs.classes().size()), running_(costs.classes().size()) {
  for (const GroupSchedule& group : s.groups) {
    for (const Op& op : group.compute) {
      const TransferRange sends = SendsAfter(s, op);
      for (int i = 0; i < sends.count; ++i) {
        const int number = static_cast<int>(messages_.size());
        by_send_[Key(sends[i])] = number;
        const int src = SenderOf(s, sends[i]), dst = ReceiverOf(s, sends[i]);
        Message m;
        m.send = sends[i];
        m.link = LinkOf(s, sends[i]);
        m.leg = MakeLeg(number, sends[i], false, src, dst);
        m.has_local = costs.HasLocalPhase(sends[i]);
        if (m.has_local) m.local = MakeLeg(number, sends[i], true, src, src);
        messages_.push_back(m);
      }
    }
  }
  std::map<int, int> turns;
  for (const GroupSchedule& group : s.groups) {
    for (const Op& op : group.compute) {
      for (Message* m : Needs(op)) {
        m->turn = turns[m->link]++;
        users_[{m->link, m->turn}] = op;
      }
    }
  }
}

Leg SlowModel::MakeLeg(int message, const Op& send, bool local, int src, int dst) {
  Leg leg{.message = message, .send = send, .local = local, .backward = send.kind == OpKind::kSendBackward,
          .own = src == dst, .nothing = true, .senders = {}, .receivers = {}, .latency = 0, .cleared = kNever};
  for (int c = 0; c < static_cast<int>(costs_.classes().size()); ++c) {
    for (bool sending : {true, false}) {
      if (costs_.classes()[c].group != (sending ? src : dst)) continue;
      const TransferCost cost = local ? costs_.LocalPhase(send, c, sending) : costs_.Transfer(send, c, sending);
      End end;
      end.c = c;
      end.use[0].ns = cost.nic_ns;
      end.use[1].ns = cost.nvlink_ns;
      if (!sending && !local) end.memory = costs_.MessageBytes(send, c);
      leg.latency = std::max(leg.latency, cost.latency_ns);
      leg.nothing &= cost.nic_ns + cost.nvlink_ns + cost.latency_ns + cost.nic_bytes + cost.nvlink_bytes == 0;
      (sending ? leg.senders : leg.receivers).push_back(end);
    }
  }
  return leg;
}

std::vector<Message*> SlowModel::Needs(const Op& op) {
  std::vector<Message*> needs;
  const TransferRange receives = ReceivesFor(s_, op);
  for (int i = 0; i < receives.count; ++i) needs.push_back(&messages_[by_send_.at(Key(PeerOf(receives[i])))]);
  return needs;
}

bool SlowModel::Done(int c, const Op& op) const {
  const std::vector<Op>& list = s_.groups[costs_.classes()[c].group].compute;
  const size_t done = ran_[c].size() - running_[c];
  return std::find(list.begin(), list.begin() + static_cast<long>(done), op) != list.begin() + static_cast<long>(done);
}

bool SlowModel::AllDone(int group, const Op& op) const {
  for (int c = 0; c < static_cast<int>(ran_.size()); ++c) {
    if (costs_.classes()[c].group == group && !Done(c, op)) return false;
  }
  return true;
}

bool SlowModel::SlotFree(const Message& m) const {
  const int before = m.turn - s_.links[m.link].slots;
  if (!options_.bounded_slots || before < 0) return true;
  return AllDone(s_.links[m.link].dst_group, users_.at({m.link, before}));
}

int64_t ArrivedAt(const Leg& leg, int c) {
  for (const End& end : leg.receivers) {
    if (end.c == c) return end.arrived;
  }
  return kNever;
}

// Exchanges of its own group that class c has posted and that have not arrived there at `at`.
std::vector<const Leg*> SlowModel::Holds(int c, int64_t at) {
  std::vector<const Leg*> holds;
  if (!s_.sync_exchange || !options_.sync_exchange) return holds;
  EachLeg([&](const Leg& leg) {
    if (!leg.own || leg.nothing) return;
    for (const End& end : leg.senders) {
      const int64_t arrived = ArrivedAt(leg, c);
      if (end.c == c && end.posted != kNever && end.posted <= at && (arrived == kNever || arrived > at)) {
        holds.push_back(&leg);
      }
    }
  });
  return holds;
}

bool OtherUnit(const Op& op, const Leg& leg) {
  return op.micro_batch != leg.send.micro_batch || (op.stage != leg.send.stage && op.stage != leg.send.stage + 1);
}

bool SlowModel::MayStart(int c, int64_t at) {
  const std::vector<Op>& list = s_.groups[costs_.classes()[c].group].compute;
  if (running_[c] || ran_[c].size() == list.size()) return false;
  const Op& op = list[ran_[c].size()];
  for (const Message* m : Needs(op)) {
    if (ArrivedAt(m->leg, c) == kNever) return false;
  }
  if (op.kind == OpKind::kBackward && !Done(c, {OpKind::kForward, op.stage, op.micro_batch, op.part})) return false;
  if (op.kind == OpKind::kWeight && !Done(c, {OpKind::kBackward, op.stage, op.micro_batch, op.part})) return false;
  for (const Leg* leg : Holds(c, at)) {
    if (OtherUnit(op, *leg)) return false;
  }
  return true;
}

bool SlowModel::Finish() {
  bool any = false;
  for (int c = 0; c < static_cast<int>(ran_.size()); ++c) {
    if (!running_[c] || ran_[c].back().end > now_) continue;
    any = true;
    running_[c] = 0;
    const Op& op = s_.groups[costs_.classes()[c].group].compute[ran_[c].size() - 1];
    const TransferRange sends = SendsAfter(s_, op);
    for (int i = 0; i < sends.count; ++i) {
      Message& m = messages_[by_send_.at(Key(sends[i]))];
      m.made[c] = now_;
      for (End& end : (m.has_local ? m.local : m.leg).senders) {
        if (end.c == c) end.posted = now_;
      }
    }
  }
  return any;
}

bool SlowModel::MoveLeg(Leg& leg, bool cleared) {
  bool any = false;
  bool posted = false, all_posted = true;
  for (const End& end : leg.senders) {
    posted |= end.posted != kNever;
    all_posted &= end.posted != kNever;
  }
  if (posted && cleared && leg.cleared == kNever) leg.cleared = now_;
  for (End& end : leg.receivers) {
    if (end.arrived != kNever) continue;
    bool there = all_posted;
    int64_t since = leg.cleared;
    if (leg.nothing && leg.own) {
      there = false;
      for (const End& sender : leg.senders) there |= sender.c == end.c && sender.posted != kNever;
      since = now_;
    } else if (leg.nothing) {
      since = now_;
    } else {
      there &= leg.cleared != kNever;
      const auto wait_for = [&](const End& e) {
        for (const Use& use : e.use) {
          if (use.ns == 0) continue;
          there &= use.begin != kNever;
          since = std::max(since, use.begin + use.ns);
        }
      };
      for (const End& sender : leg.senders) {
        wait_for(sender);
        since = std::max(since, sender.posted);
      }
      wait_for(end);
    }
    if (!there || since + leg.latency > now_) continue;
    end.arrived = now_;
    any = true;
  }
  return any;
}

bool SlowModel::Move(Message& m) {
  bool any = false;
  if (m.has_local) {
    any |= MoveLeg(m.local, true);
    for (End& end : m.leg.senders) {
      if (end.posted != kNever || ArrivedAt(m.local, end.c) == kNever) continue;
      end.posted = now_;
      any = true;
    }
  }
  return MoveLeg(m.leg, SlotFree(m)) || any;
}

bool SlowModel::Compute() {
  bool any = false;
  for (int c = 0; c < static_cast<int>(ran_.size()); ++c) {
    if (!MayStart(c, now_)) continue;
    const Op& op = s_.groups[costs_.classes()[c].group].compute[ran_[c].size()];
    ran_[c].push_back({now_, now_ + costs_.ComputeNs(op, c)});
    running_[c] = 1;
    any = true;
  }
  return any;
}

// When a use may start, kNever if not yet.
int64_t SlowModel::Eligible(const Leg& leg, const End& end, int fabric, bool receive) const {
  if (!receive) return leg.cleared == kNever ? kNever : end.posted;
  const auto first_start = [&](int f) {
    int64_t first = kNever;
    for (const End& sender : leg.senders) {
      const int64_t begin = sender.use[f].begin;
      if (begin != kNever && (first == kNever || begin < first)) first = begin;
    }
    return first;
  };
  const auto uses = [&](int f) {
    return std::any_of(leg.senders.begin(), leg.senders.end(), [&](const End& e) { return e.use[f].ns > 0; });
  };
  if (uses(fabric)) return first_start(fabric);
  return uses(1 - fabric) ? first_start(1 - fabric) : leg.cleared;
}

void SlowModel::StartUses(bool receive) {
  for (int c = 0; c < static_cast<int>(ran_.size()); ++c) {
    for (int fabric : {0, 1}) {
      bool busy = false;
      std::tuple<int, int64_t, int> best{2, 0, 0};  // forward after backward, time, message
      Use* chosen = nullptr;
      EachLeg([&](Leg& leg) {
        for (End& end : receive ? leg.receivers : leg.senders) {
          Use& use = end.use[fabric];
          if (end.c != c || use.ns == 0) continue;
          busy |= use.begin != kNever && use.begin + use.ns > now_;
          const int64_t since = Eligible(leg, end, fabric, receive);
          const std::tuple<int, int64_t, int> key{leg.backward ? 0 : 1, since, leg.message};
          if (use.begin != kNever || since == kNever || key >= best) continue;
          best = key;
          chosen = &use;
        }
      });
      if (!busy && chosen != nullptr) chosen->begin = now_;
    }
  }
}

int64_t SlowModel::NextTime() {
  int64_t next = std::numeric_limits<int64_t>::max();
  const auto see = [&](int64_t t) {
    if (t > now_) next = std::min(next, t);
  };
  for (size_t c = 0; c < ran_.size(); ++c) {
    if (running_[c]) see(ran_[c].back().end);
  }
  EachLeg([&](const Leg& leg) {
    for (const auto* ends : {&leg.senders, &leg.receivers}) {
      for (const End& end : *ends) {
        for (const Use& use : end.use) {
          if (use.begin == kNever) continue;
          see(use.begin + use.ns);
          see(use.begin + use.ns + leg.latency);
        }
        if (end.posted != kNever) see(end.posted + leg.latency);
      }
    }
    if (leg.cleared != kNever) see(leg.cleared + leg.latency);
  });
  return next;
}

SlowResult SlowModel::Run() {
  for (;;) {
    for (bool any = true; any;) {
      any = Finish();
      for (Message& m : messages_) any |= Move(m);
      any |= Compute();
    }
    StartUses(false);
    StartUses(true);
    const int64_t next = NextTime();
    if (next == std::numeric_limits<int64_t>::max()) break;
    now_ = next;
  }
  SlowResult result;
  for (int c = 0; c < static_cast<int>(ran_.size()); ++c) {
    result.deadlock |= ran_[c].size() < s_.groups[costs_.classes()[c].group].compute.size();
    const StepEndCost end = costs_.StepEnd(c);
    const int64_t last = ran_[c].empty() ? 0 : ran_[c].back().end;
    result.step_ns = std::max(result.step_ns, last + end.reduce_ns + end.optimizer_ns);
  }
  result.classes.resize(ran_.size());
  for (int c = 0; c < static_cast<int>(ran_.size()) && !result.deadlock; ++c) Account(c, &result);
  return result;
}

bool Within(const std::vector<Interval>& intervals, int64_t t) {
  return std::any_of(intervals.begin(), intervals.end(), [&](const Interval& i) { return i.begin <= t && t < i.end; });
}

// Nanosecond by nanosecond.
void SlowModel::Account(int c, SlowResult* result) {
  SlowClass& out = result->classes[c];
  out.computations = ran_[c];
  std::vector<Interval> links;
  EachLeg([&](const Leg& leg) {
    for (bool receive : {false, true}) {
      for (const End& end : receive ? leg.receivers : leg.senders) {
        for (int fabric : {0, 1}) {
          const Use& use = end.use[fabric];
          if (end.c != c || use.ns == 0) continue;
          links.push_back({use.begin, use.begin + use.ns});
          int64_t* const busy[2][2] = {{&out.times.nic_send_ns, &out.times.nic_receive_ns},
                                       {&out.times.nvlink_send_ns, &out.times.nvlink_receive_ns}};
          *busy[fabric][receive] += use.ns;
        }
      }
    }
  });
  const std::vector<Op>& list = s_.groups[costs_.classes()[c].group].compute;
  int64_t at = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    // What came last of that which was not there when it began to wait.
    int64_t posted = 0, last = kNever;
    for (const Message* m : Needs(list[i])) {
      const int64_t arrived = ArrivedAt(m->leg, c);
      int64_t made = 0;
      for (const auto& [sender, time] : m->made) made = std::max(made, time);
      if (arrived <= at || arrived < last) continue;
      posted = arrived == last ? std::max(posted, made) : made;
      last = arrived;
    }
    for (; at < ran_[c][i].begin; ++at) {
      const std::vector<const Leg*> holds = Holds(c, at);
      const bool held = std::any_of(holds.begin(), holds.end(), [&](const Leg* l) { return OtherUnit(list[i], *l); });
      ++(held || at >= posted ? out.times.exposed_ns : out.times.bubble_ns);
    }
    for (; at < ran_[c][i].end; ++at) ++(Within(links, at) ? out.times.overlapped_ns : out.times.compute_ns);
  }
  const StepEndCost end = costs_.StepEnd(c);
  out.times.exposed_ns += end.reduce_ns;
  out.times.compute_ns += end.optimizer_ns;
  out.times.bubble_ns += result->step_ns - at - end.reduce_ns - end.optimizer_ns;
  Memory(c, &out);
}

void SlowModel::Memory(int c, SlowClass* out) {
  std::map<int64_t, MemoryPoint> changes;
  const auto hold = [&](int64_t MemoryPoint::*use, int64_t from, int64_t to, int64_t bytes) {
    changes[from].*use += bytes;
    changes[to].*use -= bytes;
  };
  const std::vector<Op>& list = s_.groups[costs_.classes()[c].group].compute;
  const auto end_of = [&](OpKind kind, const Op& op) {
    const auto it = std::find(list.begin(), list.end(), Op{kind, op.stage, op.micro_batch, op.part});
    return ran_[c][it - list.begin()].end;
  };
  for (size_t i = 0; i < list.size(); ++i) {
    const Op& op = list[i];
    const Interval run = ran_[c][i];
    hold(&MemoryPoint::workspace_bytes, run.begin, run.end, costs_.WorkspaceBytes(op, c));
    for (const Message* m : Needs(op)) {
      for (const End& end : m->leg.receivers) {
        if (end.c != c) continue;
        int64_t from = end.arrived;
        for (const Use& use : end.use) from = use.ns > 0 ? std::min(from, use.begin) : from;
        hold(&MemoryPoint::message_bytes, from, run.end, end.memory);
      }
    }
    if (op.kind != OpKind::kForward) continue;
    const int64_t bytes = costs_.ActivationBytes(op, c, false);
    const int64_t end = s_.backward ? end_of(OpKind::kBackward, op) : run.end;
    hold(&MemoryPoint::activation_bytes, run.begin, end, bytes);
    if (!s_.split_backward) continue;
    hold(&MemoryPoint::activation_bytes, end, end_of(OpKind::kWeight, op), costs_.ActivationBytes(op, c, true));
  }
  int64_t used = costs_.StaticBytes(c);
  const int64_t limit = costs_.MemoryLimit(c);
  out->peak_bytes = used;
  if (limit > 0 && used > limit) out->over_at_ns = 0;
  MemoryPoint now;
  if (!changes.contains(0)) out->timeline.push_back(now);
  for (const auto& [time, change] : changes) {
    used += change.bytes();
    MemoryPoint then{time, now.activation_bytes + change.activation_bytes, now.message_bytes + change.message_bytes,
                     now.workspace_bytes + change.workspace_bytes};
    now.ns = time;
    if (time == 0 || then != now) out->timeline.push_back(then);
    now = then;
    if (used > out->peak_bytes) out->peak_bytes = used, out->peak_at_ns = time;
    if (limit > 0 && used > limit && out->over_at_ns < 0) out->over_at_ns = time;
  }
}

}  // namespace

SlowResult RunSlowModel(const Schedule& schedule, const StepCosts& costs, const SimOptions& options) {
  return SlowModel(schedule, costs, options).Run();
}

}  // namespace disagmoe
