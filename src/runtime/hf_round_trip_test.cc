// Hugging Face folder -> what the workers of a layout hold -> checkpoint -> Hugging Face folder: every bit as it was.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/checkpoint.h"
#include "io/hf_weights.h"
#include "runtime/state_io.h"
#include "runtime/topology.h"
#include "spec/hf_config.h"

namespace disagmoe {
namespace {

namespace fs = std::filesystem;

class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("disagmoe-round-" + std::to_string(getpid()))) { fs::create_directories(path_); }
  ~Folder() { fs::remove_all(path_); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  fs::path path_;
};

std::string Testdata(const std::string& name) { return std::string(DISAGMOE_HF_TESTDATA) + "/" + name; }

// What a rank of a run writes: all that it holds.
CheckpointFile WriteRank(const std::string& folder, int rank, const ParamStore& store) {
  std::vector<NamedArray> arrays;
  const float* flat = store.flat_master().const_data_ptr<float>();
  for (size_t i = 0; i < store.held().size(); ++i) {
    const HeldParam& p = store.held()[i];
    const int64_t units = p.spec.per_expert ? p.count : 1;
    for (int64_t u = 0; u < units; ++u) {
      const int64_t each = p.numel() / units;
      arrays.push_back({"weight/" + p.spec.name + (p.spec.per_expert ? "#" + std::to_string(p.first + u) : ""), "F32", {each},
                        flat + store.offset(i) + u * each, static_cast<size_t>(each) * sizeof(float)});
    }
  }
  const std::string path = folder + "/" + RankFileName(rank);
  CheckpointFile file;
  file.sha256 = WriteSafetensors(path, arrays, {});
  file.name = RankFileName(rank);
  file.bytes = fs::file_size(path);
  return file;
}

// Through a checkpoint of all ranks of the layout; returns its folder.
std::string ThroughLayout(const RunConfig& config, const std::string& root) {
  const Schedule schedule = ScheduleOf(config, config.train.micro_batches, true);
  const Topology topology(config, schedule);
  CheckpointManifest manifest{0, "", PrintConfig(config), {}};
  const std::string partial = PartialFolder(root, 0);
  for (int rank = 0; rank < topology.world(); ++rank) {
    ParamStore store(topology.held(rank).params, at::kFloat, at::kCPU);
    SetInitialWeights(config, store);
    manifest.files.push_back(WriteRank(partial, rank, store));
  }
  return PublishCheckpoint(root, manifest);
}

// By name: dtype, shape, bytes.
std::map<std::string, std::string> Tensors(const std::string& folder) {
  std::map<std::string, std::string> out;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("model") || !name.ends_with(".safetensors")) continue;
    const SafetensorsFile file(entry.path());
    for (const NamedArray& array : file.arrays()) {
      std::string text = array.dtype;
      for (int64_t n : array.shape) text.append(" ").append(std::to_string(n));
      text.append(":");
      text.append(static_cast<const char*>(array.data), array.bytes);
      out[array.name] = text;
    }
  }
  return out;
}

class HfRoundTrip : public testing::TestWithParam<std::string> {
 protected:
  RunConfig Config(const std::vector<std::string>& layout) {
    std::ofstream(folder_ / "run.toml") << "";
    std::vector<std::string> overrides = layout;
    overrides.push_back("model.from=" + Testdata(GetParam()));
    return LoadConfig(folder_ / "run.toml", overrides);
  }
  Folder folder_;
};

