#include <sys/resource.h>

#include <cmath>

#include "base/rng.h"
#include "io/safetensors.h"
#include "io/test_util.h"

namespace disagmoe {
namespace {

template <typename T>
NamedArray Array(const std::string& name, const std::string& dtype, std::vector<int64_t> shape, const std::vector<T>& values) {
  return {name, dtype, std::move(shape), values.data(), values.size() * sizeof(T)};
}

template <typename T>
std::vector<T> Values(const NamedArray& array) {
  std::vector<T> values(array.bytes / sizeof(T));
  std::memcpy(values.data(), array.data, array.bytes);
  return values;
}

std::string File(const std::string& header, const std::string& data) { return Bytes(uint64_t{header.size()}) + header + data; }

std::string OpenError(const TemporaryFolder& folder, const std::string& content) {
  WriteAll(folder / "x.safetensors", content);
  return ErrorOf([&] { SafetensorsFile file(folder / "x.safetensors"); });
}

// FIPS 180-2, appendix B.
TEST(Sha256, PublishedValues) {
  TemporaryFolder folder;
  WriteAll(folder / "abc", "abc");
  EXPECT_EQ(Sha256File(folder / "abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  WriteAll(folder / "million", std::string(1000000, 'a'));
  EXPECT_EQ(Sha256File(folder / "million"), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  EXPECT_NE(ErrorOf([&] { Sha256File(folder / "absent"); }).find("absent): got No such file"), std::string::npos);
}

// The fixture is written by testdata/make_safetensors_fixture.py with Hugging Face's library.
TEST(Safetensors, ReadsFileOfTheReferenceLibrary) {
  const SafetensorsFile file(DISAGMOE_TESTDATA "/hf_small.safetensors");
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "np"}, {"note", "line\nbreak"}}));
  EXPECT_EQ(file.arrays().size(), 7u);
  const NamedArray& weight = file.Find("layers.0.weight");
  EXPECT_EQ(weight.dtype, "F32");
  EXPECT_EQ(weight.shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(Values<float>(weight), (std::vector<float>{0, 0.25, 0.5, 0.75, 1, 1.25}));
  EXPECT_EQ(Values<int64_t>(file.Find("step")), std::vector<int64_t>{(int64_t{1} << 40) + 1});
  EXPECT_EQ(file.Find("scalar").shape, std::vector<int64_t>());
  EXPECT_EQ(Values<float>(file.Find("scalar")), std::vector<float>{2.5});
  EXPECT_EQ(file.Find("empty").shape, (std::vector<int64_t>{0, 4}));
  EXPECT_EQ(file.Find("empty").bytes, 0u);
  EXPECT_EQ(Values<uint8_t>(file.Find("bytes")), (std::vector<uint8_t>{1, 2, 255}));
  EXPECT_EQ(Values<uint16_t>(file.Find("half")), (std::vector<uint16_t>{0x3c00, 0xc000}));
  EXPECT_EQ(Values<uint8_t>(file.Find("n\xc3\xa4me \"quoted\"\\")), (std::vector<uint8_t>{1, 0}));
  EXPECT_NE(ErrorOf([&] { file.Find("weight"); }).find("got \"weight\", expected one of the file's 7 arrays"), std::string::npos);
}

TEST(Safetensors, WritesTheFormatByteForByte) {
  TemporaryFolder folder;
  const std::vector<uint8_t> bytes = {1, 2, 3};
  const std::vector<float> numbers = {1, -2};
  const std::string sha = WriteSafetensors(
      folder / "x", {Array("b", "U8", {3}, bytes), Array("a \"q\"", "F32", {2, 1}, numbers)}, {{"k", "v"}});
  // The four-byte elements first, whatever the order of the call.
  std::string header = "{\"__metadata__\":{\"k\":\"v\"},"
                       "\"a \\\"q\\\"\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]},"
                       "\"b\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[8,11]}}";
  while (header.size() % 8) header += ' ';
  const std::string expected = File(header, std::string("\0\0\x80\x3f\0\0\0\xc0\1\2\3", 11));
  EXPECT_EQ(ReadAll(folder / "x"), expected);
  EXPECT_EQ(sha, Sha256File(folder / "x"));
  EXPECT_EQ(ListFolder(folder.path()), std::vector<std::string>{"x"});
}

TEST(Safetensors, SameInputSameBytes) {
  TemporaryFolder folder;
  Rng rng(5);
  std::vector<std::vector<uint64_t>> buffers;
  std::vector<NamedArray> arrays;
  for (int i = 0; i < 60; ++i) {
    const std::pair<const char*, size_t> types[] = {{"U8", 1}, {"BF16", 2}, {"F32", 4}, {"I64", 8}};
    const auto [dtype, bytes] = types[rng.Below(4)];
    const size_t n = rng.Below(50);
    buffers.emplace_back(n + 1, rng.Next());
    arrays.push_back({"layer." + std::to_string(i), dtype, {static_cast<int64_t>(n)}, buffers.back().data(), n * bytes});
  }
  const std::string sha = WriteSafetensors(folder / "a", arrays, {{"y", "1"}, {"x", "2"}});
  std::reverse(arrays.begin(), arrays.end());
  EXPECT_EQ(WriteSafetensors(folder / "b", arrays, {{"x", "2"}, {"y", "1"}}), sha);
  EXPECT_EQ(ReadAll(folder / "a"), ReadAll(folder / "b"));

  const SafetensorsFile file(folder / "a");
  ASSERT_EQ(file.arrays().size(), arrays.size());
  for (const NamedArray& array : arrays) {
    const NamedArray& found = file.Find(array.name);
    EXPECT_EQ(found.dtype, array.dtype);
    EXPECT_EQ(found.shape, array.shape);
    ASSERT_EQ(found.bytes, array.bytes);
    if (array.bytes == 0) continue;
    EXPECT_EQ(std::memcmp(found.data, array.data, array.bytes), 0);
    const size_t element = array.bytes / static_cast<size_t>(array.shape[0]);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(found.data) % element, 0u) << array.name;
  }
}

// Long enough for the hash to run beside the writing, in several pieces.
TEST(Safetensors, HashOfLargeFile) {
  TemporaryFolder folder;
  Rng rng(6);
  std::vector<uint64_t> numbers((40 << 20) / 8), more(1000);
  for (uint64_t& n : numbers) n = rng.Next();
  const std::string sha =
      WriteSafetensors(folder / "x", {Array("w", "I64", {40 << 17}, numbers), Array("v", "I64", {1000}, more)}, {});
  EXPECT_EQ(sha, Sha256File(folder / "x"));
  const SafetensorsFile file(folder / "x");
  EXPECT_EQ(std::memcmp(file.Find("w").data, numbers.data(), 40 << 20), 0);
}

TEST(Safetensors, EmptyOnes) {
  TemporaryFolder folder;
  WriteSafetensors(folder / "x", {}, {});
  EXPECT_EQ(ReadAll(folder / "x"), File("{}      ", ""));
  EXPECT_TRUE(SafetensorsFile(folder / "x").arrays().empty());
  WriteSafetensors(folder / "x", {{"z", "F32", {0, 5}, nullptr, 0}}, {{"only", "this"}});
  const SafetensorsFile file(folder / "x");
  EXPECT_EQ(file.Find("z").shape, (std::vector<int64_t>{0, 5}));
  EXPECT_EQ(file.metadata().at("only"), "this");
}

TEST(Safetensors, RefusesToWriteContradictions) {
  TemporaryFolder folder;
  const std::vector<float> v(6);
  const auto write = [&](const std::vector<NamedArray>& arrays) { WriteSafetensors(folder / "x", arrays, {}); };
  EXPECT_THROW(write({Array("a", "F32", {2, 2}, v)}), InternalError);
  EXPECT_THROW(write({Array("a", "FLOAT", {6}, v)}), InternalError);
  EXPECT_THROW(write({Array("a", "F32", {-2, -3}, v)}), InternalError);
  EXPECT_THROW(write({Array("a", "F32", {6}, v), Array("a", "I32", {6}, v)}), InternalError);
  EXPECT_THROW(write({Array("__metadata__", "F32", {6}, v)}), InternalError);
  EXPECT_TRUE(ListFolder(folder.path()).empty());
}

struct BadFile {
  const char* header;
  const char* data;
  const char* part;  // of the error
};

// One array's part of a header.
#define ENTRY(name, dtype, shape, offsets) \
  "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" offsets "]}"

void ExpectError(const TemporaryFolder& folder, const std::string& content, const std::string& part) {
  const std::string error = OpenError(folder, content);
  EXPECT_NE(error.find(part), std::string::npos) << "'" << error << "' lacks '" << part << "' for " << content.substr(0, 100);
  EXPECT_LT(error.size(), 600u);
}

TEST(Safetensors, AcceptsWhatTheFormatAllows) {
  TemporaryFolder folder;
  EXPECT_EQ(OpenError(folder, File("{" ENTRY("a", "U8", "4", "0,4") "}", "1234")), "");
  EXPECT_EQ(OpenError(folder, File("{" ENTRY("b", "U8", "1", "3,4") "," ENTRY("a", "U8", "3", "0,3") "}\n ", "1234")), "");
  EXPECT_EQ(OpenError(folder, File("{" ENTRY("a", "F4", "2,2", "0,2") "}", "12")), "");
}

TEST(Safetensors, RefusesWrongLengths) {
  TemporaryFolder folder;
  ExpectError(folder, "", "0 bytes, expected at least 8");
  ExpectError(folder, "1234567", "7 bytes, expected at least 8");
  ExpectError(folder, Bytes(uint64_t{1} << 62) + "{}", "header of 4611686018427387904");
  ExpectError(folder, Bytes(~uint64_t{0}) + "{}", "header of");
  ExpectError(folder, Bytes(uint64_t{3}) + "{}", "header of 3 bytes in a file of 10");
  ExpectError(folder, Bytes(uint64_t{0}), "header of 0");
}

TEST(Safetensors, RefusesWrongHeaders) {
  TemporaryFolder folder;
  const BadFile files[] = {
      {" {}", "", "does not begin with {"},
      {"[]", "", "does not begin with {"},
      {"{} x", "", "no JSON at byte"},
      {"{\"a\"}", "", "no JSON at byte"},
      {"{\"\xff\":1}", "", "no JSON at byte"},
      {"{\"a\":{\"dtype\":{}}}", "", "an object in the wrong place"},
      {"{\"a\":{\"shape\":[[1]]}}", "", "a list in the wrong place"},
      {"{\"a\":3}", "", "number 3"},
      {"{\"a\":\"x\"}", "", "a string in the wrong place"},
      {"{\"a\":null}", "", "a null"},
      {"{\"a\":{}}", "", "lacks dtype"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", "1", "lacks dtype, shape or data_offsets"},
      {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[0,1]}}", "1", "\"dtype\" stands twice"},
      {"{\"a\":{\"more\":1}}", "", "unknown key \"more\""},
      {"{\"a\":{\"dtype\":[]}}", "", "a list in the wrong place"},
      {"{\"a\":{\"shape\":\"1\"}}", "", "a string in the wrong place"},
      {"{\"__metadata__\":{\"a\":1}}", "", "number 1"},
      {"{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", "", "metadata key \"a\" stands twice"},
      {"{\"__metadata__\":{},\"__metadata__\":{}}", "", "__metadata__ stands twice"},
  };
  for (const BadFile& f : files) ExpectError(folder, File(f.header, f.data), f.part);
  ExpectError(folder, File("{\"a\":" + std::string(100000, '['), ""), "a list in the wrong place");
  ExpectError(folder, File("{\"a\":" + std::string(100000, '{'), ""), "no JSON");
}

