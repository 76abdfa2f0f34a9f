// SPDX-License-Identifier: Apache-2.0
// moe_router of up to 8 rows without an adapter on the router: one launch of one cluster, each block of it 8 or 16
// experts. Every block norms all rows by itself, as rms_norm_cuda.cu divides a row among 256 threads, and keeps them as
// bf16 in shared memory; then its 16 warps multiply them with their ranges of K, as linear_skinny.cuh does for so few
// tiles, whose sums and order of sums are repeated here: rows without an adapter have the same bits in a batch whose
// router has some. The logits go to the first block through the cluster's shared memory, and that block routes
// (moe_route_few.cuh). Weights of router and norm depend on no other kernel: they are in registers and shared memory
// when the residual comes. sm_90 and later.
// Limited by latency: the residual, two barriers for the norm, one for the sums, a hop to the first block, its top-k.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/dense/linear_skinny.cuh"
#include "kernels/dense/rms_norm_row.cuh"
#include "kernels/moe/moe_route_few.cuh"

namespace moelora::router_few {

constexpr int kMaxRows = 8;
constexpr int kMaxBlocks = 8;
constexpr int kMaxExperts = 16 * kMaxBlocks;
constexpr int kWarps = linear::kWarpsAlone;
constexpr int kThreads = 32 * kWarps;
constexpr int kNormWarps = kNormThreads / 32;
constexpr int kRowsAtOnce = kThreads / kNormThreads;  // of the norm
constexpr int kMaxSteps = 4;
constexpr int kStep = kWarps * kTileColumns;  // inputs that all warps, or all threads of a norm, take in one step
static_assert(kStep == 4 * kNormThreads);

struct Params {
  const float* x;
  int64_t x_stride;
  const std::byte* norm_weight;
  bool norm_f32;  // or bf16
  float eps;
  __nv_bfloat16* normed;
  int64_t normed_stride;
  int num_rows;
  int k;
  linear::Part router;
  MoeRouteArgs route;
};

// For up to EXPERTS experts. With the rest it leaves room for a block of the linear ahead on the same multiprocessor.
template <int EXPERTS>
struct Shared {
  ClusterBarrier logits_there;
  float squares[kMaxRows][kNormWarps];
  float logits[kMaxRows][EXPERTS];  // of the first block
  route::Shared<kMaxRows, kMaxRows * kMaxTopK, EXPERTS> route;
};

// Threads of a block that a multiprocessor's registers shall be enough for: the fewer a thread has, the sooner a block
// finds room beside those of the kernel before it.
constexpr int register_threads(int steps, int tile, bool many) {
  const int loaded = steps * tile + 4 * steps * (many ? 2 : 1);  // registers of weights and of rows
  return loaded <= 40 ? 1024 : (loaded <= 60 ? 768 : kThreads);
}

// In dynamic shared memory for up to STEPS * kStep inputs: the norm's weights as stored, then, in the same place, the
// sums of all warps; then the normed rows.
template <int STEPS>
struct Layout {
  static constexpr int PITCH = STEPS * kStep + 32;  // elements: neighbouring rows fall into different banks
  static constexpr int WEIGHTS_BYTES =
      std::max(STEPS * kStep, kWarps * 16 * kMaxRows) * static_cast<int>(sizeof(float));
  static constexpr int bytes(int num_rows) { return WEIGHTS_BYTES + num_rows * PITCH * 2; }
};

// A warp's range of K and a lane's place in it.
struct Range {
  int chunk;  // inputs before this lane's first chunk
  int first;  // this lane's first input
  int left;   // inputs from the range's begin on that are there
  __device__ __forceinline__ Range(int thread, int k) {
    const int warp = thread / 32;
    const int blocks = (k + kTileColumns - 1) / kTileColumns;
    const int begin = warp * blocks / kWarps * kTileColumns;
    chunk = thread % 4 * 8;
    first = begin + chunk;
    left = min((warp + 1) * blocks / kWarps * kTileColumns, k) - begin;
  }
  [[nodiscard]] __device__ __forceinline__ bool has(int half) const {  // the lane's chunk of a half block
    return half * 32 + chunk < left;
  }
};

// This lane's weights of outputs n0 + g and, of tiles of 16, n0 + g + 8. Outputs that are not there are read as the
// last there is: what they give is never stored.
template <int STEPS, int HALVES>
__device__ __forceinline__ void load_weights(const Params& p, int thread, int n0, uint4 (&weights)[2 * STEPS][HALVES]) {
  const Range range(thread, p.k);
  const int g = thread % 32 / 4;
#pragma unroll
  for (int i = 0; i < HALVES; ++i) {
    const int64_t n = min(n0 + g + 8 * i, p.router.n - 1);
    const auto* from = static_cast<const __nv_bfloat16*>(p.router.weight) + n * p.k + range.first;
#pragma unroll
    for (int half = 0; half < 2 * STEPS; ++half) {
      weights[half][i] = range.has(half) ? load_streaming(from + half * 32) : zero_chunk();
    }
  }
}

// Asks for the norm's weights.
template <int STEPS>
__device__ __forceinline__ void copy_norm_weights(const Params& p, std::byte* to) {
  const int chunks = p.k >> (p.norm_f32 ? 2 : 3);
#pragma unroll
  for (int i = 0; i < (STEPS * kStep / 4 + kThreads - 1) / kThreads; ++i) {
    const int chunk = static_cast<int>(threadIdx.x) + i * kThreads;
    if (chunk < chunks) {
      async_copy16(to + 16 * chunk, p.norm_weight + 16 * chunk);
    }
  }
  async_commit();
}

// The bias waits in the L2 until there are registers for it.
__device__ __forceinline__ void prefetch_bias(const Params& p, int n0) {
  if (threadIdx.x == 0 && p.router.bias != nullptr && n0 < p.router.n) {
    prefetch_l2(static_cast<const std::byte*>(p.router.bias) + n0 * (p.router.bias_f32 ? 4 : 2));
  }
}
__device__ __forceinline__ linear::Stored load_bias(const Params& p, int thread, int n0, int sums) {
  const int n = n0 + linear::Place<1>(static_cast<unsigned>(thread)).n;
  linear::Stored bias;
  if (p.router.bias != nullptr && thread < sums && n < p.router.n) {
    bias = linear::load_bias(p.router, n);
  }
  return bias;
}

// `x`: rows in shared memory. Rows that are not there are read as the last there is.
template <int STEPS, int HALVES>
__device__ __forceinline__ void multiply(const Params& p, int thread, const uint4 (&weights)[2 * STEPS][HALVES],
                                         const __nv_bfloat16* x, float (&acc)[4]) {
  const Range range(thread, p.k);
  const int g = thread % 32 / 4;
  const __nv_bfloat16* row = x + min(g, p.num_rows - 1) * Layout<STEPS>::PITCH + range.first;
#pragma unroll
  for (int half = 0; half < 2 * STEPS; ++half) {
    const uint4 chunk = range.has(half) ? *reinterpret_cast<const uint4*>(row + half * 32) : zero_chunk();
    mma_chunk(acc, weights[half][0], HALVES == 2 ? weights[half][HALVES - 1] : zero_chunk(), chunk);
  }
}

// The group of four elements that this thread takes in a step of a norm; the last one again where there is no more.
__device__ __forceinline__ int norm_group(int k, int step) {
  return static_cast<int>(min(threadIdx.x % kNormThreads + step * kNormThreads, k / 4 - 1u));
}
template <int STEPS>
__device__ __forceinline__ void load_row(const Params& p, int row, Vec4<float> (&values)[STEPS]) {
  const float* x = p.x + row * p.x_stride;
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    values[i] = load4(x, norm_group(p.k, i));
  }
}
// The sum of the squares of this thread's warp; every lane has it.
template <int STEPS>
__device__ __forceinline__ float row_squares(const Params& p, const Vec4<float> (&values)[STEPS]) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const bool inside = static_cast<int>(threadIdx.x % kNormThreads) + i * kNormThreads < p.k / 4;
    squares += inside ? square4(values[i]) : 0.0f;
  }
  return warp_sum(squares);
}
// Leaves the normed row in shared memory. What lies there past its end is never read.
template <int STEPS, class W>
__device__ __forceinline__ void norm_row(const Params& p, const Vec4<float> (&values)[STEPS], const float* squares,
                                         const W* weights, __nv_bfloat16* row) {
  const float scale = norm_scale_of(add_warp_sums<kNormWarps>(squares), p.k, p.eps);
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const auto stored = load4(weights, norm_group(p.k, i));
    store4(row, static_cast<int>(threadIdx.x % kNormThreads) + i * kNormThreads,
           scale4<float, W, __nv_bfloat16>(values[i], scale, stored));
  }
}

