// With a stand-in for the program (a shell script), and with the real one where disagmoe-worker was built.
#include "cli/measure.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/time.h"
#include "cli/temporary_folder.h"

namespace disagmoe {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

// Whether it runs: an orphan that has ended may stay listed until somebody fetches it.
bool Lives(int pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  if (!std::getline(in, stat)) return false;
  const size_t name_end = stat.rfind(')');
  return name_end != std::string::npos && stat.compare(name_end, 3, ") Z") != 0;
}

class MeasureTest : public ::testing::Test {
 protected:
  // Our own place for temporary files, so that what is left there is ours.
  MeasureTest() : folder_("measure-test"), tmp_(folder_.path + "/tmp") {
    fs::create_directory(tmp_);
    setenv("TMPDIR", tmp_.c_str(), 1);
  }
  ~MeasureTest() override { unsetenv("TMPDIR"); }

  // A program that gets `train FILE key=value...`; $OUT is its out folder, which exists.
  MeasureOptions Script(const std::string& body) const {
    const std::string path = folder_.path + "/program";
    std::ofstream(path) << "#!/bin/bash\nfor w in \"$@\"; do case $w in out=*) OUT=${w#out=};; esac; done\n"
                           "mkdir -p $OUT; echo $$ >> " << folder_.path << "/pids; echo \"$*\" > " << folder_.path << "/words\n"
                        << body;
    fs::permissions(path, fs::perms::owner_all);
    MeasureOptions options;
    options.program = path;
    options.warm_up = 1;
    options.steps = 3;
    options.time_limit_s = 60;
    return options;
  }
  std::string ReadAll(const std::string& name) const {
    std::ifstream file(folder_.path + "/" + name);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // No folder, and none of the processes that said who they are.
  void ExpectNothingLeft() const {
    EXPECT_TRUE(fs::is_empty(tmp_));
    std::ifstream pids(folder_.path + "/pids");
    for (pid_t pid; pids >> pid;) {
      // Grandchildren end a moment after their parent.
      for (int i = 0; i < 1000 && Lives(pid); ++i) usleep(10'000);
      EXPECT_FALSE(Lives(pid)) << pid;
    }
  }

  TemporaryFolder folder_;
  std::string tmp_;
};

constexpr const char* kMetrics =
    "for s in 9 3 1 2; do echo \"{\\\"step\\\":1,\\\"step_seconds\\\":$s}\" >> $OUT/metrics.jsonl; done\n"
    "echo '{\"step\":4,\"held_out_loss\":1.5}' >> $OUT/metrics.jsonl\n";

TEST_F(MeasureTest, StepsAfterTheWarmUp) {
  MeasureOptions options = Script(kMetrics);
  options.data = "text";
  options.overrides = {"train.dtype=fp32"};
  const MeasuredStep m = MeasureStep("plan.toml", options);
  EXPECT_EQ(m.error, "");
  EXPECT_THAT(m.seconds, ElementsAre(3, 1, 2));
  EXPECT_EQ(m.median(), 2);
  EXPECT_EQ(m.fastest(), 1);
  EXPECT_EQ(m.spread(), 0.5);  // quartiles 1.5 and 2.5
  EXPECT_THAT(ReadAll("words"), testing::StartsWith("train plan.toml train.dtype=fp32 data.path=text data.blend=[] train.save=false "));
  EXPECT_THAT(ReadAll("words"), HasSubstr(" train.steps=4 out=" + tmp_));
  ExpectNothingLeft();
}

TEST_F(MeasureTest, ErrorsAreOneLine) {
  EXPECT_EQ(MeasureStep("f", Script("echo hello; echo 'disagmoe: error: no such thing (f)' >&2; exit 2")).error,
            "no such thing (f)");
  EXPECT_EQ(MeasureStep("f", Script("echo last words; kill -9 $$")).error, "last words");
  EXPECT_EQ(MeasureStep("f", Script("exit 3")).error, "the run ended: exit code 3");
  EXPECT_EQ(MeasureStep("f", Script("echo '{\"step_seconds\":1}' > $OUT/metrics.jsonl")).error,
            "the run ended after 1 steps");
  MeasureOptions options;
  options.program = "/nowhere/disagmoe";
  EXPECT_THAT(MeasureStep("f", options).error, HasSubstr("(/nowhere/disagmoe): got No such file or directory"));
  ExpectNothingLeft();
}

// The script's child is killed with it, as a rank would be by its launcher.
TEST_F(MeasureTest, TimeLimit) {
  MeasureOptions options = Script(
      "echo '{\"step_seconds\":1}' > $OUT/metrics.jsonl\n"
      "sleep 1000 & echo $! >> " + folder_.path + "/pids\ntrap 'kill $!; exit 1' TERM; wait\n");
  options.time_limit_s = 3;
  EXPECT_EQ(MeasureStep("f", options).error, "the time limit of 3 s: 1 of 4 steps were done");
  ExpectNothingLeft();
}

// Ctrl-C while it measures: the run ends, the folder goes, and the signal takes its course.
TEST_F(MeasureTest, SignalsEndTheRunFirst) {
  const MeasureOptions options = Script("exec sleep 1000");
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    MeasureAll({{"one", "f"}, {"two", "f"}}, 2, options);
    _exit(77);
  }
  const int64_t late = NowNs() + 20'000'000'000;
  while (ReadAll("pids").empty() && NowNs() < late) usleep(10'000);
  kill(pid, SIGINT);
  int status = 0;
  waitpid(pid, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT) << status;
  ExpectNothingLeft();
  const std::string pids = ReadAll("pids");
  EXPECT_EQ(std::count(pids.begin(), pids.end(), '\n'), 1) << "the second was not started";
}

// In turn, not one after the other; what fails is left out of later rounds.
TEST_F(MeasureTest, Rounds) {
  const MeasureOptions options =
      Script("echo $2 >> " + folder_.path + "/order; [ $2 = b ] && exit 1\n" + std::string(kMetrics));
  testing::internal::CaptureStderr();
  const std::vector<MeasuredStep> all = MeasureAll({{"A", "a"}, {"B", "b"}, {"C", "c"}}, 2, options);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "round 1/2, 1/3: A: 2.0000 s\nround 1/2, 2/3: B: the run ended: exit code 1\nround 1/2, 3/3: C: 2.0000 s\n"
            "round 2/2, 1/3: A: 2.0000 s\nround 2/2, 3/3: C: 2.0000 s\n");
  EXPECT_EQ(ReadAll("order"), "a\nb\nc\na\nc\n");
  ASSERT_EQ(all.size(), 3u);
  EXPECT_THAT(all[0].seconds, ElementsAre(3, 1, 2, 3, 1, 2));
  EXPECT_FALSE(all[1].ok());
  EXPECT_EQ(all[2].seconds.size(), 6u);
  ExpectNothingLeft();
}

// The real program: three layouts of a model of one layer, as threads of a process and as processes.
TEST_F(MeasureTest, RealRuns) {
  if (!MEASURE_TEST_HAS_WORKER) GTEST_SKIP() << "the light core alone has no disagmoe-worker";
  std::ofstream(folder_.path + "/book.txt") << std::string(4000, 'x');
  ASSERT_EQ(std::system((std::string(MEASURE_TEST_PROGRAM " data --out ") + folder_.path + "/text " + folder_.path +
                         "/book.txt > " + folder_.path + "/log").c_str()), 0);
  const auto write = [&](const std::string& name, const std::string& layout) {
    std::ofstream(folder_.path + "/" + name) << "[model]\nnum_hidden_layers = 1\nhidden_size = 32\nnum_experts = 4\n"
        "moe_intermediate_size = 32\n[train]\nseq_length = 16\nmicro_batches = 2\nmicro_batch_size = 2\n"
        "eval_interval = 1\neval_micro_batches = 1\nsave_interval = 1\n[layout]\n" << layout;
    return MeasuredFile{name, folder_.path + "/" + name};
  };
  MeasureOptions options;
  options.program = MEASURE_TEST_PROGRAM;
  options.data = folder_.path + "/text";
  options.warm_up = 1;
  options.steps = 2;
  options.overrides = {"transport.kind=inproc"};
  const std::vector<MeasuredFile> files = {write("1+1", "n = 1\n"), write("1+2", "n = 2\n"),
                                           write("colocated", "colocated = true\nm = 2\n")};
  for (const MeasuredStep& m : MeasureAll(files, 1, options)) {
    EXPECT_EQ(m.error, "");
    EXPECT_EQ(m.seconds.size(), 2u);
    EXPECT_GT(m.fastest(), 0);
  }
  EXPECT_THAT(MeasureStep(write("p_f", "p_f = 2\n").path, options).error,
              HasSubstr("layout.p_f): got 2, expected at most model.num_hidden_layers = 1"));
  options.time_limit_s = 0.001;
  EXPECT_THAT(MeasureStep(files[0].path, options).error, HasSubstr("the time limit of 0.001 s"));
  EXPECT_TRUE(fs::is_empty(tmp_));
}

}  // namespace
}  // namespace disagmoe