TEST(Safetensors, RefusesWrongArrays) {
  TemporaryFolder folder;
  const BadFile files[] = {
      {"{" ENTRY("a", "F33", "1", "0,4") "}", "1234", "unknown dtype \"F33\""},
      {"{" ENTRY("a", "U8", "4", "0") "}", "1234", "1 data_offsets"},
      {"{" ENTRY("a", "U8", "4", "0,4,5") "}", "1234", "number 5"},
      {"{" ENTRY("a", "U8", "-4", "0,4") "}", "1234", "negative number -4"},
      {"{" ENTRY("a", "U8", "4.0", "0,4") "}", "1234", "number \"4.0\""},
      {"{" ENTRY("a", "U8", "1e999", "0,4") "}", "1234", "no JSON"},
      {"{" ENTRY("a", "U8", "18446744073709551616", "0,4") "}", "1234", "number"},
      {"{" ENTRY("a", "U8", "9223372036854775808", "0,4") "}", "1234", "too large"},
      {"{" ENTRY("a", "U8", "3", "0,4") "}", "1234", "4 bytes, expected 3 bytes for U8 [3]"},
      {"{" ENTRY("a", "F32", "4294967296,4294967296,4294967296", "0,4") "}", "1234", "fits in memory"},
      // 2^60 elements of 32 bits are 2^65 bits, 0 modulo 2^64.
      {"{" ENTRY("a", "F32", "1152921504606846976", "0,0") "}", "", "fits in memory"},
      {"{" ENTRY("a", "F4", "3", "0,1") "}", "1", "fits in memory"},
      {"{" ENTRY("a", "U8", "4", "0,5") "}", "1234", "ending at byte 5"},
      {"{" ENTRY("a", "U8", "4", "4,0") "}", "1234", "at byte 4 of the data, expected 0"},
      {"{" ENTRY("a", "U8", "3", "1,4") "}", "1234", "at byte 1 of the data, expected 0: no holes"},
      {"{" ENTRY("a", "U8", "3", "0,3") "}", "1234", "4 bytes of data, expected 3"},
      {"{" ENTRY("a", "U8", "2", "0,2") "," ENTRY("b", "U8", "1", "3,4") "}", "1234", "\"b\" at byte 3"},
      {"{" ENTRY("a", "U8", "3", "0,3") "," ENTRY("b", "U8", "2", "2,4") "}", "1234", "\"b\" at byte 2"},
      {"{" ENTRY("a", "U8", "2", "0,2") "," ENTRY("a", "U8", "2", "2,4") "}", "1234", "two arrays named \"a\""},
  };
  for (const BadFile& f : files) ExpectError(folder, File(f.header, f.data), f.part);
}

