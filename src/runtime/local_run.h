// All ranks of a run as threads of this process, over the in-process transport.
#pragma once

#include "runtime/trainer.h"

namespace disagmoe {

// `base` is each rank's context, less what differs by rank. Returns rank 0's result. The first failure of any rank
// ends all and is thrown.
RunResult RunThreads(const RunConfig& config, const RankContext& base);

// Wraps the transport in an emulated NIC if the configuration asks for one.
std::unique_ptr<Transport> Paced(std::unique_ptr<Transport> transport, const TransportConfig& config);

}  // namespace disagmoe
