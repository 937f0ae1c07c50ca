#include "trace/trace.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "trace/timeline.h"

namespace disagmoe {
namespace {

using nlohmann::json;

const std::vector<WorkerName> kWorkers = {{0, "A0.0"}, {1, "F0.0"}};

// One step of 1000 ns on two workers, at an origin that is no round number.
//   A0.0:  forward [0,300)  send [300,400)  bubble [300,600)  exposed [600,700)  backward [700,1000)
//   F0.0:  bubble [0,400)   receive [250,400)  forward [400,500)  backward [500,900)  optimizer [900,1000)
constexpr int64_t kOrigin = 1'000'000'123;
std::vector<TraceEvent> Step() {
  auto at = [](int rank, Stream stream, const char* name, int64_t begin, int64_t end, int64_t bytes = 0, int peer = -1) {
    return TraceEvent{rank, stream, name, kOrigin + begin, kOrigin + end, 4, bytes, peer};
  };
  return {at(0, Stream::kStep, "step", 0, 1000),        at(0, Stream::kForward, "F0.0", 0, 300),
          at(0, Stream::kSend, ">F0.0", 300, 400, 64, 1), at(0, Stream::kWait, "bubble", 300, 600),
          at(0, Stream::kWait, "exposed", 600, 700),    at(0, Stream::kBackward, "B0.0", 700, 1000),
          at(1, Stream::kStep, "step", 0, 1000),        at(1, Stream::kWait, "bubble", 0, 400),
          at(1, Stream::kReceive, "<F0.0", 250, 400, 64, 0), at(1, Stream::kForward, "F1.0", 400, 500),
          at(1, Stream::kBackward, "B1.0", 500, 900),   at(1, Stream::kStep, "optimizer", 900, 1000)};
}

struct Folder {
  Folder() : path(::testing::TempDir() + "trace_test_" + std::to_string(getpid())) {}
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path;
};

json Find(const json& trace, const std::string& phase, const std::string& name, int skip = 0) {
  for (const json& e : trace["traceEvents"])
    if (e["ph"] == phase && e["name"] == name && skip-- == 0) return e;
  return nullptr;
}

std::string ThreadName(const json& trace, const json& event) {
  for (const json& e : trace["traceEvents"])
    if (e["name"] == "thread_name" && e["pid"] == event["pid"] && e["tid"] == event["tid"]) return e["args"]["name"];
  return "";
}

TEST(Perfetto, ProcessesTracksAndTimes) {
  const std::string text = PerfettoJson(Step(), kWorkers);
  const json trace = json::parse(text);
  std::map<int, std::string> processes;
  for (const json& e : trace["traceEvents"])
    if (e["name"] == "process_name") processes[e["pid"]] = e["args"]["name"];
  EXPECT_EQ(processes, (std::map<int, std::string>{{1, "A0.0"}, {2, "F0.0"}}));

  const json backward = Find(trace, "X", "B0.0");
  EXPECT_EQ(ThreadName(trace, backward), "backward");
  EXPECT_EQ(backward["args"]["step"], 4);
  // 700 ns after the first event, in microseconds, with three decimals.
  EXPECT_NE(text.find("\"name\":\"B0.0\",\"cat\":\"backward\",\"pid\":1,\"tid\":2001,\"ts\":0.700,\"dur\":0.300"),
            std::string::npos);
  EXPECT_EQ(Find(trace, "X", ">F0.0")["args"], (json{{"step", 4}, {"bytes", 64}, {"peer", "F0.0"}}));
  EXPECT_EQ(ThreadName(trace, Find(trace, "X", "<F0.0")), "receive");
}

TEST(Perfetto, TimesAreExactToTheNanosecond) {
  // 2^53 ns and more would lose digits in a double of microseconds.
  const std::vector<TraceEvent> events = {{0, Stream::kForward, "F0.0", 1, 2, 1, 0, -1},
                                          {0, Stream::kForward, "F0.1", 12'345'678'901'234'568, 12'345'678'901'234'569, 1, 0, -1}};
  EXPECT_NE(PerfettoJson(events, {}).find("\"ts\":12345678901234.567,\"dur\":0.001"), std::string::npos);
}

TEST(Perfetto, ArrowFromSendToReceive) {
  const json trace = json::parse(PerfettoJson(Step(), kWorkers));
  const json start = Find(trace, "s", "transfer"), finish = Find(trace, "f", "transfer");
  EXPECT_EQ(start["id"], finish["id"]);
  EXPECT_EQ(start["cat"], finish["cat"]);
  EXPECT_EQ(finish["bp"], "e");
  // Each end lies within its slice: [300, 400) of the send, [250, 400) of the receive.
  EXPECT_EQ(ThreadName(trace, start), "send");
  EXPECT_DOUBLE_EQ(start["ts"].get<double>(), 0.300);
  EXPECT_EQ(ThreadName(trace, finish), "receive");
  EXPECT_DOUBLE_EQ(finish["ts"].get<double>(), 0.399);
  EXPECT_EQ(Find(trace, "s", "transfer", 1), nullptr);
}

TEST(Perfetto, ArrowsNeedTheSameStepNameAndRanks) {
  auto arrows = [](const TraceEvent& receive) {
    const std::vector<TraceEvent> events = {{0, Stream::kSend, ">F0.0", 0, 5, 1, 8, 1}, receive};
    const json trace = json::parse(PerfettoJson(events, kWorkers));
    return !Find(trace, "s", "transfer").is_null() + !Find(trace, "f", "transfer").is_null();
  };
  EXPECT_EQ(arrows({1, Stream::kReceive, "<F0.0", 3, 9, 1, 8, 0}), 2);
  EXPECT_EQ(arrows({1, Stream::kReceive, "F0.0", 3, 9, 1, 8, 0}), 2);   // the same name without the mark
  EXPECT_EQ(arrows({1, Stream::kReceive, "<F0.0", 3, 9, 2, 8, 0}), 0);  // another step
  EXPECT_EQ(arrows({1, Stream::kReceive, "<B0.0", 3, 9, 1, 8, 0}), 0);  // another message
  EXPECT_EQ(arrows({1, Stream::kReceive, "<F0.0", 3, 9, 1, 8, 2}), 0);  // another sender
  EXPECT_EQ(arrows({2, Stream::kReceive, "<F0.0", 3, 9, 1, 8, 0}), 0);  // another receiver
}

TEST(Perfetto, OverlappingEventsGetLanesAndNestedOnesDoNot) {
  const std::vector<TraceEvent> events = {
      {0, Stream::kSend, "a", 0, 10, 1, 1, 1},  {0, Stream::kSend, "b", 5, 15, 1, 1, 1},
      {0, Stream::kSend, "c", 10, 20, 1, 1, 1}, {0, Stream::kStep, "step", 0, 20, 1, 0, -1},
      {0, Stream::kStep, "optimizer", 15, 20, 1, 0, -1}};
  const json trace = json::parse(PerfettoJson(events, kWorkers));
  auto track = [&](const char* name) { return ThreadName(trace, Find(trace, "X", name)); };
  EXPECT_EQ(track("a"), "send");
  EXPECT_EQ(track("b"), "send 2");
  EXPECT_EQ(track("c"), "send");
  EXPECT_EQ(track("step"), "step");
  EXPECT_EQ(track("optimizer"), "step");
  // Being sent: 1 byte from 0, 2 from 5, still 2 at 10 (one ends, one begins), 1 from 15, 0 from 20.
  std::vector<int> bytes;
  for (const json& e : trace["traceEvents"])
    if (e["ph"] == "C") bytes.push_back(e["args"]["bytes"]);
  EXPECT_EQ(bytes, (std::vector<int>{1, 2, 2, 1, 0}));
}

// The counter of a worker stands in its process, and on the clock of the events, whichever comes first.
TEST(Perfetto, CountersBesideTheEvents) {
  const std::vector<TraceCounter> counters = {
      {1, kOrigin, "memory", {{"static", 5'000'000'000}, {"messages", 0}}},
      {1, kOrigin + 1'400, "memory", {{"static", 5'000'000'000}, {"messages", 64}}},
      {0, kOrigin - 100, "memory", {{"static", 7}}}};
  const std::string text = PerfettoJson(Step(), kWorkers, counters);
  const json trace = json::parse(text);
  const json first = Find(trace, "C", "memory"), second = Find(trace, "C", "memory", 1), other = Find(trace, "C", "memory", 2);
  EXPECT_EQ(first["pid"], Find(trace, "X", "F1.0")["pid"]);
  EXPECT_EQ(second["pid"], first["pid"]);
  EXPECT_EQ(other["pid"], Find(trace, "X", "F0.0")["pid"]);
  EXPECT_EQ(first["args"], (json{{"static", 5'000'000'000}, {"messages", 0}}));
  EXPECT_EQ(second["args"], (json{{"static", 5'000'000'000}, {"messages", 64}}));
  EXPECT_EQ(other["args"], (json{{"static", 7}}));
  // The last of the three is first; A0.0's forward and F0.0's first count come 100 ns after it.
  EXPECT_NE(text.find("\"name\":\"memory\",\"pid\":1,\"tid\":1,\"ts\":0.000"), std::string::npos);
  EXPECT_NE(text.find("\"name\":\"memory\",\"pid\":2,\"tid\":1,\"ts\":1.500"), std::string::npos);
  EXPECT_EQ(first["ts"], Find(trace, "X", "F0.0")["ts"]);
  EXPECT_EQ(Find(trace, "C", "memory", 3), nullptr);
  // In the order given: the parts are stacked so.
  EXPECT_NE(text.find("{\"static\":5000000000,\"messages\":64}"), std::string::npos);
  EXPECT_EQ(Find(json::parse(PerfettoJson({}, {}, {{3, 0, "memory", {}}})), "M", "process_name")["args"]["name"], "rank 3");
}

TEST(Perfetto, OddNamesAndNoEvents) {
  const std::vector<TraceEvent> events = {{3, Stream::kForward, "a\"\\\n\xff", 0, 1, 1, 0, -1}};
  const json trace = json::parse(PerfettoJson(events, {}));
  EXPECT_EQ(Find(trace, "M", "process_name")["args"]["name"], "rank 3");
  EXPECT_TRUE(json::parse(PerfettoJson({}, {}))["traceEvents"].empty());
}

TEST(Times, AddUpToTheStep) {
  const WorkerTimes attention = TimesOf(Step(), 0, 4), ffn = TimesOf(Step(), 1, 4);
  EXPECT_EQ(attention.step_ns, 1000);
  EXPECT_EQ(attention.bubble_ns, 300);
  EXPECT_EQ(attention.exposed_ns, 100);
  EXPECT_EQ(attention.compute_ns, 600);
  EXPECT_EQ(ffn.bubble_ns, 400);
  EXPECT_EQ(ffn.exposed_ns, 0);
  EXPECT_EQ(ffn.compute_ns, 600);
  EXPECT_EQ(TimesOf(Step(), 0, 5).step_ns, 0);
}

TEST(Files, WriteReadMerge) {
  const Folder folder;
  const std::vector<TraceEvent> events = Step();
  const std::vector<TraceEvent> parts[] = {{events.begin(), events.begin() + 6}, {events.begin() + 6, events.end()}};
  // In several orders: a folder lists its files in any.
  WriteEvents(EventsPath(folder.path, 1), parts[1]);
  WriteEvents(EventsPath(folder.path, 0), parts[0]);
  for (int rank = 2; rank < 20; ++rank) WriteEvents(EventsPath(folder.path, rank), {});
  WriteEvents(EventsPath(folder.path, 1), parts[1]);
  EXPECT_TRUE(std::filesystem::exists(folder.path + "/trace/rank-00000.jsonl"));
  const std::vector<TraceEvent> read = ReadRunEvents(folder.path);
  ASSERT_EQ(read.size(), events.size());
  for (size_t i = 0; i < read.size(); ++i) {
    EXPECT_EQ(read[i].rank, events[i].rank);
    EXPECT_EQ(read[i].stream, events[i].stream);
    EXPECT_EQ(read[i].name, events[i].name);
    EXPECT_EQ(read[i].begin_ns, events[i].begin_ns);
    EXPECT_EQ(read[i].end_ns, events[i].end_ns);
    EXPECT_EQ(read[i].step, events[i].step);
    EXPECT_EQ(read[i].bytes, events[i].bytes);
    EXPECT_EQ(read[i].peer, events[i].peer);
  }
  EXPECT_EQ(TracedSteps(read), std::vector<int64_t>{4});
  EXPECT_EQ(MergeTrace(folder.path, kWorkers), folder.path + "/trace.json");
  std::ifstream merged(folder.path + "/trace.json");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(merged), {}), PerfettoJson(events, kWorkers));
}

TEST(Files, MistakesNameTheLine) {
  const Folder folder;
  EXPECT_THROW(ReadRunEvents(folder.path), Error);
  EXPECT_EQ(MergeTrace(folder.path, kWorkers), "");
  EXPECT_THROW(WriteEvents("/proc/none/rank-00000.jsonl", {}), Error);
  const std::string path = EventsPath(folder.path, 0);
  WriteEvents(path, {Step()[0]});
  for (const char* line : {"{\"rank\":0", "[]", "{\"rank\":0,\"stream\":\"sideways\",\"name\":\"\",\"begin_ns\":0,"
                                                "\"end_ns\":0,\"step\":0}"}) {
    WriteEvents(path, {Step()[0]});
    std::ofstream(path, std::ios::app) << line << "\n";
    try {
      ReadEvents(path);
      FAIL() << line;
    } catch (const Error& error) {
      EXPECT_EQ(error.parts().where, path + ":2");
    }
  }
}

TEST(Draw, EachColumnShowsWhatTakesMostOfIt) {
  // Ten columns of 100 ns. A0.0: 3 forward, 3 bubble, 1 exposed, 3 backward. F0.0: 4 bubble, 1 forward, 4 backward, 1 other.
  EXPECT_EQ(DrawTimeline(Step(), kWorkers, 4, 10),
            "step 4: 1.00 us, 0.10 us a column\n"
            "A0.0 |FFF...!BBB| compute 60 %, exposed 10 %, bubble 30 %\n"
            "F0.0 |....FBBBBo| compute 60 %, exposed 0 %, bubble 40 %\n"
            "F forward  B backward  o optimizer, sums  ! exposed communication  . bubble\n");
  // Three columns of 333 ns. A0.0: forward 300 of 333; bubble 267; backward 300. F0.0: bubble 333; the second column
  // [333, 666) has bubble 67, forward 100, backward 166; the third backward 234, other 100.
  EXPECT_NE(DrawTimeline(Step(), kWorkers, 4, 3).find("A0.0 |F.B|"), std::string::npos);
  EXPECT_NE(DrawTimeline(Step(), kWorkers, 4, 3).find("F0.0 |.BB|"), std::string::npos);
}

TEST(Draw, UntracedStepIsRefused) {
  try {
    DrawTimeline(Step(), kWorkers, 9, 10);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "the step was not traced (timeline): got 9, expected one of 4");
  }
  EXPECT_THROW(TimelineSvg({}, kWorkers, 1), Error);
}

TEST(Draw, Durations) {
  EXPECT_EQ(Duration(0), "0.00 us");
  EXPECT_EQ(Duration(12'340), "12.3 us");
  EXPECT_EQ(Duration(999'600), "1.00 ms");
  EXPECT_EQ(Duration(123'456'789), "123 ms");
  EXPECT_EQ(Duration(61'000'000'000), "61.0 s");
  EXPECT_EQ(Percent(1, 8), "13 %");
  EXPECT_EQ(Percent(0, 0), "0 %");
}

// The attribute of the rectangle whose tooltip begins so.
double Attribute(const std::string& svg, const std::string& title, const std::string& name) {
  const size_t end = svg.find("<title>" + title);
  const size_t begin = svg.rfind("<rect", end);
  const size_t at = svg.find(" " + name + "=\"", begin);
  return end == std::string::npos ? -1 : std::stod(svg.substr(at + name.size() + 3));
}

TEST(Svg, BarsLieWhereTheEventsDo) {
  const std::string svg = TimelineSvg(Step(), kWorkers, 4);
  // The time axis spans x from 80 to 984: B0.0 begins at 0.7 of it and takes 0.3.
  EXPECT_NEAR(Attribute(svg, "B0.0", "x"), 80 + 0.7 * 904, 0.01);
  EXPECT_NEAR(Attribute(svg, "B0.0", "width"), 0.3 * 904, 0.01);
  EXPECT_NEAR(Attribute(svg, "exposed", "x"), 80 + 0.6 * 904, 0.01);
  EXPECT_GT(Attribute(svg, "F1.0", "y"), Attribute(svg, "F0.0", "y"));
  EXPECT_EQ(Attribute(svg, "step", "x"), -1);
  EXPECT_EQ(svg.find("http", svg.find("2000/svg")), std::string::npos) << "nothing is loaded from elsewhere";
  for (const char* word : {"exposed communication", "bubble (idle)", "A0.0", "0.2 µs", "prefers-color-scheme:dark"})
    EXPECT_NE(svg.find(word), std::string::npos) << word;
}

TEST(Svg, NamesAreEscaped) {
  const std::string svg = TimelineSvg(Step(), {{0, "<A&\">"}}, 4);
  EXPECT_NE(svg.find("&lt;A&amp;&quot;&gt;"), std::string::npos);
}

}  // namespace
}  // namespace disagmoe
