#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "plan/roofline_print.h"

namespace disagmoe {

std::string Grouped(double x) {
  char text[64];
  std::snprintf(text, sizeof text, "%.0f", x);
  std::string out = text;
  for (auto at = static_cast<std::ptrdiff_t>(out.size()) - 3; at > (x < 0 ? 1 : 0); at -= 3) {
    out.insert(static_cast<size_t>(at), ",");
  }
  return out;
}

std::string Figures(double x) {
  if (x >= 99.95) return Grouped(x);
  char text[40];
  std::snprintf(text, sizeof text, x >= 9.995 ? "%.1f" : x >= 0.9995 ? "%.2f" : x >= 0.01 ? "%.3f" : "%.2g", x);
  return text;
}

std::string TickName(double x) {
  if (x > 0.99) return Grouped(x);
  char text[40];
  std::snprintf(text, sizeof text, "%.1g", x);
  return text;
}

std::string SequenceName(int64_t s) {
  return s % 1024 == 0 ? std::to_string(s / 1024) + "K" : Grouped(static_cast<double>(s));
}

std::string NicsName(double nics) {
  char text[40];
  std::snprintf(text, sizeof text, "%.3g", nics);
  return std::string(text) + (nics == 1 ? " NIC" : " NICs");
}

namespace {

std::string Percent(double part) { return Grouped(100 * part) + " %"; }

const char* DedupName(Dedup d) {
  return d == Dedup::kExpert ? "expert" : d == Dedup::kWorker ? "worker" : "node";
}

const char* Bound(double over) { return over < 1 ? "network-bound" : "compute-bound"; }

std::string Length(const std::optional<int64_t>& s) {
  return !s ? "no length" : *s == 1 ? "any length" : Grouped(static_cast<double>(*s)) + " tokens";
}

// What one operation is bound by. Does: "Attention does", "The experts do".
std::string OperationVerdict(const std::string& does, const OperationRoof& o) {
  const double forward = o.forward.over(o.nics), step = o.step.over(o.nics);
  std::string out = does + " " + Grouped(o.forward.intensity()) + " FLOP for each byte that crosses, forward. With " +
                    NicsName(o.nics) + " a GPU the turning point is " + Grouped(o.forward.turning_point(o.nics)) +
                    ", so ";
  if (forward < 1) {
    out += "the network bounds it: a GPU reaches at most " + Percent(forward) + " of its " +
           Grouped(o.forward.tflops()) + " TFLOP/s.";
  } else {
    out += "computation bounds it, " + Figures(forward) + " times above: its transfers fit under its " +
           Grouped(o.forward.tflops()) + " TFLOP/s.";
  }
  const bool same = (forward < 1) == (step < 1);
  out += " Over forward and backward " + std::string(same ? "it is " : "that turns: it is ") +
         (same ? "still " : "") + Bound(step) + ", ";
  return out + (step < 1 ? "at " + Percent(step) + " of" : Figures(step) + " times above") + " the turning point.";
}

std::string CrossingVerdict(const Roofline& r) {
  const auto from = [](const std::optional<int64_t>& s) {
    return !s ? std::string("at no length") : *s == 1 ? "at any length" : "from " + Length(s) + " on";
  };
  return "Attention does more for a byte in longer sequences: it is compute-bound " + from(r.crossing.forward) +
         " forward, " + from(r.crossing.step) +
         " over forward and backward. The experts do the same for a byte at any length.";
}

std::string NicVerdict(const Roofline& r) {
  const double need_a = r.attention.step.nics_needed(), need_f = r.ffn.step.nics_needed();
  const std::string needs = "To transfer as fast as it computes, an attention GPU needs " + Figures(need_a) +
                            " NICs and an FFN GPU " + Figures(need_f) + " (they have " + Figures(r.attention.nics) +
                            " and " + Figures(r.ffn.nics) + "): ";
  const bool a = need_a <= r.attention.nics, f = need_f <= r.ffn.nics;
  if (a && f) return needs + "both have enough.";
  if (r.attention.step.network_ns != r.ffn.step.network_ns) {  // other NICs: none can move
    return needs + "as they are, a step takes at least " + Figures(r.hidden_ns / r.split_ns) +
           " times its computation.";
  }
  if (r.nics_needed <= r.nics_had) {
    return needs + (a ? "the FFN pool lacks what the attention pool has to spare" :
                        "the attention pool lacks what the FFN pool has to spare") +
           "; moved there, the NICs are enough.";
  }
  return needs + "pools that balance computation need " + Figures(r.nics_needed) + " a GPU on average and have " +
         Figures(r.nics_had) + ", so that, however these are divided, a step takes at least " +
         Figures(r.nics_needed / r.nics_had) + " times its computation.";
}

std::string RatioVerdict(const Roofline& r) {
  return Figures(r.ratio_compute) + " attention GPUs for each FFN GPU balance computation (" +
         Figures(r.ratio_compute_with_head) + " with the head on the FFN pool), " + Figures(r.ratio_both) +
         " balance computation or transfers, whichever is slower.";
}

std::string SplitVerdict(const Roofline& r) {
  const double a = r.attention.step.compute_ns * 1e-3, f = r.ffn.step.compute_ns * 1e-3;
  std::string out = "Splitting by itself gains ";
  const double gain = r.colocated_ns / r.split_ns;
  const std::string identity = "the least max(a / M, f / N) over all splits of W GPUs is (a + f) / W, with a " +
                               Figures(a) + " and f " + Figures(f) + " us a token";
  if (std::abs(gain - 1) < 5e-4) {
    out += "nothing: " + identity + ", the time of W GPUs that do both.";
  } else if (gain > 1) {
    out += Figures(100 * (gain - 1)) + " %, as each pool has the hardware that suits it better: " + identity + ".";
  } else {
    out += "nothing and loses " + Figures(100 * (1 - gain)) +
           " %, as the pools' hardware suits the other operation better: " + identity + ".";
  }
  return out + " Transfers under computation gain up to " + Figures(r.waiting_ns / r.hidden_ns) +
         " times over waiting for them.";
}

// Words into lines of up to `columns`, the first behind `first`, the others behind as many blanks.
std::string Wrapped(const std::string& text, const std::string& first, size_t columns) {
  std::string out, line = first;
  bool begun = false;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(' ', at), text.size());
    const std::string word = text.substr(at, end - at);
    if (begun && line.size() + 1 + word.size() > columns) {
      out += line + "\n";
      line = std::string(first.size(), ' ');
      begun = false;
    }
    line += (begun ? " " : "") + word;
    begun = true;
    at = end + 1;
  }
  return out + line + "\n";
}

