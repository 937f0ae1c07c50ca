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

#include "base/error.h"

namespace disagmoe {

enum class FailureKind : uint8_t {
  kUser = 0,      // an Error: a fault of the user or of the environment
  kInternal = 1,  // a broken invariant
  kPeerLost = 2,  // a peer was lost or did not answer: a symptom, gives way to any cause seen within grace_ns
  kDeath = 3,     // a rank (or the server) died, was lost, or stopped answering
};
// Of a process: 2 for kUser, 3 for kInternal, else 1.
inline int ExitCode(FailureKind kind) {
  return kind == FailureKind::kUser ? 2 : kind == FailureKind::kInternal ? 3 : 1;
}

// Ends a call because the server has ended the run. The server's side prints the reason; ranks need not.
class RunAborted : public Error {
 public:
  RunAborted(const std::string& reason, FailureKind kind) : Error(reason), kind_(kind) {}
  FailureKind kind() const { return kind_; }

 private:
  FailureKind kind_;
};

struct ControlTimes {
  int64_t join_timeout_ns = 60'000'000'000;     // all ranks must have joined by then
  int64_t heartbeat_ns = 500'000'000;
  int64_t silence_ns = 5'000'000'000;           // no heartbeat for so long: the rank stopped answering
  int64_t grace_ns = 300'000'000;               // after a first failure, wait so long for its cause (a death) before aborting
  int64_t gather_timeout_ns = 300'000'000'000;  // from the first to the last rank's blob of one AllGather
  int64_t proof_timeout_ns = 3'000'000'000;     // a connection that has not proved the secret by then is dropped
};

class ControlServer {
 public:
  // Listens on exactly host:port (port 0: any), or on the first free one of port_span ports from there. Throws Error
  // if it cannot.
  ControlServer(const std::string& host, int port, int world, std::string secret, ControlTimes times,
                int port_span = 1);
  ~ControlServer();
  int port() const;
  // The launcher saw rank's process end ("killed by signal 9", "exit code 2"). A rank that has left is not a failure.
  void ReportDeath(int rank, const std::string& how);
  // Ends the run at once ("interrupted by signal 2"), unless it has failed already.
  void Abort(const std::string& reason, FailureKind kind);
  // Empty while all is well; else the one message that ended the run.
  std::string failure() const;
  FailureKind failure_kind() const;
  // All ranks have left cleanly.
  bool all_left() const;
  // Sleeps until all have left (true) or the run has failed or timeout_ns is over. A server in rank 0 must outlive the
  // other ranks: closing it earlier is a failure to them.
  bool WaitAllLeft(int64_t timeout_ns);
  // Delivers a failure to the ranks that are still connected (briefly), then closes. The destructor does it too.
  void Stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct ControlOptions {
  std::string host = "127.0.0.1";
  int port = 29500;
  int port_span = 1;   // the server is on one of so many ports from `port`: the one that knows the secret
  int rank = 0;
  int world = 1;
  std::string secret;
  std::string role;     // "A-group 0 worker 1": for messages
  std::string host_id;  // for tests; "": this boot of this kernel, so that clocks of one host are known to be one
  ControlTimes times;
};

class ControlClient {
 public:
  // Connects (retrying until the join time-out: the server may start later), proves the secret, and returns when all
  // ranks have joined. Throws RunAborted if the run fails before, and Error if there is no server, it has another
  // secret, or it refuses this rank.
  // `status` is called from the client's thread: what this rank does or awaits now, to be read after "while": "in
  // forward of experts layer 3 micro-batch 2 step 7", "awaiting activations ... from rank 1" ("rank 1" is looked for).
  // `on_abort` is called once, from the client's thread, with the reason; it must not throw or block, and must not call
  // this client. It is not called when the constructor throws.
  ControlClient(ControlOptions options, std::function<std::string()> status,
                std::function<void(const std::string&)> on_abort);
  ~ControlClient();
  // One blob (at most 16 MiB) from every rank, in rank order. Collective: every rank calls it, in the same order of
  // calls. Throws RunAborted when the run fails meanwhile.
  std::vector<std::string> AllGather(const std::string& blob);
  // Reports this rank's failure; the server ends the run with it, or with its cause. Waits briefly for the server's
  // verdict and returns it. Use kPeerLost for what a transport says (peer lost, time-out of a wait).
  std::string Fail(const std::string& message, FailureKind kind = FailureKind::kUser);
  // Empty while all is well; else why the run ended, and how.
  std::string abort_reason() const;
  FailureKind abort_kind() const;
  // This rank has finished; its closing is not a failure.
  void Leave();
  // Add to this host's NowNs() to get the server's clock; 0 on the server's own host.
  int64_t clock_offset_ns() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace disagmoe
