// dualpipe and dualpipe-v: two chunks of layers a group, whose micro-batches run against each other, a forward of one
// merged with a backward of the other (DeepSeek-V3 technical report, section 3.2; the steps and their numbers as in the
// DualPipe repository, whose README has the table of bubbles and memory).
//
// dualpipe: PP groups, PP chunks. Route 0 visits chunk c on group c, route 1 on group PP - 1 - c: every group holds two
// chunks, twice the parameters. Phase 0 of a group is the direction whose end is nearer to it in front.
// dualpipe-v ("cut in half"): one route over 2 PP chunks, chunk c on group c going out and on 2 PP - 1 - c coming back.
// Phase 0 is the chunk going out. It is dualpipe's first half with its second half folded onto it: the same order.
#include <deque>

#include "base/error.h"
#include "schedule/order.h"

namespace disagmoe {
namespace {

// One group: position h of H in the order, counted from the end where phase 0 enters.
struct Place {
  int positions = 1;      // H
  int position = 0;       // h
  int micro_batches = 1;  // of a phase, at least 2 H
  LayerSpan chunk[2];     // by phase; micro_batch is the first one
};

class GroupOrder {
 public:
  GroupOrder(Schedule* s, const Place& place) : s_(s), place_(place) {}

  void Run() {
    const int h = place_.position;
    const int outer = place_.positions - h - 1;  // groups between this one and the turn
    for (int i = 0; i < 2 * outer; ++i) Forward(0);
    for (int i = 0; i < h + 1; ++i) {
      Forward(0);
      Forward(1);
    }
    for (int i = 0; i < outer; ++i) {
      Backward(1, true);
      Weights();
      Forward(1);
    }
    for (int i = 0; i < place_.micro_batches - 2 * place_.positions + h + 1; ++i) {
      if (i == 0 && outer == 0) {
        // Apart: the backward can start at the turn before it would as one of a pair.
        Forward(0);
        Backward(1, false);
      } else {
        Pair(0, 1);
      }
      Pair(1, 0);
    }
    for (int i = 0; i < outer; ++i) {
      Backward(1, false);
      Pair(1, 0);
    }
    // Of the 2 (h + 1) backwards the last h + 1 leave their weight gradients for later.
    for (int i = 0; i < 2 * (h + 1); ++i) Backward(1 - i % 2, i >= h + 1);
    for (int i = 0; i < outer; ++i) {
      Weights();
      Backward(0, true);
    }
    while (!waiting_.empty()) Weights();
  }

 private:
  LayerSpan Next(int phase, int* count) const {
    LayerSpan span = place_.chunk[phase];
    span.micro_batch += (*count)++;
    return span;
  }

  void Forward(int phase) { AppendPair(s_, Next(phase, &forwards_[phase]), {}, false); }

  void Backward(int phase, bool weights_later) {
    if (!s_->backward) return;
    const LayerSpan span = Next(phase, &backwards_[phase]);
    AppendPair(s_, {}, span, !weights_later);
    if (weights_later) waiting_.push_back(span);
  }

  void Pair(int forward, int backward) {
    if (!s_->backward) return Forward(forward);
    const LayerSpan span = Next(forward, &forwards_[forward]);
    AppendPair(s_, span, Next(backward, &backwards_[backward]), true);
  }

  // Of the chunk that has waited longest.
  void Weights() {
    if (waiting_.empty()) return;
    const LayerSpan span = waiting_.front();
    waiting_.pop_front();
    for (int stage = 2 * span.last - 1; stage >= 2 * span.first; --stage) {
      AppendCompute(s_, OpKind::kWeight, stage, span.micro_batch);
    }
  }

  Schedule* s_;
  Place place_;
  int forwards_[2] = {0, 0};
  int backwards_[2] = {0, 0};
  std::deque<LayerSpan> waiting_;
};

void Require(bool holds, const std::string& name, const std::string& what, int got, const std::string& expected) {
  if (!holds) throw Error({name + " cannot have this " + what, what, std::to_string(got), expected, ""});
}

// Checks what both have in common; `chunks` of layers a group and direction.
Schedule Start(const std::string& name, PlacementSpec* placement, const GenerateOptions& options, int chunks) {
  RequirePlacement(*placement, true, name);
  Require(placement->virtual_stages == 0 || placement->virtual_stages == chunks, name, "number of virtual stages",
          placement->virtual_stages, std::to_string(chunks) + ", or 0: its own choice");
  Require(options.round == 0, name, "round", options.round, "0: it has no rounds");
  Require(options.parts <= 1, name, "number of parts", options.parts, "1");
  placement->virtual_stages = chunks;
  Schedule s = PlaceStages(*placement, options);
  s.name = name;
  s.round = s.num_micro_batches;
  s.split_backward = s.backward;
  return s;
}

void Finish(Schedule* s) {
  FinishSchedule(s, [](int, bool) { return 2; });
}

}  // namespace

Schedule GenerateDualPipe(const PlacementSpec& given, const GenerateOptions& options) {
  PlacementSpec placement = given;
  const int pp = placement.p_a;
  Schedule s = Start("dualpipe", &placement, options, 1);
  Require(pp % 2 == 0, s.name, "number of groups (p_a)", pp, "an even one");
  Require(s.num_micro_batches % 2 == 0 && s.num_micro_batches >= 2 * pp, s.name, "number of micro-batches",
          s.num_micro_batches, "an even one, at least 2 p_a = " + std::to_string(2 * pp));
  s.num_routes = 2;
  const int stages = s.num_stages();
  for (int i = 0; i < stages; ++i) s.stage_group.push_back(pp - 1 - s.stage_group[i]);
  const std::vector<int> begin = UnitLayers(placement);
  const int half = s.num_micro_batches / 2;
  for (int g = 0; g < pp; ++g) {
    const int far = pp - 1 - g;
    const LayerSpan route0{begin[g], begin[g + 1], 0};
    const LayerSpan route1{begin[far], begin[far + 1], half};
    const bool front = g < pp / 2;
    GroupOrder(&s, {pp / 2, std::min(g, far), half, {front ? route0 : route1, front ? route1 : route0}}).Run();
  }
  Finish(&s);
  return s;
}

Schedule GenerateDualPipeV(const PlacementSpec& given, const GenerateOptions& options) {
  PlacementSpec placement = given;
  const int pp = placement.p_a;
  Schedule s = Start("dualpipe-v", &placement, options, 2);
  Require(s.num_micro_batches >= 2 * pp, s.name, "number of micro-batches", s.num_micro_batches,
          "at least 2 p_a = " + std::to_string(2 * pp));
  const std::vector<int> begin = UnitLayers(placement);
  for (int chunk = 0; chunk < 2 * pp; ++chunk) {
    for (int stage = 2 * begin[chunk]; stage < 2 * begin[chunk + 1]; ++stage) {
      s.stage_group[stage] = std::min(chunk, 2 * pp - 1 - chunk);
    }
  }
  s.stage_group.back() = s.stage_group[s.num_stages() - 2];
  for (int g = 0; g < pp; ++g) {
    const int back = 2 * pp - 1 - g;
    GroupOrder(&s, {pp, g, s.num_micro_batches, {{begin[g], begin[g + 1], 0}, {begin[back], begin[back + 1], 0}}})
        .Run();
  }
  Finish(&s);
  return s;
}

}  // namespace disagmoe
