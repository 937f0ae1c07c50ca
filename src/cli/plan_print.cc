#include "cli/plan_print.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/evaluation_json.h"
#include "plan/text.h"

namespace disagmoe {
namespace {

using nlohmann::ordered_json;

long long Ll(int64_t x) { return static_cast<long long>(x); }

std::string Head(const PlanRequest& r) {
  std::string machines;
  for (const ClusterSpec& c : r.hardware) {
    machines += (machines.empty() ? "" : " + ") + c.name + " (" + std::to_string(c.gpus) + " x " + c.gpu.name + ")";
  }
  std::string batch = Format("a batch of %lld sequences", Ll(r.batch));
  if (r.batch_least < r.batch_most) batch += Format(" (%lld to %lld)", Ll(r.batch_least), Ll(r.batch_most));
  return r.model.name + " on " + machines + ", " + std::to_string(r.seq_length) + " tokens a sequence, " + batch + "\n";
}

std::string Row(const Plan& plan, const PlanRow& row, bool chosen) {
  const Evaluation* e = row.best() ? row.best() : row.search.nearest();
  const std::string name = (chosen ? "* " : "  ") + row.schedule;
  const std::string where = row.hardware.empty() ? "" : row.hardware + "; ";
  if (!e)
    return Format("%-18s cannot: %s\n", name.c_str(),
                  row.search.mistake ? Error(*row.search.mistake).what() : "no layout");
  std::string times = "-";
  if (row.best() && plan.best_colocated >= 0) {
    times = Format("%.2fx", e->tokens_per_second() / plan.rows[plan.best_colocated].best()->tokens_per_second());
  }
  return Format("%-18s %9.3f %8.0f %5.1f %6s | %4.0f %4.0f %4.0f %4.0f | %5.1f | %s%s%s%s\n", name.c_str(),
                e->step_seconds, e->tokens_per_gpu, 100 * e->mfu, times.c_str(), 100 * e->compute, 100 * e->overlapped,
                100 * e->exposed, 100 * e->bubble, static_cast<double>(e->peak_bytes) * 1e-9, where.c_str(),
                LayoutText(*e).c_str(), e->fits ? "" : "; DOES NOT FIT", row.trains ? "" : " (not trained)");
}

std::string Sizing(const Plan& plan) {
  std::string out;
  for (const SizingRow& row : plan.sizing) {
    const SizingTimes& t = row.answer.times;
    const auto share = [&](double x) { return 100 * x / t.worst(); };
    out += Format("Sizing program%s: %s binds at %.0f tokens/s a GPU, with %s",
                  row.hardware.empty() ? "" : (" (" + row.hardware + ")").c_str(), row.answer.binding.c_str(),
                  row.tokens_per_gpu, row.layout.c_str());
    out += Format("\n  of it: attention %.0f %%, FFN %.0f %%, NICs of A %.0f %%, of F %.0f %%; no pools are faster%s\n",
                  share(t.attention), share(t.ffn), share(t.nic_a), share(t.nic_f),
                  row.answer.proven ? "" : " that were found in its time");
  }
  return out;
}

std::string Rejections(const Plan& plan) {
  if (plan.rejected.empty()) return "";
  std::string out = "\nWhat keeps the others back (x: times as long for as many tokens):\n";
  for (const Rejected& r : plan.rejected) {
    const std::string slower = r.e.fits ? Format("%5.2fx", r.slower) : "  full";
    out += Format("  %s  %s: %s\n", slower.c_str(), r.differs.c_str(), r.binds.c_str());
  }
  return out;
}

std::string Changes(const Plan& plan) {
  if (plan.changes.empty()) return "";
  std::string out = "\nWhat a change would change (tokens a second against the plan today):\n";
  for (const Change& c : plan.changes) {
    out += Format("  %-76s %.2fx", c.what.c_str(), c.same_ratio);
    if (!c.same_fits) out += ", does not fit";
    if (!c.best_layout.empty()) {
      out += Format("; %.2fx with %s %s", c.best_ratio, c.best_schedule.c_str(), c.best_layout.c_str());
    } else {
      out += c.best_ratio > 0 ? "; the plan stays" : "; no layout looked at fits";
    }
    out += "\n";
  }
  return out;
}

std::string Reliefs(const Plan& plan) {
  const auto found = [](const Relief& r) { return !r.layout.empty(); };
  if (std::none_of(plan.reliefs.begin(), plan.reliefs.end(), found)) return "";
  std::string out = plan.best() ? "\nThe plan is slow for want of memory. What would help:\n" : "\nWhat would fit:\n";
  for (const Relief& r : plan.reliefs) {
    if (r.layout.empty()) continue;
    out += Format("  %-60s ", r.what.c_str());
    out += r.fits ? Format("fits, %.0f tokens/s a GPU, %.1f of %.1f GB: ", r.tokens_per_gpu, r.peak_gb, r.limit_gb)
                  : Format("no: %.1f of %.1f GB: ", r.peak_gb, r.limit_gb);
    out += r.layout + "\n";
  }
  return out;
}

ordered_json LayoutJson(const Evaluation& e) {
  ordered_json out = EvaluationJson(e);
  out["binds"] = WhatBinds(e);
  return out;
}

}  // namespace

std::string PlanText(const PlanRequest& request, const Plan& plan) {
  std::string out = Head(request);
  out += Format("\n%-18s %9s %8s %5s %6s | %-19s | %5s | %s\n", "", "", "tokens/", "", "x best", "of the step, %",
                "peak", "");
  out += Format("%-18s %9s %8s %5s %6s | %4s %4s %4s %4s | %5s | %s\n", "  schedule", "step s", "s/GPU", "MFU%",
                "coloc.", "comp", "over", "exp", "bub", "GB", "its best layout");
  for (const int i : BestRows(plan)) out += Row(plan, plan.rows[i], i == plan.chosen);
  out += "\n" + Sizing(plan) + Verdict(plan) + "\n";
  out += Rejections(plan) + Changes(plan) + Reliefs(plan);
  if (plan.stopped) out += "\nInterrupted: the best so far.\n";
  return out;
}

ordered_json PlanJson(const PlanRequest& request, const Plan& plan) {
  ordered_json rows = ordered_json::array();
  for (const PlanRow& row : plan.rows) {
    const Evaluation* e = row.best() ? row.best() : row.search.nearest();
    ordered_json one = {{"schedule", row.schedule}, {"hardware", row.hardware}, {"trains", row.trains}};
    if (e) one.update(LayoutJson(*e));
    if (!e && row.search.mistake) one["error"] = ordered_json::parse(ErrorJson(*row.search.mistake));
    one["considered"] = row.search.counts.considered;
    one["estimated"] = row.search.counts.estimated;
    one["simulated"] = row.search.counts.simulated;
    rows.push_back(std::move(one));
  }
  ordered_json rejected = ordered_json::array(), changes = ordered_json::array(), reliefs = ordered_json::array();
  for (const Rejected& r : plan.rejected) {
    rejected.push_back({{"differs", r.differs}, {"binds", r.binds}, {"slower", r.slower}, {"layout", LayoutJson(r.e)}});
  }
  for (const Change& c : plan.changes) {
    changes.push_back({{"what", c.what},
                       {"same_fits", c.same_fits},
                       {"same_ratio", c.same_ratio},
                       {"best_ratio", c.best_ratio},
                       {"best_schedule", c.best_schedule},
                       {"best_layout", c.best_layout}});
  }
  for (const Relief& r : plan.reliefs) {
    reliefs.push_back({{"what", r.what},
                       {"fits", r.fits},
                       {"layout", r.layout},
                       {"tokens_per_second_per_gpu", r.tokens_per_gpu},
                       {"peak_gb", r.peak_gb},
                       {"limit_gb", r.limit_gb}});
  }
  return {{"model", request.model.name},
          {"seq_length", request.seq_length},
          {"batch", request.batch},
          {"fits", plan.best() != nullptr},
          {"plan", plan.best() ? LayoutJson(*plan.best()) : ordered_json()},
          {"verdict", Verdict(plan)},
          {"rows", rows},
          {"rejected", rejected},
          {"changes", changes},
          {"reliefs", reliefs},
          {"interrupted", plan.stopped}};
}

}  // namespace disagmoe
