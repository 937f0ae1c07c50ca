// The format: https://huggingface.co/docs/safetensors (facts in docs/formats.md).
#include <algorithm>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/file.h"
#include "io/safetensors.h"

namespace disagmoe {
namespace {

constexpr uint64_t kMaxHeader = 100 * 1000 * 1000;  // the reference implementation's limit
constexpr char kMetadataKey[] = "__metadata__";

struct Dtype {
  const char* name;
  uint64_t bits;
};

constexpr Dtype kDtypes[] = {
    {"BOOL", 8},        {"U8", 8},   {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16}, {"U16", 16}, {"F16", 16},    {"BF16", 16},   {"I32", 32},    {"U32", 32},
    {"F32", 32},        {"F64", 64}, {"I64", 64}, {"U64", 64},    {"C64", 64},    {"F4", 4},      {"F6_E2M3", 6},
    {"F6_E3M2", 6}};

const Dtype* FindDtype(const std::string& name) {
  for (const Dtype& dtype : kDtypes) {
    if (name == dtype.name) return &dtype;
  }
  return nullptr;
}

// False if the size does not fit in 63 bits or is no whole number of bytes.
bool ArrayBytes(const std::vector<int64_t>& shape, uint64_t bits, uint64_t* bytes) {
  uint64_t total = bits;
  for (int64_t d : shape) {
    if (d < 0 || __builtin_mul_overflow(total, static_cast<uint64_t>(d), &total)) return false;
  }
  *bytes = total / 8;
  return total % 8 == 0;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size() && i < 8; ++i) {
    if (i) text += ",";
    text += std::to_string(shape[i]);
  }
  return text + (shape.size() > 8 ? ",...]" : "]");
}

// Names come from files: cut them and keep control characters away from terminals.
std::string Shown(const std::string& text) {
  std::string out = "\"";
  for (unsigned char c : text.substr(0, 80)) out += c < ' ' || c == 0x7f ? '?' : static_cast<char>(c);
  return out + (text.size() > 80 ? "...\"" : "\"");
}

struct HeaderEntry {
  std::string name, dtype;
  std::vector<int64_t> shape;
  std::vector<uint64_t> offsets;
};

// Takes the header event by event: a tree would hide duplicate names, and could grow far beyond the text.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::vector<HeaderEntry> entries;
  std::map<std::string, std::string> metadata;
  std::string problem;

  bool start_object(size_t) override {
    if (state_ == kStart) return To(kTop);
    if (state_ == kTop && !key_.empty_key) return To(key_.text == kMetadataKey ? kMetadata : NewEntry());
    return Fail("an object in the wrong place");
  }

  bool end_object() override {
    if (state_ == kTop) return To(kEnd);
    if (state_ == kEntry && seen_ != (kDtype | kShape | kOffsets)) {
      return Fail(Shown(entries.back().name) + " lacks dtype, shape or data_offsets");
    }
    return To(kTop);
  }

  bool key(std::string& text) override {
    key_ = {text, false};
    if (state_ == kTop) {
      if (text == kMetadataKey) return !std::exchange(metadata_seen_, true) || Fail("__metadata__ stands twice");
      return true;
    }
    if (state_ == kMetadata) return metadata.count(text) == 0 || Fail("metadata key " + Shown(text) + " stands twice");
    const int part = text == "dtype" ? kDtype : text == "shape" ? kShape : text == "data_offsets" ? kOffsets : 0;
    if (part == 0) return Fail("unknown key " + Shown(text) + " in " + Shown(entries.back().name));
    if (seen_ & part) return Fail("key " + Shown(text) + " stands twice in " + Shown(entries.back().name));
    seen_ |= part;
    part_ = part;
    return true;
  }

  bool string(std::string& text) override {
    if (state_ == kMetadata) return metadata.emplace(key_.text, text).second;
    if (state_ != kEntry || part_ != kDtype) return Fail("a string in the wrong place");
    entries.back().dtype = text;
    part_ = 0;
    return true;
  }

  bool start_array(size_t) override {
    if (state_ != kEntry || (part_ != kShape && part_ != kOffsets)) return Fail("a list in the wrong place");
    return To(part_ == kShape ? kInShape : kInOffsets);
  }

  bool end_array() override {
    part_ = 0;
    return To(kEntry);
  }

