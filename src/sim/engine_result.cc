// What a simulation says in the end.
#include <algorithm>
#include <array>
#include <iterator>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "schedule/ready.h"
#include "sim/engine.h"

namespace disagmoe {

SimResult Engine::Run() {
  Loop();
  for (const Worker& w : workers_) {
    if (w.next != w.end) ThrowDeadlock();
  }
  return Finish();
}

SimResult Engine::Finish() {
  SimResult result;
  for (const ClassAccount& account : accounts_) result.step_ns = std::max(result.step_ns, account.end_ns());
  for (size_t c = 0; c < accounts_.size(); ++c) {
    result.times.push_back(accounts_[c].Finish(result.step_ns));
    result.memory.push_back(accounts_[c].TakeMemory());
    DM_CHECK(accounts_[c].bytes_in_use() == 0, ClassName(s_, costs_.classes()[c]) + " keeps memory after the step");
    const int g = workers_[c].group;
    const int32_t first = plan_.group_begin[g], end = plan_.group_begin[g + 1];
    result.num_ops += int64_t{end} - first + plan_.send_begin[end] - plan_.send_begin[first];
  }
  FindLimit(&result);
  std::vector<int> order(events_.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return RankOf(a) < RankOf(b); });
  for (int c : order) std::move(events_[c].begin(), events_[c].end(), std::back_inserter(result.events));
  return result;
}

void Engine::FindLimit(SimResult* result) const {
  for (size_t c = 0; c < result->times.size(); ++c) {
    const ClassTimes& t = result->times[c];
    const std::array<std::pair<const char*, int64_t>, 5> resources{{{"compute", t.busy_ns()},
                                                                     {"NIC send", t.nic_send_ns},
                                                                     {"NIC receive", t.nic_receive_ns},
                                                                     {"NVLink send", t.nvlink_send_ns},
                                                                     {"NVLink receive", t.nvlink_receive_ns}}};
    for (const auto& [name, ns] : resources) {
      if (ns <= result->limit_ns) continue;
      result->limit_ns = ns;
      result->limit = std::string(name) + " of " + ClassName(s_, costs_.classes()[c]);
    }
  }
}

std::string Engine::WhatItAwaits(const Worker& w) const {
  const Op& op = plan_.ops[w.next];
  if (w.next == plan_.impossible[w.group]) {
    const OpKind needs = op.kind == OpKind::kWeight ? OpKind::kBackward : OpKind::kForward;
    return PrintOp({needs, op.stage, op.micro_batch, op.part}) + ", which is not before it in the group's order";
  }
  for (int32_t i = plan_.receive_begin[w.next]; i < plan_.receive_begin[w.next + 1]; ++i) {
    const int32_t m = plan_.receives[i];
    const int32_t f = flight_of_[m];
    const std::string message = PrintOp(PeerOf(plan_.messages[m].send));
    const Link& link = s_.links[plan_.messages[m].link];
    const std::string& sender = s_.groups[link.src_group].name;
    if (f >= 0 && flights_[f].senders_left == 0) continue;
    if (f >= 0 && !flights_[f].released) {
      return message + ", which waits for one of " + std::to_string(link.slots) + " receive slots from group " + sender;
    }
    for (int c = first_class_[link.src_group]; c < first_class_[link.src_group + 1]; ++c) {
      const Worker& other = workers_[c];
      if (other.next == other.end) continue;
      return message + " of group " + sender + ", which stands before " + PrintOp(plan_.ops[other.next]);
    }
    return message + " of group " + sender;
  }
  std::string exchanges;
  for (int32_t m : w.holds) exchanges += (exchanges.empty() ? "" : ", ") + PrintOp(plan_.messages[m].send);
  return "the end of the group's own exchanges " + exchanges;
}

void Engine::ThrowDeadlock() const {
  const auto stuck = std::find_if(workers_.begin(), workers_.end(), [](const Worker& w) { return w.next != w.end; });
  const std::string where = "group " + s_.groups[stuck->group].name + ", " + PrintOp(plan_.ops[stuck->next]);
  throw Error({"the schedule deadlocks", where, "it waits for " + WhatItAwaits(*stuck), "",
               "`disagmoe schedule FILE --grid` draws how far it runs"});
}

SimResult Simulate(const Schedule& schedule, const StepCosts& costs, const SimOptions& options) {
  return Engine(schedule, costs, options).Run();
}

std::vector<TraceCounter> MemoryCounters(const ClassMemory& memory, int rank) {
  std::vector<TraceCounter> out;
  for (const MemoryPoint& p : memory.timeline) {
    out.push_back({rank, p.ns, "memory",
                   {{"static", memory.static_bytes},
                    {"activations", p.activation_bytes},
                    {"messages", p.message_bytes},
                    {"workspace", p.workspace_bytes}}});
  }
  return out;
}

std::string ClassName(const Schedule& schedule, const WorkerClass& c) {
  const GroupSchedule& group = schedule.groups[c.group];
  if (c.count > 1 && c.count == static_cast<int>(group.ranks.size())) return group.name;
  return group.name + "." + std::to_string(c.first_worker);
}

}  // namespace disagmoe
