#include "base/error.h"

#include <cstring>

namespace disagmoe {

Error::Error(ErrorParts parts) : parts_(std::move(parts)) {
  line_ = parts_.what;
  if (!parts_.where.empty()) line_ += " (" + parts_.where + ")";
  if (!parts_.got.empty()) line_ += ": got " + parts_.got;
  if (!parts_.expected.empty()) line_ += (parts_.got.empty() ? ": expected " : ", expected ") + parts_.expected;
  if (!parts_.hint.empty()) line_ += ". Hint: " + parts_.hint;
}

InternalError::InternalError(const char* file, int line, const char* condition, const std::string& detail) {
  const char* slash = std::strrchr(file, '/');
  line_ = std::string("internal error: ") + condition + " does not hold at " + (slash ? slash + 1 : file) + ":" +
          std::to_string(line) + (detail.empty() ? "" : ": " + detail);
}

}  // namespace disagmoe