// Whatever the bytes: an Error, or arrays that lie within the file and can be read.
TEST(Safetensors, SurvivesMutations) {
  TemporaryFolder folder;
  Rng rng(7);
  const std::string good = ReadAll(DISAGMOE_TESTDATA "/hf_small.safetensors");
  const std::string pieces[] = {"[", "]", "{", "}", "\"", ",", ":", "\\u0000", "-1", "0", "18446744073709551615", "1e99", " ", "F4"};
  int opened = 0;
  for (int round = 0; round < 5000; ++round) {
    std::string text = good;
    for (uint64_t n = 1 + rng.Below(3); n > 0; --n) {
      const size_t at = rng.Below(text.size());
      switch (rng.Below(5)) {
        case 0: text[at] = static_cast<char>(rng.Below(256)); break;
        case 1: text[at] = static_cast<char>('0' + rng.Below(10)); break;
        case 2: text.erase(at, 1 + rng.Below(10)); break;
        case 3: text.insert(at, pieces[rng.Below(std::size(pieces))]); break;
        case 4: text.insert(at, text.substr(rng.Below(text.size()), rng.Below(80))); break;
      }
      if (text.empty()) text.push_back('x');
    }
    // Half of the time with a right header length, or most rounds would end there.
    if (text.size() > 8 && rng.Below(2)) text.replace(0, 8, Bytes(uint64_t{text.size() - std::min<size_t>(text.size() - 8, 45) - 8}));
    if (OpenError(folder, text) != "") continue;
    ++opened;
    const SafetensorsFile file(folder / "x.safetensors");
    uint64_t sum = 0;
    for (const NamedArray& array : file.arrays()) {
      for (size_t i = 0; i < array.bytes; ++i) sum += static_cast<const uint8_t*>(array.data)[i];
    }
    EXPECT_LT(sum, 255 * text.size());
  }
  EXPECT_GT(opened, 20);
  EXPECT_LT(opened, 4000);
}

