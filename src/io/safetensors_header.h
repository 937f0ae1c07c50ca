// The header of a safetensors file as data: parsed with every check that needs no values, and made. Private to this folder.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace disagmoe {

class FileReader;

struct SafetensorsEntry {
  std::string name, dtype;
  std::vector<int64_t> shape;
  uint64_t begin = 0, bytes = 0;  // in the file
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their data
  std::map<std::string, std::string> metadata;
};

// The length of the JSON after these first (up to 8) bytes of a file, or an Error that says what the file is instead.
uint64_t SafetensorsJsonBytes(const std::string& path, std::string_view beginning, uint64_t file_bytes);
// Throws Error unless all holds that docs/formats.md says. `path` is for the message alone.
SafetensorsHeader ParseSafetensorsHeader(const std::string& path, std::string_view json, uint64_t file_bytes);
SafetensorsHeader ReadSafetensorsHeader(const FileReader& file);
// Sorts entries as Hugging Face's library does (wide types first, then by name), sets their begins, and returns length,
// JSON and padding. Names must differ and bytes fit shape and dtype.
std::string MakeSafetensorsHeader(std::vector<SafetensorsEntry>* entries, const std::map<std::string, std::string>& metadata);

// Bits of an element; 0 for a name that the format does not have.
int DtypeBits(const std::string& dtype);
// False if the size does not fit in 63 bits or is no whole number of bytes.
bool ArrayBytes(const std::vector<int64_t>& shape, int bits, uint64_t* bytes);

// A Git LFS pointer file instead of data? Throws Error with the command that helps.
void RefuseLfsPointer(const std::string& path, std::string_view beginning);

std::string ShapeText(const std::vector<int64_t>& shape);
// Names come from files: quoted, cut, and without control characters.
std::string ShownName(const std::string& text);

}  // namespace disagmoe
