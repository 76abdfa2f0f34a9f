// SPDX-License-Identifier: Apache-2.0
// lora_shrink on CUDA. Few rows or pairs: kernels/lora/lora_shrink_rows.cuh. Many: an item is 16 ranks of one module
// for up to 32 rows of one segment: its block's 8 warps split K into contiguous ranges of 64-input blocks
// (kernels/cuda/mma_tile.cuh), A streams from the pool straight into registers, and the warps' sums are added in warp
// order. How many items there are is known on the device only, so a fixed number of blocks walks all of them in a
// stride. Tiles of rows are numbered so that a segment begins at tile begin / 32 + segment: no prefix sum over segments
// is needed, at the price of at most one empty tile a segment. Limited by memory while segments are short (each
// adapter's A once), by L2 reads of x for long ones.
#include "kernels/lora/lora_shrink_cuda.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/lora/lora_expand.cuh"
#include "kernels/lora/lora_shrink_rows.cuh"

namespace moelora {
namespace {

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int BLOCKS_PER_SM = 2;
constexpr int ROWS = 32;   // of a tile
constexpr int RANKS = 16;  // of an item: two panels of A
// Up to here rows are taken without their segments.
constexpr int64_t FEW_ROWS = 64;
constexpr int64_t FEW_PAIRS = 1024;

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

// Up to ROWS positions of one segment against 16 ranks of one module.
struct Item {
  LoraRecord record;
  int slot;
  int module;
  int first_rank;
  int first;  // position
  int count;
};

__device__ __forceinline__ int first_tile(const Params& p, int segment) {
  return p.segment_begin[segment] / ROWS + segment;
}

// The last segment that begins at or before `tile`; the 32 lanes search together.
__device__ __forceinline__ int find_segment(const Params& p, int num_segments, int tile) {
  const int lane = threadIdx.x % 32;
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

__device__ __forceinline__ const ResolvedLora* find_record(const Params& p, int segment, int slot, int module) {
  if (p.segment_expert == nullptr) {
    return p.table.resolved_dense(slot, p.layer, static_cast<LoraModule>(module));
  }
  return p.table.resolved_expert(slot, p.layer, p.segment_expert[segment], static_cast<ExpertModule>(module));
}

// acc += A x over the 64-input blocks [begin, end); x[j]: row of this lane's token of group j, null = none.
template <int NT, int UNROLL>
__device__ __forceinline__ void multiply(const Params& p, const Item& item, int begin, int end,
                                         const __nv_bfloat16* const (&x)[NT], float (&acc)[NT][4]) {
  const int lane = threadIdx.x % 32;
  const int t = lane % 4;
  const int offset = t * 128 + lane / 4 * 16;  // of this lane's first chunk in a tile
  const int panel = item.first_rank / kTileRanks;
  const bool has_high = item.first_rank + kTileRanks < item.record.rank;
  for (int base = begin; base < end; base += UNROLL) {
    uint4 a[UNROLL][2][2];  // low and high rows, chunks
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      a[u][0][0] = a[u][0][1] = a[u][1][0] = a[u][1][1] = zero_chunk();
      if (base + u < end) {
        const std::byte* low = lora_a_tile(p.table, item.slot, item.record, p.k, panel, base + u) + offset;
        a[u][0][0] = load_streaming(low);
        a[u][0][1] = load_streaming(low + 512);
        if (has_high) {
          const std::byte* high = lora_a_tile(p.table, item.slot, item.record, p.k, panel + 1, base + u) + offset;
          a[u][1][0] = load_streaming(high);
          a[u][1][1] = load_streaming(high + 512);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      mma_block<NT>(acc, a[u][0], a[u][1], x, (base + u) * kTileColumns + t * 8, base + u < end, p.k);
    }
  }
}

// Sums of the warps in warp order, times the row's scale. Element e of a fragment: (group, register, lane).
template <int NT>
__device__ __forceinline__ void reduce_and_store(const Params& p, const Item& item, const float* partial) {
  for (int e = threadIdx.x; e < NT * 128; e += THREADS) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      sum += partial[warp * NT * 128 + e];
    }
    const int lane = e % 32;
    const int part = e / 32 % 4;
    const int token = e / 128 * 8 + 2 * (lane % 4) + part % 2;
    const int rank = item.first_rank + lane / 4 + part / 2 * 8;
    const int padded = (item.record.rank + kTileRanks - 1) / kTileRanks * kTileRanks;
    if (token < item.count && rank < padded) {
      const int position = item.first + token;
      const int row = p.rows[position];
      const float scale = p.row_scale[row] * item.record.scale;
      const int64_t index = (p.out_by_position ? position : row) * static_cast<int64_t>(p.num_modules) + item.module;
      p.out[index * p.rank_stride + rank] = rank < item.record.rank && scale != 0.0f ? sum * scale : 0.0f;
    }
  }
}

template <int NT, int UNROLL>
__device__ __forceinline__ void shrink_item(const Params& p, const Item& item, float* partial) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const __nv_bfloat16* x[NT];
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const int token = j * 8 + lane / 4;
    x[j] = nullptr;
    if (token < item.count) {
      const int position = item.first + token;
      const int64_t source = p.x_by_position ? position : p.rows[position];
      x[j] = p.x + source * p.x_stride;
    }
  }
  const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
  float acc[NT][4] = {};
  multiply<NT, UNROLL>(p, item, warp * blocks / WARPS, (warp + 1) * blocks / WARPS, x, acc);
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      partial[warp * NT * 128 + (j * 4 + i) * 32 + lane] = acc[j][i];
    }
  }
  __syncthreads();  // all warps' sums are there
  reduce_and_store<NT>(p, item, partial);
  __syncthreads();  // read before the next item writes
}

