// Tests of configurations: a file of the given text, read, or what is said of it.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "spec/config.h"

namespace disagmoe {

class ConfigTest : public ::testing::Test {
 protected:
  ConfigTest() : path_(::testing::TempDir() + "config_test_" + std::to_string(getpid()) + ".toml") {}
  ~ConfigTest() override { std::remove(path_.c_str()); }

  RunConfig Load(const std::string& text, const std::vector<std::string>& overrides = {}) {
    std::ofstream(path_) << text;
    return LoadConfig(path_, overrides);
  }
  // The error's line, with the file's folder left out.
  std::string Fault(const std::string& text, const std::vector<std::string>& overrides = {}) {
    try {
      Load(text, overrides);
    } catch (const Error& error) {
      std::string line = error.what();
      for (size_t at; (at = line.find(path_)) != std::string::npos;) line.replace(at, path_.size(), "run.toml");
      return line;
    }
    return "no error";
  }

  std::string path_;
};

}  // namespace disagmoe
