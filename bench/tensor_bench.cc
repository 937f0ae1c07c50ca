// Weights in and out of safetensors: MB of fp32 values a second, beside memcpy and plain reads and writes of the same files.
// The folder is TMPDIR (or /tmp): take one in memory (/dev/shm) to leave the disk out.
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "io/tensor_folder.h"

namespace disagmoe {
namespace {

constexpr int64_t kHidden = 2880, kWidth = 2880;  // gpt-oss-120b: an expert's gate and up are [hidden, 2 width], interleaved
constexpr int64_t kExperts = 4, kValues = kExperts * kHidden * 2 * kWidth;

std::string Folder() {
  const char* parent = std::getenv("TMPDIR");
  return std::string(parent ? parent : "/tmp") + "/disagmoe-tensor-bench";
}

std::vector<float> Values() {
  std::vector<float> values(static_cast<size_t>(kValues));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 1000) * 0.001f;
  return values;
}

void Rate(benchmark::State& state) {
  state.counters["MB/s"] =
      benchmark::Counter(static_cast<double>(state.iterations()) * kValues * 4e-6, benchmark::Counter::kIsRate);
}

TensorView Gate(int64_t part) {
  return {part / 2 * kHidden * 2 * kWidth + part % 2, kWidth, 2, kHidden, 2 * kWidth};
}

std::unique_ptr<TensorFolderWriter> Writer(const std::string& dtype) {
  std::filesystem::remove_all(Folder());
  return std::make_unique<TensorFolderWriter>(
      Folder(), std::vector<TensorFolderWriter::Tensor>{{"w", dtype, {kExperts, kHidden, 2 * kWidth}}});
}

void Memcpy(benchmark::State& state) {
  const std::vector<float> from = Values();
  std::vector<float> to(from.size());
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), from.size() * 4);
    benchmark::ClobberMemory();
  }
  Rate(state);
}

// pwrite of the bytes that the bf16 values have, as the limit of a writer.
void PlainWrite(benchmark::State& state) {
  const std::vector<float> values = Values();
  const std::string path = Folder() + ".plain";
  for (auto _ : state) {
    state.PauseTiming();
    std::filesystem::remove(path);
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT, 0600);
    state.ResumeTiming();
    for (int64_t at = 0; at < kValues * 2; at += 1 << 19) {
      const int64_t n = std::min<int64_t>(1 << 19, kValues * 2 - at);
      if (::pwrite(fd, reinterpret_cast<const char*>(values.data()) + at, static_cast<size_t>(n), at) != n) std::abort();
    }
    ::close(fd);
  }
  std::filesystem::remove(path);
  Rate(state);
}

void Write(benchmark::State& state, const char* dtype, bool interleaved) {
  const std::vector<float> values = Values();
  for (auto _ : state) {
    state.PauseTiming();
    const auto writer = Writer(dtype);
    state.ResumeTiming();
    if (!interleaved) writer->Write("w", WholeTensor(kValues), values.data());
    for (int64_t part = 0; interleaved && part < 2 * kExperts; ++part) {
      writer->Write("w", Gate(part), values.data() + part * kHidden * kWidth);
    }
  }
  Rate(state);
}

// Sync and SHA-256.
void Finish(benchmark::State& state) {
  const std::vector<float> values = Values();
  for (auto _ : state) {
    state.PauseTiming();
    const auto writer = Writer("BF16");
    writer->Write("w", WholeTensor(kValues), values.data());
    state.ResumeTiming();
    writer->Finish();
  }
  Rate(state);
}

void Read(benchmark::State& state, const char* dtype, bool interleaved) {
  std::vector<float> values = Values();
  {
    const auto writer = Writer(dtype);
    writer->Write("w", WholeTensor(kValues), values.data());
    writer->Finish();
  }
  const TensorFolder folder(Folder());
  for (auto _ : state) {
    if (!interleaved) folder.Read("w", WholeTensor(kValues), values.data());
    for (int64_t part = 0; interleaved && part < 2 * kExperts; ++part) {
      folder.Read("w", Gate(part), values.data() + part * kHidden * kWidth);
    }
  }
  Rate(state);
  std::filesystem::remove_all(Folder());
}

BENCHMARK(Memcpy)->Unit(benchmark::kMillisecond);
BENCHMARK(PlainWrite)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(Write, bf16, "BF16", false)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(Write, bf16_interleaved, "BF16", true)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(Write, fp16, "F16", false)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(Write, fp32, "F32", false)->Unit(benchmark::kMillisecond);
BENCHMARK(Finish)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(Read, bf16, "BF16", false)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(Read, bf16_interleaved, "BF16", true)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(Read, fp16, "F16", false)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(Read, fp32, "F32", false)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace disagmoe

BENCHMARK_MAIN();
