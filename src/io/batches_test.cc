#include <cmath>
#include <set>

#include "base/rng.h"
#include "io/batches.h"
#include "io/test_util.h"

namespace disagmoe {
namespace {

// Token t of the data is t, in documents of 7.
class Counting {
 public:
  explicit Counting(int32_t tokens) : data_(Make(folder_ / "x", tokens)) {}
  const Corpus& data() const { return data_; }

 private:
  static IndexedDataset Make(const std::string& prefix, int32_t tokens) {
    IndexedWriter writer(prefix, 1 << 30);
    for (int32_t t = 0; t < tokens; t += 7) {
      std::vector<int32_t> document;
      for (int32_t i = t; i < std::min(tokens, t + 7); ++i) document.push_back(i);
      writer.AddDocument(document);
    }
    writer.Finish();
    return IndexedDataset(prefix);
  }

  TemporaryFolder folder_;
  Corpus data_;
};

std::vector<int64_t> Train(const Batches& batches, int64_t g, int64_t seq_length) {
  std::vector<int64_t> out(static_cast<size_t>(seq_length) + 1);
  batches.Train(g, out.data());
  return out;
}

std::vector<int64_t> HeldOut(const Batches& batches, int64_t g, int64_t seq_length) {
  std::vector<int64_t> out(static_cast<size_t>(seq_length) + 1);
  batches.HeldOut(g, out.data());
  return out;
}

std::vector<int64_t> Range(int64_t begin, int64_t count) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(begin + i);
  return out;
}

std::vector<int64_t> Epoch(const Batches& batches, int64_t epoch, int64_t seq_length) {
  std::vector<int64_t> samples;
  for (int64_t i = 0; i < batches.train_samples(); ++i) {
    samples.push_back(Train(batches, epoch * batches.train_samples() + i, seq_length)[0] / seq_length);
  }
  return samples;
}

TEST(Batches, AnEpochVisitsEverySampleOnce) {
  const Counting counting(1000);
  const Batches batches(counting.data(), "1", 7, 5);
  ASSERT_EQ(batches.train_samples(), 142);  // floor(999 / 7)
  EXPECT_EQ(batches.held_out_samples(), 0);
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    std::set<int64_t> seen;
    for (int64_t i = 0; i < 142; ++i) {
      const std::vector<int64_t> sample = Train(batches, epoch * 142 + i, 7);
      EXPECT_EQ(sample[0] % 7, 0);
      EXPECT_EQ(sample, Range(sample[0], 8));
      seen.insert(sample[0] / 7);
    }
    EXPECT_EQ(seen.size(), 142u);
    EXPECT_EQ(*seen.rbegin(), 141);
  }
}

TEST(Batches, OrderDependsOnSeedAndEpochOnly) {
  const Counting counting(1000);
  const Batches a(counting.data(), "1", 5, 11), same(counting.data(), "1", 5, 11), other(counting.data(), "1", 5, 12);
  // Any order of calls: what a resumed run sees.
  for (int64_t g = 700; g >= 0; g -= 13) EXPECT_EQ(Train(a, g, 5), Train(same, g, 5));
  EXPECT_EQ(Epoch(a, 1, 5), Epoch(same, 1, 5));
  EXPECT_NE(Epoch(a, 0, 5), Epoch(a, 1, 5));
  EXPECT_NE(Epoch(a, 0, 5), Epoch(other, 0, 5));
  // Seeds and epochs are not shifted copies of one another.
  EXPECT_NE(Epoch(a, 1, 5), Epoch(other, 0, 5));
}

TEST(Batches, EverySizeIsAPermutation) {
  const Counting counting(270);
  for (int64_t n = 1; n <= 257; ++n) {
    // Weights that give exactly n + 1 tokens, so n samples of length 1.
    const Batches batches(counting.data(), std::to_string(n + 1) + ",0," + std::to_string(270 - n - 1), 1, 3);
    ASSERT_EQ(batches.train_samples(), n);
    std::vector<int64_t> epoch = Epoch(batches, n % 3, 1);
    std::sort(epoch.begin(), epoch.end());
    EXPECT_EQ(epoch, Range(0, n));
  }
}

