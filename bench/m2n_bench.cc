// How fast messages move between two processes of one host: our transport beside UCX used directly (active messages
// by rendezvous, everything inline in one sleeping thread: the best we know on this machine) and beside a plain memcpy
// of the same bytes. Samples of all three are interleaved, so that a busy machine hits all alike.
//
// GB = 1e9 bytes; "both" adds up the two directions. s/GB: CPU seconds of all processes. Send buffers are cold
// (a pool larger than the cache), receive buffers are the few in the window.
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "base/time.h"
#include "transport/ucx.h"
#include "transport/ucx_context.h"

using namespace disagmoe;

namespace {

constexpr size_t kPool = 128u << 20;
constexpr int64_t kPatience = 60'000'000'000;

enum class Method : int { kMemcpy, kRaw, kOurs };
constexpr const char* kNames[] = {"memcpy", "ucx inline", "transport"};

struct Order {  // one sample; count 0 ends
  Method method;
  size_t size;
  int both;
  int count;  // messages a direction
};

struct Sample {
  double seconds = 0;
  double cpu = 0;
  uint64_t wrong = 0;
};

struct Options {
  std::string tls = "posix,cma,self", net_devices, json;
  int samples = 7;
  int window = 8;
};

double CpuSeconds() {
  rusage u{};
  getrusage(RUSAGE_SELF, &u);
  return static_cast<double>(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

void Put(int fd, const void* data, size_t size) {
  if (write(fd, data, size) != static_cast<ssize_t>(size)) _exit(3);
}
void Get(int fd, void* data, size_t size) {
  if (size > 0 && recv(fd, data, size, MSG_WAITALL) != static_cast<ssize_t>(size)) _exit(4);
}
void PutText(int fd, const std::string& text) {
  const size_t size = text.size();
  Put(fd, &size, sizeof size);
  Put(fd, text.data(), size);
}
std::string GetText(int fd) {
  size_t size = 0;
  Get(fd, &size, sizeof size);
  std::string text(size, 0);
  Get(fd, text.data(), size);
  return text;
}

// Message i of a stream starts and ends with its number.
struct Source {
  std::vector<std::byte> pool = std::vector<std::byte>(kPool, std::byte{1});
  std::byte* Next(size_t size, uint64_t i) {
    std::byte* at = pool.data() + i % (kPool / size) * size;
    std::memcpy(at, &i, 8);
    std::memcpy(at + size - 8, &i, 8);
    return at;
  }
};
bool Right(const std::byte* data, size_t size, uint64_t i) {
  return std::memcmp(data, &i, 8) == 0 && std::memcmp(data + size - 8, &i, 8) == 0;
}

// UCX without us: rendezvous messages in order, `window` in flight, one thread.
class Raw {
 public:
  Raw(int rank, const UcxOptions& options, int window) : rank_(rank), window_(window), context_(options) {
    ucp_am_handler_param_t param{};
    param.field_mask =
        UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    param.id = 0;
    param.arg = this;
    param.cb = [](void* self, const void* header, size_t, void* desc, size_t size, const ucp_am_recv_param_t*) {
      return static_cast<Raw*>(self)->Arrived(header, desc, size);
    };
    if (ucp_worker_set_am_recv_handler(context_.rx(), &param) != UCS_OK) _exit(5);
  }

  std::string address() const { return context_.address(); }

  void Connect(const std::string& blob) {
    const UcxAddress address = ParseUcxAddress(blob, 1 - rank_);
    tx_ = Endpoint(context_.tx(), address.rx);
    rx_ = Endpoint(context_.rx(), address.tx);
  }

  uint64_t Run(Source& source, size_t size, int sends, int receives) {
    wrong_ = received_ = sent_ = 0;
    if (slots_.size() != window_ * size) slots_.assign(window_ * size, std::byte{0});
    headers_.resize(static_cast<size_t>(sends));
    uint64_t posted = 0;
    while (sent_ < static_cast<uint64_t>(sends) || received_ < static_cast<uint64_t>(receives)) {
      bool busy = false;
      for (; posted < static_cast<uint64_t>(sends) && posted - sent_ < static_cast<uint64_t>(window_); ++posted) {
        Send(source.Next(size, posted), size, posted);
        busy = true;
      }
      for (int i = 0; i < 16; ++i) {
        const unsigned n = ucp_worker_progress(context_.tx()) + ucp_worker_progress(context_.rx());
        if (n == 0) break;
        busy = true;
      }
      if (!busy) context_.Sleep(1'000'000'000);
    }
    return wrong_;
  }

 private:
  static ucp_ep_h Endpoint(ucp_worker_h worker, const std::string& address) {
    ucp_ep_params_t params{};
    params.field_mask =
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t*>(address.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler = {[](void*, ucp_ep_h, ucs_status_t) {}, nullptr};
    ucp_ep_h ep = nullptr;
    if (ucp_ep_create(worker, &params, &ep) != UCS_OK) _exit(6);
    return ep;
  }

  void Send(std::byte* data, size_t size, uint64_t i) {
    headers_[i] = i;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.flags = UCP_AM_SEND_FLAG_RNDV;
    param.user_data = this;
    param.cb.send = [](void* request, ucs_status_t, void* self) {
      ucp_request_free(request);
      ++static_cast<Raw*>(self)->sent_;
    };
    if (!UCS_PTR_IS_PTR(ucp_am_send_nbx(tx_, 0, &headers_[i], 8, data, size, &param))) ++sent_;
  }

  ucs_status_t Arrived(const void* header, void* desc, size_t size) {
    struct Pull {
      Raw* raw;
      uint64_t i;
      size_t size;
    };
    auto* pull = new Pull{this, 0, size};
    std::memcpy(&pull->i, header, 8);
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.user_data = pull;
    param.cb.recv_am = [](void* request, ucs_status_t, size_t, void* user) {
      ucp_request_free(request);
      std::unique_ptr<Pull> p(static_cast<Pull*>(user));
      p->raw->Pulled(p->i, p->size);
    };
    if (!UCS_PTR_IS_PTR(ucp_am_recv_data_nbx(context_.rx(), desc, Slot(pull->i, size), size, &param))) {
      Pulled(pull->i, size);
      delete pull;
    }
    return UCS_INPROGRESS;
  }

  std::byte* Slot(uint64_t i, size_t size) { return slots_.data() + i % static_cast<uint64_t>(window_) * size; }
  void Pulled(uint64_t i, size_t size) {
    ++received_;
    if (!Right(Slot(i, size), size, i)) ++wrong_;
  }

  const int rank_;
  const int window_;
  UcxContext context_;
  ucp_ep_h tx_ = nullptr, rx_ = nullptr;
  std::vector<std::byte> slots_;
  std::vector<uint64_t> headers_;
  uint64_t sent_ = 0, received_ = 0, wrong_ = 0;
};

uint64_t RunOurs(Transport& transport, Source& source, uint32_t step, int window, size_t size, int sends, int receives) {
  const int peer = 1 - transport.rank();
  uint64_t wrong = 0;
  std::deque<RequestPtr> in_flight[2];
  auto key = [&](int i) { return MessageKey{step, MessageKind::kForward, 0, i}; };
  for (int i = 0, j = 0, done = 0; done < sends + receives;) {
    for (; i < receives && in_flight[0].size() < static_cast<size_t>(window); ++i) {
      in_flight[0].push_back(transport.PostRecv(peer, key(i)));
    }
    for (; j < sends && in_flight[1].size() < static_cast<size_t>(window); ++j) {
      in_flight[1].push_back(transport.PostSend(peer, key(j), {source.Next(size, static_cast<uint64_t>(j)), size, nullptr}));
    }
    for (auto& queue : in_flight) {
      if (queue.empty()) continue;
      do {
        queue.front()->Wait(kPatience);
        if (!queue.front()->is_send() &&
            !Right(queue.front()->buffer().data, size, static_cast<uint64_t>(queue.front()->key().micro_batch))) {
          ++wrong;
        }
        queue.pop_front();
        ++done;
      } while (!queue.empty() && queue.front()->done());
    }
  }
  return wrong;
}

uint64_t RunMemcpy(Source& source, int window, size_t size, int count) {
  static std::vector<std::byte> slots;
  if (slots.size() != static_cast<size_t>(window) * size) slots.assign(static_cast<size_t>(window) * size, std::byte{0});
  uint64_t wrong = 0;
  for (int i = 0; i < count; ++i) {
    std::byte* to = slots.data() + static_cast<size_t>(i % window) * size;
    std::memcpy(to, source.Next(size, static_cast<uint64_t>(i)), size);
    if (!Right(to, size, static_cast<uint64_t>(i))) ++wrong;
  }
  return wrong;
}

[[noreturn]] void Child(int rank, int fd, const Options& options) {
  try {
    UcxOptions ucx;
    ucx.rank = rank;
    ucx.size = 2;
    ucx.tls = options.tls;
    ucx.net_devices = options.net_devices;
    Raw raw(rank, ucx, options.window);
    UcxTransport ours(ucx);
    PutText(fd, raw.address());
    PutText(fd, ours.address());
    std::vector<std::string> raw_all{GetText(fd), GetText(fd)}, ours_all{GetText(fd), GetText(fd)};
    raw.Connect(raw_all[1 - rank]);
    ours.Connect(ours_all);
    Source source;
    uint32_t step = 0;
    for (Order order; Get(fd, &order, sizeof order), order.count > 0; ++step) {
      const int sends = rank == 0 || order.both ? order.count : 0;
      const int receives = rank == 1 || order.both ? order.count : 0;
      Sample sample;
      const double cpu = CpuSeconds();
      const int64_t start = NowNs();
      switch (order.method) {
        case Method::kMemcpy: sample.wrong = RunMemcpy(source, options.window, order.size, sends); break;
        case Method::kRaw: sample.wrong = raw.Run(source, order.size, sends, receives); break;
        case Method::kOurs:
          sample.wrong = RunOurs(ours, source, step, options.window, order.size, sends, receives);
          break;
      }
      sample.seconds = static_cast<double>(NowNs() - start) * 1e-9;
      sample.cpu = CpuSeconds() - cpu;
      Put(fd, &sample, sizeof sample);
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "rank %d: %s\n", rank, e.what());
    _exit(1);
  }
  _exit(0);
}

double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

Options Parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    auto value = [&]() -> std::string {
      if (i + 1 >= argc) throw Error("no value after " + flag);
      return argv[++i];
    };
    if (flag == "--tls") o.tls = value();
    else if (flag == "--net-devices") o.net_devices = value();
    else if (flag == "--json") o.json = value();
    else if (flag == "--samples") o.samples = std::stoi(value());
    else if (flag == "--window") o.window = std::stoi(value());
    else throw Error({"unknown option", {}, flag, "--tls, --net-devices, --samples, --window or --json FILE", {}});
  }
  return o;
}

int Main(const Options& options) {
  int fds[2];
  for (int r = 0; r < 2; ++r) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) throw Error("no socket");
    if (fork() == 0) {
      close(pair[0]);
      Child(r, pair[1], options);
    }
    close(pair[1]);
    fds[r] = pair[0];
  }
  std::string raw[2], ours[2];
  for (int r = 0; r < 2; ++r) raw[r] = GetText(fds[r]), ours[r] = GetText(fds[r]);
  for (int fd : fds) {
    for (auto& text : {raw[0], raw[1], ours[0], ours[1]}) PutText(fd, text);
  }

  nlohmann::json rows = nlohmann::json::array();
  std::printf("%s, window %d, %d samples: GB/s median [min..max], CPU s/GB median\n", options.tls.c_str(),
              options.window, options.samples);
  uint64_t wrong = 0;
  for (size_t size : {64u << 10, 1u << 20, 16u << 20}) {
    for (int both : {0, 1}) {
      std::map<Method, std::vector<double>> speed, cost;
      const int count = static_cast<int>((size < (1u << 20) ? 128u << 20 : 512u << 20) / size);
      for (int sample = -1; sample < options.samples; ++sample) {  // the first warms up
        for (Method method : {Method::kMemcpy, Method::kRaw, Method::kOurs}) {
          const Order order{method, size, both, count};
          for (int fd : fds) Put(fd, &order, sizeof order);
          Sample s[2];
          for (int r = 0; r < 2; ++r) Get(fds[r], &s[r], sizeof s[r]);
          wrong += s[0].wrong + s[1].wrong;
          const double gb = 1e-9 * static_cast<double>(size) * count * (both ? 2 : 1);
          if (sample < 0) continue;
          speed[method].push_back(gb / std::max(s[0].seconds, s[1].seconds));
          cost[method].push_back((s[0].cpu + s[1].cpu) / gb);
        }
      }
      for (auto& [method, v] : speed) {
        const double best = *std::max_element(v.begin(), v.end()), least = *std::min_element(v.begin(), v.end());
        std::printf("%6zu KiB %-7s %-10s %6.2f [%5.2f..%5.2f]  %.2f s/GB", size >> 10, both ? "both" : "one way",
                    kNames[static_cast<int>(method)], Median(v), least, best, Median(cost[method]));
        if (method == Method::kOurs) {
          std::printf("   %.2f of UCX, %.2f of memcpy", Median(v) / Median(speed[Method::kRaw]),
                      Median(v) / Median(speed[Method::kMemcpy]));
        }
        std::printf("\n");
        std::fflush(stdout);
        rows.push_back({{"bytes", size}, {"both_ways", both == 1}, {"method", kNames[static_cast<int>(method)]},
                        {"gb_per_s", v}, {"cpu_s_per_gb", cost[method]}});
      }
    }
  }
  const Order end{Method::kMemcpy, 0, 0, 0};
  for (int fd : fds) Put(fd, &end, sizeof end);
  int failed = 0;
  for (int status; wait(&status) > 0;) failed += status != 0;
  if (!options.json.empty()) {
    std::ofstream(options.json) << nlohmann::json{{"tls", options.tls}, {"window", options.window}, {"rows", rows}}.dump(1)
                                << "\n";
  }
  if (wrong > 0) std::fprintf(stderr, "%llu messages arrived wrong\n", static_cast<unsigned long long>(wrong));
  return wrong > 0 || failed > 0 ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    SetUcxEnvironment();
    return Main(Parse(argc, argv));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 2;
  }
}
