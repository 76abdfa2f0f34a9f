// SPDX-License-Identifier: Apache-2.0
// linear of at most 8 rows with adapters in one launch: kernels/dense/linear_skinny.cuh with the shrink in blocks of
// the same grid, so that all weights are asked for while the kernel ahead still runs, as without adapters, and no
// launch lies between x and the deltas. The first blocks of the grid shrink. An item is a panel of 8 ranks of one
// adapter and module, with all rows that use it; the warps cut the inputs into contiguous ranges of blocks of 64, and
// their sums are added in the order of the warps. A is there since the step began: its first blocks are in registers
// and the rest in the L2 when x comes. The further warp of every other block waits until all items are counted
// (kernels/cuda/counter.cuh), while the others still multiply. All blocks run at once. A row's bits are those of the
// shrink's own K order and otherwise of linear_skinny.cuh; base rows keep the base's. Included by linear_cuda.cu.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/counter.cuh"
#include "kernels/dense/linear_skinny.cuh"
#include "kernels/lora/lora_shrink_cuda.h"

namespace moelora::linear {

constexpr int kProducersMin = 8;  // fewer blocks would be late

// What the blocks that shrink read beside Params.
struct Beside {
  uint32_t* counters;
  int producers;  // blocks
  int modules[3];
  const int32_t* segment_begin;
  const int32_t* segment_slot;
  const int32_t* num_segments;
  const int32_t* max_rank;
  const int32_t* rows;  // at each position of the segments
  float* out;           // Params::shrunk
};

// A panel of one adapter's module, and its rows at positions [begin, end).
struct Panel {
  int begin;
  int end;
  int slot;
  int module_index;
  int panel;
  int rank;
  float scale;
  int a;
  int4 pages;
};
__device__ __forceinline__ Panel find_panel(const Params& p, const Beside& beside, int item, int panels) {
  const int segment = item / panels / p.num_modules;
  Panel found;
  found.begin = beside.segment_begin[segment];
  found.end = beside.segment_begin[segment + 1];
  found.slot = beside.segment_slot[segment];
  found.module_index = item / panels % p.num_modules;
  found.panel = item % panels;
  const ResolvedLora* record =
      p.table.resolved_dense(found.slot, p.layer, static_cast<LoraModule>(beside.modules[found.module_index]));
  const int4 head = *reinterpret_cast<const int4*>(record);  // rank, scale, a, b
  found.pages = *reinterpret_cast<const int4*>(record->a_pages);
  found.rank = head.x;
  found.scale = __int_as_float(head.y);
  found.a = head.z;
  return found;
}

// partial[rank][row] = this warp's share of A x. Waits for x once A is on its way.
template <int WARPS>
__device__ __forceinline__ void shrink_range(const Params& p, const Beside& beside, const Panel& panel,
                                             float* partial) {
  constexpr int kTogether = WARPS == kWarpsAlone ? 3 : 2;  // blocks of 64 inputs in flight: what registers hold
  const int lane = static_cast<int>(threadIdx.x % 32);
  int warp = static_cast<int>(threadIdx.x / 32);
  asm volatile("" : "+r"(warp));  // what follows from it would fill registers from item to item
  const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
  const int begin = warp * blocks / WARPS;
  const int count = (warp + 1) * blocks / WARPS - begin;
  // This lane's first chunk of its row, and how many inputs there are from there on; none if there is no row.
  const int position = panel.begin + lane / 4;
  const int column = begin * kTileColumns + lane % 4 * 8;
  const __nv_bfloat16* x = p.x + column;
  int left = 0;
  if (position < panel.end) {
    x += beside.rows[position] * p.x_stride;
    left = p.k - column;
  }
  unsigned long long granules = 0;  // lane i finds the i-th
  if (lane < count) {
    const std::byte* granule =
        paged_granule(p.table, panel.slot, panel.a, panel.pages, panel.panel * blocks + begin + lane);
    granules = reinterpret_cast<unsigned long long>(granule);
    if (lane >= kTogether) {
#pragma unroll 1
      for (size_t line = 0; line < kGranuleBytes; line += 128) {
        prefetch_l2(granule + line);
      }
    }
  }
  float acc[4] = {};
#pragma unroll 1
  for (int first = 0; first < count; first += kTogether) {
    uint4 weight[kTogether][2];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const auto* granule = reinterpret_cast<const std::byte*>(__shfl_sync(0xffffffffu, granules, first + i)) +
                            lane % 4 * 128 + lane / 4 * 16;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        weight[i][c] = first + i < count ? load_streaming(granule + c * 512) : zero_chunk();
      }
    }
    wait_for_previous();  // x is there
    uint4 value[kTogether][2];
#pragma unroll
    for (int i = 0; i < 2 * kTogether; ++i) {
      value[i / 2][i % 2] = zero_chunk();
      if (first + i / 2 < count && i * 32 < left) {
        value[i / 2][i % 2] = __ldcg(reinterpret_cast<const uint4*>(x + i * 32));
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        mma_chunk(acc, weight[i][c], zero_chunk(), value[i][c]);
      }
    }
    x += kTogether * kTileColumns;
    left -= kTogether * kTileColumns;
  }
  wait_for_previous();  // also where there was no block for this warp: what the sums give is written next
  *reinterpret_cast<float2*>(partial + lane / 4 * 8 + lane % 4 * 2) = make_float2(acc[0], acc[1]);
}

