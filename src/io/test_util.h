// Helpers of this folder's tests.
#pragma once

#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
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
  TemporaryFolder() : path_(testing::TempDir() + "disagmoe-io-XXXXXX") {
    if (!mkdtemp(path_.data())) throw Error("mkdtemp failed in " + testing::TempDir());
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

// Runs work() over and over in a child process and kills it after `delay`. False if the child ended by itself.
template <typename F>
bool RunAndKill(F work, std::chrono::microseconds delay) {
  const pid_t child = fork();
  if (child == 0) {
    try {
      while (true) work();
    } catch (const std::exception& e) {
      const ssize_t ignored = write(2, e.what(), std::strlen(e.what()));
      (void)ignored;
    }
    _exit(1);
  }
  std::this_thread::sleep_for(delay);
  kill(child, SIGKILL);
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFSIGNALED(status);
}

}  // namespace disagmoe
