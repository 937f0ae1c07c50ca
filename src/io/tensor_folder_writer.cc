#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "io/file.h"
#include "io/safetensors.h"
#include "io/safetensors_header.h"
#include "io/tensor_folder.h"
#include "io/tensor_index.h"

namespace disagmoe {

namespace fs = std::filesystem;

namespace {

struct Target {
  std::string dtype;
  FloatType type = FloatType::kF32;
  int64_t elements = 0;
  size_t shard = 0;
  uint64_t begin = 0;  // in the shard
  std::mutex mutex;    // of all below, and of the tensor's bytes: an interleaved write puts back what lies between
  WrittenElements written;
  ConversionLosses losses;
};

// The shards' tensors, by the rule of transformers: in order while they fit; one that is larger than a shard alone, while
// the shard before it goes on.
std::vector<std::vector<SafetensorsEntry>> Split(const std::vector<TensorFolderWriter::Tensor>& tensors, uint64_t max_bytes) {
  std::vector<std::vector<SafetensorsEntry>> shards;
  std::vector<SafetensorsEntry> current;
  uint64_t current_bytes = 0;
  for (const TensorFolderWriter::Tensor& t : tensors) {
    uint64_t bytes = 0;
    DM_CHECK(FindFloatType(t.dtype) && ArrayBytes(t.shape, DtypeBits(t.dtype), &bytes),
             t.name + " " + t.dtype + " " + ShapeText(t.shape));
    const SafetensorsEntry entry{t.name, t.dtype, t.shape, 0, bytes};
    if (bytes > max_bytes) {
      shards.push_back({entry});
      continue;
    }
    if (current_bytes + bytes > max_bytes) {
      shards.push_back(std::exchange(current, {}));
      current_bytes = 0;
    }
    current.push_back(entry);
    current_bytes += bytes;
  }
  if (!current.empty() || shards.empty()) shards.push_back(std::move(current));
  return shards;
}

std::string Digits(size_t number) {
  const std::string text = std::to_string(number);
  return std::string(text.size() < 5 ? 5 - text.size() : 0, '0') + text;
}

std::string ShardName(size_t shard, size_t count) {
  return count == 1 ? kSingleFile : "model-" + Digits(shard + 1) + "-of-" + Digits(count) + ".safetensors";
}

// Creates the folder, refuses one with weights, and removes what a killed writer left (one that lives holds a lock).
void PrepareFolder(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw Error({"cannot create the folder", folder, error.message(), {}, {}});
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json")) {
      throw Error({"the folder already holds weights", folder, name, {}, "name another folder, or remove the old files"});
    }
    if (!name.starts_with(".model") || !name.ends_with(".tmp")) continue;
    const int fd = ::open(it->path().c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) continue;
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0) ::unlink(it->path().c_str());
    ::close(fd);
  }
  if (error) throw Error({"cannot list the folder", folder, error.message(), {}, {}});
}

}  // namespace

struct TensorFolderWriter::Parts {
  std::string folder;
  std::vector<std::unique_ptr<AtomicFile>> shards;
  std::vector<uint64_t> shard_bytes;
  std::map<std::string, Target> targets;
};

TensorFolderWriter::TensorFolderWriter(const std::string& folder, const std::vector<Tensor>& tensors,
                                       int64_t max_shard_bytes, const std::map<std::string, std::string>& metadata)
    : parts_(std::make_unique<Parts>()) {
  DM_CHECK(max_shard_bytes > 0, "max_shard_bytes " + std::to_string(max_shard_bytes));
  std::vector<std::vector<SafetensorsEntry>> shards = Split(tensors, static_cast<uint64_t>(max_shard_bytes));
  PrepareFolder(folder);
  parts_->folder = folder;
  for (size_t s = 0; s < shards.size(); ++s) {
    const std::string header = MakeSafetensorsHeader(&shards[s], metadata);
    const uint64_t bytes = shards[s].empty() ? header.size() : shards[s].back().begin + shards[s].back().bytes;
    parts_->shards.push_back(std::make_unique<AtomicFile>(folder + "/" + ShardName(s, shards.size())));
    parts_->shard_bytes.push_back(bytes);
    AtomicFile& file = *parts_->shards.back();
    file.Reserve(bytes);
    file.SetLength(bytes);
    file.WriteAt(0, header.data(), header.size());
    for (const SafetensorsEntry& e : shards[s]) {
      const auto [at, fresh] = parts_->targets.try_emplace(e.name);
      DM_CHECK(fresh, "two tensors named " + e.name);
      Target& target = at->second;
      target.dtype = e.dtype;
      target.type = *FindFloatType(e.dtype);
      target.elements = static_cast<int64_t>(e.bytes) / FloatBytes(target.type);
      target.shard = s;
      target.begin = e.begin;
    }
  }
}

