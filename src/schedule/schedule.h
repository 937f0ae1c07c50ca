// A schedule is data: for each group of workers, an ordered list of computations and an ordered list of
// transfers. Generators write it, the validator proves it, the simulator and the runtime execute the same object.
//
// Stages of a model with L layers (system.md section 3, schedule.md section 1):
//   2l      attention part of layer l: embedding (l = 0), norms, attention, router, packing
//   2l + 1  FFN part of layer l: experts, gate weighting, per-token sums, residual at the token's home
//   2L      head: final norm, output projection, loss. Its forward also computes the gradient of its input.
// Boundary i lies between stage i and stage i + 1. A stage belongs to one group; a group may hold stages of any
// kind (a colocated worker holds attention and experts), and both sides of a boundary may be the same group.
//
// Streams of a group: forward computations, backward computations, transfers. The static interleaving of the two
// compute streams is `compute` (they share one accelerator); each stream alone is its projection.
//
// Three generalisations, each absent in a plain schedule:
//   split backward  B computes input gradients only, W(stage, micro-batch) the weight gradients, any time after it
//   parts           a stage of a micro-batch is cut into P pieces (chunks of experts or of tokens) that run and travel
//                   one by one; the boundary between a cut stage and a whole one carries P messages. Neighbouring
//                   stages have equal numbers of parts, or one of them is whole.
//   routes          half of the micro-batches may visit the groups in another order (DualPipe)
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace disagmoe {

enum class OpKind : uint8_t {
  kForward,       // F(stage, micro-batch)
  kBackward,      // B(stage, micro-batch): the whole backward, or with split_backward only input gradients
  kWeight,        // W(stage, micro-batch): weight gradients, with split_backward
  kSendForward,   // activations over boundary `stage`, sent by the group of `stage`
  kRecvForward,   //   received by the group of `stage` + 1
  kSendBackward,  // gradients over boundary `stage`, sent by the group of `stage` + 1
  kRecvBackward,  //   received by the group of `stage`
};

struct Op {
  OpKind kind = OpKind::kForward;
  int32_t stage = 0;  // of a computation: the stage; of a transfer: the boundary
  int32_t micro_batch = 0;
  int32_t part = 0;
  friend bool operator==(const Op&, const Op&) = default;
};

struct GroupSchedule {
  std::string name;         // "A0", "F1", or "C0" for a colocated group
  std::vector<int> ranks;   // workers of the group, in order
  std::vector<Op> compute;  // kForward, kBackward, kWeight
  // Transfers in the order of `compute`: before each computation its receive, after it its send. Receives may be
  // posted ahead as far as slots allow; no transfer blocks another.
  std::vector<Op> comm;
  // Activations held at once (forwards done whose backward, or W, is not; each part counts): what the order needs. A
  // head in the group of stage 2L - 1 is one unit with it and not counted. Forward only: 1, they are dropped at once.
  int max_in_flight = 0;
};

// Receive slots of a link: how many messages of one direction a receiver may hold or have posted at once. A slot is
// freed when the consuming computation has ended. Messages are matched by key; slots are taken in the order of the
// receiver's comm list. Every pair of groups with a boundary between them has a link per direction, also (g, g).
struct Link {
  int src_group = 0;
  int dst_group = 0;
  bool backward = false;
  int slots = 2;
  friend bool operator==(const Link&, const Link&) = default;
};

struct Schedule {
  std::string name;  // generator, e.g. "af-pipe"
  int num_layers = 0;
  int num_micro_batches = 0;
  int round = 0;       // q: micro-batches per round
  int slope = 2;       // e
  bool backward = true;  // false: forward only (evaluation)
  bool split_backward = false;  // every B has its W
  // All-to-alls hold the computation: while a group's own transfer over a boundary of micro-batch b is on its way, the
  // group starts only computations of b on the two stages of that boundary. (What a pipeline's point-to-point sends
  // add to it, from group to group, never holds.) Simulated; the runtime never holds.
  bool sync_exchange = false;
  int num_routes = 1;            // micro-batches [0, M/2) take route 0, the others route 1
  std::vector<int> stage_group;  // [num_routes * (2L + 1)] group of each stage, route by route
  std::vector<int> stage_parts;  // [2L + 1] parts of each stage; empty: all whole
  // [(2L + 1) * max_parts()] group of a part of a stage, where the parts of one stage live in different groups (uneven
  // expert assignment over both pools; only with one route); empty: all in the stage's group.
  std::vector<int> part_group;
  std::vector<GroupSchedule> groups;
  std::vector<Link> links;

  int num_stages() const { return 2 * num_layers + 1; }
  int parts(int stage) const { return stage_parts.empty() ? 1 : stage_parts[stage]; }
  // Messages of a micro-batch over a boundary.
  int boundary_parts(int boundary) const { return std::max(parts(boundary), parts(boundary + 1)); }
  int max_parts() const {
    return stage_parts.empty() ? 1 : *std::max_element(stage_parts.begin(), stage_parts.end());
  }
  int route(int micro_batch) const {
    return num_routes == 1 ? 0 : static_cast<int>(int64_t{micro_batch} * num_routes / num_micro_batches);
  }
  int group(int stage, int micro_batch, int part = 0) const {
    if (!part_group.empty()) return part_group[stage * max_parts() + part];
    return stage_group[route(micro_batch) * num_stages() + stage];
  }
  // Whole stages and one route: what the runtime executes. Plain: whole backwards as well.
  bool executable() const { return num_routes == 1 && max_parts() == 1; }
  bool plain() const { return executable() && !split_backward; }
};

inline bool IsCompute(OpKind k) { return k <= OpKind::kWeight; }

// One stream of a group: its operations of one kind, in order.
std::vector<Op> StreamOf(const GroupSchedule& group, OpKind kind);

// Where the groups are: the input of every generator.
struct PlacementSpec {
  int num_layers = 1;
  int p_a = 1;  // A-groups
  int p_f = 1;  // F-groups
  int m = 1;    // workers in an A-group
  int n = 1;    // workers in an F-group
  bool colocated = false;          // p_a groups of m workers hold attention and experts; p_f, n are ignored
  bool head_on_attention = false;  // else the head is with the F-group of the last layer
  // Colocated: chunks of consecutive layers that a group holds, v; 0 = one layer a chunk. Layers that v * p_a does not
  // divide are spread so that the first and the last chunk, which have embedding and head as well, get fewer.
  int virtual_stages = 0;
};

struct GenerateOptions {
  int num_micro_batches = 1;
  int round = 0;              // q; 0 = smallest divisor of the micro-batch count that is >= R * (1 + transfer_ratio)
  int slope = 2;
  double transfer_ratio = 0;  // T_M2N / max(T_a, T_f), for the choice of q
  bool backward = true;
  int parts = 0;              // pieces that overlap within a layer (tutel's degree, ...); 0 = the generator's choice
  bool delay_weights = true;  // megatron-overlap: weight gradients are operations of their own, later
  // Relative times that list scheduling and filling go by: forward of an attention and an FFN stage, and the share of
  // the backward (twice a forward) that weight gradients take.
  double attention_time = 1;
  double ffn_time = 1;
  double weight_share = 0.5;
};

// Ranks: A-groups first, group by group, then F-groups; A-group g has ranks g*m .. g*m + m-1.
// Every generator throws Error where a layout or an option cannot be. system.md section 7 says what each overlaps.
// By name; ScheduleNames() lists them with a line each.
Schedule Generate(const std::string& name, const PlacementSpec& placement, const GenerateOptions& options);
struct ScheduleName {
  std::string name;
  std::string summary;
  bool colocated = false;  // needs a colocated placement; else two pools
};
const std::vector<ScheduleName>& ScheduleNames();

// Text form: prints and parses back to an equal object. Parse throws Error with the line.
std::string PrintSchedule(const Schedule& schedule);
Schedule ParseSchedule(const std::string& text, const std::string& where);
std::string PrintOp(const Op& op);
std::string ScheduleJson(const Schedule& schedule);
// A grid: one row a group, one column a unit of time (T_a = T_f = 1, B = 2 F, head 0), for people. A transfer takes
// transfer_units and never queues. A schedule that deadlocks is drawn up to where it stops.
std::string DrawGrid(const Schedule& schedule, double transfer_units = 0, int max_columns = 0);

// Proves: every stage and micro-batch has exactly one forward and (if backward) one backward, in its group; every
// send has its receive with the same key, in the order said above; every boundary has a link; program order plus data
// edges have no cycle (then receive slots, enough for one computation, add none: see validate.cc); no more activations
// than max_in_flight. Throws Error that names the group, the operation and, for a cycle, its members.
struct ScheduleFacts {
  std::vector<int> peak_in_flight;  // per group
  int64_t num_ops = 0;
};
ScheduleFacts ValidateSchedule(const Schedule& schedule);

}  // namespace disagmoe
