// Ranks as threads of one process. A message is copied once, by whoever comes second: the sender or the receiver.
// Every send waits for its receive (no eager messages), so a program that deadlocks on any wire does so here.
#pragma once

#include <memory>
#include <vector>

#include "transport/transport.h"

namespace disagmoe {

struct InprocOptions {
  int64_t close_timeout_ns = 5'000'000'000;  // the destructor gives sends so long to be received
};

// One transport a rank, in rank order. Each may be destroyed on its own; requests of others with it then fail.
std::vector<std::unique_ptr<Transport>> MakeInproc(int ranks, const InprocOptions& options = {});

}  // namespace disagmoe
