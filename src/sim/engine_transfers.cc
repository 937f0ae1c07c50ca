// Messages: from posted to arrived.
#include <algorithm>

#include "base/error.h"
#include "schedule/ready.h"
#include "sim/engine.h"

namespace disagmoe {

int32_t Engine::NewFlight(int32_t message, int src, int dst, bool local) {
  if (free_flights_.empty()) {
    free_flights_.push_back(static_cast<int32_t>(flights_.size()));
    flights_.emplace_back();
  }
  const int32_t flight = free_flights_.back();
  free_flights_.pop_back();
  Flight& f = flights_[flight] = Flight{};
  f.message = message;
  f.src = src;
  f.dst = dst;
  f.is_local = local;
  f.backward = IsBackward(plan_.messages[message].send.kind);
  f.senders_left = ClassesOf(src);
  f.receivers_left = ClassesOf(dst);
  const size_t count = f.senders_left + f.receivers_left;
  if (free_sides_.size() <= count) free_sides_.resize(count + 1);
  if (free_sides_[count].empty()) {
    free_sides_[count].push_back(static_cast<int32_t>(sides_.size()));
    sides_.resize(sides_.size() + count);
  }
  f.first_side = free_sides_[count].back();
  free_sides_[count].pop_back();
  std::fill_n(sides_.begin() + f.first_side, count, Side{});
  return flight;
}

void Engine::CloseFlight(int32_t flight) {
  const Flight& f = flights_[flight];
  free_sides_[ClassesOf(f.src) + ClassesOf(f.dst)].push_back(f.first_side);
  free_flights_.push_back(flight);
}

void Engine::SetCost(Flight& f, Side& side, int c, const TransferCost& cost, bool sending) {
  DM_CHECK(cost.nic_ns >= 0 && cost.nvlink_ns >= 0 && cost.latency_ns >= 0,
           "a negative time of " + PrintOp(plan_.messages[f.message].send));
  side.ns[0] = cost.nic_ns;
  side.ns[1] = cost.nvlink_ns;
  side.bytes = cost.nic_bytes + cost.nvlink_bytes;
  side.moves = cost.nic_ns > 0 || cost.nvlink_ns > 0 || cost.latency_ns > 0 || side.bytes > 0;
  side.left = static_cast<int8_t>((cost.nic_ns > 0) + (cost.nvlink_ns > 0));
  f.latency = std::max(f.latency, cost.latency_ns);
  if (side.moves) f.nothing = false;
  if (!sending) return;
  for (int fabric = 0; fabric < kFabrics; ++fabric) f.used[fabric] |= side.ns[fabric] > 0;
  accounts_[c].CountBytes(cost.nic_bytes, cost.nvlink_bytes);
}

// The first class of the senders posts it: asks for all costs, once.
int32_t Engine::Open(int32_t message) {
  const Op& send = plan_.messages[message].send;
  const Link& link = s_.links[plan_.messages[message].link];
  const bool with_local = costs_.HasLocalPhase(send);
  const int32_t local = with_local ? NewFlight(message, link.src_group, link.src_group, true) : -1;
  const int32_t flight = NewFlight(message, link.src_group, link.dst_group, false);
  Flight& f = flights_[flight];
  f.local = local;
  for (int c = first_class_[f.src]; c < first_class_[f.src + 1]; ++c) {
    SetCost(f, SenderSide(f, c), c, costs_.Transfer(send, c, true), true);
    if (!with_local) continue;
    Flight& l = flights_[local];
    SetCost(l, SenderSide(l, c), c, costs_.LocalPhase(send, c, true), true);
    SetCost(l, ReceiverSide(l, c), c, costs_.LocalPhase(send, c, false), false);
  }
  for (int c = first_class_[f.dst]; c < first_class_[f.dst + 1]; ++c) {
    Side& side = ReceiverSide(f, c);
    SetCost(f, side, c, costs_.Transfer(send, c, false), false);
    side.memory = costs_.MessageBytes(send, c);
  }
  f.released = f.nothing || SlotFree(message);
  return flight_of_[message] = flight;
}

bool Engine::SlotFree(int32_t message) const {
  const PlanMessage& m = plan_.messages[message];
  return !options_.bounded_slots || m.turn - used_of_link_[m.link] < s_.links[m.link].slots;
}

// The computation of class c that makes the message has ended.
void Engine::Post(int32_t message, int c) {
  const int32_t flight = flight_of_[message] == -1 ? Open(message) : flight_of_[message];
  Flight& f = flights_[flight];
  f.posted = now_;
  const int32_t local = f.local;
  const bool own = f.src == f.dst && !f.nothing;
  if (sync_ && (own || (local >= 0 && !flights_[local].nothing))) workers_[c].holds.push_back(message);
  PostIn(local >= 0 ? local : flight, c);
}

void Engine::PostIn(int32_t flight, int c) {
  Flight& f = flights_[flight];
  Side& side = SenderSide(f, c);
  side.posted = true;
  side.time = now_;
  if (!f.nothing) {
    if (f.released) Enqueue(flight, c);
    return;
  }
  // Nothing moves: within a group each class has its own result at once; another group waits for all.
  const int src = f.src, dst = f.dst;
  const bool all = --f.senders_left == 0;
  if (src == dst) return Arrive(flight, c);
  for (int r = first_class_[dst]; all && r < first_class_[dst + 1]; ++r) Arrive(flight, r);
}

// A slot has become free for it.
void Engine::Release(int32_t message) {
  const int32_t flight = flight_of_[message];
  if (flight < 0 || flights_[flight].released) return;
  flights_[flight].released = true;
  const int src = flights_[flight].src;
  for (int c = first_class_[src]; c < first_class_[src + 1]; ++c) {
    if (SenderSide(flights_[flight], c).posted) Enqueue(flight, c);
  }
}

void Engine::PushJob(int c, int fabric, bool receive, int32_t flight, int64_t time) {
  constexpr int64_t kForwardLast = int64_t{1} << 62;
  const Flight& f = flights_[flight];
  LinkEnd& end = End(c, fabric, receive);
  end.queue.push_back({f.backward ? time : time | kForwardLast, f.message, flight});
  std::push_heap(end.queue.begin(), end.queue.end());
  if (end.listed || end.moving >= 0) return;
  end.listed = true;
  (receive ? to_receive_ : to_send_).push_back((c * kFabrics + fabric) * 2 + receive);
}

void Engine::Enqueue(int32_t flight, int c) {
  const Flight& f = flights_[flight];
  const Side& side = SenderSide(f, c);
  for (int fabric = 0; fabric < kFabrics; ++fabric) {
    if (side.ns[fabric] > 0) PushJob(c, fabric, false, flight, side.time);
  }
  if (!f.used[0] && !f.used[1]) {
    for (int fabric = 0; fabric < kFabrics; ++fabric) QueueReceives(flight, fabric);
  }
  if (side.left > 0) return;
  RecordTransfer(f, side, c, true);
  SenderDone(flight);
}

// The first sender has started on a fabric: the receivers may.
void Engine::QueueReceives(int32_t flight, int fabric) {
  Flight& f = flights_[flight];
  if (f.started[fabric]) return;
  f.started[fabric] = true;
  for (int c = first_class_[f.dst]; c < first_class_[f.dst + 1]; ++c) {
    if (ReceiverSide(f, c).ns[fabric] > 0) PushJob(c, fabric, true, flight, now_);
  }
}

void Engine::StartLink(int32_t index) {
  LinkEnd& end = ends_[index];
  end.listed = false;
  if (end.moving >= 0 || end.queue.empty()) return;
  std::pop_heap(end.queue.begin(), end.queue.end());
  end.moving = end.queue.back().flight;
  end.queue.pop_back();
  const int c = index / (kFabrics * 2);
  const int fabric = index / 2 % kFabrics;
  const bool receive = index % 2 != 0;
  const Flight& f = flights_[end.moving];
  Side& side = receive ? ReceiverSide(f, c) : SenderSide(f, c);
  if (side.begin < 0) side.begin = now_;
  accounts_[c].StartLink(now_, fabric == 1, receive, side.ns[fabric]);
  queue_.Push(now_ + side.ns[fabric], c * kWays + 1 + index % (kFabrics * 2));
  if (!receive) {
    QueueReceives(end.moving, fabric);
    if (!f.used[1 - fabric]) QueueReceives(end.moving, 1 - fabric);
  } else if (!side.in_memory) {
    side.in_memory = true;
    Take(c, MemoryUse::kMessage, side.memory, PeerOf(plan_.messages[f.message].send));
  }
}

void Engine::EndLink(int32_t index) {
  LinkEnd& end = ends_[index];
  const int32_t flight = end.moving;
  const int c = index / (kFabrics * 2);
  const bool receive = index % 2 != 0;
  end.moving = -1;
  accounts_[c].EndLink(now_);
  if (!end.queue.empty()) {
    end.listed = true;
    (receive ? to_receive_ : to_send_).push_back(index);
  }
  const Flight& f = flights_[flight];
  Side& side = receive ? ReceiverSide(f, c) : SenderSide(f, c);
  if (--side.left > 0) return;
  if (receive) {
    if (f.senders_left == 0) Deliver(flight, c);
    return;
  }
  RecordTransfer(f, side, c, true);
  SenderDone(flight);
}

void Engine::SenderDone(int32_t flight) {
  if (--flights_[flight].senders_left > 0) return;
  // A delivery may end a local flight and open others: no reference is kept.
  const int dst = flights_[flight].dst;
  for (int c = first_class_[dst]; c < first_class_[dst + 1]; ++c) {
    if (ReceiverSide(flights_[flight], c).left == 0) Deliver(flight, c);
  }
}

void Engine::Deliver(int32_t flight, int c) {
  if (flights_[flight].latency > 0) return queue_.Push(now_ + flights_[flight].latency, ~c, flight);
  Arrive(flight, c);
}

// Whether the arrival of this flight ends the hold of a group's own exchange. Of a local phase and an exchange within
// the group that follows it, it is the latter.
bool Engine::EndsHold(const Flight& f) const {
  if (f.nothing || f.src != f.dst) return false;
  if (!f.is_local) return true;
  const Flight& after = flights_[flight_of_[f.message]];
  return after.nothing || after.src != after.dst;
}

void Engine::Arrive(int32_t flight, int c) {
  const Flight& f = flights_[flight];
  Side& side = ReceiverSide(f, c);
  const int32_t message = f.message;
  side.arrived = true;
  RecordTransfer(f, side, c, false);
  if (sync_ && EndsHold(f)) Unhold(c, message);
  if (f.is_local) {
    if (--flights_[flight].receivers_left == 0) CloseFlight(flight);
    return PostIn(flight_of_[message], c);
  }
  if (!side.in_memory) Take(c, MemoryUse::kMessage, side.memory, PeerOf(plan_.messages[message].send));
  side.in_memory = true;
  Worker& w = workers_[c];
  if (w.computing || w.next != plan_.messages[message].user) return;
  w.posted = now_ > w.arrived ? f.posted : std::max(w.posted, f.posted);
  w.arrived = now_;
  if (--w.missing == 0) List(c);
}

void Engine::RecordTransfer(const Flight& f, const Side& side, int c, bool sending) {
  if (!options_.trace || !side.moves) return;
  const Op& send = plan_.messages[f.message].send;
  const std::string name = PrintOp(sending ? send : PeerOf(send)) + (f.is_local ? " local" : "");
  const int peer = s_.groups[sending ? f.dst : f.src].ranks.front();
  const int64_t begin = side.begin >= 0 ? side.begin : now_;
  accounts_[c].Transferred(sending ? Stream::kSend : Stream::kReceive, name, begin, now_, side.bytes, peer);
}

}  // namespace disagmoe
