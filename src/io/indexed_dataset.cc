#include "io/dataset.h"

#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <limits>
#include <tuple>

#include "base/error.h"
#include "io/file.h"

namespace disagmoe {
namespace {

static_assert(std::endian::native == std::endian::little, "the formats are little-endian and are mapped as they are");

constexpr char kMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
constexpr size_t kHeaderBytes = 34;  // magic 9, version 8, dtype 1, sequences 8, documents 8
constexpr int64_t kMaxDocument = std::numeric_limits<int32_t>::max();
constexpr int64_t kSmallVocab = 65500;  // Megatron's limit for u16

struct Dtype {
  const char* name;
  int64_t bytes;
};

// By Megatron's code.
constexpr Dtype kDtypes[] = {{nullptr, 0}, {"u8", 1}, {"i8", 1}, {"i16", 2},    {"i32", 4},
                             {"i64", 8},   {"f64", 8}, {"f32", 4}, {"u16", 2}};
constexpr int kF64 = 6, kF32 = 7;
constexpr double kWhole = 9007199254740992;  // 2^53: up to here a double holds every whole number

// Nothing in an index is aligned: its header has 34 bytes.
template <typename T>
T Load(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

// Calls f(typed pointer) for the dtype.
template <typename F>
void WithType(int code, const uint8_t* p, F f) {
  switch (code) {
    case 1: return f(p);
    case 2: return f(reinterpret_cast<const int8_t*>(p));
    case 3: return f(reinterpret_cast<const int16_t*>(p));
    case 4: return f(reinterpret_cast<const int32_t*>(p));
    case 5: return f(reinterpret_cast<const int64_t*>(p));
    case kF64: return f(reinterpret_cast<const double*>(p));
    case kF32: return f(reinterpret_cast<const float*>(p));
    case 8: return f(reinterpret_cast<const uint16_t*>(p));
  }
  DM_CHECK(false, "dtype code");
}

}  // namespace

struct IndexedDataset::Impl {
  explicit Impl(const std::string& prefix) : idx(prefix + ".idx"), bin(prefix + ".bin") {
    ReadHeader();
    CheckDocuments();
    CheckModes();
    CheckSequences();
    if (code == kF64 || code == kF32) CheckWhole();
    FindEmptyDocuments();
  }

  int64_t length(int64_t i) const { return Load<int32_t>(lengths + 4 * i); }
  int64_t pointer(int64_t i) const { return Load<int64_t>(pointers + 8 * i); }
  int64_t document(int64_t i) const { return Load<int64_t>(documents + 8 * i); }
  // First token of sequence i, or the end of all.
  int64_t start(int64_t i) const {
    return i == num_sequences ? num_tokens : starts.empty() ? pointer(i) / size : starts[static_cast<size_t>(i)];
  }
  // First tokens of the documents that are not empty, ascending.
  int64_t num_begins() const { return has_empty ? static_cast<int64_t>(begins.size()) : num_documents; }
  int64_t begin(int64_t k) const { return has_empty ? begins[static_cast<size_t>(k)] : start(document(k)); }
  int64_t BeginsBefore(int64_t token) const;

  void ReadHeader();
  void CheckDocuments() const;
  void CheckModes() const;
  void CheckSequences();
  void CheckWhole() const;
  void FindEmptyDocuments();
  Error Bad(const std::string& what, const std::string& got, const std::string& expected) const {
    return Error({what, idx.path(), got, expected, {}});
  }
  // Calls f(first byte, tokens) for the stretches of the data file that hold tokens [begin, begin + count).
  template <typename F>
  void ForStretches(int64_t begin, int64_t count, F f) const;

