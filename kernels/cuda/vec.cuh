// SPDX-License-Identifier: Apache-2.0
// Four neighbouring elements of a stored type as fp32 and back: the unit in which memory-bound kernels move rows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace moelora {

__device__ __forceinline__ float to_f32(float value) {
  return value;
}
__device__ __forceinline__ float to_f32(__half value) {
  return __half2float(value);
}
__device__ __forceinline__ float to_f32(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

template <class T>
__device__ __forceinline__ T from_f32(float value);
template <>
__device__ __forceinline__ float from_f32<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_f32<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

template <class T>
struct alignas(4 * sizeof(T)) Vec4 {
  T at[4];
};

// Elements 4i .. 4i+3 of an array aligned to four elements.
template <class T>
__device__ __forceinline__ Vec4<T> load4(const T* data, int i) {
  return reinterpret_cast<const Vec4<T>*>(data)[i];
}
template <class T>
__device__ __forceinline__ void store4(T* data, int i, const Vec4<T>& value) {
  reinterpret_cast<Vec4<T>*>(data)[i] = value;
}

}  // namespace moelora
