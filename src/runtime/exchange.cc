#include "runtime/exchange.h"

#include <ATen/ATen.h>

#include <cstring>

#include "base/error.h"

namespace disagmoe {
namespace {

size_t Aligned(size_t n) { return (n + 63) / 64 * 64; }

// Writes or reads consecutive arrays, each from a 64-byte boundary.
class Cursor {
 public:
  explicit Cursor(const Buffer& b) : buffer_(b) {}
  template <typename T>
  void Put(const T* data, size_t n) {
    std::byte* to = Take(n * sizeof(T));
    if (n > 0) std::memcpy(to, data, n * sizeof(T));
  }
  template <typename T>
  std::vector<T> Get(size_t n) {
    std::vector<T> out(n);
    const std::byte* from = Take(n * sizeof(T));
    if (n > 0) std::memcpy(out.data(), from, n * sizeof(T));
    return out;
  }
  std::byte* Take(size_t bytes) {
    DM_CHECK(at_ + bytes <= buffer_.size, "a message is shorter than its header says");
    std::byte* p = buffer_.data + at_;
    at_ = Aligned(at_ + bytes);
    return p;
  }

 private:
  Buffer buffer_;
  size_t at_ = 0;
};

// A view of the message's memory, which it keeps alive; a copy on other devices.
Tensor View(std::byte* data, const Buffer& message, int64_t rows, int64_t hidden, at::ScalarType dtype, at::Device device) {
  if (rows == 0) return at::empty({0, hidden}, at::TensorOptions().dtype(dtype).device(device));
  Tensor t = at::from_blob(data, {rows, hidden}, [owner = message.owner](void*) {}, at::TensorOptions().dtype(dtype));
  return device.is_cpu() ? t : t.to(device);
}

Tensor HostView(std::byte* data, int64_t rows, int64_t hidden, at::ScalarType dtype) {
  return at::from_blob(data, {rows, hidden}, at::TensorOptions().dtype(dtype));
}

void GatherInto(std::byte* to, const Tensor& src, const Tensor& index) {
  const int64_t n = index.defined() ? index.size(0) : src.size(0);
  if (n == 0) return;
  Tensor out = HostView(to, n, src.size(1), src.scalar_type());
  if (!index.defined()) {
    out.copy_(src);
  } else if (src.is_cpu()) {
    GatherRows(src, index, out);
  } else {
    out.copy_(src.index_select(0, index));
  }
}

Tensor IntTensor(const std::vector<int32_t>& v, at::Device device) {
  Tensor t = at::empty({static_cast<int64_t>(v.size())}, at::kInt);
  if (!v.empty()) std::memcpy(t.data_ptr<int32_t>(), v.data(), v.size() * sizeof(int32_t));
  return device.is_cpu() ? t : t.to(device);
}

void AddRow(Route& route, int64_t token) {
  route.token.push_back(static_cast<int32_t>(token));
  route.pairs.offsets.push_back(route.pairs.offsets.back());
}

}  // namespace

std::vector<Route> MakeRoutes(const Topology& topology, int64_t layer, const Tensor& ids, const Tensor& gates,
                              int64_t tokens, int64_t first_token) {
  const Partition& experts = topology.experts(layer);
  const std::vector<int>& owners = topology.expert_owners(layer);
  std::vector<Route> routes(experts.size() - 1);
  for (auto& r : routes) r.pairs.offsets = {0};
  if (!ids.defined()) {
    for (int64_t t = 0; t < tokens; ++t) {
      Route& r = routes[topology.dense_home(first_token + t)];
      r.pairs.home.push_back(static_cast<int32_t>(r.token.size()));
      AddRow(r, t);
    }
  } else {
    const int64_t K = ids.size(1);
    const Tensor host_ids = ids.cpu(), host_gates = gates.cpu();
    const int32_t* id = host_ids.const_data_ptr<int32_t>();
    const float* gate = host_gates.const_data_ptr<float>();
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t k = 0; k < K; ++k) {
        const int owner = owners[id[t * K + k]];
        Route& r = routes[owner];
        if (r.token.empty() || r.token.back() != t) {
          // The home of a token is the worker of its first expert.
          if (k == 0) r.pairs.home.push_back(static_cast<int32_t>(r.token.size()));
          AddRow(r, t);
        }
        r.pairs.expert.push_back(static_cast<int32_t>(id[t * K + k] - experts[owner]));
        r.pairs.gate.push_back(gate[t * K + k]);
        r.slot.push_back(static_cast<int32_t>(t * K + k));
        ++r.pairs.offsets.back();
      }
    }
  }
  const at::Device device = ids.defined() ? ids.device() : at::Device(at::kCPU);
  for (auto& r : routes) {
    if (static_cast<int64_t>(r.token.size()) != tokens) r.token_index = IntTensor(r.token, device);
  }
  return routes;
}

