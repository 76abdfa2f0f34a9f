// SPDX-License-Identifier: Apache-2.0
// The ways in which the CUDA backend computes a linear with adapters of few rows, by name, so that tests and benchmarks
// can force one.
#pragma once

#include <cstdint>

#include "kernels/dense/linear.h"

namespace moelora {

enum class LinearPath : uint8_t {
  kAuto = 0,
  // At most 8 rows with adapters and room for a few blocks more on the GPU, else as kAuto: the shrink in blocks of the
  // product's own grid (kernels/dense/linear_beside.cuh). kAuto's way for one row.
  kShrinkBeside = 1,
  // As kAuto, but with the shrink as a launch of its own.
  kShrinkFirst = 2,
};

void linear_cuda_by(LinearPath path, const LinearArgs& args, Stream& stream);

}  // namespace moelora
