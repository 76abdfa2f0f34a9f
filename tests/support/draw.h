// SPDX-License-Identifier: Apache-2.0
// Random test data with fixed seeds, the same on every standard library: only the raw 32-bit output of mt19937 is used.
#pragma once

#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

namespace moelora::test {

class Draw {
 public:
  explicit Draw(uint32_t seed) : engine_(seed) {}

  // Uniform in [-1, 1).
  float signed_unit() { return static_cast<float>(static_cast<int32_t>(engine_()) >> 8) * 0x1p-23f; }
  int32_t below(int32_t count) { return static_cast<int32_t>(engine_() % static_cast<uint32_t>(count)); }
  std::vector<float> floats(size_t count, float amplitude = 1.0f) {
    std::vector<float> values(count);
    for (float& value : values) {
      value = signed_unit() * amplitude;
    }
    return values;
  }
  std::vector<int32_t> permutation(int32_t count) {
    std::vector<int32_t> order(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    for (int32_t i = count - 1; i > 0; --i) {
      std::swap(order[static_cast<size_t>(i)], order[static_cast<size_t>(below(i + 1))]);
    }
    return order;
  }

 private:
  std::mt19937 engine_;
};

}  // namespace moelora::test
