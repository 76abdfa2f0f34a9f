// SPDX-License-Identifier: Apache-2.0
// lora_shrink for many rows or pairs: a GEMM over tiles of up to 128 positions of one segment, with the ranks of all
// modules as the other side, up to kRankTiles tiles of 16 ranks at once, so that x is read once and not once a module.
// 16 warps: eight times 16 positions, each by two warps that take every other block of 64 inputs and whose sums are
// added at the end. x goes from global memory to fragments (kernels/cuda/mma_tile.cuh), a step ahead; A through
// kStages stages of shared memory. How many items there are is known on the device only, so a fixed number of blocks
// walks all of them in a stride. Tiles are numbered so that a segment begins at tile begin / 128 + segment: no prefix
// sum over segments is needed, at the price of at most one empty tile a segment.
// Limited by reading x and A from L2. Included by lora_shrink_cuda.cu.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/lora/adapter_layout.h"

namespace moelora::shrink_segments {

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 128;     // of a tile
constexpr int kRankTiles = 6;  // of 16 ranks, of an item
constexpr int kStages = 3;
constexpr int kStepBlocks = 2;  // blocks of 64 inputs, of a step: one for each of the two warps of the same positions
constexpr int kStageGranules = kRankTiles * 2 * kStepBlocks;
constexpr int kStageBytes = kStageGranules * static_cast<int>(kGranuleBytes);
constexpr int kCopies = kStageBytes / 16 / kThreads;  // a thread and stage
static_assert(kCopies * 16 * kThreads == kStageBytes);
// Floats between positions of the sums: lanes of four positions and eight ranks fall into different banks.
constexpr int kSumStride = kRankTiles * 16 + 4;
constexpr int kSharedBytes = std::max(kStages * kStageBytes, kRows* kSumStride * 4);

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
  const int32_t* segment_expert;  // null: dense records
  const int32_t* num_segments;
  const int32_t* max_rank;
  const int32_t* rows;  // row of the batch at each position of the segments
  const float* row_scale;
  float* out;
  int rank_stride;
  bool x_by_position;
  bool out_by_position;
};

// 16 ranks of one module.
struct RankTile {
  const ResolvedLora* record;
  int module;      // of the batch's modules
  int first_rank;  // less than `rank`
  int rank;
  float scale;
};

struct Item {
  int segment;
  int slot;
  int first;  // position
  int count;
};

__device__ __forceinline__ int first_tile(const Params& p, int segment) {
  return p.segment_begin[segment] / kRows + segment;
}

// The last segment that begins at or before `tile`; the 32 lanes search together.
__device__ __forceinline__ int find_segment(const Params& p, int num_segments, int tile) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int low = 0;
  int high = num_segments;
  while (high - low > 1) {
    const int step = (high - low + 31) / 32;
    const int probe = low + lane * step;
    const unsigned before = __ballot_sync(0xffffffffu, probe < high && first_tile(p, probe) <= tile);
    low += (31 - __clz(static_cast<int>(before))) * step;  // lane 0 is always among them
    high = min(low + step, high);
  }
  return low;
}

// Tile `index` of the ranks of all modules; false if there are not so many.
__device__ __forceinline__ bool find_rank_tile(const Params& p, const Item& item, int index, RankTile& tile) {
  for (int m = 0; m < p.num_modules; ++m) {
    const ResolvedLora* record = p.segment_expert == nullptr
                                     ? p.table.resolved_dense(item.slot, p.layer, static_cast<LoraModule>(p.modules[m]))
                                     : p.table.resolved_expert(item.slot, p.layer, p.segment_expert[item.segment],
                                                               static_cast<ExpertModule>(p.modules[m]));
    const int tiles = (record->rank + 15) / 16;
    if (index < tiles) {
      tile = {record, m, 16 * index, record->rank, record->scale};
      return true;
    }
    index -= tiles;
  }
  return false;
}

// Run `run` of a granule (core matrix run / 8, rank run % 8) in shared memory, in bytes. Lanes of four neighbouring
// core matrices and two ranks read together, hence the ranks of a core matrix lie turned by twice its number.
__device__ __forceinline__ int place_of_run(int run) {
  return 16 * (run ^ (run / 8 % 4 * 2));
}

// A of an item, on its way to shared memory. In a stage granule (2 tile + half) * kStepBlocks + block is of 8 ranks and
// 64 inputs; a thread copies 16 bytes each of kCopies granules, and of those kStepBlocks further in the next stage.
struct PanelCopies {
  int at[kCopies];       // granule of the pool, -1 = zeros
  int granule[kCopies];  // in its page
  int left;              // blocks of the panels from this one on, <= 0 = zeros

