// The system calls of the launcher: child processes that cannot outlive this one, and signals as a descriptor.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

namespace disagmoe {

// While it lives, SIGCHLD, SIGINT, SIGTERM and SIGHUP (but for those that are ignored, as under nohup) are blocked and
// can be read here. Threads started meanwhile inherit that.
class SignalWatch {
 public:
  SignalWatch();
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;
  int fd() const { return fd_; }
  int Take();  // the next pending signal, or 0
  const sigset_t& old_mask() const { return old_mask_; }

 private:
  int fd_;
  sigset_t old_mask_;
  struct sigaction old_child_;
};

// This process's environment with `set` in place of what had these names, `defaults` where there was nothing, and
// without `unset`.
std::vector<std::string> EnvironmentWith(const std::vector<std::pair<std::string, std::string>>& set,
                                         const std::vector<std::pair<std::string, std::string>>& defaults,
                                         const std::vector<std::string>& unset);

struct ExitedChild {
  int index;
  std::string how;  // "killed by signal 9", "exit code 2"
  bool clean;       // exit code 0
};

// What is left of it is killed and reaped by the destructor.
class Children {
 public:
  explicit Children(const sigset_t& mask) : mask_(mask) {}
  ~Children();
  // Throws Error if the program cannot be started. output: a new file for what it writes to stdout and stderr; empty: it
  // has ours.
  void Start(const std::string& program, const std::vector<std::string>& arguments,
             const std::vector<std::string>& environment, const std::string& output = "");
  // Those that have ended since the last call. Never waits.
  std::vector<ExitedChild> Reap();
  void Signal(int signal);
  int running() const;

 private:
  sigset_t mask_;
  std::vector<pid_t> pids_;  // by index; 0: reaped
};

}  // namespace disagmoe
