#include "io/safetensors_header.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/file.h"

namespace disagmoe {
namespace {

constexpr uint64_t kMaxHeader = 100 * 1000 * 1000;  // the reference implementation's limit
constexpr char kMetadataKey[] = "__metadata__";

struct Dtype {
  const char* name;
  int bits;
};

// In the order in which Hugging Face's library sorts them, last first.
constexpr Dtype kDtypes[] = {
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6},     {"F6_E3M2", 6},     {"U8", 8},   {"I8", 8},   {"F8_E5M2", 8},
    {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16}, {"U16", 16}, {"F16", 16},
    {"BF16", 16},   {"I32", 32},    {"U32", 32},        {"F32", 32},        {"C64", 64}, {"F64", 64}, {"I64", 64},
    {"U64", 64}};

const Dtype* FindDtype(const std::string& name) {
  for (const Dtype& dtype : kDtypes) {
    if (name == dtype.name) return &dtype;
  }
  return nullptr;
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
      return Fail(ShownName(entries.back().name) + " lacks dtype, shape or data_offsets");
    }
    return To(kTop);
  }

  bool key(std::string& text) override {
    key_ = {text, false};
    if (state_ == kTop) {
      if (text == kMetadataKey) return !std::exchange(metadata_seen_, true) || Fail("__metadata__ stands twice");
      return true;
    }
    if (state_ == kMetadata) return metadata.count(text) == 0 || Fail("metadata key " + ShownName(text) + " stands twice");
    const int part = text == "dtype" ? kDtype : text == "shape" ? kShape : text == "data_offsets" ? kOffsets : 0;
    if (part == 0) return Fail("unknown key " + ShownName(text) + " in " + ShownName(entries.back().name));
    if (seen_ & part) return Fail("key " + ShownName(text) + " stands twice in " + ShownName(entries.back().name));
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
  bool number_float(double, const std::string& text) override { return Fail("the number " + ShownName(text)); }
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

// Everything that the header says of one array whose data must begin at `begin`; returns the end of its data.
uint64_t CheckEntry(const std::string& path, const HeaderEntry& e, uint64_t begin, uint64_t data_bytes) {
  const int bits = DtypeBits(e.dtype);
  if (bits == 0) throw BadHeader(path, ShownName(e.name) + " with the unknown dtype " + ShownName(e.dtype), "F32, BF16, I64, U8, ...");
  if (e.offsets.size() != 2) {
    throw BadHeader(path, ShownName(e.name) + " with " + std::to_string(e.offsets.size()) + " data_offsets", "2");
  }
  if (e.offsets[0] != begin) {
    throw BadHeader(path, ShownName(e.name) + " at byte " + std::to_string(e.offsets[0]) + " of the data",
                    std::to_string(begin) + ": no holes and no overlaps");
  }
  if (e.offsets[1] < begin || e.offsets[1] > data_bytes) {
    throw BadHeader(path, ShownName(e.name) + " ending at byte " + std::to_string(e.offsets[1]) + " of the data",
                    std::to_string(begin) + " to " + std::to_string(data_bytes));
  }
  uint64_t bytes = 0;
  const bool fits = ArrayBytes(e.shape, bits, &bytes);
  if (!fits || bytes != e.offsets[1] - begin) {
    throw BadHeader(path, ShownName(e.name) + " with " + std::to_string(e.offsets[1] - begin) + " bytes",
                    (fits ? std::to_string(bytes) + " bytes" : std::string("a size that fits in memory")) + " for " +
                        e.dtype + " " + ShapeText(e.shape));
  }
  return e.offsets[1];
}

}  // namespace

int DtypeBits(const std::string& dtype) {
  const Dtype* found = FindDtype(dtype);
  return found ? found->bits : 0;
}

