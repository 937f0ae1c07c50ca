// Rendezvous and the control channel: who is here, is everybody alive, and one reason when the run ends.
//
// A server (in the launcher; in rank 0 where torchrun, SLURM or OpenMPI started the ranks) and one TCP connection per
// rank. Peers prove that they know the run's secret (HMAC-SHA256 over the server's nonce and their rank, and the
// server proves it back); anybody else is dropped without an answer. The secret itself is never sent.
//
// Over the connection: joining (time-out names the ranks that are missing), all-gathers of small blobs (addresses),
// heartbeats in both directions with a line that says what the rank is doing, clock offsets, failure reports, and the
// abort that the server sends to all when one rank has failed, was lost or went silent.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace disagmoe {

struct ControlTimes {
  int64_t join_timeout_ns = 60'000'000'000;     // all ranks must have joined by then
  int64_t heartbeat_ns = 500'000'000;
  int64_t silence_ns = 5'000'000'000;           // no heartbeat for so long: the rank stopped answering
  int64_t grace_ns = 300'000'000;               // after a first failure, wait so long for its cause (a death) before aborting
};

class ControlServer {
 public:
  // Listens on host:port (port 0: any). Throws Error if it cannot.
  ControlServer(const std::string& host, int port, int world, std::string secret, ControlTimes times);
  ~ControlServer();
  int port() const;
  // The launcher saw rank's process end ("killed by signal 9", "exit code 2"). A rank that has left is not a failure.
  void ReportDeath(int rank, const std::string& how);
  // Empty while all is well; else the one message that ended the run.
  std::string failure() const;
  // All ranks have left cleanly.
  bool all_left() const;
  void Stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct ControlOptions {
  std::string host = "127.0.0.1";
  int port = 29500;
  int rank = 0;
  int world = 1;
  std::string secret;
  std::string role;  // "A-group 0 worker 1": for messages
  ControlTimes times;
};

class ControlClient {
 public:
  // Connects (retrying until the join time-out: the server may start later), proves the secret, and returns when all
  // ranks have joined. `status` is called from the client's thread: one line, what this rank does or awaits now.
  // `on_abort` is called once, from the client's thread, with the reason; it must not throw or block.
  ControlClient(ControlOptions options, std::function<std::string()> status,
                std::function<void(const std::string&)> on_abort);
  ~ControlClient();
  // One blob from every rank, in rank order. Collective: every rank calls it, in the same order of calls.
  std::vector<std::string> AllGather(const std::string& blob);
  // Reports this rank's failure; the server ends the run with it. Waits briefly for the server's verdict and returns it.
  std::string Fail(const std::string& message);
  // This rank has finished; its closing is not a failure.
  void Leave();
  // Add to this host's NowNs() to get the server's clock; 0 on the server's own host.
  int64_t clock_offset_ns() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace disagmoe
