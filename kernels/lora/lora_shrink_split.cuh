// SPDX-License-Identifier: Apache-2.0
// lora_shrink for 9 to 64 rows of dense linears, sm_90 and later: a cluster of 4 blocks takes 16 or 32 ranks of one
// module for up to 8 rows of one adapter. The 12 warps of the cluster split K into contiguous ranges of 64-input
// blocks, three to six each for 2048 to 4096 inputs; a warp sends each of its sums to the block that adds those up, in
// the order of the warps. Everything but x is there since the step began, so segments and records are looked up and A
// is copied to shared memory before this kernel waits for x. A warp of each block does the look-ups, with the segments
// in its lanes. Blocks are small, so that one fits beside a block of the product behind this kernel
// (kernels/dense/linear_stream.cuh), which begins as early and whose weights are under way, too. Limited by latency, of
// loads that queue behind the product's: x, the barrier of the cluster. H200, 64 rows with 8 adapters, o of gpt-oss's
// and of Qwen3-30B-A3B's shape, from the end of attention to the last sums: 8.3 and 6.5 us; of these x takes 3 to 4.
// With two blocks of A at a time in registers, the others from the L2, 8.4 and 6.7 although the product began later.
// After its last item a cluster used to look for another, 2 us. Included by lora_shrink_cuda.cu.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/counter.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mbarrier.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/lora/adapter_layout.h"
#include "kernels/lora/lora_expand.cuh"

namespace moelora::shrink_split {

constexpr int kMaxRows = 64;
constexpr int kCluster = 4;
constexpr int kWarps = 3;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 7;  // at most 80 registers a thread: what a block of the product leaves of an SM
constexpr int kSlices = kCluster * kWarps;
constexpr int kTokens = 8;
constexpr int kGridPerSm = 3;  // blocks of the grid
// Blocks of 64 inputs that a warp has in shared memory at once, at most, with `panels` of A.
constexpr int held_blocks(int panels) {
  return panels == 2 ? 6 : 4;
}

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
  uint32_t* x_ready;  // counted up when x is there; null: nobody reads it
  int held;           // blocks of 64 inputs that a warp has in shared memory at once
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

// Up to 8 rows of one adapter and PANELS panels of one module, in shared memory: registers are short.
struct Item {
  int num_items;  // in all; the rest is there if there is such an item
  int slot;
  int module;  // of the batch's modules
  int first_panel;
  int count;
  int rank;
  float scale;  // of the record
  int a;
  int4 pages;
  int row[kTokens];
  float row_scale[kTokens];
};

// By a warp, whose lanes search together.
template <int PANELS>
__device__ __forceinline__ void find_item(const Params& p, int index, Item& item) {
  constexpr int kRanks = PANELS * kTileRanks;
  const int lane = static_cast<int>(threadIdx.x % 32);
  Segments segments;
  segments.load(p);
  const int parts = (segments.max_rank + kRanks - 1) / kRanks;
  const int num_items = segments.num_tiles * p.num_modules * parts;
  if (lane == 0) {
    item.num_items = num_items;
  }
  if (index >= num_items) {
    return;
  }
  const int part = index % parts;
  index /= parts;
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
    item.first_panel = part * PANELS;
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

// A warp's blocks of A in shared memory, `held` at a time.
template <int PANELS>
struct Granules {
  std::byte* area;  // [held][PANELS]
  uint64_t* there;  // barrier of one arrival
  uint32_t parity;

  // Asks for `count` blocks from `first` on, more than none. By the warp, which has read what was there before.
  __device__ __forceinline__ void ask(const Params& p, const Item& item, int first, int count) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
    const int panels = min((item.rank + kTileRanks - 1) / kTileRanks - item.first_panel, PANELS);
    if (lane == 0) {
      mbarrier_arrive_expect(there, static_cast<uint32_t>(count * panels * kGranuleBytes));
    }
    __syncwarp();
    static_assert(held_blocks(PANELS) * PANELS <= 32);
    const int panel = lane % PANELS;
    if (lane < count * PANELS && panel < panels) {
      bulk_copy(area + lane * kGranuleBytes,
                paged_granule(p.table, item.slot, item.a, item.pages,
                              (item.first_panel + panel) * blocks + first + lane / PANELS),
                kGranuleBytes, there);
    }
  }
  __device__ __forceinline__ void wait() {
    mbarrier_wait(there, parity);
    parity ^= 1;
  }
  // This lane's chunk t + 4 c of rank g of a panel.
  [[nodiscard]] __device__ __forceinline__ uint4 chunk(int block, int panel, int c) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    return *reinterpret_cast<const uint4*>(area + (block * PANELS + panel) * kGranuleBytes + lane % 4 * 128 +
                                           lane / 4 * 16 + c * 512);
  }
};

