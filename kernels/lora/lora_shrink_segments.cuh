// SPDX-License-Identifier: Apache-2.0
// lora_shrink for many rows or pairs: a GEMM over tiles of positions of one segment, with the ranks of all modules as
// the other side, up to RANK_TILES tiles of 16 ranks at once, so that x is read once or twice and not once a module.
// Eight warps: 16 positions each, by as many warps as that leaves, which take the blocks of 64 inputs in turn and whose
// sums are added at the end. Few rows make small tiles, so that there are as many as SMs. x goes from global memory to
// fragments (kernels/cuda/mma_tile.cuh), steps ahead; A through stages of shared memory. How many items there are is
// known on the device only, so a fixed number of blocks walks all of them in a stride. Tiles are numbered so that a
// segment begins at tile begin / rows + segment: no prefix sum over segments is needed, at the price of at most one
// empty tile a segment.
// Limited by reading x and A from L2. Included by lora_shrink_cuda.cu.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/lora/adapter_layout.h"
#include "kernels/lora/lora_expand.cuh"

namespace moelora::shrink_segments {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

// Tiles of 16 ROW_GROUPS positions and up to 16 RANK_TILES ranks. A comes through STAGES stages, x STEPS_AHEAD steps
// ahead.
template <int ROW_GROUPS, int RANK_TILES, int STAGES, int STEPS_AHEAD, int BLOCKS_PER_SM>
struct Tiling {
  static constexpr int kRows = 16 * ROW_GROUPS;
  static constexpr int kRankTiles = RANK_TILES;
  static constexpr int kStages = STAGES;
  static constexpr int kStepsAhead = STEPS_AHEAD;
  static constexpr int kBlocksPerSm = BLOCKS_PER_SM;
  static constexpr int kRowGroups = ROW_GROUPS;
  // Blocks of 64 inputs of a step: one for each warp of the same positions.
  static constexpr int kStepBlocks = kWarps / ROW_GROUPS;
  static constexpr int kStageBytes = RANK_TILES * 2 * kStepBlocks * static_cast<int>(kGranuleBytes);
  static constexpr int kCopies = kStageBytes / 16 / kThreads;  // a thread and stage
  static_assert(kCopies * 16 * kThreads == kStageBytes);
  static_assert(kThreads / 64 % kStepBlocks == 0, "all copies of a thread are of the same block of a step");
  // Floats between positions of the sums: lanes of four positions and eight ranks fall into different banks.
  static constexpr int kSumStride = RANK_TILES * 16 + 4;
  static constexpr int kSumsBytes = kStepBlocks * kRows * kSumStride * 4;
  static constexpr int kBufferBytes = std::max(STAGES * kStageBytes, kSumsBytes);
  // With the places of the granules of A.
  static constexpr int shared_bytes(int k) {
    return kBufferBytes + RANK_TILES * 2 * ((k + kTileColumns - 1) / kTileColumns) * static_cast<int>(sizeof(int));
  }
};
using SmallTiling = Tiling<2, 3, 4, 4, 1>;
using MediumTiling = Tiling<4, 4, 5, 2, 2>;
using LargeTiling = Tiling<8, 4, 6, 2, 2>;

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
  bool out_bf16;
};

// 16 ranks of one module.
struct RankTile {
  int4 a_pages;
  int a;
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

template <class Tiles>
__device__ __forceinline__ int first_tile(const Params& p, int segment) {
  return p.segment_begin[segment] / Tiles::kRows + segment;
}

// The last segment that begins at or before `tile`; the 32 lanes search together.
template <class Tiles>
__device__ __forceinline__ int find_segment(const Params& p, int num_segments, int tile) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int low = 0;
  int high = num_segments;
  while (high - low > 1) {
    const int step = (high - low + 31) / 32;
    const int probe = low + lane * step;
    const unsigned before = __ballot_sync(0xffffffffu, probe < high && first_tile<Tiles>(p, probe) <= tile);
    low += (31 - __clz(static_cast<int>(before))) * step;  // lane 0 is always among them
    high = min(low + step, high);
  }
  return low;
}

