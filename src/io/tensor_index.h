// model.safetensors.index.json: which file of a folder holds which tensor. Private to this folder.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace disagmoe {

constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";

struct TensorIndex {
  std::map<std::string, std::string> file_of;
  std::optional<double> total_size;  // some writers give a fraction
};

// Throws Error for anything but {"metadata": {...}, "weight_map": {name: "file in the same folder", ...}}; of the metadata
// total_size alone is looked at. `path` is for the message.
TensorIndex ParseTensorIndex(const std::string& path, const std::string& text);
// As transformers writes it.
std::string TensorIndexText(const std::map<std::string, std::string>& file_of, int64_t total_parameters,
                            uint64_t total_size);

}  // namespace disagmoe
