// Shared by the generators: who holds what, the order of one pipeline position, and what follows from compute orders.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "schedule/schedule.h"

namespace disagmoe {

// Groups, ranks, names and stage_group; no operations yet. Throws Error on a layout that cannot be.
Schedule PlaceStages(const PlacementSpec& placement, const GenerateOptions& options);

// R pipeline positions with v units each, the unit of position r and chunk c being unit c R + r of the chain.
struct Ring {
  int positions = 1;      // R
  int chunks = 1;         // v
  int micro_batches = 1;  // M
  int round = 1;          // q, divides M
  int slope = 2;          // e
};

// round as given (it must divide M), or the smallest divisor of M that is >= R (1 + transfer_ratio), else M.
Ring MakeRing(int positions, int units, const GenerateOptions& options);

struct Unit {
  bool backward = false;
  int chunk = 0;
  int micro_batch = 0;
};

std::vector<Unit> ForwardList(const Ring& ring);
std::vector<Unit> BackwardList(const Ring& ring);
// w_r: forwards before the first backward.
int WarmUp(const Ring& ring, int position);
// w_r forwards, then forward and backward in turn, then the remaining backwards (schedule.md section 2).
std::vector<Unit> PositionOrder(const Ring& ring, int position, bool backward);
// Slots of the link from the last position to the first, which parks the rest of a round.
int WrapSlots(const Ring& ring);
// Schedule.md section 3: no order of this ring can deadlock.
bool ProvablyFree(const Ring& ring);
[[noreturn]] void ThrowDeadlock(const Ring& ring);

// Colocated: first layer of each unit (chunk of consecutive layers), and L at the end; unit u is on group u mod p_a.
std::vector<int> UnitLayers(const PlacementSpec& placement);

// Appends an operation (F, B, W) of the chain to its group, a head in the group of stage 2L - 1 with that stage.
void AppendCompute(Schedule* schedule, OpKind kind, int stage, int micro_batch, int part = 0);
bool HeadIsFused(const Schedule& schedule);
// Layers [first, last) of a micro-batch, both stages of each, with the head where it is fused and last = L; a head that
// is not fused is [L, L) alone. first = last < L: nothing.
struct LayerSpan {
  int first = 0;
  int last = 0;
  int micro_batch = 0;
};
bool HasHead(const Schedule& schedule, const LayerSpan& span);
// Merges the forward of one micro-batch with the backward of another, both in one group and of whole stages, so that
// the exchanges of each lie under the other's computation:
//   F(2l) B(2k+1) W(2k+1)  F(2l+1) B(2k) W(2k)  F(2l+2) ...
// A head's backward comes first, its forward last; what is left of the longer one follows. With nothing forward it is
// the backward alone, each W under the exchange after its B. Without with_weights the caller appends W.
void AppendPair(Schedule* schedule, const LayerSpan& forward, const LayerSpan& backward, bool with_weights);
// From the compute orders: transfers, links (slots_of(boundary, backward), the largest of a link counts, times the
// parts of the boundary) and max_in_flight.
void FinishSchedule(Schedule* schedule, const std::function<int(int, bool)>& slots_of);
// The largest number of activations held, in the order of `group`.
int PeakInFlight(const Schedule& schedule, int group);

// A generator that needs one of the two kinds of placement; throws Error on the other.
void RequirePlacement(const PlacementSpec& placement, bool colocated, const std::string& name);

// One generator a file. Those that prove freedom of deadlock by a rule throw its message; Generate validates the rest.
Schedule GenerateAfPipe(const PlacementSpec& placement, const GenerateOptions& options);
Schedule GenerateMegatron(const PlacementSpec& placement, const GenerateOptions& options);
Schedule GenerateMegatronOverlap(const PlacementSpec& placement, const GenerateOptions& options);
Schedule GenerateTutel(const PlacementSpec& placement, const GenerateOptions& options);
Schedule GenerateComet(const PlacementSpec& placement, const GenerateOptions& options);
Schedule GenerateFasterMoe(const PlacementSpec& placement, const GenerateOptions& options);
Schedule GenerateLancet(const PlacementSpec& placement, const GenerateOptions& options);
Schedule GenerateAfPipeZb(const PlacementSpec& placement, const GenerateOptions& options);
Schedule GenerateDualPipe(const PlacementSpec& placement, const GenerateOptions& options);
Schedule GenerateDualPipeV(const PlacementSpec& placement, const GenerateOptions& options);
Schedule GenerateHeterMoe(const PlacementSpec& placement, const GenerateOptions& options);

// Without the proof that ValidateSchedule gives; tests use them to make deadlocks.
Schedule BuildAfPipeRing(const PlacementSpec& placement, const GenerateOptions& options);
Schedule BuildAfPipeList(const PlacementSpec& placement, const GenerateOptions& options);
Schedule BuildMegatron(const PlacementSpec& placement, const GenerateOptions& options);

}  // namespace disagmoe
