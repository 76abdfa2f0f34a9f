// SPDX-License-Identifier: Apache-2.0
// Words of MXFP4 tiles (kernels/moe/mxfp4_tiles.h) as bf16 operands of an mma.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/moe/mxfp4_tiles.h"

namespace moelora {

// Eight E2M1 values (a word of an MXFP4 tile) times `scale`, a bf16 pair of 2^(E - 1), as a bf16 chunk. The three low
// bits of a value, put at bits 8..6 of a bf16, read as that value times 2^-126, the subnormal 0.5 included.
__device__ __forceinline__ uint4 expand_mxfp4(uint32_t word, __nv_bfloat162 scale) {
  uint32_t pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = mxfp4_pair(word, i);
    const __nv_bfloat162 value = __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits), scale);
    pair[i] = reinterpret_cast<const uint32_t&>(value);
  }
  return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}
// 2^(E - 1) twice, E in the low byte, E <= kMxfp4ScaleMax.
__device__ __forceinline__ __nv_bfloat162 mxfp4_scale(uint32_t e8m0) {
  const uint32_t half = ((e8m0 & 0xFFu) + 126u) << 7;
  const uint32_t both = half | (half << 16);
  return reinterpret_cast<const __nv_bfloat162&>(both);
}

// The same for the four scales of a word, E <= kMxfp4ScaleMax each: prepared once, then two instructions a scale.
__device__ __forceinline__ uint32_t mxfp4_prepare_scales(uint32_t word) {
  return word + 0x7E7E7E7Eu;  // + 126 each, no carry
}
__device__ __forceinline__ __nv_bfloat162 mxfp4_prepared_scale(uint32_t prepared, int byte) {
  const uint32_t both = __byte_perm(prepared, 0, 0x4040 + 0x0101 * byte) << 7;
  return reinterpret_cast<const __nv_bfloat162&>(both);
}

}  // namespace moelora