  // Where copy i is now; once an item and page.
  __device__ __forceinline__ void find(const Params& p, const Item& item, const RankTile* tiles, int i) {
    const int panel = (static_cast<int>(threadIdx.x) + i * kThreads) / 64 / kStepBlocks;  // of the stage
    const ResolvedLora& record = *tiles[panel / 2].record;
    const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
    const int index = (tiles[panel / 2].first_rank / kTileRanks + panel % 2) * blocks + (blocks - left);  // in A
    const std::byte* address = p.table.resolved_granule(item.slot, record.a, record.a_pages, index);
    at[i] = static_cast<int>((address - p.table.pool) / static_cast<int64_t>(kGranuleBytes));
    granule[i] = (record.a + index) % p.table.page_granules;
  }
  __device__ __forceinline__ void begin(const Params& p, const Item& item, const RankTile* tiles, int num_tiles) {
    left = (p.k + kTileColumns - 1) / kTileColumns - static_cast<int>(threadIdx.x) / 64 % kStepBlocks;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int panel = (static_cast<int>(threadIdx.x) + i * kThreads) / 64 / kStepBlocks;
      at[i] = -1;
      granule[i] = 0;
      if (left > 0 && panel / 2 < num_tiles &&
          tiles[panel / 2].first_rank + panel % 2 * kTileRanks < tiles[panel / 2].rank) {
        find(p, item, tiles, i);
      }
    }
  }
  // Always closes a group.
  __device__ __forceinline__ void fill(const Params& p, const Item& item, const RankTile* tiles, std::byte* stage,
                                       int num_tiles, bool present) {
    if (present) {
      const bool inside = left > 0;
      left -= kStepBlocks;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int to = 16 * (static_cast<int>(threadIdx.x) + i * kThreads);
        if (to / static_cast<int>(kGranuleBytes) / (2 * kStepBlocks) < num_tiles) {
          const int64_t from = max(at[i], 0) * static_cast<int64_t>(kGranuleBytes) + threadIdx.x % 64 * 16;
          async_copy16(stage + to - threadIdx.x % 64 * 16 + place_of_run(threadIdx.x % 64), p.table.pool + from,
                       inside && at[i] >= 0);
          if (left > 0 && at[i] >= 0) {
            at[i] += kStepBlocks;
            granule[i] += kStepBlocks;
            if (granule[i] >= p.table.page_granules) {
              find(p, item, tiles, i);
            }
          }
        }
      }
    }
    async_commit();
  }
};
static_assert(kThreads / 64 % kStepBlocks == 0, "all copies of a thread are of the same block of a step");

// This lane's two rows of x, tokens g of two groups of 8.
struct TokenRows {
  const uint4* x;
  int row[2];  // first chunk in x, -1: there is no such token
  int chunks;

  __device__ __forceinline__ void locate(const Params& p, const Item& item, int first) {
    const int g = static_cast<int>(threadIdx.x % 32 / 4);
    x = reinterpret_cast<const uint4*>(p.x);
    chunks = p.k / 8;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int token = first + 8 * j + g;
      row[j] = -1;
      if (token < item.count) {
        const int position = item.first + token;
        row[j] = (p.x_by_position ? position : p.rows[position]) * static_cast<int>(p.x_stride / 8);
      }
    }
  }
  __device__ __forceinline__ void load(uint4 (&to)[2][2], int block) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int chunk = 8 * block + 4 * c + static_cast<int>(threadIdx.x % 4);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        to[j][c] = row[j] >= 0 && chunk < chunks ? x[row[j] + chunk] : zero_chunk();
      }
    }
  }
};

using Sums = float[kRankTiles][2][4];

__device__ __forceinline__ void multiply_block(Sums& acc, const uint4 (&x)[2][2], const std::byte* stage, int block,
                                               int num_tiles) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::byte* const from = stage + block * static_cast<int>(kGranuleBytes) + place_of_run(lane % 4 * 8 + lane / 4);
#pragma unroll
  for (int tile = 0; tile < kRankTiles; ++tile) {
    if (tile < num_tiles) {
      const std::byte* const low = from + tile * 2 * kStepBlocks * static_cast<int>(kGranuleBytes);
      const std::byte* const high = low + kStepBlocks * static_cast<int>(kGranuleBytes);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint4 a = *reinterpret_cast<const uint4*>(low + 512 * c);
        const uint4 b = *reinterpret_cast<const uint4*>(high + 512 * c);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          mma_chunk(acc[tile][j], a, b, x[j][c]);
        }
      }
    }
  }
}

// Adds the sums of the two warps of the same positions: first those of the second, then by the first.
__device__ __forceinline__ void collect(const Sums& acc, float* sums, int first, int num_tiles, bool add) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int tile = 0; tile < kRankTiles; ++tile) {
    if (tile < num_tiles) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& sum = sums[(first + 8 * j + 2 * (lane % 4) + i % 2) * kSumStride + 16 * tile + lane / 4 + i / 2 * 8];
          sum = add ? acc[tile][j][i] + sum : acc[tile][j][i];
        }
      }
    }
  }
}

