// The text form:
//
//   disagmoe-schedule 1
//   name af-pipe
//   layers 1
//   micro-batches 1
//   round 1
//   slope 2
//   backward yes                    yes, no, or split: W operations
//   exchange async                  async, or sync: all-to-alls hold the computation
//   groups A0 F0
//   stages A0 F0 F0                 the group of each stage; a line more for each further route
//   parts 1 2 1                     where stages are cut: the parts of each
//   part-groups A0 F0 A0 F0         where parts of one stage live in different groups: of each stage in order, each part
//   link A0 F0 forward slots 2      one line a link
//   group A0 ranks 0-3 in-flight 1  one line a group, then its two lists
//   A0 compute F0.0 B0.0
//   A0 comm >F0.0 <B0.0
//
// Operations: F3.0 and B3.0 compute stage 3 of micro-batch 0; >F3.0 and <F3.0 send and receive activations over
// boundary 3, >B3.0 and <B3.0 gradients; W3.0 computes weight gradients; F3.0/1 is part 1 of a cut stage, >F3.0/1 of a
// boundary beside one. "#" starts a comment. Keys come in this order.
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "schedule/schedule.h"

namespace disagmoe {
namespace {

std::string Quote(std::string_view text) { return std::string("\"").append(text).append("\""); }

std::string PrintRanks(const std::vector<int>& ranks) {
  std::string out;
  for (size_t i = 0; i < ranks.size();) {
    size_t j = i;
    while (j + 1 < ranks.size() && ranks[j + 1] == ranks[j] + 1) ++j;
    if (i > 0) out += ",";
    out += std::to_string(ranks[i]);
    if (j > i) out.append("-").append(std::to_string(ranks[j]));
    i = j + 1;
  }
  return out.empty() ? "none" : out;
}

void PrintList(const std::string& group, const char* which, const std::vector<Op>& list, std::string* out) {
  *out += group + " " + which;
  for (const Op& op : list) out->append(" ").append(PrintOp(op));
  *out += "\n";
}

class Parser {
 public:
  Parser(const std::string& text, const std::string& where) : in_(text), where_(where) {}
  Schedule Run();

 private:
  bool NextLine();
  [[noreturn]] void Fail(const std::string& got, const std::string& expected) const;
  const std::string& Word(size_t i, const std::string& expected) const;
  void Expect(size_t i, const std::string& word) const;
  void ExpectEnd(size_t i) const;
  int Number(std::string_view word, const std::string& expected) const;
  int Value(const std::string& key);
  int Group(size_t i) const;
  std::vector<int> Ranks(const std::string& word) const;
  Op ParseOp(const std::string& word) const;
  std::vector<Op> List(const std::string& group, const char* which);
  void ParsePartGroups(Schedule* s) const;

