// SPDX-License-Identifier: Apache-2.0
// lora_shrink for 9 to 64 rows of dense linears, sm_90 and later: a cluster of 4 blocks takes 16 ranks of one module
// for up to 8 rows of one adapter. The 12 warps of the cluster split K into contiguous ranges of 64-input blocks, four
// to six each for 2880 to 4096 inputs; a warp sends each of its sums to the block that adds those up, in the order
// of the warps. Everything but x is there since the step began, so segments and records are looked up, A is asked into
// the L2 and its first blocks into registers before this kernel waits for x. A warp of each block does the look-ups,
// with the segments in its lanes. Blocks are small, so that one fits beside a block of the product behind this kernel
// (kernels/dense/linear_stream.cuh), whose weights are then under way, too.
// Limited by latency: x, A from the L2, the barrier of the cluster. Included by lora_shrink_cuda.cu.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/lora/adapter_layout.h"
#include "kernels/lora/lora_expand.cuh"

namespace moelora::shrink_split {

constexpr int kMaxRows = 64;
constexpr int kCluster = 4;
constexpr int kWarps = 3;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 7;  // at most 96 registers a thread: what a block of the product leaves of an SM
constexpr int kSlices = kCluster * kWarps;
constexpr int kTokens = 8;
constexpr int kPanels = 2;
constexpr int kRanks = kPanels * kTileRanks;
constexpr int kTogether = 2;       // 64-input blocks whose loads are in flight at once
constexpr int kChunk = 16;         // blocks whose places a warp looks up at once, one a lane and panel

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
  const int32_t* counts;  // LoraBatch::counts
  int max_segments;
  const int32_t* rows;  // row of the batch at each position of the segments
  const float* row_scale;
  float* out;  // [T, num_modules, rank_stride]
  int rank_stride;
};

// Lane i has segments i and i + 32.
struct Segments {
  int begin[2];
  int end[2];
  int slot[2];
  int first_tile[2];  // of up to 8 positions
  int tiles[2];       // 0: there is no such segment
  int num_tiles;
  int max_rank;

  __device__ __forceinline__ void load(const Params& p) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int num_segments = load_now(p.counts + 1);
    max_rank = load_now(p.counts + 2);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int segment = lane + 32 * h;
      const bool room = segment < p.max_segments;
      begin[h] = room ? load_now(p.segment_begin + segment) : 0;
      end[h] = room ? load_now(p.segment_begin + segment + 1) : 0;
      slot[h] = room ? load_now(p.segment_slot + segment) : 0;
    }
    num_tiles = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool there = lane + 32 * h < min(num_segments, p.max_segments) && slot[h] != 0;
      tiles[h] = there ? (end[h] - begin[h] + kTokens - 1) / kTokens : 0;
      int sum = tiles[h];
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(0xffffffffu, sum, step);
        sum += lane >= step ? before : 0;
      }
      first_tile[h] = num_tiles + sum - tiles[h];
      num_tiles += __shfl_sync(0xffffffffu, sum, 31);
    }
  }
};

// Up to 8 rows of one adapter and 16 ranks of one module, in shared memory: registers are short.
struct Item {
  bool ended;  // there is no such item
  int slot;
  int module;  // of the batch's modules
  int pair;    // of panels
  int count;
  int rank;
  float scale;  // of the record
  int a;
  int4 pages;
  int row[kTokens];
  float row_scale[kTokens];
};

// By a warp, whose lanes search together.
__device__ __forceinline__ void find_item(const Params& p, int index, Item& item) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  Segments segments;
  segments.load(p);
  const int pairs = (segments.max_rank + kRanks - 1) / kRanks;
  const bool ended = index >= segments.num_tiles * p.num_modules * pairs;
  if (lane == 0) {
    item.ended = ended;
  }
  if (ended) {
    return;
  }
  const int pair = index % pairs;
  index /= pairs;
  const int module = index % p.num_modules;
  const int tile = index / p.num_modules;
  int first = 0;
  int count = 0;
  int slot = 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int nth = tile - segments.first_tile[h];
    const unsigned holds = __ballot_sync(0xffffffffu, nth >= 0 && nth < segments.tiles[h]);
    if (holds != 0) {
      const int from = __ffs(static_cast<int>(holds)) - 1;
      first = __shfl_sync(0xffffffffu, segments.begin[h] + nth * kTokens, from);
      count = min(__shfl_sync(0xffffffffu, segments.end[h], from) - first, kTokens);
      slot = __shfl_sync(0xffffffffu, segments.slot[h], from);
    }
  }
  const ResolvedLora* record = p.table.resolved_dense(slot, p.layer, static_cast<LoraModule>(p.modules[module]));
  const int row = lane < count ? load_now(p.rows + first + lane) : 0;
  const int4 head = __ldcg(reinterpret_cast<const int4*>(record));  // rank, scale, a, b
  const int4 pages = __ldcg(reinterpret_cast<const int4*>(record->a_pages));
  if (lane == 0) {
    item.slot = slot;
    item.module = module;
    item.pair = pair;
    item.count = count;
    item.rank = head.x;
    item.scale = __int_as_float(head.y);
    item.a = head.z;
    item.pages = pages;
  }
  if (lane < count) {
    item.row[lane] = row;
    item.row_scale[lane] = __ldcg(p.row_scale + row);
  }
}

