// SPDX-License-Identifier: Apache-2.0
// A file mapped read-only for as long as the object lives. Opening reads nothing: pages come in when they are
// touched, so a model of any size opens at once. The descriptor is closed right after mapping, so that neither
// open files nor an exec of the host leak. Used for safetensors files.
#pragma once

#include <cstddef>
#include <string>

namespace moelora {

class MappedFile {
 public:
  // Throws Error{kIo} naming the path. An empty file maps to data() == nullptr, bytes() == 0.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  [[nodiscard]] const std::byte* data() const { return data_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  const std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace moelora
