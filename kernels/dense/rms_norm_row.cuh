// SPDX-License-Identifier: Apache-2.0
// The arithmetic of RMSNorm on CUDA for rows whose elements go four at a time: a block of 256 threads a row, thread i
// owns the groups of four elements i, i + 256, ... and adds their squares in that order, then the block its threads'.
// Every kernel that norms a row does it with these functions and that division of the row, so that an op with a norm
// inside gives the bits of the op followed by rms_norm.
#pragma once

#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vec.cuh"

namespace moelora {

constexpr int kNormThreads = 256;

template <class T>
__device__ __forceinline__ float square4(const Vec4<T>& v) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    sum = fmaf(to_f32(v.at[j]), to_f32(v.at[j]), sum);
  }
  return sum;
}

// By element: stored weights are aligned to their own size at best.
template <class W>
__device__ __forceinline__ Vec4<W> load_norm_weights(const W* weight, int group) {
  Vec4<W> result;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    result.at[j] = weight[4 * group + j];
  }
  return result;
}

// What the elements of a row are multiplied by, from the sum of their squares.
__device__ __forceinline__ float norm_scale_of(float squares, int width, float eps) {
  return rsqrtf(squares / static_cast<float>(width) + eps);
}
// The same by all threads of a block, from the squares of this thread's. `partial` as in block_sum().
__device__ __forceinline__ float norm_scale(float squares, int width, float eps, float* partial) {
  return norm_scale_of(block_sum<kNormThreads>(squares, partial), width, eps);
}

template <class In, class W, class Out>
__device__ __forceinline__ Vec4<Out> scale4(const Vec4<In>& v, float scale, const Vec4<W>& weights) {
  Vec4<Out> result;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    result.at[j] = from_f32<Out>(to_f32(v.at[j]) * scale * to_f32(weights.at[j]));
  }
  return result;
}

}  // namespace moelora
