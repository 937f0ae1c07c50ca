// Helpers of this folder's tests.
#pragma once

#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"

namespace disagmoe {

class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::string& parent = testing::TempDir()) : path_(parent + "/disagmoe-io-XXXXXX") {
    if (!mkdtemp(path_.data())) throw Error("mkdtemp failed in " + parent);
  }
  ~TemporaryFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// A folder in memory where there is one: for tests with thousands of syncs.
inline std::string FastFolder() { return access("/dev/shm", W_OK) == 0 ? "/dev/shm" : testing::TempDir(); }

inline std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void WriteAll(const std::string& path, const std::string& text) {
  std::remove(path.c_str());  // ext4 writes a truncated and rewritten file to the disk at once
  std::ofstream out(path, std::ios::binary);
  out << text;
  EXPECT_TRUE(out.good()) << path;
}

inline std::vector<std::string> ListFolder(const std::string& path) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

// The line of the Error that f throws; "" if it throws nothing. Anything else passes on and fails the test.
template <typename F>
std::string ErrorOf(F f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

// An integer or float as little-endian bytes.
template <typename T>
std::string Bytes(T value) {
  std::string text(sizeof(T), '\0');
  std::memcpy(text.data(), &value, sizeof(T));
  return text;
}

// Puts a file system of this size at `path`, seen by this process alone. False where that is not permitted.
inline bool MountTinyDisk(const std::string& path, const std::string& size) {
  return geteuid() == 0 && unshare(CLONE_NEWNS) == 0 &&
         mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("tmpfs", path.c_str(), "tmpfs", 0, ("size=" + size).c_str()) == 0;
}

// Calls work() in a child process; what it throws is printed and ends the child with 1.
template <typename F>
void WorkInChild(F work) {
  try {
    work();
  } catch (const std::exception& e) {
    [[maybe_unused]] const ssize_t written = write(2, e.what(), std::strlen(e.what()));
    _exit(1);
  }
}

// Runs work() over and over in a child process, and kills it `delay` after the first has ended. False if the child ended
// by itself.
template <typename F>
bool RunAndKill(F work, std::chrono::microseconds delay) {
  int ends[2];
  if (pipe(ends) != 0) return false;
  const pid_t child = fork();
  if (child == 0) {
    WorkInChild(work);
    close(ends[0]);
    close(ends[1]);
    while (true) WorkInChild(work);
  }
  close(ends[1]);
  char byte;
  const ssize_t ended = read(ends[0], &byte, 1);  // end of file: the child closed it, or died
  close(ends[0]);
  std::this_thread::sleep_for(delay);
  kill(child, SIGKILL);
  int status = 0;
  return ended == 0 && waitpid(child, &status, 0) == child && WIFSIGNALED(status);
}

enum class Ended { kKilled, kByItself, kFailed, kNotPermitted };

// Runs work() in a child process and kills it as it enters or leaves its n-th system call (n = 0, 1, ...).
template <typename F>
Ended KillAtSystemCall(F work, int n) {
  const pid_t child = fork();
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(2);
    raise(SIGSTOP);
    WorkInChild(work);
    _exit(0);
  }
  int status = 0;
  for (int i = 0; waitpid(child, &status, 0) == child && WIFSTOPPED(status); ++i) {
    if (i > n) kill(child, SIGKILL);
    else ptrace(PTRACE_SYSCALL, child, nullptr, nullptr);
  }
  if (WIFSIGNALED(status)) return Ended::kKilled;
  return WEXITSTATUS(status) == 0 ? Ended::kByItself : WEXITSTATUS(status) == 2 ? Ended::kNotPermitted : Ended::kFailed;
}

}  // namespace disagmoe
