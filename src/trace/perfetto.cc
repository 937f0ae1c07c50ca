// The Chrome trace event format, which Perfetto and chrome://tracing read.
#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "trace/trace.h"

namespace disagmoe {
namespace {

constexpr const char* kTracks[] = {"forward", "backward", "send", "receive", "wait", "step"};
// From top to bottom: step, forward, backward, wait, send, receive.
constexpr int kTrackOrder[] = {1, 2, 4, 5, 3, 0};
constexpr int kLanes = 1000;  // thread ids of a stream

std::string Quote(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

class Writer {
 public:
  Writer(const std::vector<TraceEvent>& events, const std::vector<WorkerName>& workers,
         const std::vector<TraceCounter>& counters)
      : events_(events), counters_(counters) {
    for (const TraceEvent& event : events) {
      origin_ = std::min(origin_, event.begin_ns);
      names_[event.rank] = "rank " + std::to_string(event.rank);
      order_.push_back(&event);
    }
    for (const TraceCounter& counter : counters) {
      origin_ = std::min(origin_, counter.ns);
      names_[counter.rank] = "rank " + std::to_string(counter.rank);
    }
    for (const WorkerName& worker : workers) names_[worker.rank] = worker.name;
    // Longer first: what lies inside another event comes after it.
    std::stable_sort(order_.begin(), order_.end(), [](const TraceEvent* a, const TraceEvent* b) {
      return std::pair(a->begin_ns, -a->end_ns) < std::pair(b->begin_ns, -b->end_ns);
    });
  }

  std::string Write() {
    for (const TraceEvent* event : order_) Slice(*event);
    Arrows();
    BytesInFlight();
    for (const TraceCounter& counter : counters_) Count(counter);
    Names();
    return "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n" + text_ + "\n]}\n";
  }

 private:
  // Integer arithmetic: microseconds with three decimals are exact.
  std::string Micros(int64_t ns) const {
    char text[40];
    std::snprintf(text, sizeof text, "%lld.%03lld", static_cast<long long>(ns / 1000), static_cast<long long>(ns % 1000));
    return text;
  }

  void Emit(const std::string& fields) { text_ += (text_.empty() ? "{" : ",\n{") + fields + "}"; }

  // From 1: process 0 and thread 0 are the idle ones to Perfetto.
  static std::string Place(int rank, int thread) {
    return "\"pid\":" + std::to_string(rank + 1) + ",\"tid\":" + std::to_string(thread + 1);
  }

  // A track shows events that follow or enclose one another. One that overlaps another goes to the next lane.
  int LaneOf(const TraceEvent& event) {
    auto& lanes = open_[{event.rank, event.stream}];
    for (size_t lane = 0;; ++lane) {
      if (lane == lanes.size()) lanes.emplace_back();
      std::vector<int64_t>& ends = lanes[lane];
      while (!ends.empty() && ends.back() <= event.begin_ns) ends.pop_back();
      if (!ends.empty() && ends.back() < event.end_ns) continue;
      ends.push_back(event.end_ns);
      return static_cast<int>(lane);
    }
  }

  void Slice(const TraceEvent& event) {
    const int thread = kTrackOrder[static_cast<int>(event.stream)] * kLanes + LaneOf(event);
    threads_[&event] = thread;
    tracks_[{event.rank, thread}] = event.stream;
    std::string args = "\"step\":" + std::to_string(event.step);
    if (event.bytes != 0) args += ",\"bytes\":" + std::to_string(event.bytes);
    if (event.peer >= 0) args += ",\"peer\":" + Quote(names_.count(event.peer) ? names_[event.peer] : "");
    Emit("\"ph\":\"X\",\"name\":" + Quote(event.name) + ",\"cat\":\"" + kTracks[static_cast<int>(event.stream)] + "\"," +
         Place(event.rank, thread) + ",\"ts\":" + Micros(event.begin_ns - origin_) +
         ",\"dur\":" + Micros(event.end_ns - event.begin_ns) + ",\"args\":{" + args + "}");
  }

  static std::string TransferName(const std::string& name) {
    return name.starts_with('>') || name.starts_with('<') ? name.substr(1) : name;
  }

  void Arrows() {
    // (name, step, source, destination); several of one key pair up in order of time.
    std::map<std::tuple<std::string, int64_t, int, int>, std::vector<const TraceEvent*>> sends;
    for (const TraceEvent* e : order_)
      if (e->stream == Stream::kSend) sends[{TransferName(e->name), e->step, e->rank, e->peer}].push_back(e);
    std::map<std::tuple<std::string, int64_t, int, int>, size_t> taken;
    int id = 0;
    for (const TraceEvent* e : order_) {
      if (e->stream != Stream::kReceive) continue;
      const std::tuple key(TransferName(e->name), e->step, e->peer, e->rank);
      const auto it = sends.find(key);
      if (it == sends.end() || taken[key] == it->second.size()) continue;
      const TraceEvent* send = it->second[taken[key]++];
      Arrow(*send, send->begin_ns, "\"s\"", ++id);
      // Just inside the receive's end: an arrow binds to the slice that is open at its time.
      Arrow(*e, std::max(e->begin_ns, e->end_ns - 1), "\"f\",\"bp\":\"e\"", id);
    }
  }

  void Arrow(const TraceEvent& event, int64_t ns, const std::string& phase, int id) {
    Emit("\"ph\":" + phase + ",\"id\":" + std::to_string(id) + ",\"name\":\"transfer\",\"cat\":\"transfer\"," +
         Place(event.rank, threads_[&event]) + ",\"ts\":" + Micros(ns - origin_));
  }

  void Count(const TraceCounter& counter) {
    std::string args;
    for (const auto& [part, bytes] : counter.parts) {
      args.append(args.empty() ? "" : ",").append(Quote(part)).append(":").append(std::to_string(bytes));
    }
    Emit("\"ph\":\"C\",\"name\":" + Quote(counter.name) + "," + Place(counter.rank, 0) +
         ",\"ts\":" + Micros(counter.ns - origin_) + ",\"args\":{" + args + "}");
  }

  void BytesInFlight() {
    std::map<std::pair<int, int64_t>, int64_t> changes;
    for (const TraceEvent& event : events_) {
      if (event.stream != Stream::kSend || event.bytes == 0) continue;
      changes[{event.rank, event.begin_ns}] += event.bytes;
      changes[{event.rank, event.end_ns}] -= event.bytes;
    }
    std::map<int, int64_t> bytes;
    for (const auto& [at, change] : changes) {
      Count({at.first, at.second, "bytes being sent", {{"bytes", bytes[at.first] += change}}});
    }
  }

  void Metadata(const char* what, int rank, int thread, const std::string& args) {
    Emit("\"ph\":\"M\",\"name\":\"" + std::string(what) + "\"," + Place(rank, thread) + ",\"args\":{" + args + "}");
  }

  void Names() {
    for (const auto& [rank, name] : names_) {
      Metadata("process_name", rank, 0, "\"name\":" + Quote(name));
      Metadata("process_sort_index", rank, 0, "\"sort_index\":" + std::to_string(rank));
    }
    for (const auto& [place, stream] : tracks_) {
      const auto [rank, thread] = place;
      const int lane = thread % kLanes;
      std::string name = kTracks[static_cast<int>(stream)];
      if (lane > 0) name.append(" ").append(std::to_string(lane + 1));
      Metadata("thread_name", rank, thread, "\"name\":" + Quote(name));
      Metadata("thread_sort_index", rank, thread, "\"sort_index\":" + std::to_string(thread));
    }
  }

  const std::vector<TraceEvent>& events_;
  const std::vector<TraceCounter>& counters_;
  std::vector<const TraceEvent*> order_;
  std::map<int, std::string> names_;
  std::map<std::pair<int, Stream>, std::vector<std::vector<int64_t>>> open_;  // per lane: ends of enclosing events
  std::map<const TraceEvent*, int> threads_;
  std::map<std::pair<int, int>, Stream> tracks_;  // (rank, thread)
  int64_t origin_ = INT64_MAX;
  std::string text_;
};

}  // namespace

std::string PerfettoJson(const std::vector<TraceEvent>& events, const std::vector<WorkerName>& workers,
                         const std::vector<TraceCounter>& counters) {
  return Writer(events, workers, counters).Write();
}

}  // namespace disagmoe
