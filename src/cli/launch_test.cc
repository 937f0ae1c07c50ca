// The launcher with real processes: launch_test_rank.cc.
#include "cli/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "base/time.h"
#include "cli/launch_test_times.h"

namespace disagmoe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Outcome {
  int code = -1;         // exit code of the launcher, 1000 + signal if killed
  std::string errors;    // what launcher and ranks wrote to stderr, and to stdout with json
  double seconds = 0;
  bool all_ended = false;  // nobody holds stderr any more
};

void SleepMs(int ms) { usleep(ms * 1000); }

LaunchOptions Options(const std::vector<std::string>& modes, const std::string& times) {
  LaunchOptions o;
  o.program = LAUNCH_TEST_RANK;
  o.arguments = {times};
  o.arguments.insert(o.arguments.end(), modes.begin(), modes.end());
  o.world = static_cast<int>(modes.size());
  o.threads = 3;
  o.times = LaunchTestTimes(times);
  o.exit_grace_ns = 400'000'000;
  o.leave_grace_ns = 400'000'000;
  return o;
}

// LaunchLocal in a process and process group of its own; `disturb` gets its process id. The pipe ends when the last
// process that writes to it has ended: launcher and ranks.
Outcome Start(const LaunchOptions& options, const std::function<void(pid_t)>& disturb = nullptr) {
  int out[2];
  EXPECT_EQ(pipe(out), 0);
  int64_t start = NowNs();
  fflush(stdout);
  pid_t pid = fork();
  if (pid == 0) {
    setpgid(0, 0);
    dup2(out[1], 2);
    if (options.json) dup2(out[1], 1);
    close(out[0]);
    close(out[1]);
    int code = 98;
    try {
      code = LaunchLocal(options);
    } catch (const Error& e) {
      fprintf(stderr, "thrown: %s\n", e.what());
      code = 97;
    }
    _exit(code);
  }
  setpgid(pid, pid);  // whoever is first
  close(out[1]);
  if (disturb) disturb(pid);
  Outcome outcome;
  for (;;) {
    pollfd p = {out[0], POLLIN, 0};
    if (poll(&p, 1, 12'000) <= 0) break;
    char chunk[4096];
    ssize_t n = read(out[0], chunk, sizeof chunk);
    outcome.all_ended = n == 0;
    if (n <= 0) break;
    outcome.errors.append(chunk, n);
  }
  close(out[0]);
  outcome.seconds = static_cast<double>(NowNs() - start) * 1e-9;
  if (!outcome.all_ended) kill(-pid, SIGKILL);
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  EXPECT_TRUE(outcome.all_ended) << "a process was left";
  return outcome;
}

Outcome Launch(const std::vector<std::string>& modes, const std::string& times = "short") {
  return Start(Options(modes, times));
}

TEST(Launch, AllWell) {
  Outcome o = Launch({"ok", "ok", "ok"});
  EXPECT_EQ(o.code, 0);
  EXPECT_EQ(o.errors, "");
}

TEST(Launch, EnvironmentOfARank) {
  setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  setenv("RANK", "17", 1);
  setenv("OMP_NUM_THREADS", "64", 1);
  unsetenv("OMP_WAIT_POLICY");
  Outcome o = Launch({"environment"});
  unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  unsetenv("RANK");
  unsetenv("OMP_NUM_THREADS");
  setenv("OMP_WAIT_POLICY", "active", 1);
  EXPECT_THAT(Launch({"environment"}).errors, HasSubstr(" OMP_WAIT_POLICY=active "));  // the user's own
  unsetenv("OMP_WAIT_POLICY");
  EXPECT_EQ(o.code, 0);
  EXPECT_EQ(o.errors,
            "LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 DISAGMOE_LAUNCHER=1 OMP_NUM_THREADS=3 OMP_WAIT_POLICY=passive UCX_MEM_EVENTS=n "
            "UCX_WARN_UNUSED_ENV_VARS=n MASTER_ADDR=127.0.0.1 secret of 32, stdin 0\n");
}

TEST(Launch, KilledRankWithDefaultTimes) {
  Outcome o = Launch({"wait", "kill", "lost"}, "default");
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(o.errors,
            "disagmoe: error: rank 1 (F-group 0 worker 0) was killed by signal 9 while in forward of experts layer 3 "
            "micro-batch 2 step 7; rank 0 (A-group 0 worker 0) was awaiting activations of layer 3 micro-batch 2 from "
            "rank 1\n");
  EXPECT_LT(o.seconds, 3);
}

TEST(Launch, StoppedRank) {
  Outcome o = Launch({"wait", "stop"});
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(o.errors,
            "disagmoe: error: rank 1 (F-group 0 worker 0) stopped answering for 1.0 s while in forward of experts layer 3 "
            "micro-batch 2 step 7; rank 0 (A-group 0 worker 0) was awaiting activations of layer 3 micro-batch 2 from "
            "rank 1\n");
  EXPECT_LT(o.seconds, 4);
}

TEST(Launch, ReportOfARank) {
  Outcome o = Launch({"wait", "fail"});
  EXPECT_EQ(o.code, 2);
  EXPECT_EQ(o.errors, "disagmoe: error: rank 1 (F-group 0 worker 0): value out of range (train.lr): got -1\n");
  o = Launch({"internal", "wait"});
  EXPECT_EQ(o.code, 3);
  EXPECT_EQ(o.errors, "disagmoe: error: rank 0 (A-group 0 worker 0): internal error: x > 0 does not hold\n");
}

TEST(Launch, ReportAsJson) {
  LaunchOptions options = Options({"wait", "fail"}, "short");
  options.json = true;
  Outcome o = Start(options);
  EXPECT_EQ(o.code, 2);
  EXPECT_EQ(o.errors,
            "disagmoe: error: rank 1 (F-group 0 worker 0): value out of range (train.lr): got -1\n"
            "{\"error\":{\"what\":\"rank 1 (F-group 0 worker 0): value out of range (train.lr): got -1\"}}\n");
}

TEST(Launch, UncaughtException) {
  Outcome o = Launch({"wait", "throw"});
  EXPECT_EQ(o.code, 1);
  EXPECT_THAT(o.errors, HasSubstr("an exception that nobody catches"));  // the C++ library's own line
  EXPECT_THAT(o.errors, HasSubstr("disagmoe: error: rank 1 (F-group 0 worker 0) was killed by signal 6 while in forward"));
}

TEST(Launch, ExitWithoutLeaving) {
  Outcome o = Launch({"wait", "exit7"});
  EXPECT_EQ(o.code, 1);
  EXPECT_THAT(o.errors, StartsWith("disagmoe: error: rank 1 (F-group 0 worker 0) ended with exit code 7 while in forward"));
  o = Launch({"exit0", "wait"});
  EXPECT_EQ(o.code, 1);
  EXPECT_THAT(o.errors, StartsWith("disagmoe: error: rank 0 (A-group 0 worker 0) ended with exit code 0 while in forward"));
}

TEST(Launch, ExitBeforeJoining) {
  Outcome o = Launch({"wait", "early"});
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(o.errors, "disagmoe: error: rank 1 ended with exit code 4 before it joined\n");
  EXPECT_LT(o.seconds, 2);
}

TEST(Launch, NeverJoins) {
  Outcome o = Launch({"wait", "never", "never", "wait"});
  EXPECT_EQ(o.code, 2);
  EXPECT_EQ(o.errors, "disagmoe: error: rendezvous timed out after 1.2 s: missing ranks 1, 2 of 4\n");
  EXPECT_LT(o.seconds, 4);
}

TEST(Launch, WrongSecret) {
  Outcome o = Launch({"wait", "secret"});
  EXPECT_NE(o.code, 0);
  EXPECT_THAT(o.errors, AllOf(HasSubstr("rank 1 was not taken by the control server (127.0.0.1:"),
                              HasSubstr("disagmoe: error: rank 1 ended with exit code 2 before it joined\n")));
}

TEST(Launch, RankThatDoesNotEndIsKilled) {
  Outcome o = Launch({"stubborn", "kill"});
  EXPECT_EQ(o.code, 1);
  EXPECT_THAT(o.errors, StartsWith("disagmoe: error: rank 1 (F-group 0 worker 0) was killed by signal 9"));
  EXPECT_LT(o.seconds, 4);
}

TEST(Launch, RankThatHangsAfterTheRunIsKilled) {
  Outcome o = Launch({"hang", "ok"});
  EXPECT_EQ(o.code, 0);
  EXPECT_EQ(o.errors, "disagmoe: warning: rank 0 ended badly after the run: killed by signal 9\n");
  EXPECT_LT(o.seconds, 4);
}

TEST(Launch, NoSuchProgram) {
  LaunchOptions options = Options({"ok", "ok"}, "short");
  options.program = "/nowhere/rank";
  Outcome o = Start(options);
  EXPECT_EQ(o.code, 97);
  EXPECT_EQ(o.errors,
            "thrown: cannot start the process of a rank (/nowhere/rank): got No such file or directory\n");
}

TEST(Launch, ControlCEndsTheRunOnce) {
  Outcome o = Start(Options({"wait", "tidy"}, "short"), [](pid_t launcher) {
    SleepMs(400);
    kill(-launcher, SIGINT);  // as the terminal does: launcher and ranks
  });
  EXPECT_EQ(o.code, 130);
  EXPECT_EQ(o.errors, "tidied up\ndisagmoe: error: interrupted by signal 2\n");
  EXPECT_LT(o.seconds, 2);
}

TEST(Launch, TerminationIsForwarded) {
  LaunchOptions options = Options({"wait", "deaf"}, "short");
  options.exit_grace_ns = 5'000'000'000;  // "deaf" heeds no abort, but SIGTERM
  Outcome o = Start(options, [](pid_t launcher) {
    SleepMs(600);
    kill(launcher, SIGTERM);
  });
  EXPECT_EQ(o.code, 143);
  EXPECT_EQ(o.errors, "disagmoe: error: interrupted by signal 15\n");
  EXPECT_LT(o.seconds, 3);
}

TEST(Launch, NoRankOutlivesAKilledLauncher) {
  Outcome o = Start(Options({"stubborn", "wait"}, "short"), [](pid_t launcher) {
    SleepMs(600);
    kill(launcher, SIGKILL);
  });
  EXPECT_EQ(o.code, 1000 + SIGKILL);
  EXPECT_EQ(o.errors, "");
  EXPECT_LT(o.seconds, 2);
}

// Ctrl-Z and fg: everybody was silent for longer than silence_ns, and nobody is to blame.
TEST(Launch, StoppedAsAWholeGoesOn) {
  Outcome o = Start(Options({"long", "long"}, "short"), [](pid_t launcher) {
    SleepMs(400);
    kill(-launcher, SIGSTOP);
    SleepMs(1400);
    kill(-launcher, SIGCONT);
  });
  EXPECT_EQ(o.code, 0);
  EXPECT_EQ(o.errors, "");
}

}  // namespace
}  // namespace disagmoe
