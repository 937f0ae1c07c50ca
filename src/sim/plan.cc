#include "sim/plan.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"
#include "schedule/ready.h"

namespace disagmoe {
namespace {

constexpr int32_t kNone = -1;

class Planner {
 public:
  explicit Planner(const Schedule& s)
      : s_(s),
        boundaries_(s.num_stages() - 1),
        parts_(s.max_parts()),
        by_op_(2 * boundaries_ * s.num_micro_batches * parts_, kNone),
        done_((boundaries_ + 1) * s.num_micro_batches * parts_) {}

  Plan Run() {
    FindLinks();
    Number();
    Connect();
    SortTurns();
    return std::move(plan_);
  }

 private:
  size_t AtBoundary(const Op& transfer) const {
    const size_t row = (IsBackward(transfer.kind) ? boundaries_ : 0) + transfer.stage;
    return (row * s_.num_micro_batches + transfer.micro_batch) * parts_ + transfer.part;
  }
  size_t LinkPlace(const Op& transfer) const {
    const size_t row = (IsBackward(transfer.kind) ? boundaries_ : 0) + transfer.stage;
    return (row * s_.num_routes + s_.route(transfer.micro_batch)) * parts_ + transfer.part;
  }
  void FindLinks();
  void Number();
  void Connect();
  void SortTurns();
  bool InOrder(const Op& op);

  const Schedule& s_;
  const size_t boundaries_;
  const size_t parts_;
  Plan plan_;
  std::vector<int32_t> by_op_;  // message of a transfer
  std::vector<int32_t> links_;  // link of a transfer, by direction, boundary, route, part
  std::vector<char> done_;      // by stage, micro-batch, part: 1 after F, 2 after B
};

// A route's links are those of one of its micro-batches.
void Planner::FindLinks() {
  links_.assign(2 * boundaries_ * s_.num_routes * parts_, kNone);
  std::vector<int> first(s_.num_routes, kNone);
  for (int b = s_.num_micro_batches - 1; b >= 0; --b) first[s_.route(b)] = b;
  for (OpKind kind : {OpKind::kSendForward, OpKind::kSendBackward}) {
    for (int b : first) {
      for (int i = 0; b != kNone && i < static_cast<int>(boundaries_); ++i) {
        for (int part = 0; part < s_.boundary_parts(i); ++part) {
          const Op send{kind, i, b, part};
          links_[LinkPlace(send)] = LinkOf(s_, send);
        }
      }
    }
  }
}

void Planner::Number() {
  size_t positions = 0;
  for (const GroupSchedule& group : s_.groups) positions += group.compute.size();
  DM_CHECK(positions * parts_ < std::numeric_limits<int32_t>::max(), "too many operations");
  plan_.ops.reserve(positions);
  plan_.send_begin.reserve(positions + 1);
  plan_.messages.reserve(positions);
  for (const GroupSchedule& group : s_.groups) {
    plan_.group_begin.push_back(static_cast<int32_t>(plan_.ops.size()));
    for (const Op& op : group.compute) {
      plan_.ops.push_back(op);
      plan_.send_begin.push_back(static_cast<int32_t>(plan_.messages.size()));
      const TransferRange sends = SendsAfter(s_, op);
      for (int i = 0; i < sends.count; ++i) {
        const Op send = sends[i];
        int32_t& at = by_op_[AtBoundary(send)];
        DM_CHECK(at == kNone, "twice: " + PrintOp(send));
        at = static_cast<int32_t>(plan_.messages.size());
        plan_.messages.push_back({send, links_[LinkPlace(send)], 0, kNone});
      }
    }
  }
  plan_.group_begin.push_back(static_cast<int32_t>(plan_.ops.size()));
  plan_.send_begin.push_back(static_cast<int32_t>(plan_.messages.size()));
}

// Whether what an operation needs of its own group comes before it.
bool Planner::InOrder(const Op& op) {
  char& done = done_[(static_cast<size_t>(op.stage) * s_.num_micro_batches + op.micro_batch) * parts_ + op.part];
  const char before = op.kind == OpKind::kForward ? 0 : op.kind == OpKind::kBackward ? 1 : 2;
  if (done < before) return false;
  done = static_cast<char>(before + 1);
  return true;
}

void Planner::Connect() {
  std::vector<int32_t> turn(s_.links.size());
  plan_.receive_begin.reserve(plan_.ops.size() + 1);
  plan_.receives.reserve(plan_.messages.size());
  for (size_t g = 0; g < s_.groups.size(); ++g) {
    int32_t impossible = plan_.group_begin[g + 1];
    for (int32_t p = plan_.group_begin[g]; p < plan_.group_begin[g + 1]; ++p) {
      if (!InOrder(plan_.ops[p])) impossible = std::min(impossible, p);
      plan_.receive_begin.push_back(static_cast<int32_t>(plan_.receives.size()));
      const TransferRange receives = ReceivesFor(s_, plan_.ops[p]);
      for (int i = 0; i < receives.count; ++i) {
        const int32_t m = by_op_[AtBoundary(receives[i])];
        DM_CHECK(m != kNone, "nobody sends " + PrintOp(receives[i]));
        PlanMessage& message = plan_.messages[m];
        DM_CHECK(message.link != kNone, "no link for " + PrintOp(message.send));
        message.user = p;
        message.turn = turn[message.link]++;
        plan_.receives.push_back(m);
      }
    }
    plan_.impossible.push_back(impossible);
  }
  plan_.receive_begin.push_back(static_cast<int32_t>(plan_.receives.size()));
  plan_.link_begin.assign(1, 0);
  for (int32_t count : turn) plan_.link_begin.push_back(plan_.link_begin.back() + count);
}

void Planner::SortTurns() {
  plan_.turns.resize(plan_.messages.size());
  for (size_t m = 0; m < plan_.messages.size(); ++m) {
    const PlanMessage& message = plan_.messages[m];
    DM_CHECK(message.user != kNone, "nobody uses " + PrintOp(message.send));
    plan_.turns[plan_.link_begin[message.link] + message.turn] = static_cast<int32_t>(m);
  }
}

}  // namespace

Plan MakePlan(const Schedule& schedule) { return Planner(schedule).Run(); }

}  // namespace disagmoe
