// SPDX-License-Identifier: Apache-2.0
// lora_shrink on CUDA, by the segments of rows of one adapter. Few rows or pairs: kernels/lora/lora_shrink_rows.cuh, a
// panel of ranks a block; of dense linears from 9 rows on, where the GPU has clusters:
// kernels/lora/lora_shrink_split.cuh, K split over the blocks of one. Many: kernels/lora/lora_shrink_segments.cuh,
// tiles of rows and ranks.
#include "kernels/lora/lora_shrink_cuda.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/lora/lora_expand.cuh"
#include "kernels/lora/lora_shrink_rows.cuh"
#include "kernels/lora/lora_shrink_segments.cuh"
#include "kernels/lora/lora_shrink_split.cuh"

namespace moelora {
namespace {

// Up to here a block takes a panel of ranks.
constexpr int64_t FEW_ROWS = 64;
constexpr int64_t FEW_ROWS_WHOLE = 8;  // of which a block takes all of K
constexpr int64_t FEW_PAIRS = 1024;

// What all ways have in common; the rest is the caller's.
template <class Params, class Args>
Params common_params(const Args& args) {
  MOELORA_ASSERT(args.x.dtype == Dtype::kBf16 && args.k % 8 == 0 && args.x.stride % 8 == 0);
  MOELORA_ASSERT(reinterpret_cast<uintptr_t>(args.x.data) % 16 == 0 && reinterpret_cast<uintptr_t>(args.out) % 16 == 0);
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

// False: nothing was launched.
bool launch_split(const DenseShrinkArgs& args, const CudaStream& state) {
  static_assert(FEW_ROWS <= shrink_split::kMaxRows);
  auto p = common_params<shrink_split::Params>(args);
  p.segment_begin = args.lora->segment_begin;
  p.segment_slot = args.lora->segment_slot;
  p.counts = args.lora->counts;
  p.max_segments = args.num_rows;
  p.rows = args.lora->sorted_rows;
  p.x_ready = args.x_ready;
  return shrink_split::launch(p, state);
}

}  // namespace

void lora_shrink_dense_cuda(const DenseShrinkArgs& args, Stream& stream) {
  if (args.num_rows == 0 || args.num_modules == 0) {
    return;
  }
  if (args.num_rows > FEW_ROWS_WHOLE && args.num_rows <= FEW_ROWS && launch_split(args, cuda_state(stream))) {
    return;
  }
  MOELORA_ASSERT(args.x_ready == nullptr);  // who waits for it would wait for ever
  if (args.num_rows <= FEW_ROWS) {
    auto p = common_params<shrink_rows::Params>(args);
    p.segment_begin = args.lora->segment_begin;
    p.segment_slot = args.lora->segment_slot;
    p.num_segments = args.lora->counts + 1;
    p.max_rank = args.lora->counts + 2;
    p.max_segments = args.num_rows;
    p.rows = args.lora->sorted_rows;
    shrink_rows::launch<false>(p, cuda_state(stream));
    return;
  }
  auto p = common_params<shrink_segments::Params>(args);
  p.segment_begin = args.lora->segment_begin;
  p.segment_slot = args.lora->segment_slot;
  p.num_segments = args.lora->counts + 1;
  p.rows = args.lora->sorted_rows;
  p.max_rank = args.lora->counts + 2;
  const int64_t tiles = (args.num_rows + shrink_segments::kRows - 1) / shrink_segments::kRows;
  shrink_segments::launch(p, args.num_rows, tiles, cuda_state(stream));
}

void lora_shrink_experts_cuda(const ExpertShrinkArgs& args, Stream& stream) {
  if (args.num_rows == 0 || args.num_modules == 0) {
    return;
  }
  const int64_t pairs = static_cast<int64_t>(args.num_rows) * args.top_k;
  if (pairs <= FEW_PAIRS) {
    auto p = common_params<shrink_rows::Params>(args);
    p.segment_begin = args.order.segment_begin;
    p.segment_slot = args.order.segment_slot;
    p.segment_expert = args.order.segment_expert;
    p.num_segments = args.order.num_segments;
    p.max_rank = args.lora->counts + 2;
    p.max_segments = static_cast<int>(pairs);
    p.rows = args.order.pair_row;
    p.x_by_position = args.x_sorted;
    p.out_bf16 = args.out_bf16;
    shrink_rows::launch<true>(p, cuda_state(stream));
    return;
  }
  auto p = common_params<shrink_segments::Params>(args);
  p.segment_begin = args.order.segment_begin;
  p.segment_slot = args.order.segment_slot;
  p.segment_expert = args.order.segment_expert;
  p.num_segments = args.order.num_segments;
  p.rows = args.order.pair_row;
  p.x_by_position = args.x_sorted;
  p.out_by_position = true;
  p.out_bf16 = args.out_bf16;
  p.max_rank = args.lora->counts + 2;
  const int64_t tiles = pairs / shrink_segments::kRows + args.num_experts;
  shrink_segments::launch(p, pairs, tiles, cuda_state(stream));
}

}  // namespace moelora
