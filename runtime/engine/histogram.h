// SPDX-License-Identifier: Apache-2.0
// How often a time fell into which of a few fixed ranges: what Prometheus calls a histogram.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace moelora {

class Histogram {
 public:
  // Upper bounds in seconds, from a step of a small model to an answer that takes a minute; the last range has none.
  static constexpr std::array<double, 15> kBounds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25,
                                                     0.5,   1,      2.5,   5,    10,    30,   60};

  void add(double seconds) {
    size_t range = 0;
    while (range < kBounds.size() && seconds > kBounds[range]) {
      ++range;
    }
    ++counts_[range];
    sum_ += seconds;
  }
  [[nodiscard]] uint64_t count(size_t range) const { return counts_[range]; }
  [[nodiscard]] double sum() const { return sum_; }

 private:
  std::array<uint64_t, kBounds.size() + 1> counts_ = {};
  double sum_ = 0;
};

}  // namespace moelora
