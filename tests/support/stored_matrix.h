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
      : rows_(rows), cols_(cols), dtype_(dtype) {
    const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(cols);
    memory_.resize(count * dtype_bytes(dtype) + kOffset);
    for (size_t i = 0; i < count; ++i) {
      const float value = draw.signed_unit() * amplitude;
      const uint16_t half = dtype == Dtype::kF16 ? f32_to_f16(value) : f32_to_bf16(value);
      const void* from = dtype == Dtype::kF32 ? static_cast<const void*>(&value) : &half;
      std::memcpy(memory_.data() + kOffset + i * dtype_bytes(dtype), from, dtype_bytes(dtype));
    }
  }
  [[nodiscard]] Weight view() const { return {memory_.data() + kOffset, dtype_, rows_, cols_}; }
  [[nodiscard]] const void* data() const { return memory_.data() + kOffset; }
  [[nodiscard]] double at(int32_t row, int32_t col) const {
    return static_cast<double>(
        load_element(data(), dtype_, static_cast<size_t>(row) * static_cast<size_t>(cols_) + static_cast<size_t>(col)));
  }

 private:
  static constexpr size_t kOffset = 2;
  int32_t rows_;
  int32_t cols_;
  Dtype dtype_;
  std::vector<char> memory_;
};

}  // namespace moelora::test
