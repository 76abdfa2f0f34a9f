// SPDX-License-Identifier: Apache-2.0
// Rows of the experts' matrices as the reference ops read them, element by element from any stored form, and the check
// of a form that all CPU kernels share.
#pragma once

#include <cmath>

#include "kernels/base/error.h"
#include "kernels/dense/dot_reference.h"
#include "kernels/moe/expert_weights.h"

namespace moelora {

constexpr int32_t kMxfp4Group = 32;  // inputs of one scale

inline void check_expert_weights(const ExpertWeights& weights) {
  MOELORA_ASSERT(weights.row_step >= 1);
  if (weights.format != ExpertFormat::kRows) {
    MOELORA_ASSERT(weights.format == ExpertFormat::kMxfp4Rows);
    MOELORA_ASSERT(weights.scales != nullptr && weights.cols % kMxfp4Group == 0);
  }
}

// Element `at` of a row of MXFP4: E2M1 times 2^(scale - 127).
inline float mxfp4_element(const uint8_t* nibbles, const uint8_t* scales, int64_t at) {
  constexpr float kNumbers[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const int nibble = at % 2 == 0 ? nibbles[at / 2] & 15 : nibbles[at / 2] >> 4;
  const float number = nibble < 8 ? kNumbers[nibble] : -kNumbers[nibble - 8];
  return std::ldexp(number, scales[at / kMxfp4Group] - 127);
}

// sum_k W[n, k] x[k] of one expert's matrix, in the order of dot_reference.
inline float expert_dot_reference(const ExpertWeights& weights, int32_t expert, Compute compute, int32_t n,
                                  const float* x) {
  const int64_t row = int64_t{n} * weights.row_step;
  if (weights.format == ExpertFormat::kRows) {
    return dot_reference(weights.data[expert], weights.dtype, compute, row, x, weights.cols);
  }
  const auto* nibbles = static_cast<const uint8_t*>(weights.data[expert]) + row * weights.cols / 2;
  const uint8_t* scales = weights.scales[expert] + row * weights.cols / kMxfp4Group;
  double lanes[8] = {};
  for (int64_t k = 0; k < weights.cols; ++k) {
    const float value = compute == Compute::kBf16 ? bf16_to_f32(f32_to_bf16(x[k])) : x[k];
    lanes[k % 8] += static_cast<double>(mxfp4_element(nibbles, scales, k)) * static_cast<double>(value);
  }
  return static_cast<float>(((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) +
                            ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7])));
}

inline float expert_bias(const ExpertWeights& weights, int32_t expert, int32_t n) {
  return weights.bias == nullptr ? 0.0f : weights.bias[int64_t{expert} * weights.rows + n];
}

}  // namespace moelora
