// SPDX-License-Identifier: Apache-2.0
// The op tables under test, and a stream big enough for any op test.
#pragma once

#include <array>

#include "kernels/kernels.h"

namespace moelora::test {

inline std::array<const Kernels*, 2> backends() {
  return {&kernels_reference(), &kernels_cpu()};
}

constexpr size_t kTestScratchBytes = size_t{8} << 20;
constexpr Dtype kAllDtypes[] = {Dtype::kF32, Dtype::kF16, Dtype::kBf16};

}  // namespace moelora::test
