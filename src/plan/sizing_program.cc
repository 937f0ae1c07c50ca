#include "plan/sizing_program.h"

#include <algorithm>
#include <chrono>
#include <set>

#include "plan/sizing_choices.h"
#include "plan/sizing_solver.h"

namespace disagmoe {
namespace {

constexpr size_t kColumns = 2000;        // of one program
constexpr double kFullMemory = 0.95;

struct Stem {
  int replicas, p_a, p_f;
  double least;
};

// By the bound of their time, the least first; those that cannot be left out.
std::vector<Stem> Stems(const SizingChoices& c, const SizingBounds& bounds) {
  std::vector<Stem> out;
  for (int r = 1; r <= c.most_replicas; ++r) {
    for (const auto& [p_a, p_f] : c.groups) {
      const double least = bounds.Least(r, p_a, p_f);
      if (least < 1e300) out.push_back({r, p_a, p_f, least});
    }
  }
  std::stable_sort(out.begin(), out.end(), [](const Stem& a, const Stem& b) { return a.least < b.least; });
  return out;
}

// Calls visit(frame) for those that may be as fast as the best of `ties`, until it says false.
template <typename Visit>
void EachFrame(const SizingChoices& c, const SizingBounds& bounds, const std::vector<Stem>& stems,
               const SizingTies& ties, const Visit& visit) {
  for (const Stem& s : stems) {
    if (s.least > ties.ns() * (1 + kSizingTie)) return;
    const double workers = bounds.LeastWorkers(s.replicas, s.p_a, s.p_f, ties.ns());
    for (const SizingFrame& frame : c.Frames(s.replicas, s.p_a, s.p_f, workers)) {
      const auto smallest = bounds.SmallestOf(frame, ties.ns());
      if (smallest && !visit(frame, *smallest)) return;
    }
  }
}

void SayMemory(const SizingChoices& c, SizingAnswer* answer) {
  if (c.AttentionShare(answer->pools) >= kFullMemory) answer->binding += ", memory of attention";
  if (c.FfnShare(answer->pools) >= kFullMemory) answer->binding += ", memory of FFN";
}

}  // namespace

SizingColumns ColumnsOf(const SizingChoices& c, const SizingFrame& frame, SizingBounds::Smallest smallest,
                        double limit) {
  const SizingModel& model = c.model();
  const double most = limit * (1 + kSizingTie);
  const auto largest = [](const SizingModel::Lines& lines, double x) {
    double out = 0;
    for (const SizingModel::Line& line : lines) out = std::max(out, line.at(x));
    return out;
  };
  SizingColumns out{.frame = frame, .attention = {}, .ffn = {}};
  std::set<std::pair<int, int>> sizes;  // m, b
  double least_rows = 1e300;
  for (const int n : c.n) {
    if (n < smallest.n) continue;
    Pools x = frame.pools;
    x.n = n;
    if (int64_t{x.p_f} * n > frame.most_f || x.p_a * smallest.m + int64_t{x.p_f} * n > frame.most) break;
    SizingColumns::Ffn f{.n = n, .rows = model.Rows(n), .most_sequences = c.MostSequences(x), .ns = model.FfnLines(x)};
    f.nic = model.FfnNicNs(x, model.ByteNsOf(x, frame.nodes).ffn);
    if (f.nic > most || largest(f.ns, 0) > most) continue;
    bool any = false;
    for (const int b : c.sequences) {
      x.m = static_cast<int>(LargestM(c, frame, n, b));
      if (x.m < smallest.m) continue;
      x.sequences = b;
      const int m = x.m;
      if (largest(model.AttentionLines(x), f.rows) > most) continue;  // of none of this n's
      any = true;
      sizes.emplace(m, b);
    }
    if (!any) continue;
    least_rows = std::min(least_rows, f.rows);
    out.ffn.push_back(std::move(f));
  }
  for (const auto& [m, b] : sizes) {
    Pools x = frame.pools;
    x.m = m, x.sequences = b;
    SizingColumns::Attention a{m, b, model.AttentionLines(x),
                               model.AttentionNicLines(x, model.ByteNsOf(x, frame.nodes).attention)};
    if (std::max(largest(a.ns, least_rows), largest(a.nic, least_rows)) <= most) out.attention.push_back(std::move(a));
  }
  return out;
}

std::optional<SizingAnswer> SolveSizing(const SizingProgram& program, double seconds) {
  const auto start = std::chrono::steady_clock::now();
  const auto spent = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  const SizingChoices c(program);
  if (c.groups.empty() || c.sequences.empty() || c.n.empty()) return std::nullopt;
  const SizingBounds bounds(c);
  const std::vector<Stem> stems = Stems(c, bounds);
  SizingTies first(&c);
  EachFrame(c, bounds, stems, first, [&](const SizingFrame& frame, SizingBounds::Smallest smallest) {
    ScanFrame(c, frame, smallest, false, &first);
    return true;
  });
  if (first.ns() > 1e300) return std::nullopt;

  SizingAnswer count;
  count.proven = true;
  std::vector<SizingColumns> batch;
  size_t columns = 0;
  const auto solve = [&] {
    if (!batch.empty()) count.proven &= SolveColumns(c, batch, seconds - spent(), &first, &count);
    batch.clear();
    columns = 0;
    return spent() < seconds;
  };
  EachFrame(c, bounds, stems, first, [&](const SizingFrame& frame, SizingBounds::Smallest smallest) {
    SizingColumns x = ColumnsOf(c, frame, smallest, first.ns());
    if (x.attention.empty() || x.ffn.empty()) return true;
    columns += x.attention.size() + x.ffn.size();
    batch.push_back(std::move(x));
    return columns < kColumns || solve();
  });
  count.proven &= solve();

  // All that are as fast, to choose among them.
  SizingTies ties(&c);
  EachFrame(c, bounds, stems, first, [&](const SizingFrame& frame, SizingBounds::Smallest smallest) {
    ScanFrame(c, frame, smallest, true, &ties);
    return true;
  });
  std::optional<SizingAnswer> out = ties.Best();
  DM_CHECK(out.has_value(), "a sizing program that lost its answer");
  out->proven = count.proven && out->ns >= first.ns() * (1 - 1e-7);
  out->columns = count.columns, out->rows = count.rows, out->programs = count.programs, out->nodes = count.nodes;
  SayMemory(c, &*out);
  out->seconds = spent();
  return out;
}

std::optional<SizingAnswer> EnumerateSizing(const SizingProgram& program) {
  const SizingChoices c(program);
  SizingTies ties(&c);
  const int64_t all = program.gpus;
  const auto add = [&](Pools x) {
    std::vector<std::pair<int, int>> nics = c.Nics(x.mixed);
    if (x.mixed && nics[0].first > 0) nics.emplace_back(0, 0);
    for (const auto& [a, f] : nics) {
      x.node_nics_a = a, x.node_nics_f = f;
      if (c.Allowed(x)) ties.Add(x, c.model().Times(x));
    }
  };
  for (int r = 1; r <= (program.most_replicas > 0 ? program.most_replicas : all); ++r) {
    for (const auto& [p_a, p_f] : c.groups) {
      for (int m = c.m.empty() ? 1 : c.m[0]; int64_t{r} * p_a * m <= all && (c.m.empty() || m == c.m[0]); ++m) {
        for (const int n : c.n) {
          for (const int b : c.sequences) {
            for (const bool recompute : c.recompute) {
              for (const bool head : c.head) {
                for (const bool mixed : c.mixed) {
                  add({.replicas = r, .p_a = p_a, .m = m, .p_f = p_f, .n = n, .sequences = b, .recompute = recompute,
                       .head_on_attention = head, .mixed = mixed});
                }
              }
            }
          }
        }
      }
    }
  }
  std::optional<SizingAnswer> out = ties.Best();
  if (out) out->proven = true, SayMemory(c, &*out);
  return out;
}

}  // namespace disagmoe
