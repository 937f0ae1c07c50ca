#include <algorithm>
#include <cmath>
#include <cstdio>

#include "plan/roofline_print.h"
#include "trace/svg.h"

namespace disagmoe {
namespace {

constexpr double kWidth = 1000, kHeight = 640, kMargin = 16;
constexpr double kLeft = 72, kRight = kWidth - 40, kTop = 56, kBottom = 470;

// Colours as in the timeline's drawing; what differs in colour differs in its line or letter too.
constexpr const char* kStyle = R"svg(<style>
text{font:12px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#24292f}
.title{font-weight:600;font-size:14px}.name{font-weight:600}.soft{fill:#57606a}.small{font-size:11px}
.paper{fill:#ffffff;stroke:#d0d7de}.grid{stroke:#eaeef2}
.roof{fill:none;stroke-width:2}.nominal{fill:none;stroke:#8c959f;stroke-width:1;stroke-dasharray:2 3}
.attention{stroke:#1f6feb}.ffn{stroke:#b3500b;stroke-dasharray:8 4}
.turn{stroke-width:1;stroke-dasharray:3 3}.dot{stroke:#ffffff;stroke-width:1}
.in-attention{fill:#1f6feb}.in-ffn{fill:#b3500b}
.ring{fill:#ffffff;stroke-width:1.5;stroke-dasharray:none}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#9198a1}.paper{fill:#0d1117;stroke:#3d444d}
.grid{stroke:#21262d}.ring{fill:#0d1117}.dot{stroke:#0d1117}
.attention{stroke:#4493f8}.ffn{stroke:#db6d28}.in-attention{fill:#4493f8}.in-ffn{fill:#db6d28}}
</style>
)svg";

std::string Text(double x, double y, const std::string& text, const std::string& classes, const std::string& anchor) {
  return "<text x=\"" + SvgNumber(x) + "\" y=\"" + SvgNumber(y) + "\" class=\"" + classes + "\" text-anchor=\"" +
         anchor + "\">" + SvgText(text) + "</text>\n";
}

std::string Line(double x1, double y1, double x2, double y2, const std::string& classes) {
  return "<line x1=\"" + SvgNumber(x1) + "\" y1=\"" + SvgNumber(y1) + "\" x2=\"" + SvgNumber(x2) + "\" y2=\"" +
         SvgNumber(y2) + "\" class=\"" + classes + "\"/>\n";
}

std::string Circle(double x, double y, double radius, const std::string& classes, const std::string& title) {
  return "<circle cx=\"" + SvgNumber(x) + "\" cy=\"" + SvgNumber(y) + "\" r=\"" + SvgNumber(radius) + "\" class=\"" +
         classes + "\"><title>" + SvgText(title) + "</title></circle>\n";
}

class Picture {
 public:
  explicit Picture(const Roofline& r) : r_(r), axes_(AxesOf(r)) {}

  std::string Draw() {
    const std::string title = r_.model + " at " + Grouped(static_cast<double>(r_.seq_length)) +
                              " tokens, FFN groups of " + std::to_string(r_.ffn_workers) +
                              ": computation against network";
    svg_ = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + SvgNumber(kWidth) + " " + SvgNumber(kHeight) +
           "\" role=\"img\" aria-label=\"Roofline. " + SvgText(title) + "\">\n" + kStyle;
    svg_ += "<rect x=\"0.5\" y=\"0.5\" width=\"" + SvgNumber(kWidth - 1) + "\" height=\"" + SvgNumber(kHeight - 1) +
            "\" rx=\"6\" class=\"paper\"/>\n";
    svg_ += Text(kMargin, 24, title, "title", "start");
    Axes();
    Nominal();
    Roofs();
    Points();
    Figure(r_.attention, "attention", "A", kMargin);
    Figure(r_.ffn, "ffn", "F", kWidth / 2);
    Foot();
    return svg_ + "</svg>\n";
  }

 private:
  double X(double x) const { return kLeft + (kRight - kLeft) * axes_.x.At(x); }
  double Y(double y) const { return kBottom - (kBottom - kTop) * axes_.y.At(y); }

  void Axes() {
    for (double x : axes_.x.Ticks()) {
      svg_ += Line(X(x), kTop, X(x), kBottom, "grid") + Text(X(x), kBottom + 16, TickName(x), "soft", "middle");
    }
    for (double y : axes_.y.Ticks()) {
      svg_ += Line(kLeft, Y(y), kRight, Y(y), "grid") + Text(kLeft - 8, Y(y) + 4, TickName(y), "soft", "end");
    }
    svg_ += Text(kMargin, kTop - 10, "TFLOP/s of a GPU, forward", "soft", "start");
    svg_ += Text(kRight, kBottom + 34, "FLOP for each byte that crosses the pools one way", "soft", "end");
  }

  // From the lower left along the slope to the corner and to the right.
  std::string Path(double flat, double turn, const std::string& classes) const {
    const double x = std::max(axes_.x.low, turn * axes_.y.low / flat);  // where the slope enters the picture
    return "<polyline points=\"" + SvgNumber(X(x)) + "," + SvgNumber(Y(flat * std::min(1.0, x / turn))) + " " +
           SvgNumber(X(std::max(x, turn))) + "," + SvgNumber(Y(flat)) + " " + SvgNumber(kRight) + "," +
           SvgNumber(Y(flat)) + "\" class=\"" + classes + "\"/>\n";
  }

  void Nominal() {
    const OperationRoof &a = r_.attention, &f = r_.ffn;
    const auto draw = [&](const OperationRoof& o, double off) {
      svg_ += Path(o.peak_tflops, o.nominal_turning_point / o.nics, "nominal");
      const std::string label = o.gpu + ", nominal: " + Grouped(o.peak_tflops) + " TFLOP/s over " + NicsName(o.nics) +
                                " of " + SvgNumber(o.nic_gbytes_s) + " GB/s";
      svg_ += Text(kRight - 4, Y(o.peak_tflops) + off, label, "soft small", "end");
    };
    const bool same = a.peak_tflops == f.peak_tflops && a.nics * a.nic_gbytes_s == f.nics * f.nic_gbytes_s;
    const bool attention_above = a.peak_tflops >= f.peak_tflops;
    draw(a, attention_above ? -5 : 14);
    if (!same) draw(f, attention_above ? 14 : -5);
  }

  void Roofs() {
    const bool attention_above = r_.attention.forward.tflops() >= r_.ffn.forward.tflops();
    const bool attention_first = Turn(r_.attention) <= Turn(r_.ffn);
    Roof(r_.attention, "attention", attention_above, attention_first);
    Roof(r_.ffn, "ffn", !attention_above, !attention_first);
  }

  static double Turn(const OperationRoof& o) { return o.forward.turning_point(o.nics); }

  // above: its label over the line; left: the turning point's left of it.
  void Roof(const OperationRoof& o, const std::string& kind, bool above, bool left) {
    const double flat = o.forward.tflops(), x = X(Turn(o));
    svg_ += Path(flat, Turn(o), "roof " + kind);
    svg_ += Line(x, Y(flat), x, kBottom, "turn " + kind);
    const std::string classes = "small name in-" + kind;
    svg_ += Text(x + (left ? -5 : 5), kBottom - (left ? 8 : 24), Grouped(Turn(o)), classes, left ? "end" : "start");
    const std::string name = kind == "ffn" ? "experts" : "attention";
    svg_ += Text(kRight - 4, Y(flat) + (above ? -6 : 15), name + ": " + Grouped(flat) + " TFLOP/s", classes, "end");
  }

  // Attention's labels below the roof, those of the experts above.
  void Points() {
    const RoofPoint& a = r_.attention.forward;
    const double chosen_x = X(a.intensity());
    double last = -1e9;
    for (const SequencePoint& p : r_.sequences) {
      if (p.seq_length == r_.seq_length) continue;
      const double x = X(p.intensity), y = Y(p.attainable_tflops);
      svg_ += Circle(x, y, 4, "dot in-attention",
                     "attention, " + SequenceName(p.seq_length) + ": " + Grouped(p.intensity) + " FLOP/byte, " +
                         Figures(p.attainable_tflops) + " TFLOP/s");
      const bool room = x - last >= 28 && (x < chosen_x - 28 || x > chosen_x + 60);
      if (!room) continue;
      svg_ += Text(x + 8, y + 17, SequenceName(p.seq_length), "small in-attention", "start");
      last = x;
    }
    const double chosen_y = Y(a.attainable_tflops(r_.attention.nics));
    svg_ += Circle(chosen_x, chosen_y, 7, "dot in-attention", "attention: " + Grouped(a.intensity()) + " FLOP/byte");
    svg_ += Text(chosen_x + 8, chosen_y + 17, "A " + SequenceName(r_.seq_length), "name in-attention", "start");
    const RoofPoint& f = r_.ffn.forward;
    const double x = X(f.intensity()), y = Y(f.attainable_tflops(r_.ffn.nics));
    svg_ += Circle(x, y, 7, "dot in-ffn", "experts: " + Grouped(f.intensity()) + " FLOP/byte");
    svg_ += Text(x - 8, y - 10, "F experts", "name in-ffn", "end");
    Published(r_.attention, "attention", "a", 8, 17, "start");
    Published(r_.ffn, "ffn", "f", -8, -8, "end");
  }

  void Published(const OperationRoof& o, const std::string& kind, const std::string& letter, double dx, double dy,
                 const std::string& anchor) {
    const double x = X(o.printed), y = Y(RoofAt(o, o.printed));
    svg_ += Circle(x, y, 4, "ring " + kind, "as published: " + Grouped(o.printed) + " FLOP/byte");
    svg_ += Text(x + dx, y + dy, letter, "name in-" + kind, anchor);
  }

  void Figure(const OperationRoof& o, const std::string& kind, const std::string& letter, double x) {
    const RoofPoint& p = o.forward;
    double y = kBottom + 66;
    const auto line = [&](const std::string& text, const std::string& classes) {
      svg_ += Text(x + 40, y, text, classes, "start");
      y += 18;
    };
    svg_ += Line(x, y - 4, x + 30, y - 4, "roof " + kind);
    const std::string name = kind == "ffn" ? " experts on " : " attention on ";
    line(letter + name + o.gpu + ", " + NicsName(o.nics) + " a GPU", "name");
    line(Grouped(p.intensity()) + " FLOP/byte, turning point " + Grouped(p.turning_point(o.nics)) + ": " +
             (p.over(o.nics) < 1 ? "network-bound" : "compute-bound"),
         "");
    line(Figures(p.attainable_tflops(o.nics)) + " of " + Figures(p.tflops()) +
             " TFLOP/s; to hide transfers: " + Figures(p.nics_needed()) + " NICs",
         "");
    line(std::string(kind == "ffn" ? "f: " : "a: ") + Grouped(o.printed) +
             " FLOP/byte as published (multiply-adds and FLOPs mixed)",
         "soft");
  }

  void Foot() {
    svg_ += Text(kMargin, kHeight - 14,
                 "Small dots: attention at other lengths, each with its own mix of products. Roofs: products, memory "
                 "traffic and NICs at the efficiencies of the cluster.",
                 "soft small", "start");
  }

  const Roofline& r_;
  RooflineAxes axes_;
  std::string svg_;
};

}  // namespace

std::string RooflineSvg(const Roofline& r) { return Picture(r).Draw(); }

}  // namespace disagmoe
