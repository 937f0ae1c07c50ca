// A schedule as the engine walks it: dense numbers and flat arrays. Computations of all groups are numbered one list
// after the other ("positions"); messages in the order of the computations that make them, then by part.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/schedule.h"

namespace disagmoe {

struct PlanMessage {
  Op send;
  int32_t link = 0;     // in schedule.links
  int32_t turn = 0;     // how many messages of the link the receiver uses before it
  int32_t user = 0;     // position that uses it
};

struct Plan {
  std::vector<Op> ops;                 // [positions]
  std::vector<int32_t> group_begin;    // [groups + 1] position of a group's first computation
  std::vector<int32_t> send_begin;     // [positions + 1] number of the first message that a position makes
  std::vector<int32_t> receive_begin;  // [positions + 1] into `receives`
  std::vector<int32_t> receives;       // numbers of the messages that a position uses
  std::vector<PlanMessage> messages;
  std::vector<int32_t> link_begin;     // [links + 1] into `turns`
  std::vector<int32_t> turns;          // a link's messages in the order used
  // By group: the first position that its own order makes impossible (a backward before its forward, W before B); else
  // the end of its list.
  std::vector<int32_t> impossible;
};

// The schedule must be complete, each operation once (ValidateSchedule); its order may deadlock.
Plan MakePlan(const Schedule& schedule);

}  // namespace disagmoe
