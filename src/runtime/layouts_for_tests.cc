#include "runtime/layouts_for_tests.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <mutex>

#include "base/rng.h"
#include "io/dataset.h"
#include "runtime/local_run.h"

namespace disagmoe {
namespace {

// Words from a small random vocabulary, so that there is something to learn.
std::string WriteDocuments(const std::string& name, int documents, uint64_t words) {
  const std::string folder = std::filesystem::temp_directory_path() / ("disagmoe-test-" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  Rng rng(1);
  IndexedWriter writer(folder + "/" + name, 32);
  for (int d = 0; d < documents; ++d) {
    std::vector<int32_t> tokens;
    for (uint64_t w = 0; w < words; ++w) {
      const int64_t word = static_cast<int64_t>(rng.Below(12));
      for (int64_t i = 0; i <= word % 4; ++i) tokens.push_back(static_cast<int32_t>((word * 7 + i * 5) % 31));
    }
    writer.AddDocument(tokens);
  }
  writer.Finish();
  return folder + "/" + name;
}

std::string DataPrefix() {
  static const std::string prefix = WriteDocuments("text", 40, 60);
  return prefix;
}

std::string ShortDocuments() {
  static const std::string prefix = WriteDocuments("short", 1000, 2);
  return prefix;
}

// Per-expert parameters arrive in parts: put together by name and first expert.
class Collector {
 public:
  void Take(const ParamStore& store) {
    std::lock_guard lock(mutex_);
    for (const auto& held : store.held()) {
      if (held.spec.per_expert && held.count == 0) continue;
      const at::Tensor grad = store.Get(held.spec.name).grad.clone();
      auto [it, fresh] = parts_[held.spec.name].emplace(held.first, grad);
      // Replicas hold the same sum, bit by bit.
      EXPECT_TRUE(fresh || at::equal(it->second, grad)) << held.spec.name;
      if (!held.spec.counts_load) continue;
      const at::Tensor value = store.Get(held.spec.name).master.clone();
      EXPECT_TRUE(fresh || at::equal(corrections_.at(held.spec.name), value)) << held.spec.name;
      corrections_[held.spec.name] = value;
    }
  }
  const std::map<std::string, at::Tensor>& corrections() const { return corrections_; }
  std::map<std::string, at::Tensor> Whole() const {
    std::map<std::string, at::Tensor> out;
    for (const auto& [name, parts] : parts_) {
      std::vector<at::Tensor> list;
      for (const auto& [first, part] : parts) list.push_back(part);
      out[name] = list.size() == 1 ? list[0] : at::cat(list, 0);
    }
    return out;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::map<int64_t, at::Tensor>> parts_;
  std::map<std::string, at::Tensor> corrections_;
};

}  // namespace

RunConfig TinyRun() {
  RunConfig c;
  ModelConfig& m = c.model;
  m.vocab_size = 32;
  m.hidden_size = 32;
  m.num_hidden_layers = 4;
  m.num_attention_heads = 4;
  m.num_key_value_heads = 2;
  m.head_dim = 8;
  m.num_experts = 7;
  m.num_experts_per_tok = 2;
  m.moe_intermediate_size = 24;
  m.intermediate_size = 40;
  m.initializer_range = 0.1;
  c.train.steps = 20;
  c.train.seq_length = 24;
  c.train.micro_batch_size = 3;
  c.train.micro_batches = 4;
  c.train.lr = 3e-3;
  c.train.eval_micro_batches = 2;
  c.train.lr_warmup_steps = 3;
  c.transport.kind = "inproc";
  c.transport.timeout_s = 20;
  c.device.type = "cpu";
  c.trace.steps = 0;
  c.data.path = DataPrefix();
  return c;
}

RunConfig TinyPackedRun() {
  RunConfig c = TinyRun();
  c.data.path = "";
  c.data.blend = {"0.3 " + DataPrefix(), "0.7 " + ShortDocuments()};
  c.data.documents = "apart";
  return c;
}

TestRun TrainInproc(const RunConfig& config, const std::function<void(ParamStore&)>& on_start) {
  Collector collector;
  RankContext base;
  base.write_files = false;
  base.on_start = on_start;
  base.on_gradients = [&](int64_t step, const ParamStore& store) {
    if (step == config.train.steps) collector.Take(store);
  };
  TestRun run;
  run.result = RunThreads(config, base);
  run.gradients = collector.Whole();
  run.corrections = collector.corrections();
  return run;
}

TestRun TrainReferenceForTest(const RunConfig& config, const std::function<void(ParamStore&)>& on_start) {
  Collector collector;
  RankContext context;
  Status status;
  context.status = &status;
  context.write_files = false;
  context.on_start = on_start;
  context.on_gradients = [&](int64_t step, const ParamStore& store) {
    if (step == config.train.steps) collector.Take(store);
  };
  TestRun run;
  run.result = TrainReference(config, context);
  run.gradients = collector.Whole();
  run.corrections = collector.corrections();
  return run;
}

void ExpectSameTraining(const TestRun& got, const TestRun& want, double loss_tolerance, double gradient_tolerance) {
  ASSERT_EQ(got.result.steps.size(), want.result.steps.size());
  for (size_t i = 0; i < want.result.steps.size(); ++i) {
    const auto& g = got.result.steps[i];
    const auto& w = want.result.steps[i];
    EXPECT_NEAR(g.loss, w.loss, loss_tolerance * std::abs(w.loss)) << "step " << w.step;
    EXPECT_NEAR(g.aux_loss, w.aux_loss, loss_tolerance * std::abs(w.aux_loss) + 1e-9) << "step " << w.step;
    EXPECT_NEAR(g.grad_norm, w.grad_norm, gradient_tolerance * w.grad_norm) << "step " << w.step;
  }
  ASSERT_EQ(got.result.held_out.size(), want.result.held_out.size());
  for (size_t i = 0; i < want.result.held_out.size(); ++i) {
    EXPECT_NEAR(got.result.held_out[i].loss, want.result.held_out[i].loss, loss_tolerance * want.result.held_out[i].loss);
  }
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (const auto& [name, grad] : want.gradients) {
    ASSERT_TRUE(got.gradients.contains(name)) << name;
    const double error = (got.gradients.at(name) - grad).norm().item<double>();
    EXPECT_LE(error, gradient_tolerance * grad.norm().item<double>() + 1e-9) << name;
  }
}

}  // namespace disagmoe
