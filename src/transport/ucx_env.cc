// Apart from ucx.cc, so that a launcher that only starts ranks does not load UCX.
#include <cstdlib>

#include "transport/ucx.h"

namespace disagmoe {

void SetUcxEnvironment() {
  // Measured with 1.13 and 1.22 on shared memory and TCP. Not ucp_config_modify: with 1.13 it does not reach
  // the settings of a single transport.
  constexpr const char* kSettings[][2] = {
      // Else UCX 1.22 patches eight functions when it loads, with a pause of 50 ms each. Revisit for GPU memory.
      {"UCX_MEM_EVENTS", "n"},
      {"UCX_WARN_UNUSED_ENV_VARS", "n"},     // not every version and build knows all of these
      {"UCX_POSIX_ERROR_HANDLING", "y"},     // shared memory is refused in PEER mode otherwise
      {"UCX_CMA_MEMORY_INVALIDATE", "y"},    // single-copy reads are dropped in PEER mode otherwise (10x slower)
      {"UCX_KEEPALIVE_INTERVAL", "300ms"},   // a death on shared memory is found within twice this; default 20 s
      {"UCX_TCP_TX_SEG_SIZE", "256K"},       // 1.22 moves TCP rendezvous in such pieces; default 8K is 2-3x slower
      {"UCX_TCP_RX_SEG_SIZE", "256K"},       // not below the former, or workers cannot be made
      {"UCX_TCP_USER_TIMEOUT", "5s"},        // (since 1.22) a cut link is noticed by the sender too
  };
  for (const auto& [name, value] : kSettings) setenv(name, value, 0);
}

}  // namespace disagmoe
