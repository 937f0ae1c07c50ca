// Which data set of a blend a sample is of: a function of the sample's number and the weights alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace disagmoe {

// "949" or "0.95" in millionths: weights are exact, so that no rounding differs between machines. Up to 9 digits and 6
// after the point, none negative; nothing if it is something else.
std::optional<int64_t> Millionths(const std::string& word);

struct BlendEntry {
  int64_t weight = 0;  // in millionths
  std::string prefix;
};
// {"0.7 data/a", "0.3 data/b"}, or all in one string as Megatron's --data-path has it. Throws Error.
std::vector<BlendEntry> ParseBlend(const std::vector<std::string>& blend);

// Of the first n samples, a data set with share w of the weights has w n, give or take less than 1.7, however many data
// sets there are. How: a tree whose leaves are the data sets, made by joining the two lightest nodes until one is left. Of
// n samples that come to a node, its left child gets the whole number nearest to its share, the right one the rest. An
// error of at most 1/2 made at a node reaches a leaf below scaled down by weights, leaf over child; weights grow on the
// way from a leaf to the root at least like Fibonacci's numbers (a node's sibling is as heavy as each of the node's
// children), so these errors add up to at most (1/1 + 1/1 + 1/2 + 1/3 + 1/5 + ...) / 2 = 1.68.
class Blend {
 public:
  explicit Blend(const std::vector<int64_t>& weights);  // above 0
  struct Place {
    size_t dataset = 0;
    int64_t sample = 0;  // how many samples before this one are of the same data set
  };
  Place Find(int64_t sample) const;

 private:
  struct Node {
    int64_t weight;
    size_t left, right;  // a leaf: both the data set's number
  };
  std::vector<Node> nodes_;  // leaves first, the root last
};

}  // namespace disagmoe
