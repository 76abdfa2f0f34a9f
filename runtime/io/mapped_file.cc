// SPDX-License-Identifier: Apache-2.0
// mmap of a whole regular file. Weights are read in long runs, so the kernel's default read-ahead suits them
// (MADV_RANDOM would fetch single pages, MADV_WILLNEED all of a model that may exceed memory).
#include "runtime/io/mapped_file.h"

#include <sys/mman.h>

#include <cerrno>

#include "runtime/io/regular_file.h"

namespace moelora {
namespace {

constexpr size_t kHugePageBytesMin = size_t{64} << 20;

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const RegularFile file(path);
  bytes_ = static_cast<size_t>(file.status().st_size);
  if (bytes_ == 0) {
    return;
  }
  void* data = ::mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
  if (data == MAP_FAILED) {
    fail_io(path, "cannot map", errno);
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
