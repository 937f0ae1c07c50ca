#include "io/tensor_folder.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <utility>

#include "base/error.h"
#include "io/file.h"
#include "io/safetensors_header.h"
#include "io/tensor_index.h"
#include "io/tensor_packed.h"

namespace disagmoe {

namespace fs = std::filesystem;

namespace {

constexpr uint64_t kMaxIndex = 256 << 20;
constexpr char kSaveAgain[] = "save the model with save_pretrained of transformers, which writes safetensors";

bool IsPickle(const fs::path& path) {
  const std::string extension = path.extension().string();
  return extension == ".bin" || extension == ".pt" || extension == ".pth";
}

int64_t Elements(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

bool Exists(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

// Why a folder has no weights to read, as a hint.
std::string WhyNothing(const std::string& folder) {
  std::string pickle, lone;
  int found = 0;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (IsPickle(name)) pickle = std::max(pickle, name);
    if (!name.ends_with(".safetensors")) continue;
    lone = lone.empty() ? name : std::min(lone, name);
    ++found;
  }
  if (found == 1) return "name the file itself, " + folder + "/" + lone;
  if (found > 1) return "shards (" + lone + ", ...) are there without their index, " + kIndexFile + ": download it too";
  if (!pickle.empty()) return pickle + " is a pickle, which is not read: " + kSaveAgain;
  if (Exists(folder + "/snapshots")) return "this is a cache of downloads: name the folder of a revision in its snapshots/";
  return "";
}

// The file to open: an index, or a .safetensors file.
std::string FileOf(const std::string& path) {
  std::error_code error;
  if (!Exists(path)) {
    throw Error({"there is no such folder or file", path, {}, {},
                 "wanted is a folder with config.json and safetensors files, as `hf download NAME --local-dir DIR` makes it"});
  }
  if (!fs::is_directory(path, error)) {
    if (IsPickle(path)) throw Error({"not a safetensors file", path, "a pickle", {}, kSaveAgain});
    return path;
  }
  const std::string single = path + "/" + kSingleFile, index = path + "/" + kIndexFile;
  if (!Exists(single) && !Exists(index)) {
    throw Error({"no weights in the folder", path, {}, std::string(kSingleFile) + " or " + kIndexFile, WhyNothing(path)});
  }
  if (Exists(single) && Exists(index)) {
    throw Error({"two sets of weights in the folder", path, std::string(kSingleFile) + " and " + kIndexFile, "one of them",
                 "remove the old one, or name the file that you mean"});
  }
  return Exists(single) ? single : index;
}

struct Stored {
  size_t shard = 0;
  SafetensorsEntry entry;
};

}  // namespace

struct TensorFolder::Tensor {
  std::string dtype;
  std::vector<int64_t> shape;
  Packing packing = Packing::kNone;
  const Stored* data = nullptr;
  const Stored* scales = nullptr;
};

struct TensorFolder::Parts {
  std::vector<std::unique_ptr<FileReader>> shards;
  std::map<std::string, Stored> stored;
  std::map<std::string, Tensor> tensors;

