#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "cli/commands.h"
#include "trace/trace.h"

namespace disagmoe {
namespace {

using nlohmann::ordered_json;

std::vector<WorkerName> NamesOf(const RunConfig& config) {
  std::vector<WorkerName> workers;
  for (const std::string& name : WorkerNames(config)) workers.push_back({static_cast<int>(workers.size()), name});
  return workers;
}

// A run keeps its resolved configuration; events that came without it have ranks only.
std::vector<WorkerName> NamesOfRun(const std::string& out, const std::vector<TraceEvent>& events) {
  const std::string config = out + "/config.toml";
  if (std::filesystem::exists(config)) return NamesOf(LoadConfig(config, {}));
  std::set<int> ranks;
  for (const TraceEvent& event : events) ranks.insert(event.rank);
  std::vector<WorkerName> workers;
  for (int rank : ranks) workers.push_back({rank, "rank " + std::to_string(rank)});
  return workers;
}

int TerminalColumns() {
  winsize size{};
  // The rest of a line is taken by the name and the shares.
  return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? std::max(size.ws_col - 60, 40) : 100;
}

}  // namespace

int TimelineCommand(const TimelineArguments& arguments) {
  if (arguments.columns < 0) {
    throw Error({"value not allowed", "--columns", std::to_string(arguments.columns), "0 (the terminal's) or more", {}});
  }
  const std::vector<TraceEvent> events = ReadRunEvents(arguments.out);
  const std::vector<WorkerName> workers = NamesOfRun(arguments.out, events);
  const std::vector<int64_t> steps = TracedSteps(events);
  const int64_t step = arguments.step > 0 || steps.empty() ? arguments.step : steps.back();
  if (!arguments.svg.empty()) {
    const std::string picture = TimelineSvg(events, workers, step);
    std::ofstream file(arguments.svg);
    file << picture;
    file.close();
    if (!file) throw Error({"cannot write", arguments.svg, {}, {}, {}});
    std::printf("%s: step %lld\n", arguments.svg.c_str(), static_cast<long long>(step));
    return 0;
  }
  if (!arguments.json) {
    const int columns = arguments.columns > 0 ? arguments.columns : TerminalColumns();
    std::fputs(DrawTimeline(events, workers, step, columns).c_str(), stdout);
    return 0;
  }
  ordered_json json = {{"step", step}, {"traced", steps}, {"workers", ordered_json::array()}};
  for (const WorkerName& worker : workers) {
    const WorkerTimes times = TimesOf(events, worker.rank, step);
    json["workers"].push_back({{"rank", worker.rank},
                               {"name", worker.name},
                               {"step_ns", times.step_ns},
                               {"compute_ns", times.compute_ns},
                               {"exposed_ns", times.exposed_ns},
                               {"bubble_ns", times.bubble_ns}});
  }
  std::puts(json.dump().c_str());
  return 0;
}

}  // namespace disagmoe
