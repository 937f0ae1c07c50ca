#include "spec/config.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <utility>

// The library's distribution packages differ in whether they build it; header-only works with all of them.
#undef TOML_SHARED_LIB
#undef TOML_HEADER_ONLY
#define TOML_HEADER_ONLY 1
#include <toml++/toml.h>

#include "base/error.h"
#include "spec/config_keys.h"
#include "spec/hf_config.h"

namespace disagmoe {
namespace {

constexpr std::string_view kCommandLine = "command line";

std::string Quoted(const std::string& name) { return "'" + name + "'"; }

std::string Suggest(const std::string& nearest) {
  return nearest.empty() ? "`disagmoe train --help` lists all keys" : "did you mean '" + nearest + "'?";
}

std::string ReadFile(const std::string& path) {
  auto fail = [&](const std::string& reason) {
    throw Error({"cannot read the configuration", path, reason, "a TOML file", "configs/tiny.toml is an example"});
  };
  if (std::filesystem::is_directory(path)) fail("a folder");
  std::ifstream file(path);
  if (!file) fail(std::strerror(errno));
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// One line for a node of any kind, for "got".
std::string PrintNode(const toml::node& node) {
  switch (node.type()) {
    case toml::node_type::table: return "a table";
    case toml::node_type::array: return "an array";
    case toml::node_type::string: return TomlString(node.as_string()->get());
    case toml::node_type::integer: return std::to_string(node.as_integer()->get());
    case toml::node_type::floating_point: return TomlNumber(node.as_floating_point()->get());
    case toml::node_type::boolean: return node.as_boolean()->get() ? "true" : "false";
    default: return "a date or time";
  }
}

bool AssignRow(const toml::array& array, std::vector<int64_t>* row) {
  for (const toml::node& node : array) {
    if (!node.is_integer()) return false;
    row->push_back(node.as_integer()->get());
  }
  return true;
}

// An empty array has no rows; one of integers is one row.
bool AssignRows(const toml::node& node, IntRows* rows) {
  rows->clear();
  if (!node.is_array()) return false;
  const toml::array& array = *node.as_array();
  if (array.empty()) return true;
  if (array.front().is_integer()) return AssignRow(array, &rows->emplace_back());
  for (const toml::node& row : array) {
    if (!row.is_array() || !AssignRow(*row.as_array(), &rows->emplace_back())) return false;
  }
  return true;
}

bool AssignStrings(const toml::node& node, Strings* strings) {
  strings->clear();
  if (node.is_string()) {  // one
    strings->push_back(node.as_string()->get());
    return true;
  }
  if (!node.is_array()) return false;
  for (const toml::node& entry : *node.as_array()) {
    if (!entry.is_string()) return false;
    strings->push_back(entry.as_string()->get());
  }
  return true;
}

// Copies the node's value. False: another type; `fits` is false if an integer does not fit the field.
bool Assign(const toml::node& node, const ConfigValue& target, bool* fits) {
  return std::visit(
      [&](auto* out) {
        using T = std::remove_pointer_t<decltype(out)>;
        if constexpr (std::is_same_v<T, bool>) {
          if (!node.is_boolean()) return false;
          *out = node.as_boolean()->get();
        } else if constexpr (std::is_same_v<T, std::string>) {
          if (!node.is_string()) return false;
          *out = node.as_string()->get();
        } else if constexpr (std::is_same_v<T, double>) {
          if (!node.is_number()) return false;
          *out = node.is_integer() ? static_cast<double>(node.as_integer()->get()) : node.as_floating_point()->get();
        } else if constexpr (std::is_same_v<T, Ints>) {
          out->clear();
          return node.is_array() && AssignRow(*node.as_array(), out);
        } else if constexpr (std::is_same_v<T, IntRows>) {
          return AssignRows(node, out);
        } else if constexpr (std::is_same_v<T, Strings>) {
          return AssignStrings(node, out);
        } else {
          if (!node.is_integer()) return false;
          const int64_t value = node.as_integer()->get();
          *fits = std::in_range<T>(value);
          if (*fits) *out = static_cast<T>(value);
        }
        return true;
      },
      target);
}

class Loader : public ConfigOrigin {
 public:
  Loader(std::string path, std::string text) : path_(std::move(path)), text_(std::move(text)) {}

  RunConfig Load(const std::vector<std::string>& overrides) {
    ReadTables();
    for (const std::string& text : overrides) Override(text);
    if (!config_.model.from.empty()) TakeModel();
    CheckConfig(config_, *this);
    return config_;
  }

  std::string Where(std::string_view key) const override {
    const auto it = where_.find(key);
    return (it == where_.end() ? path_ + ", default of " : it->second + ", ") + std::string(key);
  }

 private:
  // The keys that model.from stands for, and the weights beside it. Keys that are given too take their place, unless there
  // are weights, of which they would not be true.
  void TakeModel() {
    const std::string from = config_.model.from;
    const NamedModel named = LoadHfModel(from);
    RunConfig read;
    read.model = named.hf.model;
    const bool weights = !named.folder.empty() && HasWeights(named.folder);
    const bool used = weights && (config_.train.init == "auto" || config_.train.init == named.folder);
    for (const ConfigKey& key : ConfigKeys()) {
      if (key.table() != "model" || !where_.contains(key.name) || key.name == "model.from") continue;
      const std::string given = TomlValue(key.value(config_)), theirs = TomlValue(key.value(read));
      if (used && given != theirs && !OfTraining(key.name)) {
        throw Error({"contradiction", Where(key.name), given, theirs + ", as in " + from,
                     "the weights there are of another model; train.init=random starts anew"});
      }
      Copy(key, config_, read);
    }
    config_.model = read.model;
    config_.model.from = from;
    if (config_.train.init != "auto") return;
    if (!named.folder.empty() && std::filesystem::is_directory(from) && !weights) {
      throw Error({"no weights", Where("model.from"), Quoted(from), "model.safetensors or model.safetensors.index.json in it",
                   "train.init=random starts from random weights"});
    }
    if (weights) config_.train.init = named.folder;
  }

  // What a config.json does not decide.
  static bool OfTraining(std::string_view key) {
    return key == "model.router_aux_loss" || key == "model.router_aux_loss_coef" || key == "model.initializer_range" ||
           key == "model.router_bias_update_rate";
  }

  static bool HasWeights(const std::string& folder) {
    namespace fs = std::filesystem;
    std::error_code error;
    return fs::exists(folder + "/model.safetensors", error) || fs::exists(folder + "/model.safetensors.index.json", error);
  }

  static void Copy(const ConfigKey& key, RunConfig& from, RunConfig& to) {
    std::visit(
        [&](auto* out) {
          using T = std::remove_pointer_t<decltype(out)>;
          *out = *std::get<T*>(key.value(from));
        },
        key.value(to));
  }

  void ReadTables() {
    toml::table root;
    try {
      root = toml::parse(text_);
    } catch (const toml::parse_error& error) {
      throw Error({"not valid TOML", At(error.source()), std::string(error.description()), {}, {}});
    }
    // The parser sorts by name; the first mistake in the file is the one to report.
    for (const auto& [name, node] : InOrderOfLines(root, "")) {
      const toml::table* table = node->as_table();
      if (FindConfigKey(name) != nullptr) {
        Set(name, *node, At(node->source()));
      } else if (IsTable(name) && table != nullptr) {
        for (const auto& [leaf, value] : InOrderOfLines(*table, name + ".")) Set(leaf, *value, At(value->source()));
      } else if (IsTable(name)) {
        throw Error({"wrong type", At(node->source()) + ", " + name, PrintNode(*node), "a table [" + name + "]", {}});
      } else if (table != nullptr || node->is_array_of_tables()) {
        const std::string nearest = NearestTable(name);
        throw Error({"unknown table", At(node->source()), "[" + name + "]", {},
                     nearest.empty() ? TableList() : "did you mean [" + nearest + "]?"});
      } else {
        UnknownKey(name, At(node->source()));
      }
    }
  }

  using Nodes = std::vector<std::pair<std::string, const toml::node*>>;
  static Nodes InOrderOfLines(const toml::table& table, const std::string& prefix) {
    Nodes nodes;
    for (const auto& [key, node] : table) nodes.emplace_back(prefix + std::string(key.str()), &node);
    auto position = [](const toml::node* n) { return std::pair(n->source().begin.line, n->source().begin.column); };
    std::sort(nodes.begin(), nodes.end(),
              [&](const auto& a, const auto& b) { return position(a.second) < position(b.second); });
    return nodes;
  }

  static bool IsTable(std::string_view name) {
    return std::any_of(ConfigKeys().begin(), ConfigKeys().end(), [&](const ConfigKey& k) { return k.table() == name; });
  }

  static std::string TableList() {
    std::string text = "tables are";
    std::string_view last;
    for (const ConfigKey& key : ConfigKeys()) {
      if (key.table() == last) continue;
      text += (last.empty() ? " [" : ", [") + std::string(key.table()) + "]";
      last = key.table();
    }
    return text;
  }

  std::string At(const toml::source_region& source) const { return path_ + ":" + std::to_string(source.begin.line); }

  [[noreturn]] static void UnknownKey(const std::string& name, const std::string& at) {
    throw Error({"unknown key", at, Quoted(name), {}, Suggest(NearestKey(name))});
  }

  void Set(const std::string& name, const toml::node& node, const std::string& at) {
    const ConfigKey* key = FindConfigKey(name);
    if (key == nullptr) UnknownKey(name, at);
    const std::string where = at + ", " + name;
    bool fits = true;
    if (!Assign(node, key->value(config_), &fits)) {
      throw Error({"wrong type", where, PrintNode(node), ExpectedValue(*key), {}});
    }
    const std::string got = fits ? OutOfRange(*key, config_) : PrintNode(node);
    if (!got.empty()) throw Error({"value not allowed", where, got, ExpectedValue(*key), {}});
    where_[name] = at;
  }

  void Override(const std::string& text) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos) {
      throw Error({"not an override", std::string(kCommandLine), Quoted(text), "table.key=value",
                   "for example train.steps=20 or out=DIR"});
    }
    auto trimmed = [](std::string s) {
      s.erase(0, s.find_first_not_of(" \t"));
      s.erase(s.find_last_not_of(" \t") + 1);
      return s;
    };
    const std::string name = trimmed(text.substr(0, equals)), value = trimmed(text.substr(equals + 1));
    const ConfigKey* key = FindConfigKey(name);
    if (key == nullptr) UnknownKey(name, std::string(kCommandLine));
    const ConfigValue target = key->value(config_);
    const bool is_string = std::holds_alternative<std::string*>(target) ||
                           (std::holds_alternative<Strings*>(target) && !value.starts_with('['));
    const bool bare = is_string && !value.starts_with('"') && !value.starts_with('\'');
    const std::optional<toml::table> parsed = ParseValue(bare ? TomlString(value) : value);
    if (!parsed) throw Error({"wrong type", std::string(kCommandLine) + ", " + name, TomlString(value), ExpectedValue(*key), {}});
    Set(name, *parsed->get("value"), std::string(kCommandLine));
  }

