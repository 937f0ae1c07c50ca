#include "io/checkpoint.h"

#include <set>

#include "base/rng.h"
#include "io/test_util.h"

namespace disagmoe {
namespace {

namespace fs = std::filesystem;

// A checkpoint of `ranks` files that hold the step; returns its manifest.
CheckpointManifest WriteFiles(const std::string& root, int64_t step, int ranks, size_t numbers = 10) {
  const std::string folder = PartialFolder(root, step);
  const std::vector<int64_t> values(numbers, step);
  CheckpointManifest manifest;
  manifest.step = step;
  manifest.layout = "layout \"L\"";
  manifest.config = "[train]\nsteps = 1\n";
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string path = folder + "/" + RankFileName(rank);
    const std::string sha = WriteSafetensors(
        path, {{"v", "I64", {static_cast<int64_t>(numbers)}, values.data(), numbers * 8}}, {{"rank", std::to_string(rank)}});
    manifest.files.push_back({RankFileName(rank), fs::file_size(path), sha});
  }
  return manifest;
}

std::string Publish(const std::string& root, int64_t step, int ranks, size_t numbers = 10) {
  return PublishCheckpoint(root, WriteFiles(root, step, ranks, numbers));
}

// Resolves `which`, verifies every hash and that all files hold one step, and returns that step.
int64_t LoadedStep(const std::string& root, const std::string& which) {
  const std::string folder = ResolveCheckpoint(root, which);
  const CheckpointManifest manifest = ReadManifest(folder);
  for (const CheckpointFile& file : manifest.files) {
    EXPECT_EQ(Sha256File(folder + "/" + file.name), file.sha256);
    const SafetensorsFile arrays(folder + "/" + file.name);
    EXPECT_EQ(*static_cast<const int64_t*>(arrays.Find("v").data), manifest.step);
  }
  EXPECT_FALSE(manifest.files.empty());
  return manifest.step;
}

void Has(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << text << "' lacks '" << part << "'";
}

TEST(Checkpoint, PublishAndResolve) {
  TemporaryFolder folder;
  const std::string root = folder / "checkpoints";
  EXPECT_EQ(PartialFolder(root, 20), root + "/.step-00000020.partial");
  EXPECT_EQ(RankFileName(3), "rank-00003.safetensors");
  EXPECT_EQ(Publish(root, 20, 2), root + "/step-00000020");
  EXPECT_EQ(ReadAll(root + "/latest"), "step-00000020\n");
  EXPECT_EQ(ListFolder(root), (std::vector<std::string>{"latest", "step-00000020"}));
  EXPECT_EQ(ListFolder(root + "/step-00000020"),
            (std::vector<std::string>{"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"}));
  EXPECT_EQ(ResolveCheckpoint(root, "latest"), root + "/step-00000020");
  EXPECT_EQ(ResolveCheckpoint("/elsewhere", root + "/latest"), root + "/step-00000020");
  const CheckpointManifest manifest = ReadManifest(root + "/step-00000020");
  EXPECT_EQ(manifest.step, 20);
  EXPECT_EQ(manifest.layout, "layout \"L\"");
  EXPECT_EQ(manifest.config, "[train]\nsteps = 1\n");
  ASSERT_EQ(manifest.files.size(), 2u);

  Publish(root, 123456789, 1);  // more than eight digits
  EXPECT_EQ(LoadedStep(root, "latest"), 123456789);
  EXPECT_EQ(LoadedStep(root, "step-00000020"), 20);
  EXPECT_EQ(LoadedStep("/nowhere", root + "/step-00000020/"), 20);
  // A copied folder under another name loads too.
  fs::copy(root + "/step-00000020", folder / "kept", fs::copy_options::recursive);
  EXPECT_EQ(LoadedStep(root, folder / "kept"), 20);
}

TEST(Checkpoint, IncompleteOnesAreNotPublished) {
  TemporaryFolder folder;
  const std::string& root = folder.path();
  Publish(root, 1, 2);
  CheckpointManifest manifest = WriteFiles(root, 2, 1);
  manifest.files.push_back({RankFileName(1), 100, std::string(64, '0')});
  Has(ErrorOf([&] { PublishCheckpoint(root, manifest); }), "rank-00001.safetensors): got No such file");
  manifest.files.pop_back();
  manifest.files[0].bytes += 1;
  Has(ErrorOf([&] { PublishCheckpoint(root, manifest); }), "incomplete checkpoint");
  EXPECT_EQ(LoadedStep(root, "latest"), 1);
  manifest.files[0].name = "../escape";
  EXPECT_THROW(PublishCheckpoint(root, manifest), InternalError);
}

TEST(Checkpoint, FilesOfOlderAttemptsAreDropped) {
  TemporaryFolder folder;
  const std::string& root = folder.path();
  WriteFiles(root, 5, 4);  // killed before it was published
  WriteAll(PartialFolder(root, 5) + "/.rank-00009.safetensors.tmp", "half");
  Publish(root, 5, 2);
  EXPECT_EQ(ListFolder(root + "/step-00000005"),
            (std::vector<std::string>{"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"}));
  WriteFiles(root, 6, 1);
  RemoveLeftovers(root);
  EXPECT_EQ(ListFolder(root), (std::vector<std::string>{"latest", "step-00000005"}));
}

TEST(Checkpoint, SameStepAgainReplaces) {
  TemporaryFolder folder;
  const std::string& root = folder.path();
  Publish(root, 7, 3);
  Publish(root, 8, 1);
  Publish(root, 7, 2);  // a run that went back to step 7
  EXPECT_EQ(ListFolder(root), (std::vector<std::string>{"latest", "step-00000007", "step-00000008"}));
  EXPECT_EQ(ReadManifest(ResolveCheckpoint(root, "latest")).files.size(), 2u);
  EXPECT_EQ(LoadedStep(root, "latest"), 7);
}

// Where folders cannot be swapped, the older one is set aside for a moment; a kill then leaves this.
TEST(Checkpoint, InterruptedReplacementLoads) {
  TemporaryFolder folder;
  const std::string& root = folder.path();
  Publish(root, 7, 3);
  WriteFiles(root, 7, 3);
  fs::rename(root + "/step-00000007", root + "/.step-00000007.old");
  EXPECT_EQ(LoadedStep(root, "latest"), 7);
  EXPECT_EQ(LoadedStep(root, "step-00000007"), 7);
  RemoveLeftovers(root);
  EXPECT_EQ(LoadedStep(root, "latest"), 7);
  Publish(root, 7, 1);
  EXPECT_EQ(ListFolder(root), (std::vector<std::string>{"latest", "step-00000007"}));
  EXPECT_EQ(ReadManifest(ResolveCheckpoint(root, "latest")).files.size(), 1u);
}

TEST(Checkpoint, PruningKeepsTheNewest) {
  TemporaryFolder folder;
  const std::string& root = folder.path();
  EXPECT_THROW(PruneCheckpoints(root, 1), Error);  // nothing was published
  for (int64_t step : {5, 20, 100, 123456789, 10}) Publish(root, step, 1);
  fs::copy(root + "/step-00000005", root + "/kept", fs::copy_options::recursive);
  fs::create_directory(root + "/step-00000001");  // not ours: no manifest
  fs::create_directory(root + "/step-7");
  // The run went back to step 10: what it left beyond stays.
  EXPECT_EQ(PruneCheckpoints(root, 2), std::vector<std::string>{});
  EXPECT_EQ(PruneCheckpoints(root, 1), std::vector<std::string>{"step-00000005"});
  Publish(root, 30, 2);
  EXPECT_EQ(PruneCheckpoints(root, 3), std::vector<std::string>{});
  EXPECT_EQ(PruneCheckpoints(root, 2), std::vector<std::string>{"step-00000010"});
  EXPECT_EQ(ListFolder(root), (std::vector<std::string>{"kept", "latest", "step-00000001", "step-00000020",
                                                        "step-00000030", "step-00000100", "step-123456789", "step-7"}));
  // By number, not by name; `latest` itself is never removed, however old.
  Publish(root, 123456790, 1);
  EXPECT_EQ(PruneCheckpoints(root, 1),
            (std::vector<std::string>{"step-00000020", "step-00000030", "step-00000100", "step-123456789"}));
  WriteAll(root + "/latest", "step-00000003\n");
  EXPECT_EQ(PruneCheckpoints(root, 1), std::vector<std::string>{});
  EXPECT_EQ(LoadedStep(root, "step-123456790"), 123456790);
  EXPECT_THROW(PruneCheckpoints(root, 0), InternalError);

  fs::create_directory(root + "/.step-00000009.pruned");  // of a run that was killed
  RemoveLeftovers(root);
  EXPECT_FALSE(fs::exists(root + "/.step-00000009.pruned"));
}

// Every byte of every file: the manifest has a hash of its own.
TEST(Checkpoint, CorruptBytesAreFound) {
  TemporaryFolder folder(FastFolder());
  const std::string& root = folder.path();
  Publish(root, 1, 2);
  for (const std::string name : {"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"}) {
    const std::string path = root + "/step-00000001/" + name, good = ReadAll(path);
    for (size_t i = 0; i < good.size(); ++i) {
      std::string bad = good;
      bad[i] ^= 1 << i % 8;
      WriteAll(path, bad);
      try {
        const CheckpointManifest manifest = ReadManifest(ResolveCheckpoint(root, "latest"));
        bool found = false;
        for (const CheckpointFile& file : manifest.files) {
          found |= Sha256File(root + "/step-00000001/" + file.name) != file.sha256;
        }
        // Of the manifest: a blank between two entries, or the key of the hash, says nothing.
        const bool harmless = name[0] == 'm' && manifest.step == 1 && manifest.layout == "layout \"L\"" &&
                              manifest.config == "[train]\nsteps = 1\n" && manifest.files.size() == 2;
        EXPECT_TRUE(found || harmless) << name << " byte " << i;
      } catch (const Error&) {
      }
    }
    WriteAll(path, good);
  }
  EXPECT_EQ(LoadedStep(root, "latest"), 1);
}

TEST(Checkpoint, ManifestsWithoutAHashLoad) {
  TemporaryFolder folder;
  Publish(folder.path(), 1, 1);
  const std::string path = folder / "step-00000001/manifest.json", good = ReadAll(path);
  const size_t at = good.rfind(",\n  \"sha256\"");
  ASSERT_NE(at, std::string::npos);
  WriteAll(path, good.substr(0, at) + "}");
  EXPECT_EQ(LoadedStep(folder.path(), "latest"), 1);
}

TEST(Checkpoint, SaysWhatIsWrong) {
  TemporaryFolder folder;
  const std::string& root = folder.path();
  const auto latest = [&] { return ErrorOf([&] { ResolveCheckpoint(root, "latest"); }); };
  Has(latest(), "no checkpoint (" + root + "/latest)");
  Has(ErrorOf([&] { ResolveCheckpoint(root, "step-00000001"); }),
      "no such checkpoint (" + root +
          "): got step-00000001, expected \"latest\", the name of a folder there (step-00000020), or the path of one");
  Has(ErrorOf([&] { ResolveCheckpoint(root, root + "/latest"); }), "no such checkpoint");
  Publish(root, 1, 2);
  Publish(root, 2, 2);
  const std::string file = root + "/step-00000002/rank-00001.safetensors";
  fs::resize_file(file, 10);
  Has(latest(), "rank-00001.safetensors): got 10 bytes, expected ");
  Has(latest(), "load " + root + "/step-00000001, which is complete");
  fs::remove(file);
  Has(latest(), "rank-00001.safetensors): got No such file");
  fs::remove_all(root + "/step-00000002");
  Has(latest(), "step-00000001");
  for (const char* text : {"", "../step-00000001", "other", ".step-00000001.old", "step-1/../step-00000001"}) {
    WriteAll(root + "/latest", text);
    Has(latest(), "damaged tracker file");
  }
  WriteAll(root + "/latest", "step-00000001");  // without the newline, as by hand
  EXPECT_EQ(LoadedStep(root, "latest"), 1);

  const std::string path = root + "/step-00000001/manifest.json", good = ReadAll(path);
  const auto manifest = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    WriteAll(path, text.replace(at, from.size(), to));
    return latest();
  };
  Has(manifest("disagmoe-checkpoint", "else"), "not a checkpoint of this version");
  Has(manifest("\"version\": 1", "\"version\": 2"), "not a checkpoint of this version");
  Has(manifest("\"step\": 1", "\"step\": \"1\""), "damaged manifest");
  Has(manifest("\"layout\"", "\"lay\""), "damaged manifest");
  Has(manifest("rank-00000", "../rank-00000"), "damaged manifest");
  Has(manifest("{", ""), "damaged manifest");
  for (size_t n = 0; n + 2 < good.size(); n += 7) {
    WriteAll(path, good.substr(0, n));
    Has(latest(), "manifest");
  }
}

