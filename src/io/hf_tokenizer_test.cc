// The script scripts/hf_tokenizer.py as our child, with the tokenizers of testdata/tokenizers: expected ids and texts
// are those that the `tokenizers` wheel gave when the files were made.
#include "io/hf_tokenizer.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/error.h"

namespace disagmoe {
namespace {

const std::string kTokenizers = DISAGMOE_SOURCE "/testdata/tokenizers/";
const HfProgram kProgram{DISAGMOE_TOKENIZERS_PYTHON, DISAGMOE_SOURCE "/scripts/hf_tokenizer.py"};

nlohmann::json Samples(const std::string& name) {
  return nlohmann::json::parse(std::ifstream(kTokenizers + name + "/samples.json"));
}

// A script of our own in place of the real one.
HfProgram Pretender(const std::string& lines) {
  const std::string path = testing::TempDir() + "pretender.py";
  std::ofstream(path) << "import sys, time\n" << lines;
  return {DISAGMOE_TOKENIZERS_PYTHON, path};
}

std::string ErrorOf(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

std::string ErrorOfLoading(const std::string& path, const HfProgram& program = kProgram) {
  return ErrorOf([&] { LoadHfTokenizer(path, program); });
}

TEST(HfTokenizer, SamplesGoThereAndBack) {
  using Sizes = std::pair<int64_t, int32_t>;
  const std::map<std::string, Sizes> sizes = {{"byte_level", {403, 400}}, {"metaspace", {450, 2}}};
  for (const auto& [name, size] : sizes) {
    const auto tokenizer = LoadHfTokenizer(kTokenizers + name, kProgram);
    EXPECT_EQ(tokenizer->vocab_size(), size.first);
    EXPECT_EQ(tokenizer->eod(), size.second);
    EXPECT_FALSE(tokenizer->by_byte());
    for (const auto& sample : Samples(name)) {
      const std::vector<int32_t> ids = sample.at("ids");
      EXPECT_EQ(tokenizer->Encode(sample.at("text")), ids) << sample;
      EXPECT_EQ(tokenizer->Decode(ids), sample.at("decoded").get<std::string>()) << sample;
    }
  }
}

TEST(HfTokenizer, LongTextsAndManyThreads) {
  const auto tokenizer = LoadHfTokenizer(kTokenizers + "byte_level/tokenizer.json", kProgram);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&tokenizer, t] {
      std::string text;  // more than a socket holds, both ways
      for (int i = 0; i < 100000; ++i) text += std::to_string(t) + " words\n";
      EXPECT_EQ(tokenizer->Decode(tokenizer->Encode(text)), text);
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(HfTokenizer, ARefusedRequestLeavesTheNextOneAlone) {
  const auto tokenizer = LoadHfTokenizer(kTokenizers + "byte_level", kProgram);
  EXPECT_NE(ErrorOf([&] { tokenizer->Encode("\xff"); }).find("not UTF-8"), std::string::npos);
  EXPECT_NE(ErrorOf([&] { tokenizer->Decode({-1}); }).find("the tokenizer refuses"), std::string::npos);
  EXPECT_EQ(tokenizer->Decode({1 << 30}), "");
  EXPECT_EQ(tokenizer->Decode(Samples("byte_level")[0].at("ids")), Samples("byte_level")[0].at("text"));
}

TEST(HfTokenizer, FaultsAreErrorsWithTheirParts) {
  EXPECT_NE(ErrorOfLoading("/nowhere").find("no tokenizer (/nowhere): got no such file"), std::string::npos);
  EXPECT_NE(ErrorOfLoading("x", {"/nowhere/python", "x"}).find("cannot start Python"), std::string::npos);
  EXPECT_NE(ErrorOfLoading("x", Pretender("")).find("process ended"), std::string::npos);
  EXPECT_NE(ErrorOfLoading("x", Pretender("print('hello')")).find("nonsense"), std::string::npos);
  EXPECT_NE(ErrorOfLoading("x", Pretender("print('[1]')")).find("nonsense"), std::string::npos);

  const std::string folder = testing::TempDir() + "no_end";
  std::filesystem::create_directories(folder);
  std::filesystem::copy_file(kTokenizers + "byte_level/tokenizer.json", folder + "/tokenizer.json",
                             std::filesystem::copy_options::overwrite_existing);
  const auto tokenizer = LoadHfTokenizer(folder, kProgram);
  EXPECT_EQ(tokenizer->Decode(tokenizer->Encode("The")), "The");
  EXPECT_NE(ErrorOf([&] { tokenizer->eod(); }).find("which token ends a text?"), std::string::npos);
}

TEST(HfTokenizer, AChildThatEndsIsAnErrorAndOneThatHangsIsKilled) {
  const auto gone = LoadHfTokenizer("x", Pretender("print('{\"vocab_size\": 5, \"eod\": null}')"));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_NE(ErrorOf([&] { gone->Encode(std::string(1 << 20, 'x')); }).find("process ended"), std::string::npos);
  const auto begin = std::chrono::steady_clock::now();
  LoadHfTokenizer("x", Pretender("print('{\"vocab_size\": 5, \"eod\": null}', flush=True)\ntime.sleep(100)"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(50));
}

TEST(HfTokenizer, AnswersInPieces) {
  const auto tokenizer = LoadHfTokenizer("x", Pretender(
      "sys.stdout.write('{\"vocab_size\": 5000000000, '); sys.stdout.flush(); time.sleep(0.3)\n"
      "print('\"eod\": 3}\\n{\"ids\": [7]}', flush=True); sys.stdin.read()"));
  EXPECT_EQ(tokenizer->vocab_size(), 5000000000);
  EXPECT_EQ(tokenizer->Encode("x"), std::vector<int32_t>{7});
}

TEST(HfTokenizer, Names) {
  EXPECT_TRUE(IsHfTokenizer("a/tokenizer.json"));
  EXPECT_TRUE(IsHfTokenizer(kTokenizers + "byte_level"));
  EXPECT_FALSE(IsHfTokenizer("bytes"));
  EXPECT_FALSE(IsHfTokenizer("a.model"));
}

}  // namespace
}  // namespace disagmoe
