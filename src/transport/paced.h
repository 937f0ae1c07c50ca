// An emulated NIC around any transport: bandwidth per direction (full duplex) and latency.
//
// The model (the simulator's): a transfer holds the sender's send side for bytes / its bandwidth, from `start`, and
// the receiver's receive side for bytes / its bandwidth, cut-through: from the same start, or from when that side is
// free. It ends after the later of both, plus the latency. Several ready at one side: backward messages first, then
// by time ready. A send is done when its send side is free again; a receive at the end of the transfer.
//
// All ranks must be paced (start times travel with the messages), on one host (one clock). Times are those of the
// model as long as the wire below is faster; a message never ends before it is really there. Post receives early: a
// message whose receive is posted late takes its place on the receive side only then, as if it had been waiting.
#pragma once

#include <memory>

#include "transport/transport.h"

namespace disagmoe {

struct PacedOptions {
  double send_bytes_per_s = 0;  // 0: unlimited
  double recv_bytes_per_s = 0;
  int64_t latency_ns = 0;
  int64_t close_timeout_ns = 5'000'000'000;  // the destructor gives queued sends so long
};

std::unique_ptr<Transport> MakePaced(std::unique_ptr<Transport> inner, const PacedOptions& options);

}  // namespace disagmoe