TEST(Checkpoint, FullDiskKeepsThePreviousOne) {
  TemporaryFolder folder;
  const std::string root = folder / "disk";
  fs::create_directory(root);
  if (!MountTinyDisk(root, "1m")) GTEST_SKIP() << "mounting is not permitted";
  Publish(root, 1, 2, 1000);
  const std::string error = ErrorOf([&] { WriteFiles(root, 2, 1, 200000); });  // 1.6 MB
  Has(error, "No space left on device");
  Has(error, " bytes are free there");
  EXPECT_TRUE(ListFolder(PartialFolder(root, 2)).empty());
  EXPECT_EQ(LoadedStep(root, "latest"), 1);
  // No room for the manifest: the files fit, and leave less than a page.
  CheckpointManifest manifest = WriteFiles(root, 3, 1, 118000);
  manifest.config = std::string(100000, 'x');
  Has(ErrorOf([&] { PublishCheckpoint(root, manifest); }), "No space left on device");
  EXPECT_EQ(LoadedStep(root, "latest"), 1);
  RemoveLeftovers(root);
  Publish(root, 4, 1);
  EXPECT_EQ(LoadedStep(root, "latest"), 4);
  umount(root.c_str());
}

// Steps rise and fall back now and then, so that new folders and replaced ones are both met by the kills.
TEST(Checkpoint, KillAtRandomMomentsLeavesLatestUsable) {
  TemporaryFolder folder;
  const std::string& root = folder.path();
  Rng rng(8);
  int64_t step = 0;
  Publish(root, 0, 1);
  for (int round = 0; round < 20; ++round) {
    int turn = 0;
    const auto work = [&] {
      ++turn;
      Publish(root, step + turn % 3, 1 + turn % 2);
    };
    ASSERT_TRUE(RunAndKill(work, std::chrono::microseconds(rng.Below(40000))));
    const int64_t loaded = LoadedStep(root, "latest");
    EXPECT_GE(loaded, step);
    EXPECT_LE(loaded, step + 2);
    step = loaded;
    if (round % 3 == 0) RemoveLeftovers(root);
  }
  EXPECT_GT(step, 0);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kStride = 7;  // a fork costs 20 times as much there
#else
constexpr int kStride = 1;
#endif

// Publishes step `to` over a root whose latest is step 7 with one rank; returns which steps `latest` then named.
std::set<int64_t> KillEverywhere(int64_t to, Ended* ended) {
  TemporaryFolder folder(FastFolder());
  const std::string& root = folder.path();
  std::set<int64_t> latest;
  *ended = Ended::kKilled;
  for (int n = 0; *ended == Ended::kKilled && n < 2000; n += kStride) {
    Publish(root, 7, 1);
    *ended = KillAtSystemCall([&] { Publish(root, to, 2); }, n);
    latest.insert(LoadedStep(root, "latest"));
    if (n % 3 == 0) RemoveLeftovers(root);
    latest.insert(LoadedStep(root, "latest"));
  }
  return latest;
}

TEST(Checkpoint, KillAtEverySystemCallLeavesLatestUsable) {
  Ended ended;
  const std::set<int64_t> next = KillEverywhere(8, &ended);
  if (ended == Ended::kNotPermitted) GTEST_SKIP() << "ptrace is not permitted";
  EXPECT_EQ(ended, Ended::kByItself);
  EXPECT_EQ(next, (std::set<int64_t>{7, 8}));
  EXPECT_EQ(KillEverywhere(7, &ended), std::set<int64_t>{7});  // replaces the folder that latest names
  EXPECT_EQ(ended, Ended::kByItself);
}

// What has a name without a dot is whole at every moment.
TEST(Checkpoint, KillAtEverySystemCallOfPruning) {
  Ended ended = Ended::kKilled;
  std::set<size_t> left;
  for (int n = 0; ended == Ended::kKilled && n < 2000; n += kStride) {
    TemporaryFolder folder(FastFolder());
    const std::string& root = folder.path();
    for (int64_t step : {4, 5, 6, 7}) Publish(root, step, 2);
    ended = KillAtSystemCall([&] { PruneCheckpoints(root, 2); }, n);
    if (ended == Ended::kNotPermitted) GTEST_SKIP() << "ptrace is not permitted";
    for (int again = 0; again < 2; ++again) {
      const std::vector<std::string> names = ListFolder(root);
      for (const std::string& name : names) {
        if (!name.starts_with("step-")) continue;
        EXPECT_EQ(LoadedStep(root, name), std::stoll(name.substr(5)));
      }
      EXPECT_EQ(LoadedStep(root, "latest"), 7);
      EXPECT_EQ(LoadedStep(root, "step-00000006"), 6);
      if (again == 0) RemoveLeftovers(root);
      if (again == 1) left.insert(names.size());
    }
  }
  EXPECT_EQ(ended, Ended::kByItself);
  EXPECT_EQ(left, (std::set<size_t>{3, 4, 5}));  // `latest` and two to four checkpoints
}

}  // namespace
}  // namespace disagmoe
