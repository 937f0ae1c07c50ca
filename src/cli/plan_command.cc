// disagmoe plan MODEL CLUSTER: does splitting pay here, with which split, and will it fit?
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/plan_print.h"
#include "cost/expert_load.h"
#include "plan/plan.h"
#include "plan/roofline.h"
#include "plan/text.h"

namespace disagmoe {
namespace {

using nlohmann::ordered_json;

// Ctrl-C: the first ends the search with the best so far, the second the program.
std::atomic<bool> interrupted{false};
void OnInterrupt(int) { interrupted = true; }

// "1024": within 5 %. "960:1088": any between.
void ParseBatch(const std::string& text, PlanRequest* request) {
  const auto whole = [&](const std::string& word) {
    size_t used = 0;
    int64_t value = 0;
    try {
      value = std::stoll(word, &used);
    } catch (const std::exception&) {
      used = 0;
    }
    if (used == word.size() && used > 0 && value >= 1 && value <= int64_t{1} << 40) return value;
    throw Error({"value not allowed", "--batch", "\"" + text + "\"", "sequences a step, as 1024 or 960:1088", ""});
  };
  const size_t colon = text.find(':');
  if (colon == std::string::npos) {
    request->batch = whole(text);
    request->batch_least = request->batch - request->batch / 20;
    request->batch_most = request->batch + request->batch / 20;
    return;
  }
  request->batch_least = whole(text.substr(0, colon));
  request->batch_most = whole(text.substr(colon + 1));
  if (request->batch_most < request->batch_least) {
    throw Error({"value not allowed", "--batch", "\"" + text + "\"", "the smaller number first", ""});
  }
  request->batch = (request->batch_least + request->batch_most) / 2;
}

std::vector<std::string> Schedules(const PlanArguments& a) {
  std::vector<std::string> out;
  for (const std::string& name : a.schedules) {
    if (name == "all") return {};
    if (name == "trained") {
      for (const ScheduleName& known : ScheduleNames()) {
        if (Trains(known.name)) out.push_back(known.name);
      }
    } else {
      out.push_back(name);
    }
  }
  return out;
}

// A line that is written over on a terminal, and now and then elsewhere.
class Progress {
 public:
  void operator()(const std::string& schedule, const SearchCounts& counts, double speed) {
    const auto now = std::chrono::steady_clock::now();
    const double since = std::chrono::duration<double>(now - last_).count();
    if (since < (terminal_ ? 0.1 : 10)) return;
    last_ = now;
    shown_ = true;
    std::fprintf(stderr, "%s%s: %lld shapes, %lld estimated, %lld simulated, %.0f tokens/s a GPU%s",
                 terminal_ ? "\r\033[K" : "", schedule.c_str(), static_cast<long long>(counts.considered),
                 static_cast<long long>(counts.estimated), static_cast<long long>(counts.simulated), speed,
                 terminal_ ? "" : "\n");
  }
  ~Progress() {
    if (shown_ && terminal_) std::fputs("\r\033[K", stderr);
  }

 private:
  bool terminal_ = isatty(2) != 0;
  bool shown_ = false;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

Roofline RooflineOf(const PlanRequest& request, const Plan& plan) {
  RooflineRequest r;
  r.model = request.model;
  r.attention = request.hardware.front();
  r.ffn = request.hardware.back();
  r.seq_length = request.seq_length;
  r.ffn_workers = static_cast<int>(std::min<int64_t>(8, request.model.num_experts));
  // With the groups of the best split, if there is one.
  if (plan.best_split >= 0) {
    const Job& job = plan.rows[plan.best_split].best()->job;
    r.ffn_workers = job.n, r.dedup = job.dedup, r.nics_a = job.nics_a, r.nics_f = job.nics_f;
    r.attention = job.cluster;
    r.ffn = job.ffn_cluster ? *job.ffn_cluster : job.cluster;
  }
  return MakeRoofline(r);
}

void Write(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  if (!out.flush()) throw Error({"cannot write", path, "", "", ""});
}

}  // namespace

int64_t ParseTokens(const std::string& text, const std::string& option) {
  size_t used = 0;
  int64_t value = 0;
  try {
    value = std::stoll(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  const std::string rest = used > 0 ? text.substr(used) : "?";
  if (rest == "k" || rest == "K") value *= 1024;
  if (value >= 1 && value <= (int64_t{1} << 24) && (rest.empty() || rest == "k" || rest == "K")) return value;
  throw Error({"value not allowed", option, "\"" + text + "\"", "tokens, such as 4096 or 4k", ""});
}

int PlanCommand(const PlanArguments& a) {
  PlanRequest request;
  request.model = LoadModelShape(a.model);
  request.hardware = LoadClusters(a.cluster);
  request.schedules = Schedules(a);
  request.settings = a.settings;
  request.seq_length = ParseTokens(a.seq, "--seq");
  request.changes = !a.brief;
  request.effort = static_cast<int64_t>(static_cast<double>(request.effort) * a.effort);
  ParseBatch(a.batch, &request);
  if (!a.expert_load.empty()) request.expert_loads = ReadExpertLoads(a.expert_load);

  struct sigaction action = {};
  action.sa_handler = OnInterrupt;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  SearchControl control;
  control.stop = &interrupted;
  control.threads = a.threads > 0 ? a.threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const auto start = std::chrono::steady_clock::now();
  Plan plan;
  {
    Progress progress;
    control.progress = std::ref(progress);
    plan = MakePlan(request, control);
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  const Roofline roofline = RooflineOf(request, plan);
  if (!a.svg.empty()) Write(a.svg, RooflineSvg(roofline));
  if (a.json) {
    ordered_json json = PlanJson(request, plan);
    json["roofline"] = RooflineJson(roofline);
    std::puts(json.dump(1).c_str());
  } else {
    std::fputs(PlanText(request, plan).c_str(), stdout);
    if (!a.brief) std::printf("\n%s\n%s", DrawRoofline(roofline, 96).c_str(), RooflineText(roofline).c_str());
    std::fprintf(stderr, "%lld shapes, %lld estimated, %lld simulated, %.2f s\n",
                 static_cast<long long>(plan.counts.considered), static_cast<long long>(plan.counts.estimated),
                 static_cast<long long>(plan.counts.simulated), seconds);
  }
  return plan.best() ? 0 : 1;
}

}  // namespace disagmoe
