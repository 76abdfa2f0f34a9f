// SPDX-License-Identifier: Apache-2.0
// The ways in which the CUDA backend computes moe_router, by name, so that tests and benchmarks can force one.
#pragma once

#include <cstdint>

#include "kernels/moe/moe_router.h"

namespace moelora {

enum class RouterPath : uint8_t {
  kAuto = 0,   // as kOne where that is faster
  kApart = 1,  // always the three ops
  kOne = 2,    // up to 8 rows of a router without adapters in one launch, where the GPU and the shape allow that
};

void moe_router_cuda_by(RouterPath path, const MoeRouterArgs& args, Stream& stream);

}  // namespace moelora
