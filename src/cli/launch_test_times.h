// Shared by launch_test.cc and its ranks.
#pragma once

#include <string>

#include "transport/control.h"

namespace disagmoe {

inline ControlTimes LaunchTestTimes(const std::string& name) {
  ControlTimes times;
  if (name == "default") return times;
  times.join_timeout_ns = 1'200'000'000;
  times.heartbeat_ns = 50'000'000;
  times.silence_ns = 1'000'000'000;
  times.grace_ns = 150'000'000;
  return times;
}

}  // namespace disagmoe
