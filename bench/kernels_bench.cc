// Bytes per second of the row-wise kernels beside a memcpy of the same bytes, on one thread.
//   kernels_bench [--benchmark_filter=...]
// Bytes are those a kernel must read and write once; memcpy counts the bytes read and written too.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <vector>

#include "layers/kernels.h"

namespace disagmoe {
namespace {

constexpr int64_t kTokens = 2048;
constexpr int64_t kHidden = 512;
constexpr int64_t kExperts = 64;
constexpr int64_t kTopK = 4;
constexpr int64_t kVocabulary = 8192;

using Body = std::function<void()>;

// Runs body, then memcpy over as many bytes; both alternate inside one measurement so that noise hits both alike.
void Compare(benchmark::State& state, int64_t bytes, const Body& body) {
  at::set_num_threads(1);
  std::vector<char> from(static_cast<size_t>(bytes / 2), 1);
  std::vector<char> to(static_cast<size_t>(bytes / 2), 2);
  double kernel_s = 1e9;
  double copy_s = 1e9;
  const auto timed = [](const auto& f) {
    const auto start = std::chrono::steady_clock::now();
    f();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  body();
  for (auto _ : state) {
    const double s = timed(body);
    state.SetIterationTime(s);
    kernel_s = std::min(kernel_s, s);
    copy_s = std::min(copy_s, timed([&] {
                        std::memcpy(to.data(), from.data(), to.size());
                        benchmark::DoNotOptimize(to.data());
                        benchmark::ClobberMemory();
                      }));
  }
  state.counters["best_GB/s"] = static_cast<double>(bytes) / kernel_s / 1e9;
  state.counters["memcpy_GB/s"] = static_cast<double>(bytes) / copy_s / 1e9;
  state.counters["memcpy_ratio"] = kernel_s / copy_s;
}

int64_t Bytes(std::initializer_list<Tensor> tensors) {
  int64_t sum = 0;
  for (const Tensor& t : tensors) sum += static_cast<int64_t>(t.nbytes());
  return sum;
}

at::ScalarType Type(const benchmark::State& state) { return state.range(0) == 16 ? at::kBFloat16 : at::kFloat; }

void BM_RmsNorm(benchmark::State& state) {
  const Tensor x = at::randn({kTokens, kHidden}, Type(state));
  const Tensor w = at::randn({kHidden}, Type(state));
  Tensor y = at::empty_like(x);
  Tensor rstd = at::empty({kTokens}, at::kFloat);
  Compare(state, Bytes({x, y}), [&] { RmsNorm(x, w, 1e-6, y, rstd); });
}

void BM_RmsNormBackward(benchmark::State& state) {
  const Tensor x = at::randn({kTokens, kHidden}, Type(state));
  const Tensor w = at::randn({kHidden}, Type(state));
  const Tensor dy = at::randn_like(x);
  Tensor y = at::empty_like(x);
  Tensor dx = at::zeros_like(x);
  Tensor rstd = at::empty({kTokens}, at::kFloat);
  Tensor dw = at::zeros({kHidden}, at::kFloat);
  RmsNorm(x, w, 1e-6, y, rstd);
  const bool add = state.range(1) != 0;
  Compare(state, Bytes({x, dy, dx}) + (add ? Bytes({dx}) : 0),
          [&] { RmsNormBackward(dy, x, w, rstd, dx, add, dw); });
}

void BM_Rope(benchmark::State& state) {
  const Tensor x = at::randn({kTokens, 8, 64}, Type(state));
  Tensor cos;
  Tensor sin;
  RopeTable(1024, RopeFrequencies(64, 1e4), 1, cos, sin);
  Compare(state, 2 * Bytes({x}), [&] { Rope(x, cos, sin, false); });
}

double Limit(const benchmark::State& state) { return static_cast<double>(state.range(1)); }

void BM_SwiGlu(benchmark::State& state) {
  const Tensor in = at::randn({kTokens, 2 * kHidden}, Type(state));
  const Tensor scale = at::rand({kTokens});
  Tensor act = at::empty({kTokens, kHidden}, Type(state));
  Compare(state, Bytes({in, act}), [&] { SwiGlu(in, scale, Limit(state), act); });
}

void BM_SwiGluBackward(benchmark::State& state) {
  const Tensor in = at::randn({kTokens, 2 * kHidden}, Type(state));
  const Tensor scale = at::rand({kTokens});
  const Tensor d_act = at::randn({kTokens, kHidden}, Type(state));
  Tensor act = at::empty_like(d_act);
  Tensor d_in = at::empty_like(in);
  Tensor d_scale = at::empty_like(scale);
  Compare(state, Bytes({d_act, in, d_in, act}), [&] { SwiGluBackward(d_act, in, scale, Limit(state), d_in, act, d_scale); });
}

void BM_ScoreTopK(benchmark::State& state) {
  const Tensor logits = at::randn({kTokens, kExperts});
  Tensor probs = at::empty_like(logits);
  Tensor ids = at::empty({kTokens, kTopK}, at::kInt);
  Compare(state, Bytes({logits, probs, ids}), [&] { ScoreTopK({}, logits, {}, probs, ids); });
}

void BM_RouterBackward(benchmark::State& state) {
  const Tensor logits = at::randn({kTokens, kExperts});
  Tensor probs = at::empty_like(logits);
  Tensor ids = at::empty({kTokens, kTopK}, at::kInt);
  ScoreTopK({}, logits, {}, probs, ids);
  const Tensor d_gates = at::randn({kTokens, kTopK});
  Tensor d_logits = at::empty_like(logits);
  Compare(state, Bytes({d_gates, probs, ids, d_logits}),
          [&] { RouterBackward({.renormalise = true}, d_gates, {}, probs, ids, d_logits); });
}

// Tokens of hidden rows to their (token, expert) pairs in expert order, and back.
struct Pairs {
  explicit Pairs(at::ScalarType type) {
    const Tensor order = at::randperm(kTokens * kTopK, at::kLong);  // pair -> place
    index = at::argsort(order).div(kTopK, "floor").to(at::kInt);
    position = order.to(at::kInt);
    offsets = at::arange(0, kTokens * kTopK + 1, kTopK, at::kInt);
    tokens = at::randn({kTokens, kHidden}, type);
    rows = at::randn({kTokens * kTopK, kHidden}, type);
  }
  Tensor index, position, offsets, tokens, rows;
};

// The memory traffic of a gather is that of its output twice, though a source row may come from the cache.
void BM_GatherRows(benchmark::State& state) {
  Pairs p(Type(state));
  Compare(state, 2 * Bytes({p.rows}), [&] { GatherRows(p.tokens, p.index, p.rows); });
}

void BM_SumRows(benchmark::State& state) {
  Pairs p(Type(state));
  const bool add = state.range(1) != 0;
  Compare(state, Bytes({p.rows, p.tokens}) + (add ? Bytes({p.tokens}) : 0),
          [&] { SumRows(p.rows, p.position, p.offsets, p.tokens, add); });
}

void BM_CrossEntropy(benchmark::State& state) {
  Tensor logits = at::randn({kTokens, kVocabulary}, Type(state));
  const Tensor labels = at::randint(kVocabulary, {kTokens}, at::kLong);
  Compare(state, 2 * Bytes({logits}), [&] { CrossEntropy(logits, labels, 1.0, true); });
}

#define DM_TYPES(name) BENCHMARK(name)->UseManualTime()->MinTime(0.2)->ArgName("bits")->Arg(32)->Arg(16)
#define DM_TYPES_ADD(name) \
  BENCHMARK(name)->UseManualTime()->MinTime(0.2)->ArgNames({"bits", "add"})->ArgsProduct({{32, 16}, {0, 1}})
#define DM_TYPES_LIMIT(name) \
  BENCHMARK(name)->UseManualTime()->MinTime(0.2)->ArgNames({"bits", "limit"})->ArgsProduct({{32, 16}, {0, 7}})

DM_TYPES(BM_RmsNorm);
DM_TYPES_ADD(BM_RmsNormBackward);
DM_TYPES(BM_Rope);
DM_TYPES_LIMIT(BM_SwiGlu);
DM_TYPES_LIMIT(BM_SwiGluBackward);
DM_TYPES(BM_GatherRows);
DM_TYPES_ADD(BM_SumRows);
DM_TYPES(BM_CrossEntropy);
BENCHMARK(BM_ScoreTopK)->UseManualTime()->MinTime(0.2);
BENCHMARK(BM_RouterBackward)->UseManualTime()->MinTime(0.2);

}  // namespace
}  // namespace disagmoe

BENCHMARK_MAIN();
