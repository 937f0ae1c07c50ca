// The engine against a slow model of its own, on schedules and times drawn at random: exact equality.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "base/error.h"
#include "base/rng.h"
#include "schedule/ready.h"
#include "sim/made_up_costs_for_tests.h"
#include "sim/simulate.h"
#include "sim/slow_model_for_tests.h"
#include "trace/trace.h"

namespace disagmoe {
namespace {

// A number below n that depends on nothing but its arguments.
int64_t Draw(uint64_t seed, const Op& op, int c, int what, int64_t n) {
  uint64_t h = seed;
  for (int v : {static_cast<int>(op.kind), op.stage, op.micro_batch, op.part, c, what}) {
    h = Mix64(h ^ static_cast<uint64_t>(v));
  }
  return static_cast<int64_t>(h % static_cast<uint64_t>(n));
}

struct CostRange {
  int64_t compute = 9;
  int64_t transfer = 7;
  int64_t shortest = 1;     // of a computation
  int silent_percent = 20;  // transfers that move nothing
  int local_percent = 0;
};

MadeUpCosts RandomCosts(const Schedule& s, uint64_t seed, const CostRange& range) {
  MadeUpCosts costs(s);
  costs.made_classes.clear();
  Rng rng(seed);
  for (size_t g = 0; g < s.groups.size(); ++g) {
    const int workers = static_cast<int>(s.groups[g].ranks.size());
    for (int first = 0; first < workers;) {
      const int count = 1 + static_cast<int>(rng.Below(workers - first));
      costs.made_classes.push_back({static_cast<int>(g), count, first});
      first += count;
    }
  }
  costs.compute = [=](const Op& op, int c) { return range.shortest + Draw(seed, op, c, 0, range.compute); };
  const auto transfer = [=](const Op& op, int c, bool sending, int salt) {
    TransferCost cost;
    if (Draw(seed, op, 0, salt, 100) < range.silent_percent) return cost;
    const int at = salt + (sending ? 1 : 2);
    // A class may move nothing over one fabric, or over both.
    cost.nic_ns = std::max<int64_t>(0, Draw(seed, op, c, at + 10, range.transfer + 2) - 2);
    cost.nvlink_ns = std::max<int64_t>(0, Draw(seed, op, c, at + 20, range.transfer + 2) - 4);
    cost.latency_ns = Draw(seed, op, c, at + 30, 3);
    cost.nic_bytes = cost.nic_ns * 10;
    return cost;
  };
  costs.transfer = [=](const Op& op, int c, bool sending) { return transfer(op, c, sending, 100); };
  costs.has_local = [=](const Op& op) { return Draw(seed, op, 0, 300, 100) < range.local_percent; };
  costs.local = [=](const Op& op, int c, bool sending) { return transfer(op, c, sending, 200); };
  costs.step_end = [=](int c) { return StepEndCost{Draw(seed, {}, c, 400, 5), Draw(seed, {}, c, 401, 9)}; };
  costs.activation = [=](const Op& op, int c, bool after) {
    const int64_t whole = Draw(seed, op, c, 500, 20);
    return after ? whole / 3 : whole;
  };
  costs.workspace = [=](const Op& op, int c) { return Draw(seed, op, c, 501, 15); };
  costs.message = [=](const Op& op, int c) { return Draw(seed, op, c, 502, 10); };
  costs.static_parts = {.weights = 20, .gradients = 40, .optimizer = 30, .reserved = 10};
  costs.limit = 100 + static_cast<int64_t>(rng.Below(150));
  return costs;
}

// Orders drawn from a random execution: any computation whose inputs are made may come next.
Schedule RandomSchedule(uint64_t seed) {
  Rng rng(seed);
  Schedule s;
  s.name = "random";
  s.num_layers = 1 + static_cast<int>(rng.Below(3));
  s.num_micro_batches = 1 + static_cast<int>(rng.Below(4));
  s.backward = rng.Below(4) > 0;
  s.split_backward = s.backward && rng.Below(2) > 0;
  s.sync_exchange = rng.Below(2) > 0;
  const int groups = 1 + static_cast<int>(rng.Below(3));
  const bool in_parts = rng.Below(2) > 0;
  const bool scattered = in_parts && rng.Below(3) == 0;
  if (!scattered && s.num_micro_batches > 1 && rng.Below(2) > 0) s.num_routes = 2;
  for (int i = 0; i < s.num_routes * s.num_stages(); ++i) s.stage_group.push_back(static_cast<int>(rng.Below(groups)));
  for (int i = 0; i < s.num_stages() && in_parts; ++i) {
    const bool beside = i > 0 && s.stage_parts[i - 1] > 1;
    s.stage_parts.push_back(rng.Below(2) > 0 ? 1 : beside ? s.stage_parts[i - 1] : 2 + static_cast<int>(rng.Below(2)));
  }
  for (int i = 0; i < s.num_stages() * s.max_parts() && scattered; ++i) {
    s.part_group.push_back(static_cast<int>(rng.Below(groups)));
  }
  int rank = 0;
  for (int g = 0; g < groups; ++g) {
    GroupSchedule group;
    group.name = "G" + std::to_string(g);
    for (int w = static_cast<int>(rng.Below(3)); w >= 0; --w) group.ranks.push_back(rank++);
    s.groups.push_back(group);
  }
  std::vector<Op> open;
  for (int b = 0; b < s.num_micro_batches; ++b) {
    for (int i = 0; i < s.num_stages(); ++i) {
      for (int part = 0; part < s.parts(i); ++part) {
        open.push_back({OpKind::kForward, i, b, part});
        if (s.backward) open.push_back({OpKind::kBackward, i, b, part});
        if (s.split_backward) open.push_back({OpKind::kWeight, i, b, part});
      }
    }
  }
  std::vector<Op> done;
  const auto is_done = [&](const Op& op) { return std::find(done.begin(), done.end(), op) != done.end(); };
  const auto ready = [&](const Op& op) {
    if (op.kind == OpKind::kBackward && !is_done({OpKind::kForward, op.stage, op.micro_batch, op.part})) return false;
    if (op.kind == OpKind::kWeight && !is_done({OpKind::kBackward, op.stage, op.micro_batch, op.part})) return false;
    const TransferRange receives = ReceivesFor(s, op);
    for (int i = 0; i < receives.count; ++i) {
      if (!is_done(ProducerOf(s, receives[i]))) return false;
    }
    return true;
  };
  while (!open.empty()) {
    const size_t i = rng.Below(open.size());
    if (!ready(open[i])) continue;
    done.push_back(open[i]);
    s.groups[GroupOf(s, open[i])].compute.push_back(open[i]);
    open.erase(open.begin() + static_cast<long>(i));
  }
  AddLinks(&s, 1 + static_cast<int>(rng.Below(4)));
  return s;
}

struct Tally {
  int ran = 0, deadlocks = 0;
};

// The spans of the computations of a class, by begin; a class's order is that of its group.
std::vector<Interval> Computations(const SimResult& result, int rank) {
  std::vector<Interval> spans;
  for (const TraceEvent& e : result.events) {
    const bool computes = e.stream == Stream::kForward || e.stream == Stream::kBackward;
    if (e.rank == rank && computes) spans.push_back({e.begin_ns, e.end_ns});
  }
  return spans;
}

// The peak is the first of the largest sums of the timeline.
void CheckPeak(const ClassMemory& m) {
  const auto less = [](const MemoryPoint& a, const MemoryPoint& b) { return a.bytes() < b.bytes(); };
  const MemoryPoint peak = *std::max_element(m.timeline.begin(), m.timeline.end(), less);
  ASSERT_EQ(m.static_bytes + peak.bytes(), m.peak_bytes);
  ASSERT_EQ(peak.ns, m.peak_at_ns);
  ASSERT_EQ(peak.activation_bytes, m.peak_activation_bytes);
  ASSERT_EQ(peak.message_bytes, m.peak_message_bytes);
  ASSERT_EQ(peak.workspace_bytes, m.peak_workspace_bytes());
  ASSERT_EQ(m.timeline.back().bytes(), 0);
}

void Compare(const Schedule& s, const MadeUpCosts& costs, SimOptions options, Tally* tally) {
  options.trace = true;
  const SlowResult slow = RunSlowModel(s, costs, options);
  if (slow.deadlock) {
    ++tally->deadlocks;
    EXPECT_THROW(Simulate(s, costs, options), Error);
    return;
  }
  ++tally->ran;
  const SimResult fast = Simulate(s, costs, options);
  options.trace = false;
  const SimResult untraced = Simulate(s, costs, options);
  ASSERT_EQ(fast.step_ns, slow.step_ns);
  for (size_t c = 0; c < slow.classes.size(); ++c) {
    SCOPED_TRACE(ClassName(s, costs.made_classes[c]));
    const WorkerClass& wc = costs.made_classes[c];
    const int rank = s.groups[wc.group].ranks[wc.first_worker];
    ASSERT_EQ(Computations(fast, rank), slow.classes[c].computations);
    const ClassTimes& t = fast.times[c];
    const ClassTimes& expected = slow.classes[c].times;
    ASSERT_EQ(t.compute_ns, expected.compute_ns);
    ASSERT_EQ(t.overlapped_ns, expected.overlapped_ns);
    ASSERT_EQ(t.exposed_ns, expected.exposed_ns);
    ASSERT_EQ(t.bubble_ns, expected.bubble_ns);
    ASSERT_EQ(t.compute_ns + t.overlapped_ns + t.exposed_ns + t.bubble_ns, fast.step_ns);
    ASSERT_EQ(t.nic_send_ns, expected.nic_send_ns);
    ASSERT_EQ(t.nic_receive_ns, expected.nic_receive_ns);
    ASSERT_EQ(t.nvlink_send_ns, expected.nvlink_send_ns);
    ASSERT_EQ(t.nvlink_receive_ns, expected.nvlink_receive_ns);
    ASSERT_EQ(fast.memory[c].peak_bytes, slow.classes[c].peak_bytes);
    ASSERT_EQ(fast.memory[c].peak_at_ns, slow.classes[c].peak_at_ns);
    ASSERT_EQ(fast.memory[c].over_at_ns, slow.classes[c].over_at_ns);
    ASSERT_EQ(fast.memory[c].timeline, slow.classes[c].timeline);
    CheckPeak(fast.memory[c]);
    ASSERT_EQ(fast.memory[c].peak_op, untraced.memory[c].peak_op);
    ASSERT_EQ(fast.memory[c].over_op, untraced.memory[c].over_op);
    ASSERT_EQ(fast.memory[c].peak_bytes, untraced.memory[c].peak_bytes);
    const WorkerTimes traced = TimesOf(fast.events, rank, 1);
    ASSERT_EQ(traced.step_ns, fast.step_ns);
    ASSERT_EQ(traced.compute_ns, t.busy_ns());
    ASSERT_EQ(traced.exposed_ns, t.exposed_ns);
    ASSERT_EQ(traced.bubble_ns, t.bubble_ns);
    ASSERT_LE(fast.limit_ns, fast.step_ns);
  }
}

TEST(Random, AnyOrder) {
  Tally tally;
  for (uint64_t seed = 1; seed <= 1500 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    const Schedule s = RandomSchedule(seed);
    const CostRange range{.shortest = static_cast<int64_t>(seed % 3 > 0), .local_percent = seed % 2 == 0 ? 30 : 0};
    Compare(s, RandomCosts(s, seed, range), {.bounded_slots = seed % 5 > 0, .sync_exchange = seed % 7 > 0}, &tally);
  }
  // Orders that ask for more slots than there are, or that an exchange holds back, do deadlock; most do not.
  EXPECT_GT(tally.ran, 1000);
  EXPECT_GT(tally.deadlocks, 50);
}

TEST(Random, AfPipeAndColocated) {
  Tally tally;
  for (uint64_t seed = 1; seed <= 150 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(seed);
    PlacementSpec placement;
    placement.num_layers = 3 + static_cast<int>(rng.Below(4));
    placement.p_a = 1 + static_cast<int>(rng.Below(3));
    placement.p_f = rng.Below(2) > 0 ? placement.p_a : 1 + static_cast<int>(rng.Below(3));
    placement.m = 1 + static_cast<int>(rng.Below(3));
    placement.n = 1 + static_cast<int>(rng.Below(2));
    placement.colocated = rng.Below(3) == 0;
    placement.head_on_attention = rng.Below(4) == 0;
    GenerateOptions options;
    const int round = 2 * (1 + static_cast<int>(rng.Below(3)));
    options.num_micro_batches = round * (1 + static_cast<int>(rng.Below(2)));
    options.round = placement.colocated ? 0 : round;
    Schedule s;
    try {
      s = Generate(placement.colocated ? "megatron-1f1b" : "af-pipe", placement, options);
    } catch (const Error&) {
      continue;  // a layout that cannot be
    }
    Compare(s, RandomCosts(s, seed, {.compute = 20, .transfer = 12, .silent_percent = 5}), {}, &tally);
  }
  EXPECT_GT(tally.ran, 100);
  EXPECT_EQ(tally.deadlocks, 0);
}

TEST(Random, SameBytesTwice) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    const Schedule s = RandomSchedule(seed);
    const MadeUpCosts costs = RandomCosts(s, seed, {.shortest = 0, .local_percent = 30});
    if (RunSlowModel(s, costs, {}).deadlock) continue;
    EXPECT_EQ(PerfettoJson(Simulate(s, costs, {.trace = true}).events, {}),
              PerfettoJson(Simulate(s, costs, {.trace = true}).events, {}));
  }
}

}  // namespace
}  // namespace disagmoe
