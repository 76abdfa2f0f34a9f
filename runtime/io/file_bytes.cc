// SPDX-License-Identifier: Apache-2.0
#include "runtime/io/file_bytes.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "runtime/io/regular_file.h"

namespace moelora {
namespace {

constexpr size_t kSliceBytes = size_t{4} << 20;

[[noreturn]] void fail_changed(const std::string& path) {
  throw Error(Status::kIo, fmt::format("{}: changed while it was read", path));
}

int64_t nanoseconds(const timespec& time) {
  return int64_t{time.tv_sec} * 1000000000 + time.tv_nsec;
}

FileStamp stamp_of(const struct stat& info) {
  return {info.st_dev, info.st_ino, static_cast<uint64_t>(info.st_size), nanoseconds(info.st_mtim),
          nanoseconds(info.st_ctim)};
}

// 0, or the error; EIO stands for a file that ends early.
int read_slice(int fd, std::byte* to, size_t offset, size_t bytes, bool* short_file) {
  while (bytes > 0) {
    const ssize_t got = ::pread(fd, to, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      *short_file = got == 0;
      return got < 0 ? errno : EIO;
    }
    to += got;
    offset += static_cast<size_t>(got);
    bytes -= static_cast<size_t>(got);
  }
  return 0;
}

}  // namespace

FileStamp stamp_of(const std::string& path) {
  struct stat info{};
  if (::stat(path.c_str(), &info) != 0) {
    fail_io(path, "cannot read", errno);
  }
  return stamp_of(info);
}

void check_unchanged(const std::string& path, const FileStamp& stamp) {
  if (stamp_of(path) != stamp) {
    fail_changed(path);
  }
}

FileBytes::FileBytes(const std::string& path, Stream& readers) {
  const RegularFile file(path);
  stamp_ = stamp_of(file.status());
  if (stamp_.bytes == 0) {
    return;
  }
  void* memory = ::mmap(nullptr, stamp_.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(Status::kNomem, fmt::format("{}: no memory for its {} bytes", path, stamp_.bytes));
  }
  ::madvise(memory, stamp_.bytes, MADV_HUGEPAGE);
  data_ = static_cast<std::byte*>(memory);
  std::atomic<int> error{0};
  std::atomic<bool> is_short{false};
  readers.parallel_for((stamp_.bytes + kSliceBytes - 1) / kSliceBytes, [&](size_t slice, int) {
    const size_t at = slice * kSliceBytes;
    bool ended = false;
    const int failed = read_slice(file.descriptor(), data_ + at, at, std::min(kSliceBytes, stamp_.bytes - at), &ended);
    if (ended) {
      is_short = true;
    } else if (failed != 0) {
      error = failed;
    }
  });
  try {
    if (error != 0) {
      fail_io(path, "cannot read", error);
    }
    if (is_short || stamp_of(file.status()) != stamp_) {
      fail_changed(path);
    }
  } catch (...) {
    ::munmap(data_, stamp_.bytes);
    throw;
  }
}

FileBytes::~FileBytes() {
  if (data_ != nullptr) {
    ::munmap(data_, stamp_.bytes);
  }
}

}  // namespace moelora
