// A piece of work on a thread of its own. What ends it badly is told to whoever asks, not thrown across threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

namespace disagmoe {

// Used by one thread. One piece of work at a time.
class Background {
 public:
  Background() = default;
  // Waits a second for work in progress, then leaves it: a run that fails must say so, however slow the disk is. So
  // work owns what it uses.
  ~Background();
  Background(const Background&) = delete;
  // The work before must have ended. `work` may throw.
  void Start(std::function<void()> work);
  // Whether the work has ended, or none was started; waits up to so long for it. Throws an Error with the parts of the
  // Error that ended it, or InternalError, at every call.
  bool Ended(int64_t wait_ns = 0);

 private:
  struct State;
  std::shared_ptr<State> state_;  // null: no work
  std::thread thread_;
};

}  // namespace disagmoe