// Tile `index` of the ranks of all modules; false if there are not so many.
__device__ __forceinline__ bool find_rank_tile(const Params& p, const Item& item, int index, RankTile& tile) {
  constexpr int kModules = 3;
  const ResolvedLora* records[kModules];
  int ranks[kModules];
#pragma unroll
  for (int m = 0; m < kModules; ++m) {  // all reads at once
    ranks[m] = 0;
    if (m < p.num_modules) {
      records[m] = p.segment_expert == nullptr
                       ? p.table.resolved_dense(item.slot, p.layer, static_cast<LoraModule>(p.modules[m]))
                       : p.table.resolved_expert(item.slot, p.layer, p.segment_expert[item.segment],
                                                 static_cast<ExpertModule>(p.modules[m]));
      ranks[m] = records[m]->rank;
    }
  }
  bool found = false;
#pragma unroll
  for (int m = 0; m < kModules; ++m) {
    const int tiles = (ranks[m] + 15) / 16;
    if (!found && index >= 0 && index < tiles) {
      const auto pages = *reinterpret_cast<const int4*>(records[m]->a_pages);
      tile = {pages, records[m]->a, m, 16 * index, ranks[m], records[m]->scale};
      found = true;
    }
    index -= tiles;
  }
  return found;
}

// Run `run` of a granule (core matrix run / 8, rank run % 8) in shared memory, in bytes. Lanes of four neighbouring
// core matrices and two ranks read together, hence the ranks of a core matrix lie turned by twice its number.
__device__ __forceinline__ int place_of_run(int run) {
  return 16 * (run ^ (run / 8 % 4 * 2));
}

// Where the granules of A of an item's panels are in the pool, [2 num_tiles][blocks]; -1: ranks that are not there.
__device__ __forceinline__ void locate_panels(const Params& p, const Item& item, const RankTile* tiles, int num_tiles,
                                              int* granules) {
  const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
  for (int e = static_cast<int>(threadIdx.x); e < 2 * num_tiles * blocks; e += kThreads) {
    const int panel = e / blocks;
    const RankTile& tile = tiles[panel / 2];
    const int rank = tile.first_rank + panel % 2 * kTileRanks;
    int at = -1;
    if (rank < tile.rank) {
      const int index = rank / kTileRanks * blocks + (e - panel * blocks);
      const std::byte* address = paged_granule(p.table, item.slot, tile.a, tile.a_pages, index);
      at = static_cast<int>((address - p.table.pool) / static_cast<int64_t>(kGranuleBytes));
    }
    granules[e] = at;
  }
}

// A of one step, on its way to shared memory: granule panel * kStepBlocks + block of a stage is of 8 ranks and 64
// inputs, a thread copies 16 bytes each of kCopies granules. Always closes a group.
template <class Tiles>
__device__ __forceinline__ void fill_stage(const Params& p, const int* granules, int num_tiles, int step, int steps,
                                           std::byte* stages) {
  constexpr int kStepBlocks = Tiles::kStepBlocks;
  if (step < steps) {
    const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
    const int run = static_cast<int>(threadIdx.x % 64);
    const int nth = static_cast<int>(threadIdx.x / 64);  // granule of the stage, of the first copy
    const int block = step * kStepBlocks + nth % kStepBlocks;
    std::byte* const to =
        stages + step % Tiles::kStages * Tiles::kStageBytes + nth * static_cast<int>(kGranuleBytes) + place_of_run(run);
#pragma unroll
    for (int i = 0; i < Tiles::kCopies; ++i) {
      const int panel = nth / kStepBlocks + i * (kThreads / 64 / kStepBlocks);
      if (panel < 2 * num_tiles) {
        const int at = block < blocks ? granules[panel * blocks + block] : -1;
        const int64_t from = max(at, 0) * static_cast<int64_t>(kGranuleBytes) + 16 * run;
        async_copy16(to + i * (kThreads / 64) * static_cast<int>(kGranuleBytes), p.table.pool + from, at >= 0);
      }
    }
  }
  async_commit();
}

// This lane's two rows of x, tokens g of two groups of 8.
struct TokenRows {
  const uint4* x;
  int row[2];  // first chunk in x, -1: there is no such token
  int chunks;

  __device__ __forceinline__ void locate(const Params& p, const Item& item, const int* row_of, int first) {
    const int g = static_cast<int>(threadIdx.x % 32 / 4);
    x = reinterpret_cast<const uint4*>(p.x);
    chunks = p.k / 8;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int token = first + 8 * j + g;
      row[j] = -1;
      if (token < item.count) {
        row[j] = (p.x_by_position ? item.first + token : row_of[token]) * static_cast<int>(p.x_stride / 8);
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

template <class Tiles>
using Sums = float[Tiles::kRankTiles][2][4];

// ALL: there are RANK_TILES tiles, which then need no branches between their products.
template <class Tiles, bool ALL>
__device__ __forceinline__ void multiply_block(Sums<Tiles>& acc, const uint4 (&x)[2][2], const std::byte* granule,
                                               int num_tiles) {
  constexpr int kHalf = Tiles::kStepBlocks * static_cast<int>(kGranuleBytes);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::byte* const from = granule + place_of_run(lane % 4 * 8 + lane / 4);
#pragma unroll
  for (int tile = 0; tile < Tiles::kRankTiles; ++tile) {
    if (ALL || tile < num_tiles) {
      const std::byte* const low = from + tile * 2 * kHalf;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint4 a = *reinterpret_cast<const uint4*>(low + 512 * c);
        const uint4 b = *reinterpret_cast<const uint4*>(low + kHalf + 512 * c);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          mma_chunk(acc[tile][j], a, b, x[j][c]);
        }
      }
    }
  }
}

// Each warp's sums into shared memory, [warp of the same positions][position][rank].
template <class Tiles>
__device__ __forceinline__ void collect(const Sums<Tiles>& acc, float* sums, int part, int first, int num_tiles) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int tile = 0; tile < Tiles::kRankTiles; ++tile) {
    if (tile < num_tiles) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int position = part * Tiles::kRows + first + 8 * j + 2 * (lane % 4) + i % 2;
          sums[position * Tiles::kSumStride + 16 * tile + lane / 4 + i / 2 * 8] = acc[tile][j][i];
        }
      }
    }
  }
}