  std::istringstream in_;
  std::string where_;
  int line_ = 0;
  std::vector<std::string> words_;
  std::map<std::string, int> group_index_;
};

// The next line that is not empty, in words.
bool Parser::NextLine() {
  words_.clear();
  std::string text;
  while (words_.empty()) {
    ++line_;
    if (!std::getline(in_, text)) return false;
    std::istringstream words(text.substr(0, text.find('#')));
    for (std::string word; words >> word;) words_.push_back(word);
  }
  return true;
}

void Parser::Fail(const std::string& got, const std::string& expected) const {
  throw Error({"cannot read the schedule", where_ + ":" + std::to_string(line_), got, expected, ""});
}

const std::string& Parser::Word(size_t i, const std::string& expected) const {
  if (i >= words_.size()) Fail(words_.empty() ? "the end of the file" : "the end of the line", expected);
  return words_[i];
}

void Parser::Expect(size_t i, const std::string& word) const {
  if (Word(i, Quote(word)) != word) Fail(Quote(words_[i]), Quote(word));
}

void Parser::ExpectEnd(size_t i) const {
  if (i < words_.size()) Fail(Quote(words_[i]), "the end of the line");
}

int Parser::Number(std::string_view word, const std::string& expected) const {
  int value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size()) Fail(Quote(word), expected);
  return value;
}

int Parser::Value(const std::string& key) {
  NextLine();
  Expect(0, key);
  ExpectEnd(2);
  return Number(Word(1, "a number"), "a number");
}

int Parser::Group(size_t i) const {
  const auto it = group_index_.find(Word(i, "a group"));
  if (it == group_index_.end()) Fail(Quote(words_[i]), "a group with a \"group\" line");
  return it->second;
}

std::vector<int> Parser::Ranks(const std::string& word) const {
  const std::string expected = "ranks such as 0-3,8";
  std::vector<int> ranks;
  if (word == "none") return ranks;
  std::istringstream parts(word);
  for (std::string part; std::getline(parts, part, ',');) {
    const size_t dash = part.find('-');
    const int first = Number(std::string_view(part).substr(0, dash), expected);
    const int last = dash == std::string::npos ? first : Number(std::string_view(part).substr(dash + 1), expected);
    if (first < 0 || last < first || last - first > 10'000'000) Fail(Quote(part), expected);
    for (int rank = first; rank <= last; ++rank) ranks.push_back(rank);
  }
  return ranks;
}

Op Parser::ParseOp(const std::string& word) const {
  const std::string expected = "an operation such as F3.0, B3.0, >F3.0, <B3.0";
  std::string_view rest = word;
  const bool send = rest.starts_with('>');
  const bool receive = rest.starts_with('<');
  if (send || receive) rest.remove_prefix(1);
  const bool backward = rest.starts_with('B');
  const bool weight = rest.starts_with('W') && !send && !receive;
  const size_t dot = rest.find('.');
  if ((!backward && !weight && !rest.starts_with('F')) || dot == std::string_view::npos) Fail(Quote(word), expected);
  Op op;
  op.kind = send      ? (backward ? OpKind::kSendBackward : OpKind::kSendForward)
            : receive ? (backward ? OpKind::kRecvBackward : OpKind::kRecvForward)
            : weight  ? OpKind::kWeight
                      : (backward ? OpKind::kBackward : OpKind::kForward);
  op.stage = Number(rest.substr(1, dot - 1), expected);
  const size_t slash = rest.find('/', dot);
  op.micro_batch = Number(rest.substr(dot + 1, slash == std::string_view::npos ? slash : slash - dot - 1), expected);
  if (slash != std::string_view::npos) op.part = Number(rest.substr(slash + 1), expected);
  return op;
}

std::vector<Op> Parser::List(const std::string& group, const char* which) {
  NextLine();
  Expect(0, group);
  Expect(1, which);
  std::vector<Op> list;
  for (size_t i = 2; i < words_.size(); ++i) {
    list.push_back(ParseOp(words_[i]));
    if (IsCompute(list.back().kind) != (std::string_view(which) == "compute")) {
      Fail(Quote(words_[i]), std::string_view(which) == "compute" ? "F, B or W" : "a send (>) or receive (<)");
    }
  }
  return list;
}

void Parser::ParsePartGroups(Schedule* s) const {
  const int parts = s->max_parts();
  if (parts < 1 || parts > 10'000) Fail(std::to_string(parts) + " parts", "1 to 10000");
  size_t at = 1;
  for (int stage = 0; stage < s->num_stages(); ++stage) {
    for (int part = 0; part < parts; ++part) {
      // Parts that a stage does not have repeat its last one's group.
      s->part_group.push_back(part < s->parts(stage) || part == 0 ? Group(at++) : s->part_group.back());
    }
  }
  ExpectEnd(at);
}

Schedule Parser::Run() {
  Schedule s;
  NextLine();
  Expect(0, "disagmoe-schedule");
  Expect(1, "1");
  ExpectEnd(2);
  NextLine();
  Expect(0, "name");
  s.name = Word(1, "a name");
  ExpectEnd(2);
  s.num_layers = Value("layers");
  s.num_micro_batches = Value("micro-batches");
  s.round = Value("round");
  s.slope = Value("slope");
  NextLine();
  Expect(0, "backward");
  const std::string& backward = Word(1, "yes, no or split");
  if (backward != "yes" && backward != "no" && backward != "split") Fail(Quote(backward), "yes, no or split");
  s.backward = backward != "no";
  s.split_backward = backward == "split";
  ExpectEnd(2);
  NextLine();
  Expect(0, "exchange");
  if (Word(1, "async or sync") != "async" && words_[1] != "sync") Fail(Quote(words_[1]), "async or sync");
  s.sync_exchange = words_[1] == "sync";
  ExpectEnd(2);
  NextLine();
  Expect(0, "groups");
  for (size_t i = 1; i < words_.size(); ++i) {
    if (!group_index_.emplace(words_[i], static_cast<int>(i) - 1).second) Fail(Quote(words_[i]) + " twice", "unlike names");
    s.groups.push_back({});
    s.groups.back().name = words_[i];
  }
  NextLine();
  Expect(0, "stages");
  for (size_t i = 1; i < words_.size(); ++i) s.stage_group.push_back(Group(i));
  size_t next_group = 0;
  while (NextLine()) {
    if (words_[0] == "stages" && s.stage_parts.empty() && s.links.empty() && next_group == 0) {
      ++s.num_routes;
      for (size_t i = 1; i < words_.size(); ++i) s.stage_group.push_back(Group(i));
      continue;
    }
    if (words_[0] == "parts" && s.stage_parts.empty() && s.links.empty() && next_group == 0) {
      for (size_t i = 1; i < words_.size(); ++i) s.stage_parts.push_back(Number(words_[i], "a number"));
      if (static_cast<int>(s.stage_parts.size()) != s.num_stages()) {
        Fail(std::to_string(s.stage_parts.size()) + " numbers", std::to_string(s.num_stages()) + ", one a stage");
      }
      continue;
    }
    if (words_[0] == "part-groups" && !s.stage_parts.empty() && s.part_group.empty() && s.links.empty()) {
      ParsePartGroups(&s);
      continue;
    }
    if (words_[0] == "link") {
      Link link{Group(1), Group(2), false, 0};
      if (Word(3, "forward or backward") != "forward" && words_[3] != "backward") {
        Fail(Quote(words_[3]), "forward or backward");
      }
      link.backward = words_[3] == "backward";
      Expect(4, "slots");
      link.slots = Number(Word(5, "a number"), "a number");
      ExpectEnd(6);
      s.links.push_back(link);
      continue;
    }
    if (next_group == s.groups.size()) Fail(Quote(words_[0]), "\"link\" or the end of the file");
    GroupSchedule& group = s.groups[next_group++];
    Expect(0, "group");
    Expect(1, group.name);
    Expect(2, "ranks");
    group.ranks = Ranks(Word(3, "ranks"));
    Expect(4, "in-flight");
    group.max_in_flight = Number(Word(5, "a number"), "a number");
    ExpectEnd(6);
    group.compute = List(group.name, "compute");
    group.comm = List(group.name, "comm");
  }
  if (next_group != s.groups.size()) Fail("the end of the file", "group " + s.groups[next_group].name);
  return s;
}

}  // namespace

std::string PrintOp(const Op& op) {
  const char* prefix = "?";
  switch (op.kind) {
    case OpKind::kForward: prefix = "F"; break;
    case OpKind::kBackward: prefix = "B"; break;
    case OpKind::kWeight: prefix = "W"; break;
    case OpKind::kSendForward: prefix = ">F"; break;
    case OpKind::kRecvForward: prefix = "<F"; break;
    case OpKind::kSendBackward: prefix = ">B"; break;
    case OpKind::kRecvBackward: prefix = "<B"; break;
  }
  std::string out = prefix + std::to_string(op.stage) + "." + std::to_string(op.micro_batch);
  // Part 0 of a cut stage has no mark: a lone operation does not know that it is cut.
  return op.part > 0 ? out + "/" + std::to_string(op.part) : out;
}

std::string PrintSchedule(const Schedule& s) {
  std::string out = "disagmoe-schedule 1\nname " + s.name + "\nlayers " + std::to_string(s.num_layers) +
                    "\nmicro-batches " + std::to_string(s.num_micro_batches) + "\nround " + std::to_string(s.round) +
                    "\nslope " + std::to_string(s.slope) + "\nbackward " + (s.split_backward ? "split" : s.backward ? "yes" : "no") +
                    "\nexchange " + (s.sync_exchange ? "sync" : "async") + "\ngroups";
  for (const GroupSchedule& group : s.groups) out += " " + group.name;
  for (size_t i = 0; i < s.stage_group.size(); ++i) {
    out += (i % s.num_stages() == 0 ? "\nstages " : " ") + s.groups.at(s.stage_group[i]).name;
  }
  out += "\n";
  if (!s.stage_parts.empty()) {
    out += "parts";
    for (int parts : s.stage_parts) out += " " + std::to_string(parts);
    out += "\n";
  }
  if (!s.part_group.empty()) {
    out += "part-groups";
    for (int stage = 0; stage < s.num_stages(); ++stage) {
      for (int part = 0; part < s.parts(stage); ++part) out += " " + s.groups.at(s.group(stage, 0, part)).name;
    }
    out += "\n";
  }
  for (const Link& link : s.links) {
    out += "link " + s.groups.at(link.src_group).name + " " + s.groups.at(link.dst_group).name +
           (link.backward ? " backward" : " forward") + " slots " + std::to_string(link.slots) + "\n";
  }
  for (const GroupSchedule& group : s.groups) {
    out += "group " + group.name + " ranks " + PrintRanks(group.ranks) + " in-flight " +
           std::to_string(group.max_in_flight) + "\n";
    PrintList(group.name, "compute", group.compute, &out);
    PrintList(group.name, "comm", group.comm, &out);
  }
  return out;
}

Schedule ParseSchedule(const std::string& text, const std::string& where) { return Parser(text, where).Run(); }

std::string ScheduleJson(const Schedule& s) {
  using nlohmann::ordered_json;
  const auto strings = [](const std::vector<Op>& list) {
    ordered_json out = ordered_json::array();
    for (const Op& op : list) out.push_back(PrintOp(op));
    return out;
  };
  ordered_json json{{"name", s.name},   {"layers", s.num_layers}, {"micro_batches", s.num_micro_batches},
                    {"round", s.round}, {"slope", s.slope},       {"backward", s.backward},
                    {"split_backward", s.split_backward}, {"sync_exchange", s.sync_exchange}};
  for (int stage = 0; stage < s.num_stages(); ++stage) json["stages"].push_back(s.groups.at(s.group(stage, 0)).name);
  if (s.num_routes > 1) {
    for (int route = 0; route < s.num_routes; ++route) {
      ordered_json names = ordered_json::array();
      for (int stage = 0; stage < s.num_stages(); ++stage) {
        names.push_back(s.groups.at(s.stage_group[route * s.num_stages() + stage]).name);
      }
      json["routes"].push_back(names);
    }
  }
  if (!s.stage_parts.empty()) json["parts"] = s.stage_parts;
  if (!s.part_group.empty()) {
    for (int stage = 0; stage < s.num_stages(); ++stage) {
      ordered_json names = ordered_json::array();
      for (int part = 0; part < s.parts(stage); ++part) names.push_back(s.groups.at(s.group(stage, 0, part)).name);
      json["part_groups"].push_back(names);
    }
  }
  json["links"] = ordered_json::array();
  for (const Link& link : s.links) {
    json["links"].push_back({{"from", s.groups.at(link.src_group).name},
                             {"to", s.groups.at(link.dst_group).name},
                             {"backward", link.backward},
                             {"slots", link.slots}});
  }
  for (const GroupSchedule& group : s.groups) {
    json["groups"].push_back({{"name", group.name},
                              {"ranks", group.ranks},
                              {"max_in_flight", group.max_in_flight},
                              {"compute", strings(group.compute)},
                              {"comm", strings(group.comm)}});
  }
  return json.dump(1) + "\n";
}

}  // namespace disagmoe
