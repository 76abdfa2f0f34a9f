// SPDX-License-Identifier: Apache-2.0
// safetensors files, mapped read-only or read by their header alone. Everything in the header is checked against the
// file before any tensor is handed out: header length, offsets inside the file, no overlap, no hole, sizes that match
// dtype and shape.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/io/byte_source.h"

namespace moelora {

// A tensor in a mapped file or in memory; borrowed from its SafetensorsFile.
struct StoredTensor {
  std::string name;
  std::string dtype;  // as in the file: "BF16", "F32", "U8", ...
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;  // null if its file was not read
  uint64_t offset = 0;              // of the first byte, from the start of the file
  size_t bytes = 0;
  [[nodiscard]] int64_t elements() const;
  [[nodiscard]] std::string shape_text() const;  // "[2, 3]"
};

class SafetensorsFile {
 public:
  // Throws Error{kIo} (cannot open), {kCorrupt} (any fault of the container; Git-LFS pointer and empty file are
  // named as such). Messages start with the path.
  static std::unique_ptr<SafetensorsFile> open(const std::string& path);
  // The JSON text of a header, checked for its length and nothing else.
  static std::string read_header(const ByteSource& source);
  // Over that text; nothing else of the source is read. Tensors have their data if the source is memory, which then
  // must outlive the object.
  static std::unique_ptr<SafetensorsFile> from_header(const std::string& header, const ByteSource& source);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  [[nodiscard]] const std::string& path() const;
  [[nodiscard]] const std::vector<StoredTensor>& tensors() const;         // in file order
  [[nodiscard]] const StoredTensor* find(const std::string& name) const;  // null = none
  [[nodiscard]] const std::byte* data() const;                            // the whole file; null if it was not read
  [[nodiscard]] size_t bytes() const;

 private:
  SafetensorsFile();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A model folder's checkpoint: model.safetensors.index.json decides which files are opened, else model.safetensors.
class Checkpoint {
 public:
  // Throws Error: kIo, kCorrupt, kUnsupported (only *.bin / *.pth, original layouts; named).
  static std::unique_ptr<Checkpoint> open(const std::string& dir);
  [[nodiscard]] const StoredTensor* find(const std::string& name) const;
  [[nodiscard]] const std::map<std::string, const StoredTensor*>& tensors() const { return tensors_; }
  [[nodiscard]] const std::vector<std::unique_ptr<SafetensorsFile>>& files() const { return files_; }

 private:
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, const StoredTensor*> tensors_;
};

}  // namespace moelora
