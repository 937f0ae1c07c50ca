#include "transport/control_state.h"

#include <algorithm>
#include <cctype>

#include "transport/control_wire.h"

namespace disagmoe::control {
namespace {

constexpr int kSignalled = 3, kOwnFault = 2, kNoAnswer = 1, kSymptom = 0;

// "rank 1" in `text`, not as the beginning of "rank 12".
bool Names(const std::string& text, int rank) {
  std::string name = "rank " + std::to_string(rank);
  for (size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + 1)) {
    size_t end = at + name.size();
    if (end == text.size() || !std::isdigit(static_cast<unsigned char>(text[end]))) return true;
  }
  return false;
}

}  // namespace

RunState::RunState(int world, const ControlTimes& times, int64_t now)
    : times_(times), ranks_(world), join_deadline_ns_(now + times.join_timeout_ns) {}

bool RunState::Joined(int rank, const std::string& role, const std::string& from, int64_t now) {
  Rank& r = ranks_[rank];
  if (r.joined) return false;
  r.joined = true;
  r.role = role;
  r.from = from;
  r.heard_ns = now;
  ++joined_;
  return true;
}

void RunState::Reported(int rank, FailureKind kind, const std::string& message, int64_t now) {
  ranks_[rank].reported = true;
  bool symptom = kind == FailureKind::kPeerLost || kind == FailureKind::kDeath;
  Offer({symptom ? kSymptom : kOwnFault, kind, rank, ": " + message, false}, now);
}

void RunState::ConnectionLost(int rank, const std::string& why, int64_t now) {
  Rank& r = ranks_[rank];
  if (r.left || r.lost) return;
  r.lost = true;
  if (!r.reported) Offer({kNoAnswer, FailureKind::kDeath, rank, " was lost (" + why + ")", true}, now);
}

void RunState::Died(int rank, const std::string& how, int64_t now) {
  Rank& r = ranks_[rank];
  if (r.left || r.dead) return;
  r.dead = true;
  if (r.reported) return;
  bool signalled = how.rfind("killed", 0) == 0;
  std::string text = (signalled ? " was " : " ended with ") + how;
  Offer({signalled ? kSignalled : kOwnFault, FailureKind::kDeath, rank, text, true}, now);
}

void RunState::Misjoined(const std::string& message, int64_t now) {
  Offer({kOwnFault, FailureKind::kUser, -1, message, false}, now);
}

void RunState::DroppedStranger(const std::string& address) {
  ++strangers_;
  last_stranger_ = address;
}

void RunState::GatherWaits(uint32_t sequence, const std::vector<bool>& have, int64_t now) {
  auto [at, is_new] = gathers_.try_emplace(sequence);
  if (is_new) at->second.deadline_ns = now + times_.gather_timeout_ns;
  at->second.have = have;
}

void RunState::Abort(const std::string& reason, FailureKind kind) {
  if (failed_) return;
  failed_ = true;
  reason_ = reason;
  kind_ = kind;
}

void RunState::Excuse(int64_t ns) {
  for (Rank& r : ranks_) r.heard_ns += ns;
}

bool RunState::all_left() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.left; });
}

void RunState::Offer(Failure failure, int64_t now) {
  if (failed_) return;
  if (!first_) decide_ns_ = now + times_.grace_ns;
  if (!first_ || failure.weight > first_->weight) first_ = std::move(failure);
}

void RunState::CheckSilence(int64_t now) {
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const Rank& r = ranks_[rank];
    if (!Watched(r) || now - r.heard_ns < times_.silence_ns) continue;
    std::string text = " stopped answering for " + Seconds(now - r.heard_ns);
    Offer({kNoAnswer, FailureKind::kDeath, static_cast<int>(rank), text, true}, now);
  }
}

