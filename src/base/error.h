// Errors that a user can cause, and checks of our own invariants.
//
// A user or environment fault is an Error: one line that says what is wrong, where, what was got, what was
// expected, and a hint. Commands print it and exit with 2. A broken invariant is a CHECK: it throws
// InternalError, and commands exit with 3. Neither may cross a thread: catch at the top of every thread.
#pragma once

#include <exception>
#include <string>
#include <utility>

namespace disagmoe {

struct ErrorParts {
  std::string what;      // what is wrong, e.g. "value out of range"
  std::string where;     // file and key, rank and layer, ...
  std::string got;       // empty parts are left out of the line
  std::string expected;
  std::string hint;
};

class Error : public std::exception {
 public:
  explicit Error(ErrorParts parts);
  explicit Error(std::string what) : Error(ErrorParts{std::move(what), {}, {}, {}, {}}) {}
  const char* what() const noexcept override { return line_.c_str(); }
  const ErrorParts& parts() const { return parts_; }

 private:
  ErrorParts parts_;
  std::string line_;
};

// {"error":{"what":...}}: what commands print with --json. Empty parts are left out.
std::string ErrorJson(const ErrorParts& parts);

class InternalError : public std::exception {
 public:
  InternalError(const char* file, int line, const char* condition, const std::string& detail);
  const char* what() const noexcept override { return line_.c_str(); }

 private:
  std::string line_;
};

}  // namespace disagmoe

#define DM_CHECK(condition, detail)                                                     \
  do {                                                                                  \
    if (!(condition)) throw ::disagmoe::InternalError(__FILE__, __LINE__, #condition, detail); \
  } while (false)