  // Nothing if it is not one TOML value.
  static std::optional<toml::table> ParseValue(const std::string& value) {
    try {
      toml::table table = toml::parse("value = " + value);
      if (table.size() == 1) return table;
    } catch (const toml::parse_error&) {
    }
    return std::nullopt;
  }

  const std::string path_, text_;
  RunConfig config_;
  std::map<std::string, std::string, std::less<>> where_;
};

class OnePlace : public ConfigOrigin {
 public:
  explicit OnePlace(const std::string& where) : where_(where) {}
  std::string Where(std::string_view key) const override { return where_ + ", " + std::string(key); }

 private:
  const std::string& where_;
};

}  // namespace

RunConfig LoadConfig(const std::string& path, const std::vector<std::string>& overrides) {
  return Loader(path, ReadFile(path)).Load(overrides);
}

RunConfig ParseConfig(const std::string& text, const std::string& where) { return Loader(where, text).Load({}); }

void CheckConfig(const RunConfig& config, const std::string& where) { CheckConfig(config, OnePlace(where)); }

std::string PrintConfig(const RunConfig& config) {
  RunConfig copy = config;
  std::string text;
  std::string_view table;
  const bool none = config.plan.cluster.empty() && config.plan.settings.empty();
  for (const ConfigKey& key : ConfigKeys()) {
    if (key.name == "model.from") continue;  // the other keys say all of it, wherever the file goes
    if (key.table() == "plan" && none) continue;
    if (key.table() != table) {
      table = key.table();
      text += "\n[" + std::string(table) + "]\n";
    }
    text += std::string(key.leaf()) + " = " + TomlValue(key.value(copy)) + "\n";
  }
  return text;
}

std::string ConfigHelp() {
  RunConfig defaults;
  std::string text;
  std::string_view table;
  for (const ConfigKey& key : ConfigKeys()) {
    if (key.table() != table) {
      table = key.table();
      text += "\n[" + std::string(table) + "]\n";
    }
    std::string line = "  " + std::string(key.leaf()) + " = " + TomlValue(key.value(defaults));
    if (line.size() < 38) line.resize(38, ' ');
    text += line + " # " + std::string(key.help);
    if (!key.choices.empty()) text += ": " + ExpectedValue(key);
    text += "\n";
  }
  return text;
}

}  // namespace disagmoe
