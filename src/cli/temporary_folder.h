// A folder that is gone, with its contents, when its owner ends.
#pragma once

#include <stdlib.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>

#include "base/error.h"

namespace disagmoe {

class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::string& name) {
    std::string pattern = (std::filesystem::temp_directory_path() / (name + "-XXXXXX")).string();
    if (mkdtemp(pattern.data()) == nullptr) {
      throw Error({"cannot make a temporary folder", pattern, std::strerror(errno), {}, "TMPDIR names another place"});
    }
    path = pattern;
  }
  ~TemporaryFolder() {
    std::error_code error;
    // A process that is being killed may still have written.
    for (int i = 0; i < 3; ++i) {
      std::filesystem::remove_all(path, error);
      if (!error) return;
    }
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string path;
};

}  // namespace disagmoe
