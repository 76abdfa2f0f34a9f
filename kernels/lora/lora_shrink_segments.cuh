// SPDX-License-Identifier: Apache-2.0
// lora_shrink for many rows or pairs: a GEMM over tiles of 64 positions of one segment, with the panels of 8 ranks of
// all modules as the other side, up to PANELS at once, so that x is read once or twice and not once a module. Both come
// through stages of shared memory in the background, as whole runs of 16 bytes: x swizzled, A as it lies in the pool,
// whose core matrices are what ldmatrix reads. Eight warps: 32 positions by half of the panels each, the two blocks of
// 64 inputs of a step apart. Few tiles: the blocks of a cluster split K, too. The sums are added at the end, over
// blocks and warps in order. Nothing is zeroed or masked but inputs beyond K: positions and panels that are not there
// give sums that nobody stores. How many items there are is known on the device only, so a fixed number of blocks walks
// all of them in a stride. Tiles are numbered so that a segment begins at tile begin / 64 + segment: no prefix sum over
// segments is needed, at the price of at most one empty tile a segment. Limited by reading x and A from L2. Included by
// lora_shrink_cuda.cu.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/cuda/shared_tile.cuh"
#include "kernels/lora/adapter_layout.h"
#include "kernels/lora/lora_expand.cuh"

namespace moelora::shrink_segments {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 64;       // positions of a tile
constexpr int kStepBlocks = 2;  // of 64 inputs
constexpr int kRowBytes = 2 * kTileColumns;
constexpr int kMaxCluster = 4;

// Up to PANELS panels of 8 ranks, in STAGES stages.
template <int PANELS, int STAGES, int BLOCKS_PER_SM>
struct Tiling {
  static constexpr int kPanels = PANELS;
  static constexpr int kStages = STAGES;
  static constexpr int kBlocksPerSm = BLOCKS_PER_SM;
  static constexpr int kBlockBytes = kRows * kRowBytes + PANELS * static_cast<int>(kGranuleBytes);  // x, then A
  static constexpr int kStageBytes = kStepBlocks * kBlockBytes;
  static constexpr int kWarpPanels = PANELS / 2;
  static constexpr int kCopies = kStepBlocks * PANELS * static_cast<int>(kGranuleBytes) / 16 / kThreads;  // of A
  static_assert(PANELS % 2 == 0 && kCopies * 16 * kThreads == kStepBlocks * PANELS * static_cast<int>(kGranuleBytes));
  // Floats between positions of the sums: lanes of four positions and pairs of ranks fall into different banks.
  static constexpr int kSumStride = PANELS * kTileRanks + 8;
  static_assert(kSumStride % 32 == 8);
  static constexpr int kSumsBytes = kStepBlocks * kRows * kSumStride * 4;
  static constexpr int kBufferBytes = std::max(STAGES * kStageBytes, kSumsBytes);
  // With the places of the granules of A.
  static constexpr int shared_bytes(int k) {
    return kBufferBytes + PANELS * ((k + kTileColumns - 1) / kTileColumns) * static_cast<int>(sizeof(int));
  }
};

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

// 8 ranks of one module.
struct Panel {
  int4 a_pages;
  int a;
  int module;      // of the batch's modules
  int first_rank;  // less than `rank`
  int rank;
  float scale;
};

// Blocks [begin, end) of 64 inputs are this block's.
struct Item {
  int segment;
  int slot;
  int first;  // position
  int count;
  int begin;
  int end;
};

// What the positions of an item are; in shared memory.
struct Positions {
  int row[kRows];
  float scale[kRows];
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

// Panel `index` of the ranks of all modules; false if there are not so many.
__device__ __forceinline__ bool find_panel(const Params& p, const Item& item, int index, Panel& panel) {
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
    const int panels = (ranks[m] + kTileRanks - 1) / kTileRanks;
    if (!found && index >= 0 && index < panels) {
      const auto pages = *reinterpret_cast<const int4*>(records[m]->a_pages);
      panel = {pages, records[m]->a, m, kTileRanks * index, ranks[m], records[m]->scale};
      found = true;
    }
    index -= panels;
  }
  return found;
}

// Where the granules of A of an item's panels are in the pool, [num_panels][end - begin].
__device__ __forceinline__ void locate_panels(const Params& p, const Item& item, const Panel* panels, int num_panels,
                                              int* granules) {
  const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
  const int own = item.end - item.begin;
  for (int e = static_cast<int>(threadIdx.x); e < num_panels * own; e += kThreads) {
    const Panel& panel = panels[e / own];
    const int index = panel.first_rank / kTileRanks * blocks + item.begin + e % own;
    const std::byte* address = paged_granule(p.table, item.slot, panel.a, panel.a_pages, index);
    granules[e] = static_cast<int>((address - p.table.pool) / static_cast<int64_t>(kGranuleBytes));
  }
}

// This thread's share of x: run threadIdx % 8 of two positions 32 apart, of each block.
template <class Tiles>
struct RowCopies {
  const uint4* x;
  int from[2];  // first run of the position, -1: there is no such position
  int run;
  uint32_t to;  // in a stage

