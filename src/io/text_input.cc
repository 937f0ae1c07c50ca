#include "io/text_input.h"

#include <errno.h>
#include <zlib.h>

#include <algorithm>

#include "base/error.h"
#include "io/file.h"

namespace disagmoe {

struct TextInput::Impl {
  ~Impl() {
    if (file) gzclose_r(file);
  }
  std::string path;
  gzFile file = nullptr;
};

TextInput::TextInput(const std::string& path) : impl_(std::make_unique<Impl>()) {
  impl_->path = path;
  errno = 0;
  impl_->file = gzopen(path.c_str(), "rb");
  if (!impl_->file) throw SystemError("cannot open the file", path, errno ? errno : ENOMEM);
  gzbuffer(impl_->file, 256 << 10);
  // zlib passes what is not gzip through as it is, which is right for plain text only.
  if ((path.ends_with(".gz") || path.ends_with(".dz")) && gzdirect(impl_->file)) {
    throw Error({"not a gzip file", path, {}, {}, "rename it if it is plain text"});
  }
}

TextInput::~TextInput() = default;

size_t TextInput::Read(char* out, size_t bytes) {
  const int n = gzread(impl_->file, out, static_cast<unsigned>(std::min<size_t>(bytes, size_t{1} << 30)));
  int code = Z_OK;
  const char* message = gzerror(impl_->file, &code);
  if (code == Z_ERRNO) throw SystemError("cannot read the file", impl_->path, errno);
  if (n < 0 || code != Z_OK) {
    throw Error({"damaged or incomplete gzip file", impl_->path, message, {}, {}});
  }
  return static_cast<size_t>(n);
}

int64_t TextInput::Position() const { return gzoffset(impl_->file); }

}  // namespace disagmoe
