// The format: https://huggingface.co/docs/safetensors (facts in docs/formats.md).
#include "io/safetensors.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/error.h"
#include "io/file.h"
#include "io/safetensors_header.h"

namespace disagmoe {

std::string WriteSafetensors(const std::string& path, const std::vector<NamedArray>& arrays,
                             const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, const void*> data;
  for (const NamedArray& a : arrays) {
    entries.push_back({a.name, a.dtype, a.shape, 0, a.bytes});
    data[a.name] = a.data;
  }
  const std::string header = MakeSafetensorsHeader(&entries, metadata);
  const uint64_t total = entries.empty() ? header.size() : entries.back().begin + entries.back().bytes;
  std::vector<std::pair<const void*, size_t>> ordered;
  for (const SafetensorsEntry& e : entries) ordered.push_back({data.at(e.name), e.bytes});

  AtomicFile file(path);
  file.Reserve(total);
  Sha256 sha;
  sha.Update(header.data(), header.size());
  // Hash and copy into the page cache cost about the same: side by side. The pieces let a failed write stop the hash.
  const auto hash = [&](const std::stop_token& stop) {
    constexpr size_t kPiece = size_t{16} << 20;
    for (const auto& [begin, bytes] : ordered) {
      for (size_t at = 0; at < bytes && !stop.stop_requested(); at += kPiece) {
        sha.Update(static_cast<const char*>(begin) + at, std::min(kPiece, bytes - at));
      }
    }
  };
  {
    const bool small = total < (1 << 20);
    if (small) hash({});
    std::jthread hashing(small ? std::jthread() : std::jthread(hash));  // stopped and joined if a write throws
    file.Write(header.data(), header.size());
    for (const auto& [begin, bytes] : ordered) file.Write(begin, bytes);
    file.Close();
    if (hashing.joinable()) hashing.join();
  }
  file.Publish();
  return sha.Hex();
}

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(std::make_unique<MappedFile>(path)) {
  const std::string_view text(reinterpret_cast<const char*>(file_->data()), file_->size());
  const uint64_t json_bytes = SafetensorsJsonBytes(path, text, file_->size());
  SafetensorsHeader header = ParseSafetensorsHeader(path, text.substr(8, json_bytes), file_->size());
  metadata_ = std::move(header.metadata);
  for (SafetensorsEntry& e : header.entries) {
    by_name_.emplace(e.name, arrays_.size());
    arrays_.push_back({std::move(e.name), std::move(e.dtype), std::move(e.shape), file_->data() + e.begin, e.bytes});
  }
}

SafetensorsFile::~SafetensorsFile() = default;

const NamedArray& SafetensorsFile::Find(const std::string& name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) {
    throw Error({"no array of this name", file_->path(), ShownName(name), "one of the file's " + std::to_string(arrays_.size()) + " arrays", {}});
  }
  return arrays_[found->second];
}

}  // namespace disagmoe