// In k epochs of n samples each place should see each sample k/n times. The sum of (seen - k/n)^2 / (k/n), times
// (n-1)/n, is chi-square with (n-1)^2 degrees of freedom f: mean f, deviation sqrt(2 f). Five deviations are allowed.
TEST(Batches, OrderLooksRandom) {
  for (const int64_t n : {5, 12, 23}) {
    const Counting counting(static_cast<int32_t>(n + 1));
    const Batches batches(counting.data(), "1", 1, 77);
    const int64_t epochs = 4000;
    std::vector<double> seen(static_cast<size_t>(n * n));
    for (int64_t e = 0; e < epochs; ++e) {
      const std::vector<int64_t> order = Epoch(batches, e, 1);
      for (int64_t i = 0; i < n; ++i) seen[static_cast<size_t>(i * n + order[static_cast<size_t>(i)])] += 1;
    }
    const double expected = static_cast<double>(epochs) / static_cast<double>(n);
    double chi = 0;
    for (double s : seen) chi += (s - expected) * (s - expected) / expected;
    chi *= static_cast<double>(n - 1) / static_cast<double>(n);
    const double freedom = static_cast<double>((n - 1) * (n - 1));
    EXPECT_LT(chi, freedom + 5 * std::sqrt(2 * freedom)) << n;
    EXPECT_GT(chi, freedom - 5 * std::sqrt(2 * freedom)) << n;
  }
}

TEST(Batches, SplitsByTokens) {
  const Counting counting(1000);
  // 949 / 50 / 1 tokens: training samples start at 0, 10, ... 930; held-out ones at 949, 959, 969, 979.
  const Batches batches(counting.data(), "949,50,1", 10, 1);
  EXPECT_EQ(batches.train_samples(), 94);  // floor(948 / 10)
  EXPECT_EQ(batches.held_out_samples(), 4);  // floor(49 / 10)
  for (int64_t g = 0; g < 94; ++g) EXPECT_LT(Train(batches, g, 10).back(), 949);
  for (int64_t g = 0; g < 10; ++g) EXPECT_EQ(HeldOut(batches, g, 10), Range(949 + 10 * (g % 4), 11));

  const Batches fractions(counting.data(), "0.9, 0.1", 10, 1);
  EXPECT_EQ(fractions.train_samples(), 89);
  EXPECT_EQ(HeldOut(fractions, 0, 10), Range(900, 11));
  EXPECT_EQ(Batches(counting.data(), "3,1,0", 1, 1).train_samples(), 749);
  EXPECT_EQ(Batches(counting.data(), "100,0", 1, 1).held_out_samples(), 0);
  // Exactly one sample in each part.
  const Batches tight(counting.data(), "1,1", 499, 1);
  EXPECT_EQ(tight.train_samples(), 1);
  EXPECT_EQ(HeldOut(tight, 3, 499), Range(500, 500));
}

TEST(Batches, RefusesWhatCannotWork) {
  const Counting counting(1000);
  const auto error = [&](const std::string& split, int64_t seq_length) {
    return ErrorOf([&] { Batches batches(counting.data(), split, seq_length, 1); });
  };
  EXPECT_NE(error("1", 1000).find("training part of split \"1\"): got 1000 of 1000 tokens, expected at least 1000 + 1"),
            std::string::npos);
  EXPECT_EQ(error("1", 999), "");
  EXPECT_NE(error("949,50,1", 50).find("held-out part"), std::string::npos);
  EXPECT_EQ(error("949,50,1", 49), "");
  for (const char* split : {"", "a", "1,", ",1", "1,-1", "0,1", "0", "1e3", "1.2.3", ".", "1234567890", "0.1234567", "nan"}) {
    EXPECT_NE(error(split, 10).find("wrong split"), std::string::npos) << split;
  }
  EXPECT_NE(error("1", 0).find("sequence length"), std::string::npos);
  int64_t out[2];
  EXPECT_THROW(Batches(counting.data(), "1", 1, 1).HeldOut(0, out), InternalError);
  EXPECT_THROW(Batches(counting.data(), "1", 1, 1).Train(-1, out), InternalError);
}

