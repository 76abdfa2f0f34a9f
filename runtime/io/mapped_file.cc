// SPDX-License-Identifier: Apache-2.0
// mmap of a whole regular file. Weights are read in long runs, so the kernel's default read-ahead suits them
// (MADV_RANDOM would fetch single pages, MADV_WILLNEED all of a model that may exceed memory).
#include "runtime/io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "kernels/base/error.h"

namespace moelora {
namespace {

constexpr size_t kHugePageBytesMin = size_t{64} << 20;

[[noreturn]] void fail(const std::string& path, const char* what, int error) {
  throw Error(Status::kIo, fmt::format("{}: {}: {}", path, what, std::strerror(error)));
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  // O_NONBLOCK: a FIFO in place of a file must not block the caller.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    fail(path, "cannot open", errno);
  }
  struct stat info{};
  if (::fstat(fd, &info) != 0) {
    const int error = errno;
    ::close(fd);
    fail(path, "cannot read", error);
  }
  if (!S_ISREG(info.st_mode)) {
    ::close(fd);
    throw Error(Status::kIo, fmt::format("{}: not a regular file", path));
  }
  bytes_ = static_cast<size_t>(info.st_size);
  if (bytes_ == 0) {
    ::close(fd);
    return;
  }
  void* data = ::mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, fd, 0);
  const int error = errno;
  ::close(fd);
  if (data == MAP_FAILED) {
    fail(path, "cannot map", error);
  }
  data_ = static_cast<const std::byte*>(data);
  // A wish only: where the file system holds large folios this saves most TLB misses of a decode step.
  if (bytes_ >= kHugePageBytesMin) {
    ::madvise(data, bytes_, MADV_HUGEPAGE);
  }
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) {
    ::munmap(const_cast<std::byte*>(data_), bytes_);
  }
}

}  // namespace moelora
