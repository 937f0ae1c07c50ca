#include "transport/ucx_context.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <sstream>

namespace disagmoe {
namespace {

void Check(ucs_status_t status, const char* what) {
  if (status == UCS_OK) return;
  throw Error({std::string("UCX failed to ") + what, {}, ucs_status_string(status), {},
               "UCX_LOG_LEVEL=info shows what it found"});
}

// UCX itself only warns, and then finds nobody reachable.
void CheckDevices(const std::string& names) {
  namespace fs = std::filesystem;
  std::istringstream list(names);
  for (std::string name; std::getline(list, name, ',');) {
    const std::string device = name.substr(0, name.find(':'));  // "mlx5_0:1": with a port
    if (device == "all" || fs::exists("/sys/class/net/" + device) || fs::exists("/sys/class/infiniband/" + device)) {
      continue;
    }
    std::string present;
    for (const char* folder : {"/sys/class/net", "/sys/class/infiniband"}) {
      std::error_code none;
      for (const auto& entry : fs::directory_iterator(folder, none)) present += " " + entry.path().filename().string();
    }
    throw Error({"no such network device", "net_devices", device, "one of" + present, {}});
  }
}

void Configure(ucp_config_t* config, const UcxOptions& options) {
  // Read when the library loads, so what SetUcxEnvironment has just set needs to be said again.
  if (const char* warn = std::getenv("UCX_WARN_UNUSED_ENV_VARS")) ucp_config_modify(config, "WARN_UNUSED_ENV_VARS", warn);
  std::string tls = options.tls;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  // The sanitizers take the remote addresses of a single-copy read for addresses of this process.
  if (const size_t at = tls.find("cma,"); at != std::string::npos) tls.erase(at, 4);
#endif
  if (!tls.empty()) Check(ucp_config_modify(config, "TLS", tls.c_str()), "set the transports");
  if (!options.net_devices.empty()) {
    CheckDevices(options.net_devices);
    Check(ucp_config_modify(config, "NET_DEVICES", options.net_devices.c_str()), "set the network devices");
  }
}

// From here on UCX's faults come back as statuses, which we report; that a peer is gone it would also print, on stdout.
void Quieten(ucp_config_t* config) {
  if (!std::getenv("UCX_LOG_LEVEL")) ucp_config_modify(config, "LOG_LEVEL", "fatal");
}

std::string WorkerAddress(ucp_worker_h worker) {
  ucp_address_t* address = nullptr;
  size_t size = 0;
  Check(ucp_worker_get_address(worker, &address, &size), "get a worker's address");
  std::string text(reinterpret_cast<const char*>(address), size);
  ucp_worker_release_address(worker, address);
  return text;
}

}  // namespace

UcxContext::UcxContext(const UcxOptions& options) {
  SetUcxEnvironment();
  ucp_config_t* config = nullptr;
  Check(ucp_config_read(nullptr, nullptr, &config), "read its configuration");
  std::unique_ptr<ucp_config_t, void (*)(ucp_config_t*)> config_owner(config, ucp_config_release);
  Configure(config, options);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  Check(ucp_init(&params, config, &context_), "start");
  try {
    tx_ = MakeWorker();
    rx_ = MakeWorker();
    Quieten(config);
    epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (epoll_fd_ < 0 || wake_fd_ < 0) throw Error(std::string("no file descriptor for UCX: ") + std::strerror(errno));
    Watch(wake_fd_);
    for (ucp_worker_h worker : {tx_, rx_}) {
      int fd = -1;
      Check(ucp_worker_get_efd(worker, &fd), "get a worker's file descriptor");
      Watch(fd);
    }
  } catch (...) {
    Release();
    throw;
  }
}

UcxContext::~UcxContext() { Release(); }

void UcxContext::Release() {
  if (tx_) ucp_worker_destroy(tx_);
  if (rx_) ucp_worker_destroy(rx_);
  if (context_) ucp_cleanup(context_);
  if (epoll_fd_ >= 0) close(epoll_fd_);
  if (wake_fd_ >= 0) close(wake_fd_);
}

ucp_worker_h UcxContext::MakeWorker() {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // made here, used by the transport's thread alone
  ucp_worker_h worker = nullptr;
  Check(ucp_worker_create(context_, &params, &worker), "make a worker");
  return worker;
}

void UcxContext::Watch(int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    throw Error(std::string("cannot wait for UCX's events: ") + std::strerror(errno));
  }
}

void UcxContext::Sleep(int64_t timeout_ns) {
  if (ucp_worker_arm(tx_) != UCS_OK || ucp_worker_arm(rx_) != UCS_OK) return;
  epoll_event events[4];
  const int count = epoll_wait(epoll_fd_, events, 4, static_cast<int>((timeout_ns + 999'999) / 1'000'000));
  for (int i = 0; i < count; ++i) {
    uint64_t wakes;
    if (events[i].data.fd == wake_fd_) [[maybe_unused]] ssize_t n = read(wake_fd_, &wakes, sizeof wakes);
  }
}

void UcxContext::Wake() {
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t n = write(wake_fd_, &one, sizeof one);
}

std::string UcxContext::address() const {
  const std::string tx = WorkerAddress(tx_), rx = WorkerAddress(rx_);
  const uint32_t tx_size = static_cast<uint32_t>(tx.size());
  return std::string(reinterpret_cast<const char*>(&tx_size), sizeof tx_size) + tx + rx;
}

UcxAddress ParseUcxAddress(const std::string& blob, int rank) {
  uint32_t tx_size = 0;
  if (blob.size() > sizeof tx_size) std::memcpy(&tx_size, blob.data(), sizeof tx_size);
  if (tx_size == 0 || blob.size() <= sizeof tx_size + tx_size) {
    throw Error({"not a UCX address", "rank " + std::to_string(rank), std::to_string(blob.size()) + " bytes",
                 "what its address() returned", {}});
  }
  return {blob.substr(sizeof tx_size, tx_size), blob.substr(sizeof tx_size + tx_size)};
}

}  // namespace disagmoe