bool ArrayBytes(const std::vector<int64_t>& shape, int bits, uint64_t* bytes) {
  uint64_t total = static_cast<uint64_t>(bits);
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

std::string ShownName(const std::string& text) {
  size_t length = std::min<size_t>(text.size(), 80);
  while (length > 0 && length < text.size() && (text[length] & 0xc0) == 0x80) --length;  // no half characters
  std::string out = "\"";
  for (unsigned char c : text.substr(0, length)) out += c < ' ' || c == 0x7f ? '?' : static_cast<char>(c);
  return out + (length < text.size() ? "...\"" : "\"");
}

void RefuseLfsPointer(const std::string& path, std::string_view beginning) {
  if (!beginning.starts_with("version https://git-lfs")) return;
  throw Error({"the file's data is not here", path, "a Git LFS pointer", {}, "run `git lfs pull` in its repository"});
}

uint64_t SafetensorsJsonBytes(const std::string& path, std::string_view beginning, uint64_t file_bytes) {
  RefuseLfsPointer(path, beginning);
  if (file_bytes < 8 || beginning.size() < 8) throw BadHeader(path, std::to_string(file_bytes) + " bytes", "at least 8");
  uint64_t json_bytes = 0;
  std::memcpy(&json_bytes, beginning.data(), 8);
  if (json_bytes < 2 || json_bytes > kMaxHeader || json_bytes > file_bytes - 8) {
    throw BadHeader(path, "a header of " + std::to_string(json_bytes) + " bytes in a file of " + std::to_string(file_bytes),
                    "2 bytes to 100 MB, within the file");
  }
  return json_bytes;
}

SafetensorsHeader ParseSafetensorsHeader(const std::string& path, std::string_view json, uint64_t file_bytes) {
  if (json.empty() || json[0] != '{') throw BadHeader(path, "a header that does not begin with {", "a JSON object");
  HeaderReader reader;
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &reader)) {
    throw BadHeader(path, reader.problem, "{name: {dtype, shape, data_offsets}, ...}");
  }
  std::sort(reader.entries.begin(), reader.entries.end(), [](const HeaderEntry& a, const HeaderEntry& b) {
    return a.offsets != b.offsets ? a.offsets < b.offsets : a.name < b.name;
  });
  SafetensorsHeader header{{}, std::move(reader.metadata)};
  std::set<std::string_view> names;
  const uint64_t data_begin = 8 + json.size(), data_bytes = file_bytes - data_begin;
  uint64_t at = 0;
  header.entries.reserve(reader.entries.size());  // the names that are viewed stay where they are
  for (HeaderEntry& e : reader.entries) {
    const uint64_t end = CheckEntry(path, e, at, data_bytes);
    header.entries.push_back({std::move(e.name), std::move(e.dtype), std::move(e.shape), data_begin + at, end - at});
    if (!names.insert(header.entries.back().name).second) {
      throw BadHeader(path, "two arrays named " + ShownName(header.entries.back().name), "each name once");
    }
    at = end;
  }
  if (at != data_bytes) {
    throw BadHeader(path, std::to_string(data_bytes) + " bytes of data", std::to_string(at) + ", the end of the last array");
  }
  return header;
}

SafetensorsHeader ReadSafetensorsHeader(const FileReader& file) {
  char beginning[32];
  const size_t n = std::min<uint64_t>(file.size(), sizeof(beginning));
  file.ReadAt(0, beginning, n);
  const uint64_t json_bytes = SafetensorsJsonBytes(file.path(), {beginning, n}, file.size());
  std::string json(json_bytes, '\0');
  file.ReadAt(8, json.data(), json_bytes);
  return ParseSafetensorsHeader(file.path(), json, file.size());
}

std::string MakeSafetensorsHeader(std::vector<SafetensorsEntry>* entries, const std::map<std::string, std::string>& metadata) {
  for (const SafetensorsEntry& e : *entries) {
    uint64_t bytes = 0;
    DM_CHECK(FindDtype(e.dtype) && ArrayBytes(e.shape, DtypeBits(e.dtype), &bytes) && bytes == e.bytes,
             e.name + ": " + std::to_string(e.bytes) + " bytes for " + e.dtype + " " + ShapeText(e.shape));
    DM_CHECK(e.name != kMetadataKey, "a reserved name");
  }
  std::sort(entries->begin(), entries->end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return a.dtype != b.dtype ? FindDtype(a.dtype) > FindDtype(b.dtype) : a.name < b.name;
  });
  std::set<std::string_view> names;
  std::string text = "{";
  if (!metadata.empty()) text += "\"__metadata__\":" + nlohmann::json(metadata).dump() + (entries->empty() ? "" : ",");
  uint64_t at = 0;
  for (SafetensorsEntry& e : *entries) {
    DM_CHECK(names.insert(e.name).second, "two arrays named " + e.name);
    // Written by hand: an ordered tree looks every name up from its beginning.
    if (names.size() > 1) text += ",";
    text += nlohmann::json(e.name).dump() + ":{\"dtype\":\"" + e.dtype + "\",\"shape\":" + nlohmann::json(e.shape).dump() +
            ",\"data_offsets\":[" + std::to_string(at) + "," + std::to_string(at + e.bytes) + "]}";
    e.begin = at;
    at += e.bytes;
  }
  text += "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  DM_CHECK(text.size() <= kMaxHeader, "a header of " + std::to_string(text.size()) + " bytes");
  const uint64_t length = text.size();
  for (SafetensorsEntry& e : *entries) e.begin += 8 + length;
  return std::string(reinterpret_cast<const char*>(&length), 8) + text;
}

}  // namespace disagmoe