// All rows, by the whole block, each half of it every other row. The norm's weights are on their way to `weights`.
// MANY: more rows than halves; then they are read twice, the second time from the L1.
template <int STEPS, bool MANY, class Shared>
__device__ __forceinline__ void norm_rows(const Params& p, Shared& s, const std::byte* weights, __nv_bfloat16* x) {
  constexpr int ROWS = MANY ? kMaxRows / kRowsAtOnce : 1;  // of a half
  constexpr int TOGETHER = MANY ? 2 : 1;
  const int first = static_cast<int>(threadIdx.x) / kNormThreads;
  Vec4<float> values[TOGETHER][STEPS];
#pragma unroll
  for (int i = 0; i < ROWS; i += TOGETHER) {
#pragma unroll
    for (int j = 0; j < TOGETHER; ++j) {  // what is not there is read as the last row
      load_row<STEPS>(p, min(first + kRowsAtOnce * (i + j), p.num_rows - 1), values[j]);
    }
#pragma unroll
    for (int j = 0; j < TOGETHER; ++j) {
      const float squares = row_squares<STEPS>(p, values[j]);
      if (threadIdx.x % 32 == 0) {
        s.squares[first + kRowsAtOnce * (i + j)][threadIdx.x % kNormThreads / 32] = squares;
      }
    }
  }
  async_wait<0>();  // this thread's part of the norm's weights
  __syncthreads();  // all of them, and the sums of all warps
#pragma unroll 1
  for (int row = first; row < p.num_rows; row += kRowsAtOnce) {
    if constexpr (MANY) {
      load_row<STEPS>(p, row, values[0]);
    }
    __nv_bfloat16* to = x + row * Layout<STEPS>::PITCH;
    if (p.norm_f32) {
      norm_row<STEPS>(p, values[0], s.squares[row], reinterpret_cast<const float*>(weights), to);
    } else {
      norm_row<STEPS>(p, values[0], s.squares[row], reinterpret_cast<const __nv_bfloat16*>(weights), to);
    }
    if constexpr (!MANY) {
      break;
    }
  }
  __syncthreads();  // x is there
}

