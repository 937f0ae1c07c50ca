#include "schedule/schedule.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "base/error.h"
#include "schedule/ready.h"

namespace disagmoe {
namespace {

constexpr int64_t kUnit = 5040;  // ticks of a column
constexpr int64_t kUnknown = -1;

struct Timing {
  explicit Timing(const Schedule& s) : ids(s), end(ids.size(), kUnknown), next(s.groups.size()) {}
  OpIds ids;
  std::vector<int64_t> end;   // by op id of a computation; kUnknown if it never runs
  std::vector<size_t> next;   // by group: operations that ran
  int64_t total = 0;
};

int64_t Duration(const Schedule& s, const Op& op) {
  if (op.stage == s.num_stages() - 1) return 0;
  const int64_t whole = op.kind == OpKind::kBackward && !s.split_backward ? 2 * kUnit : kUnit;
  return whole / s.parts(op.stage);
}

// When a computation's inputs are there, kUnknown if not yet known. `free` is when its group is free.
int64_t StartOf(const Schedule& s, const Timing& t, const Op& op, int64_t free, int64_t transfer) {
  int64_t start = free;
  const TransferRange receives = ReceivesFor(s, op);
  for (int i = 0; i < receives.count; ++i) {
    const int64_t made = t.end[t.ids(ProducerOf(s, receives[i]))];
    if (made == kUnknown) return kUnknown;
    start = std::max(start, made + (SenderOf(s, receives[i]) == ReceiverOf(s, receives[i]) ? 0 : transfer));
  }
  if (op.kind != OpKind::kForward) {
    const int64_t made = t.end[t.ids(FormerOf(op))];
    if (made == kUnknown) return kUnknown;
    start = std::max(start, made);
  }
  return start;
}

Timing TimesOf(const Schedule& s, int64_t transfer) {
  Timing t(s);
  std::vector<int64_t> free(s.groups.size());
  std::vector<int> pending;
  for (size_t g = 0; g < s.groups.size(); ++g) pending.push_back(static_cast<int>(g));
  while (!pending.empty()) {
    const int g = pending.back();
    pending.pop_back();
    const std::vector<Op>& list = s.groups[g].compute;
    for (; t.next[g] < list.size(); ++t.next[g]) {
      const Op& op = list[t.next[g]];
      if (!IsCompute(op.kind) || !InRange(s, op)) throw Error({"cannot draw operation", s.groups[g].name, PrintOp(op), "", ""});
      const int64_t start = StartOf(s, t, op, free[g], transfer);
      if (start == kUnknown) break;
      t.end[t.ids(op)] = free[g] = start + Duration(s, op);
      t.total = std::max(t.total, free[g]);
      const TransferRange sends = SendsAfter(s, op);
      for (int i = 0; i < sends.count; ++i) pending.push_back(ReceiverOf(s, sends[i]));
    }
  }
  return t;
}

char Letter(const Op& op) {
  if (op.kind == OpKind::kWeight) return '+';
  return static_cast<char>((op.kind == OpKind::kForward ? 'a' : 'A') + op.micro_batch % 26);
}

std::string Ruler(int64_t columns) {
  std::string ruler(columns, ' ');
  for (int64_t c = 0; c < columns; c += 10) {
    const std::string number = std::to_string(c);
    if (c + static_cast<int64_t>(number.size()) <= columns) ruler.replace(c, number.size(), number);
  }
  return ruler.substr(0, ruler.find_last_not_of(' ') + 1);
}

std::string Rows(const Schedule& s, const Timing& t, int64_t columns) {
  size_t width = 4;
  for (const GroupSchedule& group : s.groups) width = std::max(width, group.name.size());
  const auto label = [&](const std::string& name) { return name + std::string(width - name.size() + 1, ' '); };
  std::string out = label("time") + Ruler(columns) + "\n";
  for (size_t g = 0; g < s.groups.size(); ++g) {
    std::string row(columns, '.');
    for (size_t k = 0; k < t.next[g]; ++k) {
      const Op& op = s.groups[g].compute[k];
      const int64_t end = t.end[t.ids(op)];
      // A column shows what runs in its middle.
      for (int64_t c = (end - Duration(s, op) + kUnit / 2 - 1) / kUnit; c * kUnit + kUnit / 2 < end; ++c) {
        if (c < columns) row[c] = Letter(op);
      }
    }
    out += label(s.groups[g].name) + row + "\n";
  }
  return out;
}

std::string Waiting(const Schedule& s, const Timing& t) {
  std::string out;
  for (size_t g = 0; g < s.groups.size(); ++g) {
    const std::vector<Op>& list = s.groups[g].compute;
    if (t.next[g] == list.size()) continue;
    const Op& op = list[t.next[g]];
    Op needed = FormerOf(op);
    const TransferRange receives = ReceivesFor(s, op);
    for (int i = receives.count - 1; i >= 0; --i) {
      const Op producer = ProducerOf(s, receives[i]);
      if (t.end[t.ids(producer)] == kUnknown) needed = producer;
    }
    out += s.groups[g].name + " stops before " + PrintOp(op) + ", which needs " + PrintOp(needed) + " of " +
           s.groups[GroupOf(s, needed)].name + "\n";
  }
  return out;
}

}  // namespace

std::string DrawGrid(const Schedule& s, double transfer_units, int max_columns) {
  const Timing t = TimesOf(s, std::llround(transfer_units * kUnit));
  const int64_t all = (t.total + kUnit - 1) / kUnit;
  const int64_t columns = max_columns > 0 ? std::min<int64_t>(all, max_columns) : all;
  char line[160];
  std::snprintf(line, sizeof line, "%s: %d layers, %d micro-batches, rounds of %d; step %g units\n", s.name.c_str(),
                s.num_layers, s.num_micro_batches, s.round, static_cast<double>(t.total) / kUnit);
  std::string out = line;
  out += "a = forward of micro-batch 0, ";
  if (s.backward) out += "A = its backward, ";
  if (s.split_backward) out += "+ = weight gradients, ";
  if (s.num_micro_batches > 26) out += "letters repeat after 26, ";
  out += ". = idle\n" + Rows(s, t, columns);
  if (columns < all) {
    std::snprintf(line, sizeof line, "(%lld of %lld columns)\n", static_cast<long long>(columns), static_cast<long long>(all));
    out += line;
  }
  return out + Waiting(s, t);
}

}  // namespace disagmoe