  __device__ __forceinline__ void locate(const Params& p, const Item& item, const int* row_of, uint32_t stages) {
    const int position = static_cast<int>(threadIdx.x / 8);
    run = static_cast<int>(threadIdx.x % 8);
    x = reinterpret_cast<const uint4*>(p.x);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int nth = position + 32 * i;
      from[i] = -1;
      if (nth < item.count) {
        from[i] = (p.x_by_position ? item.first + nth : row_of[nth]) * static_cast<int>(p.x_stride / 8) + run;
      }
    }
    to = stages + static_cast<uint32_t>(position * kRowBytes + ((run ^ (position % 8)) << 4));
  }
  // Of one step, into its stage. Inputs beyond K become zeros.
  __device__ __forceinline__ void fill(const Params& p, const Item& item, int step) const {
    const uint32_t stage = to + static_cast<uint32_t>(step % Tiles::kStages * Tiles::kStageBytes);
#pragma unroll
    for (int b = 0; b < kStepBlocks; ++b) {
      const int block = item.begin + step * kStepBlocks + b;
      if (block < item.end) {
        const bool inside = block * kTileColumns + run * 8 < p.k;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (from[i] >= 0) {
            copy_async_16(stage + static_cast<uint32_t>(b * Tiles::kBlockBytes + i * 32 * kRowBytes),
                          x + (inside ? from[i] + block * 8 : 0), inside);
          }
        }
      }
    }
  }
};

// A of one step, on its way to its stage: a thread copies run threadIdx % 64 of kCopies granules, all of the same
// block.
template <class Tiles>
__device__ __forceinline__ void fill_panels(const Params& p, const Item& item, const int* granules, int num_panels,
                                            int step, uint32_t stages) {
  const int run = static_cast<int>(threadIdx.x % 64);
  const int b = static_cast<int>(threadIdx.x / 64 % kStepBlocks);
  const int first = static_cast<int>(threadIdx.x / 64 / kStepBlocks);
  constexpr int kApart = kThreads / 64 / kStepBlocks;  // panels of a thread
  const int block = step * kStepBlocks + b;            // from the item's first
  const int own = item.end - item.begin;
  if (block >= own) {
    return;
  }
  const uint32_t to = stages + static_cast<uint32_t>(step % Tiles::kStages * Tiles::kStageBytes +
                                                     b * Tiles::kBlockBytes + kRows * kRowBytes + run * 16);
  const std::byte* const pool = p.table.pool + run * 16;
#pragma unroll
  for (int i = 0; i < Tiles::kCopies; ++i) {
    const int panel = first + i * kApart;
    if (panel < num_panels) {
      copy_async_16(to + static_cast<uint32_t>(panel * static_cast<int>(kGranuleBytes)),
                    pool + granules[panel * own + block] * static_cast<int64_t>(kGranuleBytes), true);
    }
  }
}

// Of 32 positions and the panels 2 i + half of a warp.
template <class Tiles>
using Sums = float[2][Tiles::kWarpPanels][4];