TensorFolderWriter::~TensorFolderWriter() = default;

void TensorFolderWriter::Write(const std::string& name, const TensorView& view, const float* values) {
  const auto found = parts_->targets.find(name);
  DM_CHECK(found != parts_->targets.end(), name + " was not declared");
  Target& target = found->second;
  CheckView(name, view, target.elements);
  AtomicFile& file = *parts_->shards[target.shard];
  const int64_t element = FloatBytes(target.type);
  const std::vector<ViewPiece> pieces = CutView(view);
  int64_t largest = 0;
  for (const ViewPiece& p : pieces) largest = std::max(largest, p.BufferElements());
  const auto buffer = std::make_unique_for_overwrite<char[]>(static_cast<size_t>(largest * element));
  const std::lock_guard lock(target.mutex);
  for (const ViewPiece& p : pieces) {
    const bool one_span = p.together || p.lines == 1;
    const bool dense = p.stride == 1 && (!p.together || p.line_stride == p.length);
    const size_t span = static_cast<size_t>((one_span ? p.BufferElements() : p.LineSpan()) * element);
    for (int64_t l = 0; l < (one_span ? 1 : p.lines); ++l) {
      const uint64_t at = target.begin + static_cast<uint64_t>((p.begin + l * p.line_stride) * element);
      if (!dense) file.ReadAt(at, buffer.get() + l * p.Pitch() * element, span);
    }
    ValuesToPiece(p, target.type, values, buffer.get(), &target.losses);
    for (int64_t l = 0; l < (one_span ? 1 : p.lines); ++l) {
      const uint64_t at = target.begin + static_cast<uint64_t>((p.begin + l * p.line_stride) * element);
      file.WriteAt(at, buffer.get() + l * p.Pitch() * element, span);
    }
  }
  target.written.Add(view);
}

TensorFolderSummary TensorFolderWriter::Finish() {
  TensorFolderSummary summary;
  std::map<std::string, std::string> file_of;
  uint64_t total_size = 0;
  for (const auto& [name, target] : parts_->targets) {
    const std::string problem = target.written.Problem(target.elements);
    DM_CHECK(problem.empty(), name + ": " + problem);
    file_of[name] = BaseName(parts_->shards[target.shard]->path());
    total_size += static_cast<uint64_t>(target.elements * FloatBytes(target.type));
    summary.elements += target.elements;
    summary.losses.Add(target.losses);
  }
  summary.tensors = static_cast<int64_t>(file_of.size());
  for (size_t s = 0; s < parts_->shards.size(); ++s) {
    AtomicFile& file = *parts_->shards[s];
    file.Close();
    summary.files.push_back({BaseName(file.path()), parts_->shard_bytes[s], Sha256File(file.temporary_path())});
  }
  for (const auto& file : parts_->shards) file->Publish();
  if (parts_->shards.size() > 1) {  // last: shards without an index are no model
    const std::string text = TensorIndexText(file_of, summary.elements, total_size);
    const std::string path = parts_->folder + "/" + kIndexFile;
    WriteTextFile(path, text);
    summary.files.push_back({kIndexFile, text.size(), Sha256File(path)});
  }
  return summary;
}

void VerifyTensorFolder(const std::string& folder, const TensorFolderSummary& summary) {
  for (const TensorFolderSummary::File& file : summary.files) {
    const std::string path = folder + "/" + file.name;
    const uint64_t bytes = FileReader(path).size();
    const auto differs = [&](const std::string& got, const std::string& expected) {
      return Error({"the exported file is not what was written", path, got, expected, "export again; is the disk sound?"});
    };
    if (bytes != file.bytes) throw differs(std::to_string(bytes) + " bytes", std::to_string(file.bytes));
    const std::string sha256 = Sha256File(path);
    if (sha256 != file.sha256) throw differs("SHA-256 " + sha256, file.sha256);
  }
  const TensorFolder read(folder);
  int64_t elements = 0;
  for (const std::string& name : read.names()) elements += read.elements(name);
  const int64_t tensors = static_cast<int64_t>(read.names().size());
  if (tensors != summary.tensors || elements != summary.elements) {
    throw Error({"the exported folder is not what was written", folder,
                 std::to_string(tensors) + " tensors of " + std::to_string(elements) + " elements",
                 std::to_string(summary.tensors) + " of " + std::to_string(summary.elements), {}});
  }
}

}  // namespace disagmoe
