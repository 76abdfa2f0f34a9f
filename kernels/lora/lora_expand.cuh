// SPDX-License-Identifier: Apache-2.0
// The second half of a delta inside a product's own accumulators: an adapter's B is read as further inputs of the
// weight operand, the shrunk values as further inputs of the tokens (kernels/cuda/mma_tile.cuh has the layout). The
// shrunk values enter as a bf16 high and low part, so only B and x are rounded to bf16.
#pragma once

#include "kernels/cuda/mma_tile.cuh"
#include "kernels/lora/adapter_layout.h"

namespace moelora {

// The 16 bytes of an adapter's B for outputs n - n % 8 + g (this lane's g) and ranks 8 panel .. 8 panel + 7.
__device__ __forceinline__ uint4 load_lora_b(const AdapterTable& table, int slot, const LoraRecord& record, int n,
                                             int panel, int g) {
  const int panels = (record.rank + kTileRanks - 1) / kTileRanks;
  const std::byte* tile = table.granule(slot, record.b + n / kTileColumns * panels + panel);
  return *reinterpret_cast<const uint4*>(tile + (n % kTileColumns) / 8 * 128 + g * 16);
}
// The 16 bytes of an adapter's A for rank 8 panel + g and inputs 64 block + 8 chunk .. + 7, chunk in [0, 8).
__device__ __forceinline__ const std::byte* lora_a_tile(const AdapterTable& table, int slot, const LoraRecord& record,
                                                        int k, int panel, int block) {
  const int blocks = (k + kTileColumns - 1) / kTileColumns;
  return table.granule(slot, record.a + panel * blocks + block);
}

// acc[j] += B s for NT groups of 8 tokens. Outputs of rows g: n_low + g, of rows g + 8: n_high + g; both multiples of
// 8, -1 = those rows get nothing. s[j]: fp32 shrunk values of this lane's token g in group j, times its scale, zero
// beyond the rank up to a multiple of 8; null = the token does not use this adapter. bf16 streams only.
template <int NT>
__device__ __forceinline__ void lora_expand(float (&acc)[NT][4], const AdapterTable& table, int slot,
                                            const LoraRecord& record, int n_low, int n_high,
                                            const float* const (&s)[NT]) {
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int panels = (record.rank + kTileRanks - 1) / kTileRanks;
  for (int p0 = 0; p0 < panels; p0 += 4) {
    const int panel = p0 + t;
    uint4 low = zero_chunk();
    uint4 high = zero_chunk();
    if (panel < panels) {
      if (n_low >= 0) {
        low = load_lora_b(table, slot, record, n_low, panel, g);
      }
      if (n_high >= 0) {
        high = load_lora_b(table, slot, record, n_high, panel, g);
      }
    }
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      float values[8] = {};
      if (panel < panels && s[j] != nullptr) {
        const float4 a = *reinterpret_cast<const float4*>(s[j] + panel * 8);
        const float4 b = *reinterpret_cast<const float4*>(s[j] + panel * 8 + 4);
        values[0] = a.x;
        values[1] = a.y;
        values[2] = a.z;
        values[3] = a.w;
        values[4] = b.x;
        values[5] = b.y;
        values[6] = b.z;
        values[7] = b.w;
      }
      const SplitChunk x = split_chunk(values);
      mma_chunk(acc[j], low, high, x.high);
      mma_chunk(acc[j], low, high, x.low);
    }
  }
}

// lora_B.bias of output n, 0 where the record has none.
__device__ __forceinline__ float lora_bias(const AdapterTable& table, int slot, const LoraRecord& record, int n) {
  if (record.bias < 0) {
    return 0.0f;
  }
  constexpr int kPerGranule = kGranuleBytes / sizeof(float);
  return reinterpret_cast<const float*>(table.granule(slot, record.bias + n / kPerGranule))[n % kPerGranule];
}

}  // namespace moelora
