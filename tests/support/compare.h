// SPDX-License-Identifier: Apache-2.0
// How results are judged: against doubles by the largest error relative to the largest expected magnitude, or bit for
// bit. A NaN anywhere is an infinite error.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace moelora::test {

// max |actual - expected| / max |expected|; 0 for two empty arrays.
inline double relative_error(const std::vector<float>& actual, const std::vector<double>& expected) {
  if (actual.size() != expected.size()) {
    return std::numeric_limits<double>::infinity();
  }
  double largest = 0.0;
  double error = 0.0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double difference = std::abs(static_cast<double>(actual[i]) - expected[i]);
    if (!std::isfinite(difference)) {
      return std::numeric_limits<double>::infinity();
    }
    error = std::max(error, difference);
    largest = std::max(largest, std::abs(expected[i]));
  }
  return largest > 0.0 ? error / largest : error;
}

inline bool same_bits(const float* a, const float* b, size_t count) {
  return count == 0 || std::memcmp(a, b, count * sizeof(float)) == 0;
}
inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && same_bits(a.data(), b.data(), a.size());
}

}  // namespace moelora::test
