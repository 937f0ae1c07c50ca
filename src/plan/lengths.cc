#include "plan/lengths.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "spec/presets.h"

namespace disagmoe {
namespace {

std::string Trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r");
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

std::vector<std::string> Split(const std::string& text, char by) {
  std::vector<std::string> out;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(by, at), text.size());
    out.push_back(Trimmed(text.substr(at, end - at)));
    at = end + 1;
  }
  return out;
}

// "4k:X": length and X, empty without a colon.
std::pair<int64_t, std::string> Item(const std::string& text, const std::string& where) {
  const size_t colon = text.find(':');
  const int64_t tokens = ParseLength(Trimmed(text.substr(0, colon)), where);
  return {tokens, colon == std::string::npos ? "" : Trimmed(text.substr(colon + 1))};
}

template <typename T>
bool Number(const std::string& text, T* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return !text.empty() && error == std::errc() && end == text.data() + text.size();
}

constexpr const char* kExpected = "lengths and weights such as 4k:0.5,8k:0.3,32k:0.2, or a file of lengths";

// Sorted, each length once, shares summing to 1.
Lengths Normalised(std::vector<LengthShare> given, const std::string& where) {
  std::stable_sort(given.begin(), given.end(), [](const auto& a, const auto& b) { return a.tokens < b.tokens; });
  double all = 0;
  for (const LengthShare& x : given) all += x.share;
  if (!(all > 0) || !std::isfinite(all)) {
    throw Error({"weights that share nothing out", where, std::to_string(all), "a sum above 0", ""});
  }
  Lengths out;
  for (const LengthShare& x : given) {
    if (x.share <= 0) continue;
    if (out.buckets.empty() || out.buckets.back().tokens != x.tokens) out.buckets.push_back({x.tokens, 0});
    out.buckets.back().share += x.share / all;
  }
  out.longest = out.buckets.back().tokens;
  return out;
}

// Recorded lengths, each once, with sums over those before it: of the number, s and s^2.
struct Sums {
  std::vector<int64_t> length;
  std::vector<double> count{0}, sum{0}, square{0};
  explicit Sums(const std::vector<int64_t>& sorted) {
    for (const int64_t s : sorted) {
      const auto x = static_cast<double>(s);
      if (length.empty() || length.back() != s) {
        length.push_back(s);
        for (auto* of : {&count, &sum, &square}) of->push_back(of->back());
      }
      count.back() += 1, sum.back() += x, square.back() += x * x;
    }
  }
  double Mean(size_t i, size_t j) const { return (sum[j] - sum[i]) / (count[j] - count[i]); }
  // Of the lengths [i, j): the sum of squares about their mean.
  double Loss(size_t i, size_t j) const {
    return i + 1 >= j ? 0 : std::max(0.0, square[j] - square[i] - (sum[j] - sum[i]) * Mean(i, j));
  }
};

// Best first length of the last of `k + 1` buckets for each end in [first, last], between `low` and `high`: it never
// moves back as the end grows, so halving finds all of a level in n log n.
struct Level {
  const Sums& sums;
  const std::vector<double>& before;  // loss of the best k buckets that end at each length
  std::vector<double>* loss;
  std::vector<size_t>* cut;

  void Fill(size_t first, size_t last, size_t low, size_t high) const {
    if (first > last) return;
    const size_t end = (first + last) / 2;
    double best = std::numeric_limits<double>::max();
    size_t at = low;
    for (size_t i = low; i <= std::min(high, end - 1); ++i) {
      const double x = before[i] + sums.Loss(i, end);
      if (x < best) best = x, at = i;
    }
    (*loss)[end] = best;
    (*cut)[end] = at;
    if (end > first) Fill(first, end - 1, low, at);
    Fill(end + 1, last, at, high);
  }
};

// First length of each bucket, and the number of lengths.
std::vector<size_t> Cuts(const Sums& sums, size_t buckets) {
  const size_t n = sums.length.size();
  std::vector<double> loss(n + 1, 0);
  for (size_t end = 1; end <= n; ++end) loss[end] = sums.Loss(0, end);
  std::vector<std::vector<size_t>> cuts{std::vector<size_t>(n + 1, 0)};
  for (size_t k = 1; k < buckets; ++k) {
    std::vector<double> next(n + 1, 0);
    std::vector<size_t> cut(n + 1, 0);
    Level{sums, loss, &next, &cut}.Fill(k + 1, n, k, n - 1);
    loss = std::move(next);
    cuts.push_back(std::move(cut));
  }
  std::vector<size_t> out{n};
  for (size_t k = buckets; k-- > 0;) out.insert(out.begin(), cuts[k][out.front()]);
  return out;
}

void CheckLength(double x, const std::string& where) {
  if (x >= 1 && x <= static_cast<double>(kLongestSequence) && x == std::floor(x)) return;
  char got[40];
  std::snprintf(got, sizeof got, "%g", x);
  throw Error({"not a length of a sequence", where, got,
               "a whole number of tokens from 1 to " + std::to_string(kLongestSequence), ""});
}

}  // namespace

double Lengths::Mean() const {
  double out = 0;
  for (const LengthShare& x : buckets) out += x.share * static_cast<double>(x.tokens);
  return out;
}

double Lengths::MeanSquare() const {
  double out = 0;
  for (const LengthShare& x : buckets) out += x.share * static_cast<double>(x.tokens) * static_cast<double>(x.tokens);
  return out;
}

