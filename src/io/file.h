// Files: mapped for reading, and written so that nobody ever sees half of one. Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/error.h"

namespace disagmoe {

// The Error for a failed system call; for a full disk it says how much is free.
Error SystemError(const std::string& what, const std::string& path, int error_number);

// The folder that holds `path` ("." for a bare name), and the last part of `path`.
std::string ParentFolder(const std::string& path);
std::string BaseName(const std::string& path);
// Makes the names in a folder (creations, renames, removals) durable.
void SyncFolder(const std::string& folder);

// A whole regular file, read-only. An empty file has data() == nullptr.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// A regular file that is read in pieces: nothing stays in memory, and a disk that fails is an Error and no signal.
// Threads may read at the same time.
class FileReader {
 public:
  explicit FileReader(const std::string& path);
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;
  // All of them, or an Error.
  void ReadAt(uint64_t offset, void* data, size_t bytes) const;
  uint64_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  uint64_t size_ = 0;
  int fd_ = -1;
};

// Written as folder/.name.tmp; Close() makes the content durable, Publish() gives it its name. Destroyed before
// Publish(), it leaves nothing behind. The temporary file is locked: a second writer of the same name is an Error.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  // Takes the space now, where the file system can, so that a full disk shows before any work is done.
  void Reserve(uint64_t bytes);
  void Write(const void* data, size_t bytes);
  // For files that are filled in any order: the length first, then any part of it.
  void SetLength(uint64_t bytes);
  void WriteAt(uint64_t offset, const void* data, size_t bytes);
  void ReadAt(uint64_t offset, void* data, size_t bytes) const;
  void Close();
  void Publish();  // Close(), rename, sync of the folder
  const std::string& path() const { return path_; }
  const std::string& temporary_path() const { return temporary_; }

 private:
  std::string path_, temporary_;
  int fd_ = -1;
  bool published_ = false;
};

// A small text file, in one piece.
void WriteTextFile(const std::string& path, const std::string& text);
std::string ReadTextFile(const std::string& path, uint64_t max_bytes);

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  void Update(const void* data, size_t bytes);
  std::string Hex();  // once, at the end

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

}  // namespace disagmoe
