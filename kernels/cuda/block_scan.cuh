// SPDX-License-Identifier: Apache-2.0
// Scans over the threads of a block.
#pragma once

#include <cstdint>

namespace moelora {

// Sum of `value` over lower threads of a block of WARPS warps; `total` over all. `warp_sum` may be reused after another
// barrier.
template <int WARPS>
__device__ __forceinline__ uint32_t block_exclusive_sum(uint32_t value, uint32_t* warp_sum, uint32_t* total) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  uint32_t inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t lower = __shfl_up_sync(0xffffffffu, inclusive, offset);
    inclusive += lane >= offset ? lower : 0u;
  }
  if (lane == 31) {
    warp_sum[warp] = inclusive;
  }
  __syncthreads();  // the sums of all warps are there
  uint32_t lower = 0;
  uint32_t all = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const uint32_t sum = warp_sum[w];
    lower += w < warp ? sum : 0u;
    all += sum;
  }
  *total = all;
  return lower + inclusive - value;
}

}  // namespace moelora
