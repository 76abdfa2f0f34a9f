// SPDX-License-Identifier: Apache-2.0
// lora_shrink for few rows or pairs: a block takes one panel of 8 ranks of one module for the rows of one adapter (and
// expert), so that A is read once however many these are. Its 7 warps split K into contiguous ranges of 64-input
// blocks; a warp asks for all of its range at once, holds it in shared memory for 16 rows after 16, and the warps' sums
// are added in warp order. For dense linears everything but x is there since the step began, so A is on its way before
// this kernel waits for x. Limited by latency: segment, record, A for the experts, x alone for dense linears.
// Included by lora_shrink_cuda.cu.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/lora/lora_expand.cuh"

namespace moelora::shrink_rows {

constexpr int kWarps = 7;  // and one more, so that two blocks of 128 registers a thread share an SM
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 2;
constexpr int kGroups = 2;  // of 8 rows at once
constexpr int kTokens = 8 * kGroups;
constexpr int kHeldMax = 10;  // blocks of 64 inputs whose A a warp holds

struct Params {
  AdapterTable table;
  const __nv_bfloat16* x;
  int64_t x_stride;
  int k;
  int layer;
  int modules[3];
  int num_modules;
  const int32_t* segment_begin;
  const int32_t* segment_slot;
  const int32_t* segment_expert;  // experts only
  const int32_t* num_segments;
  const int32_t* max_rank;  // of the batch's adapters, a multiple of 8
  int max_segments;
  const int32_t* rows;  // row of the batch at each position of the segments
  const float* row_scale;
  float* out;  // [count, num_modules, rank_stride]
  int rank_stride;
  bool x_by_position;
  bool out_bf16;
  int held;  // blocks whose A a warp holds
};

// One panel of one adapter's module, and the rows that use it.
struct Work {
  int panel;
  int module;  // of the batch's modules
  int begin;  // positions
  int end;
  int slot;
  int rank;  // 0: nothing to do
  float scale;
  int a;
  const ResolvedLora* record;
};
// Up to kTokens of its positions; lane i has the i-th.
struct Tokens {
  int count;
  int row;
  float scale;  // of the row
};

// The panel, module and segment of an index, if there is such a segment; num_segments and the segment's entries are
// asked for side by side.
template <bool EXPERTS>
__device__ __forceinline__ Work find_work(const Params& p, int index, int panels, bool& ended, int4& pages) {
  Work work;
  work.panel = index % panels;
  work.module = index / panels % p.num_modules;
  const int segment = index / panels / p.num_modules;
  const int num_segments = load_now(p.num_segments);
  work.begin = load_now(p.segment_begin + segment);
  work.end = load_now(p.segment_begin + segment + 1);
  work.slot = load_now(p.segment_slot + segment);
  const int expert = EXPERTS ? load_now(p.segment_expert + segment) : 0;
  work.rank = 0;
  ended = segment >= num_segments;
  if (!ended && work.slot != 0) {
    if constexpr (EXPERTS) {
      work.record =
          p.table.resolved_expert(work.slot, p.layer, expert, static_cast<ExpertModule>(p.modules[work.module]));
    } else {
      work.record = p.table.resolved_dense(work.slot, p.layer, static_cast<LoraModule>(p.modules[work.module]));
    }
    const int4 head = __ldcg(reinterpret_cast<const int4*>(work.record));  // rank, scale, a, b
    pages = __ldcg(reinterpret_cast<const int4*>(work.record->a_pages));
    work.rank = head.x;
    work.scale = __int_as_float(head.y);
    work.a = head.z;
  }
  return work;
}

__device__ __forceinline__ Tokens find_tokens(const Params& p, const Work& work, int first) {
  const int lane = threadIdx.x % 32;
  Tokens tokens;
  tokens.count = min(work.end - first, kTokens);
  tokens.row = lane < tokens.count ? load_now(p.rows + first + lane) : 0;
  tokens.scale = lane < tokens.count ? __ldcg(p.row_scale + tokens.row) : 0.0f;
  return tokens;
}

// Asks for the panel's blocks [base, min(base + p.held, end)) into this warp's `stage`. A lane finds there what it
// copied itself: its chunks t and t + 4 of rank g of a block.
__device__ __forceinline__ void load_panel(const Params& p, const Work& work, const int4& pages, int base, int end,
                                           std::byte* stage) {
  const int lane = threadIdx.x % 32;
  const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
  const int count = min(p.held, end - base);
  unsigned long long granule = 0;  // lane i finds the i-th
  if (lane < count) {
    granule = reinterpret_cast<unsigned long long>(
        paged_granule(p.table, work.slot, work.a, pages, work.panel * blocks + base + lane));
  }
#pragma unroll 1
  for (int u = 0; u < count; ++u) {
    const auto* tile =
        reinterpret_cast<const std::byte*>(__shfl_sync(0xffffffffu, granule, u)) + lane % 4 * 128 + lane / 4 * 16;
    std::byte* to = stage + u * kGranuleBytes + lane * 16;
    async_copy16(to, tile);
    async_copy16(to + 512, tile + 512);
  }
  async_commit();
}

// acc += A x over the blocks [base, end) that `stage` holds. x[j]: the row of token 8 j + lane / 4, null = none.
__device__ __forceinline__ void multiply(const Params& p, const std::byte* stage, int base, int end,
                                         const __nv_bfloat16* const (&x)[kGroups], float (&acc)[kGroups][4]) {
  constexpr int kTogether = 3;  // blocks whose x is in flight at once
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = base; first < end; first += kTogether) {
    uint4 values[kTogether * 2][kGroups];
#pragma unroll
    for (int i = 0; i < kTogether * 2; ++i) {
      const int column = (first + i / 2) * kTileColumns + lane % 4 * 8 + i % 2 * 32;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        values[i][j] = zero_chunk();
        if (first + i / 2 < end && column < p.k && x[j] != nullptr) {
          values[i][j] = *reinterpret_cast<const uint4*>(x[j] + column);
        }
      }
    }
    async_wait<0>();  // A is there
#pragma unroll
    for (int i = 0; i < kTogether * 2; ++i) {
      if (first + i / 2 < end) {
        const uint4 a =
            *reinterpret_cast<const uint4*>(stage + (first - base + i / 2) * kGranuleBytes + i % 2 * 512 + lane * 16);
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
          mma_chunk(acc[j], a, zero_chunk(), values[i][j]);
        }
      }
    }
  }
}