// sums += x A over one block of 64 inputs. `x`: where the warp's positions begin; `a`: where its first panel does.
template <class Tiles>
__device__ __forceinline__ void multiply_block(Sums<Tiles>& acc, uint32_t x, uint32_t a) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t row = x + (lane % 16) * kRowBytes;  // lanes 16 .. 31: the same rows, the next run
  const uint32_t run = (lane / 16 ^ lane % 8) << 4;
  a += lane * 16;
#pragma unroll
  for (int h = 0; h < 2; ++h) {  // 32 inputs
    uint32_t values[2][2][4];    // [16 inputs][16 positions]
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        load_matrices(values[s][m], row + static_cast<uint32_t>(m * 16 * kRowBytes) +
                                        (run ^ static_cast<uint32_t>((2 * h + s) * 32)));
      }
    }
#pragma unroll
    for (int i = 0; i < Tiles::kWarpPanels; ++i) {
      uint32_t ranks[4];
      load_matrices(ranks, a + static_cast<uint32_t>(2 * i * static_cast<int>(kGranuleBytes) + h * 512));
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const uint32_t(&v)[4] = values[s][m];
          mma_m16n8k16(acc[m][i], v[0], v[1], v[2], v[3], ranks[2 * s], ranks[2 * s + 1]);
        }
      }
    }
  }
}

// A warp's part of the work on an item.
struct WarpPart {
  int first;  // position
  int half;   // panels 2 i + half
  int block;  // of a step
  __device__ __forceinline__ WarpPart() {
    const int warp = static_cast<int>(threadIdx.x / 32);
    first = warp % 2 * 32;
    half = warp / 2 % 2;
    block = warp / 4;
  }
};

// Each warp's sums into shared memory, [block of a step][position][rank].
template <class Tiles>
__device__ __forceinline__ void collect(const Sums<Tiles>& acc, float* sums, const WarpPart& part) {
  const int g = static_cast<int>(threadIdx.x % 32 / 4);
  const int t = static_cast<int>(threadIdx.x % 4);
  float* const to = sums + (part.block * kRows + part.first + g) * Tiles::kSumStride + part.half * kTileRanks + 2 * t;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < Tiles::kWarpPanels; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {  // positions g and g + 8
        *reinterpret_cast<float2*>(to + (16 * m + 8 * j) * Tiles::kSumStride + 2 * i * kTileRanks) =
            make_float2(acc[m][i][2 * j], acc[m][i][2 * j + 1]);
      }
    }
  }
}

// The sums of all blocks of the cluster and of the warps of the same positions, added in their order and scaled, four
// ranks a thread.
template <class Tiles>
__device__ __forceinline__ void store_sums(const Params& p, const Item& item, const Panel* panels, int num_panels,
                                           const Positions& positions, float* sums, int cluster, int nth) {
  const int width = num_panels * (kTileRanks / 4);
  for (int e = static_cast<int>(threadIdx.x) + nth * kThreads; e < item.count * width; e += cluster * kThreads) {
    const int token = e / width;
    const int column = e % width * 4;
    const Panel& panel = panels[column / kTileRanks];
    const int rank = panel.first_rank + column % kTileRanks;
    float sum[4] = {};
    for (int block = 0; block < cluster; ++block) {
#pragma unroll
      for (int part = 0; part < kStepBlocks; ++part) {
        float* own = sums + (part * kRows + token) * Tiles::kSumStride + column;
        const float4 four = *reinterpret_cast<const float4*>(cluster > 1 ? in_block(own, block) : own);
        sum[0] += four.x;
        sum[1] += four.y;
        sum[2] += four.z;
        sum[3] += four.w;
      }
    }
    const float scale = positions.scale[token] * panel.scale;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[i] = rank + i < panel.rank && scale != 0.0f ? sum[i] * scale : 0.0f;
    }
    const int at = p.out_by_position ? item.first + token : positions.row[token];
    const int64_t index = at * static_cast<int64_t>(p.num_modules) + panel.module;
    store_shrunk(p.out, p.out_bf16, index * p.rank_stride + rank, make_float4(sum[0], sum[1], sum[2], sum[3]));
  }
}

