// The event engine behind Simulate. At each moment, in this order: everything that ends; computations that may start
// (those that take no time end at once, and again); sends that may start; receives that may start; the memory is
// looked at. So no result depends on the order in which things that end together are handled.
//
// A message on its way is a "flight": a side for each class of the sending group, then one for each of the receiving.
// Where a local phase comes first, it is a flight of its own, from the sending group to itself.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cost/step_costs.h"
#include "schedule/schedule.h"
#include "sim/class_account.h"
#include "sim/event_queue.h"
#include "sim/plan.h"
#include "sim/simulate.h"

namespace disagmoe {

class Engine {
 public:
  Engine(const Schedule& schedule, const StepCosts& costs, const SimOptions& options);
  SimResult Run();

 private:
  static constexpr int kFabrics = 2;  // NIC, NVLink
  static constexpr int kWays = 5;     // events of a class: its computation, then its link ends

  struct Job {
    int64_t key = 0;  // forward after backward, then by time
    int32_t message = 0;
    int32_t flight = 0;
    // A heap has its smallest first.
    bool operator<(const Job& o) const { return key != o.key ? key > o.key : message > o.message; }
  };
  // One direction of one fabric of a class.
  struct LinkEnd {
    std::vector<Job> queue;
    int32_t moving = -1;  // flight
    bool listed = false;
  };
  struct Worker {
    int group = 0;
    int32_t next = 0;       // position
    int32_t end = 0;        // of its group's list
    int32_t missing = 0;    // messages that `next` waits for
    bool computing = false;
    bool held = false;      // `next`, by an exchange
    bool listed = false;
    int64_t since = 0;      // begin of the computation, or of waiting
    int64_t held_until = 0;
    int64_t arrived = -1, posted = -1;  // of the last message that arrived for `next` while it waited
    int64_t workspace = 0;
    std::vector<int32_t> holds;  // messages whose exchange is on its way
  };
  struct Side {
    int64_t ns[kFabrics] = {0, 0};
    int64_t bytes = 0;
    int64_t time = 0;    // posted (of a sender)
    int64_t begin = -1;  // began to move
    int64_t memory = 0;  // what the message takes (of a receiver)
    int8_t left = 0;     // fabrics that have not ended
    bool posted = false, arrived = false, in_memory = false, moves = false;
  };
  struct Flight {
    int32_t message = 0;
    int32_t src = 0, dst = 0;    // groups
    int32_t first_side = 0;
    int32_t senders_left = 0, receivers_left = 0;  // classes that have not sent all, that have not used it
    int32_t local = -1;          // flight of its local phase
    int64_t latency = 0;
    int64_t posted = 0;          // by the last of the senders so far
    bool is_local = false, backward = false;
    bool nothing = true;         // moves no data and takes no time
    bool released = true;        // has a slot
    bool used[kFabrics] = {false, false}, started[kFabrics] = {false, false};  // by its senders
  };

  int RankOf(int c) const;
  int ClassesOf(int group) const { return first_class_[group + 1] - first_class_[group]; }
  Side& SenderSide(const Flight& f, int c) { return sides_[f.first_side + c - first_class_[f.src]]; }
  Side& ReceiverSide(const Flight& f, int c) {
    return sides_[f.first_side + ClassesOf(f.src) + c - first_class_[f.dst]];
  }
  LinkEnd& End(int c, int fabric, bool receive) { return ends_[(c * kFabrics + fabric) * 2 + receive]; }

  // engine.cc: computations.
  void Handle(const Event& event);
  void Await(int c);
  bool Held(const Worker& w) const;
  void Unhold(int c, int32_t message);
  void List(int c);
  void StartComputing(int c);
  void EndComputing(int c);
  void FreeMemory(int c, const Op& op);
  void UseMessages(int c, int32_t position);
  void FreeSlots(int32_t position);
  void Take(int c, MemoryUse use, int64_t bytes, const Op& op);
  void Loop();

  // engine_transfers.cc: messages.
  int32_t Open(int32_t message);
  int32_t NewFlight(int32_t message, int src, int dst, bool local);
  void CloseFlight(int32_t flight);
  void SetCost(Flight& flight, Side& side, int c, const TransferCost& cost, bool sending);
  bool SlotFree(int32_t message) const;
  void Post(int32_t message, int c);
  void PostIn(int32_t flight, int c);
  void Release(int32_t message);
  void Enqueue(int32_t flight, int c);
  void QueueReceives(int32_t flight, int fabric);
  void PushJob(int c, int fabric, bool receive, int32_t flight, int64_t time);
  void StartLink(int32_t end);
  void EndLink(int32_t end);
  void SenderDone(int32_t flight);
  void Deliver(int32_t flight, int c);
  void Arrive(int32_t flight, int c);
  bool EndsHold(const Flight& flight) const;
  void RecordTransfer(const Flight& flight, const Side& side, int c, bool sending);

  // engine_result.cc.
  SimResult Finish();
  void FindLimit(SimResult* result) const;
  [[noreturn]] void ThrowDeadlock() const;
  std::string WhatItAwaits(const Worker& w) const;
  const Schedule& s_;
  const StepCosts& costs_;
  const SimOptions options_;
  const Plan plan_;
  const bool sync_;
  std::vector<int> first_class_;  // [groups + 1]
  int64_t now_ = 0;
  EventQueue queue_;
  std::vector<Worker> workers_;
  std::vector<ClassAccount> accounts_;
  std::vector<std::vector<TraceEvent>> events_;
  std::vector<LinkEnd> ends_;  // of each class: NIC send, NIC receive, NVLink send, NVLink receive
  std::vector<Flight> flights_;
  std::vector<Side> sides_;
  std::vector<int32_t> free_flights_;
  std::vector<std::vector<int32_t>> free_sides_;  // by number of sides
  std::vector<int32_t> flight_of_;                // by message: -1 not posted yet, -2 used by all
  std::vector<int32_t> classes_done_;             // by position
  std::vector<int32_t> used_of_link_;             // messages whose slot is free again
  std::vector<int32_t> to_compute_, to_send_, to_receive_, to_look_;
};

}  // namespace disagmoe