// Data set i has documents of these lengths; its token t is 1000 i + t.
Corpus MakeBlend(const TemporaryFolder& folder, const std::vector<std::pair<std::string, std::vector<int64_t>>>& sets) {
  std::vector<std::string> blend;
  for (size_t i = 0; i < sets.size(); ++i) {
    const std::string prefix = folder / "set" + std::to_string(i);
    IndexedWriter writer(prefix, 1 << 20);
    int32_t token = static_cast<int32_t>(1000 * i);
    for (int64_t length : sets[i].second) {
      std::vector<int32_t> document;
      for (int64_t n = 0; n < length; ++n) document.push_back(token++);
      writer.AddDocument(document);
    }
    writer.Finish();
    blend.push_back(sets[i].first + " " + prefix);
  }
  return Corpus("", blend);
}

TEST(Batches, ABlendVisitsEachOfItsDataSetsInEpochs) {
  TemporaryFolder folder;
  const Corpus corpus = MakeBlend(folder, {{"0.6", {101}}, {"0.3", {201}}, {"0.1", {51}}});
  // Parts of 101 * 0.8 etc. tokens, 10 a sample: 8 - 1 = 7 training samples (80 tokens), 15 (160) and 3 (40).
  const Batches batches(corpus, "8,2", 10, 3);
  EXPECT_EQ(batches.train_samples(), 7 + 15 + 3);
  EXPECT_EQ(batches.held_out_samples(), 2 + 4 + 1);  // 21, 41 and 11 tokens
  std::vector<std::vector<int64_t>> drawn(3);
  for (int64_t g = 0; g < 400; ++g) {
    const std::vector<int64_t> sample = Train(batches, g, 10);
    const size_t set = static_cast<size_t>(sample[0] / 1000);
    EXPECT_EQ(sample, Range(sample[0], 11));
    drawn[set].push_back(sample[0] % 1000 / 10);
    EXPECT_EQ(sample[0] % 10, 0);
  }
  const std::vector<int64_t> of_epoch = {7, 15, 3};
  const double shares[] = {0.6, 0.3, 0.1};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(static_cast<double>(drawn[i].size()), 400 * shares[i], 1.68);
    for (size_t at = 0; at + static_cast<size_t>(of_epoch[i]) <= drawn[i].size(); at += static_cast<size_t>(of_epoch[i])) {
      std::vector<int64_t> epoch(drawn[i].begin() + static_cast<int64_t>(at), drawn[i].begin() + static_cast<int64_t>(at) + of_epoch[i]);
      std::sort(epoch.begin(), epoch.end());
      EXPECT_EQ(epoch, Range(0, of_epoch[i]));
    }
  }
  // What is held out of each is never trained on, and in the blend's ratios too.
  std::vector<int64_t> held_out(3);
  for (int64_t g = 0; g < 100; ++g) {
    const std::vector<int64_t> sample = HeldOut(batches, g, 10);
    const size_t set = static_cast<size_t>(sample[0] / 1000);
    const int64_t first[] = {80, 160, 40}, samples[] = {2, 4, 1};
    EXPECT_EQ(sample, Range(static_cast<int64_t>(1000 * set) + first[set] + 10 * (held_out[set]++ % samples[set]), 11));
  }
  EXPECT_NEAR(static_cast<double>(held_out[0]), 60, 1.68);
  EXPECT_NEAR(static_cast<double>(held_out[1]), 30, 1.68);
}

