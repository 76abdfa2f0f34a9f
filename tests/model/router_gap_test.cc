// SPDX-License-Identifier: Apache-2.0
// Router gaps against values computed by hand: signed logits, ties, several layers, no other expert.
#include "runtime/model/router_gap.h"

#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/catch.h"

using moelora::Dtype;
using moelora::narrow_router_gaps;
using moelora::Rows;

TEST_CASE("the gap lies between the last chosen and the next logit, relative to the largest") {
  // Rows are padded by one value that must not be read as an expert.
  std::vector<float> logits = {1.0f, -8.0f, 3.0f, 2.0f, 99.0f, 4.0f, 4.0f, 0.0f, 4.0f, 99.0f, 0, 0, 0, 0, 99.0f};
  const std::vector<int32_t> ids = {2, 3, 0, 1, 0, 1};
  std::vector<float> gaps(3, std::numeric_limits<float>::infinity());
  const Rows rows{logits.data(), Dtype::kF32, 5};
  narrow_router_gaps(rows, ids.data(), 3, 4, 2, gaps.data());
  CHECK(gaps[0] == (2.0f - 1.0f) / 8.0f);
  CHECK(gaps[1] == 0.0f);
  CHECK(gaps[2] == 0.0f);
  // Another layer only narrows.
  gaps = {0.01f, 0.5f, 0.5f};
  narrow_router_gaps(rows, ids.data(), 3, 4, 2, gaps.data());
  CHECK(gaps[0] == 0.01f);
  CHECK(gaps[1] == 0.0f);
}

TEST_CASE("without another expert to choose the gap stays") {
  std::vector<float> logits = {1.0f, 1.0f};
  const std::vector<int32_t> ids = {0, 1};
  float gap = std::numeric_limits<float>::infinity();
  narrow_router_gaps({logits.data(), Dtype::kF32, 2}, ids.data(), 1, 2, 2, &gap);
  CHECK(std::isinf(gap));
}
