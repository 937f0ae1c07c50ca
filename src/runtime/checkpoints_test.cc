// Checkpoints of runs: every layout's load into every other, asynchronous ones are those of their step, old ones go.
// Ranks are threads here (checkpoints_e2e_test.py: processes that are killed, full disks).
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <thread>

#include "base/rng.h"
#include "io/test_util.h"
#include "runtime/background.h"
#include "runtime/layouts_for_tests.h"
#include "runtime/local_run.h"
#include "runtime/state_io.h"

namespace disagmoe {
namespace {

namespace fs = std::filesystem;

struct Layout {
  const char* name;
  void (*change)(RunConfig&);
};

void Pools(RunConfig& c, int p_a, int p_f, int m, int n) {
  c.layout.p_a = p_a;
  c.layout.p_f = p_f;
  c.layout.m = m;
  c.layout.n = n;
}

// The first is the reference: one process.
const Layout kLayouts[] = {
    {"reference", nullptr},
    {"unequal_pools",
     [](RunConfig& c) {
       Pools(c, 3, 2, 2, 1);
       c.layout.head = "attention";
     }},
    {"uneven_experts_sharded",
     [](RunConfig& c) {
       Pools(c, 1, 2, 2, 3);
       c.layout.expert_counts = {{3, 0, 4}, {0, 7, 0}, {2, 2, 3}, {1, 0, 6}};
       c.train.shard_optimizer = true;
     }},
    {"colocated",
     [](RunConfig& c) {
       Pools(c, 2, 1, 2, 1);
       c.layout.colocated = true;
       c.layout.virtual_stages = 1;
     }},
    {"replicas",
     [](RunConfig& c) {
       Pools(c, 1, 1, 1, 2);
       c.layout.replicas = 2;
     }},
    {"replicas_sharded_uneven",
     [](RunConfig& c) {
       Pools(c, 2, 1, 1, 2);
       c.layout.replicas = 2;
       c.layout.expert_counts = {{5, 2}};
       c.train.shard_optimizer = true;
     }},
};

// Runs and writes files, silently.
RunResult Train(RunConfig config, const Layout& layout, const std::string& out, RankContext context = {}) {
  config.out = out;
  if (layout.change != nullptr) layout.change(config);
  CheckConfig(config, "test");
  testing::internal::CaptureStdout();
  Status status;
  context.status = &status;
  RunResult result;
  std::exception_ptr error;
  try {
    result = layout.change == nullptr ? TrainReference(config, context) : RunThreads(config, context);
  } catch (...) {
    error = std::current_exception();
  }
  testing::internal::GetCapturedStdout();
  if (error) std::rethrow_exception(error);
  return result;
}

RunConfig ShortRun() {
  RunConfig c = TinyRun();
  c.train.steps = 6;
  c.train.lr_decay_steps = 6;
  c.train.save = false;
  c.model.n_shared_experts = 1;
  c.model.first_k_dense_replace = 1;
  return c;
}

RunConfig Resumed(RunConfig c, const std::string& from) {
  c.train.resume = from;
  return c;
}

std::vector<std::string> Hashes(const std::string& folder) {
  std::vector<std::string> hashes;
  for (const CheckpointFile& file : ReadManifest(folder).files) {
    EXPECT_EQ(Sha256File(folder + "/" + file.name), file.sha256);
    hashes.push_back(file.sha256);
  }
  return hashes;
}

class Checkpoints : public testing::TestWithParam<Layout> {
 protected:
  TemporaryFolder folder_{FastFolder()};
};

// Saved in this layout after steps 2 (while training went on) and 4 (the last), loaded in all.
TEST_P(Checkpoints, LoadIntoEveryLayout) {
  const RunConfig whole = ShortRun();
  const RunResult want = Train(whole, kLayouts[0], folder_ / "whole");
  RunConfig first = whole;
  first.train.steps = 4;
  first.train.save = true;
  first.train.save_interval = 2;
  const std::string root = folder_ / "first/checkpoints";
  EXPECT_EQ(Train(first, GetParam(), folder_ / "first").checkpoint, root + "/step-00000004");
  EXPECT_EQ(ListFolder(root), (std::vector<std::string>{"latest", "step-00000002", "step-00000004"}));
  for (const Layout& layout : kLayouts) {
    for (const int64_t step : {2, 4}) {
      const std::string from = root + "/step-0000000" + std::to_string(step);
      const RunResult got = Train(Resumed(whole, from), layout, folder_ / "second");
      ASSERT_EQ(got.steps.size(), static_cast<size_t>(6 - step));
      for (size_t i = 0; i < got.steps.size(); ++i) {
        const StepRecord &g = got.steps[i], &w = want.steps[step + i];
        EXPECT_EQ(g.step, w.step);
        EXPECT_NEAR(g.loss, w.loss, 1e-5 * w.loss) << layout.name << " step " << g.step;
        EXPECT_NEAR(g.aux_loss, w.aux_loss, 1e-5 * w.aux_loss) << layout.name << " step " << g.step;
        EXPECT_NEAR(g.grad_norm, w.grad_norm, 1e-4 * w.grad_norm) << layout.name << " step " << g.step;
        EXPECT_EQ(g.lr, w.lr);
      }
      EXPECT_NEAR(got.held_out.back().loss, want.held_out.back().loss, 1e-5 * want.held_out.back().loss) << layout.name;
    }
  }
}

// To each other layout and back, without a step: every byte is as before.
TEST_P(Checkpoints, MoveThereAndBack) {
  RunConfig config = ShortRun();
  config.train.steps = 3;
  config.train.save = true;
  Train(config, GetParam(), folder_ / "here");
  const std::string here = folder_ / "here/checkpoints/step-00000003";
  const std::vector<std::string> hashes = Hashes(here);
  config.train.steps = 0;
  config.train.eval_micro_batches = 0;
  for (const Layout& layout : kLayouts) {
    const RunResult there = Train(Resumed(config, here), layout, folder_ / "there");
    EXPECT_EQ(there.checkpoint, folder_ / "there/checkpoints/step-00000003");
    EXPECT_TRUE(there.steps.empty());
    const RunResult back = Train(Resumed(config, there.checkpoint), GetParam(), folder_ / "back");
    EXPECT_EQ(Hashes(back.checkpoint), hashes) << layout.name;
  }
}

// Asynchronous or not: the same bytes.
TEST_P(Checkpoints, AsynchronousOnesAreThoseOfTheirStep) {
  RunConfig config = ShortRun();
  config.train.save = true;
  config.train.save_interval = 1;
  for (bool async : {false, true}) {
    config.train.async_save = async;
    Train(config, GetParam(), folder_ / (async ? "async" : "sync"));
  }
  for (int step = 1; step <= 6; ++step) {
    const std::string name = "/checkpoints/step-0000000" + std::to_string(step);
    EXPECT_EQ(Hashes(folder_ / "async" + name), Hashes(folder_ / "sync" + name)) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Checkpoints, testing::ValuesIn(kLayouts),
                         [](const auto& info) { return std::string(info.param.name); });

// It does not take the next save for one to be published.
TEST(CheckpointRuns, ArePublishedWhileTrainingGoesOn) {
  for (const Layout& layout : {kLayouts[0], kLayouts[2]}) {
    TemporaryFolder folder(FastFolder());
    RunConfig config = ShortRun();
    config.train.steps = 80;
    config.train.save = true;
    config.train.save_interval = 40;
    config.train.eval_micro_batches = 0;
    std::atomic<int> waits = 0;
    std::atomic<int64_t> seen = -1;
    RankContext context;
    context.on_gradients = [&](int64_t step, const ParamStore&) {
      if (step <= 40 || seen >= 0) return;
      if (fs::exists(folder / "checkpoints/latest")) {
        seen = step;
      } else if (++waits < 5000) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    };
    Train(config, layout, folder.path(), context);
    EXPECT_GT(seen, 40);
    EXPECT_LE(seen, 80);
  }
}

TEST(CheckpointRuns, OldOnesGo) {
  TemporaryFolder folder(FastFolder());
  RunConfig config = ShortRun();
  config.train.save = true;
  config.train.save_interval = 1;
  config.train.keep_checkpoints = 2;
  Train(config, kLayouts[4], folder.path());
  const std::string root = folder / "checkpoints";
  EXPECT_EQ(ListFolder(root), (std::vector<std::string>{"latest", "step-00000005", "step-00000006"}));
  // Resumed from the older one: it is there until the run's own are enough.
  config = Resumed(config, "step-00000005");
  config.train.steps = 0;
  config.train.keep_checkpoints = 1;
  Train(config, kLayouts[1], folder.path());
  EXPECT_EQ(ListFolder(root), (std::vector<std::string>{"latest", "step-00000005", "step-00000006"}));
  EXPECT_EQ(ReadAll(root + "/latest"), "step-00000005\n");
  config.train.steps = 8;
  config.train.save_interval = 0;
  Train(config, kLayouts[0], folder.path());
  EXPECT_EQ(ListFolder(root), (std::vector<std::string>{"latest", "step-00000008"}));
}

TEST(CheckpointRuns, WithoutSteps) {
  TemporaryFolder folder(FastFolder());
  RunConfig config = ShortRun();
  const RunResult want = Train(config, kLayouts[0], folder / "whole");
  config.train.steps = 0;
  config.train.save = true;
  for (const Layout& layout : kLayouts) {  // initialised, evaluated, saved: and trained elsewhere
    const RunResult start = Train(config, layout, folder / "start");
    ASSERT_EQ(start.held_out.size(), 1u);
    EXPECT_NEAR(start.held_out[0].loss, want.held_out[0].loss, 1e-5 * want.held_out[0].loss);
    EXPECT_EQ(start.checkpoint, folder / "start/checkpoints/step-00000000");
    const RunResult got = Train(Resumed(ShortRun(), start.checkpoint), kLayouts[3], folder / "go");
    EXPECT_NEAR(got.steps.back().loss, want.steps.back().loss, 1e-5 * want.steps.back().loss);
  }
  config.train.save = false;
  EXPECT_EQ(Train(config, kLayouts[1], folder / "nothing").checkpoint, "");
  EXPECT_FALSE(fs::exists(folder / "nothing/checkpoints/latest"));
}

// Whoever reads a corrupt file says so, wherever the byte is: here all of them are read.
TEST(CheckpointRuns, CorruptFilesAreRefused) {
  TemporaryFolder folder(FastFolder());
  RunConfig config = ShortRun();
  config.train.steps = 1;
  config.train.save = true;
  const std::string saved = Train(config, kLayouts[2], folder / "run").checkpoint;
  config.train.save = false;
  config.train.steps = 0;
  Rng rng(3);
  for (const CheckpointFile& file : ReadManifest(saved).files) {
    const std::string path = saved + "/" + file.name, good = ReadAll(path);
    for (int i = 0; i < 6; ++i) {
      const size_t at = i == 0 ? good.size() - 1 : rng.Below(i < 4 ? 2000 : good.size());  // headers and data
      std::string bad = good;
      bad[at] ^= 1 << rng.Below(8);
      WriteAll(path, bad);
      const std::string line = ErrorOf([&] { Train(Resumed(config, saved), kLayouts[0], folder / "again"); });
      EXPECT_NE(line.find(file.name), std::string::npos) << "byte " << at << ": " << line;
      EXPECT_TRUE(line.starts_with("a checkpoint file is corrupt") || line.starts_with("damaged safetensors file") ||
                  line.starts_with("unexpected dtype")) << "byte " << at << ": " << line;
    }
    WriteAll(path, good);
  }
}

TEST(Background, TellsWhatEndedTheWork) {
  Background work;
  EXPECT_TRUE(work.Ended());
  work.Start([] {});
  EXPECT_TRUE(work.Ended(10'000'000'000));
  work.Start([] { throw Error({"no room", "here", {}, {}, {}}); });
  const auto wait = [&] { work.Ended(10'000'000'000); };
  EXPECT_EQ(ErrorOf(wait), "no room (here)");
  EXPECT_EQ(ErrorOf(wait), "no room (here)");  // never lost
  EXPECT_THROW(work.Start([] {}), Error);
  Background other;
  other.Start([] { throw std::runtime_error("odd"); });
  EXPECT_THROW(other.Ended(10'000'000'000), InternalError);
}

// A run that fails must say so while a disk hangs.
TEST(Background, IsNotAwaitedForEver) {
  const auto release = std::make_shared<std::atomic<bool>>(false);
  const auto begin = std::chrono::steady_clock::now();
  {
    Background work;
    work.Start([release] {
      while (!*release) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    EXPECT_FALSE(work.Ended(1'000'000));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  *release = true;
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
}

}  // namespace
}  // namespace disagmoe