  MappedFile idx, bin;
  int code = 0;
  int64_t size = 0;  // of a token, in bytes
  int64_t num_sequences = 0, num_documents = 0, num_tokens = 0;
  const uint8_t *lengths = nullptr, *pointers = nullptr, *documents = nullptr, *modes = nullptr;  // modes: null without
  // First token of every sequence; empty if the sequences follow one another in the data file, as Megatron writes them.
  std::vector<int64_t> starts;
  bool has_empty = false;
  std::vector<int64_t> begins;  // only then
};

void IndexedDataset::Impl::ReadHeader() {
  const uint8_t* p = idx.data();
  const uint64_t bytes = idx.size();
  if (bytes < kHeaderBytes) {
    throw Bad("not a Megatron index", std::to_string(bytes) + " bytes", "at least " + std::to_string(kHeaderBytes));
  }
  if (std::memcmp(p, kMagic, sizeof(kMagic)) != 0) {
    throw Error({"not a Megatron index", idx.path(), "other first bytes", "MMIDIDX and two zeros",
                 "give the prefix of a .bin/.idx pair made by Megatron's preprocess_data or `disagmoe data`"});
  }
  if (const uint64_t version = Load<uint64_t>(p + 9); version != 1) {
    throw Bad("unknown version of the index", std::to_string(version), "1");
  }
  code = p[17];
  if (code >= static_cast<int>(std::size(kDtypes)) || kDtypes[code].bytes == 0) {
    throw Bad("unknown dtype of the tokens", "code " + std::to_string(code),
              "1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32 or 8 u16");
  }
  size = kDtypes[code].bytes;
  const uint64_t sequences = Load<uint64_t>(p + 18), entries = Load<uint64_t>(p + 26);
  const uint64_t rest = bytes - kHeaderBytes;
  // Dividing first keeps the sums below from overflowing.
  const bool possible = sequences <= rest / 12 && entries <= rest / 8;
  const uint64_t expected = possible ? 12 * sequences + 8 * entries : 0;
  if (!possible || (rest != expected && rest != expected + sequences)) {
    throw Bad("the index has the wrong size for its " + std::to_string(sequences) + " sequences and " +
                  std::to_string(entries) + " document entries",
              std::to_string(bytes) + " bytes",
              possible ? std::to_string(kHeaderBytes + expected) + ", or " +
                             std::to_string(kHeaderBytes + expected + sequences) + " with modes"
                       : "more");
  }
  if (entries == 0) throw Bad("the index has no document entries", "0", "at least the leading 0");
  num_sequences = static_cast<int64_t>(sequences);
  num_documents = static_cast<int64_t>(entries) - 1;
  lengths = p + kHeaderBytes;
  pointers = lengths + 4 * sequences;
  documents = pointers + 8 * sequences;
  if (rest != expected) modes = documents + 8 * entries;
}

void IndexedDataset::Impl::CheckDocuments() const {
  int64_t previous = 0;
  for (int64_t i = 0; i <= num_documents; ++i) {
    const int64_t entry = document(i);
    const bool last = i == num_documents;
    if (entry < previous || entry > num_sequences || (i == 0 && entry != 0) || (last && entry != num_sequences)) {
      const std::string expected = i == 0 && !last ? "0"
                                   : last          ? std::to_string(num_sequences) + ", the number of sequences"
                                                   : std::to_string(previous) + " to " + std::to_string(num_sequences);
      throw Bad("document entry " + std::to_string(i) + " is wrong", std::to_string(entry), expected);
    }
    previous = entry;
  }
}

// Of multimodal data: what is no text is no sequence of tokens.
void IndexedDataset::Impl::CheckModes() const {
  if (modes == nullptr) return;
  const uint8_t* other = std::find_if(modes, modes + num_sequences, [](uint8_t mode) { return mode != 0; });
  if (other == modes + num_sequences) return;
  throw Error({"sequence " + std::to_string(other - modes) + " is no text", idx.path(),
               "mode " + std::to_string(static_cast<int8_t>(*other)), "0 for all",
               "this is multimodal data; write its text to a pair of its own"});
}

void IndexedDataset::Impl::CheckSequences() {
  const int64_t bytes = static_cast<int64_t>(bin.size());
  bool in_a_row = true;
  for (int64_t i = 0; i < num_sequences; ++i) {
    const int64_t n = length(i), at = pointer(i);
    if (n < 0) throw Bad("sequence " + std::to_string(i) + " has a wrong length", std::to_string(n), "0 or more");
    if (at < 0 || at % size != 0 || at > bytes || n > (bytes - at) / size) {
      throw Error({"sequence " + std::to_string(i) + " lies outside the data file or unaligned", idx.path(),
                   std::to_string(n) + " tokens at byte " + std::to_string(at),
                   "a multiple of " + std::to_string(size) + " within the " + std::to_string(bytes) + " bytes of " +
                       bin.path(),
                   "the .bin file may be cut short or belong to another index"});
    }
    in_a_row = in_a_row && at == num_tokens * size;
    num_tokens += n;
  }
  if (in_a_row) {
    if (num_tokens * size != bytes) {
      throw Error({"the data file has the wrong size for its index", bin.path(), std::to_string(bytes) + " bytes",
                   std::to_string(num_tokens * size) + " (" + std::to_string(num_tokens) + " tokens of " +
                       std::to_string(size) + ")",
                   {}});
    }
    return;
  }
  starts.reserve(static_cast<size_t>(num_sequences));
  int64_t start = 0;
  for (int64_t i = 0; i < num_sequences; ++i) {
    starts.push_back(start);
    start += length(i);
  }
}

void IndexedDataset::Impl::CheckWhole() const {
  int64_t at = 0;
  ForStretches(0, num_tokens, [&](const uint8_t* p, int64_t n) {
    WithType(code, p, [&](const auto* tokens) {
      for (int64_t i = 0; i < n; ++i, ++at) {
        const double token = static_cast<double>(tokens[i]);
        if (token >= -kWhole && token <= kWhole && token == std::floor(token)) continue;
        char got[64];
        std::snprintf(got, sizeof got, "%.17g, token %lld", token, static_cast<long long>(at));
        throw Error({"a token is no whole number", bin.path(), got, "whole numbers, up to 2^53", {}});
      }
    });
  });
}

void IndexedDataset::Impl::FindEmptyDocuments() {
  for (int64_t i = 0; i < num_documents && !has_empty; ++i) has_empty = start(document(i)) == start(document(i + 1));
  if (!has_empty) return;
  for (int64_t i = 0; i < num_documents; ++i) {
    if (start(document(i)) < start(document(i + 1))) begins.push_back(start(document(i)));
  }
}

// How many documents that are not empty begin before this token.
int64_t IndexedDataset::Impl::BeginsBefore(int64_t token) const {
  int64_t low = 0, high = num_begins();
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (begin(middle) < token) low = middle + 1;
    else high = middle;
  }
  return low;
}

template <typename F>
void IndexedDataset::Impl::ForStretches(int64_t begin, int64_t count, F f) const {
  if (starts.empty()) {
    if (count > 0) f(bin.data() + begin * size, count);
    return;
  }
  int64_t i = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
  for (; count > 0; ++i) {
    const int64_t skip = begin - starts[static_cast<size_t>(i)];
    const int64_t n = std::min(count, length(i) - skip);
    if (n > 0) f(bin.data() + pointer(i) + skip * size, n);
    begin += n;
    count -= n;
  }
}

IndexedDataset::IndexedDataset(const std::string& prefix) : impl_(std::make_unique<Impl>(prefix)) {}
IndexedDataset::~IndexedDataset() = default;
IndexedDataset::IndexedDataset(IndexedDataset&&) noexcept = default;
int64_t IndexedDataset::num_sequences() const { return impl_->num_sequences; }
int64_t IndexedDataset::num_documents() const { return impl_->num_documents; }
int64_t IndexedDataset::num_tokens() const { return impl_->num_tokens; }
const char* IndexedDataset::dtype() const { return kDtypes[impl_->code].name; }
int64_t IndexedDataset::bin_bytes() const { return static_cast<int64_t>(impl_->bin.size()); }
int64_t IndexedDataset::idx_bytes() const { return static_cast<int64_t>(impl_->idx.size()); }

int64_t IndexedDataset::sequence_length(int64_t i) const {
  DM_CHECK(i >= 0 && i < impl_->num_sequences, "sequence " + std::to_string(i));
  return impl_->length(i);
}

int64_t IndexedDataset::document_begin(int64_t i) const {
  DM_CHECK(i >= 0 && i < impl_->num_documents, "document " + std::to_string(i));
  return impl_->start(impl_->document(i));
}

int64_t IndexedDataset::CountBegins(int64_t begin, int64_t end) const {
  return std::max<int64_t>(0, impl_->BeginsBefore(end) - impl_->BeginsBefore(begin));
}

std::vector<int64_t> IndexedDataset::BeginsIn(int64_t begin, int64_t end) const {
  std::vector<int64_t> out;
  for (int64_t k = impl_->BeginsBefore(begin); k < impl_->num_begins() && impl_->begin(k) < end; ++k) {
    out.push_back(impl_->begin(k));
  }
  return out;
}

void IndexedDataset::Read(int64_t begin, int64_t count, int64_t* out) const {
  DM_CHECK(begin >= 0 && count >= 0 && begin <= impl_->num_tokens && count <= impl_->num_tokens - begin,
           "tokens " + std::to_string(begin) + " + " + std::to_string(count) + " of " + std::to_string(impl_->num_tokens));
  impl_->ForStretches(begin, count, [&](const uint8_t* p, int64_t n) {
    WithType(impl_->code, p, [&](const auto* tokens) { out = std::copy(tokens, tokens + n, out); });
  });
}

std::pair<int64_t, int64_t> IndexedDataset::TokenRange() const {
  if (impl_->num_tokens == 0) return {0, -1};
  int64_t low = std::numeric_limits<int64_t>::max(), high = std::numeric_limits<int64_t>::min();
  impl_->ForStretches(0, impl_->num_tokens, [&](const uint8_t* p, int64_t n) {
    WithType(impl_->code, p, [&](const auto* tokens) {
      auto a = tokens[0], b = tokens[0];  // in the token's own type: the compiler makes vectors of it
      for (int64_t i = 1; i < n; ++i) {
        a = std::min(a, tokens[i]);
        b = std::max(b, tokens[i]);
      }
      low = std::min<int64_t>(low, a);
      high = std::max<int64_t>(high, b);
    });
  });
  return {low, high};
}

InspectReport Inspect(const std::string& prefix) {
  const IndexedDataset data(prefix);
  InspectReport report;
  report.sequences = data.num_sequences();
  report.documents = data.num_documents();
  report.tokens = data.num_tokens();
  report.dtype = data.dtype();
  std::tie(report.min_token, report.max_token) = data.TokenRange();
  report.bin_bytes = data.bin_bytes();
  report.idx_bytes = data.idx_bytes();
  return report;
}

struct IndexedWriter::Impl {
  Impl(const std::string& prefix, int64_t vocab_size)
      : vocab(vocab_size), small(vocab_size < kSmallVocab), bin(prefix + ".bin"), idx(prefix + ".idx") {}

