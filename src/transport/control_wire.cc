#include "transport/control_wire.h"

#include <errno.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "base/error.h"

namespace disagmoe::control {

uint64_t Reader::Integer(int bytes) {
  if (!ok_ || rest_.size() < static_cast<size_t>(bytes)) {
    ok_ = false;
    return 0;
  }
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(static_cast<unsigned char>(rest_[i])) << (8 * i);
  rest_.remove_prefix(bytes);
  return value;
}

std::string Reader::Bytes(size_t n) {
  if (!ok_ || rest_.size() < n) {
    ok_ = false;
    return {};
  }
  std::string bytes(rest_.substr(0, n));
  rest_.remove_prefix(n);
  return bytes;
}

Writer& Writer::Integer(uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) body_.push_back(static_cast<char>(value >> (8 * i)));
  return *this;
}

FrameBytes MakeFrame(MessageType type, std::string_view body) {
  Writer w;
  w.U32(static_cast<uint32_t>(body.size() + 1)).Integer(static_cast<uint8_t>(type), 1).Bytes(body);
  return std::make_shared<const std::string>(w.body());
}

Channel::Channel(int fd) : fd_(fd) {}
Channel::~Channel() { close(fd_); }

bool Channel::Lost(const char* call) {
  reason_ = errno == ECONNRESET || errno == EPIPE ? "connection closed" : std::string(call) + ": " + strerror(errno);
  return false;
}

bool Channel::Flush() {
  while (!out_.empty()) {
    const std::string& front = *out_.front();
    ssize_t n = send(fd_, front.data() + out_done_, front.size() - out_done_, MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK ? true : Lost("send");
    }
    out_done_ += n;
    if (out_done_ == front.size()) {
      out_.pop_front();
      out_done_ = 0;
    }
  }
  return true;
}

bool Channel::Fill() {
  if (in_done_ > 0) {
    in_.erase(0, in_done_);
    in_done_ = 0;
  }
  char chunk[65536];
  for (int i = 0; i < 16; ++i) {
    ssize_t n = recv(fd_, chunk, sizeof chunk, 0);
    if (n > 0) {
      in_.append(chunk, n);
    } else if (n == 0) {
      reason_ = "connection closed";
      return false;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      break;
    } else if (errno != EINTR) {
      return Lost("recv");
    }
  }
  return true;
}

int Channel::Next(Frame* frame, size_t max_body) {
  std::string_view rest(in_);
  rest.remove_prefix(in_done_);
  if (rest.size() < 4) return 0;
  size_t length = Reader(rest).U32();
  if (length < 1 || length > max_body + 1) return -1;
  if (rest.size() < 4 + length) return 0;
  frame->type = static_cast<MessageType>(rest[4]);
  frame->body.assign(rest.substr(5, length - 1));
  in_done_ += 4 + length;
  return 1;
}

std::string MakeNonce() {
  std::string nonce(kNonceBytes, '\0');
  if (RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), static_cast<int>(nonce.size())) != 1) {
    throw Error("the system has no random numbers to give (RAND_bytes failed)");
  }
  return nonce;
}

std::string Prove(const std::string& secret, std::string_view side, const std::string& client_nonce,
                  const std::string& server_nonce, std::string_view claim) {
  Writer w;
  w.Text(kMagic).U32(kVersion).Text(side).Text(client_nonce).Text(server_nonce).Text(claim);
  unsigned char mac[EVP_MAX_MD_SIZE];
  unsigned int length = 0;
  const std::string& text = w.body();
  const unsigned char* made =
      HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
           reinterpret_cast<const unsigned char*>(text.data()), text.size(), mac, &length);
  DM_CHECK(made != nullptr && length == 32, "HMAC-SHA256 failed");
  return std::string(reinterpret_cast<char*>(mac), length);
}

bool SameBytes(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::string RankRanges(const std::vector<int>& ranks) {
  std::string text;
  int ranges = 0;
  for (size_t i = 0; i < ranks.size();) {
    size_t j = i;
    while (j + 1 < ranks.size() && ranks[j + 1] == ranks[j] + 1) ++j;
    if (++ranges > 20) return text + " and " + std::to_string(ranks.size() - i) + " more";
    if (!text.empty()) text += ", ";
    text += std::to_string(ranks[i]);
    if (j > i) text += (j == i + 1 ? ", " : "-") + std::to_string(ranks[j]);
    i = j + 1;
  }
  return text;
}

std::string OneLine(std::string_view text, size_t max) {
  std::string line(text.substr(0, max));
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

std::string Seconds(int64_t ns) {
  char text[32];
  snprintf(text, sizeof text, "%.1f s", static_cast<double>(ns) / 1e9);
  return text;
}

std::string HostId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

void ClockFilter::Add(int64_t sent_ns, int64_t their_ns, int64_t received_ns) {
  int64_t trip = received_ns - sent_ns;
  if (trip < 0) return;
  samples_.push_back({trip, their_ns - (sent_ns + trip / 2)});
  if (samples_.size() > 16) samples_.pop_front();
}

int64_t ClockFilter::offset_ns() const {
  if (samples_.empty()) return 0;
  auto best = std::min_element(samples_.begin(), samples_.end(),
                               [](const Sample& a, const Sample& b) { return a.trip_ns < b.trip_ns; });
  return best->offset_ns;
}

}  // namespace disagmoe::control
