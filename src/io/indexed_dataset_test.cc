#include <limits>

#include "base/rng.h"
#include "io/dataset.h"
#include "io/test_util.h"

namespace disagmoe {
namespace {

std::vector<int64_t> Tokens(const IndexedDataset& data, int64_t begin, int64_t count) {
  std::vector<int64_t> out(static_cast<size_t>(count), -99);
  data.Read(begin, count, out.data());
  return out;
}

std::vector<int64_t> AllTokens(const IndexedDataset& data) { return Tokens(data, 0, data.num_tokens()); }

// An index as the format describes it.
struct Index {
  std::string magic = std::string("MMIDIDX\0\0", 9);
  uint64_t version = 1;
  uint8_t code = 8;
  std::vector<int32_t> lengths;
  std::vector<int64_t> pointers, documents;
  std::string modes;

  std::string Text() const { return Text(lengths.size(), documents.size()); }
  std::string Text(uint64_t sequences, uint64_t entries) const {
    std::string text = magic + Bytes(version) + Bytes(code) + Bytes(sequences) + Bytes(entries);
    for (int32_t v : lengths) text += Bytes(v);
    for (int64_t v : pointers) text += Bytes(v);
    for (int64_t v : documents) text += Bytes(v);
    return text + modes;
  }
};

// Tokens 10, 11, ... as u16 in sequences of 2, 3 and 1.
Index SmallIndex() {
  Index index;
  index.lengths = {2, 3, 1};
  index.pointers = {0, 4, 10};
  index.documents = {0, 2, 3};
  return index;
}
std::string SmallBin() {
  std::string text;
  for (uint16_t t = 10; t < 16; ++t) text += Bytes(t);
  return text;
}

// The Error of opening these two files; "" if they open.
std::string OpenError(const TemporaryFolder& folder, const std::string& idx, const std::string& bin) {
  WriteAll(folder / "x.idx", idx);
  WriteAll(folder / "x.bin", bin);
  return ErrorOf([&] { IndexedDataset data(folder / "x"); });
}

// The fixtures are written by testdata/make_megatron_fixture.py.
TEST(IndexedDataset, ReadsFileOfAnIndependentWriter) {
  const IndexedDataset data(DISAGMOE_TESTDATA "/three_docs");
  EXPECT_EQ(data.num_sequences(), 6);
  EXPECT_EQ(data.num_documents(), 3);
  EXPECT_EQ(AllTokens(data), (std::vector<int64_t>{70000, 1, 2, 3, 4, 5, 6, 7, 8, 9, 123456789}));
  EXPECT_EQ(Tokens(data, 2, 5), (std::vector<int64_t>{2, 3, 4, 5, 6}));
  EXPECT_EQ(Tokens(data, 11, 0), std::vector<int64_t>());
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < 6; ++i) lengths.push_back(data.sequence_length(i));
  EXPECT_EQ(lengths, (std::vector<int64_t>{3, 1, 2, 1, 0, 4}));

