// A rank for launch_test.cc: `launch_test_rank short|default MODE_OF_RANK_0 MODE_OF_RANK_1 ...`.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cli/launch_test_times.h"
#include "transport/control.h"
#include "transport/launch_env.h"

namespace disagmoe {
namespace {

void SleepMs(int ms) { usleep(ms * 1000); }

const char* StatusOf(const std::string& mode) {
  return mode == "wait" || mode == "stubborn" ? "awaiting activations of layer 3 micro-batch 2 from rank 1"
                                              : "in forward of experts layer 3 micro-batch 2 step 7";
}

void BeforeJoining(const std::string& mode, ControlOptions* options) {
  if (mode == "early") _exit(4);
  if (mode == "never") SleepMs(30'000);
  if (mode == "secret") options->secret = "not the secret of this run";
  if (mode == "environment") {
    for (const char* name : {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "DISAGMOE_LAUNCHER", "OMP_NUM_THREADS", "OMP_WAIT_POLICY",
                             "UCX_MEM_EVENTS", "UCX_WARN_UNUSED_ENV_VARS", "MASTER_ADDR"}) {
      std::fprintf(stderr, "%s=%s ", name, std::getenv(name));
    }
    std::fprintf(stderr, "secret of %zu, stdin %zd\n", options->secret.size(), read(0, options, 1));
  }
}

int AfterJoining(const std::string& mode, ControlClient& client) {
  if (mode == "fail") return client.Fail("value out of range (train.lr): got -1"), 2;
  if (mode == "internal") return client.Fail("internal error: x > 0 does not hold", FailureKind::kInternal), 3;
  if (mode == "lost") client.Fail("lost rank 1: connection reset", FailureKind::kPeerLost);
  if (mode == "ok" || mode == "environment") SleepMs(mode == "ok" ? 50 : 0);
  if (mode == "long") SleepMs(1500);
  SleepMs(150);  // for a heartbeat with a status
  if (mode == "kill") raise(SIGKILL);
  if (mode == "stop") raise(SIGSTOP);
  if (mode == "exit0") _exit(0);
  if (mode == "exit7") _exit(7);
  if (mode == "stubborn" || mode == "tidy") signal(SIGTERM, SIG_IGN);
  if (mode == "stubborn" || mode == "deaf") SleepMs(30'000);
  for (int i = 0; mode == "tidy" && i < 1500 && client.abort_reason().empty(); ++i) SleepMs(10);
  if (mode == "tidy") return std::fputs("tidied up\n", stderr), 1;
  for (int i = 0; mode == "wait" && i < 1500; ++i) {
    if (!client.abort_reason().empty()) return ExitCode(client.abort_kind());
    SleepMs(10);
  }
  client.AllGather("x");
  client.Leave();
  if (mode == "hang") SleepMs(30'000);
  return 0;
}

int Run(int argc, char** argv) {
  RankEnv env = DetectRanks([](const char* name) { return std::getenv(name); });
  if (!env.present || argc != env.world + 2) return 99;
  std::string mode = argv[2 + env.rank];
  ControlOptions options;
  options.port = env.control_port;
  options.rank = env.rank;
  options.world = env.world;
  options.secret = SecretFromEnv([](const char* name) { return std::getenv(name); });
  options.role = env.rank == 1 ? "F-group 0 worker 0" : "A-group 0 worker " + std::to_string(env.rank / 2);
  options.times = LaunchTestTimes(argv[1]);
  BeforeJoining(mode, &options);
  ControlClient client(options, [&mode] { return StatusOf(mode); }, [](const std::string&) {});
  if (mode == "throw") {
    SleepMs(150);
    throw std::runtime_error("an exception that nobody catches");
  }
  return AfterJoining(mode, client);
}

}  // namespace
}  // namespace disagmoe

int main(int argc, char** argv) {
  // Not a catch-all: "throw" is to end the process.
  try {
    return disagmoe::Run(argc, argv);
  } catch (const disagmoe::RunAborted& e) {
    return ExitCode(e.kind());
  } catch (const disagmoe::Error& e) {
    std::fprintf(stderr, "disagmoe: error: %s\n", e.what());
    return 2;
  }
}
