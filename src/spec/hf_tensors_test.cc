// The published form of each family: against the files that transformers wrote (testdata/hf), and by counting values.
#include "spec/hf_tensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "spec/hf_config.h"

namespace disagmoe {
namespace {

namespace fs = std::filesystem;

std::string Text(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// Names and shapes in the headers of a folder's files.
std::map<std::string, std::vector<int64_t>> TensorsIn(const fs::path& folder) {
  std::map<std::string, std::vector<int64_t>> out;
  for (const auto& file : fs::directory_iterator(folder)) {
    const std::string name = file.path().filename();
    if (!name.starts_with("model") || !name.ends_with(".safetensors")) continue;
    const std::string text = Text(file.path());
    uint64_t size = 0;
    std::memcpy(&size, text.data(), 8);
    const nlohmann::json header = nlohmann::json::parse(text.substr(8, size));
    for (const auto& [key, value] : header.items()) {
      if (key != "__metadata__") out[key] = value.at("shape").get<std::vector<int64_t>>();
    }
  }
  return out;
}

std::vector<std::string> Cases() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(DISAGMOE_HF_TESTDATA)) {
    const std::string name = entry.path().filename();
    const bool packed = name == "gpt_oss_mxfp4" || name == "deepseek_fp8";  // other files, or no configuration
    if (entry.is_directory() && !packed) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

class HfTensorsTest : public testing::TestWithParam<std::string> {
 protected:
  fs::path folder() const { return fs::path(DISAGMOE_HF_TESTDATA) / GetParam(); }
  ModelConfig model() const { return LoadHfModel(folder().string()).hf.model; }
};

TEST_P(HfTensorsTest, NamesAndShapesAreThoseOfTheFiles) {
  std::map<std::string, std::vector<int64_t>> ours;
  for (const HfTensor& tensor : HfTensors(model())) EXPECT_TRUE(ours.emplace(tensor.name, tensor.shape).second) << tensor.name;
  EXPECT_EQ(ours, TensorsIn(folder()));
}

// Each value of ours is one of theirs, and each of theirs one of ours.
TEST_P(HfTensorsTest, PiecesCoverBothSidesOnce) {
  const ModelConfig m = model();
  std::map<std::string, std::vector<int>> theirs;
  for (const HfTensor& tensor : HfTensors(m)) {
    int64_t n = 1;
    for (int64_t size : tensor.shape) n *= size;
    theirs[tensor.name].assign(n, 0);
  }
  for (const ParamSpec& param : ParamTable(m)) {
    int64_t n = 1;
    for (int64_t size : param.shape) n *= size;
    const int64_t experts = param.per_expert ? m.num_experts : 1;
    for (int64_t e = 0; e < experts; ++e) {
      std::vector<int> ours(n / experts, 0);
      for (const HfPiece& p : HfPieces(m, param, e)) {
        for (int64_t i = 0; i < p.rows; ++i) {
          for (int64_t j = 0; j < p.columns; ++j) {
            ++ours.at(p.offset + i * p.columns + j);
            ++theirs.at(p.tensor).at(p.begin + i * p.row_stride + j * p.column_stride);
          }
        }
      }
      EXPECT_EQ(ours, std::vector<int>(ours.size(), 1)) << param.name;
    }
  }
  for (const auto& [name, count] : theirs) EXPECT_EQ(count, std::vector<int>(count.size(), 1)) << name;
}

// As transformers 4 wrote the same configuration.
TEST_P(HfTensorsTest, BothFormsOfConfig) {
  const fs::path published = folder() / "published_config.json";
  if (!fs::exists(published)) return;
  const ModelConfig other = ReadHfModel(Text(published), published.string()).model;
  EXPECT_EQ(HfDifference(model(), other), "");
}

// And as we write it.
TEST_P(HfTensorsTest, WrittenConfigReadsBack) {
  const ModelConfig m = model();
  const std::string text = WriteHfConfig(m, "float32");
  EXPECT_EQ(HfDifference(m, ReadHfModel(text, "written").model), "") << text;
  // A model that was born here goes to a family that can say it.
  ModelConfig own = m;
  own.model_type.clear();
  const ModelConfig read = ReadHfModel(WriteHfConfig(own, "float32"), "written").model;
  own.model_type = read.model_type;
  EXPECT_EQ(HfDifference(own, read), "");
}

INSTANTIATE_TEST_SUITE_P(Cases, HfTensorsTest, testing::ValuesIn(Cases()), [](const auto& info) { return info.param; });

TEST(HfTensors, WhatNoFamilyCanSay) {
  ModelConfig m = LoadHfModel(DISAGMOE_HF_TESTDATA "/qwen3_moe").hf.model;
  m.attention_sinks = true;
  const auto refusal = [&] {
    try {
      WriteHfConfig(m, "float32");
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refusal(),
            "no Hugging Face family can say what this model does (model.model_type): got \"qwen3_moe\", expected a model of "
            "one of the families of `disagmoe train --help`. Hint: in qwen3_moe: attention_sinks = true and false");
  m.model_type.clear();
  EXPECT_NE(refusal(), "");
}

// Code of Qwen2-MoE and of DeepSeek-V2 and V3 always has shared experts: a model without goes to a family that needs none.
TEST(HfTensors, NoSharedExperts) {
  ModelConfig own;
  EXPECT_EQ(ReadHfModel(WriteHfConfig(own, "float32"), "written").model.model_type, "mixtral");
  ModelConfig latent = LoadHfModel(DISAGMOE_HF_TESTDATA "/deepseek_v3").hf.model;
  latent.n_shared_experts = 0;
  EXPECT_THROW(WriteHfConfig(latent, "float32"), Error);
  ModelConfig v1 = LoadHfModel(DISAGMOE_HF_TESTDATA "/deepseek").hf.model;
  v1.n_shared_experts = 0;
  EXPECT_NE(WriteHfConfig(v1, "float32").find("\"n_shared_experts\": null"), std::string::npos);
}

// gpt-oss publishes experts as x W: gate and up are columns in turn, here rows of two halves.
TEST(HfTensors, GptOssExpertByHand) {
  const ModelConfig m = LoadHfModel(DISAGMOE_HF_TESTDATA "/gpt_oss").hf.model;  // H = 20, De = 12, E = 4
  for (const ParamSpec& param : ParamTable(m)) {
    if (param.name != "layers.1.experts.gate_up") continue;
    const auto pieces = HfPieces(m, param, 2);
    ASSERT_EQ(pieces.size(), 2u);
    // Up, unit 5, input 3: row 12 + 5 here; [2][3][2 * 5 + 1] there.
    const HfPiece& up = pieces[1];
    EXPECT_EQ(up.tensor, "model.layers.1.mlp.experts.gate_up_proj");
    EXPECT_EQ(up.offset + 5 * up.columns + 3, (12 + 5) * 20 + 3);
    EXPECT_EQ(up.begin + 5 * up.row_stride + 3 * up.column_stride, 2 * 20 * 24 + 3 * 24 + 11);
  }
}

// A head of 8 values without and 8 with RoPE: pair 3 is (6, 7) of the latter there, (3, 7) here.
TEST(HfTensors, InterleavedPairsByHand) {
  const ModelConfig m = LoadHfModel(DISAGMOE_HF_TESTDATA "/deepseek_v3").hf.model;
  ASSERT_TRUE(m.rope_interleave);
  int found = 0;
  for (const ParamSpec& param : ParamTable(m)) {
    if (param.name != "layers.0.q_b") continue;
    for (const HfPiece& p : HfPieces(m, param, -1)) {
      for (int64_t i = 0; i < p.rows; ++i) {
        const int64_t ours = p.offset / p.columns + i, theirs = (p.begin + i * p.row_stride) / p.columns;
        const std::map<int64_t, int64_t> expected = {{16 + 8 + 3, 16 + 8 + 6}, {16 + 8 + 7, 16 + 8 + 7}, {16 + 5, 16 + 5}};
        if (!expected.contains(ours)) continue;
        EXPECT_EQ(theirs, expected.at(ours));
        ++found;
      }
    }
  }
  EXPECT_EQ(found, 3);
}

}  // namespace
}  // namespace disagmoe
