// The sizing program as a mixed-integer program (docs/decisions/0009-sizing-program.md), solved by HiGHS. Of the
// library only the C interface; it is opened when it is needed.
#include <dlfcn.h>
#include <interfaces/highs_c_api.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>

#include "base/error.h"
#include "plan/sizing_solver.h"

namespace disagmoe {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr double kSmall = 1e-12;
constexpr double kAgree = 1e-6;  // between the program's objective and the time of the pools that it chose

class Highs {
 public:
  Highs() : library_(dlopen(DISAGMOE_HIGHS_LIBRARY, RTLD_NOW | RTLD_LOCAL)) {
    if (!library_) {
      const char* why = dlerror();
      throw Error({"HiGHS does not load", DISAGMOE_HIGHS_LIBRARY, why ? why : "",
                   "the library that this was built with", "build again"});
    }
    Find("Highs_create", &create);
    Find("Highs_destroy", &destroy);
    Find("Highs_setBoolOptionValue", &set_bool);
    Find("Highs_setIntOptionValue", &set_int);
    Find("Highs_setDoubleOptionValue", &set_double);
    Find("Highs_passMip", &pass);
    Find("Highs_run", &run);
    Find("Highs_getModelStatus", &status);
    Find("Highs_getSolution", &solution);
    Find("Highs_getObjectiveValue", &objective);
    Find("Highs_getInt64InfoValue", &info);
  }
  Highs(const Highs&) = delete;
  Highs& operator=(const Highs&) = delete;  // stays open: it may have threads of its own

  decltype(&Highs_create) create;
  decltype(&Highs_destroy) destroy;
  decltype(&Highs_setBoolOptionValue) set_bool;
  decltype(&Highs_setIntOptionValue) set_int;
  decltype(&Highs_setDoubleOptionValue) set_double;
  decltype(&Highs_passMip) pass;
  decltype(&Highs_run) run;
  decltype(&Highs_getModelStatus) status;
  decltype(&Highs_getSolution) solution;
  decltype(&Highs_getObjectiveValue) objective;
  decltype(&Highs_getInt64InfoValue) info;

 private:
  template <typename F>
  void Find(const char* name, F* function) {
    *function = reinterpret_cast<F>(dlsym(library_, name));
    DM_CHECK(*function != nullptr, name);
  }
  void* library_;
};

// Rows of a mixed-integer program that minimises its first column.
class Program {
 public:
  int Column(double least, double most, bool whole) {
    lower.push_back(least);
    upper.push_back(most);
    integral.push_back(whole ? kHighsVarTypeInteger : kHighsVarTypeContinuous);
    return static_cast<int>(lower.size()) - 1;
  }
  // Adds a coefficient to the row that the next End() closes.
  void Term(int column, double value) {
    if (std::abs(value) < kSmall) return;  // of times in units of the slowest, and shares
    index.push_back(column);
    values.push_back(value);
  }
  void End(double least, double most) {
    row_lower.push_back(least);
    row_upper.push_back(most);
    starts.push_back(static_cast<HighsInt>(index.size()));
  }

