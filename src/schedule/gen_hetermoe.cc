// hetermoe: zebra parallelism with uneven expert assignment (HeterMoE, arXiv 2504.03871, section 4). One attention
// group and one expert group; micro-batches alternate, so that the attention of one is computed beside the experts of
// another.
//
// Order (its Theorem 1): layer by layer, each for all micro-batches of the round; then the backwards, layer by layer
// from the last, the chain's last stage one forward and one backward in turn. As published a round is all micro-batches
// of a step, and that is the default here; the number is tuned there (and bounded by memory: a round's activations of
// all layers are held), so `round` may be given: rounds then follow each other.
//
// Uneven assignment (its section 4.2): a part of each layer's experts belongs to the attention group, which computes it
// after the layer's attention of all micro-batches; backward mirrors that. Which share of the experts that is, down to
// none for a layer, is the costs' business: part 0 is the expert group's, part 1 the attention group's.
#include "base/error.h"
#include "schedule/order.h"

namespace disagmoe {
namespace {

// A head in the expert group needs what the attention group's part sends, so it is a step of its own after the part's.
class Zebra {
 public:
  Zebra(Schedule* s, bool uneven) : s_(s), head_(2 * s->num_layers), uneven_(uneven) {}

  void Round(int first) {
    for (int stage = 0; stage < head_ - 1; ++stage) Stage(OpKind::kForward, stage, first);
    Turn(first);
    for (int stage = head_ - 2; s_->backward && stage >= 0; --stage) Stage(OpKind::kBackward, stage, first);
  }

 private:
  void Append(OpKind kind, int stage, int micro_batch, int part = 0) {
    s_->groups[s_->group(stage, micro_batch, part)].compute.push_back({kind, stage, micro_batch, part});
  }

  void Stage(OpKind kind, int stage, int first) {
    for (int b = first; b < first + s_->round; ++b) {
      for (int part = 0; part < s_->parts(stage); ++part) Append(kind, stage, b, part);
    }
  }

  // The last FFN stage and the head. The stage that ends the chain in its group takes forward and backward in turn: the
  // FFN stage with the head after it, or, where its parts come from two groups or the head is elsewhere, the head.
  void Turn(int first) {
    const int last = head_ - 1;
    const bool fused = HeadIsFused(*s_) && !uneven_;
    if (!fused) Stage(OpKind::kForward, last, first);
    for (int b = first; b < first + s_->round; ++b) {
      if (fused) Append(OpKind::kForward, last, b);
      Append(OpKind::kForward, head_, b);
      if (!s_->backward) continue;
      Append(OpKind::kBackward, head_, b);
      if (HeadIsFused(*s_)) Append(OpKind::kBackward, last, b);
    }
    if (!s_->backward) return;
    for (int b = first; b < first + s_->round; ++b) {
      if (!HeadIsFused(*s_)) Append(OpKind::kBackward, last, b);
      if (uneven_) Append(OpKind::kBackward, last, b, 1);
    }
  }

  Schedule* s_;
  int head_;
  bool uneven_;
};

}  // namespace

Schedule GenerateHeterMoe(const PlacementSpec& placement, const GenerateOptions& options) {
  RequirePlacement(placement, false, "hetermoe");
  if (placement.p_a != 1 || placement.p_f != 1) {
    throw Error({"hetermoe has one attention group and one expert group", "p_a, p_f",
                 std::to_string(placement.p_a) + ", " + std::to_string(placement.p_f), "1, 1",
                 "give the groups more workers (m, n)"});
  }
  if (options.parts < 0 || options.parts > 2) {
    throw Error({"hetermoe cuts a layer's experts between its two groups", "parts", std::to_string(options.parts),
                 "2, or 1: all experts in the expert group", ""});
  }
  Schedule s = PlaceStages(placement, options);
  s.name = "hetermoe";
  GenerateOptions all = options;
  if (all.round == 0) all.round = s.num_micro_batches;
  s.round = MakeRing(2, 2 * s.num_layers, all).round;
  const bool uneven = options.parts != 1;
  if (uneven) {
    const int a0 = 0, f0 = 1;
    for (int stage = 0; stage < s.num_stages(); ++stage) {
      const bool cut = stage % 2 == 1;
      s.stage_parts.push_back(cut ? 2 : 1);
      s.part_group.push_back(s.stage_group[stage]);
      s.part_group.push_back(cut ? a0 : s.stage_group[stage]);
    }
    DM_CHECK(s.stage_group[1] == f0, s.name);
  }
  Zebra zebra(&s, uneven);
  for (int first = 0; first < s.num_micro_batches; first += s.round) zebra.Round(first);
  // The receiver is at another layer's micro-batches: it may have to keep what the rest of the round sends.
  FinishSchedule(&s, [&](int, bool) { return std::max(2, s.round); });
  return s;
}

}  // namespace disagmoe
