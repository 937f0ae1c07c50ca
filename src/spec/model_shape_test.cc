#include "spec/model_shape.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "spec/params.h"
#include "spec/presets.h"

namespace disagmoe {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

std::string ErrorOf(const std::string& name) {
  try {
    LoadModelShape(name);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "shapes-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~Folder() { fs::remove_all(path_); }
  std::string Write(const std::string& name, const std::string& text) const {
    fs::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name) << text;
    return (path_ / name).string();
  }
  fs::path path() const { return path_; }

 private:
  fs::path path_;
};

struct Published {
  const char* name;
  int64_t total;
};

// Parameter counts of the published weights: the safetensors metadata that huggingface.co shows for each model. gpt-oss
// unpacked, which its model card (arXiv 2508.10925, table 1) rounds to 116.83 and 20.91 B.
TEST(ModelShape, TotalsArePublishedTotals) {
  const Published published[] = {
      {"qwen3-235b-a22b", 235093634560}, {"qwen3-30b-a3b", 30532122624},    {"mixtral-8x7b", 46702792704},
      {"olmoe-1b-7b", 6919161856},       {"gpt-oss-120b", 116829156672},    {"gpt-oss-20b", 20914757184},
      {"deepseek-moe-16b", 16375728128}, {"deepseek-v2-lite", 15706484224}, {"qwen2-57b-a14b", 57408658944}};
  for (const Published& p : published) EXPECT_EQ(LoadModelShape(p.name).TotalParams(), p.total) << p.name;
}

// The published DeepSeek-V3 holds 680,571,043,840 fp8 and 3,918,786,560 bf16 parameters. That is the model without the
// fp32 correction of the scores, and one module of multi-token prediction (README_WEIGHTS.md beside the weights): a
// layer like the last, copies of embedding and head, a projection of two rows to one, three norms.
TEST(ModelShape, DeepseekV3IsThePublishedWeightsWithoutPrediction) {
  const ModelShape s = LoadModelShape("deepseek-v3");
  const int64_t h = 7168, v = 129280, correction = 256;
  const int64_t layer = s.AttentionParams(60) + s.FfnParams(60) - correction;
  const int64_t prediction = layer + 2 * v * h + 2 * h * h + 3 * h;
  EXPECT_EQ(s.TotalParams() - 58 * correction + prediction, 680571043840 + 3918786560);
  EXPECT_THAT(s.source, HasSubstr("not modelled: num_nextn_predict_layers = 1"));
}

// Published active parameters, to the digits given. `embedding`: whether they count it.
TEST(ModelShape, ActiveParamsArePublished) {
  struct Row {
    const char* name;
    double billions, tolerance;
    bool embedding;
  };
  const Row rows[] = {
      {"qwen3-235b-a22b", 22, 0.5, true},      // model card
      {"qwen3-30b-a3b", 3.3, 0.1, true},       // model card
      {"mixtral-8x7b", 12.9, 0.05, true},      // arXiv 2401.04088
      {"olmoe-1b-7b", 1.3, 0.05, true},        // arXiv 2409.02060
      {"gpt-oss-120b", 5.13, 0.005, false},    // arXiv 2508.10925, table 1, which leaves the embedding out
      {"gpt-oss-20b", 3.61, 0.005, false},     // the same
      {"deepseek-v3", 36.6, 0.05, false},      // README_WEIGHTS.md: 36.6 B with the head of 0.9 B
      {"deepseek-moe-16b", 2.8, 0.05, true},   // arXiv 2401.06066
      {"deepseek-v2-lite", 2.4, 0.06, false},  // model card; it is 2.451
      {"qwen2-57b-a14b", 14.2, 0.1, true}};    // model card: 14 B; arXiv 2407.10671
  for (const Row& row : rows) {
    const ModelShape s = LoadModelShape(row.name);
    const double active = static_cast<double>(s.ActiveParams() - (row.embedding ? 0 : s.EmbeddingParams())) / 1e9;
    EXPECT_NEAR(active, row.billions, row.tolerance) << row.name;
  }
}

// gpt-oss's model card splits its parameters (table 1, in billions): MLP 114.71, attention 0.96, embedding and head
// 1.16. Its MLP has the router.
TEST(ModelShape, StagesOfGptOssArePublished) {
  const ModelShape s = LoadModelShape("gpt-oss-120b");
  const int64_t router = 36 * 128 * (2880 + 1);
  int64_t attention = -router, mlp = router;
  for (int64_t l = 0; l < 36; ++l) attention += s.AttentionParams(l), mlp += s.FfnParams(l);
  EXPECT_NEAR(static_cast<double>(mlp) / 1e9, 114.71, 0.005);
  EXPECT_NEAR(static_cast<double>(attention) / 1e9, 0.96, 0.005);
  EXPECT_NEAR(static_cast<double>(s.EmbeddingParams() + s.HeadParams()) / 1e9, 1.16, 0.005);
}

ModelConfig Config(bool qk_norm, int64_t shared, int64_t dense, int64_t kv_heads) {
  ModelConfig c;
  c.vocab_size = 101;
  c.hidden_size = 24;
  c.num_hidden_layers = 3;
  c.num_attention_heads = 4;
  c.num_key_value_heads = kv_heads;
  c.head_dim = 10;
  c.qk_norm = qk_norm;
  c.num_experts = 5;
  c.num_experts_per_tok = 2;
  c.moe_intermediate_size = 7;
  c.n_shared_experts = shared;
  c.first_k_dense_replace = dense;
  c.intermediate_size = 33;
  return c;
}

// The runtime's table of parameters, stage by stage. The norm before the experts is in the attention stage of both.
TEST(ModelShape, AgreesWithTheTableOfParameters) {
  for (const ModelConfig& config :
       {Config(false, 0, 0, 4), Config(true, 0, 0, 2), Config(true, 2, 1, 1), Config(false, 1, 3, 2)}) {
    const ModelShape shape = ShapeOf(config, "x");
    std::vector<int64_t> stages(2 * config.num_hidden_layers + 1, 0);
    int64_t embedding = 0, total = 0;
    for (const ParamSpec& p : ParamTable(config)) {
      int64_t size = 1;
      for (const int64_t n : p.shape) size *= n;
      total += size;
      (p.name == "embed" ? embedding : stages[p.stage]) += size;
    }
    EXPECT_EQ(shape.TotalParams(), total);
    EXPECT_EQ(shape.EmbeddingParams(), embedding);
    EXPECT_EQ(shape.HeadParams(), stages.back());
    for (int64_t l = 0; l < config.num_hidden_layers; ++l) {
      EXPECT_EQ(shape.AttentionParams(l), stages[2 * l]) << "layer " << l;
      EXPECT_EQ(shape.FfnParams(l), stages[2 * l + 1]) << "layer " << l;
    }
  }
}

// H = 24, De = 7: an expert has 3 * 24 * 7 = 504 parameters, and each of the two layers with experts uses 2 of its 5.
TEST(ModelShape, ActiveCountsChosenExperts) {
  const ModelShape shape = ShapeOf(Config(true, 2, 1, 1), "x");
  EXPECT_EQ(shape.ExpertParams(), 504);
  EXPECT_EQ(shape.TotalParams() - shape.ActiveParams(), 2 * 3 * 504);
}

TEST(ModelShape, TiedEmbeddingsCountOnce) {
  ModelShape shape = ShapeOf(Config(false, 0, 0, 4), "x");
  const int64_t total = shape.TotalParams(), head = shape.HeadParams();
  shape.tied_embeddings = true;
  EXPECT_EQ(shape.TotalParams(), total - 101 * 24);
  EXPECT_EQ(shape.HeadParams(), head);  // both ends hold it
}

TEST(ModelShape, PresetsAllLoadAndSayWhereTheyAreFrom) {
  const std::vector<Preset> presets = ModelPresets();
  std::vector<std::string> names;
  for (const Preset& preset : presets) {
    names.push_back(preset.name);
    const ModelShape s = LoadModelShape(preset.name);
    EXPECT_EQ(s.name, preset.name);
    EXPECT_GT(s.source.size(), 20u) << preset.name;
    EXPECT_THAT(s.source, testing::Not(HasSubstr("preset "))) << preset.name;
  }
  EXPECT_THAT(names, testing::IsSupersetOf({"deepseek-moe", "deepseek-moe-16b", "gpt-oss-120b", "qwen3-235b-a22b",
                                            "qwen3-30b-a3b", "mixtral-8x7b", "olmoe-1b-7b", "deepseek-v3"}));
}

TEST(ModelShape, ThePapersModel) {
  const ModelShape s = LoadModelShape("deepseek-moe");  // table of arXiv 2605.11005
  EXPECT_EQ(s.num_layers, 28);
  EXPECT_EQ(s.num_experts, 64);
  EXPECT_EQ(s.experts_per_token, 4);
  EXPECT_EQ(s.hidden_size, 2048);
  EXPECT_EQ(s.expert_hidden, 1408);
}

TEST(ModelShape, LoadsFilesAndFolders) {
  const Folder folder;
  const std::string text(FindPreset(ModelPresetFiles(), "olmoe-1b-7b")->text);
  const std::string config = folder.Write("my-model/config.json", text);
  const std::string other = folder.Write("other.json", text);
  const std::string run = folder.Write("run.toml", "[model]\nnum_hidden_layers = 3\nnum_experts = 16\n");
  EXPECT_EQ(LoadModelShape(config).name, "my-model");
  EXPECT_EQ(LoadModelShape((folder.path() / "my-model").string()).name, "my-model");
  EXPECT_EQ(LoadModelShape((folder.path() / "my-model/").string()).name, "my-model");
  EXPECT_EQ(LoadModelShape(other).name, "other");
  EXPECT_EQ(LoadModelShape(other).TotalParams(), 6919161856);
  EXPECT_EQ(LoadModelShape(run).name, "run");
  EXPECT_EQ(LoadModelShape(run).num_experts, 16);
  EXPECT_THAT(LoadModelShape(run).source, HasSubstr("run.toml"));
}

TEST(ModelShape, SaysWhatCannotBeLoaded) {
  const Folder folder;
  EXPECT_THAT(ErrorOf("Qwen3-235B"), HasSubstr("did you mean 'qwen3-235b-a22b'?"));
  EXPECT_THAT(ErrorOf("mixtral-8x7"), HasSubstr("did you mean 'mixtral-8x7b'?"));
  EXPECT_THAT(ErrorOf("llama"), HasSubstr("expected deepseek-moe, deepseek-moe-16b"));
  EXPECT_THAT(ErrorOf("llama"), testing::Not(HasSubstr("did you mean")));
  EXPECT_THAT(ErrorOf((folder.path() / "none.json").string()), HasSubstr("No such file"));
  EXPECT_THAT(ErrorOf(folder.path().string()), HasSubstr("config.json): got No such file"));
  EXPECT_THAT(ErrorOf(folder.Write("bad.toml", "[model]\nexperts = 3\n")), HasSubstr("bad.toml:2"));
}

}  // namespace
}  // namespace disagmoe
