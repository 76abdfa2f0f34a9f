// SPDX-License-Identifier: Apache-2.0
// The inner product of the reference ops: one stored weight row times one fp32 activation row. Sums in
// double, in eight lanes of a fixed order, so that a result depends on the two rows alone and its error is far
// below that of any fp32 kernel it judges. Only *_cpu.cc references include it.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/tensor.h"

namespace moelora {

template <Dtype kDtype, Compute kCompute>
double dot_reference(const void* weights, const float* x, int32_t k) {
  constexpr int32_t kLanes = 8;
  double lanes[kLanes] = {};
  for (int32_t at = 0; at < k; at += kLanes) {
    const int32_t count = k - at < kLanes ? k - at : kLanes;
    for (int32_t lane = 0; lane < count; ++lane) {
      float value = x[at + lane];
      if constexpr (kCompute == Compute::kBf16) {
        value = bf16_to_f32(f32_to_bf16(value));
      }
      lanes[lane] += static_cast<double>(load_element(weights, kDtype, static_cast<size_t>(at + lane))) *
                     static_cast<double>(value);
    }
  }
  return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

// sum_k W[row, k] x[k] of a matrix [*, k] stored without gaps.
inline float dot_reference(const void* matrix, Dtype dtype, Compute compute, int64_t row, const float* x, int32_t k) {
  const void* weights = static_cast<const char*>(matrix) + row * k * static_cast<int64_t>(dtype_bytes(dtype));
  const bool exact = compute == Compute::kExact;
  double sum = 0.0;
  switch (dtype) {
    case Dtype::kF32:
      sum = exact ? dot_reference<Dtype::kF32, Compute::kExact>(weights, x, k)
                  : dot_reference<Dtype::kF32, Compute::kBf16>(weights, x, k);
      break;
    case Dtype::kF16:
      sum = exact ? dot_reference<Dtype::kF16, Compute::kExact>(weights, x, k)
                  : dot_reference<Dtype::kF16, Compute::kBf16>(weights, x, k);
      break;
    case Dtype::kBf16:
      sum = exact ? dot_reference<Dtype::kBf16, Compute::kExact>(weights, x, k)
                  : dot_reference<Dtype::kBf16, Compute::kBf16>(weights, x, k);
      break;
  }
  return static_cast<float>(sum);
}

}  // namespace moelora