__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) lora_shrink(const __grid_constant__ Params p) {
  __shared__ float partial[WARPS * RANKS * ROWS];
  wait_for_previous();
  let_next_start();
  const int num_segments = *p.num_segments;
  if (num_segments == 0) {
    return;
  }
  const int rank_tiles = (*p.max_rank + RANKS - 1) / RANKS;
  const int per_tile = p.num_modules * rank_tiles;
  const int num_items = (p.segment_begin[num_segments] / ROWS + num_segments) * per_tile;
  for (int index = blockIdx.x; index < num_items; index += gridDim.x) {
    const int tile = index / per_tile;
    const int segment = find_segment(p, num_segments, tile);
    const int end = p.segment_begin[segment + 1];
    Item item;
    item.first = p.segment_begin[segment] + (tile - first_tile(p, segment)) * ROWS;
    item.count = min(end - item.first, ROWS);
    if (item.count <= 0) {
      continue;
    }
    item.slot = p.segment_slot[segment];
    item.module = index % per_tile / rank_tiles;
    item.first_rank = index % rank_tiles * RANKS;
    const ResolvedLora* record = find_record(p, segment, item.slot, p.modules[item.module]);
    if (item.first_rank >= record->rank) {
      continue;
    }
    item.record.a = record->a;
    item.record.rank = record->rank;
    item.record.scale = record->scale;
    if (item.count <= 8) {
      shrink_item<1, 4>(p, item, partial);
    } else if (item.count <= 16) {
      shrink_item<2, 2>(p, item, partial);
    } else {
      shrink_item<4, 2>(p, item, partial);
    }
  }
}

// What both ways have in common; the rest is the caller's.
template <class Params, class Args>
Params common_params(const Args& args) {
  MOELORA_ASSERT(args.x.dtype == Dtype::kBf16 && args.k % 8 == 0 && args.x.stride % 8 == 0);
  MOELORA_ASSERT(reinterpret_cast<uintptr_t>(args.x.data) % 16 == 0);
  MOELORA_ASSERT(args.lora != nullptr && args.num_modules > 0 && args.rank_stride % 8 == 0);
  MOELORA_ASSERT(args.lora->table.resolved != nullptr);
  Params p{};
  p.table = args.lora->table;
  p.x = static_cast<const __nv_bfloat16*>(args.x.data);
  p.x_stride = args.x.stride;
  p.k = args.k;
  p.layer = args.layer;
  for (int m = 0; m < args.num_modules; ++m) {
    p.modules[m] = static_cast<int>(args.modules[m]);
  }
  p.num_modules = args.num_modules;
  p.row_scale = args.lora->row_scale;
  p.out = args.out;
  p.rank_stride = args.rank_stride;
  return p;
}

// At most `positions` segments: no more blocks than there can be items, nor than run at once.
void launch(Params& p, const LoraBatch& lora, int64_t positions, Stream& stream) {
  p.max_rank = lora.counts + 2;
  const int64_t rank_tiles = (p.rank_stride + RANKS - 1) / RANKS;
  const int64_t items = (positions / ROWS + positions) * p.num_modules * rank_tiles;
  const int64_t resident = static_cast<int64_t>(cuda_state(stream).num_sms) * BLOCKS_PER_SM;
  const auto blocks = static_cast<unsigned>(std::min(items, resident));
  launch_dependent(lora_shrink, dim3(blocks), THREADS, 0, cuda_state(stream), p);
  check_launch("lora_shrink");
}

}  // namespace

void lora_shrink_dense_cuda(const DenseShrinkArgs& args, Stream& stream) {
  if (args.num_rows == 0 || args.num_modules == 0) {
    return;
  }
  if (args.num_rows <= FEW_ROWS) {
    auto p = common_params<shrink_rows::Params>(args);
    p.row_slot = args.lora->row_slot;
    p.count = args.num_rows;
    shrink_rows::launch<false>(p, cuda_state(stream));
    return;
  }
  auto p = common_params<Params>(args);
  p.segment_begin = args.lora->segment_begin;
  p.segment_slot = args.lora->segment_slot;
  p.num_segments = args.lora->counts + 1;
  p.rows = args.lora->sorted_rows;
  launch(p, *args.lora, args.num_rows, stream);
}

void lora_shrink_experts_cuda(const ExpertShrinkArgs& args, Stream& stream) {
  if (args.num_rows == 0 || args.num_modules == 0) {
    return;
  }
  const int64_t pairs = static_cast<int64_t>(args.num_rows) * args.top_k;
  if (pairs <= FEW_PAIRS) {
    MOELORA_ASSERT(args.num_experts <= shrink_rows::kMaxExperts);
    auto p = common_params<shrink_rows::Params>(args);
    p.row_slot = args.lora->row_slot;
    p.pair_row = args.order.pair_row;
    p.expert_begin = args.order.expert_begin;
    p.num_experts = args.num_experts;
    p.count = static_cast<int>(pairs);
    p.x_by_position = args.x_sorted;
    shrink_rows::launch<true>(p, cuda_state(stream));
    return;
  }
  auto p = common_params<Params>(args);
  p.segment_begin = args.order.segment_begin;
  p.segment_slot = args.order.segment_slot;
  p.segment_expert = args.order.segment_expert;
  p.num_segments = args.order.num_segments;
  p.rows = args.order.pair_row;
  p.x_by_position = args.x_sorted;
  p.out_by_position = true;
  launch(p, *args.lora, pairs, stream);
}

}  // namespace moelora
