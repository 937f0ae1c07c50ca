#include "runtime/checkpoint_saver.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/time.h"

namespace disagmoe {
namespace {

// A disk that is slower for longer than a message may take counts as hung.
constexpr double kSlowest = 4e6;  // bytes a second
constexpr size_t kWords = 8;      // of a hash, 32 bits each: exact as numbers
enum Figure : size_t { kStep, kBytes, kHeldUp, kHash, kFigures = kHash + kWords };

}  // namespace

CheckpointSaver::CheckpointSaver(const RunConfig& config, int rank, int world, std::string resume_key, Status& status,
                                 SaverLinks links, std::function<void(const CheckpointRecord&)> on_published)
    : config_(config),
      rank_(rank),
      world_(world),
      resume_key_(std::move(resume_key)),
      root_(config.out + "/checkpoints"),
      status_(status),
      links_(std::move(links)),
      on_published_(std::move(on_published)),
      parts_(std::make_shared<StateParts>()) {}

void CheckpointSaver::Begin(int64_t step, bool copy, const ParamStore& store, const AdamW& optimizer,
                            const std::vector<Range>& owned) {
  const int64_t begin = NowNs();
  if (!std::isfinite(SumOfSquares(store.flat_master()))) {
    throw Error({"the weights are not finite", "after step " + std::to_string(step), {}, {},
                 "lower train.lr or set train.clip_grad; no checkpoint was written"});
  }
  Settle();  // also the first time: rank 0 has then removed what killed runs left
  status_.Doing("saving the checkpoint of step " + std::to_string(step));
  parts_->Take(store, optimizer, owned, owned, copy);
  path_ = PartialFolder(root_, step) + "/" + RankFileName(rank_);
  step_ = step;
  copied_ = copy;
  reported_ = publishing_ = false;
  began_ns_ = begin;
  files_.assign(rank_ == 0 ? world_ : 0, {});
  file_ = std::make_shared<CheckpointFile>();
  writing_.Start([parts = parts_, file = file_, path = path_] { *file = WriteParts(path, *parts); });
  held_up_s_ = static_cast<double>(NowNs() - begin) * 1e-9;
}

void CheckpointSaver::Finish() {
  if (step_ >= 0) Settle();
}

std::vector<double> CheckpointSaver::Figures() const {
  std::vector<double> figures{static_cast<double>(step_), static_cast<double>(file_->bytes), held_up_s_};
  for (size_t i = 0; i < kWords; ++i) {
    figures.push_back(static_cast<double>(std::stoul(file_->sha256.substr(8 * i, 8), nullptr, 16)));
  }
  return figures;
}

std::vector<double> CheckpointSaver::Report() {
  if (step_ < 0 || reported_ || !writing_.Ended()) return {};
  reported_ = true;
  return Figures();
}

void CheckpointSaver::Take(const std::vector<std::vector<double>>& reports) {
  for (size_t r = 0; r < reports.size(); ++r) {
    const std::vector<double>& told = reports[r];
    if (told.size() != kFigures || static_cast<int64_t>(told[kStep]) != step_) continue;
    CheckpointFile& file = files_[r];
    file = {RankFileName(static_cast<int>(r)), static_cast<uint64_t>(told[kBytes]), {}};
    for (size_t i = 0; i < kWords; ++i) {
      char word[9];
      std::snprintf(word, sizeof word, "%08lx", static_cast<unsigned long>(told[kHash + i]));
      file.sha256 += word;
    }
    held_up_s_ = std::max(held_up_s_, told[kHeldUp]);
  }
  if (Complete() && !publishing_) Publish();
}

bool CheckpointSaver::Complete() const {
  const auto there = [](const CheckpointFile& file) { return !file.name.empty(); };
  return step_ >= 0 && std::all_of(files_.begin(), files_.end(), there);
}

void CheckpointSaver::Publish() {
  publishing_ = true;
  publish_ns_ = NowNs();
  record_ = std::make_shared<CheckpointRecord>();
  record_->step = step_;
  record_->async = copied_;
  record_->held_up_s = held_up_s_;
  for (const CheckpointFile& file : files_) record_->bytes += file.bytes;
  publish_.Start([record = record_, root = root_, began = began_ns_, keep = config_.train.keep_checkpoints,
                  manifest = CheckpointManifest{step_, resume_key_, PrintConfig(config_), files_}] {
    record->folder = PublishCheckpoint(root, manifest);
    record->seconds = static_cast<double>(NowNs() - began) * 1e-9;
    if (!record->async) record->held_up_s = record->seconds;
    try {
      if (keep > 0) PruneCheckpoints(root, keep);
    } catch (const Error& e) {  // no reason to end the run
      record->warning = e.what();
    }
  });
}

void CheckpointSaver::RequireInTime(const std::string& what, int64_t since_ns, uint64_t bytes) const {
  const double limit = config_.transport.timeout_s + static_cast<double>(bytes) / kSlowest;
  if (static_cast<double>(NowNs() - since_ns) * 1e-9 < limit) return;
  throw Error({"a checkpoint is not written in time", what,
               "not after " + std::to_string(static_cast<int64_t>(limit)) + " s",
               "transport.timeout_s and a second for 4 MB", "does its file system answer?"});
}

void CheckpointSaver::Poll() {
  if (!writing_.Ended()) RequireInTime(path_, began_ns_, parts_->bytes());
  if (world_ == 1) Take({Report()});
  if (record_ == nullptr) return;
  if (!publish_.Ended()) return RequireInTime(root_, publish_ns_, record_->bytes);
  on_published_(*std::exchange(record_, nullptr));
}

// Until all ranks have written the checkpoint in progress, and rank 0 has published it: if it cannot, nobody goes on.
void CheckpointSaver::Settle() {
  const std::string of = step_ < 0 ? "a checkpoint" : "the checkpoint of step " + std::to_string(step_);
  constexpr int64_t kRound = 200'000'000;
  for (bool all = false; !all;) {
    Poll();
    status_.Doing("writing " + of);
    const bool mine = writing_.Ended(kRound / 4);
    all = mine;
    if (world_ > 1) {  // a meeting a round: a slow disk, or a long pruning, must not look like a lost rank
      const auto reports = links_.gather(mine && step_ >= 0 ? Figures() : std::vector<double>{});
      if (rank_ == 0) Take(reports);
      if (record_ != nullptr && publish_.Ended(kRound)) Poll();
      all = links_.broadcast(step_ < 0 || (Complete() && record_ == nullptr)) > 0;
      if (!all && mine) std::this_thread::sleep_for(std::chrono::nanoseconds(kRound / 4));
    }
  }
  status_.Doing("publishing " + of);
  for (Poll(); record_ != nullptr; Poll()) publish_.Ended(kRound);
}

}  // namespace disagmoe