Buffer PackDispatch(const Route& route, int64_t first_token, const Tensor& h, const AllocateFn& allocate) {
  const int32_t n = static_cast<int32_t>(route.token.size()), P = static_cast<int32_t>(route.pairs.pairs());
  const int32_t header[4] = {n, P, static_cast<int32_t>(route.pairs.home.size()), static_cast<int32_t>(first_token)};
  const size_t rows = static_cast<size_t>(RowBytes(n, h.size(1), h.scalar_type()));
  const size_t size = Aligned(sizeof(header)) + Aligned(4 * n) + Aligned(4 * (n + 1)) + 2 * Aligned(4 * P) +
                      Aligned(4 * route.pairs.home.size()) + rows;
  Buffer out = allocate(size);
  Cursor c(out);
  c.Put(header, 4);
  c.Put(route.token.data(), n);
  c.Put(route.pairs.offsets.data(), n + 1);
  c.Put(route.pairs.expert.data(), P);
  c.Put(route.pairs.gate.data(), P);
  c.Put(route.pairs.home.data(), route.pairs.home.size());
  GatherInto(c.Take(rows), h, route.token_index);
  return out;
}

Dispatch UnpackDispatch(const Buffer& message, int64_t hidden, at::ScalarType dtype, at::Device device) {
  Cursor c(message);
  const auto header = c.Get<int32_t>(4);
  const int32_t n = header[0], P = header[1];
  Dispatch out;
  out.token = c.Get<int32_t>(n);
  for (int32_t& t : out.token) t += header[3];
  out.pairs.offsets = c.Get<int32_t>(n + 1);
  out.pairs.expert = c.Get<int32_t>(P);
  out.pairs.gate = c.Get<float>(P);
  out.pairs.home = c.Get<int32_t>(header[2]);
  out.rows = View(c.Take(static_cast<size_t>(RowBytes(n, hidden, dtype))), message, n, hidden, dtype, device);
  return out;
}

Buffer PackCombine(const std::vector<int32_t>& token, const Tensor& out, int64_t begin, int64_t end,
                   const AllocateFn& allocate) {
  const int32_t n = static_cast<int32_t>(end - begin);
  const size_t rows = static_cast<size_t>(RowBytes(n, out.size(1), out.scalar_type()));
  Buffer message = allocate(Aligned(4) + Aligned(4 * n) + rows);
  Cursor c(message);
  c.Put(&n, 1);
  c.Put(token.data() + begin, n);
  GatherInto(c.Take(rows), out.narrow(0, begin, n), {});
  return message;
}

Combine UnpackCombine(const Buffer& message, int64_t hidden, at::ScalarType dtype, at::Device device) {
  Cursor c(message);
  const int32_t n = c.Get<int32_t>(1)[0];
  Combine out;
  out.token = c.Get<int32_t>(n);
  out.rows = View(c.Take(static_cast<size_t>(RowBytes(n, hidden, dtype))), message, n, hidden, dtype, device);
  return out;
}

Buffer PackRows(const Tensor& d, const Tensor& index, const AllocateFn& allocate) {
  const int64_t n = index.defined() ? index.size(0) : d.size(0);
  Buffer message = allocate(static_cast<size_t>(RowBytes(n, d.size(1), d.scalar_type())));
  GatherInto(message.data, d, index);
  return message;
}

Tensor UnpackRows(const Buffer& message, int64_t rows, int64_t hidden, at::ScalarType dtype, at::Device device) {
  DM_CHECK(message.size == static_cast<size_t>(RowBytes(rows, hidden, dtype)), "gradient rows do not match the rows sent");
  return View(message.data, message, rows, hidden, dtype, device);
}

Buffer PackDispatchGradient(const Tensor& d, int64_t begin, int64_t end, const float* d_gates, int64_t pairs,
                            const std::vector<float>& counts, const AllocateFn& allocate) {
  const int32_t header[3] = {static_cast<int32_t>(end - begin), static_cast<int32_t>(pairs), static_cast<int32_t>(counts.size())};
  const size_t rows = static_cast<size_t>(RowBytes(end - begin, d.size(1), d.scalar_type()));
  Buffer message = allocate(Aligned(sizeof(header)) + Aligned(4 * pairs) + Aligned(4 * counts.size()) + rows);
  Cursor c(message);
  c.Put(header, 3);
  c.Put(d_gates, pairs);
  c.Put(counts.data(), counts.size());
  GatherInto(c.Take(rows), d.narrow(0, begin, end - begin), {});
  return message;
}

DispatchGradient UnpackDispatchGradient(const Buffer& message, int64_t hidden, at::ScalarType dtype, at::Device device) {
  Cursor c(message);
  const auto header = c.Get<int32_t>(3);
  DispatchGradient out;
  out.d_gates = c.Get<float>(header[1]);
  out.counts = c.Get<float>(header[2]);
  out.rows = View(c.Take(static_cast<size_t>(RowBytes(header[0], hidden, dtype))), message, header[0], hidden, dtype, device);
  return out;
}

}  // namespace disagmoe
