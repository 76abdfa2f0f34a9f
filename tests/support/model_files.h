// SPDX-License-Identifier: Apache-2.0
// Model folders for tests: a temporary folder, text files, copies of reference cases and a writer of safetensors files
// that can also write broken ones. The writer follows the format's description and shares no code with the reader.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace moelora::test {

class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "moelora_test_XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) {
      throw std::runtime_error("mkdtemp failed");
    }
    path_ = pattern;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline void write_file(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  if (!out) {
    throw std::runtime_error("cannot write " + path);
  }
}

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    throw std::runtime_error("cannot read " + path);
  }
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// The folder of a reference case's model.
inline std::string case_model(const std::string& name) {
  return std::string(MOELORA_SOURCE_DIR) + "/tests/data/cases/" + name + "/model";
}

inline void copy_folder(const std::string& from, const std::string& to) {
  std::filesystem::copy(from, to,
                        std::filesystem::copy_options::recursive | std::filesystem::copy_options::overwrite_existing);
}

// 8 bytes of length, the header, the data.
inline std::string safetensors_text(const std::string& header, const std::string& data) {
  std::string text;
  for (int i = 0; i < 8; ++i) {
    text += static_cast<char>((header.size() >> (8 * i)) & 0xFF);
  }
  return text + header + data;
}

class SafetensorsBuilder {
 public:
  void add(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape,
           const std::string& bytes) {
    std::string dims;
    for (const int64_t dim : shape) {
      dims += (dims.empty() ? "" : ",") + std::to_string(dim);
    }
    header_ += (header_.empty() ? "" : ",") + ("\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + dims) +
               "],\"data_offsets\":[" + std::to_string(data_.size()) + "," +
               std::to_string(data_.size() + bytes.size()) + "]}";
    data_ += bytes;
  }
  [[nodiscard]] std::string text() const { return safetensors_text("{" + header_ + "}", data_); }

 private:
  std::string header_;
  std::string data_;
};

}  // namespace moelora::test