// The rows of `tokens`, from position `first` on: sums of the warps in warp order, times the row's scale. Called by the
// whole block; `held` is the first block whose A is in this warp's `stage`.
template <bool EXPERTS>
__device__ __forceinline__ void shrink_tokens(const Params& p, const Work& work, const Tokens& tokens, int first,
                                              std::byte* stage, int& held, float* partial) {
  constexpr int kElements = kGroups * 64;  // [group of 8 tokens][register][lane]; registers 2 and 3 are of no rank
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
  const int end = (warp + 1) * blocks / kWarps;
  const __nv_bfloat16* x[kGroups];
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const int token = 8 * j + lane / 4;
    const int64_t row = __shfl_sync(0xffffffffu, tokens.row, token);
    x[j] = token < tokens.count ? p.x + (p.x_by_position ? int64_t{first} + token : row) * p.x_stride : nullptr;
  }
  float acc[kGroups][4] = {};
#pragma unroll 1
  for (int base = warp * blocks / kWarps; base < end; base += p.held) {
    if (base != held) {
      load_panel(p, work, __ldcg(reinterpret_cast<const int4*>(work.record->a_pages)), base, end, stage);
      held = base;
    }
    multiply(p, stage, base, min(base + p.held, end), x, acc);
  }
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    partial[warp * kElements + j * 64 + lane] = acc[j][0];
    partial[warp * kElements + j * 64 + 32 + lane] = acc[j][1];
  }
  __syncthreads();                                           // all warps' sums are there
  for (int e = threadIdx.x; e < kElements; e += kThreads) {  // by whole warps
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      sum += partial[w * kElements + e];
    }
    const int token = e / 64 * 8 + 2 * (lane % 4) + e / 32 % 2;
    const int rank = work.panel * kTileRanks + lane / 4;
    const int64_t row = __shfl_sync(0xffffffffu, tokens.row, token);
    const float scale = __shfl_sync(0xffffffffu, tokens.scale, token) * work.scale;
    if (token < tokens.count) {
      const int64_t at = EXPERTS ? int64_t{first} + token : row;
      store_shrunk(p.out, EXPERTS && p.out_bf16, (at * p.num_modules + work.module) * p.rank_stride + rank,
                   rank < work.rank && scale != 0.0f ? sum * scale : 0.0f);
    }
  }
  __syncthreads();  // read before the next sums are written
}

