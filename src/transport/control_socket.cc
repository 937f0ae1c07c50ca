#include "transport/control_socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>

#include "base/error.h"
#include "base/time.h"

namespace disagmoe::control {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// Waits as long as the system's resolver does; numeric addresses do not ask it.
Addresses Resolve(const std::string& host, int port, bool passive, std::string* why) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
  addrinfo* list = nullptr;
  int rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (rc != 0) {
    *why = rc == EAI_SYSTEM ? strerror(errno) : gai_strerror(rc);
    list = nullptr;
  }
  return Addresses(list, freeaddrinfo);
}

AddressText TextOf(const sockaddr_storage& address, socklen_t length) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (getnameinfo(reinterpret_cast<const sockaddr*>(&address), length, host, sizeof host, port, sizeof port,
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return {"unknown address", 0};
  }
  return {host, atoi(port)};
}

// One attempt to listen; -1 with errno set.
int TryListen(const addrinfo& address) {
  int fd = socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(fd, address.ai_addr, address.ai_addrlen) == 0 && listen(fd, 1024) == 0) return fd;
  int error = errno;
  close(fd);
  errno = error;
  return -1;
}

// One attempt to connect; -1 with errno set.
int TryConnect(const addrinfo& address, int64_t timeout_ns) {
  int fd = socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  int error = 0;
  if (connect(fd, address.ai_addr, address.ai_addrlen) != 0) {
    error = errno;
    if (error == EINPROGRESS) {
      pollfd p = {fd, POLLOUT, 0};
      socklen_t length = sizeof error;
      error = ETIMEDOUT;
      if (poll(&p, 1, static_cast<int>(timeout_ns / 1'000'000) + 1) == 1) {
        getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
      }
    }
  }
  if (error == 0) {
    SetNoDelay(fd);
    return fd;
  }
  close(fd);
  errno = error;
  return -1;
}

// Linux lets a socket connect to itself when the port is free and in the ephemeral range.
bool IsSelf(int fd) {
  sockaddr_storage a, b;
  socklen_t la = sizeof a, lb = sizeof b;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&a), &la) != 0) return false;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&b), &lb) != 0) return false;
  AddressText ta = TextOf(a, la), tb = TextOf(b, lb);
  return ta.host == tb.host && ta.port == tb.port;
}

}  // namespace

void SetNoDelay(int fd) {
  int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

std::string HostPort(const std::string& host, int port) {
  bool v6 = host.find(':') != std::string::npos;
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

AddressText PeerOf(int fd) {
  sockaddr_storage address;
  socklen_t length = sizeof address;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return {"unknown address", 0};
  return TextOf(address, length);
}

int Listen(const std::string& host, int port, int span, int* bound_port) {
  std::string why;
  for (int p = port; p < port + span && p <= 65535; ++p) {
    Addresses list = Resolve(host, p, true, &why);
    if (!list) break;
    int fd = TryListen(*list);
    if (fd >= 0) {
      sockaddr_storage address;
      socklen_t length = sizeof address;
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
      *bound_port = TextOf(address, length).port;
      return fd;
    }
    why = strerror(errno);
    if (errno != EADDRINUSE && errno != EACCES) break;
  }
  std::string where = HostPort(host, port) + (span > 1 ? "-" + std::to_string(port + span - 1) : "");
  throw Error({"the control server cannot listen", where, why, "",
               "the address must be one of this host's, the port free (transport.listen, transport.port, MASTER_PORT)"});
}

int Connect(const std::string& host, int port, int64_t timeout_ns, std::string* why) {
  int64_t end = NowNs() + timeout_ns;
  Addresses list = Resolve(host, port, false, why);
  for (addrinfo* a = list.get(); a; a = a->ai_next) {
    int64_t left = end - NowNs();
    if (left <= 0) break;
    int fd = TryConnect(*a, left);
    if (fd >= 0 && !IsSelf(fd)) return fd;
    *why = fd >= 0 ? "connection refused" : strerror(errno);
    if (fd >= 0) close(fd);
  }
  return -1;
}

Wakeup::Wakeup() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (fd_ < 0) throw Error(std::string("eventfd failed: ") + strerror(errno));
}
Wakeup::~Wakeup() { close(fd_); }

void Wakeup::Set() {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t n = write(fd_, &one, sizeof one);
}

void Wakeup::Clear() {
  uint64_t count;
  [[maybe_unused]] ssize_t n = read(fd_, &count, sizeof count);
}

}  // namespace disagmoe::control
