// af-pipe-zb, dualpipe, dualpipe-v, hetermoe: golden files derived by hand, and what holds for all of their layouts.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "base/rng.h"
#include "schedule/schedule.h"
#include "schedule/split_model_for_tests.h"

namespace disagmoe {
namespace {

std::string ReadFile(const std::string& name) {
  std::ifstream in(std::string(DISAGMOE_TESTDATA) + "/" + name);
  EXPECT_TRUE(in.good()) << name;
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

void ExpectGolden(const std::string& file, const std::string& name, const PlacementSpec& placement, int micro_batches) {
  std::istringstream in(ReadFile(file));
  std::string expected;
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with("#")) expected += line + "\n";
  }
  GenerateOptions options;
  options.num_micro_batches = micro_batches;
  EXPECT_EQ(PrintSchedule(Generate(name, placement, options)), expected);
  EXPECT_NO_THROW(ValidateSchedule(ParseSchedule(ReadFile(file), file)));
}

TEST(SplitGenerators, Golden) {
  ExpectGolden("af_pipe_zb_p2_l2_m2.txt", "af-pipe-zb", {.num_layers = 2, .p_a = 2, .p_f = 2}, 2);
  ExpectGolden("dualpipe_p2_l2_m4.txt", "dualpipe", {.num_layers = 2, .p_a = 2, .colocated = true}, 4);
  ExpectGolden("dualpipe_v_p1_l2_m2.txt", "dualpipe-v", {.num_layers = 2, .colocated = true}, 2);
  ExpectGolden("hetermoe_l2_m2.txt", "hetermoe", {.num_layers = 2, .m = 2}, 2);
}

struct Layout {
  std::string name;
  PlacementSpec placement;
  GenerateOptions options;
};

Layout Draw(Rng* rng) {
  const auto draw = [&](int least, int most) { return least + static_cast<int>(rng->Below(most - least + 1)); };
  Layout x;
  x.name = std::vector<std::string>{"af-pipe-zb", "dualpipe", "dualpipe-v", "hetermoe"}[draw(0, 3)];
  PlacementSpec& p = x.placement;
  GenerateOptions& o = x.options;
  p.m = draw(1, 5);
  p.n = draw(1, 5);
  o.num_micro_batches = draw(1, 12);
  o.backward = draw(0, 3) > 0;
  o.transfer_ratio = draw(0, 6) * 0.25;
  if (x.name == "af-pipe-zb") {
    p.p_a = draw(1, 4);
    p.p_f = draw(1, 4);
    p.num_layers = draw(std::max(p.p_a, p.p_f), 9);
    p.head_on_attention = draw(0, 1) == 1;
    o.attention_time = 0.3 + rng->Uniform();
    o.weight_share = rng->Uniform();
  } else if (x.name == "hetermoe") {
    p.num_layers = draw(1, 9);
    p.head_on_attention = draw(0, 1) == 1;
    o.parts = draw(0, 2);
  } else {
    p.colocated = true;
    p.p_a = x.name == "dualpipe" ? 2 * draw(1, 3) : draw(1, 4);
    const int chunks = x.name == "dualpipe" ? p.p_a : 2 * p.p_a;
    p.num_layers = draw(chunks, 2 * chunks + 3);
    o.num_micro_batches = 2 * p.p_a + draw(0, 4) * (x.name == "dualpipe" ? 2 : 1);
  }
  return x;
}

void ExpectSame(const Schedule& a, const Schedule& b) {
  EXPECT_EQ(PrintSchedule(a), PrintSchedule(b));
  EXPECT_EQ(a.num_routes, b.num_routes);
  EXPECT_EQ(a.stage_group, b.stage_group);
  EXPECT_EQ(a.stage_parts, b.stage_parts);
  EXPECT_EQ(a.split_backward, b.split_backward);
  EXPECT_EQ(a.backward, b.backward);
  EXPECT_EQ(a.links, b.links);
  ASSERT_EQ(a.groups.size(), b.groups.size());
  for (size_t g = 0; g < a.groups.size(); ++g) {
    EXPECT_EQ(a.groups[g].ranks, b.groups[g].ranks);
    EXPECT_EQ(a.groups[g].compute, b.groups[g].compute);
    EXPECT_EQ(a.groups[g].comm, b.groups[g].comm);
  }
  for (int stage = 0; stage < a.num_stages(); ++stage) {
    for (int part = 0; part < a.parts(stage); ++part) EXPECT_EQ(a.group(stage, 0, part), b.group(stage, 0, part));
  }
}

TEST(SplitGenerators, EveryLayoutIsSound) {
  Rng rng(11);
  for (int i = 0; i < 600; ++i) {
    const Layout x = Draw(&rng);
    SCOPED_TRACE(testing::Message() << x.name << " p_a " << x.placement.p_a << " p_f " << x.placement.p_f << " L "
                                    << x.placement.num_layers << " M " << x.options.num_micro_batches << " parts "
                                    << x.options.parts << " backward " << x.options.backward);
    const Schedule s = Generate(x.name, x.placement, x.options);
    EXPECT_EQ(s.name, x.name);
    EXPECT_FALSE(s.sync_exchange);
    ScheduleFacts facts;
    ASSERT_NO_THROW(facts = ValidateSchedule(s));
    for (size_t g = 0; g < s.groups.size(); ++g) EXPECT_EQ(facts.peak_in_flight[g], s.groups[g].max_in_flight);
    ExpectSame(ParseSchedule(PrintSchedule(s), "text"), s);
    const std::string grid = DrawGrid(s, x.options.transfer_ratio);
    EXPECT_EQ(grid.find("stops before"), std::string::npos) << grid;
    const SplitResult r = RunSplitModel(s, {.transfer = rng.Uniform()});
    EXPECT_FALSE(r.deadlock);
    // The model does not count a head, which is an activation of its own where it is alone.
    const bool head_alone = x.placement.head_on_attention;
    for (size_t g = 0; s.backward && !head_alone && g < s.groups.size(); ++g) {
      EXPECT_EQ(r.peak[g], facts.peak_in_flight[g]);
    }
    // The same again.
    EXPECT_EQ(PrintSchedule(Generate(x.name, x.placement, x.options)), PrintSchedule(s));
  }
}

}  // namespace
}  // namespace disagmoe
