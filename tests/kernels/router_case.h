// SPDX-License-Identifier: Apache-2.0
// Oracle of router_topk for the tests of all backends: a full sort and a softmax in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/compare.h"

namespace moelora::test {

inline void check_row(const float* logits, int32_t num_experts, const int32_t* ids, const float* weights, int32_t top_k,
                      bool renormalize, double tolerance) {
  std::vector<int32_t> order(static_cast<size_t>(num_experts));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  REQUIRE(std::equal(ids, ids + top_k, order.begin()));
  double total = 0.0;
  const auto counted = static_cast<size_t>(renormalize ? top_k : num_experts);
  for (size_t i = 0; i < counted; ++i) {
    total += std::exp(static_cast<double>(logits[order[i]]) - static_cast<double>(logits[order[0]]));
  }
  std::vector<double> expected;
  for (int32_t j = 0; j < top_k; ++j) {
    expected.push_back(std::exp(static_cast<double>(logits[ids[j]]) - static_cast<double>(logits[order[0]])) / total);
  }
  CHECK(relative_error({weights, weights + top_k}, expected) <= tolerance);
}

}  // namespace moelora::test
