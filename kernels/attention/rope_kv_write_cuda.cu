// SPDX-License-Identifier: Apache-2.0
// rope_kv_write on CUDA: a block takes one row and HEADS_PER_BLOCK of its Nq + 2 Nkv heads of q, k and v; its threads
// compute the row's cosines and sines once into shared memory, then each warp clamps, norms, rotates and stores one
// head at a time, lane i holding the pairs i, i + 32, ... of the head. Angles reach 10^5 radians: they are reduced to
// half turns in double, where sincosf would need its slow path. Sums run in an order fixed by the width of a head.
// Limited by memory for many rows, by dependent loads (position, block table) for few.
#include <cstdint>

#include "kernels/attention/rope_kv_write.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vec.cuh"

namespace moelora {
namespace {

constexpr int WARPS = 8;
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
  int blocks_per_row;
  float clip;
  Weight q_norm;
  Weight k_norm;
  float eps;
  const float* inv_freq;
  float rope_scale;
  const int32_t* positions;
  const int32_t* row_sequence;
  KvView kv;
  int layer;
};

// One head in registers: pair n of lane i is elements (i + 32 n) and (i + 32 n + D / 2).
struct Head {
  float a[MAX_PAIRS];
  float b[MAX_PAIRS];
};

__device__ __forceinline__ float load_weight(const Weight& weight, int i) {
  switch (weight.dtype) {
    case Dtype::kF32:
      return static_cast<const float*>(weight.data)[i];
    case Dtype::kF16:
      return to_f32(static_cast<const __half*>(weight.data)[i]);
    default:
      return to_f32(static_cast<const __nv_bfloat16*>(weight.data)[i]);
  }
}

// Written so that NaN stays NaN.
__device__ __forceinline__ float clamped(float value, float clip) {
  if (clip > 0.0f) {
    value = value > clip ? clip : value;
    value = value < -clip ? -clip : value;
  }
  return value;
}

__device__ __forceinline__ void load_head(const float* from, int half, float clip, Head& head) {
#pragma unroll
  for (int n = 0; n < MAX_PAIRS; ++n) {
    const int i = threadIdx.x % 32 + 32 * n;
    const bool inside = i < half;
    head.a[n] = inside ? clamped(from[i], clip) : 0.0f;
    head.b[n] = inside ? clamped(from[i + half], clip) : 0.0f;
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
      head.a[n] = head.a[n] * scale * load_weight(weight, i);
      head.b[n] = head.b[n] * scale * load_weight(weight, i + half);
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

template <class Kv>
__global__ void __launch_bounds__(WARPS * 32, 1) rope_kernel(const Params p) {
  __shared__ float cosine[MAX_HEAD_DIM / 2];
  __shared__ float sine[MAX_HEAD_DIM / 2];
  const KvLayout& layout = p.kv.layout;
  const int width = layout.head_dim;
  const int half = width / 2;
  const int64_t row = blockIdx.x / p.blocks_per_row;
  const int first = static_cast<int>(blockIdx.x % p.blocks_per_row) * HEADS_PER_BLOCK;
  const int position = p.positions[row];
  if (threadIdx.x < half) {
    // The angle itself is the fp32 product of the contract.
    const float angle = __fmul_rn(static_cast<float>(position), p.inv_freq[threadIdx.x]);
    const double half_turns = static_cast<double>(angle) * 0.31830988618379067154;
    float s;
    float c;
    sincospif(static_cast<float>(half_turns - 2.0 * rint(0.5 * half_turns)), &s, &c);
    cosine[threadIdx.x] = c * p.rope_scale;
    sine[threadIdx.x] = s * p.rope_scale;
  }
  Kv* const keys = reinterpret_cast<Kv*>(p.kv.block(p.row_sequence[row], position, p.layer));
  // Positions and tables were there before the step; q, k and v are from the kernel before this one.
  wait_for_previous();
  let_next_start();
  __syncthreads();  // the rotation of the row is there
  const int offset = position % layout.block_tokens;
  const int heads = p.num_heads + 2 * layout.num_kv_heads;
#pragma unroll 1
  for (int h = first + threadIdx.x / 32; h < heads && h < first + HEADS_PER_BLOCK; h += WARPS) {
    Head head;
    if (h < p.num_heads) {
      float* q = p.q + row * p.q_stride + static_cast<int64_t>(h) * width;
      load_head(q, half, p.clip, head);
      norm_head(p.q_norm, half, p.eps, head);
      rotate(cosine, sine, half, head);
      store_head(head, half, q);
      continue;
    }
    const bool is_key = h < p.num_heads + layout.num_kv_heads;
    const int kv_head = h - p.num_heads - (is_key ? 0 : layout.num_kv_heads);
    const float* from = (is_key ? p.k + row * p.k_stride : p.v + row * p.v_stride) + int64_t{kv_head} * width;
    load_head(from, half, p.clip, head);
    if (is_key) {
      norm_head(p.k_norm, half, p.eps, head);
      rotate(cosine, sine, half, head);
    }
    const int64_t at = (static_cast<int64_t>(kv_head) * layout.block_tokens + offset) * width;
    store_head(head, half, keys + (is_key ? 0 : p.kv.elements()) + at);
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
  const int heads = args.num_heads + 2 * layout.num_kv_heads;
  const int blocks_per_row = (heads + HEADS_PER_BLOCK - 1) / HEADS_PER_BLOCK;
  const Params params{args.q.f32(),   args.k.f32(),    args.v.f32(),   args.q.stride,     args.k.stride, args.v.stride,
                      args.num_heads, blocks_per_row,  args.clip,      args.q_norm,       args.k_norm,   args.eps,
                      args.inv_freq,  args.rope_scale, args.positions, args.row_sequence, args.kv,       args.layer};
  const auto blocks = static_cast<unsigned>(int64_t{args.num_rows} * blocks_per_row);
  if (layout.dtype == Dtype::kF32) {
    launch_dependent(rope_kernel<float>, dim3(blocks), WARPS * 32, 0, cuda_state(stream), params);
  } else {
    launch_dependent(rope_kernel<__nv_bfloat16>, dim3(blocks), WARPS * 32, 0, cuda_state(stream), params);
  }
  check_launch("rope_kv_write");
}

}  // namespace moelora