// Two panels of A in blocks [base, base + count): lane 2 i + j has the place in the pool of the granule of block i and
// panel j, -1 beyond the rank.
struct Granules {
  int mine;
  int count;

  __device__ __forceinline__ void locate(const Params& p, const Item& item, int base, int end) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
    const int panel = item.pair * kPanels + lane % kPanels;
    count = min(end - base, kChunk);
    mine = -1;
    if (lane / kPanels < count && panel * kTileRanks < item.rank) {
      const std::byte* address =
          paged_granule(p.table, item.slot, item.a, item.pages, panel * blocks + base + lane / kPanels);
      mine = static_cast<int>((address - p.table.pool) / static_cast<int64_t>(kGranuleBytes));
    }
  }
  // Those that are not loaded at once, into the L2.
  __device__ __forceinline__ void prefetch(const Params& p) const {
    if (mine >= 0 && static_cast<int>(threadIdx.x % 32) / kPanels >= kTogether) {
      prefetch_l2_bulk(p.table.pool + mine * static_cast<int64_t>(kGranuleBytes), kGranuleBytes);
    }
  }
  // This lane's chunks t and t + 4 of rank g of both panels, from block `first` of the chunk on.
  __device__ __forceinline__ void load(const Params& p, uint4 (&a)[kTogether][kPanels][2], int first) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const int at = __shfl_sync(0xffffffffu, mine, min((first + u) * kPanels + panel, 31));
        const bool there = first + u < count && at >= 0;
        const std::byte* const from =
            p.table.pool + at * static_cast<int64_t>(kGranuleBytes) + (lane % 4 * 128 + lane / 4 * 16);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          a[u][panel][c] = zero_chunk();
          if (there) {
            a[u][panel][c] = load_streaming(from + c * 512);
          }
        }
      }
    }
  }
};

__device__ __forceinline__ void wait_for_x() {
  wait_for_previous();
  let_next_start();
}

// acc += A x over blocks [begin, end). x: this lane's chunk of 8 inputs of its row in block 0, -1: there is no such
// token. Waits for x in any case.
__device__ __forceinline__ void multiply(const Params& p, const Item& item, int begin, int end, int x,
                                         float (&acc)[4]) {
  const int column = static_cast<int>(threadIdx.x % 32) % 4 * 8;
  if (begin == end) {
    wait_for_x();
  }
#pragma unroll 1
  for (int base = begin; base < end; base += kChunk) {
    Granules granules;
    granules.locate(p, item, base, end);
#pragma unroll 1
    for (int first = 0; first < granules.count; first += kTogether) {
      uint4 a[kTogether][kPanels][2];
      granules.load(p, a, first);
      if (first == 0) {
        granules.prefetch(p);
        wait_for_x();
      }
      uint4 values[kTogether][2];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int chunk = (base + first + u) * 8 + c * 4;
          values[u][c] = zero_chunk();
          if (x >= 0 && first + u < granules.count && chunk * 8 + column < p.k) {
            values[u][c] = reinterpret_cast<const uint4*>(p.x)[x + chunk];
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          mma_chunk(acc, a[u][0][c], a[u][1][c], values[u][c]);
        }
      }
    }
  }
}

// The sums that a block of the cluster adds up, of all warps: those of 8 lanes.
struct Partial {
  static_assert(kCluster * 8 == 32);
  float4 of_lane[kSlices][8];
  static constexpr int kBytes = kSlices * 8 * static_cast<int>(sizeof(float4));
};

