#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "cli/commands.h"
#include "transport/ucx.h"

namespace disagmoe {

std::string WorkerProgram() {
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string program = (self.parent_path() / "disagmoe-worker").string();
  if (access(program.c_str(), X_OK) != 0) {
    throw Error({"cannot start the worker program", program, std::strerror(errno), {},
                 "the light core alone has none; ./run build makes both"});
  }
  return program;
}

void ExecWorker(const std::vector<std::string>& words) {
  std::string program = WorkerProgram();
  SetUcxEnvironment();
  setenv("OMP_WAIT_POLICY", "passive", 0);  // barriers that spin are slow where others compute too
  std::vector<std::string> copy = words;
  std::vector<char*> argv = {program.data()};
  for (std::string& word : copy) argv.push_back(word.data());
  argv.push_back(nullptr);
  std::fflush(stdout);
  execv(program.c_str(), argv.data());
  throw Error({"cannot start the worker program", program, std::strerror(errno), {}, {}});
}

}  // namespace disagmoe
