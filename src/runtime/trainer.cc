#include "runtime/trainer.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "base/time.h"
#include "io/initial_weights.h"
#include "runtime/checkpoint_saver.h"
#include "runtime/collectives.h"
#include "runtime/executor.h"
#include "runtime/run_rules.h"
#include "runtime/state_io.h"

namespace disagmoe {
namespace {

// One rank of a disaggregated (or colocated) run.
class Trainer {
 public:
  Trainer(const RunConfig& config, const RankContext& context)
      : config_(config),
        context_(context),
        device_(PickDevice(config.device, context.local_rank)),
        data_(config.data.path, config.data.blend),
        batches_(BatchesOf(config, data_)),
        schedule_(TrainingSchedule(config)),
        topology_(config, schedule_),
        held_(topology_.held(context.rank)),
        store_(held_.params, config.train.dtype == "bf16" ? at::kBFloat16 : at::kFloat, device_),
        optimizer_(store_, OwnedRanges(), config.train, &config.model),
        waits_(context.rank, context.clock_offsets, static_cast<int64_t>(config.transport.timeout_s * 1e9), *context.status),
        executor_(config, topology_, store_, batches_, context.transport, context.rank, device_, waits_, *context.status),
        collectives_(context.transport, context.rank, waits_),
        saver_(config, context.rank, topology_.world(), ResumeKey(config, data_.Fingerprint()), *context.status, Links(),
               [this](const CheckpointRecord& record) { Published(record); }) {
    const int64_t held_out = Share(config.train.eval_micro_batches).size();
    if (held_out > 0) evaluation_ = ScheduleOf(config, held_out, false);
    for (const auto& b : held_.buckets) {
      if (b.ranks.size() > 1) buckets_.push_back({BucketRange(b), b.ranks, b.id});
    }
  }

  RunResult Run();

 private:
  bool first() const { return context_.rank == 0; }
  Range BucketRange(const Topology::HeldBucket& b) const { return {store_.offset(b.begin), store_.offset(b.end)}; }
  Range Share(int64_t micro_batches) const;
  std::vector<Range> OwnedRanges() const;
  std::vector<Range> PartRanges() const;
  double Evaluate(int64_t step);
  StepRecord Step(int64_t step);
  std::vector<double> SumOverRanks(std::vector<double> mine, int32_t id);
  std::pair<double, double> Counted() const;
  void Report(StepRecord& record, const PassResult& pass, std::vector<double> mine);
  void WriteTrace();
  void WriteExpertLoad();
  SaverLinks Links();
  void Save(int64_t step, int64_t last);
  void Published(const CheckpointRecord& record);

