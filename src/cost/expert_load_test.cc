// Recorded loads of experts: read, checked, and each layer's own at their places.
#include "cost/expert_load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "cost/jobs_for_tests.h"
#include "cost/traffic.h"

namespace disagmoe {
namespace {

using testing::HasSubstr;
using Loads = std::vector<std::vector<double>>;

class ExpertLoads : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "loads-XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  Loads Read(const std::string& text) const {
    std::ofstream(folder_ / "loads.json") << text;
    return ReadExpertLoads((folder_ / "loads.json").string());
  }
  std::string ReadError(const std::string& text) const {
    try {
      Read(text);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  }
  std::filesystem::path folder_;
};

TEST_F(ExpertLoads, AreReadAsTheyStand) {
  EXPECT_EQ(Read("[3, 1, 2]"), (Loads{{3, 1, 2}}));
  EXPECT_EQ(Read("[[0, 0, 0], [3, 1, 2.5]]\n"), (Loads{{0, 0, 0}, {3, 1, 2.5}}));
  EXPECT_THAT(ReadError("[[1, 2], [3]]"), HasSubstr("as many loads in each layer"));
  EXPECT_THAT(ReadError("[1, -1]"), HasSubstr("none below zero"));
  EXPECT_THAT(ReadError("[]"), HasSubstr("as many loads in each layer"));
  EXPECT_THAT(ReadError("[[0, 0], [0, 0]]"), HasSubstr("zeros alone"));
  EXPECT_THAT(ReadError("[1e308, 1e308]"), HasSubstr("loads whose sum is a number"));
  EXPECT_THAT(ReadError("[1, \"two\"]"), HasSubstr("a JSON array of numbers"));
  EXPECT_THAT(ReadError("{"), HasSubstr("a JSON array of numbers"));
  EXPECT_THROW(ReadExpertLoads("nowhere.json"), Error);
}

// Two of 16 experts a token: probabilities are twice the shares, at their own experts, whatever the seed; an expert
// that would exceed 1 has 1, and the others share the rest.
TEST(ExpertLoadsByLayer, StayAtTheirExperts) {
  Job job = SmallJob("af-pipe", 1, 4, 4);
  job.expert_loads.assign(4, std::vector<double>(16, 0));
  job.expert_loads[1] = {1, 0, 0, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 4};
  job.expert_loads[2] = {0, 1, 1, 6, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  for (const uint64_t seed : {1, 2}) {
    job.seed = seed;
    const Routing by_rank = RankRouting(job);
    const Routing one = RoutingOf(by_rank, job, 1), two = RoutingOf(by_rank, job, 2);
    for (int e = 0; e < 16; ++e) {
      EXPECT_DOUBLE_EQ(one.probability[e], 2 * job.expert_loads[1][e] / 16) << e;
      EXPECT_DOUBLE_EQ(two.probability[e], e == 3 ? 1 : job.expert_loads[2][e] / 4) << e;
      std::vector<char> set(16, 0);
      set[e] = 1;
      EXPECT_NEAR(VisitProbability(one, set), one.probability[e], 1e-9) << e;
      EXPECT_NEAR(VisitProbability(two, set), two.probability[e], 1e-9) << e;
    }
  }
  // The hottest are shadowed, ties by number.
  job.shadow_experts = 2;
  const Routing by_rank = RankRouting(job);
  for (int e = 0; e < 16; ++e) {
    EXPECT_EQ(RoutingOf(by_rank, job, 1).shadowed[e], e == 4 || e == 14) << e;
    EXPECT_EQ(RoutingOf(by_rank, job, 2).shadowed[e], e == 3 || e == 1) << e;
  }
}

// All tokens of layer 1 go to the last worker's experts, those of layer 2 to the first one's: they have the same work
// there, and the other no more than a launch.
TEST(ExpertLoadsByLayer, CostWhereTheyAre) {
  Job job = SmallJob("af-pipe", 1, 4, 4);
  job.overlap_slowdown = false;
  job.expert_loads.assign(4, std::vector<double>(16, 1));
  for (int e = 0; e < 16; ++e) {
    job.expert_loads[1][e] = e >= 12;
    job.expert_loads[2][e] = e < 4;
  }
  const Costed c(job);
  const int first = c.ClassesOf(1).first;
  const auto ns = [&](int layer, int worker) { return c.costs.ComputeNs({kF, 2 * layer + 1, 0}, first + worker); };
  EXPECT_EQ(ns(1, 3), ns(2, 0));
  EXPECT_EQ(ns(1, 0), 5000);
  EXPECT_EQ(ns(2, 3), 5000);
  EXPECT_EQ(ns(0, 0), ns(0, 3));
  EXPECT_GT(ns(1, 3), ns(0, 3));
}

TEST(ExpertLoadsByLayer, ThatCannotBe) {
  Job good = SmallJob("af-pipe", 1, 4, 4);
  good.model = SmallModel(true);  // layer 0 is dense
  good.expert_loads.assign(4, std::vector<double>(16, 1));
  const auto error = [&](auto change) -> std::string {
    Job job = good;
    change(&job.expert_loads);
    try {
      CheckJob(job);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(error([](Loads* l) { (*l)[0].assign(16, 0); }), "");
  EXPECT_EQ(error([](Loads* l) { l->resize(1); }), "");
  EXPECT_THAT(error([](Loads* l) { l->resize(3); }), HasSubstr("got 3 rows, expected 4, one a layer, or one for all"));
  EXPECT_THAT(error([](Loads* l) { (*l)[2].assign(16, 0); }),
              HasSubstr("(expert loads, layer 2): got 0, expected at least 2"));
  EXPECT_THAT(error([](Loads* l) { (*l)[3].resize(15); }), HasSubstr("(expert loads, layer 3): got 15, expected 16"));
  EXPECT_THAT(error([](Loads* l) { (*l)[3][7] = -1; }), HasSubstr("expert loads, layer 3"));
}

}  // namespace
}  // namespace disagmoe