// This block's sums, scaled, to memory. By a warp.
__device__ __forceinline__ void store_sums(const Params& p, const Item& item, const Partial& partial, int block) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  float values[kSlices];
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    values[slice] = reinterpret_cast<const float*>(partial.of_lane[slice])[lane];
  }
  float sum = 0.0f;
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    sum += values[slice];
  }
  // Register lane % 4 of lane 8 block + lane / 4.
  const int token = lane / 4 % 4 * 2 + lane % 2;
  const int rank = item.pair * kRanks + lane % 4 / 2 * kTileRanks + 2 * block + lane / 16;
  if (token < item.count && rank / kTileRanks * kTileRanks < item.rank) {
    const float scale = item.row_scale[token] * item.scale;
    p.out[(static_cast<int64_t>(item.row[token]) * p.num_modules + item.module) * p.rank_stride + rank] =
        rank < item.rank && scale != 0.0f ? sum * scale : 0.0f;
  }
}

// Grid: [cluster][block]. The next kernel starts when x is there.
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) lora_shrink_split(const __grid_constant__ Params p) {
#ifdef MOELORA_CLUSTERS
  __shared__ Partial partial[2];  // of items in turn
  __shared__ ClusterBarrier arrived[2];
  __shared__ Item item;
  __shared__ int first_block[kWarps + 1];  // of 64 inputs, of each warp
  __shared__ int done;                     // items
  const int block = static_cast<int>(blockIdx.x) % kCluster;
  const int warp = static_cast<int>(threadIdx.x / 32);
  if (threadIdx.x <= kWarps) {
    const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
    first_block[threadIdx.x] = (block * kWarps + static_cast<int>(threadIdx.x)) * blocks / kSlices;
  }
  if (threadIdx.x == 0) {
    done = 0;
    arrived[0].init(1);
    arrived[1].init(1);
  }
  __syncwarp();
  cluster_arrive();
#pragma unroll 1
  for (int index = static_cast<int>(blockIdx.x) / kCluster;; index += static_cast<int>(gridDim.x) / kCluster) {
    if (warp == 0) {
      find_item(p, index, item);
    }
    __syncthreads();  // the item is known
    if (item.ended) {
      break;
    }
    if (item.pair * kRanks < item.rank) {  // for all blocks of the cluster alike
      const int lane = static_cast<int>(threadIdx.x % 32);
      const bool there = lane / 4 < item.count;
      const int x = there ? item.row[lane / 4] * static_cast<int>(p.x_stride / 8) + lane % 4 : -1;
      float acc[4] = {};
      multiply(p, item, first_block[warp], first_block[warp + 1], x, acc);
      __syncwarp();
      if (done == 0) {
        cluster_wait();  // the barriers of the other blocks are there
      }
      Partial& sums = partial[done % 2];
      ClusterBarrier& barrier = arrived[done % 2];
      if (threadIdx.x == 0) {
        barrier.arrive_and_expect(Partial::kBytes);
      }
      barrier.send(&sums.of_lane[block * kWarps + warp][lane % 8], lane / 8,
                   make_float4(acc[0], acc[1], acc[2], acc[3]));
      if (warp == 0) {
        barrier.wait(static_cast<uint32_t>(done / 2 % 2));
        store_sums(p, item, sums, block);
      }
      __syncthreads();  // all have sent
      if (threadIdx.x == 0) {
        ++done;
      }
    }
    // All have done with the item. A block's sums of the next one say to the others that it has those of this one, so
    // that two buffers are enough.
    __syncthreads();
  }
  if (done == 0) {
    cluster_wait();
  }
  if (static_cast<int>(blockIdx.x) < kCluster) {
    wait_for_previous();  // so that the end of this kernel means that older ones have ended, whoever had work
  }
#endif
}

inline bool launch(const Params& p, const CudaStream& state) {
  static const bool usable = has_code(lora_shrink_split);
  if (state.compute_capability < 90 || !usable) {
    return false;
  }
  const int pairs = std::max((p.rank_stride + kRanks - 1) / kRanks, 1);
  const int clusters =
      std::min(p.max_segments * p.num_modules * pairs, kBlocksPerSm * state.num_sms / kCluster);
  launch_dependent_clusters(lora_shrink_split, static_cast<unsigned>(clusters * kCluster), kCluster, kThreads, 0,
                            state, p);
  check_launch("lora_shrink");
  return true;
}

}  // namespace moelora::shrink_split