// All threads of the cluster have left their sums, and later have read them.
__device__ __forceinline__ void sync_sums(int cluster) {
  if (cluster > 1) {
    __syncwarp();
    cluster_sync();
  } else {
    __syncthreads();
  }
}
__device__ __forceinline__ void sync_reads(int cluster) {
  if (cluster > 1) {
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

template <class Tiles>
__device__ __forceinline__ void shrink_item(const Params& p, const Item& item, const Panel* panels, int num_panels,
                                            Positions& positions, std::byte* buffer, int cluster, int nth) {
  auto* const granules = reinterpret_cast<int*>(buffer + Tiles::kBufferBytes);
  const uint32_t stages = shared_address(buffer);
  const int steps = (item.end - item.begin + kStepBlocks - 1) / kStepBlocks;
  RowCopies<Tiles> rows;
  rows.locate(p, item, positions.row, stages);
#pragma unroll 1
  for (int step = 0; step < min(Tiles::kStages - 1, steps); ++step) {
    rows.fill(p, item, step);
  }
  locate_panels(p, item, panels, num_panels, granules);
  if (static_cast<int>(threadIdx.x) < item.count) {
    positions.scale[threadIdx.x] = p.row_scale[positions.row[threadIdx.x]];
  }
  __syncthreads();  // granules are there
#pragma unroll 1
  for (int step = 0; step < Tiles::kStages - 1; ++step) {
    fill_panels<Tiles>(p, item, granules, num_panels, step, stages);
    async_commit();
  }
  const WarpPart part;
  Sums<Tiles> acc = {};
  const uint32_t own = stages + static_cast<uint32_t>(part.block * Tiles::kBlockBytes);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    async_wait<Tiles::kStages - 2>();
    __syncthreads();  // this step's stage is there for all, and all have used that of the step before
    const int ahead = step + Tiles::kStages - 1;
    rows.fill(p, item, ahead);
    fill_panels<Tiles>(p, item, granules, num_panels, ahead, stages);
    async_commit();
    if (part.first < item.count && item.begin + step * kStepBlocks + part.block < item.end) {
      const uint32_t stage = own + static_cast<uint32_t>(step % Tiles::kStages * Tiles::kStageBytes);
      multiply_block<Tiles>(
          acc, stage + static_cast<uint32_t>(part.first * kRowBytes),
          stage + static_cast<uint32_t>(kRows * kRowBytes + part.half * static_cast<int>(kGranuleBytes)));
    }
  }
  auto* const sums = reinterpret_cast<float*>(buffer);
  async_wait<0>();
  __syncthreads();  // no stage is in use
  collect<Tiles>(acc, sums, part);
  sync_sums(cluster);
  store_sums<Tiles>(p, item, panels, num_panels, positions, sums, cluster, nth);
  sync_reads(cluster);  // before the next item's stages are filled
}

// Grid: [cluster][block].
template <class Tiles>
__global__ void __launch_bounds__(kThreads, Tiles::kBlocksPerSm)
    lora_shrink(const __grid_constant__ Params p, int cluster) {
  extern __shared__ __align__(128) uint4 dynamic_shared[];
  __shared__ Panel panels[Tiles::kPanels];
  __shared__ Positions positions;
  __shared__ Item shared_item;  // registers are short
  auto* const buffer = reinterpret_cast<std::byte*>(dynamic_shared);
  wait_for_previous();
  let_next_start();
  const int num_segments = *p.num_segments;
  if (num_segments == 0) {
    return;
  }
  // Panels are dealt out evenly to the passes over x.
  const int all_panels = max((*p.max_rank + kTileRanks - 1) / kTileRanks * p.num_modules, 1);
  const int passes = (all_panels + Tiles::kPanels - 1) / Tiles::kPanels;
  const int pass_panels = (all_panels + passes - 1) / passes;
  const int num_items = (p.segment_begin[num_segments] / kRows + num_segments) * passes;
  const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
  const int nth = static_cast<int>(blockIdx.x) % cluster;
  const int thread = static_cast<int>(threadIdx.x);
  for (int index = static_cast<int>(blockIdx.x) / cluster; index < num_items;
       index += static_cast<int>(gridDim.x) / cluster) {
    const int tile = index / passes;
    Item item;
    item.segment = find_segment(p, num_segments, tile);
    item.first = p.segment_begin[item.segment] + (tile - first_tile(p, item.segment)) * kRows;
    item.count = min(p.segment_begin[item.segment + 1] - item.first, kRows);
    item.slot = p.segment_slot[item.segment];
    item.begin = nth * blocks / cluster;
    item.end = (nth + 1) * blocks / cluster;
    if (item.count <= 0 || item.slot == 0) {
      continue;
    }
    bool found = false;
    if (thread < pass_panels) {
      found = find_panel(p, item, index % passes * pass_panels + thread, panels[thread]);
    }
    if (thread >= kThreads - kRows && thread - (kThreads - kRows) < item.count) {
      const int token = thread - (kThreads - kRows);
      positions.row[token] = p.rows[item.first + token];
    }
    if (thread == 0) {
      shared_item = item;
    }
    const int num_panels = __syncthreads_count(found ? 1 : 0);
    if (num_panels > 0) {
      shrink_item<Tiles>(p, shared_item, panels, num_panels, positions, buffer, cluster, nth);
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

// Whether the code of `kernel` that would run here knows clusters: it may be compiled for older architectures.
template <class Kernel>
bool has_clusters(Kernel kernel) {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90;
}

// At most `positions` segments, probably about `tiles` tiles: no more blocks than there can be items, nor than run at
// once, and clusters where that leaves room for them.
template <class Tiles>
void launch(const Params& p, int64_t positions, int64_t tiles, int limit, const CudaStream& state) {
  const int64_t passes = (p.rank_stride / kTileRanks * p.num_modules + Tiles::kPanels - 1) / Tiles::kPanels;
  const int64_t items = (positions / kRows + positions) * std::max<int64_t>(passes, 1);
  const int64_t room = int64_t{Tiles::kBlocksPerSm} * state.num_sms;
  static const bool clusters = has_clusters(lora_shrink<Tiles>);
  int cluster = 1;
  while (clusters && state.compute_capability >= 90 && cluster < kMaxCluster && 2 * cluster * tiles <= room) {
    cluster *= 2;
  }
  check_cuda(cudaFuncSetAttribute(lora_shrink<Tiles>, cudaFuncAttributeMaxDynamicSharedMemorySize, limit),
             "shared memory of lora_shrink");
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(items, room / cluster) * cluster);
  launch_dependent_clusters(lora_shrink<Tiles>, dim3(blocks), static_cast<unsigned>(cluster > 1 ? cluster : 0),
                            kThreads, static_cast<size_t>(Tiles::shared_bytes(p.k)), state, p, cluster);
  check_launch("lora_shrink");
}
// As many stages as fit, else two.
template <int PANELS, int STAGES, int BLOCKS_PER_SM>
void launch_panels(const Params& p, int64_t positions, int64_t tiles, const CudaStream& state) {
  const int limit = shared_limit();
  if (Tiling<PANELS, STAGES, BLOCKS_PER_SM>::shared_bytes(p.k) <= limit) {
    launch<Tiling<PANELS, STAGES, BLOCKS_PER_SM>>(p, positions, tiles, limit, state);
  } else {
    launch<Tiling<PANELS, 2, BLOCKS_PER_SM>>(p, positions, tiles, limit, state);
  }
}

inline void launch(const Params& p, int64_t positions, int64_t tiles, const CudaStream& state) {
  switch (p.num_modules) {  // a panel for each 8 of 32 ranks
    case 1:
      return launch_panels<4, 4, 2>(p, positions, tiles, state);
    case 2:
      return launch_panels<8, 3, 2>(p, positions, tiles, state);
    default:
      return launch_panels<12, 5, 1>(p, positions, tiles, state);
  }
}

}  // namespace moelora::shrink_segments