// By the whole block: its items, counted when they are there. `partial`: [WARPS][8 ranks][8 rows].
template <int WARPS>
__device__ __forceinline__ void shrink_items(const Params& p, const Beside& beside, int items, int panels,
                                             float* partial, Panel& kept) {
  constexpr int kSums = kTileRanks * 8;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int item = static_cast<int>(blockIdx.x); item < items; item += beside.producers) {
    {
      const Panel panel = find_panel(p, beside, item, panels);
      if (panel.panel * kTileRanks >= panel.rank) {
        continue;  // the whole block
      }
      if (thread == WARPS * 32) {
        kept = panel;
      } else if (thread < WARPS * 32) {
        shrink_range<WARPS>(p, beside, panel, partial + thread / 32 * kSums);
      }
    }
    __syncthreads();  // the sums of all warps are there
    const int at = kept.begin + thread % 8;
    if (thread < kSums && at < kept.end) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < WARPS; ++warp) {
        sum += partial[warp * kSums + thread];
      }
      const int64_t row = beside.rows[at];
      const float scale = p.row_scale[row] * kept.scale;
      const int rank = kept.panel * kTileRanks + thread / 8;
      beside.out[(row * p.num_modules + kept.module_index) * p.rank_stride + rank] =
          rank < kept.rank && scale != 0.0f ? sum * scale : 0.0f;
    }
    __syncthreads();  // the sums are read, what they give is written
  }
  wait_for_previous();  // also without an item: counters are zero, and this block's end means that all before ended
  if (thread == 0) {
    const auto block = static_cast<int>(blockIdx.x);
    if (block < items) {
      count_up(beside.counters, static_cast<uint32_t>((items - block - 1) / beside.producers + 1));
    }
    clear_after_last(beside.counters, leave(beside.counters, gridDim.x), gridDim.x);
  }
}

