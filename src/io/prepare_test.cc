#include <sys/resource.h>
#include <zlib.h>

#include <thread>

#include "base/rng.h"
#include "io/dataset.h"
#include "io/prepare.h"
#include "io/test_util.h"

namespace disagmoe {
namespace {

using Documents = std::vector<std::string>;

// Text of every document, without its end token, which must be there.
Documents ReadDocuments(const std::string& prefix) {
  const IndexedDataset data(prefix);
  Documents documents;
  int64_t at = 0;
  for (int64_t i = 0; i < data.num_sequences(); ++i) {
    const int64_t n = data.sequence_length(i);
    std::vector<int64_t> tokens(static_cast<size_t>(n));
    data.Read(at, n, tokens.data());
    at += n;
    EXPECT_EQ(tokens.back(), kByteEod);
    const std::vector<int32_t> bytes(tokens.begin(), tokens.end() - 1);
    EXPECT_TRUE(std::all_of(bytes.begin(), bytes.end(), [](int32_t t) { return t < 256; }));
    documents.push_back(DecodeBytes(bytes));
  }
  return documents;
}

std::string Join(const Documents& documents) {
  std::string text;
  for (const std::string& d : documents) text += d;
  return text;
}

// A gzip member; with_extra adds the kind of header field that dictzip uses.
std::string Gzip(const std::string& text, bool with_extra = false) {
  z_stream z{};
  EXPECT_EQ(deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  Bytef extra[] = {'R', 'A', 8, 0, 1, 0, 203, 227, 1, 0, 9, 9};
  gz_header header{};
  header.extra = extra;
  header.extra_len = sizeof(extra);
  if (with_extra) deflateSetHeader(&z, &header);
  std::string out(deflateBound(&z, text.size()) + 64, '\0');
  z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  z.avail_in = static_cast<uInt>(text.size());
  z.next_out = reinterpret_cast<Bytef*>(out.data());
  z.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&z, Z_FINISH), Z_STREAM_END);
  out.resize(z.total_out);
  deflateEnd(&z);
  return out;
}

PrepareStats Prepare(const std::vector<std::string>& inputs, const std::string& prefix, int64_t document_bytes = 0,
                     const std::string& key = "text", int workers = 2) {
  return Prepare(inputs, *LoadTokenizer("bytes"), prefix, {key, document_bytes, workers, {}});
}

TEST(Prepare, OneDocumentAFile) {
  TemporaryFolder folder;
  const std::string binary("\x00\xff\xfe\n\n\r\n tail", 13);
  WriteAll(folder / "a.txt", "one\n\ntwo\n");
  WriteAll(folder / "empty", "");
  WriteAll(folder / "b", binary);
  const PrepareStats stats = Prepare({folder / "a.txt", folder / "empty", folder / "b"}, folder / "x");
  EXPECT_EQ(ReadDocuments(folder / "x"), (Documents{"one\n\ntwo\n", binary}));
  EXPECT_EQ(stats.documents, 2);
  EXPECT_EQ(stats.tokens, 9 + 1 + 13 + 1);
  EXPECT_EQ(stats.bytes_in, 9 + 13);
  EXPECT_EQ(Inspect(folder / "x").dtype, "u16");
}

TEST(Prepare, CutsAtTheFirstBlankLineAfterTheSize) {
  TemporaryFolder folder;
  // Three paragraphs of 8 bytes; blank lines of 1, 4 and 1 + 1 bytes.
  WriteAll(folder / "a", "aaa\nbbb\n\nccc\nddd\n \t\r\neee\nfff\n\n\nggg");
  const auto cut = [&](int64_t document_bytes) {
    Prepare({folder / "a"}, folder / "x", document_bytes);
    return ReadDocuments(folder / "x");
  };
  const Documents paragraphs = {"aaa\nbbb\n\n", "ccc\nddd\n \t\r\n", "eee\nfff\n\n", "\nggg"};
  EXPECT_EQ(cut(1), paragraphs);
  EXPECT_EQ(cut(8), paragraphs);
  // "eee" to the first of the two blank lines has 9 bytes.
  EXPECT_EQ(cut(9), (Documents{"aaa\nbbb\n\nccc\nddd\n \t\r\n", "eee\nfff\n\n\n", "ggg"}));
  EXPECT_EQ(cut(1000), (Documents{"aaa\nbbb\n\nccc\nddd\n \t\r\neee\nfff\n\n\nggg"}));
}

// A line that is cut by the end of a piece (1 MiB) is no blank line if only its tail is blank, and one if all of it is.
TEST(Prepare, BlankLinesAcrossPieces) {
  TemporaryFolder folder;
  const size_t piece = 1 << 20;
  const std::string tail = "0123456789\n" + std::string(piece - 11, 'x') + "  \nmore";
  const std::string across = std::string(piece - 3, 'x') + "\n    \nmore";
  WriteAll(folder / "a", tail);
  WriteAll(folder / "b", across);
  Prepare({folder / "a", folder / "b"}, folder / "x", 10);
  EXPECT_TRUE(ReadDocuments(folder / "x") == (Documents{tail, std::string(piece - 3, 'x') + "\n    \n", "more"}));
}

// The text is longer than the pieces in which it is read, so lines and documents lie across them.
TEST(Prepare, KeepsEveryByteOfLongText) {
  TemporaryFolder folder;
  Rng rng(4);
  std::string text;
  while (text.size() < 5000000) {
    for (uint64_t n = rng.Below(200); n > 0; --n) text += static_cast<char>(rng.Below(256));
    text += rng.Below(3) ? "\n" : "\n\n";
  }
  WriteAll(folder / "a", text);
  const PrepareStats stats = Prepare({folder / "a"}, folder / "x", 2000);
  const Documents documents = ReadDocuments(folder / "x");
  EXPECT_EQ(Join(documents), text);
  EXPECT_EQ(stats.documents, static_cast<int64_t>(documents.size()));
  EXPECT_EQ(stats.tokens, static_cast<int64_t>(text.size() + documents.size()));
  for (size_t i = 0; i + 1 < documents.size(); ++i) EXPECT_GE(documents[i].size(), 2000u);
  // Blank lines come every 300 bytes or so.
  EXPECT_GT(documents.size(), 5000000u / 4000);
}

TEST(Prepare, ReadsGzip) {
  TemporaryFolder folder;
  const std::string text = "first\n\n" + std::string(100000, 'z') + "\n\nlast";
  WriteAll(folder / "a.gz", Gzip(text));
  WriteAll(folder / "a.dict.dz", Gzip(text, true));
  WriteAll(folder / "two.gz", Gzip("one ") + Gzip("two"));
  WriteAll(folder / "unnamed", Gzip("plain name"));
  const PrepareStats stats =
      Prepare({folder / "a.gz", folder / "a.dict.dz", folder / "two.gz", folder / "unnamed"}, folder / "x");
  EXPECT_EQ(ReadDocuments(folder / "x"), (Documents{text, text, "one two", "plain name"}));
  EXPECT_EQ(stats.bytes_in, static_cast<int64_t>(2 * text.size() + 7 + 10));
}

TEST(Prepare, ReadsAnInstalledDictionary) {
  const std::string dictionary = "/usr/share/dictd/gcide.dict.dz";
  if (!std::filesystem::exists(dictionary)) GTEST_SKIP() << "dict-gcide is not installed";
  TemporaryFolder folder;
  const PrepareStats stats = Prepare({dictionary}, folder / "x", 2000);
  // gzip keeps the length of the text, modulo 2^32, in the last four bytes.
  const std::string file = ReadAll(dictionary);
  uint32_t length = 0;
  std::memcpy(&length, file.data() + file.size() - 4, 4);
  EXPECT_EQ(stats.bytes_in, length);
  EXPECT_EQ(Inspect(folder / "x").tokens, length + stats.documents);
}

TEST(Prepare, RefusesDamagedGzip) {
  TemporaryFolder folder;
  const std::string good = Gzip("some text, some text, some text");
  for (size_t n = 0; n < good.size(); ++n) {
    WriteAll(folder / "a.gz", good.substr(0, n));
    EXPECT_NE(ErrorOf([&] { Prepare({folder / "a.gz"}, folder / "x"); }).find("gzip"), std::string::npos) << n;
  }
  for (size_t back = 1; back <= 8; ++back) {  // checksum and length
    std::string bad = good;
    bad[bad.size() - back] ^= 1;
    WriteAll(folder / "a.gz", bad);
    EXPECT_NE(ErrorOf([&] { Prepare({folder / "a.gz"}, folder / "x"); }).find("damaged"), std::string::npos) << back;
  }
  EXPECT_EQ(ListFolder(folder.path()), std::vector<std::string>{"a.gz"});
}

TEST(Prepare, ReadsJsonl) {
  TemporaryFolder folder;
  WriteAll(folder / "a.jsonl", "{\"text\": \"h\\u00e9 \\n\", \"id\": 3}\n\n  \r\n{\"id\": [{}], \"text\": \"\"}\r\n{\"text\":\"end\"}");
  WriteAll(folder / "b.json.gz", Gzip("{\"body\": \"x\", \"text\": 5}\n{\"body\": \"y\"}\n"));
  const PrepareStats stats = Prepare({folder / "a.jsonl"}, folder / "x", 2);
  EXPECT_EQ(ReadDocuments(folder / "x"), (Documents{"h\xc3\xa9 \n", "end"}));
  EXPECT_EQ(stats.tokens, 5 + 1 + 3 + 1);
  Prepare({folder / "b.json.gz"}, folder / "y", 0, "body");
  EXPECT_EQ(ReadDocuments(folder / "y"), (Documents{"x", "y"}));
}

TEST(Prepare, NamesTheBadLine) {
  TemporaryFolder folder;
  const auto line = [&](const std::string& bad) {
    WriteAll(folder / "a.jsonl", "{\"text\": \"fine\"}\n\n" + bad + "\n{\"text\": \"fine\"}\n");
    return ErrorOf([&] { Prepare({folder / "a.jsonl"}, folder / "x"); });
  };
  EXPECT_EQ(line("{\"text\": \"good\"}"), "");
  std::filesystem::remove(folder / "x.idx");
  std::filesystem::remove(folder / "x.bin");
  const std::string deep(100000, '[');
  for (const std::string& bad : {std::string("{\"text\": \"x\""), std::string("plain"), std::string("[\"text\"]"),
                                 std::string("{\"text\": 5}"), std::string("{\"other\": \"x\"}"), std::string("null"),
                                 std::string("{\"text\": \"\xff\"}"), deep}) {
    const std::string error = line(bad);
    EXPECT_NE(error.find("a.jsonl:3)"), std::string::npos) << bad.substr(0, 30) << ": " << error;
    EXPECT_NE(error.find("expected an object with the string \"text\""), std::string::npos) << error;
    EXPECT_LT(error.size(), 500u);
  }
  EXPECT_NE(line("{\"other\": \"x\"}").find("got {\"other\": \"x\"}"), std::string::npos);
  EXPECT_EQ(ListFolder(folder.path()), std::vector<std::string>{"a.jsonl"});
}

TEST(Prepare, RefusesUnreadableInput) {
  TemporaryFolder folder;
  WriteAll(folder / "empty", "");
  EXPECT_NE(ErrorOf([&] { Prepare({folder / "absent"}, folder / "x"); }).find("absent): got No such file"), std::string::npos);
  EXPECT_NE(ErrorOf([&] { Prepare({folder.path()}, folder / "x"); }).find("got a folder"), std::string::npos);
  EXPECT_NE(ErrorOf([&] { Prepare({folder / "empty"}, folder / "x"); }).find("no text"), std::string::npos);
  EXPECT_NE(ErrorOf([&] { Prepare({folder / "empty"}, folder / "x", -1); }).find("document size"), std::string::npos);
  EXPECT_EQ(ListFolder(folder.path()), std::vector<std::string>{"empty"});
}

TEST(Prepare, ReportsProgressInBytesOfTheFiles) {
  TemporaryFolder folder;
  const std::string packed = Gzip(std::string(3000000, 'a'));
  WriteAll(folder / "a", std::string(3000000, 'a'));
  WriteAll(folder / "b.gz", packed);
  int64_t last_done = 0, last_total = 0, calls = 0;
  const auto note = [&](int64_t done, int64_t total) {
    EXPECT_GE(done, last_done);
    EXPECT_LE(done, total);
    last_done = done;
    last_total = total;
    ++calls;
  };
  Prepare({folder / "a", folder / "b.gz"}, *LoadTokenizer("bytes"), folder / "x", {"text", 0, 2, note});
  EXPECT_EQ(last_total, static_cast<int64_t>(3000000 + packed.size()));
  EXPECT_EQ(last_done, last_total);
  EXPECT_GE(calls, 4);
}

// Doubles every byte, and refuses text with a '!'. Slower for some documents than for others, to mix up the threads.
class Doubling : public Tokenizer {
 public:
  std::vector<int32_t> Encode(const std::string& text) const override {
    if (text.find('!') != std::string::npos) throw Error("refused " + text);
    std::this_thread::sleep_for(std::chrono::microseconds(text.size() % 3 * 50));
    std::vector<int32_t> tokens;
    for (unsigned char c : text) tokens.insert(tokens.end(), {c, c});
    return tokens;
  }
  std::string Decode(const std::vector<int32_t>&) const override { return ""; }
  int64_t vocab_size() const override { return 100000; }
  int32_t eod() const override { return 99999; }
};

TEST(Prepare, AnyNumberOfWorkersWritesTheSameFiles) {
  TemporaryFolder folder(FastFolder());
  Rng rng(7);
  std::string lines, text;
  int64_t documents = 0, bytes = 0;
  for (int i = 0; i < 1500; ++i) {
    const std::string words(rng.Below(1500), static_cast<char>('a' + rng.Below(26)));
    lines += "{\"text\": \"" + words + "\"}\n";
    text += words + "\n\n";
    documents += !words.empty();
    bytes += static_cast<int64_t>(words.size());
  }
  WriteAll(folder / "a.jsonl", lines);
  WriteAll(folder / "b.txt", text);
  const Doubling tokenizer;
  for (int workers : {1, 2, 5}) {
    const std::string name = folder / std::to_string(workers);
    const PrepareStats stats = Prepare({folder / "a.jsonl"}, tokenizer, name, {"text", 1, workers, {}});
    EXPECT_EQ(stats.documents, documents);
    EXPECT_EQ(stats.tokens, 2 * bytes + documents);
    EXPECT_EQ(stats.bytes_in, static_cast<int64_t>(lines.size()));
    EXPECT_EQ(ReadAll(name + ".bin"), ReadAll(folder / "1.bin"));
    EXPECT_EQ(ReadAll(name + ".idx"), ReadAll(folder / "1.idx"));
    EXPECT_EQ(Inspect(name).dtype, "i32");
    // The same documents, all in order.
    Prepare({folder / "b.txt", folder / "a.jsonl"}, tokenizer, name + "both", {"text", 1, workers, {}});
    EXPECT_EQ(ReadAll(name + "both.bin"), ReadAll(folder / "1both.bin"));
  }
}

TEST(Prepare, TheFirstFaultIsReportedWithAnyNumberOfWorkers) {
  TemporaryFolder folder;
  std::string lines;
  for (int i = 0; i < 5000; ++i) {
    lines += i % 1000 == 700 ? "{\"text\": \"bad " + std::to_string(i) + "!\"}\n" : "{\"text\": \"" + std::string(500, 'x') + "\"}\n";
  }
  WriteAll(folder / "a.jsonl", lines);
  WriteAll(folder / "b.gz", Gzip("text").substr(0, 12));  // read while batches of the first are still encoded
  for (int workers : {1, 2, 16}) {
    const auto prepare = [&](const std::vector<std::string>& files) {
      return ErrorOf([&] { Prepare(files, Doubling(), folder / "x", {"text", 0, workers, {}}); });
    };
    EXPECT_EQ(prepare({folder / "a.jsonl", folder / "b.gz"}), "refused bad 700!") << workers;
    EXPECT_NE(prepare({folder / "b.gz", folder / "a.jsonl"}).find("gzip"), std::string::npos);
  }
  EXPECT_EQ(ListFolder(folder.path()), (std::vector<std::string>{"a.jsonl", "b.gz"}));
}

// A tokenizer that is not by byte sees whole documents, however long.
TEST(Prepare, DocumentsAreEncodedWhole) {
  class Once : public Doubling {
   public:
    std::vector<int32_t> Encode(const std::string& text) const override { return {static_cast<int32_t>(text.size() % 99999)}; }
  };
  TemporaryFolder folder;
  WriteAll(folder / "a", std::string(3000001, 'a') + "\n\n" + std::string(5, 'b'));
  Prepare({folder / "a"}, Once(), folder / "x", {"text", 10, 2, {}});
  const IndexedDataset data(folder / "x");
  std::vector<int64_t> tokens(4);
  ASSERT_EQ(data.num_tokens(), 4);
  data.Read(0, 4, tokens.data());
  EXPECT_EQ(tokens, (std::vector<int64_t>{3000003 % 99999, 99999, 5, 99999}));
}

#ifndef __SANITIZE_ADDRESS__
TEST(Prepare, MemoryDoesNotGrowWithTheFile) {
  TemporaryFolder folder;
  const std::string member = Gzip(std::string(1 << 20, 'x'));
  std::string members;
  for (int i = 0; i < 48; ++i) members += member;
  WriteAll(folder / "a.gz", members);
  rusage before, after;
  getrusage(RUSAGE_SELF, &before);
  Prepare({folder / "a.gz"}, folder / "x", 1 << 30);
  getrusage(RUSAGE_SELF, &after);
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 16 << 10);  // KiB
}
#endif

}  // namespace
}  // namespace disagmoe
