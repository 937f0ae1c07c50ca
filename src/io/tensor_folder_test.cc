// Folders that transformers wrote (testdata/hf): read, written again byte for byte, packed tensors unpacked; and the
// writer: exactly once, complete or not there, little memory.
#include "io/tensor_folder.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>
#include <thread>

#include "base/rng.h"
#include "io/safetensors.h"
#include "io/test_util.h"

namespace disagmoe {
namespace {

namespace fs = std::filesystem;

std::string Case(const std::string& name) { return std::string(DISAGMOE_HF_TESTDATA "/") + name; }

std::vector<std::string> Cases() {
  std::vector<std::string> names;
  for (const std::string& name : ListFolder(DISAGMOE_HF_TESTDATA)) {
    if (fs::is_directory(Case(name))) names.push_back(name);
  }
  return names;
}

std::vector<std::string> WeightFiles(const std::string& folder) {
  std::vector<std::string> files;
  for (const std::string& name : ListFolder(folder)) {
    if (name.starts_with("model") && name.find(".safetensors") != std::string::npos) files.push_back(name);
  }
  return files;
}

std::vector<float> ValuesOf(const TensorFolder& folder, const std::string& name) {
  std::vector<float> values(static_cast<size_t>(folder.elements(name)));
  folder.Read(name, WholeTensor(folder.elements(name)), values.data());
  return values;
}

TEST(TensorFolder, EveryValueOfTransformersFolders) {
  size_t arrays = 0;
  std::set<std::string> dtypes;
  for (const std::string& name : Cases()) {
    const TensorFolder folder(Case(name));
    EXPECT_EQ(folder.warnings(), std::vector<std::string>());
    for (const std::string& file : WeightFiles(Case(name))) {
      if (file.ends_with(".json")) continue;
      const SafetensorsFile stored(Case(name) + "/" + file);
      for (const NamedArray& array : stored.arrays()) {
        const bool packed = array.dtype == "U8" || array.dtype == "F8_E4M3" || array.name.ends_with("_scale_inv");
        EXPECT_EQ(folder.Has(array.name), array.dtype == "F8_E4M3" || !packed) << array.name;
        if (packed) continue;
        EXPECT_EQ(folder.dtype(array.name), array.dtype);
        EXPECT_EQ(folder.shape(array.name), array.shape);
        const std::vector<float> values = ValuesOf(folder, array.name);
        for (size_t i = 0; i < values.size(); ++i) {
          uint16_t half = 0;
          if (array.dtype != "F32") std::memcpy(&half, static_cast<const char*>(array.data) + 2 * i, 2);
          if (array.dtype == "BF16") ASSERT_EQ(ToBF16(values[i]), half);
          else if (array.dtype == "F16") ASSERT_EQ(ToF16(values[i]), half);
          else ASSERT_EQ(std::memcmp(&values[i], static_cast<const char*>(array.data) + 4 * i, 4), 0) << array.dtype;
        }
        ++arrays;
        dtypes.insert(array.dtype);
      }
    }
  }
  EXPECT_GT(arrays, 600u);
  EXPECT_EQ(dtypes, (std::set<std::string>{"BF16", "F16", "F32"}));
}

// transformers computed the expected values.
TEST(TensorFolder, PackedTensorsAreWhatTransformersUnpacks) {
  const std::map<std::string, std::vector<std::string>> cases = {
      {"gpt_oss_mxfp4", {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"}},
      {"deepseek_fp8", {"model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.o_proj.weight"}}};
  for (const auto& [name, tensors] : cases) {
    const TensorFolder folder(Case(name));
    const TensorFolder expected(Case(name) + "/expected.safetensors");
    for (const std::string& tensor : tensors) {
      EXPECT_EQ(folder.dtype(tensor), name == "deepseek_fp8" ? "F8_E4M3" : "MXFP4");
      ASSERT_EQ(folder.shape(tensor), expected.shape(tensor));
      const std::vector<float> want = ValuesOf(expected, tensor);
      EXPECT_EQ(ValuesOf(folder, tensor), want);
      // Any view of it, too: whole columns, interleaved rows, across matrices.
      const int64_t columns = folder.shape(tensor).back(), n = folder.elements(tensor);
      const int64_t rows = n / columns;
      for (const TensorView& v : {TensorView{0, columns, 1, rows, columns}, {1, columns / 2, 2, rows, columns}, {0, rows, columns, columns, 1},
                                  {columns + 1, rows / 2, columns, columns - 1, 1}, {3, n / 5, 5, 1, 1}, {2, 7, 3, n / 31, 30}}) {
        std::vector<float> got(static_cast<size_t>(v.rows * v.columns));
        folder.Read(tensor, v, got.data());
        for (int64_t i = 0; i < v.rows; ++i) {
          for (int64_t j = 0; j < v.columns; ++j) {
            ASSERT_EQ(got[static_cast<size_t>(i * v.columns + j)],
                      want[static_cast<size_t>(v.begin + i * v.row_stride + j * v.column_stride)]);
          }
        }
      }
    }
  }
}

// transformers' order within a shard is not in the files; this one gives its shards.
std::vector<TensorFolderWriter::Tensor> Declare(const std::string& folder) {
  std::vector<TensorFolderWriter::Tensor> tensors;
  for (const std::string& file : WeightFiles(folder)) {
    if (file.ends_with(".json")) continue;
    const SafetensorsFile stored(folder + "/" + file);
    std::vector<NamedArray> arrays = stored.arrays();
    std::sort(arrays.begin(), arrays.end(), [](const NamedArray& a, const NamedArray& b) { return a.bytes > b.bytes; });
    for (const NamedArray& a : arrays) tensors.push_back({a.name, a.dtype, a.shape});
  }
  return tensors;
}

TEST(TensorFolderWriter, FoldersOfTransformersByteForByte) {
  int written = 0;
  for (const std::string& name : Cases()) {
    if (name == "gpt_oss_mxfp4" || name == "deepseek_fp8") continue;
    TemporaryFolder out(FastFolder());
    const TensorFolder in(Case(name));
    const bool sharded = WeightFiles(Case(name)).size() > 1;
    TensorFolderWriter writer(out.path(), Declare(Case(name)), sharded ? 18432 : 1 << 30);
    for (const std::string& tensor : in.names()) {
      writer.Write(tensor, WholeTensor(in.elements(tensor)), ValuesOf(in, tensor).data());
    }
    const TensorFolderSummary summary = writer.Finish();
    VerifyTensorFolder(out.path(), summary);
    EXPECT_EQ(ListFolder(out.path()), WeightFiles(Case(name)));
    for (const std::string& file : WeightFiles(Case(name))) EXPECT_EQ(ReadAll(out / file), ReadAll(Case(name) + "/" + file)) << file;
    EXPECT_EQ(summary.tensors, static_cast<int64_t>(in.names().size()));
    EXPECT_EQ(summary.losses.inexact, 0);
    ++written;
  }
  EXPECT_GT(written, 10);
}

std::vector<float> Numbers(int64_t n, uint64_t seed) {
  Rng rng(seed);
  std::vector<float> values(static_cast<size_t>(n));
  for (float& v : values) v = static_cast<float>(rng.Uniform() - 0.5);
  return values;
}

// The shards by the rule that transformers publishes for its max_shard_size, and its example.
TEST(TensorFolderWriter, ShardsAsTransformersCutsThem) {
  TemporaryFolder out(FastFolder());
  std::vector<TensorFolderWriter::Tensor> tensors;
  int i = 0;
  for (int64_t gigabytes : {6, 6, 2, 6, 2, 2}) tensors.push_back({"t" + std::to_string(i++), "BF16", {gigabytes * 50}});
  TensorFolderWriter writer(out.path(), tensors, 1000);
  for (const auto& t : tensors) writer.Write(t.name, WholeTensor(t.shape[0]), Numbers(t.shape[0], 1).data());
  const TensorFolderSummary summary = writer.Finish();
  ASSERT_EQ(summary.files.size(), 4u);
  EXPECT_EQ(summary.files[2].name, "model-00003-of-00003.safetensors");
  std::vector<std::vector<std::string>> names;
  for (int s = 0; s < 3; ++s) {
    const TensorFolder shard(out / summary.files[static_cast<size_t>(s)].name);
    names.push_back(shard.names());
  }
  EXPECT_EQ(names, (std::vector<std::vector<std::string>>{{"t0"}, {"t1", "t2"}, {"t3", "t4", "t5"}}));
  EXPECT_EQ(summary.elements, 24 * 50);
}

// A tensor [3, 40, 2 * 30] as gpt-oss keeps gate and up: interleaved columns, from rows of our own order.
TEST(TensorFolderWriter, InterleavedAndTransposedFromManyThreads) {
  const int64_t experts = 3, hidden = 300, width = 250;
  for (const std::string dtype : {"F32", "BF16", "F16", "F64"}) {
    TemporaryFolder out(FastFolder());
    TensorFolderWriter writer(out.path(), {{"gate_up", dtype, {experts, hidden, 2 * width}}, {"plain", dtype, {7}}});
    const auto view = [&](int64_t expert, int64_t up) {
      return TensorView{expert * hidden * 2 * width + up, width, 2, hidden, 2 * width};
    };
    {
      std::vector<std::jthread> threads;
      for (int64_t part = 0; part < 2 * experts; ++part) {
        threads.emplace_back([&, part] {
          writer.Write("gate_up", view(part / 2, part % 2), Numbers(width * hidden, static_cast<uint64_t>(part)).data());
        });
      }
    }
    writer.Write("plain", WholeTensor(7), Numbers(7, 9).data());
    const TensorFolderSummary summary = writer.Finish();
    const TensorFolder in(out.path());
    const std::vector<float> all = ValuesOf(in, "gate_up");
    for (int64_t part = 0; part < 2 * experts; ++part) {
      const std::vector<float> values = Numbers(width * hidden, static_cast<uint64_t>(part));
      std::vector<float> got(values.size());
      in.Read("gate_up", view(part / 2, part % 2), got.data());
      for (int64_t i = 0; i < width; ++i) {
        for (int64_t j = 0; j < hidden; ++j) {
          float v = values[static_cast<size_t>(i * hidden + j)];
          if (dtype == "BF16") v = FromBF16(ToBF16(v));
          if (dtype == "F16") v = FromF16(ToF16(v));
          ASSERT_EQ(got[static_cast<size_t>(i * hidden + j)], v);
          ASSERT_EQ(all[static_cast<size_t>(part / 2 * hidden * 2 * width + j * 2 * width + 2 * i + part % 2)], v);
        }
      }
    }
    EXPECT_EQ(summary.losses.inexact > 0, dtype == "BF16" || dtype == "F16");
  }
}

TEST(TensorFolderWriter, CountsWhatIsLost) {
  TemporaryFolder out(FastFolder());
  TensorFolderWriter writer(out.path(), {{"a", "F16", {7}}, {"b", "BF16", {2}}, {"c", "F32", {}}, {"none", "F32", {0, 3}}});
  // Exact; inexact; too large (two); infinite before; NaN; the largest that stays finite.
  const float inf = INFINITY, values[] = {0.5f, 0.1f, 65520.f, -1e30f, inf, NAN, 65504.f};
  writer.Write("a", WholeTensor(7), values);
  const float others[] = {1.5f, 1.001f};
  writer.Write("b", WholeTensor(2), others);
  writer.Write("c", WholeTensor(1), others);
  const TensorFolderSummary summary = writer.Finish();
  EXPECT_EQ(summary.losses.inexact, 4);
  EXPECT_EQ(summary.losses.overflowed, 2);
  EXPECT_EQ(summary.losses.non_finite, 2);
  EXPECT_EQ(summary.tensors, 4);
  EXPECT_EQ(summary.elements, 10);
  VerifyTensorFolder(out.path(), summary);
}

TEST(TensorFolderWriter, ExactlyOnceOrItNamesTheTensor) {
  const std::vector<float> values(12);
  const auto finish = [&](const std::vector<TensorView>& views) -> std::string {
    TemporaryFolder out(FastFolder());
    std::string error;
    try {
      TensorFolderWriter writer(out.path(), {{"w", "F32", {3, 4}}, {"v", "F32", {2}}});
      writer.Write("v", WholeTensor(2), values.data());
      for (const TensorView& v : views) writer.Write("w", v, values.data());
      writer.Finish();
    } catch (const InternalError& e) {
      error = e.what();
    }
    EXPECT_EQ(WeightFiles(out.path()).empty(), !error.empty());
    EXPECT_EQ(ListFolder(out.path()), WeightFiles(out.path()));
    return error;
  };
  EXPECT_EQ(finish({{0, 3, 4, 4, 1}}), "");
  EXPECT_EQ(finish({{0, 4, 1, 3, 4}}), "");
  EXPECT_NE(finish({}).find("w: 0 of 12 elements written"), std::string::npos);
  EXPECT_NE(finish({{0, 3, 4, 3, 1}}).find("w: 9 of 12 elements written"), std::string::npos);
  EXPECT_NE(finish({{0, 3, 4, 2, 1}, {1, 3, 4, 2, 1}}).find("w: 12 of 12 elements written, but some twice"), std::string::npos);
  EXPECT_NE(finish({{0, 3, 4, 4, 1}, {0, 1, 0, 1, 1}}).find("w: 13 of 12"), std::string::npos);
  EXPECT_NE(finish({{0, 3, 4, 5, 1}}).find("w: a view of 3 x 5"), std::string::npos);
}

TEST(TensorFolderWriter, RefusesContradictionsAndOldWeights) {
  TemporaryFolder out(FastFolder());
  using Tensors = std::vector<TensorFolderWriter::Tensor>;
  for (const Tensors& bad : {Tensors{{"a", "F33", {1}}}, Tensors{{"a", "I64", {1}}}, Tensors{{"a", "F32", {-1}}},
                             Tensors{{"a", "F32", {1}}, {"a", "F32", {1}}}, Tensors{{"__metadata__", "F32", {1}}}}) {
    EXPECT_THROW(TensorFolderWriter(out.path(), bad), InternalError) << bad[0].name;
  }
  EXPECT_EQ(ListFolder(out.path()), std::vector<std::string>());
  WriteAll(out / ".model-00001-of-00002.safetensors.tmp", "of a killed writer");
  {
    TensorFolderWriter writer(out.path(), {{"a", "F32", {1}}});
    const float one = 1;
    writer.Write("a", WholeTensor(1), &one);
    EXPECT_THROW(writer.Write("b", WholeTensor(1), &one), InternalError);
    // A second one at the same time.
    EXPECT_NE(ErrorOf([&] { TensorFolderWriter(out.path(), {{"a", "F32", {1}}}); }).find("another process is writing"), std::string::npos);
    writer.Finish();
  }
  EXPECT_EQ(ListFolder(out.path()), std::vector<std::string>{"model.safetensors"});
  EXPECT_NE(ErrorOf([&] { TensorFolderWriter(out.path(), {{"a", "F32", {1}}}); }).find("already holds weights"), std::string::npos);
}

TEST(TensorFolderWriter, VerifyFindsEveryChange) {
  TemporaryFolder out(FastFolder());
  TensorFolderWriter writer(out.path(), {{"a", "F32", {100}}, {"b", "BF16", {100}}}, 400);
  writer.Write("a", WholeTensor(100), Numbers(100, 1).data());
  writer.Write("b", WholeTensor(100), Numbers(100, 2).data());
  const TensorFolderSummary summary = writer.Finish();
  VerifyTensorFolder(out.path(), summary);
  for (const std::string& file : ListFolder(out.path())) {
    const std::string good = ReadAll(out / file);
    for (const std::string& bad : {good.substr(0, good.size() - 1), good + " ", [&] {
           std::string flipped = good;
           flipped.back() = static_cast<char>(flipped.back() ^ 1);
           return flipped;
         }()}) {
      WriteAll(out / file, bad);
      EXPECT_NE(ErrorOf([&] { VerifyTensorFolder(out.path(), summary); }).find(file), std::string::npos);
    }
    fs::remove(out / file);
    EXPECT_NE(ErrorOf([&] { VerifyTensorFolder(out.path(), summary); }), "");
    WriteAll(out / file, good);
  }
  TensorFolderSummary other = summary;
  ++other.tensors;
  EXPECT_NE(ErrorOf([&] { VerifyTensorFolder(out.path(), other); }).find("got 2 tensors of 200 elements, expected 3"), std::string::npos);
  VerifyTensorFolder(out.path(), summary);
}

void WriteThreeShards(const std::string& folder) {
  TensorFolderWriter writer(folder, {{"a", "F32", {50}}, {"b", "F32", {50}}, {"c", "F32", {50}}}, 200);
  for (const std::string name : {"a", "b", "c"}) writer.Write(name, {0, 2, 25, 25, 1}, Numbers(50, SeedFor(1, name)).data());
  writer.Finish();
}

// Killed at any system call: no weights that anybody would take for complete, or all of them; and it can be done again.
TEST(TensorFolderWriter, KilledAtAnyMoment) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr int kStep = 7;  // each kill is slow there
#else
  constexpr int kStep = 1;
#endif
  int complete = 0, incomplete = 0;
  for (int n = 0;; n += kStep) {
    TemporaryFolder out(FastFolder());
    const Ended ended = KillAtSystemCall([&] { WriteThreeShards(out.path()); }, n);
    if (ended == Ended::kNotPermitted) GTEST_SKIP() << "no ptrace here";
    ASSERT_NE(ended, Ended::kFailed);
    const std::string error = ErrorOf([&] { TensorFolder folder(out.path()); });
    if (error.empty()) {
      const TensorFolder folder(out.path());
      ASSERT_EQ(folder.names().size(), 3u);
      for (const std::string& name : folder.names()) ASSERT_EQ(ValuesOf(folder, name), Numbers(50, SeedFor(1, name)));
      ++complete;
    } else {
      ASSERT_NE(error.find("no weights in the folder"), std::string::npos) << error;
      for (const std::string& file : WeightFiles(out.path())) fs::remove(out / file);
      WriteThreeShards(out.path());
      ASSERT_EQ(ListFolder(out.path()).size(), 4u);  // nothing left of the killed one
      ++incomplete;
    }
    if (ended == Ended::kByItself) break;
  }
  EXPECT_GT(incomplete, 50 / kStep);
  EXPECT_GE(complete, 1);
}

int64_t MemoryOf(const std::string& line) {  // VmHWM and the like, in KiB
  std::ifstream in("/proc/self/status");
  for (std::string key; in >> key;) {
    int64_t value = 0;
    if (key == line + ":" && in >> value) return value;
  }
  return -1;
}

// 12 tensors of 24 MiB: what is resident grows by much less than one of them beyond the caller's own values.
TEST(TensorFolder, MemoryStaysSmall) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizers keep freed memory";
#endif
  TemporaryFolder out(FastFolder());
  const int64_t rows = 3072, columns = 4096, n = rows * columns;
  const pid_t child = fork();
  if (child == 0) {
    std::vector<float> values = Numbers(n, 1);
    std::vector<TensorFolderWriter::Tensor> tensors;
    for (int i = 0; i < 12; ++i) tensors.push_back({"t" + std::to_string(i), "BF16", {rows, columns}});
    const int64_t before = MemoryOf("VmHWM");
    {
      TensorFolderWriter writer(out.path(), tensors, 100 << 20);
      for (const auto& t : tensors) writer.Write(t.name, {0, columns, 1, rows, columns}, values.data());
      writer.Finish();
    }
    const TensorFolder folder(out.path());
    for (const auto& t : tensors) folder.Read(t.name, WholeTensor(n), values.data());
    const int64_t grown = MemoryOf("VmHWM") - before;
    std::printf("grown by %lld KiB\n", static_cast<long long>(grown));
    std::fflush(stdout);
    _exit(before > 0 && grown < 8 * 1024 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace disagmoe
