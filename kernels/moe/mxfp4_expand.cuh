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
// Scales 2^(E - 1) as bf16, of the four E8M0 bytes of a word, E <= kMxfp4ScaleMax each: bytes 0 and 2, then 1 and 3.
// Five instructions for all four: a product takes either half of a register as both of its factors.
struct Mxfp4Scales {
  uint32_t even;
  uint32_t odd;
  __device__ __forceinline__ explicit Mxfp4Scales(uint32_t word) {
    constexpr uint32_t kExponents = 0x7F807F80u;
    const uint32_t shifted = word + 0x7E7E7E7Eu;  // + 126 each, no carry
    even = (shifted << 7) & kExponents;
    odd = (shifted >> 1) & kExponents;
  }
  // Of byte `byte`, in both halves.
  [[nodiscard]] __device__ __forceinline__ __nv_bfloat162 pair(int byte) const {
    const uint32_t bits = byte % 2 == 0 ? even : odd;
    const auto& both = reinterpret_cast<const __nv_bfloat162&>(bits);
    return byte < 2 ? __low2bfloat162(both) : __high2bfloat162(both);
  }
};

}  // namespace moelora
