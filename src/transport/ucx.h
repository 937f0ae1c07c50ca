// Ranks as processes (or threads), connected through UCX: shared memory on a host, TCP or RDMA across hosts.
//
// One sleeping thread owns everything of UCX: a worker for what is sent and one for what is received (one worker
// alone is half duplex over TCP). Small messages travel at once, bounded; large ones by rendezvous, pulled by the
// receiver into a block of its pool once the receive is posted.
//
// Endpoints are made at the first message or receive of a pair, not in Connect: a rank talks to its neighbours in
// the pipeline and in its collectives only, and thousands of ranks would otherwise make millions of connections.
// The price is one connection set-up in the first step, and that the death of a peer with which nothing was ever
// exchanged is not noticed here (the control channel notices).
//
// Order: make all transports; exchange address() blobs; Connect(all of them, in rank order). Create after fork.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace disagmoe {

struct UcxOptions {
  int rank = 0;
  int size = 1;
  uint64_t token = 0;       // of the run, random: messages that carry another are dropped
  std::string tls = "posix,cma,tcp,self";  // empty: what UCX (or its environment) chooses
  std::string net_devices;  // "eth0,eth1"; empty: what UCX chooses. Name one where TCP has several.
  size_t eager_bytes = 8192;                  // up to here a message travels before its receive is posted
  size_t max_unexpected_bytes = 256u << 20;   // of such messages, held for receives not yet posted; more is an error
  int64_t close_timeout_ns = 5'000'000'000;   // the destructor gives outstanding sends so long
  // Called once a peer, from the transport's thread: must not block. Not called after Leave, Abort, or for peers
  // that closed in an orderly way.
  std::function<void(int rank, const std::string& reason)> on_peer_lost;
};

class UcxTransport : public Transport {
 public:
  explicit UcxTransport(UcxOptions options);
  // Flushes outstanding sends, tells the peers that it leaves, closes. Bounded by the close time-out and 2 s more.
  ~UcxTransport() override;

  std::string address() const;
  void Connect(const std::vector<std::string>& addresses);  // once; nothing may be posted before
  // The run is over for this rank: losses of peers are no longer reported. Sends and receives still work.
  void Leave();

  int rank() const override;
  int size() const override;
  RequestPtr PostSend(int dst, const MessageKey& key, Buffer buffer) override;
  RequestPtr PostSendStamped(int dst, const MessageKey& key, Buffer buffer, const SendStamps& stamps) override;
  RequestPtr PostRecv(int src, const MessageKey& key) override;
  void Abort(const std::string& reason) override;
  const TransportCounters& counters() const override;
  Buffer Allocate(size_t size) override;

 private:
  class Engine;
  std::unique_ptr<Engine> engine_;
};

// Whether this build has UCX; without, the constructor of UcxTransport throws an Error that says so.
bool UcxAvailable();

// Puts the settings UCX needs into this process's environment (those already there are kept). UcxTransport's
// constructor calls it, so a rank is right anyway; a launcher calls it before it starts ranks, because one setting
// counts when the library loads (0.4 s a process). Before there are threads that read the environment.
void SetUcxEnvironment();

}  // namespace disagmoe
