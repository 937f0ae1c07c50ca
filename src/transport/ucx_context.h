// What UCX needs before any message: configuration, context, two workers, their addresses and file descriptors.
#pragma once

#include <ucp/api/ucp.h>

#include <string>

#include "transport/ucx.h"

namespace disagmoe {

class UcxContext {
 public:
  static constexpr unsigned kAmId = 0;  // of all our active messages

  explicit UcxContext(const UcxOptions& options);
  ~UcxContext();
  UcxContext(const UcxContext&) = delete;

  ucp_worker_h tx() const { return tx_; }
  ucp_worker_h rx() const { return rx_; }
  // Sleeps until either worker has events, Wake was called, or the time is over. Returns at once if events wait.
  void Sleep(int64_t timeout_ns);
  void Wake();  // from any thread
  std::string address() const;

 private:
  ucp_worker_h MakeWorker();
  void Watch(int fd);
  void Release();

  ucp_context_h context_ = nullptr;
  ucp_worker_h tx_ = nullptr;
  ucp_worker_h rx_ = nullptr;
  int epoll_fd_ = -1;
  int wake_fd_ = -1;
};

// The two halves of an address() blob.
struct UcxAddress {
  std::string tx;
  std::string rx;
};
UcxAddress ParseUcxAddress(const std::string& blob, int rank);

}  // namespace disagmoe
