// SPDX-License-Identifier: Apache-2.0
// rope_kv_write on CUDA. Heads of 64 or 128 in aligned rows, which is what models have: a lane takes a share of a head
// (rope_device.cuh), a block THREADS shares at a time of one row, whose cosines and sines it computes once. Of few rows
// a lane takes one share and has all but the loads of q, k and v behind it when the kernel before ends; of many rows
// ITEMS shares, asked for first, so that enough bytes are on their way while the tables are made. Other heads: a block
// takes one row and HEADS_PER_BLOCK heads, a warp one head at a time, lane i holding the pairs i, i + 32, ... of it.
// Sums run in an order fixed by the width of a head. Limited by memory for many rows, by dependent loads (position,
// block table) and one round trip for few.
#include <cstdint>

#include "kernels/attention/kv_layer.cuh"
#include "kernels/attention/rope_device.cuh"
#include "kernels/attention/rope_kv_write.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vec.cuh"

namespace moelora {
namespace {

constexpr int THREADS = 128;  // of heads of 64 and 128
constexpr int ITEMS = 5;      // of many rows; 64 + 2 * 8 heads of 64 and 32 + 2 * 4 of 128 are exactly one block
constexpr int WARPS = 8;      // of other heads
constexpr int HEADS_PER_BLOCK = 16;
constexpr int MAX_HEAD_DIM = 256;
constexpr int MAX_PAIRS = MAX_HEAD_DIM / 2 / 32;  // of a lane

struct Params {
  float* q;
  const float* k;
  const float* v;
  int64_t q_stride;
  int64_t k_stride;
  int64_t v_stride;
  int num_heads;
  int num_kv_heads;
  int head_dim;
  rope::Form form;
  const int32_t* positions;
  const int32_t* row_sequence;
  KvLayer kv;
};

// Which head of a row's q, k and v is the h-th of all.
struct Place {
  rope::Kind kind;
  int head;
};
__device__ __forceinline__ Place place_of(const Params& p, int h) {
  if (h < p.num_heads) {
    return {rope::Kind::kQ, h};
  }
  const int behind = h - p.num_heads;
  return behind < p.num_kv_heads ? Place{rope::Kind::kK, behind} : Place{rope::Kind::kV, behind - p.num_kv_heads};
}
__device__ __forceinline__ const float* source(const Params& p, int64_t row, const Place& place) {
  const float* rows = place.kind == rope::Kind::kQ ? p.q : place.kind == rope::Kind::kK ? p.k : p.v;
  const int64_t stride = place.kind == rope::Kind::kQ   ? p.q_stride
                         : place.kind == rope::Kind::kK ? p.k_stride
                                                        : p.v_stride;
  return rows + row * stride + static_cast<int64_t>(place.head) * p.head_dim;
}
// Where a head of k or v goes in the block whose K begins at `keys`.
template <class Kv>
__device__ __forceinline__ Kv* target(const Params& p, Kv* keys, int position, const Place& place) {
  const int offset = position - p.kv.block_of(position) * p.kv.block_tokens;
  return keys + (place.kind == rope::Kind::kK ? 0 : p.kv.elements) +
         static_cast<int64_t>(place.head * p.kv.block_tokens + offset) * p.head_dim;
}

// Grid: [rows][blocks of COUNT * THREADS shares].
template <int D, int COUNT, class Kv>
__global__ void __launch_bounds__(THREADS) rope_shares(const __grid_constant__ Params p) {
  constexpr int LANES = D / 8;
  __shared__ rope::Tables<D> tables;
  let_next_start();
  const int64_t row = blockIdx.x;
  const int first = static_cast<int>(blockIdx.y) * COUNT * THREADS + static_cast<int>(threadIdx.x);
  const int l = static_cast<int>(threadIdx.x) % LANES;
  const int heads = p.num_heads + 2 * p.num_kv_heads;
  rope::Part parts[COUNT];
  const auto load_parts = [&] {
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int h = (first + i * THREADS) / LANES;
      parts[i] = {};
      if (h < heads) {
        parts[i] = rope::load_part<D>(source(p, row, place_of(p, h)), l);
      }
    }
  };
  if constexpr (COUNT > 1) {
    load_parts();
  }
  // Positions, sequences and block tables were there before the step.
  const int position = p.positions[row];
  Kv* const keys = reinterpret_cast<Kv*>(p.kv.block(p.row_sequence[row], p.kv.block_of(position)));
  rope::fill_tables<D>(p.form, position, tables);
  __syncthreads();  // the tables are there
  if constexpr (COUNT == 1) {
    load_parts();
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int h = (first + i * THREADS) / LANES;
    const Place place = place_of(p, h);
    rope::turn_part<D>(p.form, tables, place.kind, l, parts[i]);
    if (h >= heads) {
      continue;
    }
    if (place.kind == rope::Kind::kQ) {
      rope::store_part<D>(parts[i], p.q + row * p.q_stride + static_cast<int64_t>(h) * D, l);
    } else {
      rope::store_part<D>(parts[i], target(p, keys, position, place), l);
    }
  }
}

// One head in registers: pair n of lane i is elements (i + 32 n) and (i + 32 n + D / 2).
struct Head {
  float a[MAX_PAIRS];
  float b[MAX_PAIRS];
};

__device__ __forceinline__ void load_head(const float* from, int half, float clip, Head& head) {
#pragma unroll
  for (int n = 0; n < MAX_PAIRS; ++n) {
    const int i = threadIdx.x % 32 + 32 * n;
    const bool inside = i < half;
    head.a[n] = inside ? rope::clamped(from[i], clip) : 0.0f;
    head.b[n] = inside ? rope::clamped(from[i + half], clip) : 0.0f;
  }
}

__device__ __forceinline__ void norm_head(const Weight& weight, int half, float eps, Head& head) {
  if (weight.data == nullptr) {
    return;
  }
  float squares = 0.0f;
#pragma unroll
  for (int n = 0; n < MAX_PAIRS; ++n) {
    squares = fmaf(head.a[n], head.a[n], squares);
    squares = fmaf(head.b[n], head.b[n], squares);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    squares += __shfl_xor_sync(0xffffffffu, squares, offset);
  }
  const float scale = rsqrtf(__fdividef(squares, static_cast<float>(2 * half)) + eps);
#pragma unroll
  for (int n = 0; n < MAX_PAIRS; ++n) {
    const int i = threadIdx.x % 32 + 32 * n;
    if (i < half) {
      head.a[n] = head.a[n] * scale * rope::load_weight(weight, i);
      head.b[n] = head.b[n] * scale * rope::load_weight(weight, i + half);
    }
  }
}

__device__ __forceinline__ void rotate(const float* cosine, const float* sine, int half, Head& head) {
#pragma unroll
  for (int n = 0; n < MAX_PAIRS; ++n) {
    const int i = threadIdx.x % 32 + 32 * n;
    if (i < half) {
      const float a = head.a[n];
      const float b = head.b[n];
      head.a[n] = a * cosine[i] - b * sine[i];
      head.b[n] = b * cosine[i] + a * sine[i];
    }
  }
}

template <class T>
__device__ __forceinline__ void store_head(const Head& head, int half, T* to) {
#pragma unroll
  for (int n = 0; n < MAX_PAIRS; ++n) {
    const int i = threadIdx.x % 32 + 32 * n;
    if (i < half) {
      to[i] = from_f32<T>(head.a[n]);
      to[i + half] = from_f32<T>(head.b[n]);
    }
  }
}

// Grid: [rows][blocks of HEADS_PER_BLOCK heads].
template <class Kv>
__global__ void __launch_bounds__(WARPS * 32, 1) rope_heads(const __grid_constant__ Params p) {
  __shared__ float cosine[MAX_HEAD_DIM / 2];
  __shared__ float sine[MAX_HEAD_DIM / 2];
  let_next_start();
  const int half = p.head_dim / 2;
  const int64_t row = blockIdx.x;
  const int first = static_cast<int>(blockIdx.y) * HEADS_PER_BLOCK;
  const int position = p.positions[row];
  if (threadIdx.x < half) {
    const float2 turn = rope::rotation(position, p.form.inv_freq[threadIdx.x], p.form.scale);
    cosine[threadIdx.x] = turn.x;
    sine[threadIdx.x] = turn.y;
  }
  Kv* const keys = reinterpret_cast<Kv*>(p.kv.block(p.row_sequence[row], p.kv.block_of(position)));
  __syncthreads();  // the rotation of the row is there
  wait_for_previous();
  const int heads = p.num_heads + 2 * p.num_kv_heads;
#pragma unroll 1
  for (int h = first + threadIdx.x / 32; h < heads && h < first + HEADS_PER_BLOCK; h += WARPS) {
    const Place place = place_of(p, h);
    Head head;
    load_head(source(p, row, place), half, p.form.clip, head);
    if (place.kind != rope::Kind::kV) {
      norm_head(place.kind == rope::Kind::kQ ? p.form.q_norm : p.form.k_norm, half, p.form.eps, head);
      rotate(cosine, sine, half, head);
    }
    if (place.kind == rope::Kind::kQ) {
      store_head(head, half, p.q + row * p.q_stride + static_cast<int64_t>(h) * p.head_dim);
    } else {
      store_head(head, half, target(p, keys, position, place));
    }
  }
}

template <int D, class Kv>
void launch_shares(const Params& params, int num_rows, const CudaStream& state) {
  const int shares = (params.num_heads + 2 * params.num_kv_heads) * (D / 8);
  const auto rows = static_cast<unsigned>(num_rows);
  const auto blocks = static_cast<unsigned>((shares + THREADS - 1) / THREADS);
  if (int64_t{rows} * blocks <= int64_t{8} * state.num_sms) {
    launch_dependent(rope_shares<D, 1, Kv>, dim3(rows, blocks), THREADS, 0, state, params);
  } else {
    launch_dependent(rope_shares<D, ITEMS, Kv>, dim3(rows, (blocks + ITEMS - 1) / ITEMS), THREADS, 0, state, params);
  }
}

bool aligned4(const Rows& rows) {
  return rows.stride % 4 == 0 && reinterpret_cast<uintptr_t>(rows.data) % (4 * sizeof(float)) == 0;
}

template <class Kv>
void launch(const RopeKvWriteArgs& args, const Params& params, const CudaStream& state) {
  const bool aligned = aligned4(args.q) && aligned4(args.k) && aligned4(args.v) && args.kv.page_bytes % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(args.kv.pool) % 16 == 0;
  if (aligned && params.head_dim == 64) {
    launch_shares<64, Kv>(params, args.num_rows, state);
  } else if (aligned && params.head_dim == 128) {
    launch_shares<128, Kv>(params, args.num_rows, state);
  } else {
    const int heads = params.num_heads + 2 * params.num_kv_heads;
    const dim3 grid(static_cast<unsigned>(args.num_rows),
                    static_cast<unsigned>((heads + HEADS_PER_BLOCK - 1) / HEADS_PER_BLOCK));
    launch_dependent(rope_heads<Kv>, grid, WARPS * 32, 0, state, params);
  }
}

}  // namespace

