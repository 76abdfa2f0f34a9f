// SPDX-License-Identifier: Apache-2.0
// Clamp, norm and rotation of heads of q, k and v on CUDA. A head of D is shared by D / 8 neighbouring lanes: lane l
// holds the elements 4l .. 4l+3 and D/2 + 4l .. D/2 + 4l+3, which are rotated with each other, so that loads and stores
// are whole and no lane needs another's elements but for the sum of squares. Products and sums are spelled out: a
// head's bits are the same in every kernel that includes this.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/base/tensor.h"
#include "kernels/cuda/vec.cuh"

namespace moelora::rope {

// What all heads of a launch share; see rope_kv_write.h.
struct Form {
  float clip;
  Weight q_norm;
  Weight k_norm;
  float eps;
  const float* inv_freq;
  float scale;
};

enum class Kind : uint8_t { kQ, kK, kV };

__device__ __forceinline__ float load_weight(const Weight& weight, int i) {
  switch (weight.dtype) {
    case Dtype::kF32:
      return static_cast<const float*>(weight.data)[i];
    case Dtype::kF16:
      return to_f32(static_cast<const __half*>(weight.data)[i]);
    default:
      return to_f32(static_cast<const __nv_bfloat16*>(weight.data)[i]);
  }
}

// Written so that NaN stays NaN.
__device__ __forceinline__ float clamped(float value, float clip) {
  if (clip > 0.0f) {
    value = value > clip ? clip : value;
    value = value < -clip ? -clip : value;
  }
  return value;
}

// Cosine and sine times `scale`. Angles reach 10^5 radians: they are reduced to half turns in double, where sincosf
// would need its slow path. The angle itself is the fp32 product of the contract.
__device__ __forceinline__ float2 rotation(int position, float inv_freq, float scale) {
  const float angle = __fmul_rn(static_cast<float>(position), inv_freq);
  const double half_turns = static_cast<double>(angle) * 0.31830988618379067154;
  float s;
  float c;
  sincospif(static_cast<float>(half_turns - 2.0 * rint(0.5 * half_turns)), &s, &c);
  return make_float2(c * scale, s * scale);
}

// Of one row, in shared memory: what its heads are rotated by and what they are scaled with.
template <int D>
struct alignas(16) Tables {
  float cosine[D / 2];
  float sine[D / 2];
  float q_norm[D];
  float k_norm[D];
};

// By a block of at least D threads; readers need a barrier.
template <int D>
__device__ __forceinline__ void fill_tables(const Form& form, int position, Tables<D>& tables) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < D / 2) {
    const float2 turn = rotation(position, form.inv_freq[i], form.scale);
    tables.cosine[i] = turn.x;
    tables.sine[i] = turn.y;
  }
  if (i < D && form.q_norm.data != nullptr) {
    tables.q_norm[i] = load_weight(form.q_norm, i);
  }
  if (i < D && form.k_norm.data != nullptr) {
    tables.k_norm[i] = load_weight(form.k_norm, i);
  }
}

// A lane's share of a head.
struct Part {
  Vec4<float> a;  // elements 4l ..
  Vec4<float> b;  // elements D/2 + 4l ..
};

template <int D>
__device__ __forceinline__ Part load_part(const float* head, int l) {
  return {load4(head, l), load4(head + D / 2, l)};
}
template <int D, class T>
__device__ __forceinline__ void store_part(const Part& part, T* head, int l) {
  Vec4<T> a;
  Vec4<T> b;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    a.at[e] = from_f32<T>(part.a.at[e]);
    b.at[e] = from_f32<T>(part.b.at[e]);
  }
  store4(head, l, a);
  store4(head + D / 2, l, b);
}

// What a head is multiplied by before its weights. All lanes of the warp call it.
template <int D>
__device__ __forceinline__ float norm_scale(const Part& part, float eps) {
  float squares = 0.0f;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    squares = fmaf(part.a.at[e], part.a.at[e], squares);
    squares = fmaf(part.b.at[e], part.b.at[e], squares);
  }
#pragma unroll
  for (int offset = D / 16; offset > 0; offset /= 2) {
    squares += __shfl_xor_sync(0xffffffffu, squares, offset);
  }
  return rsqrtf(__fadd_rn(__fmul_rn(squares, 1.0f / D), eps));
}

// Clamps, norms and rotates lane l's share of a head; v is only clamped. All lanes of the warp call it, those without a
// head with any values.
template <int D>
__device__ __forceinline__ void turn_part(const Form& form, const Tables<D>& tables, Kind kind, int l, Part& part) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    part.a.at[e] = clamped(part.a.at[e], form.clip);
    part.b.at[e] = clamped(part.b.at[e], form.clip);
  }
  if (form.q_norm.data != nullptr || form.k_norm.data != nullptr) {
    const float scale = norm_scale<D>(part, form.eps);
    if (kind != Kind::kV && (kind == Kind::kQ ? form.q_norm : form.k_norm).data != nullptr) {
      const float* weights = kind == Kind::kQ ? tables.q_norm : tables.k_norm;
      const Vec4<float> a = load4(weights, l);
      const Vec4<float> b = load4(weights + D / 2, l);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        part.a.at[e] = __fmul_rn(__fmul_rn(part.a.at[e], scale), a.at[e]);
        part.b.at[e] = __fmul_rn(__fmul_rn(part.b.at[e], scale), b.at[e]);
      }
    }
  }
  if (kind == Kind::kV) {
    return;
  }
  const Vec4<float> cosine = load4(tables.cosine, l);
  const Vec4<float> sine = load4(tables.sine, l);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float a = part.a.at[e];
    const float b = part.b.at[e];
    part.a.at[e] = fmaf(a, cosine.at[e], -__fmul_rn(b, sine.at[e]));
    part.b.at[e] = fmaf(b, cosine.at[e], __fmul_rn(a, sine.at[e]));
  }
}

}  // namespace moelora::rope