__device__ __forceinline__ void store_sums(const Params& p, const Item& item, const RankTile* tiles, int num_tiles,
                                           const float* sums) {
  const int width = 16 * num_tiles;
  for (int e = static_cast<int>(threadIdx.x); e < item.count * width; e += kThreads) {
    const int token = e / width;
    const int column = e % width;
    const RankTile& tile = tiles[column / 16];
    const int rank = tile.first_rank + column % 16;
    if (rank >= (tile.rank + kTileRanks - 1) / kTileRanks * kTileRanks) {
      continue;
    }
    const int position = item.first + token;
    const int row = p.rows[position];
    const float scale = p.row_scale[row] * tile.scale;
    const int64_t index = (p.out_by_position ? position : row) * static_cast<int64_t>(p.num_modules) + tile.module;
    p.out[index * p.rank_stride + rank] =
        rank < tile.rank && scale != 0.0f ? sums[token * kSumStride + column] * scale : 0.0f;
  }
}

__device__ __forceinline__ void shrink_item(const Params& p, const Item& item, const RankTile* tiles, int num_tiles,
                                            std::byte* stages) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int first = warp % 8 * 16;
  const int part = warp / 8;
  const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
  const int steps = (blocks + kStepBlocks - 1) / kStepBlocks;
  PanelCopies panels;
  panels.begin(p, item, tiles, num_tiles);
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    panels.fill(p, item, tiles, stages + s * kStageBytes, num_tiles, s < steps);
  }
  TokenRows rows;
  rows.locate(p, item, first);
  uint4 x[2][2];
  rows.load(x, part);
  Sums acc = {};
  for (int step = 0; step < steps; ++step) {
    async_wait<kStages - 2>();
    __syncthreads();  // this step's A is there for all, and all have used that of the step before
    const int ahead = step + kStages - 1;
    panels.fill(p, item, tiles, stages + ahead % kStages * kStageBytes, num_tiles, ahead < steps);
    uint4 next[2][2];
    rows.load(next, kStepBlocks * (step + 1) + part);
    if (first < item.count) {
      multiply_block(acc, x, stages + step % kStages * kStageBytes, part, num_tiles);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      x[j][0] = next[j][0];
      x[j][1] = next[j][1];
    }
  }
  auto* sums = reinterpret_cast<float*>(stages);
  async_wait<0>();
  __syncthreads();  // no stage is in use
  if (part == 1) {
    collect(acc, sums, first, num_tiles, false);
  }
  __syncthreads();  // the second warps' sums are there
  if (part == 0) {
    collect(acc, sums, first, num_tiles, true);
  }
  __syncthreads();  // all sums are there
  store_sums(p, item, tiles, num_tiles, sums);
  __syncthreads();  // read before the next item's stages are filled
}

__global__ void __launch_bounds__(kThreads, 1) lora_shrink(const __grid_constant__ Params p) {
  extern __shared__ uint4 dynamic_shared[];
  __shared__ RankTile tiles[kRankTiles];
  __shared__ Item shared_item;  // registers are short
  auto* const stages = reinterpret_cast<std::byte*>(dynamic_shared);
  wait_for_previous();
  let_next_start();
  const int num_segments = *p.num_segments;
  if (num_segments == 0) {
    return;
  }
  const int passes = ((*p.max_rank + 15) / 16 * p.num_modules + kRankTiles - 1) / kRankTiles;
  const int num_items = (p.segment_begin[num_segments] / kRows + num_segments) * passes;
  for (int index = static_cast<int>(blockIdx.x); index < num_items; index += static_cast<int>(gridDim.x)) {
    const int tile = index / passes;
    Item item;
    item.segment = find_segment(p, num_segments, tile);
    item.first = p.segment_begin[item.segment] + (tile - first_tile(p, item.segment)) * kRows;
    item.count = min(p.segment_begin[item.segment + 1] - item.first, kRows);
    item.slot = p.segment_slot[item.segment];
    if (item.count <= 0 || item.slot == 0) {
      continue;
    }
    bool found = false;
    if (threadIdx.x < kRankTiles) {
      found = find_rank_tile(p, item, index % passes * kRankTiles + static_cast<int>(threadIdx.x), tiles[threadIdx.x]);
    }
    if (threadIdx.x == 0) {
      shared_item = item;
    }
    const int num_tiles = __syncthreads_count(found ? 1 : 0);
    if (num_tiles > 0) {
      shrink_item(p, shared_item, tiles, num_tiles, stages);
    }
  }
}

// At most `positions` segments: no more blocks than there can be items, nor than run at once.
inline void launch(const Params& p, int64_t positions, const CudaStream& state) {
  const int64_t passes = ((p.rank_stride + 15) / 16 * p.num_modules + kRankTiles - 1) / kRankTiles;
  const int64_t items = (positions / kRows + positions) * passes;
  check_cuda(cudaFuncSetAttribute(lora_shrink, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
             "shared memory of lora_shrink");
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, state.num_sms));
  launch_dependent(lora_shrink, dim3(blocks), kThreads, kSharedBytes, state, p);
  check_launch("lora_shrink");
}

}  // namespace moelora::shrink_segments
