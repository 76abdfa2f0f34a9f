// SPDX-License-Identifier: Apache-2.0
// From the arguments of moe_gate_up and moe_down to a kernel: which one, in which shape.
#pragma once

#include <algorithm>

#include "kernels/lora/lora_shrink_cuda.h"
#include "kernels/moe/expert_decode.cuh"
#include "kernels/moe/expert_delta.cuh"
#include "kernels/moe/expert_delta_stream.cuh"
#include "kernels/moe/expert_expand.cuh"
#include "kernels/moe/expert_few.cuh"
#include "kernels/moe/expert_prefill.cuh"
#include "kernels/moe/expert_prefill_sm90.cuh"
#include "kernels/moe/expert_stream.cuh"

namespace moelora {

// Pairs an expert, on average over all experts, from which kAuto takes the stream of kernels/moe/expert_stream.cuh for
// tiles (gpt-oss's shape, H200, six layers as one graph: 12 rows 962 us, by expert_decode.cuh 1,035; 16 rows 1,017 and,
// as that was before, 1,034).
constexpr int kStreamTokensPerExpert = 1;
// Rows of MXFP4 up to which LoRA is inside the product (H200, six layers of the gpt-oss shape as one graph, with the
// dense linears' shrink beside, too: 1 row 669 us, with all deltas in a launch before it 694; 2 rows 773 and 779; 4
// rows 939 and 874). Of bf16 rows deltas before it are always faster (Qwen3-30B-A3B's shape, 1 row: 562 and 523 us).
constexpr int kBesideRows = 1;
// Pairs from which the deltas come from blocks without clusters (gpt-oss, six layers: 16 rows 1,432 us and 1,336 by
// clusters; 32 rows 1,707 and 1,780; 64 rows 2,239 and 2,440; Qwen3-30B-A3B, 64 rows 3,298 and 4,058).
constexpr int kBlocksPairs = 128;

inline bool aligned16(const Rows& rows) {
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 &&
         rows.stride * static_cast<int64_t>(dtype_bytes(rows.dtype)) % 16 == 0;
}

// Room in scratch behind the shrunk values for arranged tokens, null if there is none.
template <class Args>
std::byte* token_room(const Args& args, size_t modules, size_t k) {
  const size_t pairs = static_cast<size_t>(args.num_rows) * static_cast<size_t>(args.top_k);
  const size_t shrunk =
      args.lora == nullptr ? 0 : pairs * modules * static_cast<size_t>(args.lora->rank_stride) * sizeof(float);
  const size_t bytes = shrunk + expert_token_bytes(pairs, static_cast<size_t>(args.num_experts), k);
  if (args.scratch == nullptr || args.scratch_bytes < bytes) {
    return nullptr;
  }
  std::byte* const at = args.scratch + shrunk;
  return at + (128 - reinterpret_cast<uintptr_t>(at) % 128) % 128;
}

// Fills in what both ops have in common. Returns the shrink, for the ways that have one; without adapters its `lora` is
// null.
template <class Args>
ExpertShrinkArgs begin_expert_gemm(ExpertGemm& p, const Args& args, const Rows& x, bool x_by_pair, const Rows& out,
                                   const ExpertWeights& low, const ExpertWeights& high) {
  const bool tiles = low.format == ExpertFormat::kMxfp4Tiles;
  MOELORA_ASSERT(x.dtype == Dtype::kBf16 && aligned16(x) && out.dtype != Dtype::kF16);
  MOELORA_ASSERT(tiles || (low.format == ExpertFormat::kRows && high.format == ExpertFormat::kRows &&
                           low.dtype == Dtype::kBf16 && high.dtype == Dtype::kBf16));
  MOELORA_ASSERT(low.cols % 8 == 0 && args.num_experts <= kMaxExperts);
  MOELORA_ASSERT(args.order.active_experts != nullptr && args.order.num_active != nullptr);
  p.low = low.data;
  p.high = high.data;
  p.scales = low.scales;
  p.low_bias = low.bias;
  p.high_bias = high.bias;
  p.low_step = low.row_step;
  p.high_step = high.row_step;
  p.rows = low.rows;
  p.k = low.cols;
  p.k_blocks = (low.cols + 63) / 64;
  p.x = static_cast<const __nv_bfloat16*>(x.data);
  p.x_stride = x.stride;
  p.x_by_pair = x_by_pair;
  p.order = args.order;
  p.out = out.data;
  p.out_stride = out.stride;
  p.out_f32 = out.dtype == Dtype::kF32;
  p.token_room = token_room(args, x_by_pair ? 1 : 2, static_cast<size_t>(low.cols));
  p.token_places = static_cast<int>(expert_token_places(
      static_cast<size_t>(args.num_rows) * static_cast<size_t>(args.top_k), static_cast<size_t>(args.num_experts)));
  ExpertShrinkArgs shrink;
  if (args.lora == nullptr) {
    return shrink;
  }
  shrink.x = x;
  shrink.x_sorted = x_by_pair;
  shrink.order = args.order;
  shrink.num_rows = args.num_rows;
  shrink.top_k = args.top_k;
  shrink.num_experts = args.num_experts;
  shrink.k = low.cols;
  shrink.layer = args.layer;
  shrink.num_modules = x_by_pair ? 1 : 2;
  if (x_by_pair) {
    shrink.modules[0] = ExpertModule::kDown;
  }
  shrink.lora = args.lora;
  shrink.out = reinterpret_cast<float*>(args.scratch);
  shrink.rank_stride = args.lora->rank_stride;
  const size_t floats = static_cast<size_t>(args.num_rows) * static_cast<size_t>(args.top_k) *
                        static_cast<size_t>(shrink.num_modules) * static_cast<size_t>(shrink.rank_stride);
  MOELORA_ASSERT(args.scratch_bytes >= floats * sizeof(float) && shrink.rank_stride % 8 == 0);
  p.lora.table = args.lora->table;
  p.lora.row_slot = args.lora->row_slot;
  p.lora.row_scale = args.lora->row_scale;
  p.lora.shrunk = shrink.out;
  p.lora.rank_stride = shrink.rank_stride;
  p.lora.layer = args.layer;
  p.lora.max_rank = args.lora->counts + 2;
  const size_t pairs = static_cast<size_t>(args.num_rows) * static_cast<size_t>(args.top_k);
  const auto modules = static_cast<size_t>(shrink.num_modules);
  if (args.scratch_bytes >=
      expert_scratch_bytes(pairs, modules, static_cast<size_t>(shrink.rank_stride), static_cast<size_t>(low.rows))) {
    p.lora.delta = shrink.out + floats;
    p.lora.adapted = reinterpret_cast<int32_t*>(p.lora.delta + pairs * modules * static_cast<size_t>(low.rows));
  }
  return shrink;
}

// At most 8 rows with LoRA inside the product. False: nothing was launched.
template <bool GATE_UP, bool TILES>
bool launch_expert_beside(ExpertGemm p, ExpertPath path, int num_rows, int num_pairs, int num_experts,
                          const CudaStream& state) {
  const bool wanted =
      path == ExpertPath::kFewRowsBeside || (path == ExpertPath::kAuto && TILES && num_rows <= kBesideRows);
  if (!wanted || p.lora.row_slot == nullptr || state.counters == nullptr ||
      !few::fits<GATE_UP, TILES>(p, num_rows, num_pairs, num_experts)) {
    return false;
  }
  p.lora.counters = state.counters;
  return launch_expert_few<GATE_UP, TILES>(p, few::Lora::kBeside, num_rows, num_pairs, num_experts, state);
}

// Few tokens: the deltas of all adapted pairs, for the product's epilogue. True if all others have one, too.
template <bool GATE_UP>
bool launch_expert_deltas(const ExpertGemm& p, const ExpertShrinkArgs& shrink, ExpertPath path, int64_t num_pairs,
                          int num_experts, Stream& stream) {
  const CudaStream& state = cuda_state(stream);
  MOELORA_ASSERT(p.lora.delta != nullptr);  // expert_scratch_bytes
  const bool many = path == ExpertPath::kFewTokensBlocks || (path == ExpertPath::kAuto && num_pairs >= kBlocksPairs);
  if (many && launch_expert_delta_stream<GATE_UP>(p, num_pairs, state)) {
    return true;
  }
  if (path == ExpertPath::kFewTokensApart || !launch_expert_delta<GATE_UP>(p, num_pairs, state)) {
    lora_shrink_experts_cuda(shrink, stream);
    launch_expert_expand<GATE_UP>(p, num_pairs, num_experts, state);
  }
  return false;
}

template <bool GATE_UP, class Source, bool TILES>
void launch_expert_gemm(const ExpertGemm& p, const ExpertShrinkArgs& shrink, ExpertPath path, int num_rows,
                        int64_t num_pairs, int num_experts, Stream& stream) {
  const CudaStream& state = cuda_state(stream);
  if (launch_expert_beside<GATE_UP, TILES>(p, path, num_rows, static_cast<int>(num_pairs), num_experts, state)) {
    return;
  }
  if (path == ExpertPath::kFewRowsBeside) {
    path = ExpertPath::kAuto;
  }
  const int max_active = static_cast<int>(std::min<int64_t>(num_experts, num_pairs));
  const bool many =
      is_many_tokens(path) || (path == ExpertPath::kAuto && num_pairs >= int64_t{kManyTokensPerExpert} * num_experts);
  if (many) {
    const bool wgmma = path != ExpertPath::kManyTokensMma && has_expert_prefill_sm90<GATE_UP, Source>(state);
    if (shrink.lora != nullptr) {
      ExpertShrinkArgs shrink_many = shrink;
      shrink_many.out_bf16 = wgmma;
      lora_shrink_experts_cuda(shrink_many, stream);
    }
    return wgmma ? launch_expert_prefill_sm90<GATE_UP, Source>(p, path, num_pairs, num_experts, state)
                 : launch_expert_prefill<GATE_UP, Source>(p, num_pairs, max_active, state);
  }
  bool all_deltas = false;
  if (shrink.lora != nullptr) {
    all_deltas = launch_expert_deltas<GATE_UP>(p, shrink, path, num_pairs, num_experts, stream);
  }
  if (path == ExpertPath::kAuto && launch_expert_few<GATE_UP, TILES>(p, few::Lora::kDeltas, num_rows,
                                                                     static_cast<int>(num_pairs), num_experts, state)) {
    return;
  }
  if constexpr (TILES) {
    const bool stream = path == ExpertPath::kFewTokens || path == ExpertPath::kFewTokensBlocks ||
                        (path == ExpertPath::kAuto && num_pairs >= int64_t{kStreamTokensPerExpert} * num_experts);
    if (stream && launch_expert_stream<GATE_UP>(p, all_deltas, num_experts, static_cast<int>(num_pairs), state)) {
      return;
    }
  }
  launch_expert_decode<GATE_UP, Source>(p, num_experts, max_active, num_pairs, state);
}

template <bool GATE_UP>
void launch_expert_format(const ExpertGemm& p, const ExpertShrinkArgs& shrink, ExpertFormat format, ExpertPath path,
                          int num_rows, int top_k, int num_experts, Stream& stream) {
  const int64_t num_pairs = int64_t{num_rows} * top_k;
  if (format == ExpertFormat::kMxfp4Tiles) {
    launch_expert_gemm<GATE_UP, TilesSource<GATE_UP>, true>(p, shrink, path, num_rows, num_pairs, num_experts, stream);
  } else {
    launch_expert_gemm<GATE_UP, RowsSource<GATE_UP>, false>(p, shrink, path, num_rows, num_pairs, num_experts, stream);
  }
}

}  // namespace moelora
