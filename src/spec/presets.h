// Files of presets/, built into the program. cmake/Presets.cmake makes their .cc.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace disagmoe {

struct PresetFile {
  std::string_view name;  // without folder and extension: "h800"
  std::string_view text;
};

// By name.
std::span<const PresetFile> ModelPresetFiles();    // presets/models/*.json
std::span<const PresetFile> ClusterPresetFiles();  // presets/clusters/*.toml

const PresetFile* FindPreset(std::span<const PresetFile> presets, std::string_view name);  // null: none
std::string PresetNames(std::span<const PresetFile> presets);                              // "a, b, c"
// "did you mean 'h800'?" or "" if nothing is near.
std::string NearestPreset(std::span<const PresetFile> presets, std::string_view name);

// Edits (insert, delete, change) from one word to the other.
int EditDistance(std::string_view a, std::string_view b);

// The whole file. Throws Error saying what could not be read.
std::string ReadSpecFile(const std::string& path, const std::string& what, const std::string& expected);

}  // namespace disagmoe