  bool number_unsigned(uint64_t value) override {
    if (state_ == kInShape && value <= uint64_t{std::numeric_limits<int64_t>::max()}) {
      entries.back().shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (state_ == kInOffsets && entries.back().offsets.size() < 2) {
      entries.back().offsets.push_back(value);
      return true;
    }
    return Fail("the number " + std::to_string(value) + " in the wrong place or too large");
  }

  bool number_integer(int64_t value) override { return Fail("the negative number " + std::to_string(value)); }
  bool number_float(double, const std::string& text) override { return Fail("the number " + Shown(text)); }
  bool null() override { return Fail("a null"); }
  bool boolean(bool) override { return Fail("a boolean"); }
  bool binary(nlohmann::json::binary_t&) override { return Fail("binary data"); }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    return Fail("no JSON at byte " + std::to_string(8 + position));
  }

 private:
  enum State { kStart, kTop, kMetadata, kEntry, kInShape, kInOffsets, kEnd };
  enum Part { kDtype = 1, kShape = 2, kOffsets = 4 };
  struct Key {
    std::string text;
    bool empty_key = true;
  };

  bool To(State state) {
    state_ = state;
    return true;
  }
  bool Fail(const std::string& text) {
    if (problem.empty()) problem = text;
    return false;
  }
  State NewEntry() {
    entries.push_back({key_.text, {}, {}, {}});
    seen_ = part_ = 0;
    return kEntry;
  }

  State state_ = kStart;
  Key key_;
  int seen_ = 0, part_ = 0;
  bool metadata_seen_ = false;
};

Error BadHeader(const std::string& path, const std::string& got, const std::string& expected) {
  return Error({"damaged safetensors file", path, got, expected, {}});
}

HeaderReader ParseHeader(const MappedFile& file, uint64_t header_bytes) {
  const char* text = reinterpret_cast<const char*>(file.data()) + 8;
  if (text[0] != '{') throw BadHeader(file.path(), "a header that does not begin with {", "a JSON object");
  HeaderReader reader;
  if (!nlohmann::json::sax_parse(text, text + header_bytes, &reader)) {
    throw BadHeader(file.path(), reader.problem, "{name: {dtype, shape, data_offsets}, ...}");
  }
  std::sort(reader.entries.begin(), reader.entries.end(), [](const HeaderEntry& a, const HeaderEntry& b) {
    return a.offsets != b.offsets ? a.offsets < b.offsets : a.name < b.name;
  });
  return reader;
}

// Everything that the header says of one array whose data must begin at `begin`; returns the end of its data.
uint64_t CheckEntry(const std::string& path, const HeaderEntry& e, uint64_t begin, uint64_t data_bytes) {
  const Dtype* dtype = FindDtype(e.dtype);
  if (!dtype) throw BadHeader(path, Shown(e.name) + " with the unknown dtype " + Shown(e.dtype), "F32, BF16, I64, U8, ...");
  if (e.offsets.size() != 2) {
    throw BadHeader(path, Shown(e.name) + " with " + std::to_string(e.offsets.size()) + " data_offsets", "2");
  }
  if (e.offsets[0] != begin) {
    throw BadHeader(path, Shown(e.name) + " at byte " + std::to_string(e.offsets[0]) + " of the data",
                    std::to_string(begin) + ": no holes and no overlaps");
  }
  if (e.offsets[1] < begin || e.offsets[1] > data_bytes) {
    throw BadHeader(path, Shown(e.name) + " ending at byte " + std::to_string(e.offsets[1]) + " of the data",
                    std::to_string(begin) + " to " + std::to_string(data_bytes));
  }
  uint64_t bytes = 0;
  const bool fits = ArrayBytes(e.shape, dtype->bits, &bytes);
  if (!fits || bytes != e.offsets[1] - begin) {
    throw BadHeader(path, Shown(e.name) + " with " + std::to_string(e.offsets[1] - begin) + " bytes",
                    (fits ? std::to_string(bytes) + " bytes" : std::string("a size that fits in memory")) + " for " +
                        e.dtype + " " + ShapeText(e.shape));
  }
  return e.offsets[1];
}

std::vector<const NamedArray*> Ordered(const std::vector<NamedArray>& arrays) {
  std::vector<std::pair<uint64_t, const NamedArray*>> keyed;
  for (const NamedArray& a : arrays) {
    const Dtype* dtype = FindDtype(a.dtype);
    uint64_t bytes = 0;
    DM_CHECK(dtype && ArrayBytes(a.shape, dtype->bits, &bytes) && bytes == a.bytes,
             a.name + ": " + std::to_string(a.bytes) + " bytes for " + a.dtype + " " + ShapeText(a.shape));
    DM_CHECK(a.name != kMetadataKey, "a reserved name");
    keyed.push_back({dtype->bits, &a});
  }
  std::sort(keyed.begin(), keyed.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second->name < b.second->name;
  });
  std::vector<const NamedArray*> ordered;
  for (const auto& [bits, array] : keyed) ordered.push_back(array);
  return ordered;
}

