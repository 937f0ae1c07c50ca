#include "io/checkpoint_reader.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/error.h"

namespace disagmoe {

CheckpointReader::CheckpointReader(const std::string& folder) : folder_(folder), manifest_(ReadManifest(folder)) {
  for (size_t f = 0; f < manifest_.files.size(); ++f) {
    files_.push_back(std::make_unique<SafetensorsFile>(folder + "/" + manifest_.files[f].name));
    for (const auto& array : files_.back()->arrays()) Index(f, array);
  }
}

void CheckpointReader::Index(size_t file, const NamedArray& array) {
  std::string name = array.name;
  int64_t numel = 1;
  for (int64_t s : array.shape) numel *= s;
  if (array.dtype != "F32") {
    throw Error({"unexpected dtype in a checkpoint", folder_ + "/" + manifest_.files[file].name + ": " + name, array.dtype, "F32", ""});
  }
  int64_t begin = 0;
  const size_t at = name.find('@');
  if (at != std::string::npos) {
    begin = std::strtoll(name.c_str() + at + 1, nullptr, 10);
    name.resize(at);
  }
  pieces_[name].push_back({file, begin, begin + numel, &array});
}

void CheckpointReader::Fill(const std::string& name, int64_t begin, int64_t end, float* out) {
  std::vector<std::pair<int64_t, int64_t>> got;
  for (const Piece& piece : pieces_[name]) {
    const int64_t first = std::max(piece.begin, begin), last = std::min(piece.end, end);
    if (first >= last) continue;
    Verify(piece.file);
    std::memcpy(out + (first - begin), static_cast<const float*>(piece.array->data) + (first - piece.begin),
                static_cast<size_t>(last - first) * sizeof(float));
    got.emplace_back(first, last);
  }
  std::sort(got.begin(), got.end());
  int64_t at = begin;
  for (const auto& [first, last] : got) {
    if (first <= at) at = std::max(at, last);
  }
  if (at >= end) return;
  for (size_t f = 0; f < files_.size(); ++f) Verify(f);  // a name may be what is corrupt
  throw Error({"the checkpoint lacks part of a parameter", folder_, got.empty() ? "nothing of " + name : "a part of " + name,
               std::to_string(end - begin) + " values", "was it written by another model?"});
}

void CheckpointReader::Verify(size_t file) {
  if (!verified_.insert(file).second) return;
  const auto& f = manifest_.files[file];
  const std::string hash = Sha256File(folder_ + "/" + f.name);
  if (hash != f.sha256) {
    throw Error({"a checkpoint file is corrupt", folder_ + "/" + f.name, "SHA-256 " + hash, f.sha256 + " (manifest.json)",
                 "resume from an older checkpoint: train.resume=FOLDER"});
  }
}

}  // namespace disagmoe