TEST(Batches, DataSetsOfABlendAreShuffledApart) {
  TemporaryFolder folder;
  const Corpus corpus = MakeBlend(folder, {{"1", {501}}, {"1", {501}}});
  const Batches batches(corpus, "1", 10, 3);
  std::vector<std::vector<int64_t>> drawn(2);
  for (int64_t g = 0; g < 100; ++g) {
    const int64_t first = Train(batches, g, 10)[0];
    drawn[static_cast<size_t>(first / 1000)].push_back(first % 1000);
  }
  EXPECT_NE(drawn[0], drawn[1]);
  // The first is shuffled as it is alone, so that a blend of one is data.path.
  const Corpus alone(folder / "set0", {});
  const Batches of_alone(alone, "1", 10, 3);
  for (int64_t g = 0; g < 50; ++g) EXPECT_EQ(Train(of_alone, g, 10)[0], drawn[0][static_cast<size_t>(g)]);
  const Corpus entry("", {"0.25 " + folder / "set0"});
  EXPECT_EQ(Train(Batches(entry, "1", 10, 3), 77, 10), Train(of_alone, 77, 10));
}

TEST(Batches, FingerprintTellsDataApart) {
  TemporaryFolder folder;
  const Corpus corpus = MakeBlend(folder, {{"0.7", {30}}, {"0.3", {20}}});
  EXPECT_EQ(corpus.Fingerprint(), "30 x 0.700000000, 20 x 0.300000000");
  EXPECT_EQ(Corpus("", {"14 " + folder / "set0" + " 6 " + folder / "set1"}).Fingerprint(), corpus.Fingerprint());
  EXPECT_EQ(Corpus(folder / "set1", {}).Fingerprint(), "20");
  EXPECT_EQ(corpus.num_tokens(), 50);
}

TEST(Batches, SaysWhichDataSetIsTooSmall) {
  TemporaryFolder folder;
  const Corpus corpus = MakeBlend(folder, {{"1", {500}}, {"1", {5}}});
  const std::string error = ErrorOf([&] { Batches batches(corpus, "1", 10, 3); });
  EXPECT_NE(error.find("training part of split \"1\" of " + folder / "set1"), std::string::npos) << error;
}

// Windows of 10 inputs over documents of random lengths, some empty: begins and counted labels, from the lengths alone.
TEST(Batches, KnowsWhereDocumentsBeginInASample) {
  TemporaryFolder folder;
  Rng rng(8);
  std::vector<std::pair<std::string, std::vector<int64_t>>> sets = {{"2", {}}, {"1", {}}};
  std::vector<std::set<int64_t>> starts(2);
  for (size_t i = 0; i < 2; ++i) {
    for (int64_t tokens = 0; tokens < 400;) {
      sets[i].second.push_back(static_cast<int64_t>(rng.Below(i == 0 ? 9 : 40)));
      if (sets[i].second.back() > 0) starts[i].insert(tokens);
      tokens += sets[i].second.back();
    }
  }
  const Corpus corpus = MakeBlend(folder, sets);
  const Batches apart(corpus, "3,1", 10, 3, true), joined(corpus, "3,1", 10, 3, false);
  for (bool held_out : {false, true}) {
    int64_t labels = 0;
    for (int64_t g = 0; g < 120; ++g) {
      int64_t tokens[11], same[11];
      std::vector<int64_t> begins, joined_begins;
      held_out ? apart.HeldOut(g, tokens, &begins) : apart.Train(g, tokens, &begins);
      held_out ? joined.HeldOut(g, same, &joined_begins) : joined.Train(g, same, &joined_begins);
      EXPECT_TRUE(std::equal(tokens, tokens + 11, same));
      EXPECT_EQ(joined_begins, std::vector<int64_t>{0});
      std::vector<int64_t> expected = {0};
      for (int64_t p = 1; p <= 10; ++p) {
        if (starts[static_cast<size_t>(tokens[0] / 1000)].contains(tokens[0] % 1000 + p)) expected.push_back(p);
      }
      EXPECT_EQ(begins, expected) << g;
      EXPECT_EQ(apart.Begins(held_out, g), expected);
      const int64_t counted = 10 - static_cast<int64_t>(expected.size()) + 1;
      EXPECT_EQ(apart.CountedLabels(held_out, g, 1), counted);
      labels += counted;
    }
    EXPECT_EQ(apart.CountedLabels(held_out, 0, 120), labels);
    EXPECT_EQ(joined.CountedLabels(held_out, 5, 7), 70);
  }
}

}  // namespace
}  // namespace disagmoe