  std::vector<double> lower, upper, values, row_lower, row_upper;
  std::vector<HighsInt> integral, index, starts{0};
};

// One-hot columns of a frame, each with its product with what the other pool decides, which is at most `unit` and in
// units of it.
struct Chosen {
  std::vector<int> one, product;
  double unit = 1;
};

// product_i = one_i * x where x = sum of the other pool's `values` over its chosen column: exact for one-hot columns.
void Products(Program* p, const Chosen& other, std::vector<double> values, Chosen* of) {
  Chosen& mine = *of;
  mine.unit = *std::max_element(values.begin(), values.end());
  for (double& x : values) x /= mine.unit;
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  for (const int column : mine.product) p->Term(column, 1);
  for (size_t j = 0; j < values.size(); ++j) p->Term(other.one[j], -values[j]);
  p->End(0, 0);
  for (size_t i = 0; i < mine.one.size(); ++i) {
    p->Term(mine.product[i], 1);
    p->Term(mine.one[i], -*least);
    p->End(0, kInfinite);
    p->Term(mine.product[i], 1);
    p->Term(mine.one[i], -*most);
    p->End(-kInfinite, 0);
  }
}

struct FrameColumns {
  Chosen attention, ffn;
};

// Times are in units of `unit`; column 0 is the slowest of them.
struct SizingMip {
  Program program;
  std::vector<FrameColumns> frames;
};

// One of a frame's columns of each pool, which have room and memory together; and the products.
FrameColumns AddFrame(const SizingColumns& x, bool own_clusters, Program* p) {
  FrameColumns out;
  std::vector<double> rows, micro_batches;
  for (size_t i = 0; i < x.attention.size(); ++i) {
    out.attention.one.push_back(p->Column(0, 1, true));
    out.attention.product.push_back(p->Column(0, kInfinite, false));
    micro_batches.push_back(1 / (static_cast<double>(x.attention[i].m) * x.attention[i].b));
  }
  for (size_t j = 0; j < x.ffn.size(); ++j) {
    out.ffn.one.push_back(p->Column(0, 1, true));
    out.ffn.product.push_back(p->Column(0, kInfinite, false));
    rows.push_back(x.ffn[j].rows);
  }
  for (const int y : out.attention.one) p->Term(y, 1);
  for (const int z : out.ffn.one) p->Term(z, -1);
  p->End(0, 0);
  const auto all = static_cast<double>(x.frame.most);
  const auto gpus = [&](double bound) {
    for (size_t i = 0; i < x.attention.size(); ++i) {
      p->Term(out.attention.one[i], (x.frame.pools.p_a * static_cast<double>(x.attention[i].m) - bound) / all);
    }
    for (size_t j = 0; j < x.ffn.size(); ++j) {
      p->Term(out.ffn.one[j], x.frame.pools.p_f * static_cast<double>(x.ffn[j].n) / all);
    }
  };
  if (!own_clusters) {
    gpus(static_cast<double>(x.frame.most));
    p->End(-kInfinite, 0);
    gpus(static_cast<double>(x.frame.least));
    p->End(0, kInfinite);
  }
  double most = 0;  // sequences of a micro-batch
  for (const auto& a : x.attention) most = std::max(most, static_cast<double>(a.m) * a.b);
  for (size_t i = 0; i < x.attention.size(); ++i) {
    p->Term(out.attention.one[i], static_cast<double>(x.attention[i].m) * x.attention[i].b / most);
  }
  for (size_t j = 0; j < x.ffn.size(); ++j) {
    p->Term(out.ffn.one[j], -std::min(1.0, static_cast<double>(x.ffn[j].most_sequences) / most));
  }
  p->End(-kInfinite, 0);
  Products(p, out.ffn, rows, &out.attention);
  Products(p, out.attention, micro_batches, &out.ffn);
  return out;
}

SizingMip MakeProgram(const SizingChoices& c, const std::vector<SizingColumns>& frames, double unit) {
  SizingMip out;
  Program& p = out.program;
  const int slowest = p.Column(0, 1 + kSizingTie, false);
  for (const SizingColumns& x : frames) out.frames.push_back(AddFrame(x, c.model().own_clusters(), &p));
  for (const FrameColumns& f : out.frames) {
    for (const int y : f.attention.one) p.Term(y, 1);
  }
  p.End(1, 1);
  // A time is the largest of its lines: a row for each, of columns with fewer lines the last again.
  const auto lines = [&](const auto& of_frame, size_t most) {
    for (size_t e = 0; e < most; ++e) {
      p.Term(slowest, 1);
      for (size_t k = 0; k < frames.size(); ++k) of_frame(k, e);
      p.End(0, kInfinite);
    }
  };
  size_t attention = 1, ffn = 1;
  for (const SizingColumns& x : frames) {
    for (const auto& a : x.attention) attention = std::max(attention, a.ns.size());
    for (const auto& f : x.ffn) ffn = std::max(ffn, f.ns.size());
  }
  const auto add = [&](const Chosen& chosen, size_t i, const SizingModel::Lines& of, size_t e) {
    const SizingModel::Line& line = of[std::min(e, of.size() - 1)];
    p.Term(chosen.one[i], -line.constant / unit);
    p.Term(chosen.product[i], -line.slope * chosen.unit / unit);
  };
  for (const bool nic : {false, true}) {
    lines([&](size_t k, size_t e) {
      const auto& all = frames[k].attention;
      for (size_t i = 0; i < all.size(); ++i) add(out.frames[k].attention, i, nic ? all[i].nic : all[i].ns, e);
    }, attention);
  }
  lines([&](size_t k, size_t e) {
    const auto& all = frames[k].ffn;
    for (size_t j = 0; j < all.size(); ++j) add(out.frames[k].ffn, j, all[j].ns, e);
  }, ffn);
  lines([&](size_t k, size_t) {
    const auto& all = frames[k].ffn;
    for (size_t j = 0; j < all.size(); ++j) p.Term(out.frames[k].ffn.one[j], -all[j].nic / unit);
  }, 1);
  return out;
}

// The pools that a solution's columns say.
Pools PoolsOf(const std::vector<SizingColumns>& frames, const SizingMip& mip, const std::vector<double>& value) {
  Pools out;
  for (size_t k = 0; k < frames.size(); ++k) {
    const FrameColumns& f = mip.frames[k];
    for (size_t i = 0; i < f.attention.one.size(); ++i) {
      if (value[f.attention.one[i]] < 0.5) continue;
      out = frames[k].frame.pools;
      out.m = frames[k].attention[i].m, out.sequences = frames[k].attention[i].b;
      for (size_t j = 0; j < f.ffn.one.size(); ++j) {
        if (value[f.ffn.one[j]] > 0.5) out.n = frames[k].ffn[j].n;
      }
      return out;
    }
  }
  return out;
}

}  // namespace

