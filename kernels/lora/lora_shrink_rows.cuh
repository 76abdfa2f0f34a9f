// SPDX-License-Identifier: Apache-2.0
// lora_shrink for few rows or pairs, without segments: from a row to its slot to its record to A, no more dependent
// accesses than that. Each warp looks at a tile of 32 positions at once and finds the groups of equal slot (and
// expert); a block takes groups of the tile in turn, one module, and panels of 8 ranks in turn. Its 8 warps split K
// into contiguous ranges of 64-input blocks, A streams from the pool into registers, and the warps' sums are added in
// warp order. Where there are few items a panel is a block of its own; where there are many, blocks take several panels
// after one look-up. Limited by latency for few groups, by reading A for many.
// Included by lora_shrink_cuda.cu.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/lora/lora_expand.cuh"
#include "kernels/moe/moe_sort.h"

namespace moelora::shrink_rows {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 2;
constexpr int kTile = 32;  // positions
constexpr int kMaxExperts = 1024;

struct Params {
  AdapterTable table;
  const __nv_bfloat16* x;
  int64_t x_stride;
  int k;
  int layer;
  int modules[3];
  int num_modules;
  const int32_t* row_slot;
  const float* row_scale;
  const int32_t* pair_row;      // experts only
  const int32_t* expert_begin;  // experts only
  int num_experts;
  int count;  // positions: rows or sorted pairs
  bool x_by_position;
  float* out;  // [count, num_modules, rank_stride]
  int rank_stride;
};

// Up to 32 positions of one slot (and expert) and one module; lane i has what belongs to the i-th of them.
struct Group {
  int rank;
  float scale;  // record's
  int a;
  int4 a_pages;
  int slot;
  int module;  // of the batch's modules
  int count;
  int position;
  float row_scale;
  const __nv_bfloat16* x;
};

// Place of the n-th lowest set bit; 0 if there are not so many.
__device__ __forceinline__ int nth_bit(unsigned bits, int n) {
  for (int i = 0; i < n; ++i) {
    bits &= bits - 1;
  }
  return bits != 0 ? __ffs(static_cast<int>(bits)) - 1 : 0;
}

// acc += A x of one panel over the 64-input blocks [begin, end), 8 NT tokens.
template <int NT, int UNROLL>
__device__ __forceinline__ void multiply(const Params& p, const Group& group, int panel, int begin, int end,
                                         float (&acc)[NT][4]) {
  const int lane = threadIdx.x % 32;
  const int t = lane % 4;
  const int offset = t * 128 + lane / 4 * 16;  // of this lane's first chunk in a tile
  const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
  const __nv_bfloat16* x[NT];
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const auto row = __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(group.x), 8 * j + lane / 4);
    x[j] = 8 * j + lane / 4 < group.count ? reinterpret_cast<const __nv_bfloat16*>(row) : nullptr;
  }
  for (int base = begin; base < end; base += UNROLL) {
    uint4 a[UNROLL][2];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      a[u][0] = a[u][1] = zero_chunk();
      if (base + u < end) {
        const std::byte* tile =
            paged_granule(p.table, group.slot, group.a, group.a_pages, panel * blocks + base + u) + offset;
        a[u][0] = load_streaming(tile);
        a[u][1] = load_streaming(tile + 512);
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const uint4 none[2] = {zero_chunk(), zero_chunk()};
      mma_block<NT>(acc, a[u], none, x, (base + u) * kTileColumns + t * 8, base + u < end, p.k);
    }
  }
}

// One panel of a group: sums of the warps in warp order, times the row's scale. Called by the whole block.
template <int NT, int UNROLL>
__device__ __forceinline__ void shrink_panel(const Params& p, const Group& group, int panel, float* partial) {
  constexpr int kElements = NT * 64;  // [group of 8 tokens][register][lane]; registers 2 and 3 are of no rank
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
  float acc[NT][4] = {};
  multiply<NT, UNROLL>(p, group, panel, warp * blocks / kWarps, (warp + 1) * blocks / kWarps, acc);
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      partial[warp * kElements + (j * 2 + i) * 32 + lane] = acc[j][i];
    }
  }
  __syncthreads();                                           // all warps' sums are there
  for (int e = threadIdx.x; e < kElements; e += kThreads) {  // by whole warps
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      sum += partial[w * kElements + e];
    }
    const int token = e / 64 * 8 + 2 * (lane % 4) + e / 32 % 2;
    const int rank = panel * kTileRanks + lane / 4;
    const int64_t position = __shfl_sync(0xffffffffu, group.position, token);
    const float scale = __shfl_sync(0xffffffffu, group.row_scale, token) * group.scale;
    if (token < group.count) {
      p.out[(position * p.num_modules + group.module) * p.rank_stride + rank] =
          rank < group.rank && scale != 0.0f ? sum * scale : 0.0f;
    }
  }
  __syncthreads();  // read before the next panel's sums are written
}