// The normed rows to memory, by one block of the cluster.
template <int STEPS>
__device__ __forceinline__ void store_normed(const Params& p, const __nv_bfloat16* x) {
#pragma unroll 1
  for (int row = 0; row < p.num_rows; ++row) {
    const auto* from = reinterpret_cast<const uint4*>(x + row * Layout<STEPS>::PITCH);
    auto* to = reinterpret_cast<uint4*>(p.normed + row * p.normed_stride);
    for (int i = static_cast<int>(threadIdx.x); i < p.k / 8; i += kThreads) {
      to[i] = from[i];
    }
  }
}

// The sums of all warps in their order, and the bias: to memory and to the first block.
template <int SUMS, class Shared>
__device__ __forceinline__ void send_logits(const Params& p, Shared& s, const float* sums, int n0,
                                            const linear::Stored& bias) {
  if (threadIdx.x >= SUMS) {
    return;
  }
  float y = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    y += sums[w * SUMS + threadIdx.x];
  }
  const linear::Place<1> place(threadIdx.x);
  const int n = n0 + place.n;
  if (place.token < p.num_rows && n < p.router.n) {
    if (p.router.bias != nullptr) {
      y += bias.value(p.router.bias_f32);
    }
    s.logits_there.send(&s.logits[place.token][n], 0, y);
    store_out(p.router, place.token, n, y);
  }
}

// One cluster, TILE experts a block, 8 or 16. STEPS: of kStep inputs; PER_LANE: groups of 32 experts; MANY: more than
// kRowsAtOnce rows.
template <int STEPS, int TILE, int PER_LANE, bool MANY>
__global__ void __launch_bounds__(register_threads(STEPS, TILE, MANY), 1)
    router_kernel(const __grid_constant__ Params p) {
#ifdef MOELORA_CLUSTERS
  constexpr int SUMS = TILE * kMaxRows;
  extern __shared__ uint4 dynamic_shared[];
  __shared__ Shared<32 * PER_LANE> s;
  auto* const norm_weights = reinterpret_cast<std::byte*>(dynamic_shared);
  auto* const sums = reinterpret_cast<float*>(dynamic_shared);
  auto* const x = reinterpret_cast<__nv_bfloat16*>(norm_weights + Layout<STEPS>::WEIGHTS_BYTES);
  let_next_start();
  const int block = cluster_block();
  const int n0 = block * TILE;
  if (threadIdx.x == 0) {
    s.logits_there.init(1);
    s.logits_there.arrive_and_expect(p.num_rows * p.router.n * static_cast<int>(sizeof(float)));
  }
  __syncwarp();
  cluster_arrive_relaxed();  // the fence of init() is enough
  int thread = static_cast<int>(threadIdx.x);
  uint4 weights[2 * STEPS][TILE / 8];
  load_weights<STEPS>(p, thread, n0, weights);
  copy_norm_weights<STEPS>(p, norm_weights);
  prefetch_bias(p, n0);
  if (block == 0) {
    route::clear_sets(p.router.n, s.route);
  }
  __syncwarp();
  cluster_wait();  // the first block's barrier can be used
  wait_for_previous();
  norm_rows<STEPS, MANY>(p, s, norm_weights, x);
  asm volatile("" : "+r"(thread));  // nothing that follows from it has filled registers meanwhile
  const linear::Stored bias = load_bias(p, thread, n0, SUMS);
  float acc[4] = {};
  multiply<STEPS>(p, thread, weights, x, acc);
#pragma unroll
  for (int e = 0; e < SUMS / 32; ++e) {
    sums[thread / 32 * SUMS + e * 32 + thread % 32] = acc[e];
  }
  __syncthreads();  // sums of all warps
  send_logits<SUMS>(p, s, sums, n0, bias);
  if (block == static_cast<int>(gridDim.x) - 1) {
    store_normed<STEPS>(p, x);
  }
  const bool one_row = p.num_rows == 1;
  if (block != 0 || (one_row && threadIdx.x >= 32)) {
    return;
  }
  const route::Slots slots(p.route);
  s.logits_there.wait(0);
  const route::Logits logits{&s.logits[0][0], 32 * PER_LANE};
  if (one_row) {
    route::route_one_row<PER_LANE>(p.route, logits, slots, s.route.choice);
  } else {
    route::route_rows<PER_LANE>(p.route, logits, slots, s.route);
  }
#endif
}

}  // namespace moelora::router_few
