// SPDX-License-Identifier: Apache-2.0
// What both paths of paged_attention on CUDA share: arguments by value, addresses of keys and values, and the last
// step of a softmax. Scores are kept times log2(e), so that exponentials are powers of two. A running maximum of -inf
// (nothing seen yet) is replaced by 0 before it is subtracted: exp2(-inf - 0) is the 0 wanted, -inf - -inf is NaN.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/attention/kv_layer.cuh"
#include "kernels/attention/rope_device.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/cuda/vec.cuh"

namespace moelora::attention {

constexpr unsigned ALL = 0xffffffffu;
constexpr float LOG2E = 1.4426950408889634f;
constexpr int UNIT = 16;  // keys of one mma; a KV block holds whole units

struct Params {
  const float* q;
  int64_t q_stride;
  void* out;
  int64_t out_stride;
  const int32_t* row_begin;
  const int32_t* positions;
  int num_sequences;
  int num_heads;
  int group;          // query heads of a KV head
  float scale_log2e;  // scale * log2(e)
  int window;
  const float* sinks;
  KvLayer kv;
  int num_kv_heads;
  int head_dim;
  float* scratch;
  // Of decode that rotates and writes K and V itself.
  const float* k;
  const float* v;
  int64_t k_stride;
  int64_t v_stride;
  rope::Form form;
};

__device__ __forceinline__ float minus_infinity() {
  return __uint_as_float(0xff800000u);
}
__device__ __forceinline__ float finite_or_zero(float largest) {
  return largest == minus_infinity() ? 0.0f : largest;
}
__device__ __forceinline__ int first_visible(int position, int window) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(ALL, value, 1));
  return fmaxf(value, __shfl_xor_sync(ALL, value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(ALL, value, 1);
  return value + __shfl_xor_sync(ALL, value, 2);
}

// What a softmax's weighted sum is to be multiplied by, given its maximum and denominator: the sink joins here.
__device__ __forceinline__ float final_factor(const Params& p, int head, float largest, float total) {
  if (p.sinks == nullptr) {
    return 1.0f / total;
  }
  const float sink = p.sinks[head] * LOG2E;
  const float joint = fmaxf(largest, sink);
  const float shrink = exp2f(largest - joint);
  return shrink / (total * shrink + exp2f(sink - joint));
}

}  // namespace moelora::attention
