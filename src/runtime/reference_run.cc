#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

#include "base/time.h"
#include "io/initial_weights.h"
#include "layers/optimizer.h"
#include "layers/reference.h"
#include "runtime/checkpoint_saver.h"
#include "runtime/run_rules.h"
#include "runtime/state_io.h"
#include "runtime/trainer.h"

namespace disagmoe {

RunResult TrainReference(const RunConfig& config, const RankContext& context) {
  c10::NoGradGuard no_grad;
  const TrainConfig& t = config.train;
  const at::Device device = PickDevice(config.device, context.local_rank);
  const Corpus data(config.data.path, config.data.blend);
  const Batches batches = BatchesOf(config, data);
  Reference model(config, device);
  ParamStore& store = model.store();
  AdamW optimizer(store, {{0, store.numel()}}, t, &config.model);
  const Resume resume = FindCheckpoint(config, data);
  std::unique_ptr<RunFolder> folder;
  if (context.write_files) folder = std::make_unique<RunFolder>(config, !resume.folder.empty());
  if (resume.folder.empty()) {
    SetInitialWeights(config, store);
  } else {
    LoadState(resume.folder, store, &optimizer);
  }
  if (context.on_start) context.on_start(store);
  std::unique_ptr<RunLog> log;
  if (context.write_files) {
    log = std::make_unique<RunLog>(config, resume.step + 1, context.json);
    WriteText(config.out + "/config.toml", PrintConfig(config));
    RemoveLeftovers(config.out + "/checkpoints");
    KeepCompanions(config, resume.folder);
    log->Note("reference: one process, no disaggregation, on " + Describe(device, config.device.threads));
  }
  auto micro_batch = [&](bool held_out, int64_t first, int64_t step_labels) {
    const int64_t b = t.micro_batch_size, s = t.seq_length;
    at::Tensor tokens = at::empty({b, s + 1}, at::kLong), labels = at::empty({b, s}, at::kLong);
    Reference::Batch batch;
    std::vector<int64_t> begins;
    for (int64_t i = 0; i < b; ++i) {
      int64_t* out = tokens.data_ptr<int64_t>() + i * (s + 1);
      held_out ? batches.HeldOut(first + i, out, &begins) : batches.Train(first + i, out, &begins);
      labels[i].copy_(tokens[i].narrow(0, 1, s));
      for (int64_t begin : begins) {
        if (begin > 0) labels[i][begin - 1] = kNoLabel;
        if (begin < s && config.data.documents == "apart") batch.documents.push_back(i * s + begin);
      }
    }
    batch.tokens = tokens.narrow(1, 0, s).to(device);
    batch.labels = labels.to(device);
    batch.step_labels = step_labels;
    return batch;
  };
  RunResult result;
  CheckpointSaver saver(config, 0, 1, ResumeKey(config, data.Fingerprint()), *context.status, {}, [&](const CheckpointRecord& record) {
    if (log) log->Checkpoint(record);
    result.checkpoint = record.folder;
  });
  auto evaluate = [&](int64_t step) {
    double loss = 0;
    const int64_t labels = std::max<int64_t>(1, batches.CountedLabels(true, 0, t.eval_micro_batches * t.micro_batch_size));
    for (int64_t m = 0; m < t.eval_micro_batches; ++m) {
      const auto l = model.Run(micro_batch(true, m * t.micro_batch_size, labels), false);
      loss += l.tokens;
      CheckFinite(config, step, loss, 0, l.bad_stage == kAllFinite ? kAllFinite : BadKey(m, l.bad_stage - 1, config.model.num_hidden_layers));
    }
    result.held_out.push_back({step, loss / static_cast<double>(labels)});
    if (log) log->HeldOut(result.held_out.back());
  };
  const int64_t last = LastStep(t, resume);
  auto save = [&](int64_t step) {
    if (!context.write_files || !t.save) return;
    saver.Begin(step, t.async_save && step < last, store, optimizer, {{0, store.numel()}});
    if (!t.async_save) saver.Finish();
  };
  if (EvaluateAfter(t, resume.step, last)) evaluate(resume.step);
  if (t.steps == 0) save(last);
  const int64_t sequences = t.micro_batches * t.micro_batch_size, L = config.model.num_hidden_layers;
  for (int64_t step = resume.step + 1; step <= last; ++step) {
    const int64_t begin = NowNs();
    StepRecord r;
    r.step = step;
    int64_t bad = kAllFinite;
    const int64_t first = (step - 1) * sequences, labels = std::max<int64_t>(1, batches.CountedLabels(false, first, sequences));
    for (int64_t m = 0; m < t.micro_batches; ++m) {
      const auto l = model.Run(micro_batch(false, first + m * t.micro_batch_size, labels), true);
      r.loss += l.tokens / static_cast<double>(labels);
      r.aux_loss += l.aux;
      if (bad == kAllFinite && l.bad_stage != kAllFinite) bad = BadKey(m, l.bad_stage - 1, L);
    }
    r.grad_norm = std::sqrt(GradSquares(store, {0, store.numel()}));
    r.lr = context.learning_rate ? context.learning_rate(step) : LearningRate(t, step);
    CheckFinite(config, step, r.loss + r.aux_loss, r.grad_norm, bad);
    if (context.on_gradients) context.on_gradients(step, store);
    optimizer.Step(step, r.lr, ClipCoefficient(t.clip_grad, r.grad_norm));
    store.ZeroGrad();
    r.step_seconds = static_cast<double>(NowNs() - begin) * 1e-9;
    r.tokens_per_second = static_cast<double>(sequences * t.seq_length) / r.step_seconds;
    WorkerReport w;
    w.name = "reference";
    w.compute_s = r.step_seconds;
    w.peak_memory = PeakMemory();
    r.workers.push_back(w);
    if (log) log->Step(r);
    result.steps.push_back(std::move(r));
    saver.Poll();
    if (EvaluateAfter(t, step, last)) evaluate(step);
    if (SaveAfter(t, step, last)) save(step);
  }
  saver.Finish();
  return result;
}

}  // namespace disagmoe
