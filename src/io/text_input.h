// A text file, plain or gzip, as a stream of bytes. Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace disagmoe {

class TextInput {
 public:
  explicit TextInput(const std::string& path);
  ~TextInput();
  // Up to `bytes` bytes; 0 at the end. Throws Error: unreadable, damaged or cut short, or named .gz or .dz but not gzip.
  size_t Read(char* out, size_t bytes);
  // Bytes of the file itself read so far.
  int64_t Position() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace disagmoe
