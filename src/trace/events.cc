// Events of a run as files.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "trace/trace.h"

namespace disagmoe {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kStreams[] = {"forward", "backward", "send", "receive", "wait", "step"};

Stream ParseStream(const std::string& name) {
  for (int i = 0; i < 6; ++i)
    if (name == kStreams[i]) return static_cast<Stream>(i);
  throw Error("unknown stream '" + name + "'");
}

TraceEvent ParseEvent(const json& object) {
  TraceEvent event;
  event.rank = object.at("rank").get<int>();
  event.stream = ParseStream(object.at("stream").get<std::string>());
  event.name = object.at("name").get<std::string>();
  event.begin_ns = object.at("begin_ns").get<int64_t>();
  event.end_ns = object.at("end_ns").get<int64_t>();
  event.step = object.at("step").get<int64_t>();
  event.bytes = object.value("bytes", int64_t{0});
  event.peer = object.value("peer", -1);
  return event;
}

// Under a temporary name first, so that a reader never sees half a file.
void WriteWhole(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".partial";
  std::ofstream file(temporary, std::ios::binary);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    const std::string reason = std::strerror(errno);
    std::remove(temporary.c_str());
    throw Error({"cannot write", path, reason, {}, {}});
  }
}

std::vector<std::string> EventFiles(const std::string& out) {
  std::vector<std::string> paths;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(fs::path(out) / "trace", missing)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("rank-") && name.ends_with(".jsonl")) paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::vector<TraceEvent> ReadAll(const std::vector<std::string>& paths) {
  std::vector<TraceEvent> events;
  for (const std::string& path : paths) {
    const std::vector<TraceEvent> part = ReadEvents(path);
    events.insert(events.end(), part.begin(), part.end());
  }
  return events;
}

}  // namespace

void WriteEvents(const std::string& path, const std::vector<TraceEvent>& events) {
  std::string text;
  for (const TraceEvent& event : events) {
    nlohmann::ordered_json object = {{"rank", event.rank},         {"stream", kStreams[static_cast<int>(event.stream)]},
                                     {"name", event.name},         {"begin_ns", event.begin_ns},
                                     {"end_ns", event.end_ns},     {"step", event.step}};
    if (event.bytes != 0) object["bytes"] = event.bytes;
    if (event.peer != -1) object["peer"] = event.peer;
    text += object.dump() + "\n";
  }
  std::error_code ignored;  // the write says what is wrong
  fs::create_directories(fs::path(path).parent_path(), ignored);
  WriteWhole(path, text);
}

std::vector<TraceEvent> ReadEvents(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw Error({"cannot read the events of a run", path, std::strerror(errno), {}, {}});
  std::vector<TraceEvent> events;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    try {
      events.push_back(ParseEvent(json::parse(line)));
    } catch (const std::exception& error) {
      throw Error({"not a trace event", path + ":" + std::to_string(number), error.what(), {}, {}});
    }
  }
  return events;
}

std::string EventsPath(const std::string& out, int rank) {
  char name[32];
  std::snprintf(name, sizeof name, "rank-%05d.jsonl", rank);
  return (fs::path(out) / "trace" / name).string();
}

std::vector<TraceEvent> ReadRunEvents(const std::string& out) {
  const std::vector<std::string> paths = EventFiles(out);
  if (paths.empty()) {
    throw Error({"no trace in this run's folder", out, "no trace/rank-*.jsonl", {}, "train with trace.steps above 0"});
  }
  return ReadAll(paths);
}

std::string MergeTrace(const std::string& out, const std::vector<WorkerName>& workers) {
  const std::vector<std::string> paths = EventFiles(out);
  if (paths.empty()) return "";
  const std::string path = (fs::path(out) / "trace.json").string();
  WriteWhole(path, PerfettoJson(ReadAll(paths), workers));
  return path;
}

}  // namespace disagmoe
