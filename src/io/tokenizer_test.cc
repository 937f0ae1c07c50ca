#include "io/tokenizer.h"

#include <nlohmann/json.hpp>

#include "base/rng.h"
#include "io/test_util.h"

namespace disagmoe {
namespace {

TEST(Tokenizer, Bytes) {
  EXPECT_EQ(EncodeBytes(std::string("a\0\xff", 3), true), (std::vector<int32_t>{97, 0, 255, 256}));
  EXPECT_EQ(EncodeBytes("", false), std::vector<int32_t>());
  EXPECT_EQ(DecodeBytes({104, 256, 105, -1, 300}), "hi");
  const auto tokenizer = LoadTokenizer("bytes");
  EXPECT_EQ(tokenizer->Encode("hi"), (std::vector<int32_t>{104, 105}));
  EXPECT_EQ(tokenizer->Decode({104, 105, 256}), "hi");
  EXPECT_EQ(tokenizer->eod(), 256);
  EXPECT_EQ(tokenizer->vocab_size(), 257);
}

TEST(Tokenizer, RefusesUnknownNames) {
  for (const char* name : {"", "byte", "tokenizer"}) {
    EXPECT_NE(ErrorOf([&] { LoadTokenizer(name); }).find("unknown tokenizer"), std::string::npos) << name;
  }
}

bool BuiltIn() {
  return ErrorOf([] { LoadTokenizer("/absent/x.model"); }).find("by this build") == std::string::npos;
}

// Models and expected ids are made by the public implementation: testdata/make_sentencepiece_fixture.py.
TEST(SentencePiece, EncodesAndDecodesAsThePublicImplementation) {
  if (!BuiltIn()) GTEST_SKIP() << "built without SentencePiece";
  const auto expected = nlohmann::json::parse(ReadAll(DISAGMOE_TESTDATA "/spm_expected.json"));
  for (const std::string kind : {"bpe", "unigram"}) {
    const auto& model = expected["models"][kind];
    const auto tokenizer = LoadTokenizer(DISAGMOE_TESTDATA "/spm_" + kind + ".model");
    EXPECT_EQ(tokenizer->vocab_size(), model["vocab_size"].get<int64_t>());
    EXPECT_EQ(tokenizer->eod(), model["eod"].get<int32_t>());
    EXPECT_FALSE(tokenizer->by_byte());
    ASSERT_GE(model["cases"].size(), 8u);
    for (const auto& c : model["cases"]) {
      const std::string text = c["text"];
      const std::vector<int32_t> ids = c["ids"];
      EXPECT_EQ(tokenizer->Encode(text), ids) << kind << ": " << text;
      EXPECT_EQ(tokenizer->Decode(ids), c["decoded"].get<std::string>()) << kind << ": " << text;
      // Neither ends of documents nor unknown tokens are text.
      std::vector<int32_t> more = ids;
      more.insert(more.end(), {tokenizer->eod(), -5, 420, 1 << 30});
      EXPECT_EQ(tokenizer->Decode(more), c["decoded"].get<std::string>());
    }
  }
}

TEST(SentencePiece, SaysWhatIsWrongWithAModel) {
  if (!BuiltIn()) GTEST_SKIP() << "built without SentencePiece";
  TemporaryFolder folder;
  const auto error = [&](const std::string& bytes) {
    WriteAll(folder / "x.model", bytes);
    return ErrorOf([&] { LoadTokenizer(folder / "x.model"); });
  };
  const std::string model = ReadAll(DISAGMOE_TESTDATA "/spm_bpe.model");
  EXPECT_EQ(error(model), "");
  for (const std::string& bad : {std::string(), std::string("not a model"), std::string(64, '\xff')}) {
    EXPECT_NE(error(bad).find("not a SentencePiece model"), std::string::npos) << error(bad);
    EXPECT_EQ(error(bad).find('\n'), std::string::npos);
  }
  EXPECT_NE(error(model.substr(0, model.size() / 2)), "");
  EXPECT_NE(ErrorOf([&] { LoadTokenizer(folder / "absent.model"); }).find("No such file"), std::string::npos);
}

}  // namespace
}  // namespace disagmoe
