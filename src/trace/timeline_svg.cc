#include <algorithm>
#include <cmath>
#include <cstdio>

#include "trace/svg.h"
#include "trace/timeline.h"

namespace disagmoe {
namespace {

constexpr double kWidth = 1000, kMargin = 16, kNames = 64, kHead = 62, kCompute = 26, kStrip = 7, kGap = 2, kRow = 56, kFoot = 34;
constexpr double kLeft = kMargin + kNames, kRight = kWidth - kMargin;

// Text on forward, backward and other has a contrast of 4.5 or more in both modes; exposed is also hatched, so that
// nothing is told by colour alone.
constexpr const char* kStyle = R"svg(<style>
text{font:12px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#24292f}
.title{font-weight:600;font-size:14px}.name{font-weight:600}.small{font-size:10px}.soft{fill:#57606a}
.paper{fill:#ffffff;stroke:#d0d7de}.grid{stroke:#d0d7de}.back,.bubble{fill:#e6eaef}
.in{font-size:10px;fill:#ffffff;text-anchor:middle;pointer-events:none}.bar{stroke:#ffffff;stroke-width:.5}
.forward{fill:#1f6feb}.backward{fill:#b3500b}.other{fill:#656d76}.exposed{fill:url(#hatch)}
.send{fill:#1a8754}.receive{fill:#8250df}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#9198a1}.paper{fill:#0d1117;stroke:#3d444d}
.grid{stroke:#3d444d}.back,.bubble{fill:#262c36}.in{fill:#ffffff}.bar{stroke:#0d1117}
.send{fill:#2ea46b}.receive{fill:#a371f7}}
</style>
<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="5" height="5" fill="#f85149"/><rect width="2" height="5" fill="#a40e26"/></pattern></defs>
)svg";

constexpr const char* kClasses[] = {"forward", "backward", "other", "exposed", "bubble", "send", "receive"};
constexpr const char* kLegend[] = {"forward",       "backward", "optimizer, sums", "exposed communication",
                                   "bubble (idle)", "sending",  "receiving"};

std::string Rect(double x, double y, double width, double height, const std::string& more) {
  return "<rect x=\"" + SvgNumber(x) + "\" y=\"" + SvgNumber(y) + "\" width=\"" + SvgNumber(width) + "\" height=\"" + SvgNumber(height) +
         "\" " + more;
}

std::string Text(double x, double y, const std::string& text, const std::string& more = "") {
  return "<text x=\"" + SvgNumber(x) + "\" y=\"" + SvgNumber(y) + "\"" + more + ">" + SvgText(text) + "</text>\n";
}

class Picture {
 public:
  explicit Picture(const Timeline& timeline) : timeline_(timeline), length_(timeline.end_ns - timeline.begin_ns) {}

  std::string Draw() {
    const double height = kHead + kRow * static_cast<double>(timeline_.rows.size()) + kFoot;
    const std::string title = "Step " + std::to_string(timeline_.step) + ": " + Duration(length_) + " on " +
                              std::to_string(timeline_.rows.size()) + " workers";
    svg_ = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + SvgNumber(kWidth) + " " + SvgNumber(height) +
           "\" role=\"img\" aria-label=\"Timeline. " + title + "\">\n" + kStyle;
    svg_ += Rect(0.5, 0.5, kWidth - 1, height - 1, "rx=\"6\" class=\"paper\"/>\n");
    svg_ += Text(kMargin, 24, title, " class=\"title\"");
    Legend();
    Axis(height - kFoot);
    for (size_t i = 0; i < timeline_.rows.size(); ++i) DrawRow(timeline_.rows[i], kHead + kRow * static_cast<double>(i));
    return svg_ + "</svg>\n";
  }

 private:
  double X(int64_t ns) const {
    const double part = length_ == 0 ? 0 : static_cast<double>(ns - timeline_.begin_ns) / static_cast<double>(length_);
    return kLeft + (kRight - kLeft) * part;
  }

  void Legend() {
    double x = kMargin;
    for (int i = 0; i < 7; ++i) {
      svg_ += Rect(x, 36, 12, 12, "rx=\"2\" class=\"" + std::string(kClasses[i]) + "\"/>") + Text(x + 17, 46.5, kLegend[i]);
      x += 17 + 6.8 * static_cast<double>(std::string(kLegend[i]).size()) + 18;
    }
  }

  // Ticks at 1, 2 or 5 times a power of ten, about eight of them.
  void Axis(double bottom) {
    int64_t tick = 1;
    for (int i = 0; length_ / tick > 8; ++i) tick = (i % 3 == 1) ? tick / 2 * 5 : tick * 2;
    for (int64_t t = 0; t <= length_; t += tick) {
      const double x = X(timeline_.begin_ns + t);
      svg_ += "<line x1=\"" + SvgNumber(x) + "\" x2=\"" + SvgNumber(x) + "\" y1=\"" + SvgNumber(kHead - 4) + "\" y2=\"" +
              SvgNumber(bottom) + "\" class=\"grid\"/>";
      const bool end = x > kRight - 30;
      const std::string label = t == 0 ? "0" : Tick(t, tick);
      svg_ += Text(x, bottom + 18, label, std::string(" class=\"soft\" text-anchor=\"") + (end ? "end" : "middle") + "\"");
    }
  }

  static std::string Tick(int64_t t, int64_t tick) {
    if (tick >= 100'000'000) return SvgNumber(static_cast<double>(t) / 1e9) + " s";
    if (tick >= 100'000) return SvgNumber(static_cast<double>(t) / 1e6) + " ms";
    return SvgNumber(static_cast<double>(t) / 1e3) + " µs";
  }

  void DrawRow(const Row& row, double y) {
    const WorkerTimes& t = row.times;
    svg_ += Text(kMargin, y + 17, row.name, " class=\"name\"");
    svg_ += Text(kMargin, y + 32, Percent(t.compute_ns, t.step_ns) + " busy", " class=\"soft small\"");
    svg_ += Rect(kLeft, y, kRight - kLeft, kCompute, "class=\"back\"/>\n");
    for (const Span& span : row.spans) Bar(span, y);
  }

  void Bar(const Span& span, double y) {
    const TraceEvent& event = *span.event;
    const double x = X(event.begin_ns), width = std::max(X(event.end_ns) - x, 0.4);
    double height = kCompute;
    if (span.activity >= Activity::kSend) {
      y += kCompute + kGap + (span.activity == Activity::kReceive ? kStrip + 1 : 0);
      height = kStrip;
    }
    const bool edge = span.activity < Activity::kExposed && width > 2;
    svg_ += Rect(x, y, width, height, "class=\"" + std::string(kClasses[static_cast<int>(span.activity)]) + (edge ? " bar" : "") + "\">");
    svg_ += "<title>" + SvgText(event.name) + ", " + Duration(event.end_ns - event.begin_ns) + "</title></rect>\n";
    const bool labelled = span.activity <= Activity::kOther && width > 7.0 * static_cast<double>(event.name.size()) + 4;
    if (labelled) svg_ += Text(x + width / 2, y + kCompute / 2 + 3.5, event.name, " class=\"in\"");
  }

  const Timeline& timeline_;
  int64_t length_;
  std::string svg_;
};

}  // namespace

std::string TimelineSvg(const std::vector<TraceEvent>& events, const std::vector<WorkerName>& workers, int64_t step) {
  return Picture(TimelineOf(events, workers, step)).Draw();
}

}  // namespace disagmoe
