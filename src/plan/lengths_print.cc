// A plan for changing lengths, for people and for programs.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "plan/lengths_plan.h"

namespace disagmoe {
namespace {

using nlohmann::ordered_json;
using Row = std::vector<std::string>;

template <typename... Args>
std::string Format(const char* format, Args... args) {
  char text[400];
  std::snprintf(text, sizeof text, format, args...);
  return text;
}

std::string Tokens(int64_t tokens) {
  return tokens >= 1024 && tokens % 1024 == 0 ? std::to_string(tokens / 1024) + "k" : std::to_string(tokens);
}

std::string Seconds(double x) { return x == kCannot ? "-" : Format(x < 10 ? "%.3f" : "%.2f", x); }
std::string Percent(double share) { return Format("%.1f %%", 100 * share); }

// Words to the left, numbers to the right.
std::string Table(const std::vector<Row>& rows, size_t words) {
  std::vector<size_t> widths(rows[0].size(), 0);
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const Row& row : rows) {
    std::string line = " ";
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - row[i].size(), ' ');
      line += " " + (i < words ? row[i] + space : space + row[i]) + " ";
    }
    out += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return out;
}

std::string Name(const LengthsPlan& plan, int layout) {
  return Format("%d", layout + 1) + (layout == 0 && plan.single() ? "*" : "");
}

std::string LayoutTable(const LengthsPlan& plan) {
  std::vector<Row> rows{{"#", "schedule", "layout", "expected"}};
  for (int64_t tokens : plan.lengths) rows[0].push_back(Tokens(tokens));
  Row shares{"", "", "share of the steps", ""};
  for (double share : plan.shares) shares.push_back(Percent(share));
  rows.push_back(shares);
  for (size_t i = 0; i < plan.layouts.size(); ++i) {
    const LayoutRow& row = plan.layouts[i];
    rows.push_back({Name(plan, static_cast<int>(i)), row.schedule, row.text, Seconds(row.expected)});
    for (const LayoutAt& at : row.at) rows.back().push_back(Seconds(at.step_seconds));
  }
  return "Seconds for a step of " + Format("%.0f", plan.tokens_a_step) + " tokens\n" + Table(rows, 3);
}

// What no layout can do at all.
std::string Impossible(const LengthsPlan& plan) {
  std::string out;
  for (size_t k = 0; k < plan.best.size(); ++k) {
    if (plan.best[k] < 0) out += (out.empty() ? "" : ", ") + Tokens(plan.lengths[k]);
  }
  return out;
}

std::string SingleText(const LengthsPlan& plan) {
  const LayoutRow* single = plan.single();
  if (!single) {
    const std::string none = Impossible(plan);
    return none.empty() ? "No layout can do all lengths: it must change.\n"
                        : "Nothing fits with sequences of " + none + " tokens.\n";
  }
  std::string out = "Best in expectation: " + single->schedule + ", " + single->text + ", " +
                    Seconds(single->expected) + " s a step.";
  if (plan.ideal < single->expected) {
    out += " The best of each length, if changes were free: " + Seconds(plan.ideal) + " s, " +
           Percent(1 - plan.ideal / single->expected) + " less.";
  }
  std::vector<Row> rows{{"tokens", "what is chosen for it", "batch", "seconds", "tokens/s/GPU", "GB"}};
  for (size_t k = 0; k < plan.lengths.size(); ++k) {
    const LayoutAt& at = single->at[k];
    rows.push_back({Tokens(plan.lengths[k]), at.text, std::to_string(at.job.global_batch), Seconds(at.step_seconds),
                    Format("%.0f", at.tokens_per_gpu), Format("%.1f", static_cast<double>(at.peak_bytes) * 1e-9)});
  }
  return out + "\n" + Table(rows, 2);
}

