#include "io/blend.h"

#include <functional>
#include <queue>
#include <sstream>
#include <utility>

#include "base/error.h"

namespace disagmoe {
namespace {

constexpr int64_t kUnit = 1000000;
constexpr int64_t kMostWeight = int64_t{1} << 61;  // of all data sets: twice that times a sample's number stays in 128 bits

Error BadBlend(const std::string& got, const std::string& expected) {
  return Error({"wrong blend of data sets", "data.blend", got, expected, "for example data.blend=\"0.7 data/a 0.3 data/b\""});
}

// Of n samples.
int64_t Share(int64_t n, int64_t weight, int64_t total) {
  return static_cast<int64_t>((2 * __int128{n} * weight + total) / (2 * __int128{total}));
}

}  // namespace

std::optional<int64_t> Millionths(const std::string& word) {
  const size_t point = word.find('.');
  const std::string whole = word.substr(0, point);
  std::string part = point == std::string::npos ? "" : word.substr(point + 1);
  const bool digits = (whole + part).find_first_not_of("0123456789") == std::string::npos;
  if (!digits || (whole + part).empty() || whole.size() > 9 || part.size() > 6) return std::nullopt;
  part.resize(6, '0');
  return (whole.empty() ? 0 : std::stoll(whole)) * kUnit + std::stoll(part);
}

std::vector<BlendEntry> ParseBlend(const std::vector<std::string>& blend) {
  std::vector<BlendEntry> entries;
  int64_t total = 0;
  for (const std::string& text : blend) {
    std::istringstream words(text);
    std::string weight, prefix;
    while (words >> weight) {
      const std::optional<int64_t> w = Millionths(weight);
      if (!w) {
        throw BadBlend("\"" + weight + "\"",
                       "weights of up to 9 digits, 6 of them after a point, each followed by a prefix without blanks");
      }
      if (!(words >> prefix)) throw BadBlend("\"" + weight + "\" at the end of \"" + text + "\"", "a prefix after each weight");
      if (*w == 0) throw BadBlend("weight 0 of " + prefix, "weights above 0, or no such data set");
      if (total > kMostWeight - *w) throw BadBlend("weights that are too large", "smaller ones");
      total += *w;
      entries.push_back({*w, prefix});
    }
  }
  if (entries.empty()) throw BadBlend("nothing", "weights and prefixes of .bin/.idx pairs");
  return entries;
}

Blend::Blend(const std::vector<int64_t>& weights) {
  using Entry = std::pair<int64_t, size_t>;  // weight, node; of equal weights the one that was there first
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> lightest;
  for (size_t i = 0; i < weights.size(); ++i) {
    DM_CHECK(weights[i] > 0, "weight of data set " + std::to_string(i));
    nodes_.push_back({weights[i], i, i});
    lightest.push({weights[i], i});
  }
  DM_CHECK(!nodes_.empty(), "a blend of nothing");
  while (lightest.size() > 1) {
    const size_t left = lightest.top().second;
    lightest.pop();
    const size_t right = lightest.top().second;
    lightest.pop();
    nodes_.push_back({nodes_[left].weight + nodes_[right].weight, left, right});
    lightest.push({nodes_.back().weight, nodes_.size() - 1});
  }
}

Blend::Place Blend::Find(int64_t sample) const {
  const Node* node = &nodes_.back();
  while (node->left != node->right) {
    const Node& left = nodes_[node->left];
    const int64_t before = Share(sample, left.weight, node->weight);
    const bool is_left = Share(sample + 1, left.weight, node->weight) > before;
    sample = is_left ? before : sample - before;
    node = is_left ? &left : &nodes_[node->right];
  }
  return {node->left, sample};
}

}  // namespace disagmoe