  void AddShard(const std::string& path);
  void AddShards(const std::string& folder, const TensorIndex& index);
  void Unpack(const std::string& path);
  const Stored* FindStored(const std::string& name) const {
    const auto found = stored.find(name);
    return found == stored.end() ? nullptr : &found->second;
  }
  // A reader of a stored tensor's bytes.
  BytesOf Bytes(const Stored* s) const {
    const FileReader* file = shards[s->shard].get();
    return [file, s](uint64_t offset, void* data, size_t bytes) {
      DM_CHECK(offset <= s->entry.bytes && bytes <= s->entry.bytes - offset, s->entry.name);
      file->ReadAt(s->entry.begin + offset, data, bytes);
    };
  }
};

void TensorFolder::Parts::AddShard(const std::string& path) {
  shards.push_back(std::make_unique<FileReader>(path));
  SafetensorsHeader header = ReadSafetensorsHeader(*shards.back());
  for (SafetensorsEntry& e : header.entries) {
    const std::string name = e.name;
    const auto [at, fresh] = stored.try_emplace(name, Stored{shards.size() - 1, std::move(e)});
    if (fresh) continue;
    const std::string first = BaseName(shards[at->second.shard]->path());
    throw Error({"a tensor is in two files", ShownName(name), first + " and " + BaseName(path), "one of them", {}});
  }
}

// Opens the files that the index names, and holds what is in them against what the index says.
void TensorFolder::Parts::AddShards(const std::string& folder, const TensorIndex& index) {
  std::map<std::string, size_t> files;
  for (const auto& [name, file] : index.file_of) files.emplace(file, 0);
  for (auto& [file, shard] : files) {
    if (!Exists(folder + "/" + file)) {
      throw Error({"a file that the index names is missing", folder + "/" + file, {}, {}, "was the download complete?"});
    }
    shard = shards.size();
    AddShard(folder + "/" + file);
  }
  const auto wrong = [&](const std::string& got, const std::string& expected) {
    return Error({"the index is not that of the files", folder, got, expected, "are they all of one download?"});
  };
  for (const auto& [name, file] : index.file_of) {
    const Stored* s = FindStored(name);
    if (s && s->shard == files.at(file)) continue;
    throw wrong(ShownName(name) + " in " + file + " by the index",
                s ? BaseName(shards[s->shard]->path()) + ", which has it" : "a file that has it; none does");
  }
  for (const auto& [name, s] : stored) {
    if (index.file_of.count(name)) continue;
    throw wrong(ShownName(name) + " in " + BaseName(shards[s.shard]->path()), "only tensors that the index knows");
  }
}

// What is stored, as tensors: packed ones without their companions.
void TensorFolder::Parts::Unpack(const std::string& path) {
  const std::string inverse = "_scale_inv", blocks = "_blocks", scales = "_scales";
  const auto without = [](const std::string& name, const std::string& end) { return name.substr(0, name.size() - end.size()); };
  for (const auto& [name, s] : stored) {
    if (name.ends_with(inverse) && FindStored(without(name, inverse))) continue;
    if (name.ends_with(scales) && FindStored(without(name, scales) + blocks)) continue;
    Tensor tensor{s.entry.dtype, s.entry.shape, Packing::kNone, &s, FindStored(name + inverse)};
    std::string shown = name;
    if (tensor.scales) {
      tensor.packing = Packing::kFp8Blocks;
      CheckPacking(path, tensor.packing, s.entry, tensor.scales->entry);
    } else if (name.ends_with(blocks) && FindStored(without(name, blocks) + scales)) {
      shown = without(name, blocks);
      tensor.scales = FindStored(shown + scales);
      tensor.packing = Packing::kMxfp4;
      CheckPacking(path, tensor.packing, s.entry, tensor.scales->entry);
      tensor.dtype = "MXFP4";
      tensor.shape = Mxfp4Shape(s.entry.shape);
    }
    if (!tensors.emplace(shown, std::move(tensor)).second) {
      throw Error({"a tensor is there packed and not packed", path, ShownName(shown), "one of them", {}});
    }
  }
}

TensorFolder::TensorFolder(const std::string& path) : path_(path), parts_(std::make_unique<Parts>()) {
  const std::string file = FileOf(path);
  if (!file.ends_with(".json")) {
    parts_->AddShard(file);
  } else {
    const TensorIndex index = ParseTensorIndex(file, ReadTextFile(file, kMaxIndex));
    parts_->AddShards(ParentFolder(file), index);
    uint64_t total = 0;
    for (const auto& [name, s] : parts_->stored) total += s.entry.bytes;
    if (index.total_size && *index.total_size != static_cast<double>(total)) {
      char said[32];
      std::snprintf(said, sizeof(said), "%.0f", *index.total_size);
      warnings_.push_back(file + " says total_size " + said + ", its tensors have " + std::to_string(total) +
                          " bytes (harmless: all files are complete)");
    }
  }
  parts_->Unpack(path);
  for (const auto& [name, tensor] : parts_->tensors) names_.push_back(name);
}

TensorFolder::~TensorFolder() = default;

bool TensorFolder::Has(const std::string& name) const { return parts_->tensors.count(name) > 0; }

const TensorFolder::Tensor& TensorFolder::Find(const std::string& name) const {
  const auto found = parts_->tensors.find(name);
  if (found == parts_->tensors.end()) {
    const std::string expected = "one of the " + std::to_string(names_.size()) + " tensors there";
    throw Error({"no tensor of this name", path_, ShownName(name), expected, {}});
  }
  return found->second;
}

const std::string& TensorFolder::dtype(const std::string& name) const { return Find(name).dtype; }
const std::vector<int64_t>& TensorFolder::shape(const std::string& name) const { return Find(name).shape; }
int64_t TensorFolder::elements(const std::string& name) const { return Elements(Find(name).shape); }

void TensorFolder::Read(const std::string& name, const TensorView& view, float* values) const {
  const Tensor& tensor = Find(name);
  CheckView(name, view, Elements(tensor.shape));
  const BytesOf data = parts_->Bytes(tensor.data);
  if (tensor.packing == Packing::kMxfp4) {
    ReadMxfp4(data, parts_->Bytes(tensor.scales), tensor.data->entry.shape, view, values);
    return;
  }
  const std::optional<FloatType> type = FindFloatType(tensor.dtype);
  const bool scaled = tensor.packing == Packing::kFp8Blocks;
  if (!type || (FloatBytes(*type) == 1 && !scaled)) {
    const bool fp8 = tensor.dtype == "F8_E4M3";
    throw Error({"a tensor of a type that is not read", path_, ShownName(name) + " of " + tensor.dtype,
                 "F32, F16, BF16, F64, or F8_E4M3 with " + (fp8 ? ShownName(name + "_scale_inv") : std::string("scales")), {}});
  }
  ReadView(data, *type, view, values);
  if (!scaled) return;
  const SafetensorsEntry& scales = tensor.scales->entry;
  std::vector<float> factors(static_cast<size_t>(Elements(scales.shape)));
  const TensorView all = WholeTensor(Elements(scales.shape));
  ReadView(parts_->Bytes(tensor.scales), *FindFloatType(scales.dtype), all, factors.data());
  ScaleBlocks(tensor.shape, factors, view, values);
}

}  // namespace disagmoe
