// Equality of schedules in every field, for tests.
#pragma once

#include <algorithm>

#include "schedule/schedule.h"

namespace disagmoe {

inline bool Same(const Schedule& a, const Schedule& b) {
  const auto groups = [](const GroupSchedule& x, const GroupSchedule& y) {
    return x.name == y.name && x.ranks == y.ranks && x.compute == y.compute && x.comm == y.comm &&
           x.max_in_flight == y.max_in_flight;
  };
  return a.name == b.name && a.num_layers == b.num_layers && a.num_micro_batches == b.num_micro_batches &&
         a.round == b.round && a.slope == b.slope && a.backward == b.backward && a.split_backward == b.split_backward &&
         a.sync_exchange == b.sync_exchange && a.num_routes == b.num_routes && a.stage_group == b.stage_group &&
         a.stage_parts == b.stage_parts && a.part_group == b.part_group && a.links == b.links &&
         std::equal(a.groups.begin(), a.groups.end(), b.groups.begin(), b.groups.end(), groups);
}

}  // namespace disagmoe