std::string ChangeText(const LengthsPlan& plan, const BreakEven& e) {
  if (e.to < 0) return "nothing is faster";
  const MoveCost& cost = plan.moves[e.from][e.to];
  const std::string to = " to " + Name(plan, e.to);
  if (e.gain == kCannot) return "must change" + to;
  return Format("pays from step %lld on: %.2f s a step for %.2f s, %.1f GB,", static_cast<long long>(e.steps), e.gain,
                cost.seconds(), cost.bytes * 1e-9) + to;
}

std::string PhasesText(const LengthsPlan& plan) {
  const ResizePlan& r = *plan.resizes;
  std::vector<Row> rows{{"phase", "tokens", "steps", "layout", "a change at its start"}};
  for (size_t k = 0; k < plan.phases.size(); ++k) {
    rows.push_back({std::to_string(k + 1), Tokens(plan.phases[k].tokens), std::to_string(plan.phases[k].steps),
                    Name(plan, r.layout[k]), k == 0 ? "" : ChangeText(plan, plan.break_even[k - 1])});
  }
  std::string out = Table(rows, 5);
  const std::string total = Format("%.1f s, of which %.1f s in %d changes", r.seconds, r.moving, r.changes);
  if (r.single < 0) return out + "In all " + total + "; no layout can stay.\n";
  if (r.changes == 0) {
    return out + "No change pays: layout " + Name(plan, r.single) + Format(" stays, %.1f s in all.\n", r.seconds);
  }
  return out + "In all " + total + "; layout " + Name(plan, r.single) +
         Format(" alone: %.1f s, %.1f %% more.\n", r.single_seconds, 100 * (r.single_seconds / r.seconds - 1));
}

std::string RandomText(const LengthsPlan& plan) {
  std::vector<Row> rows{{"tokens", "best", "gain a step", "there and back", "steps in a row that pay", "that come"}};
  bool pays = false;
  for (size_t k = 0; k < plan.break_even.size(); ++k) {
    const BreakEven& e = plan.break_even[k];
    if (e.to < 0) continue;
    pays |= static_cast<double>(e.steps_back) <= plan.expected_run[k];
    rows.push_back({Tokens(plan.lengths[k]), Name(plan, e.to), Seconds(e.gain),
                    Seconds(e.move_seconds + e.back_seconds), std::to_string(e.steps_back),
                    Format("%.1f", plan.expected_run[k])});
  }
  if (rows.size() == 1) return "No layout is faster at any length: nothing to change.\n";
  const std::string text = pays ? "Changes pay even where lengths come at random.\n"
                                : "Where lengths come at random no change pays; steps of one length in a row would.\n";
  return text + Table(rows, 1);
}

ordered_json Number(double x) { return x == kCannot ? ordered_json(nullptr) : ordered_json(x); }

ordered_json JobJson(const LayoutAt& at) {
  const Job& j = at.job;
  ordered_json out{{"p_a", j.p_a}, {"m", j.m}};
  if (j.colocated()) {
    out["virtual_stages"] = j.virtual_stages;
  } else {
    out["p_f"] = j.p_f, out["n"] = j.n, out["head_on_attention"] = j.head_on_attention,
    out["mixed_nodes"] = j.mixed_nodes;
    out["round"] = j.round, out["slope"] = j.slope;
  }
  out.update({{"replicas", j.replicas()},
              {"idle_gpus", j.idle_gpus},
              {"sequences", j.sequences},
              {"global_batch", j.global_batch},
              {"micro_batches", j.micro_batches()},
              {"parts", j.parts},
              {"recompute", j.recompute}});
  return out;
}

ordered_json LayoutJson(const LengthsPlan& plan, const LayoutRow& row) {
  ordered_json lengths = ordered_json::array();
  for (size_t k = 0; k < row.at.size(); ++k) {
    const LayoutAt& at = row.at[k];
    ordered_json x{{"seq_length", plan.lengths[k]}, {"step_seconds", Number(at.step_seconds)}};
    if (at.step_seconds != kCannot) {
      x.update({{"tokens_per_gpu", at.tokens_per_gpu},
                {"peak_bytes", at.peak_bytes},
                {"fits", at.fits},
                {"layout", at.text},
                {"job", JobJson(at)}});
    }
    lengths.push_back(std::move(x));
  }
  return {{"schedule", row.schedule},
          {"layout", row.text},
          {"expected_step_seconds", Number(row.expected)},
          {"lengths", lengths}};
}