TEST_P(HfRoundTrip, EveryBitThroughEveryLayout) {
  const std::vector<std::vector<std::string>> layouts = {
      {},
      {"layout.m=2", "layout.n=3", "train.micro_batch_size=2"},
      {"layout.colocated=true", "layout.m=2", "train.micro_batch_size=2"},
      {"layout.p_f=2", "layout.n=2", "layout.replicas=2", "layout.head=attention"}};
  const auto want = Tensors(Testdata(GetParam()));
  for (size_t i = 0; i < layouts.size(); ++i) {
    if (i == 3 && Config({}).model.num_hidden_layers == 1) continue;  // two groups need two layers
    const RunConfig config = Config(layouts[i]);
    const std::string checkpoint = ThroughLayout(config, folder_ / ("checkpoints" + std::to_string(i)));
    const std::string out = folder_ / ("out" + std::to_string(i));
    const HfExportReport report = ExportHf({.checkpoint = checkpoint, .companions = Testdata(GetParam()), .out = out}, nullptr);
    VerifyTensorFolder(out, report.weights);
    EXPECT_EQ(report.weights.losses.inexact, 0);
    const auto got = Tensors(out);
    ASSERT_EQ(got.size(), want.size());
    for (const auto& [name, bits] : want) {
      ASSERT_TRUE(got.contains(name)) << name;
      EXPECT_TRUE(got.at(name) == bits) << name << ": " << got.at(name).substr(0, 20) << " and " << bits.substr(0, 20);
    }
    RequireHfConfig(out, config.model);
    fs::remove_all(out);
  }
}

// Without the files that it came with.
TEST_P(HfRoundTrip, ConfigMadeAnew) {
  const RunConfig config = Config({});
  const std::string checkpoint = ThroughLayout(config, folder_ / "checkpoints");
  const std::string out = folder_ / "out";
  ExportHf({.checkpoint = checkpoint, .out = out, .dtype = "fp32", .max_shard_bytes = 20000}, nullptr);
  RequireHfConfig(out, config.model);
  const HfWeights got(out, config.model), want(Testdata(GetParam()), config.model);
  for (const ParamSpec& param : ParamTable(config.model)) {
    int64_t n = 1;
    for (int64_t size : param.shape) n *= size;
    const int64_t experts = param.per_expert ? param.shape[0] : 1;
    std::vector<float> a(n / experts), b(n / experts);
    for (int64_t e = 0; e < experts; ++e) {
      got.Read(param, e, a.data());
      want.Read(param, e, b.data());
      EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << param.name;
    }
  }
}

std::vector<std::string> Cases() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(DISAGMOE_HF_TESTDATA)) {
    const std::string name = entry.path().filename();
    if (entry.is_directory() && name != "gpt_oss_mxfp4" && name != "deepseek_fp8") names.push_back(name);  // packed
  }
  std::sort(names.begin(), names.end());
  return names;
}
INSTANTIATE_TEST_SUITE_P(Cases, HfRoundTrip, testing::ValuesIn(Cases()), [](const auto& info) { return info.param; });

std::string ErrorOf(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

// A folder whose files do not fit its config.json, or the run.
TEST(HfWeights, Mismatches) {
  const Folder folder;
  const std::string copy = folder / "copy";
  fs::copy(Testdata("qwen3_moe"), copy);
  const ModelConfig model = LoadHfModel(copy).hf.model;
  ModelConfig other = model;
  other.num_hidden_layers += 1;
  EXPECT_EQ(ErrorOf([&] { HfWeights(copy, other); }),
            "a weight is missing (" + copy + "): got no model.layers.2.input_layernorm.weight, expected [24]. Hint: is it of "
            "another model? config.json beside it says which");
  other = model;
  other.num_hidden_layers -= 1;
  EXPECT_NE(ErrorOf([&] { HfWeights(copy, other); }).find("a weight that the model has no place for"), std::string::npos);
  other = model;
  other.moe_intermediate_size += 1;
  EXPECT_NE(ErrorOf([&] { HfWeights(copy, other); }).find("a weight of another shape"), std::string::npos);
  other = model;
  other.rope_theta = 7;
  EXPECT_EQ(ErrorOf([&] { RequireHfConfig(copy, other); }),
            "the weights are of another model (" + copy + "/config.json): got 1000.0, expected rope_theta = 7.0. Hint: "
            "model.from=" + copy + " takes the model from there");
}

}  // namespace
}  // namespace disagmoe