struct TableRow {
  std::string name, attention, ffn;
};

std::vector<TableRow> Rows(const Roofline& r) {
  std::vector<TableRow> out;
  const auto row = [&](const std::string& name, auto value) {
    out.push_back({name, value(r.attention), value(r.ffn)});
  };
  using O = OperationRoof;
  row("GPU", [](const O& o) { return o.gpu; });
  row("TFLOP/s: nominal", [](const O& o) { return Figures(o.peak_tflops); });
  row("  of the operation, forward", [](const O& o) { return Figures(o.forward.tflops()); });
  row("  with one NIC a GPU", [](const O& o) { return Figures(o.forward.attainable_tflops(1)); });
  row("  with its NICs", [](const O& o) {
    return Figures(o.forward.attainable_tflops(o.nics)) + " (" + NicsName(o.nics) + ")";
  });
  row("FLOP/byte: forward, all layers", [](const O& o) { return Grouped(o.forward.intensity()); });
  row("  forward and backward", [](const O& o) { return Grouped(o.step.intensity()); });
  row("  MoE layer " + std::to_string(r.typical_layer) + ", forward",
      [](const O& o) { return Grouped(o.layer_intensity); });
  row("  as published", [](const O& o) { return Grouped(o.printed); });
  row("turning point, one NIC: nominal", [](const O& o) { return Grouped(o.nominal_turning_point); });
  row("  forward", [](const O& o) { return Grouped(o.forward.turning_point(1)); });
  row("  forward and backward", [](const O& o) { return Grouped(o.step.turning_point(1)); });
  row("FLOP/byte over turning point: forward", [](const O& o) { return Figures(o.forward.over(o.nics)); });
  row("  forward and backward", [](const O& o) { return Figures(o.step.over(o.nics)); });
  row("NICs a GPU, to hide transfers: forward", [](const O& o) { return Figures(o.forward.nics_needed()); });
  row("  forward and backward", [](const O& o) { return Figures(o.step.nics_needed()); });
  return out;
}

}  // namespace

