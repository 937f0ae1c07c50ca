#include "runtime/state_io.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "io/checkpoint_reader.h"
#include "io/hf_weights.h"
#include "io/initial_weights.h"

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

}  // namespace

std::string ResumeKey(const RunConfig& config, const std::string& data) {
  RunConfig c;  // all else at its default
  c.model = config.model;
  c.train.seq_length = config.train.seq_length;
  c.train.micro_batch_size = config.train.micro_batch_size;
  c.train.micro_batches = config.train.micro_batches;
  c.train.seed = config.train.seed;
  c.train.dtype = config.train.dtype;
  c.data.split = config.data.split;
  c.data.documents = config.data.documents;
  return PrintConfig(c) + "data tokens = " + data + "\n";
}

void StateParts::Take(const ParamStore& store, const AdamW& optimizer, const std::vector<Range>& weights,
                      const std::vector<Range>& moments, bool copy) {
  copy_ = copy;
  used_ = 0;
  keep_.clear();
  arrays_.clear();
  int64_t numbers = 0;
  for (const Range& r : weights) numbers += r.size();
  for (const Range& r : moments) numbers += 2 * r.size();
  if (!copy) {
    memory_.reset();
  } else if (!memory_.defined() || memory_.numel() != numbers) {
    memory_ = at::empty({numbers}, at::kFloat);
  }
  for (const Range& r : weights) Add("weight", store, store.flat_master(), 0, r);
  for (size_t i = 0; i < optimizer.owned().size(); ++i) {
    for (const Range& wanted : moments) {
      const Range r = Intersect(optimizer.owned()[i], wanted);
      Add("exp_avg", store, optimizer.exp_avg(i), optimizer.owned()[i].begin, r);
      Add("exp_avg_sq", store, optimizer.exp_avg_sq(i), optimizer.owned()[i].begin, r);
    }
  }
}

// flat: of the store's flat arrays, what begins at flat_begin.
void StateParts::Add(const std::string& kind, const ParamStore& store, const at::Tensor& flat, int64_t flat_begin, const Range& wanted) {
  if (wanted.begin >= wanted.end) return;
  at::Tensor part = flat.narrow(0, wanted.begin - flat_begin, wanted.size());
  if (copy_) {
    part = memory_.narrow(0, used_, wanted.size()).copy_(part);
    used_ += wanted.size();
  }
  part = part.cpu();
  keep_.push_back(part);
  for (const Unit& unit : Units(store)) {
    const Range r = Intersect(unit.flat, wanted);
    if (r.begin >= r.end) continue;
    const bool whole = r.size() == unit.flat.size();
    const std::string range = "@" + std::to_string(r.begin - unit.flat.begin) + ":" + std::to_string(r.end - unit.flat.begin);
    arrays_.push_back({kind + "/" + unit.name + (whole ? "" : range), "F32", whole ? unit.shape : std::vector<int64_t>{r.size()},
                       part.const_data_ptr<float>() + (r.begin - wanted.begin), static_cast<size_t>(r.size()) * sizeof(float)});
  }
}

uint64_t StateParts::bytes() const {
  uint64_t bytes = 0;
  for (const NamedArray& array : arrays_) bytes += array.bytes;
  return bytes;
}

CheckpointFile WriteParts(const std::string& path, const StateParts& parts) {
  CheckpointFile file;
  file.sha256 = WriteSafetensors(path, parts.arrays(), {{"format", "disagmoe"}});
  file.name = path.substr(path.rfind('/') + 1);
  file.bytes = std::filesystem::file_size(path);
  return file;
}

void LoadState(const std::string& folder, ParamStore& store, AdamW* optimizer) {
  CheckpointReader pieces(folder);
  auto fill = [&](const std::string& kind, const at::Tensor& flat, const Range& of_flat) {
    at::Tensor host = at::zeros({of_flat.size()}, at::kFloat);
    for (const Unit& unit : Units(store)) {
      const Range r = Intersect(unit.flat, of_flat);
      if (r.begin >= r.end) continue;
      pieces.Fill(kind + "/" + unit.name, r.begin - unit.flat.begin, r.end - unit.flat.begin,
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

void SetInitialWeights(const RunConfig& config, ParamStore& store) {
  const std::string& init = config.train.init;
  const InitialWeights kind = KindOfInit(init);
  if (kind == InitialWeights::kRandom) return store.Initialise(config.train.seed);
  if (kind == InitialWeights::kCheckpoint) return LoadState(InitialCheckpoint(init), store, nullptr);
  const HfWeights weights(init, config.model);
  at::Tensor host;  // of one parameter, or one expert of it
  for (size_t i = 0; i < store.held().size(); ++i) {
    const HeldParam& held = store.held()[i];
    const int64_t units = held.spec.per_expert ? held.count : 1;
    const int64_t each = units == 0 ? 0 : held.numel() / units;
    for (int64_t u = 0; u < units; ++u) {
      if (!host.defined() || host.numel() < each) host = at::empty({each}, at::kFloat);
      weights.Read(held.spec, held.first + u, host.data_ptr<float>());
      store.flat_master().narrow(0, store.offset(i) + u * each, each).copy_(host.narrow(0, 0, each));
    }
  }
  store.Refresh(0, store.numel());
}

}  // namespace disagmoe