// Blocks take panels of modules of segments in turn: as many panels as the batch's largest rank has, not as the largest
// rank that there may be, so that those of all segments run at once. Dense: an eighth warp lets the next kernel start
// as soon as x is there, whatever the others are looking up.
template <bool EXPERTS>
__global__ void __launch_bounds__(kThreads + 32, kBlocksPerSm) lora_shrink_rows(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint4 dynamic_shared[];
  __shared__ float partial[kWarps * kTokens * 8];
  const int warp = threadIdx.x / 32;
  if (EXPERTS || warp == kWarps) {  // the experts' segments are of an earlier kernel of the step
    wait_for_previous();
    let_next_start();
  }
  if (warp == kWarps) {
    return;
  }
  std::byte* const stage = reinterpret_cast<std::byte*>(dynamic_shared) + warp * p.held * kGranuleBytes;
  const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
  const int panels = load_now(p.max_rank) / kTileRanks;
  const int count = p.max_segments * p.num_modules * panels;  // or less
#pragma unroll 1
  for (int index = static_cast<int>(blockIdx.x); index < count; index += static_cast<int>(gridDim.x)) {
    bool ended;
    int4 pages{};
    const Work work = find_work<EXPERTS>(p, index, panels, ended, pages);
    if (ended) {
      break;
    }
    if (work.panel * kTileRanks >= work.rank) {
      continue;
    }
    int held = warp * blocks / kWarps;
    Tokens tokens = find_tokens(p, work, work.begin);
    load_panel(p, work, pages, held, (warp + 1) * blocks / kWarps, stage);
    if (!EXPERTS) {
      wait_for_previous();  // x is there
    }
#pragma unroll 1
    for (int first = work.begin; first < work.end; first += kTokens) {
      if (first != work.begin) {
        tokens = find_tokens(p, work, first);
      }
      shrink_tokens<EXPERTS>(p, work, tokens, first, stage, held, partial);
    }
  }
}

template <bool EXPERTS>
void launch(Params& p, const CudaStream& state) {
  const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
  p.held = std::min((blocks + kWarps - 1) / kWarps, kHeldMax);
  const int shared = kWarps * p.held * static_cast<int>(kGranuleBytes);
  check_cuda(cudaFuncSetAttribute(lora_shrink_rows<EXPERTS>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
             "shared memory of lora_shrink");
  // Dense: as many blocks as run at once, so that the next kernel need not wait for more to begin.
  const int64_t most = int64_t{p.max_segments} * p.num_modules * (p.rank_stride / kTileRanks);
  const auto grid = static_cast<unsigned>(std::clamp<int64_t>(most, 1, (EXPERTS ? 8 : kBlocksPerSm) * state.num_sms));
  launch_dependent(lora_shrink_rows<EXPERTS>, dim3(grid), kThreads + (EXPERTS ? 0 : 32), static_cast<size_t>(shared),
                   state, p);
  check_launch("lora_shrink");
}

}  // namespace moelora::shrink_rows