// What the positions of an item are; in shared memory.
template <class Tiles>
struct Positions {
  int row[Tiles::kRows];
  float scale[Tiles::kRows];
};

// The sums of the warps of the same positions, added in their order and scaled.
template <class Tiles>
__device__ __forceinline__ void store_sums(const Params& p, const Item& item, const RankTile* tiles, int num_tiles,
                                           const Positions<Tiles>& positions, const float* sums) {
  const int width = 16 * num_tiles;
  for (int e = static_cast<int>(threadIdx.x); e < item.count * width; e += kThreads) {
    const int token = e / width;
    const int column = e % width;
    const RankTile& tile = tiles[column / 16];
    const int rank = tile.first_rank + column % 16;
    if (rank >= (tile.rank + kTileRanks - 1) / kTileRanks * kTileRanks) {
      continue;
    }
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < Tiles::kStepBlocks; ++part) {
      sum += sums[(part * Tiles::kRows + token) * Tiles::kSumStride + column];
    }
    const int at = p.out_by_position ? item.first + token : positions.row[token];
    const float scale = positions.scale[token] * tile.scale;
    const int64_t index = at * static_cast<int64_t>(p.num_modules) + tile.module;
    store_shrunk(p.out, p.out_bf16, index * p.rank_stride + rank,
                 rank < tile.rank && scale != 0.0f ? sum * scale : 0.0f);
  }
}

template <class Tiles>
__device__ __forceinline__ void shrink_item(const Params& p, const Item& item, const RankTile* tiles, int num_tiles,
                                            Positions<Tiles>& positions, std::byte* stages) {
  constexpr int kStepBlocks = Tiles::kStepBlocks;
  constexpr int kAhead = Tiles::kStepsAhead;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int first = warp % Tiles::kRowGroups * 16;
  const int part = warp / Tiles::kRowGroups;
  const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
  const int steps = (blocks + kStepBlocks - 1) / kStepBlocks;
  auto* const granules = reinterpret_cast<int*>(stages + Tiles::kBufferBytes);
  TokenRows rows;
  rows.locate(p, item, positions.row, first);
  uint4 x[kAhead][2][2];
#pragma unroll
  for (int s = 0; s < kAhead; ++s) {
    rows.load(x[s], kStepBlocks * s + part);
  }
  locate_panels(p, item, tiles, num_tiles, granules);
  __syncthreads();  // granules are there
#pragma unroll 1
  for (int step = 0; step < Tiles::kStages - 1; ++step) {
    fill_stage<Tiles>(p, granules, num_tiles, step, steps, stages);
  }
  if (static_cast<int>(threadIdx.x) < item.count) {
    positions.scale[threadIdx.x] = p.row_scale[positions.row[threadIdx.x]];
  }
  Sums<Tiles> acc = {};
#pragma unroll 1
  for (int base = 0; base < steps; base += kAhead) {
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      const int step = base + s;
      if (step < steps) {
        async_wait<Tiles::kStages - 2>();
        __syncthreads();  // this step's A is there for all, and all have used that of the step before
        fill_stage<Tiles>(p, granules, num_tiles, step + Tiles::kStages - 1, steps, stages);
        if (first < item.count) {
          const std::byte* granule = stages + step % Tiles::kStages * Tiles::kStageBytes + part * kGranuleBytes;
          if (num_tiles == Tiles::kRankTiles) {
            multiply_block<Tiles, true>(acc, x[s], granule, num_tiles);
          } else {
            multiply_block<Tiles, false>(acc, x[s], granule, num_tiles);
          }
          rows.load(x[s], kStepBlocks * (step + kAhead) + part);
        }
      }
    }
  }
  auto* sums = reinterpret_cast<float*>(stages);
  async_wait<0>();
  __syncthreads();  // no stage is in use
  if (first < item.count) {
    collect<Tiles>(acc, sums, part, first, num_tiles);
  }
  __syncthreads();  // all sums are there
  store_sums<Tiles>(p, item, tiles, num_tiles, positions, sums);
  __syncthreads();  // read before the next item's stages are filled
}