// `announces`: of one thread of the grid, until it has done so.
__device__ __forceinline__ void wait_for_x(const Params& p, bool& announces) {
  wait_for_previous();
  if (announces) {
    count_up(p.x_ready, 1);
    announces = false;
  }
  if (p.x_ready == nullptr) {
    let_next_start();
  }
}

// acc += A x over blocks [begin, end). x: this lane's chunk of 8 inputs of its row in block 0, -1: there is no such
// token. Waits for x in any case.
template <int PANELS>
__device__ __forceinline__ void multiply(const Params& p, const Item& item, int begin, int end, int x,
                                         Granules<PANELS>& granules, bool& announces, float (&acc)[PANELS / 2][4]) {
  constexpr int kHeld = held_blocks(PANELS);
  const int column = static_cast<int>(threadIdx.x % 32) % 4 * 8;
  if (begin == end) {
    wait_for_x(p, announces);
  }
#pragma unroll 1
  for (int base = begin; base < end; base += p.held) {
    const int count = min(end - base, p.held);
    granules.ask(p, item, base, count);
    if (base == begin) {
      wait_for_x(p, announces);
    }
    uint4 values[kHeld][2];
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int chunk = (base + u) * 8 + c * 4;
        values[u][c] = zero_chunk();
        if (x >= 0 && u < count && chunk * 8 + column < p.k) {
          values[u][c] = reinterpret_cast<const uint4*>(p.x)[x + chunk];
        }
      }
    }
    granules.wait();
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      if (u < count) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          uint4 a[PANELS];
#pragma unroll
          for (int panel = 0; panel < PANELS; ++panel) {
            const bool there = (item.first_panel + panel) * kTileRanks < item.rank;
            a[panel] = there ? granules.chunk(u, panel, c) : zero_chunk();
          }
#pragma unroll
          for (int pair = 0; pair < PANELS / 2; ++pair) {
            mma_chunk(acc[pair], a[2 * pair], a[2 * pair + 1], values[u][c]);
          }
        }
      }
    }
    __syncwarp();  // the blocks are read
  }
}

// The sums that a block of the cluster adds up, of all warps: those of 8 lanes, of each pair of panels.
template <int PANELS>
struct Partial {
  static_assert(kCluster * 8 == 32);
  float4 of_lane[PANELS / 2][kSlices][8];
  static constexpr int kBytes = PANELS / 2 * kSlices * 8 * static_cast<int>(sizeof(float4));
};

// This block's sums of a pair of panels, scaled, to memory. By a warp.
template <int PANELS>
__device__ __forceinline__ void store_sums(const Params& p, const Item& item, const Partial<PANELS>& partial, int pair,
                                           int block) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  float values[kSlices];
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    values[slice] = reinterpret_cast<const float*>(partial.of_lane[pair][slice])[lane];
  }
  float sum = 0.0f;
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    sum += values[slice];
  }
  // Register lane % 4 of lane 8 block + lane / 4.
  const int token = lane / 4 % 4 * 2 + lane % 2;
  const int panel = item.first_panel + 2 * pair + lane % 4 / 2;
  const int rank = panel * kTileRanks + 2 * block + lane / 16;
  if (token < item.count && panel * kTileRanks < item.rank) {
    const float scale = item.row_scale[token] * item.scale;
    p.out[(static_cast<int64_t>(item.row[token]) * p.num_modules + item.module) * p.rank_stride + rank] =
        rank < item.rank && scale != 0.0f ? sum * scale : 0.0f;
  }
}

template <int PANELS>
struct Shared {
  Partial<PANELS> partial[2];  // of items in turn
  ClusterBarrier arrived[2];
  uint64_t granules_there[kWarps];
  Item item;
  int first_block[kWarps + 1];  // of 64 inputs, of each warp
};

// By the whole block; the other blocks of the cluster know the barriers after cluster_wait().
template <int PANELS>
__device__ __forceinline__ void begin(const Params& p, Shared<PANELS>& shared, int block) {
  if (threadIdx.x <= kWarps) {
    const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
    shared.first_block[threadIdx.x] = (block * kWarps + static_cast<int>(threadIdx.x)) * blocks / kSlices;
  }
  if (threadIdx.x == 0) {
    shared.arrived[0].init(1);
    shared.arrived[1].init(1);
    for (int i = 0; i < kWarps; ++i) {
      mbarrier_init(&shared.granules_there[i], 1);
    }
    publish_barriers();
  }
  __syncwarp();
  cluster_arrive();
}

