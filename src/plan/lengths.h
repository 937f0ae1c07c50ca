// How long sequences are: few lengths with their shares, given or made from recorded ones, and phases of a run.
//
// Shares are of the sequences. Of steps that all have the same number of tokens, each of sequences of one length, a
// length's share is StepShare: a step of long sequences has fewer of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cost/work.h"

namespace disagmoe {

struct LengthShare {
  int64_t tokens = 0;
  double share = 0;
};

struct Lengths {
  std::vector<LengthShare> buckets;  // ascending; shares sum to 1
  int64_t longest = 0;               // also of those that were recorded
  int64_t recorded = 0;              // sequences; 0: shares were given
  double square_error = 0;           // share of the recorded mean of s^2 that the buckets lack

  double Mean() const;        // E[s]
  double MeanSquare() const;  // E[s^2]
  double StepShare(size_t bucket) const {
    return buckets[bucket].share * static_cast<double>(buckets[bucket].tokens) / Mean();
  }
};

inline constexpr int kMostBuckets = 8;
inline constexpr int64_t kLongestSequence = int64_t{1} << 24;

// "4096" or "4k" (1024 each). Throws Error; `where` is the option.
int64_t ParseLength(const std::string& text, const std::string& where);
// "4k:0.5,8k:0.3,32k:0.2"; without weights all count alike. Throws Error, as all below.
Lengths ParseLengths(const std::string& text, const std::string& where = "--lengths");
// One length a line (empty lines and lines that begin with # are skipped), or a JSON array of numbers.
Lengths ReadLengths(const std::string& text, const std::string& where, int most_buckets = kMostBuckets);
// A file if there is one of this name, else as ParseLengths.
Lengths LoadLengths(const std::string& shares_or_path);
// Buckets of neighbouring lengths, each as long as its mean (rounded): E[s] stays, E[s^2] loses the variance within the
// buckets, and the cuts are those that lose least.
Lengths BucketsOf(std::vector<int64_t> recorded, int most_buckets = kMostBuckets);

// What sequences are packed with (Job::documents).
Documents DocumentsOf(const Lengths& lengths);

// A part of a run: so many steps of sequences of one length.
struct Phase {
  int64_t tokens = 0;
  int64_t steps = 0;
  friend bool operator==(const Phase&, const Phase&) = default;
};
// "4k:2000,16k:500", in order.
std::vector<Phase> ParsePhases(const std::string& text, const std::string& where = "--phases");

}  // namespace disagmoe
