// SPDX-License-Identifier: Apache-2.0
// Bytes by their offset, of a regular file or of the caller's memory. For files that others may overwrite while this
// process lives: they are read and never mapped, since a mapping that is cut short would end the process, and one that
// is written to would change under its reader.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "runtime/io/regular_file.h"

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

class ByteSource {
 public:
  // Opens the file once. Throws Error{kIo} naming the path: cannot open, not a regular file.
  explicit ByteSource(const std::string& path);
  // Over memory that outlives the object; `label` stands for the path in messages.
  ByteSource(const std::byte* data, size_t bytes, std::string label);

  [[nodiscard]] const std::string& label() const { return label_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }
  // `bytes` at `offset`, which lie inside: of a file they are read to `scratch`, of memory `scratch` may be null and
  // is not used. Any threads at once. Throws Error{kIo}: cannot read, or the file is shorter now than when it was
  // opened.
  [[nodiscard]] const std::byte* read(uint64_t offset, size_t bytes, std::byte* scratch) const;
  [[nodiscard]] bool is_memory() const { return data_ != nullptr; }
  // Throws Error{kIo} if the file was written or cut short since it was opened.
  void check_unchanged() const;

 private:
  std::string label_;
  std::optional<RegularFile> file_;
  FileStamp stamp_;
  const std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace moelora
