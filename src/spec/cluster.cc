#include "spec/cluster.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <utility>
#include <variant>

#undef TOML_SHARED_LIB
#undef TOML_HEADER_ONLY
#define TOML_HEADER_ONLY 1
#include <toml++/toml.h>

#include "base/error.h"
#include "spec/config_keys.h"
#include "spec/presets.h"

namespace disagmoe {
namespace {

using Value = std::variant<int*, double*, std::string*>;

struct Key {
  std::string_view name;  // "gpu.peak_tflops"
  Value (*value)(ClusterSpec&);
  double min = 0, max = 0;
  bool min_excluded = false;
  bool needed = true;
  std::string_view help;

  std::string_view table() const { return name.substr(0, name.find('.') == name.npos ? 0 : name.find('.')); }
  std::string_view leaf() const { return name.substr(name.rfind('.') + 1); }
};

#define KEY(path) \
  Key { .name = #path, .value = [](ClusterSpec& c) -> Value { return &c.path; }, .help = {} }

Key Above0(Key key, double max, std::string_view help) {
  key.min_excluded = true;
  key.max = max;
  key.help = help;
  return key;
}
Key Number(Key key, double min, double max, std::string_view help) {
  key.min = min;
  key.max = max;
  key.help = help;
  return key;
}
// Below a thousandth it is a slip, and times come out that nobody waits for.
Key Share(Key key, std::string_view help) { return Number(key, 1e-3, 1, help); }
Key Optional(Key key) {
  key.needed = false;
  return key;
}

// In the order of printing. Strings: any, except topology.
const std::vector<Key>& Keys() {
  static const std::vector<Key> keys = {
      Optional(Number(KEY(name), 0, 0, "of the cluster")),
      Optional(Number(KEY(source), 0, 0, "where the numbers are from")),
      Optional(Number(KEY(gpus), 1, 1 << 20, "in all: part of a node, or whole nodes")),
      Number(KEY(gpus_per_node), 1, 1024, "GPUs of a node"),
      Above0(KEY(nvlink_gbytes_s), 1e6, "per GPU and direction"),
      Number(KEY(nvlink_latency_us), 0, 1e6, "of a message"),
      Number(KEY(nics_per_node), 1, 1024, "NICs of a node"),
      Above0(KEY(nic_gbytes_s), 1e6, "per NIC and direction"),
      Number(KEY(nic_latency_us), 0, 1e6, "of a message"),
      Optional(Number(KEY(topology), 0, 0, "rail: NIC i of every node on leaf switch i; flat: one switch")),
      Optional(Number(KEY(spine_oversubscription), 1, 1024, "2: the spine carries half of what the leaves send")),
      Number(KEY(gpu.name), 0, 0, ""),
      Above0(KEY(gpu.peak_tflops), 1e6, "dense, bf16"),
      Above0(KEY(gpu.memory_gb), 1e6, "1e9 bytes"),
      Above0(KEY(gpu.memory_gbytes_s), 1e6, "bandwidth of the memory"),
      Share(KEY(efficiency.attention_forward), "of peak_tflops"),
      Share(KEY(efficiency.attention_backward), "of peak_tflops"),
      Share(KEY(efficiency.gemm), "of peak_tflops"),
      Share(KEY(efficiency.grouped_gemm), "of peak_tflops, many rows"),
      Number(KEY(efficiency.grouped_gemm_half_rows), 0, 1e6, "rows of an expert at which half of that is reached"),
      Share(KEY(efficiency.memory), "of memory_gbytes_s"),
      Share(KEY(efficiency.all_to_all), "of nic_gbytes_s"),
      Share(KEY(efficiency.m2n), "of nic_gbytes_s"),
      Share(KEY(efficiency.point_to_point), "of nic_gbytes_s"),
      Share(KEY(efficiency.nvlink), "of nvlink_gbytes_s"),
      Share(KEY(efficiency.collective), "of nic_gbytes_s"),
      Number(KEY(efficiency.op_overhead_us), 0, 1e6, "launches and gaps of a forward stage"),
      Number(KEY(efficiency.message_overhead_us), 0, 1e6, "of an all-to-all or M2N call"),
      Number(KEY(efficiency.overlap_slowdown), 0, 10, "of computation beside communication"),
      Optional(Number(KEY(efficiency.source), 0, 0, "where these are from")),
  };
  return keys;
}
#undef KEY

const Key* FindKey(std::string_view name) {
  const auto it = std::find_if(Keys().begin(), Keys().end(), [&](const Key& k) { return k.name == name; });
  return it == Keys().end() ? nullptr : &*it;
}

bool IsTable(std::string_view name) {
  return !name.empty() && std::any_of(Keys().begin(), Keys().end(), [&](const Key& k) { return k.table() == name; });
}

std::string Limit(double value) {
  std::string text = TomlNumber(value);
  return text.ends_with(".0") ? text.substr(0, text.size() - 2) : text;
}

std::string Expected(const Key& key) {
  ClusterSpec spec;
  const Value value = key.value(spec);
  if (std::holds_alternative<std::string*>(value)) return key.name == "topology" ? "\"rail\" or \"flat\"" : "a string";
  const std::string kind = std::holds_alternative<int*>(value) ? "an integer " : "a number ";
  return kind + (key.min_excluded ? "above " : "from ") + Limit(key.min) + (key.min_excluded ? ", at most " : " to ") +
         Limit(key.max) + (key.help.empty() ? "" : " (" + std::string(key.help) + ")");
}

std::string PrintNode(const toml::node& node) {
  if (const auto* v = node.as_string()) return TomlString(v->get());
  if (const auto* v = node.as_integer()) return std::to_string(v->get());
  if (const auto* v = node.as_floating_point()) return TomlNumber(v->get());
  if (const auto* v = node.as_boolean()) return v->get() ? "true" : "false";
  return node.is_table() ? "a table" : node.is_array() ? "an array" : "a date or time";
}

std::string Hint(std::string_view name) {
  const std::string_view leaf = name.substr(name.rfind('.') + 1);
  const Key* nearest = nullptr;
  int best = 1 + static_cast<int>(leaf.size()) / 4;
  for (const Key& key : Keys()) {
    const int distance = EditDistance(leaf, key.leaf());
    if (distance <= best && distance < static_cast<int>(leaf.size())) best = distance - 1, nearest = &key;
  }
  return nearest == nullptr ? "presets/clusters/h800.toml has every key"
                            : "did you mean '" + std::string(nearest->name) + "'?";
}

class Parser {
 public:
  Parser(std::string where, int gpus) : where_(std::move(where)) { spec_.gpus = gpus; }

  ClusterSpec Parse(const std::string& text) {
    toml::table root;
    try {
      root = toml::parse(text);
    } catch (const toml::parse_error& error) {
      throw Error({"not valid TOML", At(error.source()), std::string(error.description()), {}, {}});
    }
    const bool given = spec_.gpus > 0;
    const int gpus = spec_.gpus;
    ReadTable(root, "");
    for (const Key& key : Keys()) {
      if (key.needed && !lines_.contains(key.name))
        throw Error({"missing key", where_ + ", " + std::string(key.name), {}, Expected(key), {}});
    }
    if (given) {
      spec_.gpus = gpus;
      lines_.erase("gpus");
    }
    CheckGpus();
    return spec_;
  }

 private:
  std::string At(const toml::source_region& source) const { return where_ + ":" + std::to_string(source.begin.line); }
  std::string At(std::string_view key) const {
    const auto it = lines_.find(key);
    return (it == lines_.end() ? where_ : it->second) + ", " + std::string(key);
  }

  void ReadTable(const toml::table& table, const std::string& prefix) {
    // The parser sorts by name; the first mistake in the file is the one to report.
    std::vector<std::pair<std::string, const toml::node*>> nodes;
    for (const auto& [key, node] : table) nodes.emplace_back(prefix + std::string(key.str()), &node);
    auto position = [](const toml::node* n) { return std::pair(n->source().begin.line, n->source().begin.column); };
    std::sort(nodes.begin(), nodes.end(),
              [&](const auto& a, const auto& b) { return position(a.second) < position(b.second); });
    for (const auto& [name, node] : nodes) {
      if (const Key* key = FindKey(name)) {
        Set(*key, *node);
      } else if (IsTable(name) && node->is_table()) {
        ReadTable(*node->as_table(), name + ".");
      } else if (node->is_table()) {
        throw Error({"unknown table", At(node->source()), "[" + name + "]", "[gpu] and [efficiency]", {}});
      } else {
        throw Error({"unknown key", At(node->source()), "'" + name + "'", {}, Hint(name)});
      }
    }
  }

  void Set(const Key& key, const toml::node& node) {
    const std::string at = At(node.source());
    const std::string where = at + ", " + std::string(key.name);
    auto wrong = [&](const char* what) { throw Error({what, where, PrintNode(node), Expected(key), {}}); };
    const Value value = key.value(spec_);
    if (auto* const* text = std::get_if<std::string*>(&value)) {
      if (!node.is_string()) wrong("wrong type");
      **text = node.as_string()->get();
      if (key.name == "topology" && **text != "rail" && **text != "flat") wrong("value not allowed");
    } else {
      const bool whole = std::holds_alternative<int*>(value);
      if (whole ? !node.is_integer() : !node.is_number()) wrong("wrong type");
      const double number =
          node.is_integer() ? static_cast<double>(node.as_integer()->get()) : node.as_floating_point()->get();
      const bool good =
          std::isfinite(number) && number <= key.max && (key.min_excluded ? number > key.min : number >= key.min);
      if (!good) wrong("value not allowed");
      if (whole) {
        *std::get<int*>(value) = static_cast<int>(number);
      } else {
        *std::get<double*>(value) = number;
      }
    }
    lines_[std::string(key.name)] = at;
  }

  void CheckGpus() const {
    const int gpus = spec_.gpus, node = spec_.gpus_per_node;
    if (gpus == 0) {
      throw Error({"missing number of GPUs", At("gpus"), {}, "an integer from 1 to 1048576",
                   where_.starts_with("preset ") ? "as in " + where_.substr(7) + "x" + std::to_string(16 * node) : ""});
    }
    if (gpus <= node || gpus % node == 0) return;
    const int below = gpus / node * node;
    throw Error({"nodes must be whole", At("gpus"), std::to_string(gpus) + " GPUs, " + std::to_string(node) + " a node",
                 std::to_string(below) + " or " + std::to_string(below + node), {}});
  }

  std::string where_;
  ClusterSpec spec_;
  std::map<std::string, std::string, std::less<>> lines_;  // "file:line" of each key that the file has
};

// "h800x128" is {"h800", 128}; a name without a number {name, 0}; a number that is none {name, -1}.
std::pair<std::string, int> SplitName(const std::string& name) {
  const size_t x = name.rfind('x');
  if (x == name.npos || x == 0 || x + 1 == name.size()) return {name, 0};
  int gpus = 0;
  const char *first = name.data() + x + 1, *last = name.data() + name.size();
  if (!std::all_of(first, last, [](char c) { return c >= '0' && c <= '9'; })) return {name, 0};
  const auto [end, error] = std::from_chars(first, last, gpus);
  const bool good = error == std::errc() && end == last && gpus >= 1 && gpus <= 1 << 20;
  return {name.substr(0, x), good ? gpus : -1};
}

}  // namespace

ClusterSpec ReadCluster(const std::string& toml, const std::string& where, int gpus) {
  ClusterSpec spec = Parser(where, gpus).Parse(toml);
  if (spec.name.empty()) spec.name = where;
  if (spec.source.empty()) spec.source = where;
  if (spec.efficiency.source.empty()) spec.efficiency.source = spec.source;
  return spec;
}

ClusterSpec LoadCluster(const std::string& name_or_path) {
  const std::filesystem::path path(name_or_path);
  if (path.extension() == ".toml") {
    const std::string text = ReadSpecFile(name_or_path, "cluster", "a TOML file like presets/clusters/h800.toml");
    ClusterSpec spec = ReadCluster(text, name_or_path);
    if (spec.name == name_or_path) spec.name = path.stem().string();
    return spec;
  }
  const auto [name, gpus] = SplitName(name_or_path);
  const PresetFile* preset = FindPreset(ClusterPresetFiles(), name);
  const std::string presets = PresetNames(ClusterPresetFiles());
  if (preset == nullptr) {
    throw Error({"unknown cluster",
                 {},
                 "'" + name_or_path + "'",
                 presets + ", with a number of GPUs as in h800x128; or a .toml file",
                 NearestPreset(ClusterPresetFiles(), name)});
  }
  if (gpus < 0)
    throw Error(
        {"not a number of GPUs", "cluster " + name_or_path, name_or_path.substr(name.size() + 1), "1 to 1048576", {}});
  ClusterSpec spec = ReadCluster(std::string(preset->text), "preset " + name, gpus);
  spec.name = name + "x" + std::to_string(spec.gpus);
  return spec;
}

std::vector<ClusterSpec> LoadClusters(const std::string& names_or_paths) {
  const size_t plus = names_or_paths.find('+');
  std::error_code ignored;
  if (plus == names_or_paths.npos || std::filesystem::exists(names_or_paths, ignored)) {
    return {LoadCluster(names_or_paths)};
  }
  const std::string first = names_or_paths.substr(0, plus), second = names_or_paths.substr(plus + 1);
  if (first.empty() || second.empty() || second.find('+') != second.npos) {
    throw Error({"not one or two clusters", {}, "'" + names_or_paths + "'",
                 "CLUSTER or CLUSTER+CLUSTER, the attention pool's and the FFN pool's, as in h800x64+h100x64", {}});
  }
  return {LoadCluster(first), LoadCluster(second)};
}

std::vector<Preset> ClusterPresets() {
  std::vector<Preset> presets;
  for (const PresetFile& file : ClusterPresetFiles()) {
    const ClusterSpec c = ReadCluster(std::string(file.text), "preset " + std::string(file.name), 1);
    presets.push_back({std::string(file.name),
                       c.gpu.name + ": " + Limit(c.gpu.peak_tflops) + " TFLOP/s, " + Limit(c.gpu.memory_gb) +
                           " GB at " + Limit(c.gpu.memory_gbytes_s) + " GB/s; nodes of " +
                           std::to_string(c.gpus_per_node) + ", NVLink " + Limit(c.nvlink_gbytes_s) + " GB/s, " +
                           std::to_string(c.nics_per_node) + " NICs of " + Limit(c.nic_gbytes_s) + " GB/s"});
  }
  return presets;
}

std::string PrintCluster(const ClusterSpec& cluster) {
  ClusterSpec copy = cluster;
  std::string text;
  std::string_view table;
  for (const Key& key : Keys()) {
    if (key.table() != table) {
      table = key.table();
      text += "\n[" + std::string(table) + "]\n";
    }
    const Value value = key.value(copy);
    text += std::string(key.leaf()) + " = ";
    if (auto* const* v = std::get_if<std::string*>(&value)) text += TomlString(**v);
    if (auto* const* v = std::get_if<double*>(&value)) text += TomlNumber(**v);
    if (auto* const* v = std::get_if<int*>(&value)) text += std::to_string(**v);
    text += "\n";
  }
  return text;
}

}  // namespace disagmoe