TEST(Safetensors, FailureToWriteLeavesNothing) {
  TemporaryFolder folder;
  const std::vector<float> v(6);
  const std::vector<NamedArray> arrays = {Array("a", "F32", {6}, v)};
  EXPECT_NE(ErrorOf([&] { WriteSafetensors(folder / "absent/x", arrays, {}); }).find("No such file"), std::string::npos);
  std::filesystem::create_directory(folder / "x");
  EXPECT_NE(ErrorOf([&] { WriteSafetensors(folder / "x", arrays, {}); }).find("cannot rename"), std::string::npos);
  EXPECT_EQ(ListFolder(folder.path()), std::vector<std::string>{"x"});
}

// A file-size limit fails like a full disk, in the middle of a write, and needs no permission.
TEST(Safetensors, LimitInTheMiddleOfTheFile) {
  TemporaryFolder folder;
  const std::vector<char> v(8 << 20);
  WriteSafetensors(folder / "x", {Array("a", "U8", {5}, std::vector<char>(5))}, {});
  const std::string before = ReadAll(folder / "x");
  rlimit old_limit, limit;
  getrlimit(RLIMIT_FSIZE, &old_limit);
  limit = {3 << 20, old_limit.rlim_max};
  const auto old_handler = signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &limit);
  const std::string error = ErrorOf([&] { WriteSafetensors(folder / "x", {Array("a", "U8", {8 << 20}, v)}, {}); });
  setrlimit(RLIMIT_FSIZE, &old_limit);
  signal(SIGXFSZ, old_handler);
  EXPECT_NE(error.find("File too large"), std::string::npos) << error;
  EXPECT_EQ(ReadAll(folder / "x"), before);
  EXPECT_EQ(ListFolder(folder.path()), std::vector<std::string>{"x"});
}

}  // namespace
}  // namespace disagmoe
