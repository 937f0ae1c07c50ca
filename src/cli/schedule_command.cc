#include <algorithm>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "cli/commands.h"
#include "plan/plan_file.h"
#include "spec/config_keys.h"
#include "spec/layout.h"

namespace disagmoe {
namespace {

using nlohmann::ordered_json;

// A file in the text form of schedules begins with this word; a configuration cannot.
bool IsScheduleText(const std::string& path, std::string* text) {
  std::ifstream file(path);
  std::ostringstream content;
  if (file) content << file.rdbuf();
  *text = content.str();
  return text->starts_with("disagmoe-schedule");
}

std::string Count(size_t n, const std::string& what, const char* plural = "s") {
  return std::to_string(n) + " " + what + (n == 1 ? "" : plural);
}

void PrintFacts(const Schedule& schedule, const ScheduleFacts& facts) {
  std::printf("%s: %s, %s, round of %d, slope %d\n", schedule.name.c_str(),
              Count(static_cast<size_t>(schedule.num_layers), "layer").c_str(),
              Count(static_cast<size_t>(schedule.num_micro_batches), "micro-batch", "es").c_str(),
              schedule.round, schedule.slope);
  for (size_t i = 0; i < schedule.groups.size(); ++i) {
    const GroupSchedule& g = schedule.groups[i];
    std::printf("%s: %s, %s, %s, at most %s in flight\n", g.name.c_str(), Count(g.ranks.size(), "worker").c_str(),
                Count(g.compute.size(), "computation").c_str(), Count(g.comm.size(), "transfer").c_str(),
                Count(static_cast<size_t>(facts.peak_in_flight.at(i)), "activation").c_str());
  }
  for (const Link& link : schedule.links) {
    std::printf("%s to %s, %s: %s\n", schedule.groups[static_cast<size_t>(link.src_group)].name.c_str(),
                schedule.groups[static_cast<size_t>(link.dst_group)].name.c_str(), link.backward ? "gradients" : "activations",
                Count(static_cast<size_t>(link.slots), "receive slot").c_str());
  }
  std::printf("valid: complete, matched and free of deadlock; %lld operations\n", static_cast<long long>(facts.num_ops));
}

const ScheduleName* NamedSchedule(const std::string& name) {
  for (const ScheduleName& known : ScheduleNames()) {
    if (known.name == name) return &known;
  }
  return nullptr;
}

// "disagmoe schedule NAME layers=8 p=4": the generators alone, without a configuration.
Schedule FromSettings(const ScheduleName& name, const std::vector<std::string>& settings) {
  PlacementSpec placement{.num_layers = 4, .colocated = name.colocated};
  GenerateOptions options{.num_micro_batches = 4};
  const std::vector<std::pair<std::string, std::function<void(int)>>> keys{
      {"layers", [&](int x) { placement.num_layers = x; }},
      {"p", [&](int x) { placement.p_a = placement.p_f = x; }},
      {"p_a", [&](int x) { placement.p_a = x; }},
      {"p_f", [&](int x) { placement.p_f = x; }},
      {"m", [&](int x) { placement.m = x; }},
      {"n", [&](int x) { placement.n = x; }},
      {"v", [&](int x) { placement.virtual_stages = x; }},
      {"micro_batches", [&](int x) { options.num_micro_batches = x; }},
      {"round", [&](int x) { options.round = x; }},
      {"slope", [&](int x) { options.slope = x; }},
      {"parts", [&](int x) { options.parts = x; }},
  };
  for (const std::string& setting : settings) {
    const size_t equal = std::min(setting.find('='), setting.size());
    const auto key = std::find_if(keys.begin(), keys.end(), [&](const auto& k) { return k.first == setting.substr(0, equal); });
    int value = 0;
    const char* end = setting.data() + setting.size();
    const char* begin = setting.data() + std::min(equal + 1, setting.size());
    const auto [stop, error] = std::from_chars(begin, end, value);
    if (key == keys.end() || error != std::errc() || stop != end || value < 0 || value > 1'000'000) {
      std::string names;
      for (const auto& k : keys) names += (names.empty() ? "" : ", ") + k.first;
      throw Error({"not a setting of a schedule", name.name, "\"" + setting + "\"", "KEY=NUMBER, KEY one of " + names, ""});
    }
    key->second(value);
  }
  if (int64_t{placement.num_layers} * options.num_micro_batches > 1'000'000) {
    throw Error({"a schedule too large to print", name.name,
                 std::to_string(placement.num_layers) + " layers, " + std::to_string(options.num_micro_batches) + " micro-batches",
                 "at most a million of both multiplied", ""});
  }
  Schedule schedule = Generate(name.name, placement, options);
  ValidateSchedule(schedule);
  return schedule;
}

}  // namespace

int ScheduleCommand(const ScheduleArguments& arguments) {
  if (!(arguments.transfer >= 0 && arguments.transfer <= 1e6)) {
    throw Error({"value not allowed", "--transfer", TomlNumber(arguments.transfer), "a number from 0 to 1000000", {}});
  }
  if (arguments.columns < 0) {
    throw Error({"value not allowed", "--columns", std::to_string(arguments.columns), "0 (all) or more", {}});
  }
  Schedule schedule;
  std::string text;
  if (const ScheduleName* name = NamedSchedule(arguments.config)) {
    schedule = FromSettings(*name, arguments.overrides);
  } else if (IsScheduleText(arguments.config, &text)) {
    if (!arguments.overrides.empty()) {
      throw Error({"a schedule in a file cannot be overridden", arguments.config, arguments.overrides[0], {}, {}});
    }
    schedule = ParseSchedule(text, arguments.config);
  } else {
    const RunConfig config = LoadConfig(arguments.config, arguments.overrides);
    schedule = config.plan.cluster.empty() ? TrainingSchedule(config) : ScheduleOf(JobOf(config, arguments.config));
  }
  ordered_json json;
  if (arguments.json) json = ordered_json::parse(ScheduleJson(schedule));
  if (arguments.check) {
    const ScheduleFacts facts = ValidateSchedule(schedule);
    if (arguments.json) {
      json["facts"] = {{"peak_in_flight", facts.peak_in_flight}, {"operations", facts.num_ops}};
    } else {
      PrintFacts(schedule, facts);
    }
  }
  if (arguments.json) {
    std::puts(json.dump().c_str());
  } else if (arguments.grid) {
    std::fputs(DrawGrid(schedule, arguments.transfer, arguments.columns).c_str(), stdout);
  } else if (!arguments.check) {
    std::fputs(PrintSchedule(schedule).c_str(), stdout);
  }
  return 0;
}

}  // namespace disagmoe
