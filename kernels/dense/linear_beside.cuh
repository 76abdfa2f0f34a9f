// SPDX-License-Identifier: Apache-2.0
// linear of at most 8 rows with adapters in one launch: kernels/dense/linear_skinny.cuh with the shrink in blocks of
// the same grid, so that all weights are asked for while the kernel ahead still runs, as without adapters, and no
// launch lies between x and the deltas.
// The first blocks of the grid shrink. An item is a panel of 8 ranks of one adapter and module, with all rows that use
// it and, of one or two rows, a quarter of the inputs. The warps cut these into contiguous ranges of blocks of 64;
// their sums are added in the order of the warps, those of the quarters by who reads them. A is there since the step
// began: its first blocks are in registers and the rest in the L2 when x comes. The further warp of every other block
// waits until all items are counted (kernels/cuda/counter.cuh), while the others still multiply. All blocks run at
// once. A row's delta depends on the row, K, its adapter and whether there are more than two rows; the rest of its bits
// are those of linear_skinny.cuh. Included by linear_cuda.cu.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/counter.cuh"
#include "kernels/dense/linear_skinny.cuh"
#include "kernels/lora/lora_shrink_cuda.h"

namespace moelora::linear {

constexpr int kProducersMin = 8;  // fewer blocks would be late
constexpr int kRanksAtOnce = 64;  // of a larger rank a block has several items
// Up to so many rows an item has one of kParts parts of the inputs, and the further warp computes all deltas, a lane
// each; of more rows everybody does (find_deltas).
constexpr int kRowsInParts = 2;
constexpr int kParts = 4;
static_assert(kRowsInParts * 16 == 32);

// What the blocks that shrink read beside Params.
struct Beside {
  uint32_t* counters;
  int producers;  // blocks
  int parts;      // of the inputs
  int modules[3];
  const int32_t* segment_begin;
  const int32_t* segment_slot;
  const int32_t* num_segments;
  const int32_t* max_rank;
  const int32_t* rows;  // at each position of the segments
  float* out;           // [parts] of Params::shrunk
};

// A panel of one adapter's module, its rows at positions [begin, end), and a part of the inputs.
struct Panel {
  int begin;
  int end;
  int slot;
  int module_index;
  int panel;
  int part;
  int rank;
  float scale;
  int a;
  int4 pages;
};
__device__ __forceinline__ Panel find_panel(const Params& p, const Beside& beside, int item, int panels) {
  Panel found;
  found.part = item % beside.parts;
  item /= beside.parts;
  const int segment = item / panels / p.num_modules;
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
  const int first_block = panel.part * blocks / beside.parts;
  const int all = (panel.part + 1) * blocks / beside.parts - first_block;
  const int begin = first_block + warp * all / WARPS;
  const int count = first_block + (warp + 1) * all / WARPS - begin;
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
      beside.out[((int64_t{kept.part} * p.num_rows + row) * p.num_modules + kept.module_index) * p.rank_stride + rank] =
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

// Four panels of one row of B.
struct ExpandRow {
  uint4 b[4];
  int count = 0;
  __device__ __forceinline__ void load(const AdapterTable& table, const LoraToken& token, int n, int first) {
    const int panels = (token.rank + kTileRanks - 1) / kTileRanks;
    count = min(panels - first, 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) {
        b[i] = *reinterpret_cast<const uint4*>(
            paged_granule(table, token.slot, token.b, token.b_pages, n / kTileColumns * panels + first + i) +
            n % kTileColumns * 16);
      }
    }
  }
  // sum + B s of these panels.
  [[nodiscard]] __device__ __forceinline__ float add(float sum, const float* s) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) {
        const uint32_t pair[4] = {b[i].x, b[i].y, b[i].z, b[i].w};
#pragma unroll
        for (int r = 0; r < 4; ++r) {  // a bf16 is the high half of an fp32
          sum = fmaf(__uint_as_float(pair[r] << 16), s[i * kTileRanks + 2 * r], sum);
          sum = fmaf(__uint_as_float(pair[r] & 0xffff0000u), s[i * kTileRanks + 2 * r + 1], sum);
        }
      }
    }
    return sum;
  }
};

// By a warp: the shrunk values of each row, the parts of the inputs added in their order. [row][rank_stride]
__device__ __forceinline__ void join_parts(const Params& p, const Part& part, const LoraToken* tokens, float* joined) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t step = int64_t{p.num_rows} * p.num_modules * p.rank_stride;  // from part to part
#pragma unroll
  for (int row = 0; row < kRowsInParts; ++row) {
    const int ranks = row < p.num_rows ? (tokens[row].rank + kTileRanks - 1) / kTileRanks * kTileRanks : 0;
#pragma unroll 1
    for (int r = lane; r < ranks; r += 32) {
      const float* from = shrunk_row(p, part, row) + r;
      float values[kParts];
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        values[i] = __ldcg(from + i * step);
      }
      float sum = values[0];
#pragma unroll
      for (int i = 1; i < kParts; ++i) {
        sum += values[i];
      }
      joined[row * p.rank_stride + r] = sum;
    }
  }
  __syncwarp();  // all rows' values are there
}