void RunState::CheckGathers(int64_t now) {
  for (const auto& [sequence, gather] : gathers_) {
    std::string name = "all-gather " + std::to_string(sequence + 1) + " of the control channel";
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (gather.have[rank] || !ranks_[rank].left) continue;
      Offer({kOwnFault, FailureKind::kInternal, static_cast<int>(rank), " has left, but others wait for it in " + name,
             false}, now);
    }
    if (now >= gather.deadline_ns) {
      Offer({kOwnFault, FailureKind::kDeath, -1,
             name + " timed out after " + Seconds(times_.gather_timeout_ns) + ": missing " + Missing(gather.have), false},
            now);
    }
  }
}

bool RunState::Tick(int64_t now) {
  if (failed_) return false;
  if (!all_joined() && now >= join_deadline_ns_) {
    std::vector<bool> have;
    for (const Rank& r : ranks_) have.push_back(r.joined);
    std::string text = "rendezvous timed out after " + Seconds(times_.join_timeout_ns) + ": missing " + Missing(have);
    if (strangers_ > 0) {
      text += "; dropped " + std::to_string(strangers_) + (strangers_ == 1 ? " connection" : " connections") +
              " without the secret of this run, the last from " + last_stranger_;
    }
    Misjoined(text, now);
    join_deadline_ns_ = std::numeric_limits<int64_t>::max();
  }
  CheckSilence(now);
  CheckGathers(now);
  if (!first_ || now < decide_ns_) return false;
  Fix(now);
  return true;
}

int64_t RunState::NextDeadline() const {
  int64_t next = std::numeric_limits<int64_t>::max();
  if (failed_) return next;
  if (first_) return decide_ns_;
  if (!all_joined()) next = join_deadline_ns_;
  for (const Rank& r : ranks_) {
    if (Watched(r)) next = std::min(next, r.heard_ns + times_.silence_ns);
  }
  for (const auto& [sequence, gather] : gathers_) next = std::min(next, gather.deadline_ns);
  return next;
}

// A rank that only lost a peer did not fail itself: blame the rank that answers nothing, where there is one.
void RunState::Fix(int64_t now) {
  Failure f = *first_;
  if (f.weight == kSymptom) {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      int64_t silent = now - ranks_[rank].heard_ns;
      if (!Watched(ranks_[rank]) || silent < 4 * times_.heartbeat_ns) continue;
      f = {kNoAnswer, FailureKind::kDeath, static_cast<int>(rank), " stopped answering for " + Seconds(silent), true};
      break;
    }
  }
  std::string reason = f.rank < 0 ? f.text : Name(f.rank) + f.text;
  if (f.tell_status) {
    const Rank& r = ranks_[f.rank];
    if (!r.joined) {
      reason += " before it joined";
    } else if (!all_joined()) {
      reason += " before all ranks had joined";
    } else if (!r.status.empty()) {
      reason += " while " + r.status;
    }
    if (all_joined()) reason += Waiters(f.rank);
  }
  Abort(OneLine(reason, kMaxText - 8), f.kind);
}

std::string RunState::Name(int rank) const {
  const std::string& role = ranks_[rank].role;
  return "rank " + std::to_string(rank) + (role.empty() ? "" : " (" + role + ")");
}

std::string RunState::Waiters(int rank) const {
  std::string text;
  int told = 0, more = 0;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (static_cast<int>(i) == rank || !Watched(ranks_[i]) || !Names(ranks_[i].status, rank)) continue;
    if (++told > 2) {
      ++more;
      continue;
    }
    text += "; " + Name(static_cast<int>(i)) + " was " + ranks_[i].status;
  }
  if (more > 0) text += "; and " + std::to_string(more) + " more waited for it";
  return text;
}

// Which have not come, and why, as far as known.
std::string RunState::Missing(const std::vector<bool>& have) const {
  std::vector<int> missing;
  for (size_t rank = 0; rank < have.size(); ++rank) {
    if (!have[rank]) missing.push_back(static_cast<int>(rank));
  }
  std::string text = (missing.size() == 1 ? "rank " : "ranks ") + RankRanges(missing) + " of " + std::to_string(have.size());
  if (!missing.empty() && !ranks_[missing[0]].status.empty()) {
    text += "; " + Name(missing[0]) + " is " + ranks_[missing[0]].status;
  }
  return text;
}

}  // namespace disagmoe::control
