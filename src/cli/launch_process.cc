#include "cli/launch_process.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/error.h"

namespace disagmoe {
namespace {

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& s : strings) pointers.push_back(s.data());
  pointers.push_back(nullptr);
  return pointers;
}

// In the child of fork(), where other threads' locks may be held for ever: system calls only.
[[noreturn]] void BecomeProgram(const char* program, char* const* argv, char* const* envp, const sigset_t& mask,
                                pid_t parent, int report, int output) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);  // the parent died before the line above
  struct sigaction ignore = {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGINT, &ignore, nullptr);
  sigaction(SIGHUP, &ignore, nullptr);
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  int null = open("/dev/null", O_RDONLY);
  if (null >= 0) {
    dup2(null, 0);
    if (null > 0) close(null);
  }
  if (output >= 0) {
    dup2(output, 1);
    dup2(output, 2);
  }
  execve(program, argv, envp);
  int error = errno;
  [[maybe_unused]] ssize_t n = write(report, &error, sizeof error);
  _exit(127);
}

bool HasName(const std::string& variable, const std::string& name) {
  return variable.size() > name.size() && variable[name.size()] == '=' && variable.compare(0, name.size(), name) == 0;
}

}  // namespace

SignalWatch::SignalWatch() {
  sigset_t watched;
  sigemptyset(&watched);
  sigaddset(&watched, SIGCHLD);
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction now = {};
    sigaction(signal, nullptr, &now);
    if (now.sa_handler != SIG_IGN) sigaddset(&watched, signal);
  }
  // Where SIGCHLD is ignored, the system reaps children itself and forgets how they ended.
  struct sigaction normal = {};
  normal.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &normal, &old_child_);
  pthread_sigmask(SIG_BLOCK, &watched, &old_mask_);
  fd_ = signalfd(-1, &watched, SFD_NONBLOCK | SFD_CLOEXEC);
  if (fd_ < 0) {
    int error = errno;
    pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
    sigaction(SIGCHLD, &old_child_, nullptr);
    throw Error(std::string("cannot watch signals: ") + strerror(error));
  }
}

SignalWatch::~SignalWatch() {
  while (Take() != 0) {
  }
  close(fd_);
  pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
  sigaction(SIGCHLD, &old_child_, nullptr);
}

int SignalWatch::Take() {
  signalfd_siginfo info;
  return read(fd_, &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
}

std::vector<std::string> EnvironmentWith(const std::vector<std::pair<std::string, std::string>>& set,
                                         const std::vector<std::pair<std::string, std::string>>& defaults,
                                         const std::vector<std::string>& unset) {
  std::vector<std::string> result;
  for (char** variable = environ; variable && *variable; ++variable) {
    std::string text = *variable;
    auto named = [&](const auto& pair) { return HasName(text, pair.first); };
    bool replaced = std::any_of(set.begin(), set.end(), named);
    bool removed = std::any_of(unset.begin(), unset.end(), [&](const std::string& name) { return HasName(text, name); });
    if (!replaced && !removed) result.push_back(text);
  }
  for (const auto& [name, value] : set) result.push_back(name + "=" + value);
  for (const auto& [name, value] : defaults) {
    bool there = std::any_of(result.begin(), result.end(), [&n = name](const std::string& v) { return HasName(v, n); });
    if (!there) result.push_back(name + "=" + value);
  }
  return result;
}

void Children::Start(const std::string& program, const std::vector<std::string>& arguments,
                     const std::vector<std::string>& environment, const std::string& output) {
  std::vector<std::string> words = {program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<std::string> variables = environment;
  std::vector<char*> argv = Pointers(words), envp = Pointers(variables);
  const int file = output.empty() ? -1 : open(output.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0600);
  if (!output.empty() && file < 0) throw Error({"cannot write", output, strerror(errno), "", ""});
  int report[2];
  if (pipe2(report, O_CLOEXEC) != 0) throw Error(std::string("cannot start a process: ") + strerror(errno));
  pid_t parent = getpid();
  pid_t pid = fork();
  if (pid == 0) BecomeProgram(program.c_str(), argv.data(), envp.data(), mask_, parent, report[1], file);
  int error = pid < 0 ? errno : 0;
  close(report[1]);
  if (file >= 0) close(file);
  // The pipe closes when the program starts.
  if (pid > 0) {
    pids_.push_back(pid);
    while (read(report[0], &error, sizeof error) < 0 && errno == EINTR) {
    }
  }
  close(report[0]);
  if (error != 0) throw Error({"cannot start the process of a rank", program, strerror(error), "", ""});
}

std::vector<ExitedChild> Children::Reap() {
  std::vector<ExitedChild> exited;
  for (size_t i = 0; i < pids_.size(); ++i) {
    int status = 0;
    if (pids_[i] == 0 || waitpid(pids_[i], &status, WNOHANG) != pids_[i]) continue;
    pids_[i] = 0;
    bool signalled = WIFSIGNALED(status);
    std::string how = signalled ? "killed by signal " + std::to_string(WTERMSIG(status))
                                : "exit code " + std::to_string(WEXITSTATUS(status));
    exited.push_back({static_cast<int>(i), how, !signalled && WEXITSTATUS(status) == 0});
  }
  return exited;
}

void Children::Signal(int signal) {
  for (pid_t pid : pids_) {
    if (pid > 0) kill(pid, signal);  // not reaped yet, so the number is still its own
  }
}

int Children::running() const {
  return static_cast<int>(std::count_if(pids_.begin(), pids_.end(), [](pid_t pid) { return pid > 0; }));
}

Children::~Children() {
  Signal(SIGKILL);
  for (int i = 0; i < 1000 && running() > 0; ++i) {
    Reap();
    if (running() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace disagmoe
