// SPDX-License-Identifier: Apache-2.0
#include "runtime/io/regular_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "kernels/base/error.h"

namespace moelora {

void fail_io(const std::string& path, const char* what, int error) {
  throw Error(Status::kIo, fmt::format("{}: {}: {}", path, what, std::strerror(error)));
}

// O_NONBLOCK: a FIFO in place of a file must not block the caller.
RegularFile::RegularFile(const std::string& path)
    : path_(path), descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (descriptor_ < 0) {
    fail_io(path, "cannot open", errno);
  }
}

RegularFile::~RegularFile() {
  ::close(descriptor_);
}

struct stat RegularFile::status() const {
  struct stat info{};
  if (::fstat(descriptor_, &info) != 0) {
    fail_io(path_, "cannot read", errno);
  }
  if (!S_ISREG(info.st_mode)) {
    throw Error(Status::kIo, fmt::format("{}: not a regular file", path_));
  }
  return info;
}

}  // namespace moelora
