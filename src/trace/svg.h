// Parts of SVG drawings.
#pragma once

#include <string>

namespace disagmoe {

// Two digits after the point at most, none that say nothing.
std::string SvgNumber(double value);
// Text that XML takes: escaped, without control characters.
std::string SvgText(const std::string& text);

}  // namespace disagmoe
