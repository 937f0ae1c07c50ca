// Text with numbers.
#pragma once

#include <string>

namespace disagmoe {

std::string Format(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace disagmoe
