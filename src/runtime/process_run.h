// One rank of a run as a process: joins the others, trains, and ends together with them.
#pragma once

#include "runtime/trainer.h"

namespace disagmoe {

// Trains as the rank that the environment names (our launcher, torchrun, SLURM, OpenMPI; see launch_env.h). Returns the
// exit code: 0, or ExitCode() of the failure that ended the run. Failures are told to the control server; the reason is
// printed once, by the launcher, or by rank 0 where others launched.
int RunProcess(const RunConfig& config, bool json);

}  // namespace disagmoe
