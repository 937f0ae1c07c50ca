// Time in integer nanoseconds. NowNs() is CLOCK_MONOTONIC: the same clock in all processes of one host.
#pragma once

#include <chrono>
#include <cstdint>

namespace disagmoe {

inline int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace disagmoe
