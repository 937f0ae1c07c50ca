#include <algorithm>
#include <cmath>

#include "plan/roofline_print.h"

namespace disagmoe {

double LogAxis::At(double x) const { return std::log10(x / low) / std::log10(high / low); }
double LogAxis::Value(double at) const { return low * std::pow(high / low, at); }

std::vector<double> LogAxis::Ticks() const {
  std::vector<double> out;
  for (int power = static_cast<int>(std::floor(std::log10(low))); std::pow(10, power) < high * 1.01; ++power) {
    for (int i : {1, 2, 5}) {
      const double tick = i * std::pow(10, power);
      if (tick < low * 0.99 || tick > high * 1.01 || (i > 1 && high / low > 1000)) continue;
      out.push_back(tick);
    }
  }
  return out;
}

double RoofAt(const OperationRoof& o, double x) {
  return std::min(o.forward.tflops(), x * o.nics * o.nic_gbytes_s * o.m2n * 1e-3);
}

double NominalRoofAt(const OperationRoof& o, double x) {
  return std::min(o.peak_tflops, x * o.nics * o.nic_gbytes_s * 1e-3);
}

namespace {

// The shortest axis that holds both.
LogAxis Around(double low, double high) {
  LogAxis out;
  const auto power = [](double x) { return std::pow(10, std::floor(std::log10(x))); };
  const double below = power(low), above = power(high);
  out.low = low >= 5 * below ? 5 * below : low >= 2 * below ? 2 * below : below;
  out.high = high <= above ? above : high <= 2 * above ? 2 * above : high <= 5 * above ? 5 * above : 10 * above;
  return out;
}

}  // namespace

RooflineAxes AxesOf(const Roofline& r) {
  std::vector<double> x;
  double top = 0;
  for (const OperationRoof* o : {&r.attention, &r.ffn}) {
    x.insert(x.end(), {o->forward.intensity(), o->printed, o->forward.turning_point(o->nics),
                       o->nominal_turning_point / o->nics});
    top = std::max(top, o->peak_tflops);
  }
  for (const SequencePoint& p : r.sequences) x.push_back(p.intensity);
  const auto [low, high] = std::minmax_element(x.begin(), x.end());
  double bottom = top;
  for (const OperationRoof* o : {&r.attention, &r.ffn}) bottom = std::min(bottom, RoofAt(*o, *low));
  return {Around(*low / 1.4, *high * 1.4), Around(bottom / 1.4, top * 1.1)};
}

namespace {

constexpr int kLeft = 9;   // of the axis' labels
constexpr int kRows = 16;
// U+2800 and a bit for each dot: by column (2) and row (4) of a character.
constexpr int kDots[2][4] = {{0x01, 0x02, 0x04, 0x40}, {0x08, 0x10, 0x20, 0x80}};

std::string Padded(const std::string& ascii, int columns) {
  std::string out = ascii.substr(0, static_cast<size_t>(columns));
  return out + std::string(static_cast<size_t>(columns) - out.size(), ' ');
}

class Drawing {
 public:
  Drawing(const Roofline& r, int columns)
      : r_(r),
        axes_(AxesOf(r)),
        columns_(columns),
        width_(columns - kLeft - 1),
        dots_(kRows, std::vector<int>(width_, 0)),
        marks_(kRows, std::string(width_, ' ')) {}

  std::string Draw() {
    Line(r_.attention, 1);
    Line(r_.ffn, 2);  // every other dot
    Mark('A', r_.attention.forward.intensity(), r_.attention.forward.attainable_tflops(r_.attention.nics));
    Mark('F', r_.ffn.forward.intensity(), r_.ffn.forward.attainable_tflops(r_.ffn.nics));
    Mark('a', r_.attention.printed, RoofAt(r_.attention, r_.attention.printed));
    Mark('f', r_.ffn.printed, RoofAt(r_.ffn, r_.ffn.printed));
    for (const OperationRoof* o : {&r_.attention, &r_.ffn}) {
      Mark('*', o->forward.turning_point(o->nics), o->forward.tflops());
    }
    const std::string title = Padded("TFLOP/s of a GPU over FLOP for each byte that crosses, forward", columns_);
    return title + "\n" + Body() + XAxis() + Legend();
  }

