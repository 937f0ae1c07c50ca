// Checkpoints: a folder a step, one safetensors file a rank, a manifest, and `latest` moved last.
//
//   checkpoints/step-00000020/rank-00000.safetensors ... manifest.json
//   checkpoints/latest                       text file: "step-00000020"
// A rank writes its file under a temporary name, syncs and renames it. When all ranks have written, one of them
// writes the manifest (layout, step, size and SHA-256 of each file), renames the folder from its temporary name, then moves `latest`.
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

struct CheckpointFile {
  std::string name;
  uint64_t bytes = 0;
  std::string sha256;
};

struct CheckpointManifest {
  int64_t step = 0;
  std::string layout;   // what must be equal to resume: model, layout and dtype, as text
  std::string config;   // the run's resolved configuration (TOML)
  std::vector<CheckpointFile> files;
};

// The folder that ranks write into, before it is published: root/.step-00000020.partial (created if it is not there).
std::string PartialFolder(const std::string& root, int64_t step);
// Removes what killed runs left in root. Optional, for rank 0 before any rank writes; no checkpoint may be in progress.
void RemoveLeftovers(const std::string& root);
std::string RankFileName(int rank);
// Checks that the files of the manifest are there, removes all others, then manifest, folder rename, `latest`. An older
// checkpoint of the same step is replaced. Returns the folder's final path.
std::string PublishCheckpoint(const std::string& root, const CheckpointManifest& manifest);
// "latest" in root, the name of a folder in root, or the path of a folder or of a file `latest`. Verifies that all files are there with their sizes
// (not their hashes: each rank verifies its own). Throws Error.
std::string ResolveCheckpoint(const std::string& root, const std::string& which);
CheckpointManifest ReadManifest(const std::string& folder);
// Hash of a file, to verify one's own before loading.
std::string Sha256File(const std::string& path);

}  // namespace disagmoe