void rope_kv_write_cuda(const RopeKvWriteArgs& args, Stream& stream) {
  const KvLayout& layout = args.kv.layout;
  MOELORA_ASSERT(layout.head_dim % 2 == 0 && layout.head_dim <= MAX_HEAD_DIM && layout.dtype != Dtype::kF16);
  for (const Weight* weight : {&args.q_norm, &args.k_norm}) {
    MOELORA_ASSERT(weight->empty() || weight->cols == layout.head_dim);
    MOELORA_ASSERT(reinterpret_cast<uintptr_t>(weight->data) % dtype_bytes(weight->dtype) == 0);
  }
  if (args.num_rows == 0) {
    return;
  }
  const Params params{args.q.f32(),
                      args.k.f32(),
                      args.v.f32(),
                      args.q.stride,
                      args.k.stride,
                      args.v.stride,
                      args.num_heads,
                      layout.num_kv_heads,
                      layout.head_dim,
                      {args.clip, args.q_norm, args.k_norm, args.eps, args.inv_freq, args.rope_scale},
                      args.positions,
                      args.row_sequence,
                      layer_of(args.kv, args.layer)};
  if (layout.dtype == Dtype::kF32) {
    launch<float>(args, params, cuda_state(stream));
  } else {
    launch<__nv_bfloat16>(args, params, cuda_state(stream));
  }
  check_launch("rope_kv_write");
}

}  // namespace moelora