template <class Tiles>
__global__ void __launch_bounds__(kThreads, Tiles::kBlocksPerSm) lora_shrink(const __grid_constant__ Params p) {
  extern __shared__ uint4 dynamic_shared[];
  __shared__ RankTile tiles[Tiles::kRankTiles];
  __shared__ Positions<Tiles> positions;
  __shared__ Item shared_item;  // registers are short
  auto* const stages = reinterpret_cast<std::byte*>(dynamic_shared);
  wait_for_previous();
  let_next_start();
  const int num_segments = *p.num_segments;
  if (num_segments == 0) {
    return;
  }
  // Rank tiles are dealt out evenly to the passes over x.
  const int all_tiles = max((*p.max_rank + 15) / 16 * p.num_modules, 1);
  const int passes = (all_tiles + Tiles::kRankTiles - 1) / Tiles::kRankTiles;
  const int pass_tiles = (all_tiles + passes - 1) / passes;
  const int num_items = (p.segment_begin[num_segments] / Tiles::kRows + num_segments) * passes;
  for (int index = static_cast<int>(blockIdx.x); index < num_items; index += static_cast<int>(gridDim.x)) {
    const int tile = index / passes;
    Item item;
    item.segment = find_segment<Tiles>(p, num_segments, tile);
    item.first = p.segment_begin[item.segment] + (tile - first_tile<Tiles>(p, item.segment)) * Tiles::kRows;
    item.count = min(p.segment_begin[item.segment + 1] - item.first, Tiles::kRows);
    item.slot = p.segment_slot[item.segment];
    if (item.count <= 0 || item.slot == 0) {
      continue;
    }
    const int thread = static_cast<int>(threadIdx.x);
    bool found = false;
    if (thread < pass_tiles) {
      found = find_rank_tile(p, item, index % passes * pass_tiles + thread, tiles[thread]);
    }
    if (thread >= kThreads - Tiles::kRows && thread - (kThreads - Tiles::kRows) < item.count) {
      const int token = thread - (kThreads - Tiles::kRows);
      positions.row[token] = p.rows[item.first + token];
    }
    if (thread == 0) {
      shared_item = item;
    }
    const int num_tiles = __syncthreads_count(found ? 1 : 0);
    if (num_tiles > 0) {
      shrink_item<Tiles>(p, shared_item, tiles, num_tiles, positions, stages);
    }
  }
}

// Dynamic shared memory that a block of any tiling can have. The same for all launches, so that launches of several
// threads do not take it from each other.
inline int shared_limit() {
  constexpr int kStatic = 2048;
  int device = 0;
  int bytes = 0;
  check_cuda(cudaGetDevice(&device), "device of lora_shrink");
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "shared memory of lora_shrink");
  return bytes - kStatic;
}

// At most `positions` segments: no more blocks than there can be items, nor than run at once.
template <class Tiles>
void launch(const Params& p, int64_t positions, int limit, const CudaStream& state) {
  const int64_t passes = ((p.rank_stride + 15) / 16 * p.num_modules + Tiles::kRankTiles - 1) / Tiles::kRankTiles;
  const int64_t items = (positions / Tiles::kRows + positions) * passes;
  check_cuda(cudaFuncSetAttribute(lora_shrink<Tiles>, cudaFuncAttributeMaxDynamicSharedMemorySize, limit),
             "shared memory of lora_shrink");
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, Tiles::kBlocksPerSm * state.num_sms));
  launch_dependent(lora_shrink<Tiles>, dim3(blocks), kThreads, static_cast<size_t>(Tiles::shared_bytes(p.k)), state, p);
  check_launch("lora_shrink");
}

// Sizes of tiles, from rows or pairs.
enum class Size : uint8_t { kSmall, kMedium, kLarge };

inline void launch(const Params& p, int64_t positions, Size size, const CudaStream& state) {
  const int limit = shared_limit();
  if (size == Size::kSmall && SmallTiling::shared_bytes(p.k) <= limit) {
    launch<SmallTiling>(p, positions, limit, state);
  } else if (size != Size::kLarge) {
    launch<MediumTiling>(p, positions, limit, state);
  } else {
    launch<LargeTiling>(p, positions, limit, state);
  }
}

}  // namespace moelora::shrink_segments
