// Text form: golden files derived by hand, round trips, errors; JSON; the grid.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "schedule/order.h"
#include "schedule/same_for_tests.h"
#include "schedule/schedule.h"

namespace disagmoe {
namespace {

using testing::HasSubstr;

std::string ReadFile(const std::string& name) {
  std::ifstream in(std::string(DISAGMOE_TESTDATA) + "/" + name);
  EXPECT_TRUE(in.good()) << name;
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

std::string WithoutComments(const std::string& text) {
  std::istringstream in(text);
  std::string out;
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with("#")) out += line + "\n";
  }
  return out;
}

GenerateOptions Options(int micro_batches, int round = 0) {
  GenerateOptions options;
  options.num_micro_batches = micro_batches;
  options.round = round;
  return options;
}

void ExpectGolden(const std::string& file, const Schedule& s) {
  EXPECT_EQ(PrintSchedule(s), WithoutComments(ReadFile(file)));
  EXPECT_NO_THROW(ValidateSchedule(ParseSchedule(ReadFile(file), file)));
}

TEST(Text, Golden) {
  ExpectGolden("af_pipe_p1_l1_m2.txt", Generate("af-pipe", {.num_layers = 1, .m = 2, .n = 3}, Options(2)));
  ExpectGolden("af_pipe_p2_l3_m4.txt", Generate("af-pipe", {.num_layers = 3, .p_a = 2, .p_f = 2}, Options(4)));
  GenerateOptions forward = Options(2);
  forward.backward = false;
  ExpectGolden("af_pipe_p1_l2_m2_forward.txt", Generate("af-pipe", {.num_layers = 2, .head_on_attention = true}, forward));
  ExpectGolden("megatron_p1_l1_m2.txt", Generate("megatron-1f1b", {.num_layers = 1, .m = 2, .colocated = true}, Options(2)));
  ExpectGolden("megatron_p2_l4_m4.txt",
               Generate("megatron-1f1b", {.num_layers = 4, .p_a = 2, .colocated = true}, Options(4)));
}

TEST(Text, GoldenOfTheColocatedBaselines) {
  const auto options = [](int micro_batches, int parts, bool backward = true) {
    GenerateOptions out = Options(micro_batches);
    out.parts = parts;
    out.backward = backward;
    return out;
  };
  const auto groups = [](int p, int m, int layers) {
    return PlacementSpec{.num_layers = layers, .p_a = p, .m = m, .colocated = true};
  };
  ExpectGolden("megatron_overlap_p1_l1_m2.txt", Generate("megatron-overlap", groups(1, 1, 1), options(2, 0)));
  ExpectGolden("megatron_overlap_p2_l2_m2.txt", Generate("megatron-overlap", groups(2, 1, 2), options(2, 0)));
  ExpectGolden("tutel_p1_l1_m1.txt", Generate("tutel", groups(1, 1, 1), options(1, 2)));
  ExpectGolden("comet_p1_l2_m1_forward.txt", Generate("comet", groups(1, 1, 2), options(1, 3, false)));
  ExpectGolden("fastermoe_p2_l2_m1.txt", Generate("fastermoe", groups(2, 4, 2), options(1, 2)));
  ExpectGolden("lancet_p1_l1_m1.txt", Generate("lancet", groups(1, 1, 1), options(1, 2)));
}

TEST(Text, RoundTrip) {
  Schedule s = GenerateAfPipe({.num_layers = 7, .p_a = 3, .p_f = 2, .m = 2, .n = 5, .head_on_attention = true}, Options(6));
  EXPECT_TRUE(Same(ParseSchedule(PrintSchedule(s), "text"), s));
  s.groups[1].ranks = {7, 8, 9, 3, 30};
  s.groups[2].ranks = {};
  s.groups[0].compute.clear();
  s.links[0].slots = 17;
  s.backward = false;
  EXPECT_TRUE(Same(ParseSchedule(PrintSchedule(s), "text"), s));
}

// Each of the later fields is printed, parsed and compared.
TEST(Text, RoundTripOfPartsRoutesAndHolds) {
  const PlacementSpec placement{.num_layers = 4, .p_a = 2, .colocated = true, .virtual_stages = 2};
  const Schedule plain = Generate("megatron-1f1b", placement, Options(4));
  const std::vector<std::function<void(Schedule*)>> changes{
      [](Schedule* s) { s->split_backward = true; },
      [](Schedule* s) { s->sync_exchange = false; },
      [](Schedule* s) {
        s->num_routes = 2;
        s->stage_group.resize(18);
      },
      [](Schedule* s) { s->stage_parts = {1, 2, 1, 2, 1, 2, 1, 2, 1}; },
      [](Schedule* s) {
        s->stage_parts = {1, 1, 1, 2, 1, 1, 1, 1, 1};
        for (int g : s->stage_group) s->part_group.insert(s->part_group.end(), {g, g});
        s->part_group[3 * 2 + 1] = 0;
      },
      [](Schedule* s) { s->groups[0].compute[1].part = 1; },
  };
  for (const auto& change : changes) {
    Schedule s = plain;
    change(&s);
    EXPECT_FALSE(Same(s, plain));
    EXPECT_TRUE(Same(ParseSchedule(PrintSchedule(s), "text"), s)) << PrintSchedule(s);
  }
}

TEST(Text, PrintsOperations) {
  EXPECT_EQ(PrintOp({OpKind::kForward, 3, 0}), "F3.0");
  EXPECT_EQ(PrintOp({OpKind::kBackward, 12, 10}), "B12.10");
  EXPECT_EQ(PrintOp({OpKind::kWeight, 1, 2, 3}), "W1.2/3");
  EXPECT_EQ(PrintOp({OpKind::kSendForward, 3, 0}), ">F3.0");
  EXPECT_EQ(PrintOp({OpKind::kRecvForward, 3, 0}), "<F3.0");
  EXPECT_EQ(PrintOp({OpKind::kSendBackward, 3, 0}), ">B3.0");
  EXPECT_EQ(PrintOp({OpKind::kRecvBackward, 3, 0}), "<B3.0");
}

// Replaces `from` and expects an error that has all of `parts`.
void ExpectParseError(const std::string& from, const std::string& to, const std::vector<std::string>& parts) {
  std::string text = WithoutComments(ReadFile("af_pipe_p1_l1_m2.txt"));
  const size_t at = text.find(from);
  ASSERT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  try {
    ParseSchedule(text, "s.txt");
    ADD_FAILURE() << "no error for " << to;
  } catch (const Error& error) {
    for (const std::string& part : parts) EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

TEST(Text, ErrorsNameTheLine) {
  ExpectParseError("disagmoe-schedule 1", "disagmoe-schedule 2", {"s.txt:1", "got \"2\"", "expected \"1\""});
  ExpectParseError("layers 1", "layers one", {"s.txt:3", "\"one\"", "a number"});
  ExpectParseError("layers 1", "layer 1", {"s.txt:3", "\"layer\"", "\"layers\""});
  ExpectParseError("layers 1", "layers 1 2", {"s.txt:3", "\"2\"", "end of the line"});
  ExpectParseError("layers 1", "layers 99999999999", {"s.txt:3", "a number"});
  ExpectParseError("backward yes", "backward maybe", {"s.txt:7", "yes, no or split"});
  ExpectParseError("groups A0 F0", "groups A0 A0", {"s.txt:9", "\"A0\" twice"});
  ExpectParseError("stages A0 F0 F0", "stages A0 F0 F7", {"s.txt:10", "\"F7\"", "a group"});
  ExpectParseError("forward slots 2", "sideways slots 2", {"s.txt:11", "\"sideways\"", "forward or backward"});
  ExpectParseError("ranks 0-1", "ranks 1-0", {"s.txt:15", "\"1-0\"", "ranks such as"});
  ExpectParseError("A0 compute F0.0", "A0 compute F0", {"s.txt:16", "\"F0\"", "an operation such as"});
  ExpectParseError("A0 compute F0.0", "A0 compute >F0.0", {"s.txt:16", "\">F0.0\"", "F, B or W"});
  ExpectParseError("A0 comm >F0.0", "A0 comm F0.0", {"s.txt:17", "\"F0.0\"", "a send (>) or receive (<)"});
  ExpectParseError("A0 comm", "A0 com", {"s.txt:17", "\"com\"", "\"comm\""});
  const std::string text = WithoutComments(ReadFile("af_pipe_p1_l1_m2.txt"));
  ExpectParseError(text.substr(text.find("group F0")), "", {"s.txt:18", "end of the file", "group F0"});
  ExpectParseError("disagmoe", "disagmoe\n\n", {"s.txt:1"});
}

TEST(Text, Streams) {
  const Schedule s = GenerateAfPipe({.num_layers = 1}, Options(2));
  EXPECT_EQ(StreamOf(s.groups[1], OpKind::kBackward),
            (std::vector<Op>{{OpKind::kBackward, 2, 0}, {OpKind::kBackward, 1, 0}, {OpKind::kBackward, 2, 1}, {OpKind::kBackward, 1, 1}}));
  EXPECT_EQ(StreamOf(s.groups[0], OpKind::kRecvBackward),
            (std::vector<Op>{{OpKind::kRecvBackward, 0, 0}, {OpKind::kRecvBackward, 0, 1}}));
}

TEST(Text, Json) {
  const auto json = nlohmann::json::parse(ScheduleJson(GenerateAfPipe({.num_layers = 1, .m = 2, .n = 3}, Options(2))));
  EXPECT_EQ(json["name"], "af-pipe");
  EXPECT_EQ(json["stages"], (std::vector<std::string>{"A0", "F0", "F0"}));
  EXPECT_EQ(json["groups"][0]["compute"], (std::vector<std::string>{"F0.0", "F0.1", "B0.0", "B0.1"}));
  EXPECT_EQ(json["groups"][1]["ranks"], (std::vector<int>{2, 3, 4}));
  EXPECT_EQ(json["links"][1]["backward"], true);
}

// By hand: A0 computes a and b; F0 takes each when it is done, forward 1 and backward 2; step (2 + 1) * 3 = 9.
TEST(Grid, ByHand) {
  EXPECT_EQ(DrawGrid(GenerateAfPipe({.num_layers = 1}, Options(2))),
            "af-pipe: 1 layers, 2 micro-batches, rounds of 2; step 9 units\n"
            "a = forward of micro-batch 0, A = its backward, . = idle\n"
            "time 0\n"
            "A0   ab..AA.BB\n"
            "F0   .aAAbBB..\n");
}

// Transfers of 1: F0's first forward starts at 2; A0's first backward at 2 + 3 + 1 = 6.
TEST(Grid, TransferTimeAndColumns) {
  EXPECT_THAT(DrawGrid(GenerateAfPipe({.num_layers = 1}, Options(1)), 1, 8),
              HasSubstr("time 0\nA0   a.....AA\nF0   ..aAA...\n"));
  const std::string cut = DrawGrid(GenerateAfPipe({.num_layers = 4, .p_a = 2, .p_f = 2}, Options(8)), 0, 12);
  EXPECT_THAT(cut, HasSubstr("time 0         10\nA0   abcdabcdefg.\n"));
  EXPECT_THAT(cut, HasSubstr("(12 of 57 columns)"));
}

}  // namespace
}  // namespace disagmoe
