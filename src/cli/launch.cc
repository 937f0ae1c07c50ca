#include "cli/launch.h"

#include <poll.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <optional>

#include "base/error.h"
#include "base/time.h"
#include "cli/launch_process.h"
#include "transport/control_wire.h"

namespace disagmoe {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

std::string NewSecret() {
  std::string hex;
  for (unsigned char c : control::MakeNonce().substr(0, 16)) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", c);
    hex += digits;
  }
  return hex;
}

std::vector<std::string> EnvironmentOfRank(const LaunchOptions& o, int rank, int port, const std::string& secret) {
  std::string r = std::to_string(rank), w = std::to_string(o.world);
  return EnvironmentWith({{"RANK", r}, {"WORLD_SIZE", w}, {"LOCAL_RANK", r}, {"LOCAL_WORLD_SIZE", w},
                          {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", std::to_string(port)},
                          {"DISAGMOE_SECRET", secret}, {"DISAGMOE_LAUNCHER", "1"},
                          {"OMP_NUM_THREADS", std::to_string(std::max(1, o.threads))}},
                         {{"UCX_MEM_EVENTS", "n"}, {"UCX_WARN_UNUSED_ENV_VARS", "n"}, {"OMP_WAIT_POLICY", "passive"}},
                         {"TORCHELASTIC_USE_AGENT_STORE"});
}

// The ranks, from their start to the last one's end.
class LocalRun {
 public:
  explicit LocalRun(const LaunchOptions& options)
      : options_(options),
        secret_(NewSecret()),
        server_("127.0.0.1", options.port, options.world, secret_, options.times),
        children_(signals_.old_mask()) {}

  void Start() {
    for (int rank = 0; rank < options_.world; ++rank) {
      children_.Start(options_.program, options_.arguments, EnvironmentOfRank(options_, rank, server_.port(), secret_));
    }
  }

  void WaitForAll() {
    while (children_.running() > 0) {
      // Short waits: a failure that ends no process (a stopped rank) comes without a signal to us.
      pollfd p = {signals_.fd(), POLLIN, 0};
      poll(&p, 1, 100);
      while (int signal = signals_.Take()) OnSignal(signal);
      for (const ExitedChild& child : children_.Reap()) OnExit(child);
      KillInTime();
    }
    server_.WaitAllLeft(options_.times.grace_ns + 2000 * kMs);  // the last death's grace
  }

  int Conclude() {
    std::string reason = server_.failure();
    if (reason.empty() && server_.all_left()) return 0;
    if (reason.empty()) reason = "the ranks ended, and the control server does not know why";
    std::fflush(stdout);
    std::fprintf(stderr, "disagmoe: error: %s\n", reason.c_str());
    if (options_.json) std::puts(ErrorJson({reason, {}, {}, {}, {}}).c_str());
    std::fflush(stdout);
    return reason == interruption_ ? 128 + signal_ : ExitCode(server_.failure_kind());
  }

 private:
  void OnSignal(int signal) {
    if (signal == SIGCHLD) return;
    if (signal_ != 0) {
      kill_ns_ = 0;
      return;
    }
    signal_ = signal;
    interruption_ = "interrupted by signal " + std::to_string(signal);
    server_.Abort(interruption_, FailureKind::kDeath);
    children_.Signal(SIGTERM);
    children_.Signal(SIGCONT);  // one that is stopped could not end
  }

  void OnExit(const ExitedChild& child) {
    if (server_.all_left() && !child.clean) {
      std::fprintf(stderr, "disagmoe: warning: rank %d ended badly after the run: %s\n", child.index, child.how.c_str());
    }
    server_.ReportDeath(child.index, child.how);
  }

  void KillInTime() {
    int64_t now = NowNs();
    if (!failed_ && !server_.failure().empty()) {
      failed_ = true;
      kill_ns_ = std::min(kill_ns_, now + options_.exit_grace_ns);
    } else if (kill_ns_ == kNever && server_.all_left()) {
      kill_ns_ = now + options_.leave_grace_ns;
    }
    if (now < kill_ns_) return;
    children_.Signal(SIGKILL);
    kill_ns_ = now + 1000 * kMs;
  }

  const LaunchOptions& options_;
  const std::string secret_;
  SignalWatch signals_;  // before the server, whose thread must not take our signals
  ControlServer server_;
  Children children_;
  int signal_ = 0;            // that ended the run
  std::string interruption_;
  bool failed_ = false;
  int64_t kill_ns_ = kNever;  // when what is left is killed
};

}  // namespace

int LaunchLocal(const LaunchOptions& options) {
  DM_CHECK(options.world >= 1, "a run has at least one rank");
  LocalRun run(options);
  run.Start();
  run.WaitForAll();
  return run.Conclude();
}

}  // namespace disagmoe
