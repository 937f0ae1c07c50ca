// Keys of a JSON object, each read or refused. Private to this folder.
#pragma once

#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "spec/config_keys.h"
#include "spec/presets.h"

namespace disagmoe {

using Json = nlohmann::json;

class JsonReader {
 public:
  JsonReader(Json object, std::string where) : object_(std::move(object)), where_(std::move(where)) {}

  std::string At(const std::string& key) const { return where_ + ", " + key; }
  // A key with null counts as missing.
  bool Has(const std::string& key) {
    used_.insert(key);
    return object_.contains(key) && !object_[key].is_null();
  }

  int64_t Int(const std::string& key, int64_t min, int64_t max) {
    if (!Has(key)) throw Error({"missing key", At(key), {}, Expected(min, max), {}});
    const Json& value = object_[key];
    if (!value.is_number_integer()) throw Error({"wrong type", At(key), value.dump(), Expected(min, max), {}});
    const bool big = value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(max);
    if (big || value.get<int64_t>() < min || value.get<int64_t>() > max) {
      throw Error({"value not allowed", At(key), value.dump(), Expected(min, max), {}});
    }
    return value.get<int64_t>();
  }
  int64_t IntOr(const std::string& key, int64_t otherwise, int64_t min, int64_t max) {
    return Has(key) ? Int(key, min, max) : otherwise;
  }

  double NumberOr(const std::string& key, double otherwise, double above) {
    if (!Has(key)) return otherwise;
    const Json& value = object_[key];
    if (!value.is_number()) throw Error({"wrong type", At(key), value.dump(), "a number", {}});
    const double number = value.get<double>();
    if (!std::isfinite(number) || number <= above) {
      throw Error({"value not allowed", At(key), value.dump(), "a number above " + TomlNumber(above), {}});
    }
    return number;
  }

  bool BoolOr(const std::string& key, bool otherwise) {
    if (!Has(key)) return otherwise;
    if (!object_[key].is_boolean()) throw Error({"wrong type", At(key), object_[key].dump(), "true or false", {}});
    return object_[key].get<bool>();
  }

  std::string String(const std::string& key, const std::string& expected) {
    if (!Has(key)) throw Error({"missing key", At(key), {}, expected, {}});
    if (!object_[key].is_string()) throw Error({"wrong type", At(key), object_[key].dump(), expected, {}});
    return object_[key].get<std::string>();
  }

  const Json& Object(const std::string& key) {
    if (!object_[key].is_object()) throw Error({"wrong type", At(key), object_[key].dump(), "an object {...}", {}});
    return object_[key];
  }

  // A switch of something that is not computed here.
  void RequireOff(const std::string& key) {
    if (!Has(key)) return;
    const Json& value = object_[key];
    const bool off = value.is_boolean() ? !value.get<bool>() : value.is_number() && value.get<double>() == 0;
    if (!off) throw Error({"not computed here", At(key), value.dump(), "0, false or null", {}});
  }

  const Json& Array(const std::string& key, const std::string& expected) {
    if (!object_[key].is_array()) throw Error({"wrong type", At(key), object_[key].dump(), expected, {}});
    return object_[key];
  }

  // Other names of a value: the one that is there, and all must agree.
  int64_t Alias(const std::vector<std::string>& keys, int64_t min, int64_t max) {
    std::optional<int64_t> value;
    std::string first;
    for (const std::string& key : keys) {
      if (!Has(key)) continue;
      const int64_t next = Int(key, min, max);
      if (value && next != *value) Contradiction(key, std::to_string(next), first + " = " + std::to_string(*value));
      if (!value) value = next, first = key;
    }
    return value ? *value : Int(keys.front(), min, max);
  }

  [[noreturn]] void Contradiction(const std::string& key, const std::string& got, const std::string& expected,
                                  const std::string& hint = "") const {
    throw Error({"contradiction", At(key), got, expected, hint});
  }

  // The first key that was neither read nor is known to be without effect.
  void RefuseUnknown(const std::set<std::string>& irrelevant = {}) const {
    for (const auto& [key, value] : object_.items()) {
      if (key.starts_with("_") || used_.contains(key) || irrelevant.contains(key)) continue;
      std::string nearest;
      int best = 1 + static_cast<int>(key.size()) / 4;
      for (const std::string& known : used_) {
        const int distance = EditDistance(key, known);
        if (distance <= best && distance < static_cast<int>(key.size())) best = distance - 1, nearest = known;
      }
      throw Error({"unknown key", At(key), value.dump().substr(0, 60), "a key that this family is known to have",
                   nearest.empty() ? "if it decides nothing, take it out or begin its name with '_'"
                                   : "did you mean '" + nearest + "'?"});
    }
  }

 private:
  static std::string Expected(int64_t min, int64_t max) {
    return "an integer from " + std::to_string(min) + " to " + std::to_string(max);
  }

  Json object_;
  std::string where_;
  std::set<std::string> used_;
};

}  // namespace disagmoe
