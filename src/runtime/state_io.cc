#include "runtime/state_io.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <set>

#include "base/error.h"

namespace disagmoe {
namespace {

// A parameter, or one expert of it, in the flat arrays.
struct Unit {
  std::string name;
  std::vector<int64_t> shape;
  Range flat;
};

std::vector<Unit> Units(const ParamStore& store) {
  std::vector<Unit> units;
  for (size_t i = 0; i < store.held().size(); ++i) {
    const auto& p = store.held()[i];
    const int64_t base = store.offset(i);
    if (!p.spec.per_expert) {
      units.push_back({p.spec.name, p.spec.shape, {base, base + p.numel()}});
      continue;
    }
    const int64_t each = p.count == 0 ? 0 : p.numel() / p.count;
    const std::vector<int64_t> shape(p.spec.shape.begin() + 1, p.spec.shape.end());
    for (int64_t e = 0; e < p.count; ++e) {
      units.push_back({p.spec.name + "#" + std::to_string(p.first + e), shape, {base + e * each, base + (e + 1) * each}});
    }
  }
  return units;
}

Range Intersect(const Range& a, const Range& b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

struct Piece {
  size_t file;
  Range in_param;
  const NamedArray* array;
};

// Files of a checkpoint and where each parameter's pieces are.
class Pieces {
 public:
  explicit Pieces(const std::string& folder) : folder_(folder), manifest_(ReadManifest(folder)) {
    for (size_t f = 0; f < manifest_.files.size(); ++f) {
      files_.push_back(std::make_unique<SafetensorsFile>(folder + "/" + manifest_.files[f].name));
      for (const auto& array : files_.back()->arrays()) Index(f, array);
    }
  }

  void Fill(const std::string& name, const Range& want, float* out) {
    std::vector<Range> got;
    for (const Piece& piece : pieces_[name]) {
      const Range r = Intersect(piece.in_param, want);
      if (r.begin >= r.end) continue;
      Verify(piece.file);
      std::memcpy(out + (r.begin - want.begin), static_cast<const float*>(piece.array->data) + (r.begin - piece.in_param.begin),
                  static_cast<size_t>(r.size()) * sizeof(float));
      got.push_back(r);
    }
    std::sort(got.begin(), got.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    int64_t at = want.begin;
    for (const Range& r : got) {
      if (r.begin <= at) at = std::max(at, r.end);
    }
    if (at < want.end) {
      throw Error({"the checkpoint lacks part of a parameter", folder_, got.empty() ? "nothing of " + name : "a part of " + name,
                   std::to_string(want.size()) + " values", "was it written by another model?"});
    }
  }

 private:
  void Index(size_t file, const NamedArray& array) {
    std::string name = array.name;
    int64_t numel = 1;
    for (int64_t s : array.shape) numel *= s;
    if (array.dtype != "F32") {
      throw Error({"unexpected dtype in a checkpoint", folder_ + "/" + manifest_.files[file].name + ": " + name, array.dtype, "F32", ""});
    }
    Range range{0, numel};
    const size_t at = name.find('@');
    if (at != std::string::npos) {
      range.begin = std::strtoll(name.c_str() + at + 1, nullptr, 10);
      range.end = range.begin + numel;
      name.resize(at);
    }
    pieces_[name].push_back({file, range, &array});
  }

  void Verify(size_t file) {
    if (!verified_.insert(file).second) return;
    const auto& f = manifest_.files[file];
    const std::string hash = Sha256File(folder_ + "/" + f.name);
    if (hash != f.sha256) {
      throw Error({"a checkpoint file is corrupt", folder_ + "/" + f.name, "SHA-256 " + hash, f.sha256 + " (manifest.json)",
                   "resume from an older checkpoint: train.resume=FOLDER"});
    }
  }

  std::string folder_;
  CheckpointManifest manifest_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, std::vector<Piece>> pieces_;
  std::set<size_t> verified_;
};

}  // namespace

std::string ResumeKey(const RunConfig& config, int64_t data_tokens) {
  RunConfig c;  // all else at its default
  c.model = config.model;
  c.train.seq_length = config.train.seq_length;
  c.train.micro_batch_size = config.train.micro_batch_size;
  c.train.micro_batches = config.train.micro_batches;
  c.train.seed = config.train.seed;
  c.train.dtype = config.train.dtype;
  c.data.split = config.data.split;
  return PrintConfig(c) + "data tokens = " + std::to_string(data_tokens) + "\n";
}

CheckpointFile SaveState(const std::string& path, const ParamStore& store, const AdamW& optimizer,
                         const std::vector<Range>& weights, const std::vector<Range>& moments) {
  std::vector<NamedArray> arrays;
  auto add = [&](const std::string& kind, const at::Tensor& flat, const Range& of_flat, const Range& wanted) {
    for (const Unit& unit : Units(store)) {
      const Range r = Intersect(unit.flat, wanted);
      if (r.begin >= r.end) continue;
      const bool whole = r.size() == unit.flat.size();
      const std::string part = "@" + std::to_string(r.begin - unit.flat.begin) + ":" + std::to_string(r.end - unit.flat.begin);
      arrays.push_back({kind + "/" + unit.name + (whole ? "" : part), "F32", whole ? unit.shape : std::vector<int64_t>{r.size()},
                        flat.const_data_ptr<float>() + (r.begin - of_flat.begin), static_cast<size_t>(r.size()) * sizeof(float)});
    }
  };
  const at::Tensor master = store.flat_master().cpu();
  for (const Range& r : weights) add("weight", master, {0, store.numel()}, r);
  std::vector<at::Tensor> keep;  // host copies, if any, live until the file is written
  for (size_t i = 0; i < optimizer.owned().size(); ++i) {
    keep.push_back(optimizer.exp_avg(i).cpu());
    keep.push_back(optimizer.exp_avg_sq(i).cpu());
    for (const Range& r : moments) {
      add("exp_avg", keep[keep.size() - 2], optimizer.owned()[i], Intersect(optimizer.owned()[i], r));
      add("exp_avg_sq", keep.back(), optimizer.owned()[i], Intersect(optimizer.owned()[i], r));
    }
  }
  CheckpointFile file;
  file.sha256 = WriteSafetensors(path, arrays, {{"format", "disagmoe"}});
  file.name = path.substr(path.rfind('/') + 1);
  file.bytes = std::filesystem::file_size(path);
  return file;
}

void LoadState(const std::string& folder, ParamStore& store, AdamW* optimizer) {
  Pieces pieces(folder);
  auto fill = [&](const std::string& kind, const at::Tensor& flat, const Range& of_flat) {
    at::Tensor host = at::zeros({of_flat.size()}, at::kFloat);
    for (const Unit& unit : Units(store)) {
      const Range r = Intersect(unit.flat, of_flat);
      if (r.begin >= r.end) continue;
      pieces.Fill(kind + "/" + unit.name, {r.begin - unit.flat.begin, r.end - unit.flat.begin},
                  host.data_ptr<float>() + (r.begin - of_flat.begin));
    }
    flat.copy_(host);
  };
  fill("weight", store.flat_master(), {0, store.numel()});
  store.Refresh(0, store.numel());
  if (optimizer == nullptr) return;
  for (size_t i = 0; i < optimizer->owned().size(); ++i) {
    fill("exp_avg", optimizer->exp_avg(i), optimizer->owned()[i]);
    fill("exp_avg_sq", optimizer->exp_avg_sq(i), optimizer->owned()[i]);
  }
}

}  // namespace disagmoe
