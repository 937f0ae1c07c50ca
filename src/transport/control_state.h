// What the control server knows of the run, and which failure is the one that is told. No sockets, no threads, no
// clock of its own: times come in as arguments.
//
// The first failure starts a wait of grace_ns; in it a failure that is nearer to the cause takes its place:
//   killed by a signal > a rank's own report, an exit, a fault of the rendezvous > silent, connection lost > lost a peer
// and the earlier one among equals. Then the reason is fixed, with what each rank was doing by then.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "transport/control.h"

namespace disagmoe::control {

class RunState {
 public:
  RunState(int world, const ControlTimes& times, int64_t now);

  // What happened. `from` says which process it is ("host 10.0.0.1 process 123"). False: this rank has joined already.
  bool Joined(int rank, const std::string& role, const std::string& from, int64_t now);
  void Heard(int rank, int64_t now) { ranks_[rank].heard_ns = now; }
  void SetStatus(int rank, const std::string& status) { ranks_[rank].status = status; }
  void Left(int rank) { ranks_[rank].left = true; }
  void Reported(int rank, FailureKind kind, const std::string& message, int64_t now);
  void ConnectionLost(int rank, const std::string& why, int64_t now);
  void Died(int rank, const std::string& how, int64_t now);
  void Misjoined(const std::string& message, int64_t now);  // the rendezvous cannot complete
  void DroppedStranger(const std::string& address);         // no proof of the secret
  // One more rank has given its blob of an all-gather; `have` says which have.
  void GatherWaits(uint32_t sequence, const std::vector<bool>& have, int64_t now);
  void GatherDone(uint32_t sequence) { gathers_.erase(sequence); }
  void Abort(const std::string& reason, FailureKind kind);  // at once
  // The server itself slept for so long: nobody is to blame for silence in that time.
  void Excuse(int64_t ns);

  // Looks for silence and time-outs; true when the reason has just been fixed.
  bool Tick(int64_t now);
  // When Tick has something to do next.
  int64_t NextDeadline() const;

  bool failed() const { return failed_; }
  bool pending() const { return first_.has_value(); }  // a failure is seen, its reason not fixed yet
  const std::string& reason() const { return reason_; }
  FailureKind kind() const { return kind_; }
  bool all_joined() const { return joined_ == static_cast<int>(ranks_.size()); }
  bool all_left() const;
  const std::string& from(int rank) const { return ranks_[rank].from; }

 private:
  struct Rank {
    bool joined = false, left = false, reported = false, lost = false, dead = false;
    std::string role, from, status;
    int64_t heard_ns = 0;
  };
  struct Gather {
    int64_t deadline_ns;
    std::vector<bool> have;
  };
  struct Failure {
    int weight;
    FailureKind kind;
    int rank;            // -1: of no rank
    std::string text;    // after the rank's name
    bool tell_status;    // add what the rank did and who waited for it
  };
  void Offer(Failure failure, int64_t now);
  void CheckSilence(int64_t now);
  void CheckGathers(int64_t now);
  void Fix(int64_t now);
  bool Watched(const Rank& r) const { return r.joined && !r.left && !r.lost && !r.dead; }
  std::string Name(int rank) const;
  std::string Waiters(int rank) const;
  std::string Missing(const std::vector<bool>& have) const;

  ControlTimes times_;
  std::vector<Rank> ranks_;
  int joined_ = 0;
  int64_t join_deadline_ns_;
  int strangers_ = 0;
  std::string last_stranger_;
  std::map<uint32_t, Gather> gathers_;
  std::optional<Failure> first_;
  int64_t decide_ns_ = std::numeric_limits<int64_t>::max();
  bool failed_ = false;
  std::string reason_;
  FailureKind kind_ = FailureKind::kUser;
};

}  // namespace disagmoe::control
