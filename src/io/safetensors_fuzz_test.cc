// Whatever the bytes: an Error of one line, or a header whose arrays lie within the file. Mutations of real headers and of
// an index; no files, so there can be many.
#include <set>

#include "base/rng.h"
#include "io/safetensors_header.h"
#include "io/tensor_index.h"
#include "io/test_util.h"

namespace disagmoe {
namespace {

const char* const kPieces[] = {"[", "]", "{", "}", "\"", ",", ":", "\\u0000", "\\ud800", "-1", "0", "-0", "1e99", " ", "\xff", "\xc3",
                               "F4", "F64", "BOOL", "null", "true", "9223372036854775807", "9223372036854775808",
                               "18446744073709551615", "18446744073709551616", "4611686018427387904", "1.0", "__metadata__",
                               "\"shape\":[", "\"data_offsets\":[0,0]", "\"dtype\":\"F32\"", "{\"a\":{}}"};

std::string Mutated(const std::string& good, Rng* rng) {
  std::string text = good;
  for (uint64_t n = 1 + rng->Below(4); n > 0 && !text.empty(); --n) {
    const size_t at = rng->Below(text.size());
    const std::string piece = kPieces[rng->Below(std::size(kPieces))];
    switch (rng->Below(7)) {
      case 0: text[at] = static_cast<char>(rng->Below(256)); break;
      case 1: text[at] = static_cast<char>(text[at] ^ (1 << rng->Below(8))); break;
      case 2: text.erase(at, 1 + rng->Below(12)); break;
      case 3: text.insert(at, piece); break;
      case 4: text.insert(at, text.substr(rng->Below(text.size()), rng->Below(120))); break;
      case 5: text.resize(at); break;
      case 6: {  // another number in place of one
        const size_t begin = text.find_first_of("0123456789", at), end = text.find_first_not_of("0123456789", begin);
        if (begin != std::string::npos) text.replace(begin, std::min(end, text.size()) - begin, piece);
        break;
      }
    }
  }
  return text;
}

// The header of a file with this JSON and as many bytes of data as `file_bytes` leaves. True if it is accepted.
bool Try(const std::string& json, uint64_t file_bytes) {
  SafetensorsHeader header;
  const std::string error = ErrorOf([&] { header = ParseSafetensorsHeader("f", json, file_bytes); });
  EXPECT_EQ(error.find('\n'), std::string::npos);
  EXPECT_LT(error.size(), 700u);
  if (!error.empty()) return false;
  uint64_t at = 8 + json.size();
  std::set<std::string> names;
  for (const SafetensorsEntry& e : header.entries) {
    EXPECT_EQ(e.begin, at);
    at += e.bytes;
    EXPECT_TRUE(names.insert(e.name).second);
    unsigned __int128 bits = static_cast<unsigned>(DtypeBits(e.dtype));
    EXPECT_GT(bits, 0u);
    for (int64_t d : e.shape) bits *= static_cast<uint64_t>(d);
    EXPECT_EQ(static_cast<uint64_t>(bits), e.bytes * 8);
    EXPECT_EQ(static_cast<uint64_t>(bits >> 64), 0u);
  }
  EXPECT_EQ(at, file_bytes);
  return true;
}

struct Seed {
  std::string json;
  uint64_t data_bytes;
};

std::vector<Seed> Seeds() {
  std::vector<Seed> seeds;
  for (const char* path : {DISAGMOE_TESTDATA "/hf_small.safetensors", DISAGMOE_HF_TESTDATA "/gpt_oss_mxfp4/model.safetensors",
                           DISAGMOE_HF_TESTDATA "/deepseek_fp8/model.safetensors",
                           DISAGMOE_HF_TESTDATA "/qwen2_moe/model-00004-of-00004.safetensors"}) {
    const std::string file = ReadAll(path);
    const uint64_t json_bytes = SafetensorsJsonBytes(path, file, file.size());
    seeds.push_back({file.substr(8, json_bytes), file.size() - 8 - json_bytes});
    EXPECT_TRUE(Try(seeds.back().json, file.size()));
  }
  seeds.push_back({R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"F4","shape":[2,1],"data_offsets":[2,3]}})", 3});
  return seeds;
}

TEST(SafetensorsFuzz, CutAtEveryByte) {
  for (const Seed& seed : Seeds()) {
    for (size_t length = 0; length < seed.json.size(); ++length) {
      const std::string json = seed.json.substr(0, length);
      const bool only_blanks_lost = seed.json.find_first_not_of(' ', length) == std::string::npos;
      EXPECT_EQ(Try(json, 8 + length + seed.data_bytes), only_blanks_lost) << length;
    }
  }
}

TEST(SafetensorsFuzz, EveryBitFlipped) {
  for (const Seed& seed : Seeds()) {
    for (size_t bit = 0; bit < 8 * seed.json.size(); ++bit) {
      std::string json = seed.json;
      json[bit / 8] = static_cast<char>(json[bit / 8] ^ (1 << bit % 8));
      Try(json, 8 + json.size() + seed.data_bytes);
    }
  }
}

TEST(SafetensorsFuzz, MutatedHeaders) {
  Rng rng(21);
  int accepted = 0;
  const std::vector<Seed> seeds = Seeds();
  for (int round = 0; round < 40000; ++round) {
    const Seed& seed = seeds[static_cast<size_t>(round) % seeds.size()];
    const std::string json = Mutated(seed.json, &rng);
    accepted += Try(json, 8 + json.size() + seed.data_bytes);
  }
  EXPECT_GT(accepted, 400);
  EXPECT_LT(accepted, 20000);
}

TEST(SafetensorsFuzz, MutatedLengths) {
  Rng rng(22);
  for (int round = 0; round < 20000; ++round) {
    const uint64_t file_bytes = rng.Below(2) ? rng.Below(64) : rng.Next() >> rng.Below(64);
    const uint64_t length = rng.Below(2) ? rng.Next() >> rng.Below(64) : file_bytes - rng.Below(20);
    const std::string beginning = Bytes(length).substr(0, std::min<uint64_t>(8, file_bytes));
    uint64_t json_bytes = 0;
    if (ErrorOf([&] { json_bytes = SafetensorsJsonBytes("f", beginning, file_bytes); }) != "") continue;
    EXPECT_EQ(json_bytes, length);
    EXPECT_LE(length, 100000000u);
    EXPECT_LE(length + 8, file_bytes);
  }
}

TEST(SafetensorsFuzz, HostileHeaders) {
  const std::string open(90 << 20, '['), objects(1 << 20, '{'), blanks(90 << 20, ' ');
  EXPECT_FALSE(Try("{\"a\":" + open, 8 + 5 + open.size()));
  EXPECT_FALSE(Try(objects, 8 + objects.size()));
  EXPECT_TRUE(Try("{" + blanks + "}", 8 + blanks.size() + 2));
  EXPECT_FALSE(Try("{\"" + blanks, 8 + blanks.size() + 2));
  std::string deep = "{";
  for (int i = 0; i < 100000; ++i) deep += "\"a\":{";
  EXPECT_FALSE(Try(deep, 8 + deep.size()));
  std::string many = "{";  // a hundred thousand arrays at the same place, of no bytes: allowed
  for (int i = 0; i < 100000; ++i) {
    many += (i ? "," : "") + ("\"" + std::to_string(i)) + R"(":{"dtype":"F32","shape":[0],"data_offsets":[0,0]})";
  }
  EXPECT_TRUE(Try(many + "}", 8 + many.size() + 1));
  EXPECT_FALSE(Try(many + R"(,"7":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})", 8 + many.size() + 55));
}

TEST(SafetensorsFuzz, MutatedIndices) {
  Rng rng(23);
  const std::string all = ReadAll(DISAGMOE_HF_TESTDATA "/qwen2_moe/model.safetensors.index.json");
  const std::string good = all.substr(0, all.find(',', 800)) + "}}";
  EXPECT_EQ(ParseTensorIndex("i", good).total_size, 63072);
  int accepted = 0;
  for (int round = 0; round < 30000; ++round) {
    const std::string text = Mutated(good, &rng);
    TensorIndex index;
    const std::string error = ErrorOf([&] { index = ParseTensorIndex("i", text); });
    EXPECT_LT(error.size(), 700u);
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
    if (!error.empty()) continue;
    ++accepted;
    for (const auto& [name, file] : index.file_of) {
      ASSERT_EQ(file.find_first_of(std::string("/\0", 2)), std::string::npos);
      ASSERT_NE(file[0], '.');
    }
  }
  EXPECT_GT(accepted, 300);
}

}  // namespace
}  // namespace disagmoe
