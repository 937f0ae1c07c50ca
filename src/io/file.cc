#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include <openssl/evp.h>

#include "io/safetensors.h"

namespace disagmoe {
namespace {

struct Descriptor {
  explicit Descriptor(int value) : fd(value) {}
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
  Descriptor(const Descriptor&) = delete;
  int fd;
};

int OpenForReading(const std::string& path, uint64_t* size) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw SystemError("cannot open the file", path, errno);
  struct stat info;
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    throw Error({"not a regular file", path, {}, {}, {}});
  }
  *size = static_cast<uint64_t>(info.st_size);
  return fd;
}

void ReadAll(int fd, const std::string& path, uint64_t offset, void* data, size_t bytes) {
  char* p = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pread(fd, p, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw SystemError("cannot read the file", path, errno);
    if (n == 0) throw Error({"the file became shorter while it was read", path, {}, {}, {}});
    p += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<size_t>(n);
  }
}

}  // namespace

Error SystemError(const std::string& what, const std::string& path, int error_number) {
  ErrorParts parts{what, path, std::strerror(error_number), {}, {}};
  struct statvfs disk;
  if ((error_number == ENOSPC || error_number == EDQUOT) && ::statvfs(ParentFolder(path).c_str(), &disk) == 0) {
    const uint64_t free_bytes = static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize;
    parts.hint = std::to_string(free_bytes) + " bytes are free there: remove something or choose another folder";
  }
  return Error(std::move(parts));
}

std::string ParentFolder(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string BaseName(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

void SyncFolder(const std::string& folder) {
  Descriptor d(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (d.fd < 0) throw SystemError("cannot open the folder", folder, errno);
  // EINVAL: a file system without it (some network ones) has nothing to sync.
  if (::fsync(d.fd) != 0 && errno != EINVAL) throw SystemError("cannot sync the folder", folder, errno);
}

MappedFile::MappedFile(const std::string& path) : path_(path) {
  uint64_t size = 0;
  Descriptor d(OpenForReading(path, &size));
  if (size == 0) return;
  void* map = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, d.fd, 0);
  if (map == MAP_FAILED) throw SystemError("cannot map the file", path, errno);
  data_ = static_cast<const uint8_t*>(map);
  size_ = size;
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<uint8_t*>(data_), size_);
}

FileReader::FileReader(const std::string& path) : path_(path), fd_(OpenForReading(path, &size_)) {}

FileReader::~FileReader() { ::close(fd_); }

void FileReader::ReadAt(uint64_t offset, void* data, size_t bytes) const { ReadAll(fd_, path_, offset, data, bytes); }

AtomicFile::AtomicFile(const std::string& path) : path_(path) {
  const std::string folder = ParentFolder(path);
  const std::string temporary = (folder == "/" ? "" : folder) + "/." + BaseName(path) + ".tmp";
  fd_ = ::open(temporary.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd_ < 0) throw SystemError("cannot create the file", temporary, errno);
  if (::flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    ::close(fd_);
    throw Error({"another process is writing this file", path, {}, {}, {}});
  }
  temporary_ = temporary;
  if (::ftruncate(fd_, 0) != 0) {  // of a writer that was killed
    const int error_number = errno;
    ::close(fd_);
    throw SystemError("cannot empty the file", temporary, error_number);
  }
}

AtomicFile::~AtomicFile() {
  if (!published_) ::unlink(temporary_.c_str());
  if (fd_ >= 0) ::close(fd_);
}

void AtomicFile::Reserve(uint64_t bytes) {
  if (bytes == 0 || ::fallocate(fd_, FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(bytes)) == 0) return;
  if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG) {
    throw SystemError("no room for the file (" + std::to_string(bytes) + " bytes)", path_, errno);
  }
}

