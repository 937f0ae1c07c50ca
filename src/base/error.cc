#include "base/error.h"

#include <cstring>
#include <nlohmann/json.hpp>

namespace disagmoe {

Error::Error(ErrorParts parts) : parts_(std::move(parts)) {
  line_ = parts_.what;
  if (!parts_.where.empty()) line_ += " (" + parts_.where + ")";
  if (!parts_.got.empty()) line_ += ": got " + parts_.got;
  if (!parts_.expected.empty()) line_ += (parts_.got.empty() ? ": expected " : ", expected ") + parts_.expected;
  if (!parts_.hint.empty()) line_ += ". Hint: " + parts_.hint;
}

std::string ErrorJson(const ErrorParts& parts) {
  nlohmann::ordered_json error = {{"what", parts.what}};
  if (!parts.where.empty()) error["where"] = parts.where;
  if (!parts.got.empty()) error["got"] = parts.got;
  if (!parts.expected.empty()) error["expected"] = parts.expected;
  if (!parts.hint.empty()) error["hint"] = parts.hint;
  const nlohmann::ordered_json object = {{"error", error}};
  return object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

InternalError::InternalError(const char* file, int line, const char* condition, const std::string& detail) {
  const char* slash = std::strrchr(file, '/');
  line_ = std::string("internal error: ") + condition + " does not hold at " + (slash ? slash + 1 : file) + ":" +
          std::to_string(line) + (detail.empty() ? "" : ": " + detail);
}

}  // namespace disagmoe