std::vector<std::string> RooflineVerdict(const Roofline& r) {
  return {OperationVerdict("Attention does", r.attention),
          CrossingVerdict(r),
          OperationVerdict("The experts do", r.ffn),
          NicVerdict(r),
          RatioVerdict(r),
          SplitVerdict(r)};
}

std::string RooflineText(const Roofline& r) {
  const std::string title = r.model + " at " + Grouped(static_cast<double>(r.seq_length)) + " tokens, FFN groups of " +
                            std::to_string(r.ffn_workers) + ": a token sends " + Figures(r.rows) +
                            " rows, one for each " + DedupName(r.dedup);
  std::string out = Wrapped(title, "", 100) + "\n";
  char line[200];
  const auto print = [&](const TableRow& row) {
    std::snprintf(line, sizeof line, "%-42s%24s%24s\n", row.name.c_str(), row.attention.c_str(), row.ffn.c_str());
    out += line;
  };
  print({"", "attention", "FFN"});
  for (const TableRow& row : Rows(r)) print(row);
  out += "\n";
  for (const std::string& sentence : RooflineVerdict(r)) out += Wrapped(sentence, "- ", 100);
  return out;
}

namespace {

using nlohmann::ordered_json;

ordered_json PointJson(const RoofPoint& p, double nics) {
  return {{"flop_per_byte", p.intensity()},
          {"tflops", p.tflops()},
          {"turning_point_one_nic", p.turning_point(1)},
          {"turning_point", p.turning_point(nics)},
          {"over_turning_point", p.over(nics)},
          {"bound", p.over(nics) < 1 ? "network" : "compute"},
          {"attainable_tflops_one_nic", p.attainable_tflops(1)},
          {"attainable_tflops", p.attainable_tflops(nics)},
          {"nics_needed", p.nics_needed()},
          {"compute_ns_per_token", p.compute_ns},
          {"network_ns_per_token_one_nic", p.network_ns}};
}

ordered_json RoofJson(const OperationRoof& o) {
  return {{"gpu", o.gpu},
          {"peak_tflops", o.peak_tflops},
          {"nic_gbytes_s", o.nic_gbytes_s},
          {"m2n_efficiency", o.m2n},
          {"nics_per_gpu", o.nics},
          {"nominal_turning_point", o.nominal_turning_point},
          {"layer_flop_per_byte", o.layer_intensity},
          {"published_flop_per_byte", o.printed},
          {"forward", PointJson(o.forward, o.nics)},
          {"step", PointJson(o.step, o.nics)}};
}

ordered_json LengthJson(const std::optional<int64_t>& s) { return s ? ordered_json(*s) : ordered_json(nullptr); }

}  // namespace

ordered_json RooflineJson(const Roofline& r) {
  ordered_json sequences = ordered_json::array();
  for (const SequencePoint& p : r.sequences) {
    sequences.push_back(
        {{"seq_length", p.seq_length}, {"flop_per_byte", p.intensity}, {"attainable_tflops", p.attainable_tflops}});
  }
  return {{"model", r.model},
          {"seq_length", r.seq_length},
          {"ffn_workers", r.ffn_workers},
          {"dedup", DedupName(r.dedup)},
          {"rows_per_token", r.rows},
          {"rows_per_expert", r.rows_per_expert},
          {"typical_layer", r.typical_layer},
          {"attention", RoofJson(r.attention)},
          {"ffn", RoofJson(r.ffn)},
          {"attention_by_seq_length", sequences},
          {"compute_bound_from_seq_length",
           {{"nominal", LengthJson(r.crossing.nominal)},
            {"forward", LengthJson(r.crossing.forward)},
            {"step", LengthJson(r.crossing.step)}}},
          {"gpu_ratio",
           {{"compute", r.ratio_compute}, {"compute_with_head", r.ratio_compute_with_head}, {"both", r.ratio_both}}},
          {"nics_needed_per_gpu", r.nics_needed},
          {"nics_had_per_gpu", r.nics_had},
          {"split_ns_per_token", r.split_ns},
          {"colocated_ns_per_token", r.colocated_ns},
          {"hidden_ns_per_token", r.hidden_ns},
          {"waiting_ns_per_token", r.waiting_ns},
          {"verdict", RooflineVerdict(r)}};
}

}  // namespace disagmoe
