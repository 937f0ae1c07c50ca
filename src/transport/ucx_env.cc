// Apart from ucx.cc, so that a launcher that only starts ranks does not load UCX.
#include <cstdlib>

#include "transport/ucx.h"

namespace disagmoe {

void SetUcxEnvironment() {
  // Else UCX 1.22 patches eight functions when it loads, with a pause of 50 ms each. Revisit for GPU memory.
  setenv("UCX_MEM_EVENTS", "n", 0);
  setenv("UCX_WARN_UNUSED_ENV_VARS", "n", 0);
}

}  // namespace disagmoe
