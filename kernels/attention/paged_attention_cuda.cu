// SPDX-License-Identifier: Apache-2.0
// paged_attention on CUDA. Which path a sequence takes is decided on the device, by its rows: one row (decode) goes to
// attention_decode.cuh, several to attention_prefill.cuh; both kernels are launched over all sequences and leave what
// is not theirs. Grids depend on host constants alone, so a launch can be recorded. Decode is limited by memory and,
// for few sequences, by latency; prefill by tensor cores.
#include <algorithm>

#include "kernels/attention/attention_decode.cuh"
#include "kernels/attention/attention_prefill.cuh"
#include "kernels/attention/paged_attention.h"
#include "kernels/cuda/launch.cuh"

namespace moelora {
namespace {

using attention::Params;

constexpr size_t STATIC_SHARED = size_t{48} << 10;  // what a block may have without asking

template <class Kernel>
void allow_shared(Kernel kernel, size_t bytes) {
  if (bytes > STATIC_SHARED) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
               "paged_attention");
  }
}

// How the keys of decode rows are split; from host constants alone. Of the form with 4 warps an SM runs `blocks_per_sm`
// blocks.
struct DecodePlan {
  attention::DecodeGrid grid;
  int blocks;
  bool many_warps;
};

DecodePlan plan_decode(const PagedAttentionArgs& args, const CudaStream& state, int blocks_per_sm) {
  const int kv_heads = args.kv.layout.num_kv_heads;
  const int head_tiles = (args.num_heads / kv_heads + attention::HEADS - 1) / attention::HEADS;
  const int64_t rows = int64_t{args.num_sequences} * kv_heads * head_tiles;
  // The units of 16 keys that a window can touch, if there is one.
  const int most_units = args.window > 0 ? (args.window + attention::UNIT - 2) / attention::UNIT + 1 : INT32_MAX;
  // Rounds of blocks times the length of a block, which is its share of the keys and an eighth of a whole row's time
  // to begin and end. A last round with few blocks has the memory to itself and is limited by latency.
  const int64_t slots = int64_t{state.num_sms} * blocks_per_sm;
  int splits = 1;
  int64_t best = INT64_MAX;
  for (int s = 1; s <= kMaxAttentionSplits && (s == 1 || most_units > 8 * s); s *= 2) {
    const int64_t cost = (rows * s + slots - 1) / slots * (8 / s + 1);
    if (cost < best) {
      best = cost;
      splits = s;
    }
  }
  const auto blocks = static_cast<int>(rows * splits);
  // Few blocks: their latency counts, not their number on an SM.
  return {{head_tiles, splits, splits > 1 && state.compute_capability >= 90}, blocks, blocks <= state.num_sms};
}

template <int MAX_D, bool EXACT, bool ROPE, int WARPS, class Out>
void launch_decode(const Params& params, const DecodePlan& plan, const CudaStream& state) {
  const int heads = std::min(params.group, attention::HEADS);
  const size_t shared = sizeof(attention::DecodeShared<MAX_D, WARPS>) +
                        static_cast<size_t>(WARPS * heads * params.head_dim) * sizeof(float) +
                        (plan.grid.in_cluster ? attention::mailbox_bytes(heads * params.head_dim / 4) : 0);
  const auto kernel = attention::decode_kernel<MAX_D, EXACT, ROPE, WARPS, Out>;
  allow_shared(kernel, shared);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim = dim3(WARPS * 32);
  config.dynamicSmemBytes = shared;
  config.stream = state.stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(plan.grid.splits);
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  config.attrs = attributes;
  // Clusters and dependent launches came with the same GPUs.
  config.numAttrs = plan.grid.in_cluster ? 2 : state.compute_capability >= 90 ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params, plan.grid), "paged_attention");
  if (plan.grid.splits > 1 && !plan.grid.in_cluster) {
    const auto blocks = static_cast<unsigned>(params.num_sequences * params.num_heads);
    attention::join_splits_kernel<Out><<<blocks, 64, 0, state.stream>>>(params, plan.grid.splits, WARPS);
  }
}

template <int MAX_D, bool EXACT, class Out>
void launch_paths(const PagedAttentionArgs& args, const Params& params, bool rotates, const CudaStream& state) {
  const DecodePlan plan = plan_decode(args, state, attention::decode_blocks(MAX_D, 4));
  if (plan.grid.splits > 1 && !plan.grid.in_cluster) {
    MOELORA_ASSERT(args.scratch != nullptr && reinterpret_cast<uintptr_t>(args.scratch) % 16 == 0);
    MOELORA_ASSERT(args.scratch_bytes >= paged_attention_scratch_bytes(static_cast<size_t>(args.num_sequences),
                                                                       static_cast<size_t>(args.num_heads),
                                                                       static_cast<size_t>(params.head_dim)));
  }
  constexpr int MANY_WARPS = MAX_D == 64 ? 16 : 8;
  if constexpr (!EXACT) {
    launch_decode<MAX_D, EXACT, false, 4, Out>(params, plan, state);
  } else if (rotates) {
    plan.many_warps ? launch_decode<MAX_D, EXACT, true, MANY_WARPS, Out>(params, plan, state)
                    : launch_decode<MAX_D, EXACT, true, 4, Out>(params, plan, state);
  } else {
    plan.many_warps ? launch_decode<MAX_D, EXACT, false, MANY_WARPS, Out>(params, plan, state)
                    : launch_decode<MAX_D, EXACT, false, 4, Out>(params, plan, state);
  }
  if (args.num_rows <= args.num_sequences) {
    return;
  }
  constexpr int WARPS = MAX_D <= 128 ? 8 : 4;
  constexpr int KEYS = MAX_D <= 128 ? 64 : 16;
  const int rows = WARPS * 16 / params.group;  // of a tile
  MOELORA_ASSERT(rows >= 1);
  const int tiles = args.num_rows / rows + std::min(args.num_sequences, args.num_rows / 2);
  const auto kernel = attention::prefill_kernel<MAX_D, EXACT, WARPS, KEYS, Out>;
  const size_t shared = sizeof(attention::PrefillShared<MAX_D, KEYS>);
  allow_shared(kernel, shared);
  launch_dependent(kernel, dim3(static_cast<unsigned>(tiles * params.num_kv_heads)), WARPS * 32, shared, state, params);
}

