// SPDX-License-Identifier: Apache-2.0
// The second half of a delta, in two ways.
// Many tokens of one adapter: inside a product's own accumulators (lora_expand). B is read as further inputs of the
// weight operand, the shrunk values as further inputs of the tokens (kernels/cuda/mma_tile.cuh has the layout). The
// shrunk values enter as a bf16 high and low part, so only B and x are rounded to bf16.
// Few tokens, each of any adapter: one thread an output of a token, in fp32 (lora_delta). All loads are independent
// once the token's record is known, however many adapters there are.
#pragma once

#include "kernels/cuda/mma_tile.cuh"
#include "kernels/lora/adapter_layout.h"

namespace moelora {

// Shrunk value `index` of `out`, which holds fp32 or bf16.
__device__ __forceinline__ void store_shrunk(float* out, bool bf16, int64_t index, float value) {
  if (bf16) {
    reinterpret_cast<__nv_bfloat16*>(out)[index] = __float2bfloat16_rn(value);
  } else {
    out[index] = value;
  }
}

// Four of them; index % 4 == 0.
__device__ __forceinline__ void store_shrunk(float* out, bool bf16, int64_t index, const float4& values) {
  if (bf16) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(values.x, values.y);
    const __nv_bfloat162 high = __floats2bfloat162_rn(values.z, values.w);
    *reinterpret_cast<uint2*>(reinterpret_cast<__nv_bfloat16*>(out) + index) =
        make_uint2(reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high));
  } else {
    *reinterpret_cast<float4*>(out + index) = values;
  }
}

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

// The byte address of granule `index` of a matrix that begins at granule `first`, whose first pages are in registers.
__device__ __forceinline__ const std::byte* paged_granule(const AdapterTable& table, int slot, int first,
                                                          const int4& pages, int index) {
  static_assert(ResolvedLora::kPages == 4);
  const int granule = first + index;
  const int page_of = granule / table.page_granules;
  const int nth = page_of - first / table.page_granules;
  int page;
  if (nth < ResolvedLora::kPages) {
    page = nth < 2 ? (nth == 0 ? pages.x : pages.y) : (nth == 2 ? pages.z : pages.w);
  } else {
    page = table.page_table[static_cast<int64_t>(slot) * table.pages_per_slot + page_of];
  }
  return table.pool + (static_cast<int64_t>(page) * table.page_granules + (granule - page_of * table.page_granules)) *
                          static_cast<int64_t>(kGranuleBytes);
}

// Where the granules of an A or B are, for shared memory.
struct alignas(16) PagedMatrix {
  int first;       // granule of the adapter
  int first_page;  // that it is in
  int unused[2];
  int4 pages;  // from there on
};
// `pages`: of the matrix's record.
__device__ __forceinline__ PagedMatrix paged_matrix(const AdapterTable& table, int first, const int32_t* pages) {
  return {first, static_cast<int>(static_cast<unsigned>(first) / static_cast<unsigned>(table.page_granules)), {},
          *reinterpret_cast<const int4*>(pages)};
}
// The pool's page that is page `page_of` of the adapter.
__device__ __forceinline__ int pool_page(const AdapterTable& table, int slot, const PagedMatrix& matrix,
                                         unsigned page_of) {
  const int nth = static_cast<int>(page_of) - matrix.first_page;
  return nth < ResolvedLora::kPages ? (&matrix.pages.x)[nth]
                                    : table.page_table[static_cast<int64_t>(slot) * table.pages_per_slot + page_of];
}

// What the adapter of one token says about one linear, in shared memory.
struct alignas(16) LoraToken {
  int rank;  // 0: the token has no delta here
  int slot;
  int b;
  int bias;
  float scale;  // record's times row's
  int unused[3];
  int4 b_pages;
};
// `record` may be null. A row scale of zero counts as no adapter.
__device__ __forceinline__ LoraToken lora_token(const ResolvedLora* record, int slot, float row_scale) {
  LoraToken token{};
  if (record != nullptr && row_scale != 0.0f) {
    const int4 head = *reinterpret_cast<const int4*>(record);  // rank, scale, a, b
    const int bias = record->bias;
    token.b_pages = *reinterpret_cast<const int4*>(record->b_pages);
    token.rank = head.x;
    token.scale = __int_as_float(head.y) * row_scale;
    token.b = head.w;
    token.bias = bias;
    token.slot = slot;
  }
  return token;
}

// B s + scale lora_bias for output n of a token with rank > 0; s: its shrunk values, times its scale. bf16 streams
// only.
__device__ __forceinline__ float lora_delta(const AdapterTable& table, const LoraToken& token, int n, const float* s) {
  constexpr int kTogether = 4;  // panels whose loads are in flight at once
  const int panels = (token.rank + kTileRanks - 1) / kTileRanks;
  const int first_page = token.b / table.page_granules;
  int granule = token.b + n / kTileColumns * panels;
  int page = granule / table.page_granules;
  granule -= page * table.page_granules;
  page -= first_page;
  const int offset = n % kTileColumns * 16;
  float sum = 0.0f;
  for (int p0 = 0; p0 < panels; p0 += kTogether) {
    uint4 b[kTogether];
    float4 x[2 * kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (p0 + i < panels) {
        const int id =
            page < ResolvedLora::kPages
                ? (&token.b_pages.x)[page]
                : table.page_table[static_cast<int64_t>(token.slot) * table.pages_per_slot + first_page + page];
        const int64_t at = (static_cast<int64_t>(id) * table.page_granules + granule) * kGranuleBytes;
        b[i] = *reinterpret_cast<const uint4*>(table.pool + at + offset);
        x[2 * i] = *reinterpret_cast<const float4*>(s + (p0 + i) * kTileRanks);
        x[2 * i + 1] = *reinterpret_cast<const float4*>(s + (p0 + i) * kTileRanks + 4);
        if (++granule == table.page_granules) {
          granule = 0;
          ++page;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (p0 + i < panels) {
        const uint32_t pair[4] = {b[i].x, b[i].y, b[i].z, b[i].w};
        const float value[8] = {x[2 * i].x,     x[2 * i].y,     x[2 * i].z,     x[2 * i].w,
                                x[2 * i + 1].x, x[2 * i + 1].y, x[2 * i + 1].z, x[2 * i + 1].w};
#pragma unroll
        for (int r = 0; r < 4; ++r) {  // a bf16 is the high half of an fp32
          sum = fmaf(__uint_as_float(pair[r] << 16), value[2 * r], sum);
          sum = fmaf(__uint_as_float(pair[r] & 0xffff0000u), value[2 * r + 1], sum);
        }
      }
    }
  }
  if (token.bias >= 0) {
    constexpr int kPerGranule = kGranuleBytes / sizeof(float);
    const std::byte* bias = table.granule(token.slot, token.bias + n / kPerGranule);
    sum = fmaf(token.scale, reinterpret_cast<const float*>(bias)[n % kPerGranule], sum);
  }
  return sum;
}

}  // namespace moelora