// Length, JSON and padding.
std::string MakeHeader(const std::vector<const NamedArray*>& arrays, const std::map<std::string, std::string>& metadata) {
  std::map<std::string, int> names;
  std::string text = "{";
  if (!metadata.empty()) text += "\"__metadata__\":" + nlohmann::json(metadata).dump() + (arrays.empty() ? "" : ",");
  uint64_t at = 0;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const NamedArray& a = *arrays[i];
    DM_CHECK(++names[a.name] == 1, "two arrays named " + a.name);
    // Written by hand: an ordered tree looks every name up from its beginning.
    if (i) text += ",";
    text += nlohmann::json(a.name).dump() + ":{\"dtype\":\"" + a.dtype + "\",\"shape\":" +
            nlohmann::json(a.shape).dump() + ",\"data_offsets\":[" + std::to_string(at) + "," +
            std::to_string(at + a.bytes) + "]}";
    at += a.bytes;
  }
  text += "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  DM_CHECK(text.size() <= kMaxHeader, "a header of " + std::to_string(text.size()) + " bytes");
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + text;
}

}  // namespace

std::string WriteSafetensors(const std::string& path, const std::vector<NamedArray>& arrays,
                             const std::map<std::string, std::string>& metadata) {
  const std::vector<const NamedArray*> ordered = Ordered(arrays);
  const std::string header = MakeHeader(ordered, metadata);
  uint64_t total = header.size();
  for (const NamedArray* a : ordered) total += a->bytes;

  AtomicFile file(path);
  file.Reserve(total);
  Sha256 sha;
  sha.Update(header.data(), header.size());
  // Hash and copy into the page cache cost about the same: side by side. The pieces let a failed write stop the hash.
  const auto hash = [&](const std::stop_token& stop) {
    constexpr size_t kPiece = size_t{16} << 20;
    for (const NamedArray* a : ordered) {
      for (size_t at = 0; at < a->bytes && !stop.stop_requested(); at += kPiece) {
        sha.Update(static_cast<const char*>(a->data) + at, std::min(kPiece, a->bytes - at));
      }
    }
  };
  {
    const bool small = total < (1 << 20);
    if (small) hash({});
    std::jthread hashing(small ? std::jthread() : std::jthread(hash));  // stopped and joined if a write throws
    file.Write(header.data(), header.size());
    for (const NamedArray* a : ordered) file.Write(a->data, a->bytes);
    file.Close();
    if (hashing.joinable()) hashing.join();
  }
  file.Publish();
  return sha.Hex();
}

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(std::make_unique<MappedFile>(path)) {
  if (file_->size() < 8) throw BadHeader(path, std::to_string(file_->size()) + " bytes", "at least 8");
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file_->data(), 8);
  if (header_bytes < 2 || header_bytes > kMaxHeader || header_bytes > file_->size() - 8) {
    throw BadHeader(path, "a header of " + std::to_string(header_bytes) + " bytes in a file of " +
                              std::to_string(file_->size()),
                    "2 bytes to 100 MB, within the file");
  }
  HeaderReader header = ParseHeader(*file_, header_bytes);
  metadata_ = std::move(header.metadata);
  const uint8_t* data = file_->data() + 8 + header_bytes;
  const uint64_t data_bytes = file_->size() - 8 - header_bytes;
  uint64_t at = 0;
  for (HeaderEntry& e : header.entries) {
    const uint64_t end = CheckEntry(path, e, at, data_bytes);
    if (!by_name_.emplace(e.name, arrays_.size()).second) {
      throw BadHeader(path, "two arrays named " + Shown(e.name), "each name once");
    }
    arrays_.push_back({std::move(e.name), std::move(e.dtype), std::move(e.shape), data + at, end - at});
    at = end;
  }
  if (at != data_bytes) {
    throw BadHeader(path, std::to_string(data_bytes) + " bytes of data", std::to_string(at) + ", the end of the last array");
  }
}

SafetensorsFile::~SafetensorsFile() = default;

const NamedArray& SafetensorsFile::Find(const std::string& name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) {
    throw Error({"no array of this name", file_->path(), name, "one of the file's " + std::to_string(arrays_.size()) + " arrays", {}});
  }
  return arrays_[found->second];
}

}  // namespace disagmoe
