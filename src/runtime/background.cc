#include "runtime/background.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"

namespace disagmoe {

struct Background::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool ended = false;
  std::optional<ErrorParts> error;
  std::string internal;  // of another exception

  bool Wait(int64_t ns) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::nanoseconds(ns), [&] { return ended; });
  }
};

void Background::Start(std::function<void()> work) {
  DM_CHECK(Ended(), "the work before has not ended");
  state_ = std::make_shared<State>();
  thread_ = std::thread([state = state_, work = std::move(work)] {
    std::optional<ErrorParts> error;
    std::string internal;
    try {
      work();
    } catch (const Error& e) {
      error = e.parts();
    } catch (const std::exception& e) {
      internal = e.what();
    }
    std::lock_guard lock(state->mutex);
    state->error = std::move(error);
    state->internal = std::move(internal);
    state->ended = true;
    state->changed.notify_all();
  });
}

bool Background::Ended(int64_t wait_ns) {
  if (state_ == nullptr) return true;
  if (!state_->Wait(wait_ns)) return false;
  if (thread_.joinable()) thread_.join();
  if (state_->error) throw Error(*state_->error);
  DM_CHECK(state_->internal.empty(), state_->internal);
  return true;
}

Background::~Background() {
  if (!thread_.joinable()) return;
  if (state_->Wait(1'000'000'000)) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

}  // namespace disagmoe
