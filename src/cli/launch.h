// Starts the ranks of a run on this host, and sees to it that they end together.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/control.h"

namespace disagmoe {

struct LaunchOptions {
  std::string program;                 // path of the executable that is a rank
  std::vector<std::string> arguments;  // without the program's name
  int world = 1;
  int threads = 1;                     // OMP_NUM_THREADS of each
  int port = 0;                        // of the control server, on loopback; 0: any
  bool json = false;                   // the reason of a failure on stdout too: {"error":{"what":...}}
  ControlTimes times;
  int64_t exit_grace_ns = 1'000'000'000;    // after a failure, or a signal to end: before what is left is killed
  int64_t leave_grace_ns = 10'000'000'000;  // after all ranks have left the run: likewise
};

// Hosts the control server, starts `world` processes with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
// MASTER_PORT, DISAGMOE_SECRET (new, of 128 bits) and DISAGMOE_LAUNCHER=1, and waits for them all to end.
//
// Ranks write to this process's stdout and stderr, read nothing, and belong to its process group: Ctrl-Z stops the
// whole run and Ctrl-C is not theirs but ours (they ignore SIGINT and SIGHUP). SIGINT, SIGTERM and SIGHUP here end the
// run, with SIGTERM to every rank; a second one kills. No rank outlives this process, even if it is killed itself.
//
// Returns 0 if all ranks left the run. Otherwise prints the one reason to stderr ("disagmoe: error: ...", and see json), returns
// ExitCode() of its kind, or 128 + the signal that ended the run. Throws Error if a process cannot be started.
// To be called by the main thread, before it has started others (they would get its signals).
int LaunchLocal(const LaunchOptions& options);

}  // namespace disagmoe
