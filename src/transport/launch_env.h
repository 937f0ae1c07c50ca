// Which rank this process is, when torchrun, SLURM, OpenMPI or our own launcher started it.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace disagmoe {

using GetEnvFunction = std::function<const char*(const char*)>;

struct RankEnv {
  bool present = false;        // else: nobody started ranks; start them here (LaunchLocal)
  std::string source;          // "launcher" (our own), "torchrun", "OpenMPI", "SLURM"
  int rank = 0, world = 1;
  int local_rank = 0, local_world = 1;  // on this host
  std::string master_addr = "127.0.0.1";
  int master_port = 29500;
  int port_span = 1;           // the control server is on one of so many ports from control_port
  int control_port = 29500;
  bool agent_store = false;    // torchrun's agent listens on MASTER_PORT itself
  bool one_host() const { return world == local_world; }
};

// Reads, in this order (inner launchers first: torchrun may run under srun, mpirun inside of an sbatch):
//   RANK WORLD_SIZE [LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_USE_AGENT_STORE]
//   OMPI_COMM_WORLD_RANK/SIZE [_LOCAL_RANK/_LOCAL_SIZE] [MASTER_ADDR MASTER_PORT]
//   SLURM_PROCID SLURM_NTASKS [SLURM_LOCALID SLURM_JOB_NODELIST ...] [MASTER_ADDR MASTER_PORT]
// SLURM counts only for a job step of several tasks: a batch script that was not started by srun has no ranks.
// A malformed or contradictory value throws Error that names the variable.
//
// The control server is on MASTER_PORT. Where the agent has that (agent_store) it is on the first free one of the 16
// ports after it; where no port was given, of the 16 from 29500 (SLURM: a block that depends on the job id). Ranks try
// them in turn: only the right server knows the secret.
RankEnv DetectRanks(const GetEnvFunction& get_env);

// DISAGMOE_SECRET, or an Error that says how to make one.
std::string SecretFromEnv(const GetEnvFunction& get_env);

// Where ranks connect to: loopback when all are on one host; else `listen` (transport.listen) if it is one address
// that others reach, else MASTER_ADDR.
std::string ControlHost(const RankEnv& env, const std::string& listen);

// Where rank 0 listens: loopback when all are on one host; else `listen`, which must not be loopback (Error).
std::string ListenHost(const RankEnv& env, const std::string& listen);

bool IsLoopback(const std::string& host);

// The hosts of a SLURM list such as "node[01-03,7],gpu-b". Throws Error.
std::vector<std::string> ExpandHostList(const std::string& list);

}  // namespace disagmoe
