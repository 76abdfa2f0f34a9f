// SPDX-License-Identifier: Apache-2.0
// Memory that tells on whoever touches what is not theirs: filled with 0xFF bytes, which are NaN in fp32, fp16 and bf16
// and absurd as an index, and followed by a guard. PoisonedRows is a matrix of activations with such padding
// after each row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/base/tensor.h"

namespace moelora::test {

class PoisonedBytes {
 public:
  explicit PoisonedBytes(size_t bytes) : bytes_(bytes) {
    const size_t capacity = (bytes + kGuard + 63) / 64 * 64;
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(64, capacity)));
    fill();
  }
  void fill() { std::memset(memory_.get(), 0xFF, bytes_ + kGuard); }
  [[nodiscard]] std::byte* data() const { return memory_.get(); }
  [[nodiscard]] size_t size() const { return bytes_; }
  [[nodiscard]] bool guard_intact() const { return untouched(memory_.get() + bytes_, kGuard); }
  static bool untouched(const void* memory, size_t bytes) {
    const auto* at = static_cast<const unsigned char*>(memory);
    return std::all_of(at, at + bytes, [](unsigned char value) { return value == 0xFF; });
  }

 private:
  static constexpr size_t kGuard = 64;
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  size_t bytes_;
  std::unique_ptr<std::byte, Free> memory_;
};

// [rows, width] fp32, stride a multiple of 64 bytes with at least 64 bytes of padding.
class PoisonedRows {
 public:
  PoisonedRows(int64_t num_rows, int64_t width)
      : num_rows_(num_rows),
        width_(width),
        stride_((width + 15) / 16 * 16 + 16),
        memory_(static_cast<size_t>(num_rows * stride_) * sizeof(float)) {}
  PoisonedRows(int64_t num_rows, int64_t width, const std::vector<float>& values) : PoisonedRows(num_rows, width) {
    for (int64_t t = 0; t < num_rows; ++t) {
      std::copy_n(values.begin() + t * width, width, row(t));
    }
  }

  [[nodiscard]] Rows view() const { return {memory_.data(), Dtype::kF32, stride_}; }
  [[nodiscard]] Rows view_from(int64_t first) const { return {row(first), Dtype::kF32, stride_}; }
  [[nodiscard]] float* row(int64_t t) const { return reinterpret_cast<float*>(memory_.data()) + t * stride_; }
  [[nodiscard]] int64_t num_rows() const { return num_rows_; }
  [[nodiscard]] int64_t width() const { return width_; }
  // All values in order, without padding.
  [[nodiscard]] std::vector<float> values() const {
    std::vector<float> result(static_cast<size_t>(num_rows_ * width_));
    for (int64_t t = 0; t < num_rows_; ++t) {
      std::copy_n(row(t), width_, result.begin() + t * width_);
    }
    return result;
  }
  [[nodiscard]] bool padding_intact() const {
    for (int64_t t = 0; t < num_rows_; ++t) {
      if (!PoisonedBytes::untouched(row(t) + width_, static_cast<size_t>(stride_ - width_) * sizeof(float))) {
        return false;
      }
    }
    return memory_.guard_intact();
  }

 private:
  int64_t num_rows_;
  int64_t width_;
  int64_t stride_;
  PoisonedBytes memory_;
};

}  // namespace moelora::test