__device__ __forceinline__ void shrink_group(const Params& p, Group& group, const ResolvedLora* record,
                                             float* partial) {
  const int4 head = *reinterpret_cast<const int4*>(record);  // rank, scale, a, b
  group.a_pages = *reinterpret_cast<const int4*>(record->a_pages);
  group.rank = head.x;
  group.scale = __int_as_float(head.y);
  group.a = head.z;
  const int panels = (group.rank + kTileRanks - 1) / kTileRanks;
  const int panel_blocks = static_cast<int>(gridDim.x) / p.num_modules;
  for (int panel = static_cast<int>(blockIdx.x) % panel_blocks; panel < panels; panel += panel_blocks) {
    if (group.count <= 8) {
      shrink_panel<1, 4>(p, group, panel, partial);
    } else if (group.count <= 16) {
      shrink_panel<2, 2>(p, group, panel, partial);
    } else {
      shrink_panel<4, 2>(p, group, panel, partial);
    }
  }
}

// Grid: x = module, block of its panels; y = groups of a tile in turn; z = tile.
template <bool EXPERTS>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) lora_shrink_rows(const __grid_constant__ Params p) {
  __shared__ float partial[kWarps * 4 * 64];
  __shared__ int expert_begin[EXPERTS ? kMaxExperts : 1];
  wait_for_previous();
  let_next_start();
  const int lane = threadIdx.x % 32;
  const int position = static_cast<int>(blockIdx.z) * kTile + lane;
  int row = position < p.count ? position : -1;
  int expert = 0;
  if constexpr (EXPERTS) {
    row = row >= 0 ? p.pair_row[position] : -1;
    for (int e = threadIdx.x; e < p.num_experts; e += kThreads) {
      expert_begin[e] = p.expert_begin[e];
    }
  }
  const int slot = row >= 0 ? p.row_slot[row] : 0;
  const float row_scale = row >= 0 ? p.row_scale[row] : 0.0f;
  if constexpr (EXPERTS) {
    __syncthreads();  // expert_begin is there
    expert = row >= 0 ? expert_at(expert_begin, p.num_experts, position) : 0;
  }
  const unsigned same_slot = __match_any_sync(0xffffffffu, slot);
  const unsigned same = EXPERTS ? same_slot & __match_any_sync(0xffffffffu, expert) : same_slot;
  const unsigned leaders = __ballot_sync(0xffffffffu, slot != 0 && __ffs(static_cast<int>(same)) - 1 == lane);
  const int num_groups = __popc(leaders);
  Group group;
  group.module = static_cast<int>(blockIdx.x) / (static_cast<int>(gridDim.x) / p.num_modules);
  for (int nth = static_cast<int>(blockIdx.y); nth < num_groups; nth += static_cast<int>(gridDim.y)) {
    const int leader = nth_bit(leaders, nth);
    group.slot = __shfl_sync(0xffffffffu, slot, leader);
    const int group_expert = __shfl_sync(0xffffffffu, expert, leader);
    const ResolvedLora* record;
    if constexpr (EXPERTS) {
      record = p.table.resolved_expert(group.slot, p.layer, group_expert,
                                       static_cast<ExpertModule>(p.modules[group.module]));
    } else {
      record = p.table.resolved_dense(group.slot, p.layer, static_cast<LoraModule>(p.modules[group.module]));
    }
    const unsigned members = __shfl_sync(0xffffffffu, same, leader);
    group.count = __popc(members);
    const int source = nth_bit(members, lane);
    group.position = __shfl_sync(0xffffffffu, position, source);
    group.row_scale = __shfl_sync(0xffffffffu, row_scale, source);
    const int64_t source_row = __shfl_sync(0xffffffffu, row, source);
    group.x = p.x + (p.x_by_position ? group.position : source_row) * p.x_stride;
    shrink_group(p, group, record, partial);
  }
}

template <bool EXPERTS>
void launch(const Params& p, const CudaStream& state) {
  const int tiles = (p.count + kTile - 1) / kTile;
  const int groups = std::min(p.count, EXPERTS ? kTile : kTile / 2);
  const int panels = std::max(p.rank_stride / kTileRanks, 1);
  // About as many blocks as run in a few rounds: beyond, several panels share a look-up.
  const int panel_blocks = std::clamp(16 * state.num_sms / (tiles * groups * p.num_modules), 1, panels);
  const dim3 grid(static_cast<unsigned>(p.num_modules * panel_blocks), static_cast<unsigned>(groups),
                  static_cast<unsigned>(tiles));
  launch_dependent(lora_shrink_rows<EXPERTS>, grid, kThreads, 0, state, p);
  check_launch("lora_shrink");
}

}  // namespace moelora::shrink_rows
