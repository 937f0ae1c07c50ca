// Shared by the generators of colocated schedules: chunks of consecutive layers are the units of a ring of p_a
// positions, in the order of interleaved 1F1B; a group alone runs round by round all forwards, then all backwards.
#pragma once

#include <string>
#include <vector>

#include "schedule/order.h"

namespace disagmoe {

struct Chunks {
  Ring ring;
  // First layer of each unit, and L at the end. A head that is not with the last layer is a unit of its own, [L, L).
  std::vector<int> begin;

  // Nothing where the padded order has more units than there are.
  LayerSpan Span(int position, const Unit& unit) const;
};
Chunks ChunksOf(const Schedule& placed, const PlacementSpec& placement, const GenerateOptions& options);

// What the interleaved schedules differ in. Whatever the parts are, those of a stage are computed one after another,
// which is the order in which their messages are posted.
struct ColocatedStyle {
  std::string name;
  int attention_parts = 1;
  int ffn_parts = 1;
  bool split_backward = false;  // the weight gradients of a stage follow the input gradients of all its parts
  bool sync_exchange = true;
};
// Throws Error on a layout or an option that cannot be, and where the order would deadlock.
Schedule GenerateInterleaved(const ColocatedStyle& style, const PlacementSpec& placement,
                             const GenerateOptions& options);
// The same without proof that it cannot deadlock.
Schedule BuildInterleaved(const ColocatedStyle& style, const PlacementSpec& placement, const GenerateOptions& options);

// options.parts, or `standard` where that is 0. Throws Error unless 1 <= parts <= most.
int PartsOf(const GenerateOptions& options, int standard, int most, const std::string& name);
// Transfers, links and activations in flight, from the compute orders.
void FinishColocated(Schedule* schedule, const Ring& ring);
// Throws the Error of rings whose round is too small, if the schedule deadlocks.
void RequireFree(const Schedule& schedule, const Ring& ring);

}  // namespace disagmoe