// Blocks [0, producers) shrink, the others have 16 outputs of one part each, for all rows.
template <int WARPS>
__global__ void __launch_bounds__(skinny_threads(WARPS, true), skinny_blocks_per_sm(1, 1, WARPS))
    linear_beside(const __grid_constant__ Params p, const __grid_constant__ Beside beside) {
  using Shared = SkinnyShared<1, 1, WARPS, true>;
  __shared__ Shared shared;
  let_next_start();
  const int panels = *beside.max_rank / kTileRanks;
  const int items = *beside.num_segments * p.num_modules * panels;
  if (static_cast<int>(blockIdx.x) < beside.producers) {
    static_assert(sizeof(shared.delta) >= sizeof(Panel) && offsetof(Shared, delta) % alignof(Panel) == 0);
    return shrink_items<WARPS>(p, beside, items, panels, shared.partial, *reinterpret_cast<Panel*>(shared.delta));
  }
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int tile_index = static_cast<int>(blockIdx.x) - beside.producers;
  const Part& part = p.parts[part_of_tile(p, tile_index)];
  const int n0 = (tile_index - part.first_tile) * Shared::WIDTH;
  const Tile tile{part, n0, 0, p.num_rows};
  Stored bias;
  Stored before;
  uint32_t left = 0;  // by the first lane of the further warp: blocks that have left the counters
  if (warp == WARPS) {
    const LoraToken token = find_token(p, part, lane, lane < p.num_rows, n0, Shared::WIDTH);
    if (lane < p.num_rows) {
      shared.tokens[lane] = token;
    }
    const bool wants = __any_sync(0xffffffffu, token.rank != 0);
    wait_for_previous();  // counters are of this kernel
    if (lane == 0) {
      if (wants) {
        wait_for_count(beside.counters, static_cast<uint32_t>(items));
      }
      left = leave(beside.counters, gridDim.x);
    }
    __syncwarp();  // the tokens and the shrunk values are there for the warp
  } else {
    const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
    float acc[1][1][4] = {};
    multiply<1, 1, skinny_unroll(1, 1, WARPS, true)>(
        p, part, 0, n0, warp * blocks / WARPS, (warp + 1) * blocks / WARPS, acc, [&] {
          const Place<1> place(threadIdx.x);
          const int n = n0 + place.n;
          const bool mine = threadIdx.x < Shared::ELEMENTS && place.token < tile.rows && n < part.n;
          if (mine && part.bias != nullptr) {
            bias = load_bias(part, n);
          }
          wait_for_previous();
          if (mine && p.accumulate) {
            before = load_out(part, place.token, n);
          }
        });
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      shared.partial[warp * Shared::ELEMENTS + e * 32 + lane] = acc[0][0][e];
    }
  }
  find_deltas(p, tile, warp == WARPS, shared);
  __syncthreads();  // sums of all warps, tokens and deltas
  store_sums(p, tile, shared, bias, before);
  if (warp == WARPS && lane == 0) {
    clear_after_last(beside.counters, left, gridDim.x);
  }
}

template <int WARPS>
bool launch_beside_of(const Launch& launch, Beside& beside, int wanted, const CudaStream& state) {
  constexpr int kPerSm = skinny_blocks_per_sm(1, 1, WARPS);
  const int tiles = launch.params.num_tiles;
  beside.producers = std::min(wanted, kPerSm * state.num_sms - tiles);
  if (beside.producers < std::min(wanted, kProducersMin)) {
    return false;
  }
  prefer_shared(linear_beside<WARPS>, kSharedPercent);
  launch_dependent(linear_beside<WARPS>, dim3(static_cast<unsigned>(beside.producers + tiles)),
                   skinny_threads(WARPS, true), 0, state, launch.params, beside);
  check_launch("linear");
  return true;
}

// Tiles of 16 outputs of at most 8 rows, and the shrink. False where not all of it can run at once: nothing was
// launched. Warps as in linear_skinny.cuh.
inline bool launch_beside(const Launch& launch, const DenseShrinkArgs& shrink, const CudaStream& state) {
  const Params& p = launch.params;
  const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
  if (state.counters == nullptr || p.num_rows > 8 || blocks > 32 * kWarps) {
    return false;
  }
  Beside beside{};
  beside.counters = state.counters;
  for (int i = 0; i < shrink.num_modules; ++i) {
    beside.modules[i] = static_cast<int>(shrink.modules[i]);
  }
  beside.segment_begin = shrink.lora->segment_begin;
  beside.segment_slot = shrink.lora->segment_slot;
  beside.num_segments = shrink.lora->counts + 1;
  beside.max_rank = shrink.lora->counts + 2;
  beside.rows = shrink.lora->sorted_rows;
  beside.out = shrink.out;
  const int wanted = p.num_rows * shrink.num_modules * (shrink.rank_stride / kTileRanks);  // at most
  return p.num_tiles <= state.num_sms ? launch_beside_of<kWarpsAlone>(launch, beside, wanted, state)
                                      : launch_beside_of<kWarps>(launch, beside, wanted, state);
}

}  // namespace moelora::linear
