// SPDX-License-Identifier: Apache-2.0
// A drawn matrix of MXFP4 as a gpt-oss file holds it: nibbles and scales in memory of their own, aligned to nothing.
// at() reads E2M1 and E8M0 by their definition, for oracles.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/support/draw.h"

namespace moelora::test {

inline double e2m1_number(int nibble) {
  const int exponent = nibble >> 1 & 3;
  const int mantissa = nibble & 1;
  const double magnitude = exponent == 0 ? 0.5 * mantissa : std::ldexp(1.0 + 0.5 * mantissa, exponent - 1);
  return (nibble & 8) != 0 ? -magnitude : magnitude;
}

class Mxfp4Matrix {
 public:
  static constexpr int32_t kGroup = 32;

  // Scales of 2^-6 to 2^-3, so that rows are of the order of 1.
  Mxfp4Matrix(int32_t rows, int32_t cols, Draw& draw) : cols_(cols) {
    const auto count = static_cast<size_t>(rows) * static_cast<size_t>(cols);
    nibbles_.resize(count / 2 + kOffset);
    scales_.resize(count / kGroup + kOffset);
    for (uint8_t& byte : nibbles_) {
      byte = static_cast<uint8_t>(draw.below(256));
    }
    for (uint8_t& scale : scales_) {
      scale = static_cast<uint8_t>(121 + draw.below(4));
    }
  }
  [[nodiscard]] uint8_t* nibbles(int32_t row) { return nibbles_.data() + kOffset + int64_t{row} * cols_ / 2; }
  [[nodiscard]] uint8_t* scales(int32_t row) { return scales_.data() + kOffset + int64_t{row} * cols_ / kGroup; }
  // A row that must not be read: whatever is made of it is infinite or NaN.
  void poison(int32_t row) {
    for (int32_t k = 0; k < cols_; ++k) {
      nibbles(row)[k / 2] = 0xff;
      scales(row)[k / kGroup] = 0xff;
    }
  }
  [[nodiscard]] double at(int32_t row, int32_t col) const {
    const int64_t element = int64_t{row} * cols_ + col;
    const int byte = nibbles_[static_cast<size_t>(kOffset + element / 2)];
    const int scale = scales_[static_cast<size_t>(kOffset + element / kGroup)];
    return e2m1_number(col % 2 == 0 ? byte & 15 : byte >> 4) * std::exp2(scale - 127);
  }

 private:
  static constexpr int64_t kOffset = 3;
  int32_t cols_;
  std::vector<uint8_t> nibbles_;
  std::vector<uint8_t> scales_;
};

}  // namespace moelora::test
