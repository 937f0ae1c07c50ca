#include "io/tensor_index.h"

#include <utility>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/safetensors_header.h"

namespace disagmoe {
namespace {

// Event by event: a tree would hide a name that stands twice.
class IndexReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  TensorIndex index;
  std::string problem;
  bool map_seen = false;

  bool start_object(size_t) override { return Open("an object"); }
  bool end_object() override { return Close(); }
  bool start_array(size_t) override { return depth_ == 0 ? Fail("a list") : Open("a list"); }
  bool end_array() override { return Close(); }

  bool key(std::string& text) override {
    if (depth_ == 1) {
      part_ = text == "weight_map" ? kMap : text == "metadata" ? kMetadata : kOther;
      if (part_ == kMap && std::exchange(map_seen, true)) return Fail("weight_map twice");
    } else if (depth_ == 2) {
      if (part_ == kMap && index.file_of.count(text)) return Fail(ShownName(text) + " twice");
      key_ = text;
    }
    return true;
  }

  bool string(std::string& text) override {
    if (part_ != kMap) return true;
    if (depth_ == 1) return Fail("a string as weight_map");
    const bool plain = !text.empty() && text[0] != '.' && text.find_first_of(std::string("/\\\0", 3)) == std::string::npos;
    if (!plain || !text.ends_with(".safetensors")) {
      return Fail("the file " + ShownName(text) + " for " + ShownName(key_) + ", which is no .safetensors file in the folder");
    }
    index.file_of.emplace(key_, text);
    return true;
  }

  bool number_unsigned(uint64_t value) override { return Number(static_cast<double>(value)); }
  bool number_integer(int64_t value) override { return Number(static_cast<double>(value)); }
  bool number_float(double value, const std::string&) override { return Number(value); }
  bool null() override { return part_ != kMap || Fail("null in weight_map"); }
  bool boolean(bool) override { return part_ != kMap || Fail("a boolean in weight_map"); }
  bool binary(nlohmann::json::binary_t&) override { return Fail("binary data"); }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    return Fail("no JSON at byte " + std::to_string(position));
  }

 private:
  enum Part { kOther, kMap, kMetadata };

  bool Open(const std::string& what) {
    if (part_ == kMap && depth_ >= 2) return Fail(what + " for " + ShownName(key_));
    if (part_ == kMap && what == "a list") return Fail("a list as weight_map");
    ++depth_;
    return true;
  }
  bool Close() {
    if (--depth_ == 1) part_ = kOther;
    return true;
  }
  bool Number(double value) {
    if (part_ == kMap) return Fail("a number in weight_map");
    if (part_ == kMetadata && depth_ == 2 && key_ == "total_size") index.total_size = value;
    return true;
  }
  bool Fail(const std::string& text) {
    if (problem.empty()) problem = text;
    return false;
  }

  int depth_ = 0;
  Part part_ = kOther;
  std::string key_;
};

}  // namespace

TensorIndex ParseTensorIndex(const std::string& path, const std::string& text) {
  RefuseLfsPointer(path, text);
  IndexReader reader;
  const bool parsed = nlohmann::json::sax_parse(text, &reader);
  if (parsed && (!reader.map_seen || reader.index.file_of.empty())) reader.problem = "no weight_map with tensors";
  if (!reader.problem.empty() || !parsed) {
    throw Error({"bad index of a sharded model", path, reader.problem, "{\"weight_map\": {tensor: file, ...}, ...}", {}});
  }
  return std::move(reader.index);
}

std::string TensorIndexText(const std::map<std::string, std::string>& file_of, int64_t total_parameters,
                            uint64_t total_size) {
  const nlohmann::json index = {{"metadata", {{"total_parameters", total_parameters}, {"total_size", total_size}}},
                                {"weight_map", file_of}};
  return index.dump(2, ' ', true) + "\n";
}

}  // namespace disagmoe
