// Tensors of a Hugging Face folder, read and written piece by piece: values are fp32 in memory, whatever is stored, and
// memory stays far below the largest tensor. Which tensor is which parameter is not known here (spec/hf_tensors.h).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/tensor_view.h"

namespace disagmoe {

// A folder with model.safetensors, or with model.safetensors.index.json and its shards; or one .safetensors file. Opening
// reads all headers and checks them and the index against each other; values are read when asked for.
//
// Packed tensors appear as what they mean, without their companions:
//   X (F8_E4M3) with X_scale_inv, blocks of 128 x 128 as DeepSeek-V3 publishes: dtype "F8_E4M3", X's shape;
//   X_blocks [.., r, g, 16] with X_scales [.., r, g] (U8) as gpt-oss publishes: X, dtype "MXFP4", shape [.., 32 g, r], which
//   is the shape (transposed) that the parameter has without packing.
class TensorFolder {
 public:
  explicit TensorFolder(const std::string& path);
  ~TensorFolder();
  TensorFolder(const TensorFolder&) = delete;

  const std::string& path() const { return path_; }
  const std::vector<std::string>& names() const { return names_; }  // sorted
  bool Has(const std::string& name) const;
  // These throw Error if there is no such tensor.
  const std::string& dtype(const std::string& name) const;
  const std::vector<int64_t>& shape(const std::string& name) const;
  int64_t elements(const std::string& name) const;
  // The view's rows x columns values, row by row. Throws Error for a dtype that holds no such numbers, or a file that
  // cannot be read. Threads may read at the same time.
  void Read(const std::string& name, const TensorView& view, float* values) const;

  // Lines for the user about what is odd and yet harmless, such as a wrong total_size in the index.
  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  struct Tensor;
  struct Parts;
  const Tensor& Find(const std::string& name) const;

  std::string path_;
  std::unique_ptr<Parts> parts_;
  std::vector<std::string> names_, warnings_;
};

// What an export wrote.
struct TensorFolderSummary {
  struct File {
    std::string name;
    uint64_t bytes = 0;
    std::string sha256;
  };
  std::vector<File> files;  // shards in order, then the index if there is one
  int64_t tensors = 0, elements = 0;
  ConversionLosses losses;
};

// Writes a folder's weights with the names, index and headers that transformers writes. All tensors are declared first,
// then filled by views in any order; Finish() checks, syncs, hashes and renames. Until then there are hidden temporary
// files; destroyed or killed before, nothing looks complete. Threads may write at the same time.
class TensorFolderWriter {
 public:
  struct Tensor {
    std::string name;
    std::string dtype;  // "F32", "F16", "BF16", "F64"
    std::vector<int64_t> shape;
  };
  // Shards take the tensors in the given order (within a file they lie by type, then by name). Throws Error if the folder
  // already holds weights or the disk has no room for all of it.
  TensorFolderWriter(const std::string& folder, const std::vector<Tensor>& tensors,
                     int64_t max_shard_bytes = int64_t{5} * 1000 * 1000 * 1000,
                     const std::map<std::string, std::string>& metadata = {{"format", "pt"}});
  ~TensorFolderWriter();
  TensorFolderWriter(const TensorFolderWriter&) = delete;

  // Rounds to the nearest, ties to even; what was lost is counted in the summary.
  void Write(const std::string& name, const TensorView& view, const float* values);
  // Throws InternalError naming a tensor of which not every element was written exactly once.
  TensorFolderSummary Finish();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// Reads the folder again: files, sizes, hashes, headers, index, number of tensors and of elements. Throws Error.
void VerifyTensorFolder(const std::string& folder, const TensorFolderSummary& summary);

}  // namespace disagmoe
