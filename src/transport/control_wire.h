// What the control channel's two ends share: frames, the proof of the secret, the clock filter.
//
// A frame is a u32 length (of what follows), a u8 type and a body; integers are little-endian. Joining:
//   client  Hello   magic, version, client nonce
//   server  Nonce   magic, version, server nonce
//   client  Proof   HMAC(secret, "client", both nonces, claim), claim = rank, world, role, host, process
//   server  Welcome HMAC(secret, "server", both nonces, claim), or Refuse with the reason (to a proven peer only)
// The proof is about joining only: frames after it are neither encrypted nor signed.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace disagmoe::control {

enum class MessageType : uint8_t {
  kHello = 1, kNonce, kProof, kWelcome, kRefuse,
  kStart,       // server: all have joined
  kHeartbeat,   // client: its clock, its status
  kEcho,        // server: that clock, its own clock; the heartbeat in this direction
  kAsk,         // server: send a heartbeat now
  kGather, kGatherPart,
  kFail, kAbort, kLeave, kLeaveAck,
};

constexpr std::string_view kMagic = "DISAGMOE-CONTROL";
constexpr uint32_t kVersion = 1;
constexpr size_t kNonceBytes = 32;
constexpr size_t kMaxBeforeProof = 1024;
constexpr size_t kMaxText = 4096;           // body of anything but a blob
constexpr size_t kMaxBlob = 16 << 20;

// Reading never allocates more than what was received; a short body clears ok().
class Reader {
 public:
  explicit Reader(std::string_view body) : rest_(body) {}
  uint64_t Integer(int bytes);
  uint32_t U32() { return static_cast<uint32_t>(Integer(4)); }
  uint64_t U64() { return Integer(8); }
  std::string Bytes(size_t n);
  std::string Text() { return Bytes(U32()); }
  std::string Rest() { return Bytes(rest_.size()); }
  bool ok() const { return ok_; }
  bool AtEnd() const { return ok_ && rest_.empty(); }

 private:
  std::string_view rest_;
  bool ok_ = true;
};

class Writer {
 public:
  Writer& Integer(uint64_t value, int bytes);
  Writer& U32(uint32_t value) { return Integer(value, 4); }
  Writer& U64(uint64_t value) { return Integer(value, 8); }
  Writer& Bytes(std::string_view bytes) { body_ += bytes; return *this; }
  Writer& Text(std::string_view text) { return U32(static_cast<uint32_t>(text.size())).Bytes(text); }
  const std::string& body() const { return body_; }

 private:
  std::string body_;
};

struct Frame {
  MessageType type = MessageType::kHello;
  std::string body;
};
using FrameBytes = std::shared_ptr<const std::string>;
FrameBytes MakeFrame(MessageType type, std::string_view body);

// A non-blocking socket that carries frames. Owns the descriptor.
class Channel {
 public:
  explicit Channel(int fd);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  int fd() const { return fd_; }
  void Queue(FrameBytes frame) { out_.push_back(std::move(frame)); }
  void Queue(MessageType type, std::string_view body) { Queue(MakeFrame(type, body)); }
  bool wants_write() const { return !out_.empty(); }
  // Write what the socket takes; read what is there (at most 1 MiB). False: the connection is lost, see reason().
  bool Flush();
  bool Fill();
  // The next whole frame: 1, none yet: 0, one longer than max_body: -1.
  int Next(Frame* frame, size_t max_body);
  const std::string& reason() const { return reason_; }

 private:
  bool Lost(const char* call);
  int fd_;
  std::deque<FrameBytes> out_;
  size_t out_done_ = 0;  // bytes of out_.front() that are sent
  std::string in_;
  size_t in_done_ = 0;   // bytes of in_ that were taken as frames
  std::string reason_;
};

// 32 random bytes, or Error.
std::string MakeNonce();
// side: "client" or "server", so that a proof cannot be sent back as an answer.
std::string Prove(const std::string& secret, std::string_view side, const std::string& client_nonce,
                  const std::string& server_nonce, std::string_view claim);
bool SameBytes(std::string_view a, std::string_view b);  // in constant time

// "3", "3, 5-7": ascending ranks as ranges; at most 20 ranges, then "and 4 more".
std::string RankRanges(const std::vector<int>& ranks);
// One line of at most `max` bytes: control characters become spaces.
std::string OneLine(std::string_view text, size_t max);
std::string Seconds(int64_t ns);  // "5.0 s"
// The kernel's boot id: equal in all processes of one host, and in no other.
std::string HostId();

// Offset of another host's clock from round trips: that of the shortest of the last 16, whose error is at most half of it.
class ClockFilter {
 public:
  void Add(int64_t sent_ns, int64_t their_ns, int64_t received_ns);
  int64_t offset_ns() const;

 private:
  struct Sample { int64_t trip_ns; int64_t offset_ns; };
  std::deque<Sample> samples_;
};

}  // namespace disagmoe::control