// The item in shared memory, this cluster's `done`-th.
template <int PANELS>
__device__ __forceinline__ void shrink_item(const Params& p, Shared<PANELS>& shared, int block, int done,
                                            Granules<PANELS>& granules, bool& announces) {
  const Item& item = shared.item;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int x = lane / 4 < item.count ? item.row[lane / 4] * static_cast<int>(p.x_stride / 8) + lane % 4 : -1;
  float acc[PANELS / 2][4] = {};
  multiply<PANELS>(p, item, shared.first_block[warp], shared.first_block[warp + 1], x, granules, announces, acc);
  __syncwarp();
  if (done == 0) {
    cluster_wait();
  }
  Partial<PANELS>& sums = shared.partial[done % 2];
  ClusterBarrier& barrier = shared.arrived[done % 2];
  if (threadIdx.x == 0) {
    barrier.arrive_and_expect(Partial<PANELS>::kBytes);
  }
#pragma unroll
  for (int pair = 0; pair < PANELS / 2; ++pair) {
    barrier.send(&sums.of_lane[pair][block * kWarps + warp][lane % 8], lane / 8,
                 make_float4(acc[pair][0], acc[pair][1], acc[pair][2], acc[pair][3]));
  }
  static_assert(PANELS / 2 <= kWarps);
  if (warp < PANELS / 2) {
    barrier.wait(static_cast<uint32_t>(done / 2 % 2));
    store_sums<PANELS>(p, item, sums, warp, block);
  }
}

// Grid: [cluster][block]. The next kernel begins beside this one if it is told of x, otherwise when x is there.
template <int PANELS>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) lora_shrink_split(const __grid_constant__ Params p) {
#ifdef MOELORA_CLUSTERS
  extern __shared__ uint4 dynamic_shared[];
  __shared__ Shared<PANELS> shared;
  if (p.x_ready != nullptr) {
    let_next_start();
  }
  const int block = static_cast<int>(blockIdx.x) % kCluster;
  const int warp = static_cast<int>(threadIdx.x / 32);
  begin(p, shared, block);
  Granules<PANELS> granules{reinterpret_cast<std::byte*>(dynamic_shared) + warp * p.held * PANELS * kGranuleBytes,
                            &shared.granules_there[warp], 0};
  bool announces = blockIdx.x == 0 && threadIdx.x == 0 && p.x_ready != nullptr;
  int done = 0;  // items
  int num_items = 0;
  int index = static_cast<int>(blockIdx.x) / kCluster;
#pragma unroll 1
  do {
    if (warp == 0) {
      find_item<PANELS>(p, index, shared.item);
    }
    __syncthreads();  // the item is known
    num_items = shared.item.num_items;
    if (index >= num_items) {
      break;
    }
    if (shared.item.first_panel * kTileRanks < shared.item.rank) {  // for all blocks of the cluster alike
      shrink_item(p, shared, block, done, granules, announces);
      ++done;
    }
    index += static_cast<int>(gridDim.x) / kCluster;
    // All have done with the item. A block's sums of the next one say to the others that it has those of this one, so
    // that two buffers are enough.
    __syncthreads();
  } while (index < num_items);
  if (done == 0) {
    __syncwarp();
    cluster_wait();
  }
  if (static_cast<int>(blockIdx.x) < kCluster) {
    wait_for_x(p, announces);  // so that the end of this kernel means that older ones have ended, whoever had work
  }
#endif
}

template <int PANELS>
bool launch_panels(Params p, const CudaStream& state) {
  const auto kernel = lora_shrink_split<PANELS>;
  static const bool usable = has_code(kernel);
  if (state.compute_capability < 90 || !usable) {
    return false;
  }
  const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
  p.held = std::clamp((blocks + kSlices - 1) / kSlices, 1, held_blocks(PANELS));
  const auto shared = static_cast<size_t>(kWarps * p.held * PANELS * kGranuleBytes);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  kWarps * held_blocks(PANELS) * PANELS * kGranuleBytes),
             "shared memory of the shrink");
  prefer_shared(kernel, 100);  // as the product behind it
  constexpr int kRanks = PANELS * kTileRanks;
  const int parts = std::max((p.rank_stride + kRanks - 1) / kRanks, 1);
  const int clusters = std::min(p.max_segments * p.num_modules * parts, kGridPerSm * state.num_sms / kCluster);
  launch_dependent_clusters(kernel, static_cast<unsigned>(clusters * kCluster), kCluster, kThreads, shared, state, p);
  check_launch("lora_shrink");
  return true;
}
// 32 ranks an item where a block then holds all of them, so that of several modules a block fits beside every block of
// the product.
inline bool launch(const Params& p, const CudaStream& state) {
  const bool wide = p.num_modules > 1 && p.k <= kSlices * held_blocks(4) * kTileColumns;
  return wide ? launch_panels<4>(p, state) : launch_panels<2>(p, state);
}

}  // namespace moelora::shrink_split
