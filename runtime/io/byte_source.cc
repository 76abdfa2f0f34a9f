// SPDX-License-Identifier: Apache-2.0
#include "runtime/io/byte_source.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include <fmt/format.h>

#include "kernels/base/error.h"

namespace moelora {
namespace {

// In the place of memory of no bytes, which may have no address.
constexpr std::byte kNothing{};

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

ByteSource::ByteSource(const std::string& path) : label_(path) {
  file_.emplace(path);
  stamp_ = stamp_of(file_->status());
  bytes_ = stamp_.bytes;
}

ByteSource::ByteSource(const std::byte* data, size_t bytes, std::string label)
    : label_(std::move(label)), data_(bytes == 0 ? &kNothing : data), bytes_(bytes) {}

const std::byte* ByteSource::read(uint64_t offset, size_t bytes, std::byte* scratch) const {
  MOELORA_ASSERT(offset <= bytes_ && bytes <= bytes_ - offset);
  if (is_memory()) {
    return data_ + offset;
  }
  for (size_t done = 0; done < bytes;) {
    const ssize_t got = ::pread(file_->descriptor(), scratch + done, bytes - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      fail_io(label_, "cannot read", errno);
    }
    if (got == 0) {
      fail_changed(label_);
    }
    done += static_cast<size_t>(got);
  }
  return scratch;
}

void ByteSource::check_unchanged() const {
  if (file_ && stamp_of(file_->status()) != stamp_) {
    fail_changed(label_);
  }
}

}  // namespace moelora