void AtomicFile::Write(const void* data, size_t bytes) {
  const char* p = static_cast<const char*>(data);
  while (bytes > 0) {
    // Linux writes at most 2 GiB a call; smaller pieces keep a signal's delay short.
    const ssize_t n = ::write(fd_, p, std::min<size_t>(bytes, size_t{64} << 20));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw SystemError("cannot write the file", path_, n < 0 ? errno : EIO);
    p += n;
    bytes -= static_cast<size_t>(n);
  }
}

void AtomicFile::SetLength(uint64_t bytes) {
  if (::ftruncate(fd_, static_cast<off_t>(bytes)) != 0) throw SystemError("cannot set the file's length", path_, errno);
}

void AtomicFile::WriteAt(uint64_t offset, const void* data, size_t bytes) {
  const char* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pwrite(fd_, p, std::min<size_t>(bytes, size_t{64} << 20), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw SystemError("cannot write the file", path_, n < 0 ? errno : EIO);
    p += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<size_t>(n);
  }
}

void AtomicFile::ReadAt(uint64_t offset, void* data, size_t bytes) const { ReadAll(fd_, path_, offset, data, bytes); }

void AtomicFile::Close() {
  if (fd_ < 0) return;
  if (::fsync(fd_) != 0) throw SystemError("cannot sync the file", path_, errno);
  if (::close(std::exchange(fd_, -1)) != 0) throw SystemError("cannot close the file", path_, errno);
}

void AtomicFile::Publish() {
  Close();
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) throw SystemError("cannot rename to the file", path_, errno);
  published_ = true;
  SyncFolder(ParentFolder(path_));
}

void WriteTextFile(const std::string& path, const std::string& text) {
  AtomicFile file(path);
  file.Write(text.data(), text.size());
  file.Publish();
}

std::string ReadTextFile(const std::string& path, uint64_t max_bytes) {
  uint64_t size = 0;
  Descriptor d(OpenForReading(path, &size));
  if (size > max_bytes) {
    throw Error({"the file is too large", path, std::to_string(size) + " bytes", "at most " + std::to_string(max_bytes), {}});
  }
  std::string text(size, '\0');
  size_t done = 0;
  while (done < size) {
    const ssize_t n = ::read(d.fd, text.data() + done, size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw SystemError("cannot read the file", path, errno);
    if (n == 0) break;
    done += static_cast<size_t>(n);
  }
  text.resize(done);
  return text;
}

struct Sha256::Context {
  EVP_MD_CTX* evp = nullptr;
  ~Context() { EVP_MD_CTX_free(evp); }
};

Sha256::Sha256() : context_(std::make_unique<Context>()) {
  context_->evp = EVP_MD_CTX_new();
  DM_CHECK(context_->evp && EVP_DigestInit_ex(context_->evp, EVP_sha256(), nullptr) == 1, "SHA-256 is not available");
}

Sha256::~Sha256() = default;

void Sha256::Update(const void* data, size_t bytes) {
  DM_CHECK(bytes == 0 || EVP_DigestUpdate(context_->evp, data, bytes) == 1, "SHA-256");
}

std::string Sha256::Hex() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int length = 0;
  DM_CHECK(EVP_DigestFinal_ex(context_->evp, digest, &length) == 1, "SHA-256");
  std::string hex;
  for (unsigned int i = 0; i < length; ++i) {
    hex += "0123456789abcdef"[digest[i] >> 4];
    hex += "0123456789abcdef"[digest[i] & 15];
  }
  return hex;
}

std::string Sha256File(const std::string& path) {
  uint64_t size = 0;
  Descriptor d(OpenForReading(path, &size));
  ::posix_fadvise(d.fd, 0, 0, POSIX_FADV_SEQUENTIAL);
  std::vector<char> piece(size_t{1} << 20);
  Sha256 sha;
  while (true) {
    const ssize_t n = ::read(d.fd, piece.data(), piece.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw SystemError("cannot read the file", path, errno);
    if (n == 0) return sha.Hex();
    sha.Update(piece.data(), static_cast<size_t>(n));
  }
}

}  // namespace disagmoe