  const InspectReport report = Inspect(DISAGMOE_TESTDATA "/three_docs");
  EXPECT_EQ(report.dtype, "i32");
  EXPECT_EQ(report.sequences, 6);
  EXPECT_EQ(report.documents, 3);
  EXPECT_EQ(report.tokens, 11);
  EXPECT_EQ(report.min_token, 1);
  EXPECT_EQ(report.max_token, 123456789);
  EXPECT_EQ(report.bin_bytes, 11 * 4);
  EXPECT_EQ(report.idx_bytes, 34 + 6 * 4 + 6 * 8 + 4 * 8 + 6);
}

TEST(IndexedDataset, ReadsWideAndNegativeTokens) {
  const IndexedDataset data(DISAGMOE_TESTDATA "/i64_tokens");
  EXPECT_EQ(AllTokens(data), (std::vector<int64_t>{-1, 0, int64_t{1} << 31, int64_t{1} << 40}));
  EXPECT_EQ(data.TokenRange(), (std::pair<int64_t, int64_t>{-1, int64_t{1} << 40}));
}

template <typename T>
void ReadsLimits(uint8_t code, const char* name) {
  TemporaryFolder folder;
  const T low = std::numeric_limits<T>::min(), high = std::numeric_limits<T>::max();
  Index index;
  index.code = code;
  index.lengths = {3};
  index.pointers = {0};
  index.documents = {0, 1};
  ASSERT_EQ(OpenError(folder, index.Text(), Bytes(low) + Bytes(T{7}) + Bytes(high)), "");
  const IndexedDataset data(folder / "x");
  EXPECT_EQ(AllTokens(data), (std::vector<int64_t>{low, 7, high})) << name;
  EXPECT_EQ(data.MaxToken(), high) << name;
  EXPECT_STREQ(data.dtype(), name);
}

TEST(IndexedDataset, ReadsEveryIntegerDtype) {
  ReadsLimits<uint8_t>(1, "u8");
  ReadsLimits<int8_t>(2, "i8");
  ReadsLimits<int16_t>(3, "i16");
  ReadsLimits<int32_t>(4, "i32");
  ReadsLimits<int64_t>(5, "i64");
  ReadsLimits<uint16_t>(8, "u16");
}

// The fixtures are written by Megatron's own IndexedDatasetBuilder: testdata/make_megatron_core_fixture.py.
TEST(IndexedDataset, ReadsFilesOfMegatron) {
  for (const auto& [name, first] : {std::pair<std::string, int64_t>{"u16", 0}, {"i32", 100000}}) {
    const IndexedDataset data(DISAGMOE_TESTDATA "/mcore_" + name);
    EXPECT_EQ(data.dtype(), name);
    EXPECT_EQ(data.num_documents(), 4);
    std::vector<int64_t> expected, lengths, begins;
    for (int64_t t = 5; t < 20; ++t) expected.push_back(first + t);
    EXPECT_EQ(AllTokens(data), expected);
    for (int64_t i = 0; i < data.num_sequences(); ++i) lengths.push_back(data.sequence_length(i));
    EXPECT_EQ(lengths, (std::vector<int64_t>{3, 1, 2, 1, 4, 2, 2}));
    for (int64_t i = 0; i < 4; ++i) begins.push_back(data.document_begin(i));
    EXPECT_EQ(begins, (std::vector<int64_t>{0, 4, 6, 13}));
  }
}

TEST(IndexedWriter, WritesTheBytesThatMegatronWrites) {
  TemporaryFolder folder;
  IndexedWriter writer(folder / "x", 50257);
  for (const std::vector<int32_t>& document : {std::vector<int32_t>{5, 6, 7}, {50256}, {8, 9}}) writer.AddDocument(document);
  writer.Finish();
  EXPECT_EQ(ReadAll(folder / "x.bin"), ReadAll(DISAGMOE_TESTDATA "/mcore_flat.bin"));
  EXPECT_EQ(ReadAll(folder / "x.idx"), ReadAll(DISAGMOE_TESTDATA "/mcore_flat.idx"));
}

template <typename T>
std::string FloatError(const TemporaryFolder& folder, uint8_t code, const std::vector<T>& tokens) {
  Index index;
  index.code = code;
  index.lengths = {2, static_cast<int32_t>(tokens.size()) - 2};
  index.pointers = {0, 2 * sizeof(T)};
  index.documents = {0, 1, 2};
  std::string bin;
  for (T t : tokens) bin += Bytes(t);
  return OpenError(folder, index.Text(), bin);
}

TEST(IndexedDataset, ReadsFloatsThatAreWholeNumbers) {
  TemporaryFolder folder;
  const double most = 9007199254740992;  // 2^53
  ASSERT_EQ(FloatError<double>(folder, 6, {0, -most, 70000, most}), "");
  const IndexedDataset doubles(folder / "x");
  EXPECT_EQ(AllTokens(doubles), (std::vector<int64_t>{0, -(int64_t{1} << 53), 70000, int64_t{1} << 53}));
  EXPECT_EQ(doubles.TokenRange(), (std::pair<int64_t, int64_t>{-(int64_t{1} << 53), int64_t{1} << 53}));
  EXPECT_STREQ(doubles.dtype(), "f64");
  ASSERT_EQ(FloatError<float>(folder, 7, {3, 16777216, -0.0f}), "");
  const IndexedDataset floats(folder / "x");
  EXPECT_EQ(AllTokens(floats), (std::vector<int64_t>{3, 16777216, 0}));
  EXPECT_STREQ(floats.dtype(), "f32");

  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  for (double bad : {0.5, nan, inf, -inf, 2 * most, -1e300, 1e-300}) {
    const std::string error = FloatError<double>(folder, 6, {1, 2, 3, bad, 0.5});
    EXPECT_NE(error.find("token 3, expected whole numbers"), std::string::npos) << error;
  }
  EXPECT_NE(FloatError<float>(folder, 7, {1.25f, 2}).find("got 1.25, token 0,"), std::string::npos);
}

TEST(IndexedDataset, RefusesWhatIsNoText) {
  TemporaryFolder folder;
  Index index = SmallIndex();
  index.modes = std::string(3, 0);
  EXPECT_EQ(OpenError(folder, index.Text(), SmallBin()), "");
  index.modes[2] = 1;
  const std::string error = OpenError(folder, index.Text(), SmallBin());
  EXPECT_NE(error.find("sequence 2 is no text"), std::string::npos) << error;
  EXPECT_NE(error.find("got mode 1, expected 0 for all"), std::string::npos) << error;
}

TEST(IndexedDataset, KnowsWhereDocumentsBegin) {
  TemporaryFolder folder;
  Rng rng(3);
  for (int round = 0; round < 60; ++round) {
    // Documents of 0 to 3 sequences of 0 to 3 tokens, the sequences in order or not.
    Index index;
    index.documents = {0};
    std::vector<int64_t> begins;
    int64_t tokens = 0;
    const uint64_t longest = round % 2 ? 3 : 0;  // no empty ones in every other round
    for (uint64_t d = rng.Below(8); d > 0; --d) {
      const int64_t begin = tokens;
      for (uint64_t n = longest ? rng.Below(longest + 1) : 1 + rng.Below(3); n > 0; --n) {
        index.lengths.push_back(static_cast<int32_t>(longest ? rng.Below(4) : 1 + rng.Below(3)));
        index.pointers.push_back(2 * tokens);
        tokens += index.lengths.back();
      }
      index.documents.push_back(static_cast<int64_t>(index.lengths.size()));
      if (tokens > begin) begins.push_back(begin);
    }
    std::string bin;
    for (int64_t t = 0; t < tokens + (round % 3 == 0); ++t) bin += Bytes(static_cast<uint16_t>(t));
    if (round % 3 == 0) {  // all one further, so that the sequences do not begin where the file does
      for (int64_t& p : index.pointers) p += 2;
    }
    const std::string error = OpenError(folder, index.Text(), bin);
    if (index.lengths.empty() && round % 3 == 0) continue;  // a byte pair that is in no sequence
    ASSERT_EQ(error, "");
    const IndexedDataset data(folder / "x");
    for (int64_t from = 0; from <= tokens; ++from) {
      for (int64_t to = from; to <= tokens + 1; ++to) {
        std::vector<int64_t> expected;
        for (int64_t b : begins) if (b >= from && b < to) expected.push_back(b);
        ASSERT_EQ(data.BeginsIn(from, to), expected) << round << ": " << from << " to " << to;
        ASSERT_EQ(data.CountBegins(from, to), static_cast<int64_t>(expected.size()));
      }
    }
    EXPECT_EQ(data.CountBegins(5, 2), 0);
  }
}

TEST(IndexedDataset, FollowsPointersInAnyOrder) {
  TemporaryFolder folder;
  Index index = SmallIndex();
  index.pointers = {8, 0, 8};  // tokens 14 15, 10 11 12, 14; token 13 in none
  ASSERT_EQ(OpenError(folder, index.Text(), SmallBin()), "");
  const IndexedDataset data(folder / "x");
  EXPECT_EQ(AllTokens(data), (std::vector<int64_t>{14, 15, 10, 11, 12, 14}));
  EXPECT_EQ(Tokens(data, 1, 2), (std::vector<int64_t>{15, 10}));
  EXPECT_EQ(Tokens(data, 3, 3), (std::vector<int64_t>{11, 12, 14}));
  EXPECT_EQ(Tokens(data, 6, 0), std::vector<int64_t>());
}

TEST(IndexedDataset, RefusesReadsOutside) {
  const IndexedDataset data(DISAGMOE_TESTDATA "/three_docs");
  int64_t out[16];
  EXPECT_THROW(data.Read(10, 2, out), InternalError);
  EXPECT_THROW(data.Read(-1, 1, out), InternalError);
  EXPECT_THROW(data.Read(1, std::numeric_limits<int64_t>::max(), out), InternalError);
  EXPECT_THROW(data.sequence_length(6), InternalError);
}

TEST(IndexedDataset, OpensAnEmptyOne) {
  TemporaryFolder folder;
  Index index;
  index.documents = {0};
  ASSERT_EQ(OpenError(folder, index.Text(), ""), "");
  const IndexedDataset data(folder / "x");
  EXPECT_EQ(data.num_tokens(), 0);
  EXPECT_EQ(data.MaxToken(), -1);
}

struct BadIndex {
  void (*change)(Index&);
  const char* part;  // of the error
};

void Has(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << text << "' lacks '" << part << "'";
}

TEST(IndexedDataset, SaysWhatIsWrong) {
  TemporaryFolder folder;
  EXPECT_EQ(OpenError(folder, SmallIndex().Text(), SmallBin()), "");
  const BadIndex indices[] = {
      {[](Index& i) { i.magic[3] = 'x'; }, "not a Megatron index"},
      {[](Index& i) { i.version = 2; }, "version of the index"},
      {[](Index& i) { i.code = 0; }, "got code 0"},
      {[](Index& i) { i.code = 9; }, "got code 9"},
      {[](Index& i) { i.documents.clear(); }, "no document entries"},
      {[](Index& i) { i.documents[0] = 1; }, "document entry 0 is wrong"},
      {[](Index& i) { i.documents = {0, 3, 2, 3}; }, "document entry 2 is wrong"},
      {[](Index& i) { i.documents[1] = -1; }, "document entry 1 is wrong"},
      {[](Index& i) { i.documents[1] = 4; }, "document entry 1 is wrong"},
      {[](Index& i) { i.documents[2] = 2; }, "document entry 2 is wrong"},
      {[](Index& i) { i.documents.resize(1); }, "document entry 0 is wrong"},
      {[](Index& i) { i.lengths[1] = -3; }, "sequence 1 has a wrong length"},
      {[](Index& i) { i.pointers[1] = 5; }, "sequence 1 lies outside the data file or unaligned"},
      {[](Index& i) { i.pointers[2] = -2; }, "sequence 2 lies outside"},
      {[](Index& i) { i.pointers[2] = 12; }, "sequence 2 lies outside"},
      {[](Index& i) { i.pointers[2] = std::numeric_limits<int64_t>::max() - 1; }, "sequence 2 lies outside"},
      {[](Index& i) { i.lengths[2] = std::numeric_limits<int32_t>::max(); }, "sequence 2 lies outside"},
  };
  for (const BadIndex& bad : indices) {
    Index index = SmallIndex();
    bad.change(index);
    Has(OpenError(folder, index.Text(), SmallBin()), bad.part);
  }
  Has(ErrorOf([&] { IndexedDataset data(folder / "absent"); }), "absent.idx): got No such file");
  Has(OpenError(folder, SmallIndex().Text(), SmallBin() + "xx"), "x.bin): got 14 bytes, expected 12 (6 tokens of 2)");
  // Counts whose sizes overflow 64 bits to the right size: 12 n = 36 (mod 2^64) and 8 n = 24 (mod 2^64).
  Has(OpenError(folder, SmallIndex().Text((uint64_t{1} << 62) + 3, 3), SmallBin()), "wrong size");
  Has(OpenError(folder, SmallIndex().Text(3, (uint64_t{1} << 61) + 3), SmallBin()), "wrong size");
}

TEST(IndexedDataset, RefusesEveryTruncation) {
  TemporaryFolder folder;
  const std::string idx = SmallIndex().Text(), bin = SmallBin();
  for (size_t n = 0; n < idx.size(); ++n) EXPECT_NE(OpenError(folder, idx.substr(0, n), bin), "") << n;
  for (size_t n = 0; n < bin.size(); ++n) EXPECT_NE(OpenError(folder, idx, bin.substr(0, n)), "") << n;
}

// Whatever the bytes: an Error of one line, or a set that can be read to its end.
TEST(IndexedDataset, SurvivesMutations) {
  TemporaryFolder folder;
  Rng rng(1);
  Index with_modes = SmallIndex();
  with_modes.modes = std::string(3, 0);
  const std::string texts[] = {SmallIndex().Text(), with_modes.Text()}, bin = SmallBin();
  int opened = 0;
  for (int round = 0; round < 4000; ++round) {
    std::string text = texts[round % 2];
    for (uint64_t n = 1 + rng.Below(3); n > 0; --n) {
      text[rng.Below(text.size())] = static_cast<char>(rng.Below(2) ? rng.Below(256) : rng.Below(2) * 255);
    }
    const std::string error = OpenError(folder, text, bin);
    EXPECT_EQ(error.find('\n'), std::string::npos);
    if (error != "") continue;
    ++opened;
    const IndexedDataset data(folder / "x");
    EXPECT_EQ(AllTokens(data).size(), static_cast<size_t>(data.num_tokens()));
    data.TokenRange();
    int64_t begins = 0;
    for (int64_t i = 0; i < data.num_tokens(); ++i) begins += data.CountBegins(i, i + 1);
    EXPECT_EQ(begins, static_cast<int64_t>(data.BeginsIn(0, data.num_tokens()).size()));
    EXPECT_LE(begins, data.num_documents());
  }
  EXPECT_GT(opened, 0);
  EXPECT_LT(opened, 2000);
}

TEST(IndexedWriter, WritesTheFormatByteForByte) {
  TemporaryFolder folder;
  {
    IndexedWriter writer(folder / "new/x", 300);
    writer.AddDocument({1, 299});
    writer.AddDocument({});
    const int32_t piece[] = {255, 256, 0};
    writer.AddTokens(piece, 2);
    writer.AddTokens(piece + 2, 1);
    writer.EndDocument();
    writer.Finish();
  }
  Index expected;
  expected.code = 8;
  expected.lengths = {2, 0, 3};
  expected.pointers = {0, 4, 4};  // in bytes
  expected.documents = {0, 1, 2, 3};
  EXPECT_EQ(ReadAll(folder / "new/x.idx"), expected.Text());
  EXPECT_EQ(ReadAll(folder / "new/x.bin"), std::string("\x01\x00\x2b\x01\xff\x00\x00\x01\x00\x00", 10));
  EXPECT_EQ(ListFolder(folder / "new"), (std::vector<std::string>{"x.bin", "x.idx"}));
}

// Megatron's DType.optimal_dtype: below 65500 u16, else i32.
TEST(IndexedWriter, ChoosesTheDtypeByVocabulary) {
  TemporaryFolder folder;
  for (const auto& [vocab, dtype] : {std::pair<int64_t, std::string>{65499, "u16"}, {65500, "i32"}, {151936, "i32"}}) {
    IndexedWriter writer(folder / "x", vocab);
    writer.AddDocument({0, static_cast<int32_t>(vocab - 1)});
    writer.Finish();
    const InspectReport report = Inspect(folder / "x");
    EXPECT_EQ(report.dtype, dtype) << vocab;
    EXPECT_EQ(report.max_token, vocab - 1);
  }
}

TEST(IndexedWriter, LargeDataComesBack) {
  TemporaryFolder folder;
  Rng rng(2);
  std::vector<int64_t> all;
  IndexedWriter writer(folder / "x", 1 << 20);
  for (int document = 0; document < 500; ++document) {
    std::vector<int32_t> tokens(rng.Below(3000));
    for (int32_t& t : tokens) t = static_cast<int32_t>(rng.Below(1 << 20));
    all.insert(all.end(), tokens.begin(), tokens.end());
    writer.AddDocument(tokens);
  }
  writer.Finish();
  const IndexedDataset data(folder / "x");
  EXPECT_EQ(data.num_documents(), 500);
  EXPECT_EQ(AllTokens(data), all);
}

TEST(IndexedWriter, FailureKeepsTheOldPairAndNothingElse) {
  TemporaryFolder folder;
  {
    IndexedWriter writer(folder / "x", 10);
    writer.AddDocument({9});
    writer.Finish();
  }
  {
    IndexedWriter writer(folder / "x", 10);
    writer.AddDocument({1, 2, 3});
    EXPECT_NE(ErrorOf([&] { writer.AddDocument({4, 10}); }).find("got 10, expected 0 to 9"), std::string::npos);
    EXPECT_NE(ErrorOf([&] { writer.AddDocument({-1}); }).find("got -1"), std::string::npos);
    EXPECT_NE(ErrorOf([&] { IndexedWriter second(folder / "x", 10); }).find("another process"), std::string::npos);
  }
  EXPECT_EQ(AllTokens(IndexedDataset(folder / "x")), std::vector<int64_t>{9});
  EXPECT_EQ(ListFolder(folder.path()), (std::vector<std::string>{"x.bin", "x.idx"}));
}

// Set k has k + 1 documents of one token k: parts of two sets cannot pass for one.
void WriteSet(const std::string& prefix, int32_t k) {
  IndexedWriter writer(prefix, 1000);
  for (int32_t i = 0; i <= k; ++i) writer.AddDocument({k});
  writer.Finish();
}

// The set that is there, or -1 if there is plainly none.
int64_t SetThere(const std::string& prefix) {
  if (!std::filesystem::exists(prefix + ".idx")) return -1;
  const IndexedDataset data(prefix);
  const int64_t k = data.num_tokens() - 1;
  EXPECT_EQ(AllTokens(data), std::vector<int64_t>(static_cast<size_t>(k) + 1, k));
  EXPECT_EQ(data.num_documents(), k + 1);
  return k;
}

TEST(IndexedWriter, KillAtEverySystemCallLeavesNoMixedPair) {
  TemporaryFolder folder(FastFolder());
  bool old_seen = false, none_seen = false, new_seen = false;
  Ended ended = Ended::kKilled;
  for (int n = 0; ended == Ended::kKilled; ++n) {
    WriteSet(folder / "x", 3);
    ended = KillAtSystemCall([&] { WriteSet(folder / "x", 5); }, n);
    if (ended == Ended::kNotPermitted) GTEST_SKIP() << "ptrace is not permitted";
    ASSERT_LT(n, 1000);
    const int64_t k = SetThere(folder / "x");
    ASSERT_TRUE(k == -1 || k == 3 || k == 5) << k;
    (k == -1 ? none_seen : k == 3 ? old_seen : new_seen) = true;
  }
  EXPECT_EQ(ended, Ended::kByItself);
  EXPECT_TRUE(old_seen && none_seen && new_seen);
}

}  // namespace
}  // namespace disagmoe
