#include "transport/transport.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bit>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

#include "base/time.h"

namespace disagmoe {
namespace {

constexpr size_t kAlignment = 64;

// Rounds up to a power of two, or above 4 KiB to a quarter of one: at most a quarter of a block is lost.
size_t BlockSize(size_t size) {
  const size_t power = std::bit_ceil(std::max(size, kAlignment));
  if (power <= 4096) return power;
  const size_t step = power / 8;
  return (size + step - 1) / step * step;
}

std::string StageName(int stage) {
  return (stage % 2 == 0 ? "attention of layer " : "FFN of layer ") + std::to_string(stage / 2);
}

std::string Seconds(int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", static_cast<double>(ns) * 1e-9);
  return text;
}

// Linux's futex, because std::atomic::wait knows no time-out.
void FutexWait(const void* word, int expected, int64_t timeout_ns) {
  timespec ts{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, &ts, nullptr, 0);
}

void FutexWakeAll(const void* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

}  // namespace

struct BufferPool::Impl {
  std::mutex mutex;
  std::unordered_map<size_t, std::vector<std::byte*>> idle;  // by block size
  std::atomic<size_t> held{0};

  ~Impl() {
    for (auto& [size, blocks] : idle) {
      for (std::byte* block : blocks) std::free(block);
    }
  }

  std::byte* Take(size_t block_size) {
    {
      std::lock_guard lock(mutex);
      auto& blocks = idle[block_size];
      if (!blocks.empty()) {
        std::byte* block = blocks.back();
        blocks.pop_back();
        return block;
      }
    }
    void* block = std::aligned_alloc(kAlignment, block_size);
    if (!block) throw std::bad_alloc();
    held += block_size;
    return static_cast<std::byte*>(block);
  }

  void Return(std::byte* block, size_t block_size) {
    std::lock_guard lock(mutex);
    idle[block_size].push_back(block);
  }
};

BufferPool::BufferPool() : impl_(std::make_shared<Impl>()) {}

Buffer BufferPool::Allocate(size_t size) {
  if (size == 0) return {};
  const size_t block_size = BlockSize(size);
  std::byte* block = impl_->Take(block_size);
  // The deleter keeps the pool's blocks alive after the pool itself is gone.
  std::shared_ptr<void> owner(block, [impl = impl_, block_size](void* p) {
    impl->Return(static_cast<std::byte*>(p), block_size);
  });
  return {block, size, std::move(owner)};
}

size_t BufferPool::bytes_held() const { return impl_->held; }

std::string MessageKey::Describe() const {
  // Not the step: it is the number of a pass (a training step, an evaluation, a checkpoint).
  if (kind == MessageKind::kControl) return "figures of the step (" + std::to_string(stage) + ")";
  if (kind == MessageKind::kCollective) {
    return (micro_batch == 0 ? "parts to sum of shared parameters " : "sums of shared parameters ") + std::to_string(stage);
  }
  const std::string what = kind == MessageKind::kForward ? "activations over" : "gradients over";
  const std::string to = stage % 2 == 0 ? " to its FFN" : " to what follows";
  return what + " boundary " + std::to_string(stage) + " (" + StageName(stage) + to + "), micro-batch " + std::to_string(micro_batch);
}

Request::Request(bool is_send, int peer, const MessageKey& key)
    : is_send_(is_send), peer_(peer), key_(key), posted_ns_(NowNs()) {}

std::string Request::Describe() const {
  return key_.Describe() + (is_send_ ? ", to rank " : ", from rank ") + std::to_string(peer_);
}

void Request::Wait(int64_t timeout_ns) {
  const int64_t deadline = NowNs() + timeout_ns;
  while (!done()) {
    const int64_t left = deadline - NowNs();
    if (left <= 0) {
      throw Error({"timed out after " + Seconds(timeout_ns) + (is_send_ ? " sending " : " waiting for ") + Describe(),
                   {}, {}, {}, {}});
    }
    // In this order, as in Finish the other way round: one of the two sees what the other wrote.
    waiters_.fetch_add(1);
    FutexWait(&state_, static_cast<int>(State::kPending), left);
    waiters_.fetch_sub(1);
  }
  if (state() == State::kFailed) {
    throw Error((is_send_ ? "could not send " : "could not receive ") + Describe() + ": " + reason_);
  }
}

void Request::OnDone(std::function<void()> hook) {
  hook_ = std::move(hook);
  if (hook_state_.exchange(kHookSet, std::memory_order_acq_rel) == kHookDue) std::exchange(hook_, nullptr)();
}

bool Request::Complete(Buffer buffer, const SendStamps& stamps) {
  if (claimed_.exchange(true)) return false;
  buffer_ = std::move(buffer);
  stamps_ = stamps;
  Finish(State::kDone);
  return true;
}

bool Request::Fail(std::string reason) {
  if (claimed_.exchange(true)) return false;
  reason_ = std::move(reason);
  Finish(State::kFailed);
  return true;
}

void Request::Finish(State state) {
  done_ns_ = NowNs();
  state_.store(state);
  if (waiters_.load() > 0) FutexWakeAll(&state_);
  // Taken out of the request first: a hook often holds the request itself.
  if (hook_state_.exchange(kHookDue, std::memory_order_acq_rel) == kHookSet) std::exchange(hook_, nullptr)();
}

}  // namespace disagmoe