// By the further warp: looks up the rows' adapters, waits for the shrink, and computes the deltas of up to two rows, a
// lane each, with B in registers before. Returns what leave() does, in the first lane.
template <class Shared>
__device__ __forceinline__ uint32_t run_further(const Params& p, const Beside& beside, const Tile& tile, int items,
                                                Shared& shared, float* joined) {
  const auto& [part, n0, row0, rows] = tile;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const LoraToken found = find_token(p, part, lane, lane < rows, n0, Shared::WIDTH);
  if (lane < rows) {
    shared.tokens[lane] = found;
  }
  const bool wanted = __any_sync(0xffffffffu, found.rank != 0);
  __syncwarp();  // the tokens are there for the warp
  const int row = lane / Shared::WIDTH;
  const int n = n0 + lane % Shared::WIDTH;
  const bool alone = beside.parts > 1;
  const bool mine = alone && row < rows && n < part.n && shared.tokens[row].rank != 0;
  ExpandRow expand;
  if (mine) {
    expand.load(p.table, shared.tokens[row], n, 0);
  }
  wait_for_previous();  // counters are of this kernel
  uint32_t left = 0;
  if (lane == 0) {
    if (wanted) {
      wait_for_count(beside.counters, static_cast<uint32_t>(items));
    }
    left = leave(beside.counters, gridDim.x);
  }
  __syncwarp();  // the shrunk values are there for the warp
  if (alone) {
    join_parts(p, part, shared.tokens, joined);
  }
  if (mine) {
    const LoraToken& token = shared.tokens[row];
    const float* s = joined + row * p.rank_stride;
    float delta = expand.add(0.0f, s);
#pragma unroll 1
    for (int first = 4; first * kTileRanks < token.rank; first += 4) {
      expand.load(p.table, token, n, first);
      delta = expand.add(delta, s + first * kTileRanks);
    }
    if (token.bias >= 0) {
      constexpr int kPerGranule = kGranuleBytes / sizeof(float);
      const std::byte* bias = p.table.granule(token.slot, token.bias + n / kPerGranule);
      delta = fmaf(token.scale, reinterpret_cast<const float*>(bias)[n % kPerGranule], delta);
    }
    shared.delta[lane] = delta;
  }
  return left;
}

// Blocks [0, producers) shrink, the others have 16 outputs of one part each, for all rows.
template <int WARPS>
__global__ void __launch_bounds__(skinny_threads(WARPS, true), skinny_blocks_per_sm(1, 1, WARPS))
    linear_beside(const __grid_constant__ Params p, const __grid_constant__ Beside beside) {
  using Shared = SkinnyShared<1, 1, WARPS, true>;
  extern __shared__ float joined[];  // [min(num_rows, kRowsInParts)][rank_stride]
  __shared__ Shared shared;
  let_next_start();
  const int panels = *beside.max_rank / kTileRanks;
  const int items = *beside.num_segments * p.num_modules * panels * beside.parts;
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
  uint32_t left = 0;
  if (warp == WARPS) {
    left = run_further(p, beside, tile, items, shared, joined);
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
  if (beside.parts == 1) {
    find_deltas(p, tile, warp == WARPS, shared);
  }
  wait_for_previous();
  __syncthreads();  // sums of all warps, tokens and deltas
  store_sums(p, tile, shared, bias, before);
  if (warp == WARPS && lane == 0) {
    clear_after_last(beside.counters, left, gridDim.x);
  }
}

template <int WARPS>
bool launch_beside_of(const Launch& launch, Beside& beside, int wanted, const CudaStream& state) {
  const size_t shared = sizeof(float) * static_cast<size_t>(kRowsInParts * launch.params.rank_stride);
  constexpr int kPerSm = skinny_blocks_per_sm(1, 1, WARPS);
  const int tiles = launch.params.num_tiles;
  beside.producers = std::min(wanted, kPerSm * state.num_sms - tiles);
  if (beside.producers < std::min(wanted, kProducersMin)) {
    return false;
  }
  prefer_shared(linear_beside<WARPS>, kSharedPercent);
  launch_dependent(linear_beside<WARPS>, dim3(static_cast<unsigned>(beside.producers + tiles)),
                   skinny_threads(WARPS, true), shared, state, launch.params, beside);
  check_launch("linear");
  return true;
}

// Tiles of 16 outputs of at most 8 rows, and the shrink. False where not all of it can run at once: nothing was
// launched. Warps as in linear_skinny.cuh.
inline bool launch_beside(const Launch& launch, const DenseShrinkArgs& shrink, size_t scratch_bytes,
                          const CudaStream& state) {
  const Params& p = launch.params;
  const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
  Beside beside{};
  beside.parts = p.num_rows <= kRowsInParts ? kParts : 1;
  const size_t values =
      static_cast<size_t>(beside.parts * p.num_rows * p.num_modules) * static_cast<size_t>(p.rank_stride);
  if (state.counters == nullptr || p.num_rows > 8 || blocks > 32 * kWarps || scratch_bytes < values * sizeof(float)) {
    return false;
  }
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
  // One for each item of adapters of up to kRanksAtOnce.
  const int wanted =
      beside.parts * p.num_rows * shrink.num_modules * (std::min(shrink.rank_stride, kRanksAtOnce) / kTileRanks);
  return p.num_tiles <= state.num_sms ? launch_beside_of<kWarpsAlone>(launch, beside, wanted, state)
                                      : launch_beside_of<kWarps>(launch, beside, wanted, state);
}

}  // namespace moelora::linear
