#include "spec/trainable.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <memory>

#include "base/error.h"
#include "schedule/schedule.h"

namespace disagmoe {
namespace {

RunConfig Load(const std::string& text, const std::vector<std::string>& overrides = {}) {
  const std::string path = ::testing::TempDir() + "trainable_test_" + std::to_string(getpid()) + ".toml";
  std::ofstream(path) << text;
  const auto remove = [](const std::string* p) { unlink(p->c_str()); };
  const std::unique_ptr<const std::string, decltype(remove)> gone(&path, remove);
  return LoadConfig(path, overrides);
}

// Every generator can be said; those that the runtime does not execute are refused with what they need.
TEST(Trainable, SchedulesThatTrain) {
  for (const ScheduleName& known : ScheduleNames()) {
    const int groups = known.name == "dualpipe" ? 2 : 1;
    const Schedule schedule = Generate(known.name, {.num_layers = 4, .p_a = groups, .colocated = known.colocated},
                                       {.num_micro_batches = 8});
    EXPECT_EQ(MissingForSchedule(known.name).empty(), schedule.executable()) << known.name;
    const std::string colocated = std::string("layout.colocated=") + (known.colocated ? "true" : "false");
    const RunConfig config = Load("", {"schedule.name=" + known.name, colocated});
    std::string refusal;
    try {
      RequireTrainable(config, "run.toml");
    } catch (const Error& error) {
      refusal = error.what();
    }
    EXPECT_EQ(refusal.empty(), schedule.executable()) << known.name << refusal;
    if (known.name == "tutel") {
      EXPECT_EQ(refusal, "the runtime does not execute this schedule (run.toml, schedule.name): got \"tutel\", expected "
                         "\"auto\", \"af-pipe\", \"megatron-1f1b\", \"megatron-overlap\", \"af-pipe-zb\" or \"dualpipe-v\". "
                         "Hint: tutel needs stages cut into parts; `disagmoe simulate` does");
    }
  }
  const RunConfig early = Load("", {"schedule.name=megatron-overlap", "layout.colocated=true",
                                    "plan.settings=['delay_weights=false']"});
  EXPECT_THROW(RequireTrainable(early, "run.toml"), Error);
}

}  // namespace
}  // namespace disagmoe
