// What text and pictures of a roofline share.
#pragma once

#include <string>
#include <vector>

#include "plan/roofline.h"

namespace disagmoe {

// "15,094": rounded.
std::string Grouped(double x);
// Three figures: "15,094", "604", "41.9", "2.08", "0.310".
std::string Figures(double x);
// "20,000", "0.5": all its figures.
std::string TickName(double x);
// "4K" for whole multiples of 1024, else "5,000".
std::string SequenceName(int64_t seq_length);
// "1 NIC", "0.5 NICs".
std::string NicsName(double nics);

// From `low` to `high`, both 1, 2 or 5 times a power of ten.
struct LogAxis {
  double low = 1, high = 10;
  double At(double x) const;  // 0 at low, 1 at high
  double Value(double at) const;
  std::vector<double> Ticks() const;  // 1, 2 and 5 times powers of ten; over more than three decades these alone
};
struct RooflineAxes {
  LogAxis x;  // FLOP a byte
  LogAxis y;  // TFLOP/s of a GPU
};
// They hold every point of the pictures and both ends of the roofs.
RooflineAxes AxesOf(const Roofline& r);
// TFLOP/s that a GPU reaches at most at so many FLOP a byte, forward; nominal: at both peaks.
double RoofAt(const OperationRoof& roof, double flop_per_byte);
double NominalRoofAt(const OperationRoof& roof, double flop_per_byte);

}  // namespace disagmoe
