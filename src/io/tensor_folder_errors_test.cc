// What is wrong with a folder, file or index is said in one line.
#include <filesystem>

#include "io/safetensors.h"
#include "io/tensor_folder.h"
#include "io/tensor_index.h"
#include "io/test_util.h"

namespace disagmoe {
namespace {

namespace fs = std::filesystem;

void ExpectError(const std::string& path, const std::string& part) {
  const std::string error = ErrorOf([&] { TensorFolder folder(path); });
  EXPECT_NE(error.find(part), std::string::npos) << "'" << error << "' lacks '" << part << "'";
  EXPECT_EQ(error.find('\n'), std::string::npos);
  EXPECT_LT(error.size(), 700u);
}

struct Stored {
  std::string name, dtype;
  std::vector<int64_t> shape;
};

void Put(const std::string& path, const std::vector<Stored>& tensors) {
  const std::vector<char> zeros(1 << 20);
  std::vector<NamedArray> arrays;
  for (const Stored& t : tensors) {
    size_t bytes = t.dtype == "F32" ? 4 : t.dtype == "BF16" ? 2 : t.dtype == "I64" ? 8 : 1;
    for (int64_t d : t.shape) bytes *= static_cast<size_t>(d);
    arrays.push_back({t.name, t.dtype, t.shape, zeros.data(), bytes});
  }
  WriteSafetensors(path, arrays, {});
}

std::string Index(const std::string& map, const std::string& metadata = "") {
  return "{\"metadata\":{" + metadata + "},\"weight_map\":{" + map + "}}";
}

TEST(TensorFolderErrors, NothingToRead) {
  TemporaryFolder f;
  ExpectError(f / "absent", "there is no such folder or file");
  ExpectError(f.path(), "no weights in the folder");
  fs::create_directories(f / "snapshots/abc");
  ExpectError(f.path(), "snapshots/");
  WriteAll(f / "pytorch_model.bin", "PK");
  ExpectError(f.path(), "pytorch_model.bin is a pickle, which is not read: save the model with save_pretrained");
  ExpectError(f / "pytorch_model.bin", "not a safetensors file");
  Put(f / "consolidated.safetensors", {{"a", "F32", {1}}});
  ExpectError(f.path(), "name the file itself");
  Put(f / "model-00001-of-00002.safetensors", {{"a", "F32", {1}}});
  ExpectError(f.path(), "without their index");
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n";
  WriteAll(f / "model.safetensors", pointer);
  ExpectError(f.path(), "git lfs pull");
  fs::remove(f / "model.safetensors");
  WriteAll(f / kIndexFile, pointer);
  ExpectError(f.path(), "git lfs pull");
  fs::create_directories(f / "model.safetensors");
  ExpectError(f.path(), "two sets of weights");
  fs::remove(f / kIndexFile);
  ExpectError(f.path(), "not a regular file");
}

TEST(TensorFolderErrors, IndexAgainstFiles) {
  TemporaryFolder f;
  Put(f / "x.safetensors", {{"a", "F32", {2}}, {"b", "BF16", {3}}});
  Put(f / "y.safetensors", {{"c", "F32", {2}}});
  const std::string good = "\"a\":\"x.safetensors\",\"b\":\"x.safetensors\",\"c\":\"y.safetensors\"";
  const auto with = [&](const std::string& text) {
    WriteAll(f / kIndexFile, text);
    return f.path();
  };
  EXPECT_EQ(TensorFolder(with(Index(good, "\"total_size\":22"))).warnings().size(), 0u);
  EXPECT_EQ(TensorFolder(with(Index(good))).names(), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(TensorFolder(f / kIndexFile).names().size(), 3u);
  EXPECT_EQ(TensorFolder(with("{\"weight_map\":{" + good + "},\"more\":[{\"weight_map\":[1]}]}")).names().size(), 3u);
  // Published indices are wrong at times, and nothing depends on it.
  const std::vector<std::string> warnings = TensorFolder(with(Index(good, "\"total_size\":2.5e1"))).warnings();
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("its tensors have 22 bytes"), std::string::npos) << warnings[0];
}

TEST(TensorFolderErrors, WrongIndices) {
  TemporaryFolder f;
  Put(f / "x.safetensors", {{"a", "F32", {2}}, {"b", "BF16", {3}}});
  Put(f / "y.safetensors", {{"c", "F32", {2}}});
  Put(f / "z.safetensors", {{"c", "F32", {2}}});
  const std::pair<std::string, const char*> cases[] = {
      {Index(R"("a":"x.safetensors","c":"y.safetensors")"), "\"b\" in x.safetensors, expected only tensors that the index knows"},
      {Index(R"("a":"x.safetensors","b":"y.safetensors","c":"y.safetensors")"), "\"b\" in y.safetensors by the index, expected x.safetensors"},
      {Index(R"("a":"x.safetensors","b":"x.safetensors","d":"x.safetensors")"), "\"d\" in x.safetensors by the index, expected a file that"},
      {Index(R"("a":"x.safetensors","b":"x.safetensors","c":"y.safetensors","d":"z.safetensors")"), "(\"c\"): got y.safetensors and z.safetensors"},
      {Index(R"("a":"w.safetensors")"), "missing"},
      {Index(R"("a":"../x.safetensors")"), "the file \"../x.safetensors\" for \"a\", which is no"},
      {Index(R"("a":"/etc/passwd.safetensors")"), "which is no .safetensors file in the folder"},
      {Index(R"("a":"sub/x.safetensors")"), "which is no .safetensors file"},
      {Index(R"("a":"x.bin")"), "which is no .safetensors file"},
      {Index(R"("a":"")"), "which is no .safetensors file"},
      {Index(R"("a":".x.safetensors")"), "which is no .safetensors file"},
      {Index(R"("a":"x\u0000.safetensors")"), "which is no .safetensors file"},
      {Index(R"("a":"x.safetensors","a":"x.safetensors")"), "\"a\" twice"},
      {Index(R"("a":1)"), "a number in weight_map"},
      {Index(R"("a":null)"), "null in weight_map"},
      {Index(R"("a":true)"), "a boolean in weight_map"},
      {Index(R"("a":["x.safetensors"])"), "a list for \"a\""},
      {Index(R"("a":{"b":"x.safetensors"})"), "an object for \"a\""},
      {Index(""), "no weight_map with tensors"},
      {R"({"weight_map":[]})", "a list as weight_map"},
      {R"({"weight_map":"x.safetensors"})", "a string as weight_map"},
      {R"({"weight_map":{"a":"x.safetensors"},"weight_map":{}})", "weight_map twice"},
      {R"({"metadata":{"weight_map":{"a":"x.safetensors"}}})", "no weight_map with tensors"},
      {"[]", "a list"},
      {"3", "no weight_map"},
      {"", "no JSON"},
      {"{\"weight_map\":{\"a\"", "no JSON at byte"},
      {"{\"weight_map\":{\"\xff\":\"x.safetensors\"}}", "no JSON"},
      {"{\"metadata\":" + std::string(100000, '['), "no JSON"},
  };
  for (const auto& [text, part] : cases) {
    WriteAll(f / kIndexFile, text);
    ExpectError(f.path(), part);
  }
}

TEST(TensorFolderErrors, FilesThatAreCutOrGone) {
  TemporaryFolder f;
  Put(f / "model.safetensors", {{"a", "F32", {100}}, {"b", "BF16", {3}}});
  const std::string good = ReadAll(f / "model.safetensors");
  for (size_t length = 0; length < good.size(); length += length < 200 ? 1 : 37) {
    WriteAll(f / "model.safetensors", good.substr(0, length));
    ExpectError(f.path(), "damaged safetensors file");
  }
  WriteAll(f / "model.safetensors", good + "x");
  ExpectError(f.path(), "damaged safetensors file");
  // Cut while it is open: an Error, where a mapped file would end the process.
  WriteAll(f / "model.safetensors", good);
  const TensorFolder open(f.path());
  fs::resize_file(f / "model.safetensors", good.size() - 50);
  std::vector<float> values(100);
  EXPECT_NE(ErrorOf([&] { open.Read("a", WholeTensor(100), values.data()); }).find("became shorter"), std::string::npos);
}

TEST(TensorFolderErrors, NamesAndTypes) {
  TemporaryFolder f;
  Put(f / "model.safetensors", {{"a", "F32", {2}}, {"i", "I64", {2}}, {"q", "F8_E4M3", {2, 2}}, {"e", "F8_E8M0", {2}}});
  const TensorFolder folder(f / "model.safetensors");
  float values[4];
  const auto read = [&](const std::string& name) { return ErrorOf([&] { folder.Read(name, WholeTensor(2), values); }); };
  EXPECT_EQ(read("a"), "");
  EXPECT_NE(read("b").find("got \"b\", expected one of the 4 tensors"), std::string::npos);
  EXPECT_NE(read("i").find("\"i\" of I64"), std::string::npos);
  EXPECT_NE(read("q").find("F8_E4M3 with \"q_scale_inv\""), std::string::npos);
  EXPECT_NE(read("e").find("\"e\" of F8_E8M0"), std::string::npos);
  EXPECT_THROW(folder.Read("a", WholeTensor(3), values), InternalError);
  EXPECT_NE(ErrorOf([&] { folder.shape("c"); }), "");
}

TEST(TensorFolderErrors, PackedTensorsThatDoNotFit) {
  TemporaryFolder f;
  const auto with = [&](const std::vector<Stored>& tensors) {
    Put(f / "model.safetensors", tensors);
    return f.path();
  };
  const auto opens = [&](const std::vector<Stored>& tensors) { return TensorFolder(with(tensors)).names(); };
  using Names = std::vector<std::string>;
  EXPECT_EQ(opens({{"w", "F8_E4M3", {129, 1}}, {"w_scale_inv", "F32", {2, 1}}}), Names{"w"});
  EXPECT_EQ(opens({{"w", "F8_E4M3", {2, 3, 128}}, {"w_scale_inv", "BF16", {2, 1, 1}}}), Names{"w"});
  EXPECT_EQ(opens({{"w_blocks", "U8", {3, 2, 16}}, {"w_scales", "U8", {3, 2}}}), Names{"w"});
  EXPECT_EQ(opens({{"w_blocks", "F32", {3}}, {"w_scale_inv", "F32", {2}}}), (Names{"w_blocks", "w_scale_inv"}));  // just names
  EXPECT_EQ(opens({{"w", "F8_E4M3", {0, 5}}, {"w_scale_inv", "F32", {0, 1}}}), Names{"w"});
  ExpectError(with({{"w", "F8_E4M3", {129, 1}}, {"w_scale_inv", "F32", {1, 1}}}), "F32 [1,1], expected F32 [2,1]");
  ExpectError(with({{"w", "F8_E4M3", {128}}, {"w_scale_inv", "F32", {1}}}), "expected F8_E4M3 [.., rows, columns]");
  ExpectError(with({{"w", "BF16", {1, 1}}, {"w_scale_inv", "F32", {1, 1}}}), "\"w\" BF16 [1,1]");
  ExpectError(with({{"w", "F8_E4M3", {1, 1}}, {"w_scale_inv", "I64", {1, 1}}}), "\"w_scale_inv\" I64");
  ExpectError(with({{"w_blocks", "U8", {3, 2, 15}}, {"w_scales", "U8", {3, 2}}}), "expected U8 [.., rows, groups, 16]");
  ExpectError(with({{"w_blocks", "U8", {3, 2, 16}}, {"w_scales", "U8", {2, 3}}}), "\"w_scales\" U8 [2,3], expected U8 [3,2]");
  ExpectError(with({{"w_blocks", "F32", {3, 2, 16}}, {"w_scales", "U8", {3, 2}}}), "\"w_blocks\" F32");
  ExpectError(with({{"w_blocks", "U8", {16}}, {"w_scales", "U8", {}}}), "\"w_blocks\" U8 [16]");
  ExpectError(with({{"w_blocks", "U8", {0, int64_t{1} << 60, 16}}, {"w_scales", "U8", {0, int64_t{1} << 60}}}), "\"w_blocks\"");
  ExpectError(with({{"w_blocks", "U8", {3, 2, 16}}, {"w_scales", "U8", {3, 2}}, {"w", "F32", {1}}}), "packed and not packed");
}

TEST(TensorFolderErrors, LinksAreFollowed) {
  TemporaryFolder f;
  fs::create_directories(f / "blobs");
  fs::create_directories(f / "revision");
  Put(f / "blobs/0123", {{"a", "F32", {2}}});
  fs::create_symlink("../blobs/0123", f / "revision/model.safetensors");
  EXPECT_EQ(TensorFolder(f / "revision").names(), std::vector<std::string>{"a"});
  EXPECT_EQ(TensorFolder(f / "revision/").names(), std::vector<std::string>{"a"});
  fs::remove(f / "blobs/0123");
  ExpectError(f / "revision", "no weights in the folder");
}

}  // namespace
}  // namespace disagmoe
