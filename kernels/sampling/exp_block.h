// SPDX-License-Identifier: Apache-2.0
// exp of many fp32 values, for the softmax over a vocabulary: range reduction by ln 2 and a polynomial, within two
// units in the last place, in loops of a fixed length that compilers vectorise. Below -87 the result is 0.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace moelora {

// For x <= 88.
inline float exp_fast(float x) {
  constexpr float kLowest = -87.0f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer held in the low mantissa bits
  const float clamped = x < kLowest ? kLowest : x;
  const float shifted = clamped * 1.44269504f + kRound;
  const float n = shifted - kRound;
  // ln 2 in two parts, the first exact in a few bits so that n * part is exact.
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float poly = 1.0f / 5040.0f;
  poly = poly * r + 1.0f / 720.0f;
  poly = poly * r + 1.0f / 120.0f;
  poly = poly * r + 1.0f / 24.0f;
  poly = poly * r + 1.0f / 6.0f;
  poly = poly * r + 0.5f;
  poly = poly * r * r + r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const uint32_t power = (bits + 127u) << 23;
  float scale;
  std::memcpy(&scale, &power, sizeof scale);
  return x < kLowest ? 0.0f : poly * scale;
}

// out[i] = exp((x[i] - subtract) / divide), x[i] <= subtract, divide > 0. In place is allowed.
inline void exp_scaled(const float* x, int32_t count, float subtract, float divide, float* out) {
  constexpr int32_t kBlock = 64;
  int32_t at = 0;
  for (; at + kBlock <= count; at += kBlock) {
    for (int32_t i = 0; i < kBlock; ++i) {
      out[at + i] = exp_fast((x[at + i] - subtract) / divide);
    }
  }
  for (; at < count; ++at) {
    out[at] = exp_fast((x[at] - subtract) / divide);
  }
}

}  // namespace moelora
