// SPDX-License-Identifier: Apache-2.0
// lora_shrink on CUDA, by the segments of rows of one adapter. Few rows or pairs: kernels/lora/lora_shrink_rows.cuh, a
// panel of ranks a block. Many: kernels/lora/lora_shrink_segments.cuh, tiles of rows and ranks.
#include "kernels/lora/lora_shrink_cuda.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/lora/lora_expand.cuh"
#include "kernels/lora/lora_shrink_rows.cuh"
#include "kernels/lora/lora_shrink_segments.cuh"

namespace moelora {
namespace {

// Up to here a block takes a panel of ranks.
constexpr int64_t FEW_ROWS = 64;
constexpr int64_t FEW_PAIRS = 1024;
// Up to so many positions an expert their segments are taken in smaller tiles.
constexpr int64_t MEDIUM_EXPERT = 256;

// As large as leaves about as many tiles as SMs, with the modules of q, k and v in two passes.
shrink_segments::Size size_for_rows(int num_rows, int num_sms) {
  using shrink_segments::Size;
  if (num_rows <= shrink_segments::SmallTiling::kRows / 2 * num_sms) {
    return Size::kSmall;
  }
  return num_rows <= shrink_segments::MediumTiling::kRows / 2 * num_sms ? Size::kMedium : Size::kLarge;
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

}  // namespace

void lora_shrink_dense_cuda(const DenseShrinkArgs& args, Stream& stream) {
  if (args.num_rows == 0 || args.num_modules == 0) {
    return;
  }
  if (args.num_rows <= FEW_ROWS) {
    auto p = common_params<shrink_rows::Params>(args);
    p.segment_begin = args.lora->segment_begin;
    p.segment_slot = args.lora->segment_slot;
    p.num_segments = args.lora->counts + 1;
    p.max_segments = args.num_rows;
    p.rows = args.lora->sorted_rows;
    args.lets_next_early ? shrink_rows::launch<false, true>(p, cuda_state(stream))
                         : shrink_rows::launch<false, false>(p, cuda_state(stream));
    return;
  }
  auto p = common_params<shrink_segments::Params>(args);
  p.segment_begin = args.lora->segment_begin;
  p.segment_slot = args.lora->segment_slot;
  p.num_segments = args.lora->counts + 1;
  p.rows = args.lora->sorted_rows;
  p.max_rank = args.lora->counts + 2;
  const CudaStream& state = cuda_state(stream);
  shrink_segments::launch(p, args.num_rows, size_for_rows(args.num_rows, state.num_sms), state);
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
    p.max_segments = static_cast<int>(pairs);
    p.rows = args.order.pair_row;
    p.x_by_position = args.x_sorted;
    p.out_bf16 = args.out_bf16;
    shrink_rows::launch<true, false>(p, cuda_state(stream));
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
  const auto size =
      pairs <= MEDIUM_EXPERT * args.num_experts ? shrink_segments::Size::kMedium : shrink_segments::Size::kLarge;
  shrink_segments::launch(p, pairs, size, cuda_state(stream));
}

}  // namespace moelora
