// Moving keyed messages between workers.
//
// One narrow contract with several wires: in-process (ranks are threads), UCX (ranks are processes), and wrappers
// of the same interface (paced: an emulated NIC; faulty: for tests).
//
// - Every message carries its key (step, kind, stage, micro-batch, part). A receive names source and key; a message
//   is never matched by order. A second message with the same source and key before the first was taken is an error.
//   (the receiving transport aborts, naming the message), and so is a second receive posted for the same (it fails).
// - Flow control: the payload of a large message moves only once its receive is posted; the receiver
//   allocates the buffer then, from the size that came with the message. Zero-length messages are messages.
//   So a send may stay pending until its receive is posted: never wait for a send before posting your receives.
// - PostSend and PostRecv never block and may be called from any thread. The buffer of a send must not be written
//   until its request is done (the request holds a reference). Nothing is ever sent to oneself.
// - Waiting sleeps. A wait has a deadline, and ends at once when the transport is aborted or the peer is lost;
//   the error names what was awaited.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"

namespace disagmoe {

// A piece of memory that its last reference frees (or hands back to a pool). Host memory unless the allocator that
// made it says otherwise.
struct Buffer {
  std::byte* data = nullptr;
  size_t size = 0;
  std::shared_ptr<void> owner;
};

// Recycles 64-byte aligned host blocks, so that steady state neither calls the system nor faults pages. Thread-safe.
class BufferPool {
 public:
  BufferPool();
  Buffer Allocate(size_t size);
  size_t bytes_held() const;  // in use and idle together

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

enum class MessageKind : uint8_t { kForward = 0, kBackward = 1, kCollective = 2, kControl = 3 };

struct MessageKey {
  uint32_t step = 0;
  MessageKind kind = MessageKind::kForward;
  int32_t stage = 0;        // boundary, or the bucket of a collective
  int32_t micro_batch = 0;  // or the phase of a collective
  friend bool operator==(const MessageKey&, const MessageKey&) = default;
  // "activations over boundary 3 (FFN of layer 1 to attention of layer 2), micro-batch 2, step 7"
  std::string Describe() const;
};

// Times that travel with a message, by the sender's NowNs(). start/end are the emulated wire's (0: not emulated).
struct SendStamps {
  int64_t posted_ns = 0;
  int64_t start_ns = 0;
  int64_t end_ns = 0;
};

// The state of one posted operation.
class Request {
 public:
  enum class State : int { kPending = 0, kDone = 1, kFailed = 2 };
  bool done() const { return state_.load(std::memory_order_acquire) != State::kPending; }
  State state() const { return state_.load(std::memory_order_acquire); }
  // Sleeps until done, failed, or `timeout_ns` is over. Throws Error on failure or time-out, saying what was awaited.
  void Wait(int64_t timeout_ns);

  // Of a receive that is done: the message, and when its sender posted it (sender's NowNs(), so comparable on one
  // host; see ControlClient::clock_offset_ns for others). Of any done request: when it completed here.
  Buffer& buffer() { return buffer_; }
  int64_t posted_ns() const { return posted_ns_; }
  int64_t sender_posted_ns() const { return stamps_.posted_ns; }
  int64_t done_ns() const { return done_ns_; }
  int peer() const { return peer_; }
  const MessageKey& key() const { return key_; }
  bool is_send() const { return is_send_; }
  const std::string& reason() const { return reason_; }  // of a failed request
  // "activations over ... from rank 3", for messages.
  std::string Describe() const;

  // Calls `hook` once the request is done (now, if it is), in the thread that completes it: it must not block.
  // One hook a request.
  void OnDone(std::function<void()> hook);

  // For implementations, from any thread. The first call counts; later ones do nothing and return false.
  Request(bool is_send, int peer, const MessageKey& key);
  bool Complete(Buffer buffer, const SendStamps& stamps);
  bool Complete(Buffer buffer, int64_t sender_posted_ns) { return Complete(std::move(buffer), SendStamps{sender_posted_ns, 0, 0}); }
  bool Fail(std::string reason);
  const SendStamps& stamps() const { return stamps_; }

 private:
  enum Hook : int { kNoHook, kHookSet, kHookDue };
  void Finish(State state);

  std::atomic<State> state_{State::kPending};
  std::atomic<bool> claimed_{false};
  std::atomic<int> waiters_{0};  // so that an end that nobody sleeps for costs no system call
  std::atomic<int> hook_state_{kNoHook};
  std::function<void()> hook_;
  bool is_send_;
  int peer_;
  MessageKey key_;
  Buffer buffer_;
  std::string reason_;
  int64_t posted_ns_ = 0;
  SendStamps stamps_;
  int64_t done_ns_ = 0;
};
using RequestPtr = std::shared_ptr<Request>;

// Counted when posted (sends) and when completed (receives): payload bytes, without the transport's own headers.
struct TransportCounters {
  std::atomic<uint64_t> bytes_sent{0};
  std::atomic<uint64_t> bytes_received{0};
  std::atomic<uint64_t> messages_sent{0};
  std::atomic<uint64_t> messages_received{0};
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual RequestPtr PostSend(int dst, const MessageKey& key, Buffer buffer) = 0;
  virtual RequestPtr PostRecv(int src, const MessageKey& key) = 0;
  // For wrappers that model time: as PostSend, and the receiver sees these times. A wire that carries no stamps
  // may leave it as it is.
  virtual RequestPtr PostSendStamped(int dst, const MessageKey& key, Buffer buffer, const SendStamps&) {
    return PostSend(dst, key, std::move(buffer));
  }
  // Fails every pending request and every later one with `reason`. Idempotent, callable from any thread.
  virtual void Abort(const std::string& reason) = 0;
  virtual const TransportCounters& counters() const = 0;
  // Memory for messages. Receives allocate through the same function.
  virtual Buffer Allocate(size_t size) = 0;
};

}  // namespace disagmoe