template <class Out>
void launch_for_width(const PagedAttentionArgs& args, const Params& params, bool rotates, const CudaStream& state) {
  const int width = params.head_dim;
  if (width == 64) {
    launch_paths<64, true, Out>(args, params, rotates, state);
  } else if (width == 128) {
    launch_paths<128, true, Out>(args, params, rotates, state);
  } else if (width < 64) {
    launch_paths<64, false, Out>(args, params, rotates, state);
  } else if (width < 128) {
    launch_paths<128, false, Out>(args, params, rotates, state);
  } else {
    launch_paths<256, false, Out>(args, params, rotates, state);
  }
}

bool aligned4(const Rows& rows) {
  return rows.stride % 4 == 0 && reinterpret_cast<uintptr_t>(rows.data) % (4 * sizeof(float)) == 0;
}

// Whether the decode kernel can rotate q and k and write K and V on its way.
bool can_rotate(const PagedAttentionArgs& args) {
  const int width = args.kv.layout.head_dim;
  return args.num_rows <= args.num_sequences && (width == 64 || width == 128) && aligned4(args.q) &&
         aligned4(args.rope->k) && aligned4(args.rope->v);
}

// Tells the decode kernel how.
void add_rotation(const RopeKvWriteArgs& rope, int head_dim, Params& params) {
  for (const Weight* weight : {&rope.q_norm, &rope.k_norm}) {
    MOELORA_ASSERT(weight->empty() || weight->cols == head_dim);
    MOELORA_ASSERT(reinterpret_cast<uintptr_t>(weight->data) % dtype_bytes(weight->dtype) == 0);
  }
  params.k = rope.k.f32();
  params.v = rope.v.f32();
  params.k_stride = rope.k.stride;
  params.v_stride = rope.v.stride;
  params.form = {rope.clip, rope.q_norm, rope.k_norm, rope.eps, rope.inv_freq, rope.rope_scale};
}

}  // namespace

void paged_attention_cuda(const PagedAttentionArgs& args, Stream& stream) {
  const KvLayout& layout = args.kv.layout;
  MOELORA_ASSERT(layout.dtype == Dtype::kBf16 && args.out.dtype != Dtype::kF16);
  MOELORA_ASSERT(layout.head_dim % 16 == 0 && layout.head_dim >= 16 && layout.head_dim <= 256);
  MOELORA_ASSERT(layout.block_tokens % attention::UNIT == 0 && args.num_heads % layout.num_kv_heads == 0);
  MOELORA_ASSERT(args.kv.page_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(args.kv.pool) % 16 == 0);
  MOELORA_ASSERT(args.out.stride % 4 == 0 &&
                 reinterpret_cast<uintptr_t>(args.out.data) % (4 * dtype_bytes(args.out.dtype)) == 0);
  if (args.num_sequences == 0 || args.num_rows == 0) {
    return;
  }
  MOELORA_ASSERT(args.rope == nullptr || (args.rope->q.data == args.q.data && args.rope->positions == args.positions &&
                                          args.rope->layer == args.layer && args.rope->kv.pool == args.kv.pool));
  const bool rotates = args.rope != nullptr && can_rotate(args);
  if (args.rope != nullptr && !rotates) {
    rope_kv_write_cuda(*args.rope, stream);
  }
  Params params{args.q.f32(),
                args.q.stride,
                args.out.data,
                args.out.stride,
                args.row_begin,
                args.positions,
                args.num_sequences,
                args.num_heads,
                args.num_heads / layout.num_kv_heads,
                args.scale * attention::LOG2E,
                args.window,
                args.sinks,
                layer_of(args.kv, args.layer),
                layout.num_kv_heads,
                layout.head_dim,
                reinterpret_cast<float*>(args.scratch),
                nullptr,
                nullptr,
                0,
                0,
                {}};
  if (rotates) {
    add_rotation(*args.rope, layout.head_dim, params);
  }
  if (args.out.dtype == Dtype::kF32) {
    launch_for_width<float>(args, params, rotates, cuda_state(stream));
  } else {
    launch_for_width<__nv_bfloat16>(args, params, rotates, cuda_state(stream));
  }
  check_launch("paged_attention");
}

}  // namespace moelora