  void Flush() {
    bin.Write(buffer.data(), buffer.size());
    buffer.clear();
  }

  int64_t vocab;
  bool small;
  AtomicFile bin, idx;
  std::vector<char> buffer;
  int64_t in_document = 0;
  std::vector<int32_t> lengths;
};

IndexedWriter::IndexedWriter(const std::string& prefix, int64_t vocab_size) {
  if (vocab_size < 1 || vocab_size > kMaxDocument) {
    throw Error({"vocabulary size out of range", prefix, std::to_string(vocab_size), "1 to 2147483647", {}});
  }
  std::error_code error;
  std::filesystem::create_directories(ParentFolder(prefix), error);
  if (error) throw Error({"cannot create the folder", ParentFolder(prefix), error.message(), {}, {}});
  impl_ = std::make_unique<Impl>(prefix, vocab_size);
}

IndexedWriter::~IndexedWriter() = default;

void IndexedWriter::AddTokens(const int32_t* tokens, size_t count) {
  Impl& w = *impl_;
  if (static_cast<int64_t>(count) > kMaxDocument - w.in_document) {
    throw Error({"a document is too long for the format", w.bin.path(),
                 "document " + std::to_string(w.lengths.size()) + " with more than 2147483647 tokens", {},
                 "cut it into several documents"});
  }
  const size_t width = w.small ? 2 : 4;
  while (count > 0) {
    const size_t n = std::min(count, size_t{1} << 16), filled = w.buffer.size();
    w.buffer.resize(filled + n * width);
    char* out = w.buffer.data() + filled;
    for (size_t i = 0; i < n; ++i, out += width) {
      if (tokens[i] < 0 || tokens[i] >= w.vocab) {
        throw Error({"token outside the vocabulary", w.bin.path() + ", document " + std::to_string(w.lengths.size()),
                     std::to_string(tokens[i]), "0 to " + std::to_string(w.vocab - 1), {}});
      }
      std::memcpy(out, &tokens[i], width);  // little-endian: the first two bytes are the u16
    }
    if (w.buffer.size() >= (size_t{1} << 20)) w.Flush();
    w.in_document += static_cast<int64_t>(n);
    tokens += n;
    count -= n;
  }
}

void IndexedWriter::EndDocument() {
  impl_->lengths.push_back(static_cast<int32_t>(impl_->in_document));
  impl_->in_document = 0;
}

void IndexedWriter::AddDocument(const std::vector<int32_t>& tokens) {
  AddTokens(tokens.data(), tokens.size());
  EndDocument();
}

void IndexedWriter::Finish() {
  Impl& w = *impl_;
  DM_CHECK(w.in_document == 0, "Finish() inside a document");
  w.Flush();
  const uint64_t sequences = w.lengths.size();
  std::vector<int64_t> longs(sequences);
  int64_t at = 0;
  for (size_t i = 0; i < sequences; ++i) {
    longs[i] = at;
    at += int64_t{w.lengths[i]} * (w.small ? 2 : 4);
  }
  const uint64_t version = 1, entries = sequences + 1;
  const uint8_t code = w.small ? 8 : 4;
  w.idx.Write(kMagic, sizeof(kMagic));
  w.idx.Write(&version, 8);
  w.idx.Write(&code, 1);
  w.idx.Write(&sequences, 8);
  w.idx.Write(&entries, 8);
  w.idx.Write(w.lengths.data(), 4 * sequences);
  w.idx.Write(longs.data(), 8 * sequences);
  // One sequence a document: the entries are 0, 1, 2, ...
  const int64_t zero = 0;
  for (size_t i = 0; i < sequences; ++i) longs[i] = static_cast<int64_t>(i) + 1;
  w.idx.Write(&zero, 8);
  w.idx.Write(longs.data(), 8 * sequences);

  w.bin.Close();
  w.idx.Close();
  // Without its index an old pair is plainly incomplete; with it, old index and new data could pass for a pair.
  if (::unlink(w.idx.path().c_str()) != 0 && errno != ENOENT) {
    throw SystemError("cannot remove the old file", w.idx.path(), errno);
  }
  w.bin.Publish();
  w.idx.Publish();
}

}  // namespace disagmoe
