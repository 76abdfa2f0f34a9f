// SPDX-License-Identifier: Apache-2.0
// A regular file opened to be read, for as long as the object lives.
#pragma once

#include <sys/stat.h>

#include <string>

namespace moelora {

// Throws Error{kIo}: path, what could not be done, and why.
[[noreturn]] void fail_io(const std::string& path, const char* what, int error);

class RegularFile {
 public:
  // Throws Error{kIo} naming the path.
  explicit RegularFile(const std::string& path);
  ~RegularFile();
  RegularFile(const RegularFile&) = delete;
  RegularFile& operator=(const RegularFile&) = delete;

  [[nodiscard]] int descriptor() const { return descriptor_; }
  // As it is now. Throws Error{kIo}, also if it is not a regular file.
  [[nodiscard]] struct stat status() const;

 private:
  std::string path_;
  int descriptor_;
};

}  // namespace moelora
