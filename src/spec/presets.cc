#include "spec/presets.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <sstream>
#include <vector>

#include "base/error.h"

namespace disagmoe {

const PresetFile* FindPreset(std::span<const PresetFile> presets, std::string_view name) {
  for (const PresetFile& preset : presets)
    if (preset.name == name) return &preset;
  return nullptr;
}

std::string PresetNames(std::span<const PresetFile> presets) {
  std::string text;
  for (const PresetFile& preset : presets) text += (text.empty() ? "" : ", ") + std::string(preset.name);
  return text;
}

std::string NearestPreset(std::span<const PresetFile> presets, std::string_view name) {
  std::string lower(name);
  for (char& c : lower) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c == '_' ? '-' : c;
  const PresetFile* nearest = nullptr;
  int best = 0;
  for (const PresetFile& preset : presets) {
    // A beginning ("qwen3-235b") is nearer than any other word.
    const bool begins = lower.size() >= 3 && preset.name.starts_with(lower);
    const int distance = begins ? 0 : EditDistance(lower, preset.name);
    if (nearest == nullptr || distance < best) best = distance, nearest = &preset;
  }
  const bool near = nearest != nullptr && best <= 1 + static_cast<int>(lower.size()) / 4;
  return near ? "did you mean '" + std::string(nearest->name) + "'?" : "";
}

int EditDistance(std::string_view a, std::string_view b) {
  std::vector<int> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int change = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, change});
    }
  }
  return row[b.size()];
}

std::string ReadSpecFile(const std::string& path, const std::string& what, const std::string& expected) {
  const std::string title = "cannot read the " + what;
  if (std::filesystem::is_directory(path)) throw Error({title, path, "a folder", expected, {}});
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error({title, path, std::strerror(errno), expected, {}});
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace disagmoe
