// Every schedule that the generators make is accepted; every kind of damage is refused, naming the place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

#include "base/error.h"
#include "base/rng.h"
#include "schedule/event_model_for_tests.h"
#include "schedule/order.h"
#include "schedule/ready.h"
#include "schedule/order.h"
#include "schedule/schedule.h"

namespace disagmoe {
namespace {

using testing::HasSubstr;

GenerateOptions Options(int micro_batches, int round = 0) {
  GenerateOptions options;
  options.num_micro_batches = micro_batches;
  options.round = round;
  return options;
}

struct Layout {
  PlacementSpec placement;
  GenerateOptions options;
  std::string name;
};

Layout RandomLayout(Rng* rng) {
  const auto draw = [&](int least, int most) { return least + static_cast<int>(rng->Below(most - least + 1)); };
  Layout out;
  PlacementSpec& p = out.placement;
  p.p_a = draw(1, 4);
  p.p_f = draw(1, 4);
  p.m = draw(1, 5);
  p.n = draw(1, 5);
  p.colocated = draw(0, 3) == 0;
  p.num_layers = draw(std::max(p.p_a, p.colocated ? 1 : p.p_f), 9);
  p.head_on_attention = draw(0, 1) == 1;
  out.options.num_micro_batches = draw(1, 12);
  out.options.transfer_ratio = draw(0, 4) * 0.25;
  out.options.backward = draw(0, 3) > 0;
  out.name = p.colocated ? "megatron-1f1b" : "af-pipe";
  return out;
}

std::string Describe(const Layout& x) {
  std::string out = x.name;
  for (int v : {x.placement.num_layers, x.placement.p_a, x.placement.p_f, int{x.placement.head_on_attention},
                x.options.num_micro_batches, int{x.options.backward}}) {
    out.append(" ").append(std::to_string(v));
  }
  return out;
}

TEST(Validate, AcceptsWhatIsGenerated) {
  Rng rng(1);
  for (int i = 0; i < 1500; ++i) {
    const Layout x = RandomLayout(&rng);
    SCOPED_TRACE(Describe(x));
    Schedule s = Generate(x.name, x.placement, x.options);
    ScheduleFacts facts;
    ASSERT_NO_THROW(facts = ValidateSchedule(s));
    // Two computations a stage, and a send and a receive a boundary, for each direction.
    const int64_t directions = s.backward ? 2 : 1;
    EXPECT_EQ(facts.num_ops, directions * s.num_micro_batches * (s.num_stages() + 2 * (s.num_stages() - 1)));
    for (size_t g = 0; g < s.groups.size(); ++g) EXPECT_EQ(facts.peak_in_flight[g], s.groups[g].max_in_flight);
    if (i % 5 != 0) continue;
    // One slot is enough.
    for (Link& link : s.links) link.slots = 1;
    const ModelTimes times{
        .attention = 1 + rng.Uniform(), .ffn = 1 + rng.Uniform(), .transfer = rng.Uniform(), .bounded = true};
    EXPECT_FALSE(RunModel(s, times).deadlock);
  }
}

// With p_a = p_f every link is a plain queue: messages are used in the order they are sent.
TEST(Validate, EqualPoolsNeedNoKeys) {
  Rng rng(2);
  for (int i = 0; i < 300; ++i) {
    Layout x = RandomLayout(&rng);
    x.placement.p_f = x.placement.p_a;
    SCOPED_TRACE(Describe(x));
    const Schedule s = Generate(x.name, x.placement, x.options);
    for (const Link& link : s.links) {
      std::vector<Op> sent, used;
      for (const Op& op : s.groups[link.src_group].comm) {
        if (IsSend(op.kind) && IsBackward(op.kind) == link.backward && ReceiverOf(s, op) == link.dst_group) {
          sent.push_back(PeerOf(op));
        }
      }
      for (const Op& op : s.groups[link.dst_group].comm) {
        if (IsReceive(op.kind) && IsBackward(op.kind) == link.backward && SenderOf(s, op) == link.src_group) {
          used.push_back(op);
        }
      }
      EXPECT_EQ(sent, used);
    }
  }
}

// Bounded receive slots cost no time (a transfer that must wait is one that nobody waits for).
TEST(Validate, SlotsCostNoTime) {
  Rng rng(3);
  for (int i = 0; i < 200; ++i) {
    Layout x = RandomLayout(&rng);
    x.placement.colocated = false;
    x.name = "af-pipe";
    x.placement.p_f = x.placement.p_a;
    x.placement.num_layers = std::max(x.placement.num_layers, x.placement.p_f);
    SCOPED_TRACE(Describe(x));
    const Schedule s = Generate(x.name, x.placement, x.options);
    ModelTimes times{.transfer = x.options.transfer_ratio};
    const double free = RunModel(s, times).step;
    times.bounded = true;
    EXPECT_LE(RunModel(s, times).step, free * 1.001);
  }
}

// The smaller pool's groups compute faster, as the generator assumes: the busiest group is busy most of the time.
TEST(Validate, UnequalPoolsStayBusy) {
  for (int p_a = 1; p_a <= 4; ++p_a) {
    for (int p_f = 1; p_f <= 4; ++p_f) {
      if (p_a == p_f) continue;
      const Schedule s = GenerateAfPipe({.num_layers = 12, .p_a = p_a, .p_f = p_f}, Options(48));
      const ModelResult result = RunModel(s, {.attention = 1.0 * p_a, .ffn = 1.0 * p_f});
      EXPECT_GT(*std::max_element(result.busy.begin(), result.busy.end()) / result.step, 0.75) << p_a << " " << p_f;
    }
  }
}

// A column r of the ring of 2 max(p_a, p_f) holds at most w_r + 1 activations, and a group those of its columns.
TEST(Validate, UnequalPoolsKeepTheBound) {
  for (int p_a = 1; p_a <= 4; ++p_a) {
    for (int p_f = 1; p_f <= 4; ++p_f) {
      if (p_a == p_f) continue;
      const int layers = 9, micro_batches = 32, ring = 2 * std::max(p_a, p_f);
      const Schedule s = GenerateAfPipe({.num_layers = layers, .p_a = p_a, .p_f = p_f}, Options(micro_batches));
      const int v = (2 * layers + ring - 1) / ring;
      std::vector<std::set<int>> columns(s.groups.size());
      for (int stage = 0; stage < 2 * layers; ++stage) columns[s.stage_group[stage]].insert(stage % ring);
      const std::vector<int> peak = ValidateSchedule(s).peak_in_flight;
      for (size_t g = 0; g < s.groups.size(); ++g) {
        int bound = 0;
        for (int r : columns[g]) bound += std::min(micro_batches * v, (v - 1) * s.round + 2 * (ring - 1 - r)) + 1;
        EXPECT_LE(peak[g], bound) << p_a << " " << p_f << " " << s.groups[g].name;
      }
    }
  }
}

TEST(Validate, LargeModelIsQuick) {
  for (const auto& [p_a, p_f] : {std::pair{47, 47}, std::pair{2, 2}, std::pair{1, 94}, std::pair{94, 3}}) {
    const Schedule s = GenerateAfPipe({.num_layers = 94, .p_a = p_a, .p_f = p_f, .m = 100, .n = 74}, Options(256));
    EXPECT_EQ(ValidateSchedule(s).num_ops, int64_t{256} * 2 * (189 + 2 * 188));
  }
}

Schedule Sample() { return GenerateAfPipe({.num_layers = 4, .p_a = 2, .p_f = 2}, Options(4)); }

void ExpectRefused(const std::function<void(Schedule*)>& damage, const std::vector<std::string>& parts) {
  Schedule s = Sample();
  damage(&s);
  try {
    ValidateSchedule(s);
    ADD_FAILURE() << "accepted, expected: " << parts.front();
  } catch (const Error& error) {
    for (const std::string& part : parts) EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

std::vector<Op>::iterator Find(std::vector<Op>* list, Op op) {
  const auto it = std::find(list->begin(), list->end(), op);
  EXPECT_NE(it, list->end()) << PrintOp(op);
  return it;
}

constexpr Op F(int stage, int b) { return {OpKind::kForward, stage, b}; }
constexpr Op B(int stage, int b) { return {OpKind::kBackward, stage, b}; }

TEST(Validate, RefusesWrongComputations) {
  ExpectRefused([](Schedule* s) { s->groups[0].compute.erase(Find(&s->groups[0].compute, F(4, 2))); },
                {"missing operation", "group A0", "F4.2"});
  ExpectRefused([](Schedule* s) { s->groups[0].compute.push_back(F(4, 2)); }, {"operation twice", "group A0", "[F4.2]"});
  ExpectRefused([](Schedule* s) { s->groups[1].compute.push_back(F(4, 2)); },
                {"wrong group", "group A1", "F4.2", "group A0"});
  ExpectRefused([](Schedule* s) { s->groups[0].compute.push_back(F(4, 4)); }, {"no such stage or micro-batch", "F4.4"});
  ExpectRefused([](Schedule* s) { s->groups[0].compute.push_back({OpKind::kSendForward, 4, 2}); },
                {"a transfer among the computations"});
  ExpectRefused([](Schedule* s) { s->backward = false; }, {"backward in a forward-only schedule"});
}

TEST(Validate, RefusesWrongTransfers) {
  const Op send{OpKind::kSendForward, 4, 2};
  const Op receive{OpKind::kRecvForward, 4, 2};
  ExpectRefused([&](Schedule* s) { s->groups[0].comm.erase(Find(&s->groups[0].comm, send)); },
                {"missing send", "group A0", ">F4.2", "group F0"});
  ExpectRefused([&](Schedule* s) { s->groups[2].comm.erase(Find(&s->groups[2].comm, receive)); },
                {"missing receive", "group F0", "<F4.2", "group A0"});
  ExpectRefused([&](Schedule* s) { s->groups[0].comm.push_back(send); }, {"transfer twice", "[>F4.2]"});
  ExpectRefused([&](Schedule* s) { s->groups[0].comm.push_back(receive); }, {"wrong group", "group A0", "group F0"});
  ExpectRefused([&](Schedule* s) { s->groups[0].comm.push_back(F(0, 0)); }, {"a computation among the transfers"});
  ExpectRefused([&](Schedule* s) { s->groups[0].comm.push_back({OpKind::kSendForward, 8, 0}); }, {"no such boundary"});
}

TEST(Validate, RefusesWrongOrderOfTransfers) {
  const auto swap = [](std::vector<Op>* list, Op a, Op b) { std::iter_swap(Find(list, a), Find(list, b)); };
  ExpectRefused([&](Schedule* s) { swap(&s->groups[0].comm, {OpKind::kSendForward, 0, 0}, {OpKind::kSendForward, 0, 1}); },
                {"sends are not in the order produced", "group A0"});
  ExpectRefused([&](Schedule* s) { swap(&s->groups[0].comm, {OpKind::kRecvForward, 3, 0}, {OpKind::kRecvForward, 3, 1}); },
                {"not", "group A0"});
  ExpectRefused([&](Schedule* s) { swap(&s->groups[2].comm, {OpKind::kRecvForward, 0, 0}, {OpKind::kSendForward, 1, 0}); },
                {"receive after its use, or a send before its production", "group F0", "[<F0.0]"});
  // Two receives in a row, the later used first.
  ExpectRefused([&](Schedule* s) { swap(&s->groups[0].comm, {OpKind::kRecvBackward, 0, 2}, {OpKind::kRecvBackward, 0, 3}); },
                {"receives are not in the order used", "group A0", "<B0.2"});
}

TEST(Validate, RefusesWrongLinks) {
  ExpectRefused([](Schedule* s) { s->links[0].slots = 0; }, {"a link without slots", "A0 -> F0 forward"});
  ExpectRefused([](Schedule* s) { s->links.erase(s->links.begin()); }, {"a boundary without a link", "A0 -> F0 forward"});
  ExpectRefused([](Schedule* s) { s->links.push_back(s->links[0]); }, {"a link twice"});
  ExpectRefused([](Schedule* s) { s->links[0].src_group = 9; }, {"a link of an unknown group"});
}

TEST(Validate, RefusesWrongShapes) {
  ExpectRefused([](Schedule* s) { s->stage_group.pop_back(); }, {"wrong number of stages"});
  ExpectRefused([](Schedule* s) { s->stage_group[3] = 4; }, {"a stage has no group"});
  ExpectRefused([](Schedule* s) { s->num_micro_batches = 0; }, {"needs layers and micro-batches"});
  ExpectRefused([](Schedule* s) { s->num_micro_batches = 2'000'000'000; }, {"most operations are missing"});
  ExpectRefused([](Schedule* s) { s->num_layers = 2'000'000'000; }, {"wrong number of stages"});
  ExpectRefused([](Schedule* s) { s->groups[1].ranks = {0}; }, {"rank", "A1"});
  ExpectRefused([](Schedule* s) { s->groups[1].ranks = {}; }, {"no workers", "A1"});
  ExpectRefused([](Schedule* s) { s->groups.push_back({"X", {9}, {}, {}, 0}); }, {"holds no stage", "X"});
  ExpectRefused([](Schedule* s) { --s->groups[2].max_in_flight; }, {"in flight", "group F0", "got 8", "at most 7"});
}

void ExpectRefusedOf(Schedule s, const std::function<void(Schedule*)>& damage, const std::vector<std::string>& parts) {
  ASSERT_NO_THROW(ValidateSchedule(s));
  damage(&s);
  try {
    ValidateSchedule(s);
    ADD_FAILURE() << "accepted, expected: " << parts.front();
  } catch (const Error& error) {
    for (const std::string& part : parts) EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

Schedule Colocated(const std::string& name, int p = 1) {
  return Generate(name, {.num_layers = 2, .p_a = p, .colocated = true}, Options(2));
}

constexpr Op W(int stage, int b) { return {OpKind::kWeight, stage, b}; }

TEST(Validate, RefusesWrongWeightGradients) {
  const auto split = [](const std::function<void(Schedule*)>& damage, const std::vector<std::string>& parts) {
    ExpectRefusedOf(Colocated("megatron-overlap"), damage, parts);
  };
  split([](Schedule* s) { std::iter_swap(Find(&s->groups[0].compute, W(3, 0)), Find(&s->groups[0].compute, B(3, 0))); },
        {"deadlocks", "group C0", "W3.0", "B3.0"});
  split([](Schedule* s) { s->groups[0].compute.erase(Find(&s->groups[0].compute, W(3, 0))); },
        {"missing operation", "group C0", "W3.0"});
  split([](Schedule* s) { s->groups[0].compute.push_back(W(3, 0)); }, {"operation twice", "group C0", "[W3.0]"});
  split([](Schedule* s) { s->backward = false; }, {"a split backward without a backward", "megatron-overlap"});
  split([](Schedule* s) { s->split_backward = false; }, {"W, but the backward is not split", "group C0", "W4.0"});
  // An activation is held until its W: all of them at the end make every one held.
  split([](Schedule* s) {
    std::vector<Op>& list = s->groups[0].compute;
    std::stable_partition(list.begin(), list.end(), [](const Op& op) { return op.kind != OpKind::kWeight; });
  }, {"in flight", "group C0", "got 8", "at most 5"});
  ExpectRefusedOf(Colocated("megatron-1f1b"), [](Schedule* s) { s->groups[0].compute.push_back(W(1, 0)); },
                  {"W, but the backward is not split", "group C0", "[W1.0]"});
}

TEST(Validate, RefusesWrongParts) {
  const auto cut = [](const std::function<void(Schedule*)>& damage, const std::vector<std::string>& parts) {
    ExpectRefusedOf(Colocated("tutel"), damage, parts);
  };
  const Op part{OpKind::kForward, 3, 1, 1};
  const Op send{OpKind::kSendForward, 2, 1, 1};
  const Op gradients{OpKind::kRecvBackward, 3, 1, 1};
  cut([&](Schedule* s) { s->groups[0].compute.erase(Find(&s->groups[0].compute, part)); },
      {"missing operation", "group C0", "F3.1/1"});
  cut([&](Schedule* s) { s->groups[0].comm.erase(Find(&s->groups[0].comm, send)); }, {"missing send", "group C0", ">F2.1/1"});
  cut([&](Schedule* s) { s->groups[0].comm.erase(Find(&s->groups[0].comm, gradients)); },
      {"missing receive", "group C0", "<B3.1/1"});
  cut([](Schedule* s) { s->groups[0].compute.push_back({OpKind::kForward, 3, 1, 2}); }, {"no such", "group C0", "[F3.1/2]"});
  cut([](Schedule* s) { s->groups[0].compute.push_back({OpKind::kForward, 2, 1, 1}); }, {"no such", "group C0", "[F2.1/1]"});
  cut([](Schedule* s) { s->stage_parts = {1, 2, 3, 2, 1}; }, {"parts that do not match", "stage 2", "3 parts", "2 as"});
  cut([](Schedule* s) { s->stage_parts[4] = 0; }, {"a stage without parts", "stage 4"});
  cut([](Schedule* s) { s->stage_parts.pop_back(); }, {"wrong number of stages with parts", "got 4", "expected 5"});
  // Attention takes both parts of a message at once: with one slot it would wait for ever.
  cut([](Schedule* s) { s->links[0].slots = 1; }, {"fewer slots", "link C0 -> C0 forward", "got 1", "boundary 1"});
  cut([](Schedule* s) { s->links[1].slots = 1; }, {"fewer slots", "link C0 -> C0 backward", "got 1", "boundary 0"});
  cut([](Schedule* s) { s->part_group.assign(3, 0); }, {"wrong number of groups of parts", "got 3", "expected 10"});
  // Part 1 of stage 1 belongs to C1, but C0 computes it.
  ExpectRefusedOf(Colocated("tutel", 2), [](Schedule* s) {
    for (int g : s->stage_group) s->part_group.insert(s->part_group.end(), {g, g});
    s->part_group[1 * 2 + 1] = 1;
  }, {"wrong group", "group C0", "[F1.0/1]", "it in group C1"});
}

// A model's clock agrees that one slot for two parts taken at once stops.
TEST(Validate, SlotsOfPartsAsTheModelRuns) {
  Schedule s = Colocated("tutel");
  s.links[0].slots = 1;
  EXPECT_TRUE(RunModel(s, {.bounded = true, .exchange = 1}).deadlock);
  s.links[0].slots = 2;
  EXPECT_NO_THROW(ValidateSchedule(s));
  EXPECT_FALSE(RunModel(s, {.bounded = true, .exchange = 1}).deadlock);
}

TEST(Validate, RefusesWrongRoutes) {
  const auto routed = [](const std::function<void(Schedule*)>& damage, const std::vector<std::string>& parts) {
    ExpectRefusedOf(Colocated("megatron-1f1b", 2), damage, parts);
  };
  // Micro-batch 1 takes route 1, the other way round, but its operations are where they were.
  routed([](Schedule* s) {
    s->num_routes = 2;
    s->stage_group.insert(s->stage_group.end(), {1, 1, 0, 0, 0});
  }, {"wrong group", "group C0", "[F0.1]", "it in group C1"});
  routed([](Schedule* s) { s->num_routes = 2; }, {"wrong number of stages", "got 5", "expected 10"});
  routed([](Schedule* s) { s->num_routes = 3; }, {"one route or two", "got 3"});
  routed([](Schedule* s) {
    s->num_routes = 2;
    s->stage_group.insert(s->stage_group.end(), {0, 0, 1, 1, 1});
    s->part_group.assign(5, 0);
  }, {"several routes"});
}

// Moves `op` before `before` and writes the transfers anew, so that only the order of computing is wrong.
void Reorder(Schedule* s, int g, Op op, Op before) {
  std::vector<Op>* list = &s->groups[g].compute;
  list->erase(Find(list, op));
  list->insert(Find(list, before), op);
  for (GroupSchedule& group : s->groups) group.comm.clear();
  s->links.clear();
  FinishSchedule(s, [](int, bool) { return 2; });
}

TEST(Validate, RefusesCycles) {
  // The backward of a stage before its forward.
  ExpectRefused([](Schedule* s) { Reorder(s, 3, B(3, 0), F(3, 0)); }, {"deadlocks", "F1: B3.0 F3.0"});
  // The backward of micro-batch 0 before its own forward in the same chunk.
  ExpectRefused([](Schedule* s) { Reorder(s, 0, B(4, 0), F(4, 0)); },
                {"deadlocks", "A0: B4.0 F4.0"});
  // A0 wants the gradient of micro-batch 0 before it computes F4.3; F0 does all its forwards first, so F5.3 before B5.0.
  ExpectRefused([](Schedule* s) { Reorder(s, 0, B(4, 0), F(4, 3)); },
                {"deadlocks", "A0: B4.0 F4.3", "A0: >F4.3 -> F0: <F4.3", "F0: F5.3 B5.0", "F0: >B4.0 -> A0: <B4.0"});
}

TEST(Validate, CycleIsToldInOneLineAndDrawnByTheGrid) {
  Schedule s = Sample();
  Reorder(&s, 0, B(4, 0), F(4, 0));
  try {
    ValidateSchedule(s);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
  }
  EXPECT_THAT(DrawGrid(s), HasSubstr("A0 stops before B4.0, which needs B5.0 of F0\n"));
}

// Of a long run in one group only the ends are told.
TEST(Validate, ShortensCycles) {
  ExpectRefused([](Schedule* s) { Reorder(s, 0, B(0, 0), F(0, 3)); },
                {"A0: B0.0 F0.3", "-> F0: <F0.3", " ... B1.0 -> F0: >B0.0 -> A0: <B0.0 -> A0: B0.0"});
}

TEST(Validate, RefusesRandomReorderingThatTheModelCannotRun) {
  Rng rng(4);
  int refused = 0;
  for (int i = 0; i < 300; ++i) {
    Schedule s = Sample();
    std::vector<Op>& list = s.groups[rng.Below(4)].compute;
    std::swap(list[rng.Below(list.size())], list[rng.Below(list.size())]);
    for (GroupSchedule& group : s.groups) group.comm.clear();
    s.links.clear();
    FinishSchedule(&s, [](int, bool) { return 2; });
    bool accepted = true;
    try {
      ValidateSchedule(s);
    } catch (const Error&) {
      accepted = false;
      ++refused;
    }
    EXPECT_EQ(accepted, !RunModel(s, {.transfer = 0.5, .bounded = true}).deadlock);
  }
  EXPECT_GT(refused, 30);
  EXPECT_LT(refused, 290);
}

}  // namespace
}  // namespace disagmoe
