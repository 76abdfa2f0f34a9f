// SPDX-License-Identifier: Apache-2.0
// Oracle of rope_kv_write for the tests of all backends: one head of one row in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/support/stored_matrix.h"

namespace moelora::test {

// What holds for all heads of a test.
struct RopeFormula {
  int32_t head_dim;
  float clip;  // 0 = none
  bool norm;
  float eps;
  float rope_scale;
  const std::vector<float>& inv_freq;
};

// Clamp, norm, rotate; `value`: clamp alone.
inline std::vector<double> rope_head(const RopeFormula& formula, const float* in, int32_t position,
                                     const StoredMatrix& weight, bool value) {
  const int32_t dims = formula.head_dim;
  std::vector<double> x;
  double squares = 0.0;
  for (int32_t d = 0; d < dims; ++d) {
    double number = static_cast<double>(in[d]);
    if (formula.clip > 0.0f) {
      number = std::min(std::max(number, -static_cast<double>(formula.clip)), static_cast<double>(formula.clip));
    }
    squares += number * number;
    x.push_back(number);
  }
  if (value) {
    return x;
  }
  for (int32_t d = 0; d < dims && formula.norm; ++d) {
    x[static_cast<size_t>(d)] *= weight.at(0, d) / std::sqrt(squares / dims + static_cast<double>(formula.eps));
  }
  std::vector<double> y(x.size());
  for (int32_t i = 0; i < dims / 2; ++i) {
    const float angle = static_cast<float>(position) * formula.inv_freq[static_cast<size_t>(i)];
    const double c = std::cos(static_cast<double>(angle)) * static_cast<double>(formula.rope_scale);
    const double s = std::sin(static_cast<double>(angle)) * static_cast<double>(formula.rope_scale);
    const double a = x[static_cast<size_t>(i)];
    const double b = x[static_cast<size_t>(i + dims / 2)];
    y[static_cast<size_t>(i)] = a * c - b * s;
    y[static_cast<size_t>(i + dims / 2)] = b * c + a * s;
  }
  return y;
}

}  // namespace moelora::test