bool SizingUsesHighs() { return true; }

bool SolveColumns(const SizingChoices& choices, const std::vector<SizingColumns>& frames, double seconds,
                  SizingTies* ties, SizingAnswer* count) {
  if (seconds <= 0) return false;
  const double unit = ties->ns();
  const SizingMip mip = MakeProgram(choices, frames, unit);
  const Program& p = mip.program;
  const Highs highs;
  const std::unique_ptr<void, decltype(highs.destroy)> solver(highs.create(), highs.destroy);
  void* h = solver.get();
  highs.set_bool(h, "output_flag", 0);
  highs.set_int(h, "threads", 1);
  highs.set_double(h, "time_limit", seconds);
  for (const char* name : {"mip_rel_gap", "mip_abs_gap", "mip_feasibility_tolerance", "primal_feasibility_tolerance"}) {
    highs.set_double(h, name, kSizingTie);
  }
  highs.set_double(h, "small_matrix_value", kSmall);
  std::vector<double> cost(p.lower.size(), 0);
  cost[0] = 1;
  const auto columns = static_cast<HighsInt>(p.lower.size()), rows = static_cast<HighsInt>(p.row_lower.size());
  count->columns += columns;
  count->rows += rows;
  ++count->programs;
  const HighsInt passed = highs.pass(h, columns, rows, static_cast<HighsInt>(p.index.size()), kHighsMatrixFormatRowwise,
                                     kHighsObjSenseMinimize, 0, cost.data(), p.lower.data(), p.upper.data(),
                                     p.row_lower.data(), p.row_upper.data(), p.starts.data(), p.index.data(),
                                     p.values.data(), p.integral.data());
  if (passed == kHighsStatusError || highs.run(h) == kHighsStatusError) return false;
  int64_t nodes = 0;
  highs.info(h, "mip_node_count", &nodes);
  count->nodes += static_cast<int>(std::max<int64_t>(0, nodes));
  const HighsInt status = highs.status(h);
  if (status == kHighsModelStatusInfeasible) return true;  // nothing here is as fast as the best so far
  if (status != kHighsModelStatusOptimal) return false;
  std::vector<double> value(p.lower.size());
  highs.solution(h, value.data(), nullptr, nullptr, nullptr);
  const Pools pools = PoolsOf(frames, mip, value);
  if (!choices.Allowed(pools)) return false;
  const SizingTimes times = choices.model().Times(pools);
  const bool agrees = std::abs(times.worst() / unit - highs.objective(h)) <= kAgree;
  ties->Add(pools, times);
  return agrees;
}

}  // namespace disagmoe