  const RunConfig& config_;
  const RankContext& context_;
  const at::Device device_;
  Corpus data_;
  Batches batches_;
  Schedule schedule_, evaluation_;
  Topology topology_;
  Topology::Held held_;
  ParamStore store_;
  AdamW optimizer_;
  Waits waits_;
  Executor executor_;
  Collectives collectives_;
  std::vector<Collectives::Bucket> buckets_;
  uint32_t pass_ = 0;
  std::vector<TraceEvent> events_;
  std::vector<double> routed_;  // (token, expert) pairs computed here since the start, by layer * E + expert
  std::unique_ptr<RunLog> log_;  // at rank 0
  RunResult result_;
  CheckpointSaver saver_;
};

// Those of so many micro-batches that this rank's replica executes.
Range Trainer::Share(int64_t micro_batches) const {
  const int replica = topology_.replica_of_rank(context_.rank);
  return {ReplicaBegin(config_, micro_batches, replica), ReplicaBegin(config_, micro_batches, replica + 1)};
}

// What this rank's optimizer updates: all that it holds, or its part of what it shares.
std::vector<Range> Trainer::OwnedRanges() const {
  return config_.train.shard_optimizer ? PartRanges() : std::vector<Range>{{0, store_.numel()}};
}

// This rank's part of each bucket: what it sums, counts in the norm, and writes to checkpoints.
std::vector<Range> Trainer::PartRanges() const {
  std::vector<Range> parts;
  for (const auto& b : held_.buckets) {
    const auto it = std::find(b.ranks.begin(), b.ranks.end(), context_.rank);
    parts.push_back(PartOf(BucketRange(b), b.ranks.size(), static_cast<size_t>(it - b.ranks.begin())));
  }
  return parts;
}

// The same sum at every rank: added up in rank order at rank 0. The last value is not summed: the smallest that is not
// negative wins.
std::vector<double> Trainer::SumOverRanks(std::vector<double> mine, int32_t id) {
  if (topology_.world() == 1) return mine;
  const auto all = collectives_.Gather(mine, topology_.world(), pass_, id);
  if (first()) {
    for (size_t r = 1; r < all.size(); ++r) {
      for (size_t i = 0; i + 1 < mine.size(); ++i) mine[i] += all[r][i];
      const double bad = all[r].back();
      if (bad >= 0 && (mine.back() < 0 || bad < mine.back())) mine.back() = bad;
    }
  }
  return collectives_.Broadcast(mine, topology_.world(), pass_, id);
}

double Trainer::Evaluate(int64_t step) {
  ++pass_;
  const Range share = Share(config_.train.eval_micro_batches);
  PassResult pass;
  const int64_t sequences = config_.train.eval_micro_batches * config_.train.micro_batch_size;
  const int64_t labels = std::max<int64_t>(1, batches_.CountedLabels(true, 0, sequences));
  if (share.size() > 0) pass = executor_.Run(evaluation_, {pass_, step, /*held_out=*/true, 0, share.begin, labels});
  context_.status->Doing("summing the held-out loss of step " + std::to_string(step));
  const auto sums = SumOverRanks({pass.token_loss, static_cast<double>(pass.bad)}, 0);
  CheckFinite(config_, step, sums[0], 0, static_cast<int64_t>(sums[1]));
  return sums[0] / static_cast<double>(labels);
}

StepRecord Trainer::Step(int64_t step) {
  const TrainConfig& t = config_.train;
  const auto [sent0, received0] = Counted();
  const int64_t begin = NowNs(), exposed0 = waits_.exposed_ns(), bubble0 = waits_.bubble_ns();
  const bool traced = config_.trace.steps > 0 && step >= config_.trace.first_step && step < config_.trace.first_step + config_.trace.steps;
  waits_.Trace(traced ? &events_ : nullptr, step);
  ++pass_;
  const int64_t sequences = t.micro_batches * t.micro_batch_size;
  const int64_t first_sequence = (step - 1) * sequences;
  const int64_t labels = std::max<int64_t>(1, batches_.CountedLabels(false, first_sequence, sequences));
  const PassResult pass = executor_.Run(schedule_, {pass_, step, false, first_sequence, Share(t.micro_batches).begin, labels});
  routed_.resize(pass.expert_tokens.size());
  for (size_t i = 0; i < routed_.size(); ++i) routed_[i] += static_cast<double>(pass.expert_tokens[i]);

  const int64_t end_begin = NowNs();
  context_.status->Doing("summing gradients of step " + std::to_string(step));
  collectives_.ReduceScatter(store_.flat_grad(), buckets_, pass_);
  double squares = 0;
  for (const Range& r : PartRanges()) squares += GradSquares(store_, r);
  const auto sums = SumOverRanks({pass.token_loss, pass.aux_loss, squares, static_cast<double>(pass.bad)}, 1);
  StepRecord record;
  record.step = step;
  record.loss = sums[0] / static_cast<double>(labels);
  record.aux_loss = sums[1];
  record.grad_norm = std::sqrt(sums[2]);
  record.lr = LearningRate(t, step);
  CheckFinite(config_, step, record.loss + record.aux_loss, record.grad_norm, static_cast<int64_t>(sums[3]));
  const double clip = ClipCoefficient(t.clip_grad, record.grad_norm);
  if (!t.shard_optimizer || context_.on_gradients) collectives_.AllGather(store_.flat_grad(), buckets_, pass_);
  if (context_.on_gradients) context_.on_gradients(step, store_);
  const int64_t optimizer_begin = NowNs();
  optimizer_.Step(step, record.lr, clip);
  store_.ZeroGrad();
  const int64_t optimizer_end = NowNs();
  if (t.shard_optimizer) {
    ++pass_;
    context_.status->Doing("gathering weights of step " + std::to_string(step));
    collectives_.AllGather(store_.flat_master(), buckets_, pass_);
    for (const auto& b : buckets_) store_.Refresh(b.range.begin, b.range.end);
  }
  const int64_t end = NowNs();
  waits_.Record(Stream::kStep, "step", begin, end);
  waits_.Record(Stream::kStep, "reduce", end_begin, optimizer_begin);
  waits_.Record(Stream::kStep, "optimizer", optimizer_begin, optimizer_end);
  if (t.shard_optimizer) waits_.Record(Stream::kStep, "gather", optimizer_end, end);
  waits_.Trace(nullptr, step);
  const double exposed = static_cast<double>(waits_.exposed_ns() - exposed0) * 1e-9;
  const double bubble = static_cast<double>(waits_.bubble_ns() - bubble0) * 1e-9;
  record.step_seconds = static_cast<double>(end - begin) * 1e-9;
  record.tokens_per_second = static_cast<double>(sequences * t.seq_length) / record.step_seconds;
  const auto [sent, received] = Counted();
  Report(record, pass, {record.step_seconds - exposed - bubble, exposed, bubble, sent - sent0, received - received0});
  return record;
}

// Payload bytes sent and received so far.
std::pair<double, double> Trainer::Counted() const {
  if (context_.transport == nullptr) return {0, 0};
  const TransportCounters& c = context_.transport->counters();
  return {static_cast<double>(c.bytes_sent), static_cast<double>(c.bytes_received)};
}

// Figures of all workers, at rank 0. mine: compute, exposed, bubble, bytes sent and received. What the saver tells follows.
void Trainer::Report(StepRecord& record, const PassResult& pass, std::vector<double> mine) {
  const int64_t most = *std::max_element(pass.expert_tokens.begin(), pass.expert_tokens.end());
  const int64_t tokens = schedule_.num_micro_batches * config_.train.micro_batch_size * config_.train.seq_length;
  const double fair = static_cast<double>(tokens * config_.model.num_experts_per_tok) / static_cast<double>(config_.model.num_experts);
  mine.insert(mine.end(), {static_cast<double>(pass.row_bytes_sent), PeakMemory(), static_cast<double>(most) / fair});
  const auto figures = std::ssize(mine);
  const std::vector<double> saved = saver_.Report();
  mine.insert(mine.end(), saved.begin(), saved.end());
  const auto all = topology_.world() == 1 ? std::vector<std::vector<double>>{mine}
                                          : collectives_.Gather(mine, topology_.world(), pass_, 2);
  std::vector<std::vector<double>> saves;
  for (size_t r = 0; r < all.size(); ++r) {
    const auto& v = all[r];
    saves.emplace_back(v.begin() + figures, v.end());
    record.workers.push_back({topology_.worker_name(static_cast<int>(r)), v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]});
  }
  if (first()) saver_.Take(saves);
}

SaverLinks Trainer::Links() {
  return {.gather = [this](const std::vector<double>& mine) { return collectives_.Gather(mine, topology_.world(), ++pass_, 3); },
          .broadcast = [this](double value) { return collectives_.Broadcast({value}, topology_.world(), ++pass_, 3)[0]; }};
}

void Trainer::Save(int64_t step, int64_t last) {
  saver_.Begin(step, config_.train.async_save && step < last, store_, optimizer_, PartRanges());
  if (!config_.train.async_save) saver_.Finish();
}

void Trainer::Published(const CheckpointRecord& record) {
  if (log_) log_->Checkpoint(record);
  result_.checkpoint = record.folder;
}

// Once the traced steps are over, so that a run that fails later has its trace.
void Trainer::WriteTrace() {
  if (!context_.write_files || events_.empty()) return;
  std::filesystem::create_directories(config_.out + "/trace");
  WriteEvents(EventsPath(config_.out, context_.rank), events_);
  events_.clear();
}

// How many pairs each expert got in this run: what `simulate --expert-load` reads. An array of numbers a layer.
void Trainer::WriteExpertLoad() {
  if (!context_.write_files || routed_.empty()) return;
  std::vector<std::vector<double>> all{routed_};
  if (topology_.world() > 1) {
    ++pass_;
    all = collectives_.Gather(routed_, topology_.world(), pass_, 4);
  }
  if (!first()) return;
  const auto experts = static_cast<size_t>(config_.model.num_experts);
  std::string text = "[";
  for (size_t i = 0; i < routed_.size(); ++i) {
    double sum = 0;
    for (const auto& of_rank : all) sum += of_rank[i];
    text += (i % experts == 0 ? (i == 0 ? "\n [" : "],\n [") : ", ") + std::to_string(static_cast<int64_t>(sum));
  }
  WriteText(config_.out + "/expert_load.json", text + "]\n]\n");
}

RunResult Trainer::Run() {
  const TrainConfig& t = config_.train;
  const Resume resume = FindCheckpoint(config_, data_);
  std::unique_ptr<RunFolder> folder;
  if (first() && context_.write_files) folder = std::make_unique<RunFolder>(config_, !resume.folder.empty());
  if (resume.folder.empty()) {
    SetInitialWeights(config_, store_);
  } else {
    LoadState(resume.folder, store_, &optimizer_);
  }
  if (context_.on_start) context_.on_start(store_);
  if (first() && context_.write_files) {
    log_ = std::make_unique<RunLog>(config_, resume.step + 1, context_.json);
    WriteText(config_.out + "/config.toml", PrintConfig(config_));
    RemoveLeftovers(config_.out + "/checkpoints");
    log_->Note("training on " + Describe(device_, config_.device.threads) + ": " + std::to_string(topology_.world()) + " workers, schedule " +
               schedule_.name + (resume.folder.empty() ? "" : ", continued after step " + std::to_string(resume.step)));
  }
  if (log_) KeepCompanions(config_, resume.folder);
  if (log_ && resume.folder.empty()) {
    for (const std::string& line : CheckInitialWeights(config_)) log_->Note(line);
  }
  if (log_ && !folder->moved().empty()) log_->Note("checkpoints of an earlier run are now in " + folder->moved());
  auto held_out = [&](int64_t step) {
    const double loss = Evaluate(step);
    if (!first()) return;
    result_.held_out.push_back({step, loss});
    if (log_) log_->HeldOut({step, loss});
  };
  const int64_t last = LastStep(t, resume);
  if ((resume.step == 0 || t.steps == 0) && EvaluateAfter(t, resume.step, last)) held_out(resume.step);
  if (context_.write_files && t.steps == 0 && t.save) Save(last, last);
  for (int64_t step = resume.step + 1; step <= last; ++step) {
    StepRecord record = Step(step);
    if (first()) {
      if (log_) log_->Step(record);
      result_.steps.push_back(std::move(record));
    }
    if (step == config_.trace.first_step + config_.trace.steps - 1) WriteTrace();
    saver_.Poll();
    if (EvaluateAfter(t, step, last)) held_out(step);
    if (context_.write_files && SaveAfter(t, step, last)) Save(step, last);
  }
  WriteTrace();
  WriteExpertLoad();
  saver_.Finish();
  return std::move(result_);
}

}  // namespace

RunResult TrainRank(const RunConfig& config, const RankContext& context) {
  c10::NoGradGuard no_grad;
  return Trainer(config, context).Run();
}

void WriteRunTrace(const RunConfig& config) {
  std::vector<WorkerName> workers;
  for (const std::string& name : WorkerNames(config)) workers.push_back({static_cast<int>(workers.size()), name});
  MergeTrace(config.out, workers);
}

}  // namespace disagmoe