int64_t ParseLength(const std::string& text, const std::string& where) {
  const bool thousands = !text.empty() && (text.back() == 'k' || text.back() == 'K');
  int64_t value = 0;
  if (Number(thousands ? text.substr(0, text.size() - 1) : text, &value) && value >= 1 && value <= kLongestSequence) {
    value *= thousands ? 1024 : 1;
    if (value <= kLongestSequence) return value;
  }
  throw Error(
      {"not a length of a sequence", where, "\"" + text + "\"", "tokens, such as 4096 or 4k, at most 16384k", ""});
}

Lengths ParseLengths(const std::string& text, const std::string& where) {
  std::vector<LengthShare> given;
  const std::vector<std::string> items = Split(text, ',');
  const bool weights = text.find(':') != std::string::npos;
  for (const std::string& item : items) {
    const auto [tokens, weight] = Item(item, where);
    double share = 1;
    if (weights && (!Number(weight, &share) || !(share >= 0) || !std::isfinite(share))) {
      throw Error({"not a weight", where, "\"" + item + "\"", kExpected, ""});
    }
    given.push_back({tokens, share});
  }
  Lengths out = Normalised(std::move(given), where);
  if (out.buckets.size() > kMostBuckets) {
    throw Error({"too many lengths", where, std::to_string(out.buckets.size()),
                 "at most " + std::to_string(kMostBuckets), "in a file any number of lengths is put into as many"});
  }
  return out;
}

Lengths BucketsOf(std::vector<int64_t> recorded, int most_buckets) {
  DM_CHECK(!recorded.empty() && most_buckets > 0, "lengths to put into buckets");
  std::sort(recorded.begin(), recorded.end());
  const Sums sums(recorded);
  const size_t n = sums.length.size();
  const std::vector<size_t> cuts = Cuts(sums, std::min(n, static_cast<size_t>(most_buckets)));
  std::vector<LengthShare> buckets;
  for (size_t k = 0; k + 1 < cuts.size(); ++k) {
    const double count = sums.count[cuts[k + 1]] - sums.count[cuts[k]];
    buckets.push_back({std::llround(sums.Mean(cuts[k], cuts[k + 1])), count});
  }
  Lengths out = Normalised(std::move(buckets), "lengths");
  out.longest = recorded.back();
  out.recorded = static_cast<int64_t>(recorded.size());
  out.square_error = 1 - out.MeanSquare() * static_cast<double>(out.recorded) / sums.square.back();
  return out;
}

Lengths ReadLengths(const std::string& text, const std::string& where, int most_buckets) {
  std::vector<int64_t> recorded;
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first != std::string::npos && text[first] == '[') {
    const nlohmann::json array = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!array.is_array()) {
      throw Error({"not a JSON array", where, "a text that begins with [", "numbers: [4096, 812, ...]", ""});
    }
    for (const nlohmann::json& x : array) {
      if (!x.is_number()) throw Error({"not a length of a sequence", where, x.dump().substr(0, 40), "a number", ""});
      CheckLength(x.get<double>(), where);
      recorded.push_back(x.get<int64_t>());
    }
  } else {
    const std::vector<std::string> lines = Split(text, '\n');
    for (size_t i = 0; i < lines.size(); ++i) {
      if (lines[i].empty() || lines[i][0] == '#') continue;
      const std::string line = where + ":" + std::to_string(i + 1);
      double x = 0;
      if (!Number(lines[i], &x)) {
        throw Error({"not a length of a sequence", line, "\"" + lines[i].substr(0, 40) + "\"",
                     "a number of tokens a line", ""});
      }
      CheckLength(x, line);
      recorded.push_back(static_cast<int64_t>(x));
    }
  }
  if (recorded.empty()) throw Error({"no lengths", where, "an empty file", "one length a line, or a JSON array", ""});
  return BucketsOf(std::move(recorded), most_buckets);
}

Lengths LoadLengths(const std::string& shares_or_path) {
  std::error_code ignored;
  if (std::filesystem::exists(shares_or_path, ignored)) {
    return ReadLengths(ReadSpecFile(shares_or_path, "lengths", "one length a line, or a JSON array"), shares_or_path);
  }
  if (shares_or_path.find_first_of("/.") != std::string::npos && shares_or_path.find(':') == std::string::npos) {
    throw Error({"no such file", "--lengths", shares_or_path, kExpected, ""});
  }
  return ParseLengths(shares_or_path);
}

Documents DocumentsOf(const Lengths& lengths) {
  Documents out;
  for (const LengthShare& x : lengths.buckets) out.emplace_back(x.tokens, x.share);
  return out;
}

std::vector<Phase> ParsePhases(const std::string& text, const std::string& where) {
  constexpr int64_t kMostSteps = 1'000'000'000;
  std::vector<Phase> out;
  for (const std::string& item : Split(text, ',')) {
    const auto [tokens, rest] = Item(item, where);
    Phase phase{tokens, 0};
    if (!Number(rest, &phase.steps) || phase.steps < 1 || phase.steps > kMostSteps) {
      throw Error({"not a phase", where, "\"" + item + "\"", "a length and its steps, such as 4k:2000", ""});
    }
    out.push_back(phase);
  }
  return out;
}

}  // namespace disagmoe
