// Arrays of a checkpoint, whichever layout wrote it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "io/checkpoint.h"

namespace disagmoe {

// An array is "<kind>/<parameter>" with kind weight, exp_avg or exp_avg_sq; of a per-expert parameter one array an expert,
// "<kind>/<parameter>#<expert>". Ranks that own only a part of one have written "<...>@begin:end", flat. All are fp32.
class CheckpointReader {
 public:
  // Opens all the files of a checkpoint folder. Throws Error.
  explicit CheckpointReader(const std::string& folder);
  // Values [begin, end) of an array. Throws Error if some are nowhere; verifies the hash of each file that it reads from.
  void Fill(const std::string& name, int64_t begin, int64_t end, float* out);
  const CheckpointManifest& manifest() const { return manifest_; }

 private:
  struct Piece {
    size_t file;
    int64_t begin, end;
    const NamedArray* array;
  };
  void Index(size_t file, const NamedArray& array);
  void Verify(size_t file);

  std::string folder_;
  CheckpointManifest manifest_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, std::vector<Piece>> pieces_;
  std::set<size_t> verified_;
};

}  // namespace disagmoe
