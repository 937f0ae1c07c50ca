#include "plan/text.h"

#include <cstdarg>
#include <algorithm>
#include <cstdio>

namespace disagmoe {

std::string Format(const char* format, ...) {
  va_list args, again;
  va_start(args, format);
  va_copy(again, args);
  std::string out(static_cast<size_t>(std::max(0, std::vsnprintf(nullptr, 0, format, args))), ' ');
  std::vsnprintf(out.data(), out.size() + 1, format, again);
  va_end(again);
  va_end(args);
  return out;
}

}  // namespace disagmoe