ordered_json BreakEvenJson(const BreakEven& e) {
  ordered_json out{{"from", e.from}};
  if (e.to < 0) return out;
  out.update({{"to", e.to},
              {"gain_seconds", Number(e.gain)},
              {"move_seconds", e.move_seconds},
              {"back_seconds", e.back_seconds},
              {"steps", e.steps},
              {"steps_there_and_back", e.steps_back}});
  return out;
}

}  // namespace

std::string PrintLengthsPlan(const LengthsPlan& plan) {
  if (plan.layouts.empty()) return SingleText(plan);
  std::string out = LayoutTable(plan) + "\n" + SingleText(plan);
  if (plan.resizes) out += "\n" + PhasesText(plan);
  if (!plan.resizes && plan.single()) out += "\n" + RandomText(plan);
  if (plan.stopped) out += "\nStopped early: better layouts may exist.\n";
  return out;
}

ordered_json LengthsPlanJson(const LengthsPlan& plan) {
  ordered_json lengths = ordered_json::array(), layouts = lengths, moves = lengths, changes = lengths;
  for (size_t k = 0; k < plan.lengths.size(); ++k) {
    lengths.push_back({{"seq_length", plan.lengths[k]}, {"share_of_steps", plan.shares[k]}, {"best", plan.best[k]}});
  }
  for (const LayoutRow& row : plan.layouts) layouts.push_back(LayoutJson(plan, row));
  for (size_t from = 0; from < plan.moves.size(); ++from) {
    for (size_t to = 0; to < plan.moves.size(); ++to) {
      const MoveCost& m = plan.moves[from][to];
      if (from == to) continue;
      moves.push_back({{"from", from},
                       {"to", to},
                       {"bytes", m.bytes},
                       {"nic_bytes", m.nic_bytes},
                       {"move_seconds", m.move_seconds},
                       {"restart_seconds", m.restart_seconds}});
    }
  }
  ordered_json out{{"tokens_a_step", plan.tokens_a_step}, {"lengths", lengths}, {"layouts", layouts},
                   {"best_in_expectation", plan.single() ? ordered_json(0) : ordered_json(nullptr)},
                   {"free_changes_step_seconds", Number(plan.ideal)}, {"moves", moves}};
  for (const BreakEven& e : plan.break_even) changes.push_back(BreakEvenJson(e));
  if (plan.resizes) {
    const ResizePlan& r = *plan.resizes;
    ordered_json phases = ordered_json::array();
    for (size_t k = 0; k < plan.phases.size(); ++k) {
      phases.push_back(
          {{"seq_length", plan.phases[k].tokens}, {"steps", plan.phases[k].steps}, {"layout", r.layout[k]}});
      if (k > 0) phases.back()["break_even"] = changes[k - 1];
    }
    out["phases"] = phases;
    out.update({{"seconds", r.seconds},
                {"moving_seconds", r.moving},
                {"changes", r.changes},
                {"single", r.single < 0 ? ordered_json(nullptr) : ordered_json(r.single)},
                {"single_seconds", Number(r.single_seconds)}});
  } else {
    for (size_t k = 0; k < changes.size(); ++k) {
      changes[k]["seq_length"] = plan.lengths[k], changes[k]["expected_run"] = Number(plan.expected_run[k]);
    }
    out["at_random"] = changes;
  }
  out.update({{"considered", plan.counts.considered},
              {"estimated", plan.counts.estimated},
              {"simulated", plan.counts.simulated},
              {"stopped", plan.stopped}});
  return out;
}

}  // namespace disagmoe
