// Looking at a finished run: does it agree with the reference? (What does the model write: generate.h.)
#pragma once

#include <cstdint>
#include <string>

namespace disagmoe {

struct VerifyOptions {
  std::string out;      // folder of the run
  int64_t steps = 20;   // so many steps are trained again in one process
  int threads = 0;      // of the reference; 0: as a worker of the run had
  int64_t sample = 300; // tokens that a byte-level model writes; 0: none
  bool json = false;
};
// Trains the first steps again with the one-process reference on the same batches and compares with metrics.jsonl; loads
// the last checkpoint into the reference and compares the held-out loss; prints a sample. Returns 0 if all agree within
// the tolerances that are printed (fp32: 1e-5 relative for losses, 1e-4 for the auxiliary
// loss and gradient norms; bf16: 2e-2, 2e-1 and 5e-2), else 1.
int Verify(const VerifyOptions& options);

}  // namespace disagmoe
