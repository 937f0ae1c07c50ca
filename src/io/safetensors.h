// One safetensors file: read memory-mapped, written atomically from arrays in memory. Folders of them, values in other
// dtypes, and tensors larger than memory: io/tensor_folder.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace disagmoe {

class MappedFile;

// A named array in host memory, not owned.
struct NamedArray {
  std::string name;
  std::string dtype;  // safetensors: "F32", "BF16", "I64", "U8"
  std::vector<int64_t> shape;
  const void* data = nullptr;
  size_t bytes = 0;
};

// Writes atomically (temporary name, fsync, rename). Throws Error (disk full, no permission), leaving nothing behind.
// Returns the file's SHA-256 in hex. The same arrays and metadata, in any order, give the same bytes: arrays lie by
// element size, largest first, then by name, so each is aligned to its elements.
std::string WriteSafetensors(const std::string& path, const std::vector<NamedArray>& arrays,
                             const std::map<std::string, std::string>& metadata);

// A memory-mapped safetensors file, header checked against the file (bounds, overlaps, dtype sizes, JSON limits).
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  // In the order of their data. Files of other writers may hold them unaligned.
  const std::vector<NamedArray>& arrays() const { return arrays_; }
  // Throws Error if it is not there.
  const NamedArray& Find(const std::string& name) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  std::unique_ptr<MappedFile> file_;
  std::vector<NamedArray> arrays_;
  std::map<std::string, size_t> by_name_;
  std::map<std::string, std::string> metadata_;
};

// SHA-256 of a file in hex, to verify it before it is used.
std::string Sha256File(const std::string& path);

}  // namespace disagmoe
