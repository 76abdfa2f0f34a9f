// SPDX-License-Identifier: Apache-2.0
// A weight as a file would hold it: drawn values rounded to the stored type, at an address that is aligned to nothing
// but two bytes. at() gives the exact stored value for oracles.
#pragma once

#include <cstring>
#include <vector>

#include "kernels/base/tensor.h"
#include "tests/support/draw.h"

namespace moelora::test {

// Round to nearest even, normal range only; enough for drawn weights.
inline uint16_t f32_to_f16(float value) {
  const auto half = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
}

class StoredMatrix {
 public:
  StoredMatrix(int32_t rows, int32_t cols, Dtype dtype, Draw& draw, float amplitude = 1.0f)
      : StoredMatrix(rows, cols, dtype) {
    for (size_t i = 0; i < static_cast<size_t>(rows) * static_cast<size_t>(cols); ++i) {
      put(i, draw.signed_unit() * amplitude);
    }
  }
  // The given values, which must be exact in `dtype`.
  template <class At>
  StoredMatrix(int32_t rows, int32_t cols, Dtype dtype, const At& at) : StoredMatrix(rows, cols, dtype) {
    for (int32_t n = 0; n < rows; ++n) {
      for (int32_t k = 0; k < cols; ++k) {
        put(static_cast<size_t>(n) * static_cast<size_t>(cols) + static_cast<size_t>(k), static_cast<float>(at(n, k)));
      }
    }
  }
  // A row that must not be read: NaN in every type.
  void poison(int32_t row) {
    const size_t bytes = static_cast<size_t>(cols_) * dtype_bytes(dtype_);
    std::memset(memory_.data() + kOffset + static_cast<size_t>(row) * bytes, 0xff, bytes);
  }
  [[nodiscard]] Weight view() const { return {memory_.data() + kOffset, dtype_, rows_, cols_}; }
  [[nodiscard]] const void* data() const { return memory_.data() + kOffset; }
  [[nodiscard]] double at(int32_t row, int32_t col) const {
    return static_cast<double>(
        load_element(data(), dtype_, static_cast<size_t>(row) * static_cast<size_t>(cols_) + static_cast<size_t>(col)));
  }

 private:
  static constexpr size_t kOffset = 2;
  StoredMatrix(int32_t rows, int32_t cols, Dtype dtype) : rows_(rows), cols_(cols), dtype_(dtype) {
    memory_.resize(static_cast<size_t>(rows) * static_cast<size_t>(cols) * dtype_bytes(dtype) + kOffset);
  }
  void put(size_t index, float value) {
    const uint16_t half = dtype_ == Dtype::kF16 ? f32_to_f16(value) : f32_to_bf16(value);
    const void* from = dtype_ == Dtype::kF32 ? static_cast<const void*>(&value) : &half;
    std::memcpy(memory_.data() + kOffset + index * dtype_bytes(dtype_), from, dtype_bytes(dtype_));
  }
  int32_t rows_;
  int32_t cols_;
  Dtype dtype_;
  std::vector<char> memory_;
};

}  // namespace moelora::test
