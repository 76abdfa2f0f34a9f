// SPDX-License-Identifier: Apache-2.0
// A whole regular file read into memory of its own, for files that others may overwrite while this process lives: a
// mapping that is cut short would end the process, and one that is written to would change under its reader.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/base/stream.h"

namespace moelora {

// Two stamps of a path differ if the file was written or replaced between them (within what the file system's clock
// tells apart).
struct FileStamp {
  uint64_t device = 0, inode = 0, bytes = 0;
  int64_t modified_ns = 0, changed_ns = 0;
  bool operator==(const FileStamp&) const = default;
};
// Throws Error{kIo} naming the path.
FileStamp stamp_of(const std::string& path);
// Throws Error{kIo} saying that the file at `path` changed while it was read, if it has another stamp now.
void check_unchanged(const std::string& path, const FileStamp& stamp);

class FileBytes {
 public:
  // Opens once; `readers` read slices side by side. Throws Error{kIo} naming the path: cannot open or read, not a
  // regular file, or it changed meanwhile; {kNomem}.
  FileBytes(const std::string& path, Stream& readers);
  ~FileBytes();
  FileBytes(const FileBytes&) = delete;
  FileBytes& operator=(const FileBytes&) = delete;

  [[nodiscard]] const std::byte* data() const { return data_; }  // null of an empty file
  [[nodiscard]] size_t bytes() const { return stamp_.bytes; }
  [[nodiscard]] const FileStamp& stamp() const { return stamp_; }

 private:
  std::byte* data_ = nullptr;
  FileStamp stamp_;
};

}  // namespace moelora
