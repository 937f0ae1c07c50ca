// dualpipe and dualpipe-v against their published table (DualPipe's README; DeepSeek-V3 technical report, table 2):
//   bubble (PP/2 - 1)(F&B + B - 3 W), parameters twice, activations PP + 1.
// Its assumptions: a chunk, a merged pair and a whole backward are each one block, whose results leave when all of it
// is done; no transfer time, no head; F&B is the time of the block.
//
// Derivation at the group where phase 0 enters (H = PP/2 positions to the turn, F = B - W = W). Its first pair with a
// backward of phase 0 needs that micro-batch to have come back. The H - 1 positions behind it turn it with one pair
// each, in which time it has W and F of a step 3 to do, and the B that is part of both: it waits (H - 1)(F&B - 2 W). At
// the end it is the H - 1 times of a whole backward and a pair, for gradients that positions behind it send after a
// whole backward while it has only W more to do: (H - 1)(B - W). Together (H - 1)(F&B + B - 3 W).
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "base/error.h"
#include "schedule/closed_forms.h"
#include "schedule/schedule.h"
#include "schedule/split_model_for_tests.h"

namespace disagmoe {
namespace {

struct Case {
  bool folded = false;  // dualpipe-v
  int stages = 4;       // PP, chunks of layers in all
  int layers = 1;       // of a chunk
  int micro_batches = 8;
};

Schedule Make(const Case& c) {
  GenerateOptions options;
  options.num_micro_batches = c.micro_batches;
  return Generate(c.folded ? "dualpipe-v" : "dualpipe",
                  {.num_layers = c.stages * c.layers, .p_a = c.folded ? c.stages / 2 : c.stages, .colocated = true},
                  options);
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (bool folded : {false, true}) {
    for (int stages : {2, 4, 8, 12}) {
      for (int layers : {1, 2}) {
        const int least = folded ? stages : 2 * stages;
        for (int m : {least, least + 2, 2 * least}) cases.push_back({folded, stages, layers, m});
      }
    }
  }
  return cases;
}

// Chunks that a group computes: of a micro-batch both, of half of them one each.
double Work(const Case& c, const ChunkTimes& t) {
  return c.micro_batches * (c.folded ? 2 : 1) * (t.forward + t.backward);
}

// Operations of a group that the published figures count as one: a chunk's forward, backward or weight gradients, or a
// forward and a whole backward merged.
using Block = std::vector<Op>;

std::vector<Block> BlocksOf(const Schedule& s, const std::vector<Op>& list, int layers) {
  const int head = 2 * s.num_layers;
  std::vector<Block> blocks;
  std::set<std::tuple<OpKind, int, int>> open;  // kind, chunk, micro-batch: begun and not ended
  const auto chunk = [&](const Op& op) { return std::min(op.stage, head - 1) / (2 * layers); };
  const auto belongs = [&](const Op& op) {  // to the block before it, though that is complete
    if (blocks.empty()) return false;
    const Block& last = blocks.back();
    const auto has = [&](OpKind kind) {
      return std::any_of(last.begin(), last.end(), [&](const Op& x) {
        return x.kind == kind && x.micro_batch == op.micro_batch && chunk(x) == chunk(op);
      });
    };
    if (op.kind == OpKind::kForward) return op.stage == head && has(OpKind::kForward);
    return op.kind == OpKind::kWeight && has(OpKind::kBackward) && has(OpKind::kWeight);
  };
  for (const Op& op : list) {
    if (open.empty() && !belongs(op)) blocks.emplace_back();
    blocks.back().push_back(op);
    const int last = op.kind == OpKind::kForward ? 2 * layers * (chunk(op) + 1) - 1 : 2 * layers * chunk(op);
    const std::tuple key{op.kind, chunk(op), op.micro_batch};
    if (op.stage == last) {
      open.erase(key);
    } else if (op.stage != head || op.kind != OpKind::kForward) {
      // W among a whole backward ends with it.
      const bool within = op.kind == OpKind::kWeight && open.contains({OpKind::kBackward, chunk(op), op.micro_batch});
      if (!within) open.insert(key);
    }
  }
  return blocks;
}

bool IsPair(const Block& block) {
  const auto has = [&](OpKind kind) {
    return std::any_of(block.begin(), block.end(), [&](const Op& op) { return op.kind == kind; });
  };
  return has(OpKind::kForward) && has(OpKind::kBackward);
}

struct BlockResult {
  double step = 0;
  std::vector<double> busy;  // by group
  int pairs = 0;
};

// If blocks are atomic and their results leave at their ends; a pair takes `pair`.
BlockResult RunBlocks(const Schedule& s, int layers, const ChunkTimes& t, double pair) {
  const int head = 2 * s.num_layers;
  const auto duration = [&](const Op& op) {
    if (op.stage == head) return 0.0;
    if (op.kind == OpKind::kForward) return t.forward / (2 * layers);
    return (op.kind == OpKind::kWeight ? t.weight : t.backward - t.weight) / (2 * layers);
  };
  std::vector<std::vector<Block>> blocks;
  for (const GroupSchedule& group : s.groups) blocks.push_back(BlocksOf(s, group.compute, layers));
  std::map<std::tuple<OpKind, int, int>, double> end;
  std::vector<size_t> next(blocks.size());
  std::vector<double> free(blocks.size());
  BlockResult result;
  result.busy.resize(blocks.size());
  for (bool any = true; any;) {
    any = false;
    for (size_t g = 0; g < blocks.size(); ++g) {
      if (next[g] == blocks[g].size()) continue;
      const Block& block = blocks[g][next[g]];
      double at = free[g];
      bool ready = true;
      double takes = 0;
      for (const Op& op : block) {
        takes += duration(op);
        const int from = op.kind == OpKind::kForward ? op.stage - 1 : op.stage + 1;
        if (op.kind == OpKind::kWeight || from < 0 || from > head) continue;
        const Op input{op.kind, from, op.micro_batch};
        if (std::find(block.begin(), block.end(), input) != block.end()) continue;
        const auto it = end.find({input.kind, input.stage, input.micro_batch});
        ready = ready && it != end.end();
        if (ready) at = std::max(at, it->second);
      }
      if (!ready) continue;
      if (IsPair(block)) takes = pair;
      result.pairs += IsPair(block);
      result.busy[g] += takes;
      for (const Op& op : block) end[{op.kind, op.stage, op.micro_batch}] = at + takes;
      free[g] = at + takes;
      result.step = std::max(result.step, free[g]);
      ++next[g];
      any = true;
    }
  }
  for (size_t g = 0; g < blocks.size(); ++g) EXPECT_EQ(next[g], blocks[g].size());
  return result;
}

TEST(DualPipe, PublishedBubble) {
  for (const Case& c : Cases()) {
    for (double pair : {3.0, 2.75}) {  // F + B; less: what merging hides
      SCOPED_TRACE(testing::Message() << c.folded << " PP " << c.stages << " layers " << c.layers << " M "
                                      << c.micro_batches);
      const ChunkTimes t{1, 2, 1};
      const Schedule s = Make(c);
      const BlockResult result = RunBlocks(s, c.layers, t, pair);
      const double published = BubbleDualPipe(c.stages, pair, t);
      const double bubble = result.step - result.busy[0];
      if (pair == 3) {
        EXPECT_DOUBLE_EQ(bubble, published);
        EXPECT_DOUBLE_EQ(result.busy[0], Work(c, t));
      } else {
        // Positions have unlike numbers of pairs, so the others save less time than this one counts on.
        EXPECT_LE(bubble, published);
        EXPECT_GE(bubble, published - (c.stages / 2 - 1) * (3 - pair));
      }
      // Steps 4 and 5 of the published order, by position: 2 (M' - 2 H + h + 1) pairs, one less at the turn, and H - h
      // - 1.
      const int h_all = c.stages / 2;
      const int of_phase = c.folded ? c.micro_batches : c.micro_batches / 2;
      int pairs = 0;
      for (int h = 0; h < h_all; ++h) pairs += 2 * (of_phase - 2 * h_all + h + 1) + h_all - h - 1;
      EXPECT_EQ(result.pairs, (pairs - 1) * (c.folded ? 1 : 2));
    }
  }
}

// Where F, B - W and W differ the published form is an upper bound, within one F: with W smaller than F the turn and
// the last weight gradients give some time back.
TEST(DualPipe, PublishedBubbleWithOtherTimes) {
  for (const Case& c : Cases()) {
    for (double w : {0.25, 0.5, 0.75}) {
      const ChunkTimes t{1, 2, w};
      const BlockResult result = RunBlocks(Make(c), c.layers, t, 3);
      EXPECT_LE(result.step - result.busy[0], BubbleDualPipe(c.stages, 3, t) + 1e-9);
      EXPECT_GE(result.step - result.busy[0], BubbleDualPipe(c.stages, 3, t) - t.forward);
    }
  }
}

// Layer by layer a pair's and a whole backward's results leave before its end, so the bubble is smaller than published,
// and the smaller the fewer layers a chunk has (a gradient leaves before the last stage's W, and an activation before
// the last stage's backward).
TEST(DualPipe, BubbleLayerByLayer) {
  for (const Case& c : Cases()) {
    const ChunkTimes t{2.0 * c.layers, 4.0 * c.layers, 2.0 * c.layers};
    const double published = BubbleDualPipe(c.stages, t.forward + t.backward, t);
    const double bubble = RunSplitModel(Make(c), {}).step - Work(c, t);
    EXPECT_LE(bubble, published);
    if (c.stages > 2) {
      EXPECT_GE(bubble, published / 2);
      EXPECT_LT(published, BubbleZeroBubble(c.stages, t));
    }
  }
}

TEST(DualPipe, PublishedMemory) {
  for (const Case& c : Cases()) {
    const Schedule s = Make(c);
    const std::vector<int> peak = ValidateSchedule(s).peak_in_flight;
    EXPECT_EQ(*std::max_element(peak.begin(), peak.end()), (c.stages + 1) * 2 * c.layers) << c.stages;
    // Parameters: chunks whose stages a group holds on any route.
    std::vector<std::set<int>> held(s.groups.size());
    for (size_t i = 0; i < s.stage_group.size(); ++i)
      held[s.stage_group[i]].insert(static_cast<int>(i) % s.num_stages());
    for (const std::set<int>& stages : held) {
      EXPECT_EQ(std::count_if(stages.begin(), stages.end(), [&](int x) { return x < 2 * s.num_layers; }),
                2 * 2 * c.layers);
    }
  }
}

// Both ends of dualpipe hold a head, which the micro-batches of the route that ends there use.
TEST(DualPipe, HeadsAtBothEnds) {
  const Schedule s = Make({.stages = 4});
  EXPECT_EQ(s.group(8, 0), 3);
  EXPECT_EQ(s.group(8, 4), 0);
  const Schedule v = Make({.folded = true, .stages = 4, .micro_batches = 4});
  EXPECT_EQ(v.stage_group, (std::vector<int>{0, 0, 1, 1, 1, 1, 0, 0, 0}));
}

TEST(DualPipe, RefusesWhatCannotBe) {
  const auto message = [](const std::string& name, PlacementSpec placement, GenerateOptions options) -> std::string {
    try {
      Generate(name, placement, options);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  GenerateOptions eight;
  eight.num_micro_batches = 8;
  const PlacementSpec four{.num_layers = 8, .p_a = 4, .colocated = true};
  EXPECT_EQ(message("dualpipe", four, eight), "no error");
  const auto expect = [&](const std::string& name, auto change, const std::string& part) {
    PlacementSpec placement = four;
    GenerateOptions options = eight;
    change(&placement, &options);
    EXPECT_NE(message(name, placement, options).find(part), std::string::npos) << message(name, placement, options);
  };
  using P = PlacementSpec*;
  using O = GenerateOptions*;
  expect("dualpipe", [](P p, O) { p->colocated = false; }, "needs groups that hold both parts");
  expect("dualpipe", [](P p, O) { p->p_a = 3; }, "an even one");
  expect("dualpipe", [](P p, O) { p->num_layers = 3; }, "at most 3");
  expect("dualpipe", [](P, O o) { o->num_micro_batches = 6; }, "at least 2 p_a = 8");
  expect("dualpipe", [](P, O o) { o->num_micro_batches = 9; }, "an even one, at least 2 p_a = 8");
  expect("dualpipe", [](P p, O) { p->virtual_stages = 2; }, "1, or 0");
  expect("dualpipe", [](P, O o) { o->round = 4; }, "it has no rounds");
  expect("dualpipe", [](P, O o) { o->parts = 2; }, "number of parts");
  expect("dualpipe", [](P p, O) { p->head_on_attention = true; }, "layout.head");
  expect("dualpipe-v", [](P p, O) { p->num_layers = 7; }, "at most 7 chunks");
  expect("dualpipe-v", [](P, O o) { o->num_micro_batches = 7; }, "at least 2 p_a = 8");
  expect("dualpipe-v", [](P p, O) { p->virtual_stages = 1; }, "2, or 0");
}

}  // namespace
}  // namespace disagmoe
