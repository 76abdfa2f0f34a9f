// SPDX-License-Identifier: Apache-2.0
// Reductions over a thread block in one fixed order, so that a sum depends on its values and the number of threads
// alone.
#pragma once

namespace moelora {

// Sum over a warp, given to each of its threads.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

// What block_sum() gives, from the sums of its warps.
template <int WARPS>
__device__ __forceinline__ float add_warp_sums(const float* sums) {
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) {
    total += sums[warp];
  }
  return total;
}

// Sum over all THREADS threads of the block, given to each of them. `shared` holds THREADS / 32 floats and may be
// reused only after another barrier.
template <int THREADS>
__device__ __forceinline__ float block_sum(float value, float* shared) {
  static_assert(THREADS % 32 == 0 && THREADS <= 1024);
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) {
    shared[threadIdx.x / 32] = value;
  }
  __syncthreads();  // the partial sums of all warps are there
  return add_warp_sums<THREADS / 32>(shared);
}

}  // namespace moelora
