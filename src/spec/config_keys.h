// The table of configuration keys: what drives loading, overrides, checks of range, printing and help.
#pragma once

#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "spec/config.h"

namespace disagmoe {

using Ints = std::vector<int64_t>;
using IntRows = std::vector<std::vector<int64_t>>;  // in TOML an array of integers (one row) or of such arrays
using Strings = std::vector<std::string>;
using ConfigValue = std::variant<bool*, int*, int64_t*, uint64_t*, double*, std::string*, Ints*, IntRows*, Strings*>;

struct ConfigKey {
  std::string_view name;  // "train.lr"
  ConfigValue (*value)(RunConfig&);
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool min_excluded = false;
  bool max_excluded = false;
  std::vector<std::string_view> choices;  // of a string; empty: any
  bool may_be_empty = false;              // of a string without choices
  std::string_view help;

  std::string_view table() const { return name.substr(0, name.find('.') == name.npos ? 0 : name.find('.')); }
  std::string_view leaf() const { return name.substr(name.rfind('.') + 1); }
};

// In the order of the struct, `out` first (TOML wants keys of the root before tables).
const std::vector<ConfigKey>& ConfigKeys();
const ConfigKey* FindConfigKey(std::string_view name);

// "an integer from 1 to 1000", "\"fp32\" or \"bf16\"", ...
std::string ExpectedValue(const ConfigKey& key);
// Empty if the value that `config` has for the key is within its range, else what was got.
std::string OutOfRange(const ConfigKey& key, RunConfig& config);

// The nearest known key, or the nearest known table for a name such as "[trian]"; "" if nothing is near.
std::string NearestKey(std::string_view name);
std::string NearestTable(std::string_view name);

// TOML notation; doubles are the shortest that read back equal.
std::string TomlNumber(double value);
std::string TomlString(std::string_view text);
std::string TomlValue(const ConfigValue& value);

// Where a key got its value, for messages of cross-checks: "demo.toml:12, train.lr".
class ConfigOrigin {
 public:
  virtual ~ConfigOrigin() = default;
  virtual std::string Where(std::string_view key) const = 0;
};
void CheckConfig(RunConfig config, const ConfigOrigin& origin);

}  // namespace disagmoe
