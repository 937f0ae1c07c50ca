#include "spec/cluster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "spec/presets.h"

namespace disagmoe {
namespace {

using testing::AllOf;
using testing::HasSubstr;
namespace fs = std::filesystem;

std::string H800() { return std::string(FindPreset(ClusterPresetFiles(), "h800")->text); }

// The h800 preset with the first `from` replaced.
std::string H800(const std::string& from, const std::string& to) {
  std::string text = "gpus = 16\n" + H800();
  const size_t at = text.find(from);
  EXPECT_NE(at, text.npos) << from;
  return text.replace(at, from.size(), to);
}

template <class F>
std::string ErrorOf(F f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}
std::string LoadError(const std::string& name) { return ErrorOf([&] { LoadCluster(name); }); }
std::string ReadError(const std::string& text) { return ErrorOf([&] { ReadCluster(text, "my.toml"); }); }

// DeepSeek-V3 report and DeepEP: 160 GB/s of NVLink and 50 GB/s of NIC a GPU; NVIDIA's data sheets for the rest.
TEST(Cluster, PresetsHavePublishedFigures) {
  const ClusterSpec h800 = LoadCluster("h800x128");
  EXPECT_EQ(h800.name, "h800x128");
  EXPECT_EQ(h800.gpus, 128);
  EXPECT_EQ(h800.gpus_per_node, 8);
  EXPECT_EQ(h800.nics_per_node, 8);
  EXPECT_EQ(h800.gpu.peak_tflops, 989);
  EXPECT_EQ(h800.gpu.memory_gb, 80);
  EXPECT_EQ(h800.gpu.memory_gbytes_s, 3350);
  EXPECT_EQ(h800.nvlink_gbytes_s, 160);
  EXPECT_EQ(h800.nic_gbytes_s, 50);
  EXPECT_EQ(LoadCluster("h100x16").nvlink_gbytes_s, 450);
  EXPECT_EQ(LoadCluster("h200x16").gpu.memory_gb, 141);
  EXPECT_EQ(LoadCluster("h200x16").gpu.memory_gbytes_s, 4800);
  const ClusterSpec laptop = LoadCluster("laptop");
  EXPECT_EQ(laptop.name, "laptopx2");
  EXPECT_EQ(laptop.gpus, 2);
  EXPECT_EQ(laptop.nic_gbytes_s, 1.25);  // 10 Gb/s
}

TEST(Cluster, PresetsSayWhereTheyAreFrom) {
  std::vector<std::string> names;
  for (const Preset& preset : ClusterPresets()) {
    names.push_back(preset.name);
    const ClusterSpec c = LoadCluster(preset.name + "x1");
    EXPECT_GT(c.source.size(), 20u) << preset.name;
    EXPECT_GT(c.efficiency.source.size(), 20u) << preset.name;
    EXPECT_NE(c.source, c.efficiency.source) << preset.name;
  }
  EXPECT_THAT(names, testing::ElementsAre("h100", "h200", "h800", "laptop"));
}

TEST(Cluster, NodesAreWhole) {
  EXPECT_EQ(LoadCluster("h800x8").gpus, 8);
  EXPECT_EQ(LoadCluster("h800x3").gpus, 3);
  EXPECT_EQ(LoadCluster("h800x16384").gpus, 16384);
  EXPECT_THAT(LoadError("h800x12"), AllOf(HasSubstr("nodes must be whole"), HasSubstr("expected 8 or 16")));
  EXPECT_EQ(LoadCluster("laptopx3").gpus, 3);  // nodes of one
}

TEST(Cluster, SaysWhatIsUnknown) {
  EXPECT_THAT(LoadError("h80x128"), AllOf(HasSubstr("unknown cluster"), HasSubstr("h100, h200, h800, laptop")));
  EXPECT_THAT(LoadError("H800x128"), HasSubstr("did you mean 'h800'?"));
  EXPECT_THAT(LoadError("tpu"), HasSubstr("unknown cluster"));
  EXPECT_THAT(LoadError("h800"), HasSubstr("as in h800x128"));
  EXPECT_THAT(LoadError("h800x0"), HasSubstr("got 0, expected 1 to 1048576"));
  EXPECT_THAT(LoadError("h800x99999999999999999999"), HasSubstr("not a number of GPUs"));
  EXPECT_THAT(LoadError("h800x"), HasSubstr("unknown cluster"));
  EXPECT_THAT(LoadError("x8"), HasSubstr("unknown cluster"));
  EXPECT_THAT(LoadError("/nowhere/my.toml"), HasSubstr("No such file"));
}

// Lines are those of the text, whose first line is `gpus`.
TEST(Cluster, SaysWhatIsWrongAndOnWhichLine) {
  EXPECT_THAT(ReadError("gpus = 8\nnics = 3\n"), AllOf(HasSubstr("unknown key (my.toml:2): got 'nics'")));
  EXPECT_THAT(ReadError(H800("gemm = 0.7", "gem = 0.7")), HasSubstr("did you mean 'efficiency.gemm'?"));
  EXPECT_THAT(ReadError(H800("[gpu]", "[gpus]")), HasSubstr("redefine"));
  EXPECT_THAT(ReadError(H800("[gpu]", "[device]")), HasSubstr("unknown table (my.toml:"));
  EXPECT_THAT(ReadError("gpus = 8\nefficiency = 3\n"), HasSubstr("my.toml:2"));
  EXPECT_THAT(ReadError("gpus = 8\ngpus_per_node = 8.5\n"),
              HasSubstr("wrong type (my.toml:2, gpus_per_node): got 8.5"));
  EXPECT_THAT(ReadError("gpus = 0\n"), HasSubstr("value not allowed (my.toml:1, gpus): got 0"));
  EXPECT_THAT(ReadError("topology = \"torus\"\n"), HasSubstr("got \"torus\", expected \"rail\" or \"flat\""));
  EXPECT_THAT(ReadError("nic_gbytes_s = nan\n"), HasSubstr("value not allowed"));
  EXPECT_THAT(ReadError("[efficiency]\ngemm = 1.01\n"),
              HasSubstr("efficiency.gemm): got 1.01, expected a number from 0.001 to 1"));
  EXPECT_THAT(ReadError("[efficiency]\nm2n = 0\n"), HasSubstr("my.toml:2, efficiency.m2n"));
  EXPECT_THAT(ReadError("spine_oversubscription = 0.5\n"), HasSubstr("from 1"));
  EXPECT_THAT(ReadError("gpus = \n"), AllOf(HasSubstr("not valid TOML"), HasSubstr("my.toml:1")));
  EXPECT_THAT(ReadError(H800("gpus = 16", "gpus = 12")), HasSubstr("nodes must be whole (my.toml:1, gpus)"));
  EXPECT_THAT(ReadError(H800()), AllOf(HasSubstr("missing number of GPUs"), HasSubstr("my.toml")));
}

TEST(Cluster, EveryKeyWithoutDefaultIsNeeded) {
  for (const std::string key : {"gpus_per_node", "nvlink_gbytes_s", "nic_gbytes_s", "peak_tflops", "memory_gb",
                                "attention_backward", "grouped_gemm_half_rows", "m2n", "overlap_slowdown"}) {
    EXPECT_THAT(ReadError(H800("\n" + key + " =", "\n#")), AllOf(HasSubstr("missing key (my.toml"), HasSubstr(key)));
  }
  const ClusterSpec c = ReadCluster(H800("\ntopology =", "\n#"), "my.toml");
  EXPECT_EQ(c.topology, "rail");
}

void ExpectEqual(const ClusterSpec& a, const ClusterSpec& b) {
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.source, b.source);
  EXPECT_EQ(a.gpus, b.gpus);
  EXPECT_EQ(a.gpus_per_node, b.gpus_per_node);
  EXPECT_EQ(a.gpu.name, b.gpu.name);
  EXPECT_EQ(a.gpu.peak_tflops, b.gpu.peak_tflops);
  EXPECT_EQ(a.gpu.memory_gb, b.gpu.memory_gb);
  EXPECT_EQ(a.gpu.memory_gbytes_s, b.gpu.memory_gbytes_s);
  EXPECT_EQ(a.nvlink_gbytes_s, b.nvlink_gbytes_s);
  EXPECT_EQ(a.nics_per_node, b.nics_per_node);
  EXPECT_EQ(a.nic_gbytes_s, b.nic_gbytes_s);
  EXPECT_EQ(a.nic_latency_us, b.nic_latency_us);
  EXPECT_EQ(a.nvlink_latency_us, b.nvlink_latency_us);
  EXPECT_EQ(a.topology, b.topology);
  EXPECT_EQ(a.spine_oversubscription, b.spine_oversubscription);
  const EfficiencySpec &x = a.efficiency, &y = b.efficiency;
  EXPECT_EQ(x.attention_forward, y.attention_forward);
  EXPECT_EQ(x.attention_backward, y.attention_backward);
  EXPECT_EQ(x.gemm, y.gemm);
  EXPECT_EQ(x.grouped_gemm, y.grouped_gemm);
  EXPECT_EQ(x.grouped_gemm_half_rows, y.grouped_gemm_half_rows);
  EXPECT_EQ(x.memory, y.memory);
  EXPECT_EQ(x.all_to_all, y.all_to_all);
  EXPECT_EQ(x.m2n, y.m2n);
  EXPECT_EQ(x.point_to_point, y.point_to_point);
  EXPECT_EQ(x.nvlink, y.nvlink);
  EXPECT_EQ(x.collective, y.collective);
  EXPECT_EQ(x.op_overhead_us, y.op_overhead_us);
  EXPECT_EQ(x.message_overhead_us, y.message_overhead_us);
  EXPECT_EQ(x.overlap_slowdown, y.overlap_slowdown);
  EXPECT_EQ(x.source, y.source);
}

// All numbers different, so that no two keys can be mixed up.
ClusterSpec Strange() {
  ClusterSpec c{.name = "a \"b\"",
                .source = "s\\",
                .gpus = 10,
                .gpus_per_node = 5,
                .gpu = {"g", 0.1, 1.0 / 3, 3.5},
                .nvlink_gbytes_s = 4.25,
                .nics_per_node = 7,
                .nic_gbytes_s = 1e-3,
                .nic_latency_us = 8.5,
                .nvlink_latency_us = 9.5,
                .topology = "flat",
                .spine_oversubscription = 2.5,
                .efficiency = {}};
  c.efficiency = {.attention_forward = 0.11,
                  .attention_backward = 0.12,
                  .gemm = 0.13,
                  .grouped_gemm = 0.14,
                  .grouped_gemm_half_rows = 15,
                  .memory = 0.16,
                  .all_to_all = 0.17,
                  .m2n = 0.18,
                  .point_to_point = 0.19,
                  .nvlink = 0.20,
                  .collective = 0.21,
                  .op_overhead_us = 22,
                  .message_overhead_us = 23,
                  .overlap_slowdown = 0.24,
                  .source = "e"};
  return c;
}

TEST(Cluster, PrintsWhatItReads) {
  for (const ClusterSpec& c : {LoadCluster("h800x128"), LoadCluster("laptop"), Strange()}) {
    ExpectEqual(ReadCluster(PrintCluster(c), "printed"), c);
  }
}

TEST(Cluster, LoadsFiles) {
  std::string name = (fs::temp_directory_path() / "clusters-XXXXXX").string();
  const fs::path folder = mkdtemp(name.data());
  std::ofstream(folder / "ours.toml") << H800("gpus = 16", "gpus = 24");
  const ClusterSpec c = LoadCluster((folder / "ours.toml").string());
  EXPECT_EQ(c.name, "ours");
  EXPECT_EQ(c.gpus, 24);
  std::ofstream(folder / "printed.toml") << PrintCluster(LoadCluster("h100x64"));
  ExpectEqual(LoadCluster((folder / "printed.toml").string()), LoadCluster("h100x64"));
  fs::remove_all(folder);
}

TEST(Cluster, LoadsOneOrTwo) {
  const std::vector<ClusterSpec> two = LoadClusters("h800x64+h100x32");
  ASSERT_EQ(two.size(), 2u);
  ExpectEqual(two[0], LoadCluster("h800x64"));
  ExpectEqual(two[1], LoadCluster("h100x32"));
  ASSERT_EQ(LoadClusters("h800x16").size(), 1u);
  ExpectEqual(LoadClusters("h800x16")[0], LoadCluster("h800x16"));
  const auto error = [](const std::string& text) { return ErrorOf([&] { LoadClusters(text); }); };
  for (const char* bad : {"h800x8+h800x8+h800x8", "+h800x8", "h800x8+", "+"}) {
    EXPECT_THAT(error(bad), HasSubstr("CLUSTER or CLUSTER+CLUSTER")) << bad;
    EXPECT_THAT(error(bad), HasSubstr(std::string("'") + bad + "'"));
  }
  EXPECT_THAT(error("h800x8+h900x8"), HasSubstr("unknown cluster: got 'h900x8'"));
  // A file, as a part and with a plus in its name.
  std::string name = (fs::temp_directory_path() / "clusters-XXXXXX").string();
  const fs::path folder = mkdtemp(name.data());
  for (const char* file : {"ours.toml", "a+b.toml"}) std::ofstream(folder / file) << H800("gpus = 16", "gpus = 24");
  EXPECT_EQ(LoadClusters((folder / "ours.toml").string() + "+h100x64")[0].name, "ours");
  ASSERT_EQ(LoadClusters((folder / "a+b.toml").string()).size(), 1u);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace disagmoe
