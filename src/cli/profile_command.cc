// profile: short traced runs of the program itself, and from their traces what everything takes on this machine.
#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/time.h"
#include "cli/commands.h"
#include "cli/temporary_folder.h"
#include "cost/profile.h"
#include "spec/trainable.h"
#include "trace/trace.h"

namespace disagmoe {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kTraceFrom = 3;
constexpr int64_t kMicroBatches = 4;
constexpr double kSecondsARun = 0.6;  // of traced steps
// Where other programs take more than this share of the processors, a run is made again, so many times in all.
constexpr double kQuiet = 0.03;
constexpr int kTries = 3;

void SetLayers(ModelConfig* model, int64_t layers) {
  model->num_hidden_layers = layers;
  if (!model->layer_types.empty()) model->layer_types.resize(layers, model->layer_types.back());
}

// The given configuration, reduced to what is measured: an attention and an FFN worker, a few layers and steps.
RunConfig Base(RunConfig config, const std::string& out) {
  config.out = out;
  config.layout = {};
  config.schedule = {};
  const int64_t dense = config.model.first_k_dense_replace;
  config.model.mlp_only_layers.clear();  // FFNs of the kinds that are measured anyway, or not in the layers that are left
  SetLayers(&config.model, std::clamp<int64_t>(config.model.num_hidden_layers, dense + 2, dense + 4));
  config.train.micro_batches = kMicroBatches;
  config.train.recompute = "none";
  config.train.shard_optimizer = false;
  config.train.eval_micro_batches = config.train.eval_interval = 0;
  config.train.save = false;
  config.train.resume.clear();
  config.transport.kind = "ucx";
  config.transport.paced = false;
  config.trace.first_step = kTraceFrom;
  return config;
}

// 1, 2, 4, ... and the most.
std::vector<int64_t> Sizes(int64_t most) {
  std::vector<int64_t> sizes;
  for (int64_t n = 1; n < most; n *= 2) sizes.push_back(n);
  sizes.push_back(most);
  if (sizes.size() > 4) sizes.erase(sizes.begin() + 1, sizes.end() - 3);
  return sizes;
}

struct Measurement {
  std::string what;
  RunConfig config;
};

std::vector<Measurement> Plan(const RunConfig& base, const std::vector<int64_t>& seq_lengths) {
  std::vector<Measurement> plan;
  const int64_t tokens = std::max<int64_t>(2, base.train.micro_batch_size) * base.train.seq_length;
  auto add = [&](const std::string& what, RunConfig config, int64_t s, int64_t b) -> RunConfig& {
    config.train.seq_length = s;
    config.train.micro_batch_size = b;
    plan.push_back({what + ", " + std::to_string(b) + " x " + std::to_string(s) + " tokens", config});
    return plan.back().config;
  };
  for (int64_t s : seq_lengths) {
    const int64_t most = std::max<int64_t>(1, tokens / s);
    for (int64_t b : Sizes(most)) add("layers", base, s, b);
    for (int64_t b : most > 1 ? std::vector<int64_t>{1, most} : std::vector<int64_t>{1}) {
      add("layers with recompute", base, s, b).train.recompute = "layer";
    }
  }
  const int64_t s = base.train.seq_length, most = std::max<int64_t>(2, base.train.micro_batch_size);
  const int64_t half = (base.model.num_experts + 1) / 2, k = base.model.num_experts_per_tok;
  if (half >= k && half < base.model.num_experts) {
    for (int64_t b : {int64_t{1}, most}) {
      for (const char* recompute : {"none", "layer"}) {
        RunConfig& c = add("half of the experts", base, s, b);
        c.model.num_experts = half;
        c.model.n_group = c.model.topk_group = 1;  // need not divide it
        c.train.recompute = recompute;
      }
    }
  }
  if (k > 1) {
    RunConfig& c = add("one expert a token", base, s, most);
    c.model.num_experts_per_tok = 1;
    RunConfig& recomputed = add("one expert a token", base, s, most);
    recomputed.model.num_experts_per_tok = 1;
    recomputed.train.recompute = "layer";
  }
  for (int64_t b : Sizes(most)) {
    TransportConfig& t = add("messages through the emulated NIC", base, s, b).transport;
    t.paced = true;
    t.paced_gbps = 1e5;
    t.paced_latency_us = 0;
  }
  // Long after it is there: how late the NIC's thread wakes.
  TransportConfig& t = add("messages through a slow emulated NIC", base, s, 1).transport;
  t.paced = true;
  t.paced_gbps = 1e5;
  t.paced_latency_us = 2000;
  for (int64_t layers : {int64_t{1}, base.model.num_hidden_layers}) {
    RunConfig& c = add("gradient sums", base, s, 2);
    c.layout.colocated = true;
    c.layout.m = 2;
    SetLayers(&c.model, std::max(layers, base.model.first_k_dense_replace));
  }
  return plan;
}

int ProcessorCores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

// Seconds of processor time, of all cores: by everybody since the start of the machine, and by our children so far.
double BusySeconds() {
  std::ifstream file("/proc/stat");
  std::string name;
  double sum = 0, user = 0, nice = 0, system = 0, idle = 0, wait = 0, irq = 0, softirq = 0, steal = 0;
  if (file >> name >> user >> nice >> system >> idle >> wait >> irq >> softirq >> steal) {
    sum = user + nice + system + irq + softirq + steal;
  }
  return sum / static_cast<double>(sysconf(_SC_CLK_TCK));
}

double ChildSeconds() {
  rusage usage{};
  getrusage(RUSAGE_CHILDREN, &usage);
  auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Runs `disagmoe train` on it and waits. What it prints is dropped, its errors are not.
void Train(const RunConfig& config, const std::string& file) {
  std::ofstream(file) << PrintConfig(config);
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) throw Error({"cannot start a measuring run", "profile", std::strerror(errno), {}, {}});
  if (child == 0) {
    dup2(open("/dev/null", O_WRONLY | O_CLOEXEC), STDOUT_FILENO);
    execl("/proc/self/exe", "disagmoe", "train", file.c_str(), static_cast<char*>(nullptr));
    _exit(127);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
  throw Error({"a measuring run failed",
               "profile",
               {},
               {},
               "its reason is above; `disagmoe train` with this configuration shows more"});
}

// Until nobody else computes, as long as patience lasts.
void WaitForQuiet(double* patience_s) {
  constexpr useconds_t kLook = 250'000;
  const double cores = ProcessorCores();
  for (double busy = BusySeconds(); *patience_s > 0; *patience_s -= kLook * 1e-6) {
    usleep(kLook);
    const double now = BusySeconds();
    if (now - busy <= kQuiet * kLook * 1e-6 * cores) return;
    busy = now;
  }
}

// The share of the processors that other programs took meanwhile.
template <typename Run>
double TakenByOthers(const Run& run) {
  const int64_t begin = NowNs();
  const double busy = BusySeconds(), children = ChildSeconds();
  run();
  const double others = (BusySeconds() - busy) - (ChildSeconds() - children);
  return std::max(0.0, others) / (static_cast<double>(NowNs() - begin) * 1e-9 * static_cast<double>(ProcessorCores()));
}

double TokensAStep(const RunConfig& c) {
  return static_cast<double>(c.train.micro_batches * c.train.micro_batch_size * c.train.seq_length *
                             c.model.num_hidden_layers);
}

// Nanoseconds of the longest traced step, so that a run gets as many steps as fit into its time.
double LongestStep(const std::vector<TraceEvent>& events) {
  int64_t longest = 1;
  for (const TraceEvent& e : events) {
    if (e.stream == Stream::kStep && e.name == "step") longest = std::max(longest, e.end_ns - e.begin_ns);
  }
  return static_cast<double>(longest);
}

std::string ProcessorName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

std::string StageLine(const StageTimes& t) {
  std::string what = StageKindName(t.kind);
  if (t.seq_length > 0) what += ", s = " + std::to_string(t.seq_length);
  if (t.experts > 0) what += ", " + std::to_string(t.experts) + " experts, " + std::to_string(t.per_row) + " a token";
  if (t.recompute) what += ", recompute";
  char line[200];
  std::snprintf(line, sizeof line, "%-46s %8lld tokens: forward %9.1f us, backward %9.1f us  (spread %2.0f %%)",
                what.c_str(), static_cast<long long>(t.forward.x.back()),
                static_cast<double>(t.forward.ns.back()) / 1e3, static_cast<double>(t.backward.ns.back()) / 1e3,
                t.spread * 100);
  return line;
}

void Print(const Profile& p, const std::string& out) {
  for (const StageTimes& t : p.stages) std::printf("%s\n", StageLine(t).c_str());
  auto last = [](const Curve& c) {
    return c.x.empty() ? std::pair<double, double>{0, 0} : std::pair<double, double>{c.x.back(), c.ns.back()};
  };
  std::printf(
      "a message of %.0f bytes %.1f us (behind the emulated NIC's threads %.1f us), waking %.1f us, a gap %.1f us\n",
      last(p.message).first, last(p.message).second / 1e3, p.paced_message.At(last(p.message).first) / 1e3,
      static_cast<double>(p.wake_ns) / 1e3, static_cast<double>(p.gap_ns) / 1e3);
  std::printf("optimizer %.2f ns an element, gradient sums %.2f ns a byte sent\n",
              last(p.optimizer).second / last(p.optimizer).first,
              last(p.sums).second / std::max(1.0, last(p.sums).first));
  std::printf("%s\n", out.c_str());
}

}  // namespace

int ProfileCommand(const ProfileArguments& arguments) {
  const RunConfig config = LoadConfig(arguments.config, arguments.overrides);
  RequireTrainable(config, arguments.config);
  RequireData(config, arguments.config);
  std::vector<int64_t> seq_lengths = arguments.seq_lengths;
  if (seq_lengths.empty()) seq_lengths.push_back(std::max<int64_t>(1, config.train.seq_length / 2));
  seq_lengths.push_back(config.train.seq_length);
  std::sort(seq_lengths.begin(), seq_lengths.end());
  seq_lengths.erase(std::unique(seq_lengths.begin(), seq_lengths.end()), seq_lengths.end());
  const TemporaryFolder folder("disagmoe-profile");
  const std::vector<Measurement> plan = Plan(Base(config, folder.path + "/run"), seq_lengths);
  ProfileBuilder builder(config);
  const int64_t begin = NowNs();
  // A first run, not counted: finds mistakes at once, and how many steps fit into a run.
  RunConfig first = plan[0].config;
  first.trace.steps = 3;
  first.train.steps = kTraceFrom + first.trace.steps - 1;
  Train(first, folder.path + "/config.toml");
  const double ns_a_token = LongestStep(ReadRunEvents(first.out)) / TokensAStep(first);
  int noisy = 0;
  double patience_s = arguments.patience_s;
  for (int64_t round = 0; round < arguments.rounds; ++round) {
    for (size_t i = 0; i < plan.size(); ++i) {
      RunConfig run = plan[i].config;
      const double steps = kSecondsARun * 1e9 / (ns_a_token * TokensAStep(run));
      run.trace.steps = std::clamp<int64_t>(std::llround(steps), 3, 20);
      run.train.steps = kTraceFrom + run.trace.steps - 1;
      std::fprintf(stderr, "round %lld/%lld, %zu/%zu: %s\n", static_cast<long long>(round + 1),
                   static_cast<long long>(arguments.rounds), i + 1, plan.size(), plan[i].what.c_str());
      for (int tries = 1; tries <= kTries; ++tries) {
        WaitForQuiet(&patience_s);
        const double taken = TakenByOthers([&] { Train(run, folder.path + "/config.toml"); });
        builder.Add(run, ReadRunEvents(run.out));
        if (taken <= kQuiet) break;
        std::fprintf(stderr, "  other programs took %.0f %% of the processors%s\n", taken * 100,
                     tries < kTries ? ": once more" : "");
        noisy += tries == kTries;
      }
    }
  }
  Profile profile = builder.Build();
  profile.cpu = ProcessorName();
  profile.cores = ProcessorCores();
  const std::string text = ProfileJson(profile);
  std::ofstream file(arguments.out);
  file << text << "\n";
  file.close();
  if (!file) throw Error({"cannot write", arguments.out, std::strerror(errno), {}, {}});
  if (noisy > 0) {
    std::fprintf(stderr,
                 "%d measurements beside other programs: times may be too long; profile again on a quiet machine\n",
                 noisy);
  }
  std::fprintf(stderr, "%.0f s\n", static_cast<double>(NowNs() - begin) * 1e-9);
  if (arguments.json) {
    std::puts(text.c_str());
  } else {
    Print(profile, arguments.out);
  }
  return 0;
}

}  // namespace disagmoe