 private:
  int RowOf(double y) const { return std::clamp(static_cast<int>((1 - axes_.y.At(y)) * kRows), 0, kRows - 1); }
  int ColumnOf(double x) const { return std::clamp(static_cast<int>(axes_.x.At(x) * width_), 0, width_ - 1); }

  void Line(const OperationRoof& o, int every) {
    for (int i = 0; i < 2 * width_; i += every) {
      const double y = axes_.y.At(RoofAt(o, axes_.x.Value((i + 0.5) / (2 * width_))));
      const int row = static_cast<int>(std::floor((1 - y) * 4 * kRows));
      if (row >= 0 && row < 4 * kRows) dots_[row / 4][i / 2] |= kDots[i % 2][row % 4];
    }
  }

  // Beside what is there, so that both can be read.
  void Mark(char mark, double x, double y) {
    const int row = RowOf(y), column = ColumnOf(x);
    for (int away = 0; away < width_; ++away) {
      for (const int at : {column + away, column - away}) {
        if (at < 0 || at >= width_ || marks_[row][at] != ' ') continue;
        marks_[row][at] = mark;
        return;
      }
    }
  }

  std::string Body() const {
    std::string out;
    for (int row = 0; row < kRows; ++row) {
      std::string label;
      for (const double value : axes_.y.Ticks()) {
        if (RowOf(value) == row) label = TickName(value);
      }
      out += std::string(kLeft - 1 - std::min<size_t>(label.size(), kLeft - 1), ' ') + label.substr(0, kLeft - 1) +
             (label.empty() ? " \u2502" : " \u2524");
      for (int c = 0; c < width_; ++c) out += Cell(row, c);
      out += "\n";
    }
    return out;
  }

  std::string Cell(int row, int column) const {
    if (marks_[row][column] != ' ') return std::string(1, marks_[row][column]);
    const int code = dots_[row][column];
    if (code == 0) return " ";
    return {static_cast<char>(0xE2), static_cast<char>(0xA0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
  }

  std::string XAxis() const {
    std::string ticks(kLeft, ' '), labels(static_cast<size_t>(columns_), ' ');
    ticks += "\u2514";
    std::vector<char> tick(width_, 0);
    int free = 0;  // from this column on
    for (const double value : axes_.x.Ticks()) {
      const int at = ColumnOf(value);
      const std::string label = TickName(value);
      const auto size = static_cast<int>(label.size());
      const int begin = std::clamp(kLeft + 1 + at - size / 2, 0, columns_ - size);
      tick[at] = 1;
      if (begin < free) continue;
      labels.replace(static_cast<size_t>(begin), label.size(), label);
      free = begin + size + 1;
    }
    for (char t : tick) ticks += t ? "\u2534" : "\u2500";
    return ticks + "\n" + labels + "\n";
  }

  std::string Legend() const {
    const auto line = [&](char upper, char lower, const std::string& name, const OperationRoof& o) {
      return Padded(std::string(" ") + upper + " " + name + " " + Grouped(o.forward.intensity()) + " (" + lower +
                        " published " + Grouped(o.printed) + "), turns (*) at " +
                        Grouped(o.forward.turning_point(o.nics)) + ", " + NicsName(o.nics), columns_) + "\n";
    };
    return line('A', 'a', "attention", r_.attention) + line('F', 'f', "experts", r_.ffn);
  }

  const Roofline& r_;
  RooflineAxes axes_;
  int columns_, width_;
  std::vector<std::vector<int>> dots_;
  std::vector<std::string> marks_;
};

}  // namespace

std::string DrawRoofline(const Roofline& r, int columns) { return Drawing(r, std::clamp(columns, 72, 200)).Draw(); }

}  // namespace disagmoe
