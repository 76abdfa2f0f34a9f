// SPDX-License-Identifier: Apache-2.0
// The arithmetic that all weight-streaming kernels share: D[16 outputs x 8 tokens] += A[16 x k] B[k x 8] on tensor
// cores (mma.sync m16n8k16, bf16 in, fp32 out), with the weights as the 16-row operand.
//
// k order. A sum over k may run in any order as long as both operands agree, so a lane takes whole 16-byte chunks: with
// g = lane / 4 and t = lane % 4, of a block of 64 inputs lane (g, t) holds chunks t and t + 4 (chunk c = inputs
// 8c .. 8c+7) of weight rows g and g + 8 and of token g. Row-major bf16 rows, MXFP4 tiles (moe/mxfp4_tiles.h), adapter
// granules (lora/adapter_layout.h) and activations all come that way without a shuffle.
// Accumulators of lane (g, t): d[0], d[1] = output g, tokens 2t, 2t+1; d[2], d[3] = output g + 8, the same tokens.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace moelora {

__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// One chunk of 8 inputs a lane, 32 inputs over the quad: `low` of row g, `high` of row g + 8, `x` of token g.
__device__ __forceinline__ void mma_chunk(float (&d)[4], const uint4& low, const uint4& high, const uint4& x) {
  mma_m16n8k16(d, low.x, high.x, low.y, high.y, x.x, x.y);
  mma_m16n8k16(d, low.z, high.z, low.w, high.w, x.z, x.w);
}

__device__ __forceinline__ uint4 zero_chunk() {
  return make_uint4(0, 0, 0, 0);
}

// A load that is used once: weights pass the L1 so that activations stay there.
__device__ __forceinline__ uint4 load_streaming(const void* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}
// A load that stays where it stands: look-ups that do not depend on each other are under way together.
__device__ __forceinline__ int load_now(const int32_t* from) {
  int value;
  asm volatile("ld.volatile.global.s32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}

// Eight fp32 values as bf16 high parts and the bf16 of what is left: together 16 bits of mantissa.
struct SplitChunk {
  uint4 high;
  uint4 low;
};
__device__ __forceinline__ SplitChunk split_chunk(const float* values) {
  SplitChunk result;
  uint32_t* high = &result.high.x;
  uint32_t* low = &result.low.x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
    const __nv_bfloat162 l = __floats2bfloat162_rn(values[2 * i] - __low2float(h), values[2 * i + 1] - __high2float(h));
    high[i] = reinterpret_cast<const uint32_t&>(h);
    low[i] = reinterpret_cast<const uint32_t&>(l);
  }
  return result;
}

}  // namespace moelora
