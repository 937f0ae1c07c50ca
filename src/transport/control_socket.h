// The system calls of the control channel: addresses, listening, connecting, waking a poll().
#pragma once

#include <cstdint>
#include <string>

namespace disagmoe::control {

struct AddressText {
  std::string host;
  int port = 0;
};
AddressText PeerOf(int fd);
std::string HostPort(const std::string& host, int port);  // "host:port", "[::1]:port"
// A listening socket on the first free port. Throws Error.
int Listen(const std::string& host, int port, int span, int* bound_port);
// A connected non-blocking socket, or -1 and why.
int Connect(const std::string& host, int port, int64_t timeout_ns, std::string* why);
void SetNoDelay(int fd);
// Wakes a poll() in another thread.
class Wakeup {
 public:
  Wakeup();
  ~Wakeup();
  int fd() const { return fd_; }
  void Set();
  void Clear();

 private:
  int fd_;
};

}  // namespace disagmoe::control
