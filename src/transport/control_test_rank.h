// For control_test.cc: ranks as threads, and short times.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <thread>

#include "transport/control.h"

namespace disagmoe::control_test {

constexpr int64_t kMs = 1'000'000;
inline constexpr char kSecret[] = "0123456789abcdef";

inline ControlTimes ShortTimes() {
  ControlTimes t;
  t.join_timeout_ns = 3000 * kMs;
  t.heartbeat_ns = 50 * kMs;
  t.silence_ns = 1000 * kMs;
  t.grace_ns = 100 * kMs;
  return t;
}

inline ControlOptions Options(const ControlServer& server, int rank, int world) {
  ControlOptions o;
  o.port = server.port();
  o.rank = rank;
  o.world = world;
  o.secret = kSecret;
  o.role = rank % 2 ? "F-group 0 worker 0" : "A-group 0 worker 0";
  o.times = ShortTimes();
  return o;
}

// A rank as a thread: joins, runs `body`; keeps what was thrown and what on_abort said.
class Rank {
 public:
  Rank(ControlOptions options, std::function<void(ControlClient&)> body, std::string status = "")
      : thread_([this, options, body, status] {
          try {
            ControlClient client(options, [status] { return status; },
                                 [this](const std::string& reason) {
                                   ++aborts;
                                   abort_reason.set_value(reason);
                                 });
            body(client);
          } catch (const RunAborted& e) {
            error = std::string("aborted: ") + e.what();
          } catch (const std::exception& e) {
            error = e.what();
          }
        }) {}
  ~Rank() { Join(); }
  void Join() {
    if (thread_.joinable()) thread_.join();
  }
  std::string WaitAbort() {
    std::future<std::string> future = abort_reason.get_future();
    return future.wait_for(std::chrono::seconds(8)) == std::future_status::ready ? future.get() : "no abort";
  }
  std::promise<std::string> abort_reason;
  std::atomic<int> aborts{0};
  std::string error;

 private:
  std::thread thread_;
};

inline bool WaitFor(const std::function<bool()>& condition) {
  for (int i = 0; i < 800 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return condition();
}

}  // namespace disagmoe::control_test
