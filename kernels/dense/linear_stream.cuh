// SPDX-License-Identifier: Apache-2.0
// linear of 9 to 64 rows on sm_90a, one launch for all parts, a block a multiprocessor. A cluster of up to 8 blocks
// owns 192 or 128 outputs (64 where there are few) of one part for all rows; its blocks split K into ranges of 64-input
// blocks. One thread asks the tensor memory accelerator for weights and x, boxes that land in a ring of stages in
// shared memory as wgmma reads them, so that no register and no address takes part. Weights depend on no other kernel:
// the ring, all of the shared memory, is full of them, and what follows has been asked into the L2, before anybody
// waits for the kernel ahead. Two or three warpgroups multiply, 64 outputs each. With adapters the shrink lies between
// that kernel and this one; both begin beside it, a block of each on a multiprocessor, and the shrink says when x is
// there (kernels/cuda/counter.cuh), so that the products run beside it and only the deltas wait for its end.
// At the end each block leaves its sums in its shared memory; the block that owns a row adds them up over the cluster,
// in the order of the blocks, with everything that comes on top. Rows are owned in the order of their adapters, so that
// a block meets few of them: deltas of up to 8 rows of one adapter are one product on the tensor cores, in which no
// other row takes part (kernels/lora/lora_expand.cuh).
// Limited by what a multiprocessor takes in: each weight is read once, x once for each tile, from the L2. H200, 64
// rows, six layers of gpt-oss's shape as one graph: 1,498 us, by tiles of 128 outputs alone 41 more; with 8 adapters
// 1,886 and of Qwen3-30B-A3B's shape 3,048 (2,503 without). Begun when the shrink had x, with registers that left it no
// room, deltas of three groups a warp one after the other: 1,927 and 3,160; from the end of attention to the end of o
// 18.0 us, now 14.5 (Qwen3 18.0 and 12.8). Tried, no better: the cluster's sums added up before the deltas are there;
// items of the shrink counted and waited for, instead of its end; two boxes of weights under way at a time, so that
// other loads do not queue behind them; x announced when the shrink's own loads of it are there (20 us more, Qwen3).
// Before all that, o of gpt-oss's shape 16.0 us alone, q k v 22.4, q k v of Qwen3-30B-A3B's shape 14.4, o 14.0: with
// both operands copied by warps (cp.async), wgmma with the weights in registers, a token's deltas by one warp 20.1,
// 22.5, 18.4 and 16.6. For 1 row linear_skinny.cuh is faster: q k v and o of Qwen3-30B-A3B's shape 12.2 and 9.3 us
// against 13.4 and 12.0 with tiles of 8 rows. Included by linear_cuda.cu.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/counter.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/cuda/tensor_copy.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/dense/linear_params.cuh"
#include "kernels/dense/linear_stream_lora.cuh"

namespace moelora::linear {

struct StreamParams {
  CUtensorMap weights[3];
  CUtensorMap x;
  Params base;
};

// By the thread that asks for copies.
template <int TOKENS, int WARPGROUPS>
struct StreamCopies {
  using Tile = StreamTile<TOKENS, WARPGROUPS>;
  const CUtensorMap& weights;
  const CUtensorMap& x;
  StreamShared<TOKENS>& shared;
  const StreamWork& work;
  uint32_t ring;
  int stages;

  __device__ __forceinline__ void weight(int nth, int stage) const {
    mbarrier_arrive_expect(&shared.full[stage], Tile::WEIGHT_BYTES);
    copy_box(ring + static_cast<uint32_t>(stage * Tile::STAGE_BYTES), weights, (work.begin + nth) * kBoxColumns,
             work.n0, &shared.full[stage]);
  }
  __device__ __forceinline__ void tokens(int nth, int stage) const {
    mbarrier_arrive_expect(&shared.full[stage], Tile::TOKEN_BYTES);
    copy_box(ring + static_cast<uint32_t>(stage * Tile::STAGE_BYTES + Tile::WEIGHT_BYTES), x,
             (work.begin + nth) * kBoxColumns, 0, &shared.full[stage]);
  }
  // Weights into the whole ring, and those behind it into the L2.
  __device__ __forceinline__ void begin() const {
    prefetch_map(x);
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      mbarrier_init(&shared.full[stage], 2);
      mbarrier_init(&shared.empty[stage], Tile::MULTIPLY_WARPS);
    }
    publish_barriers();
    const int count = work.end - work.begin;
#pragma unroll 1
    for (int nth = 0; nth < min(count, stages); ++nth) {
      weight(nth, nth);
    }
#pragma unroll 1
    for (int nth = stages; nth < count; ++nth) {
      prefetch_box(weights, (work.begin + nth) * kBoxColumns, work.n0);
    }
  }
  // x is there: it into the whole ring.
  __device__ __forceinline__ void first_tokens() const {
#pragma unroll 1
    for (int nth = 0; nth < min(work.end - work.begin, stages); ++nth) {
      tokens(nth, nth);
    }
  }
  __device__ __forceinline__ void rest() const {
    const int count = work.end - work.begin;
    int stage = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int nth = stages; nth < count; ++nth) {
      mbarrier_wait(&shared.empty[stage], parity);
      weight(nth, stage);
      tokens(nth, stage);
      if (++stage == stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
};

// acc = W x of the block's range of K: 64 outputs of the warpgroup, all tokens.
template <int TOKENS, int WARPGROUPS>
__device__ __forceinline__ void multiply_stream(StreamShared<TOKENS>& shared, uint32_t ring, int stages, int count,
                                                float (&acc)[TOKENS / 2]) {
  using Tile = StreamTile<TOKENS, WARPGROUPS>;
  const uint32_t own = ring + threadIdx.x / 128 * 64 * kBoxBytes;
  int stage = 0;
  int previous = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int nth = 0; nth < count; ++nth) {
    mbarrier_wait(&shared.full[stage], parity);
    const uint64_t weights = wgmma_descriptor(own + static_cast<uint32_t>(stage * Tile::STAGE_BYTES));
    const uint64_t tokens =
        wgmma_descriptor(ring + static_cast<uint32_t>(stage * Tile::STAGE_BYTES + Tile::WEIGHT_BYTES));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      wgmma_m64k16<TOKENS>(acc, weights + static_cast<uint64_t>(2 * step), tokens + static_cast<uint64_t>(2 * step));
    }
    wgmma_commit();
    wgmma_wait<1>();  // the stage before is done with
    if (nth > 0 && threadIdx.x % 32 == 0) {
      mbarrier_arrive(&shared.empty[previous]);
    }
    previous = stage;
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  wgmma_wait<0>();
  wgmma_hold(acc);
}

template <int TOKENS, int WARPGROUPS>
__device__ __forceinline__ void leave_stream_sums(float* sums, const float (&acc)[TOKENS / 2]) {
  constexpr int STRIDE = StreamTile<TOKENS, WARPGROUPS>::SUMS_STRIDE;
  const int lane = static_cast<int>(threadIdx.x % 32);
  float* const to = sums + lane % 4 * 2 * STRIDE + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < TOKENS / 2; ++i) {
    to[(i / 4 * 8 + i % 2) * STRIDE + i % 4 / 2 * 8] = acc[i];
  }
}

// Up to four neighbouring elements of a stored type; VECTOR: all four, aligned as a whole.
template <bool VECTOR>
struct StoredFour {
  uint4 bits = {};  // as fp32; VECTOR: two bf16 a word
  __device__ __forceinline__ void load(const void* values, int64_t index, bool f32, int exist) {
    if constexpr (VECTOR) {
      if (exist > 0) {
        if (f32) {
          bits = *reinterpret_cast<const uint4*>(static_cast<const float*>(values) + index);
        } else {
          const uint2 four = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(values) + index);
          bits.x = four.x, bits.y = four.y;
        }
      }
    } else {
      uint32_t* const word = &bits.x;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (c < exist) {
          word[c] = f32 ? static_cast<const uint32_t*>(values)[index + c]
                        : uint32_t{static_cast<const uint16_t*>(values)[index + c]} << 16;
        }
      }
    }
  }
  __device__ __forceinline__ void add_to(float (&y)[4], bool f32) const {
    const bool packed = VECTOR && !f32;
    y[0] += __uint_as_float(packed ? bits.x << 16 : bits.x);
    y[1] += __uint_as_float(packed ? bits.x & 0xffff0000u : bits.y);
    y[2] += __uint_as_float(packed ? bits.y << 16 : bits.z);
    y[3] += __uint_as_float(packed ? bits.y & 0xffff0000u : bits.w);
  }
};
template <bool VECTOR>
__device__ __forceinline__ void store_four(void* values, int64_t index, bool f32, int exist, const float (&y)[4]) {
  if constexpr (VECTOR) {
    if (f32) {
      *reinterpret_cast<float4*>(static_cast<float*>(values) + index) = make_float4(y[0], y[1], y[2], y[3]);
    } else {
      const __nv_bfloat162 low = __floats2bfloat162_rn(y[0], y[1]);
      const __nv_bfloat162 high = __floats2bfloat162_rn(y[2], y[3]);
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(values) + index) =
          make_uint2(reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high));
    }
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c < exist && f32) {
        static_cast<float*>(values)[index + c] = y[c];
      } else if (c < exist) {
        static_cast<__nv_bfloat16*>(values)[index + c] = from_f32<__nv_bfloat16>(y[c]);
      }
    }
  }
}
// Whether outputs and bias of a part come in whole, aligned groups of four.
__device__ __forceinline__ bool in_fours(const Part& part) {
  const auto aligned = [](const void* values, bool f32) {
    return reinterpret_cast<uintptr_t>(values) % (f32 ? 16 : 8) == 0;
  };
  return part.n % 4 == 0 && part.out_stride % 4 == 0 && aligned(part.out, part.out_f32) &&
         aligned(part.bias, part.bias_f32);
}

// Four outputs of an owned row.
struct StreamPlace {
  int index;   // of the owned rows
  int column;  // of the block's outputs
  int exist;   // outputs of the part from here on; 0: there is no such row
  int64_t row;
};

// y += the row's delta, lora_B.bias included.
__device__ __forceinline__ void add_delta(const Params& p, const LoraToken& token, const float* delta, int n, int exist,
                                          float (&y)[4]) {
  constexpr int kPerGranule = kGranuleBytes / sizeof(float);
  const float* bias = nullptr;
  if (token.bias >= 0) {
    bias = reinterpret_cast<const float*>(p.table.granule(token.slot, token.bias + n / kPerGranule)) + n % kPerGranule;
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (c < exist) {
      y[c] += bias != nullptr ? fmaf(token.scale, bias[c], delta[c]) : delta[c];
    }
  }
}

// Sums over the cluster's blocks, in their order, what comes on top, and the outputs; TOGETHER at a time. By the
// threads that multiply.
template <int TOKENS, int WARPGROUPS, bool VECTOR, int TOGETHER>
__device__ __forceinline__ void store_owned(const Params& p, const StreamWork& work, const StreamShared<TOKENS>& shared,
                                            float* sums, const float* deltas) {
  using Tile = StreamTile<TOKENS, WARPGROUPS>;
  const Part& part = work.part;
  const bool lora = p.num_modules > 0;
  bool waited = false;
#pragma unroll 1
  for (int base = 0; base < work.owned * Tile::OUTPUTS / 4 || !waited; base += TOGETHER * Tile::MULTIPLY_THREADS) {
    StreamPlace at[TOGETHER];
    StoredFour<VECTOR> before[TOGETHER];
    StoredFour<VECTOR> bias[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      const int e = base + i * Tile::MULTIPLY_THREADS + static_cast<int>(threadIdx.x);
      at[i].index = e / (Tile::OUTPUTS / 4);
      at[i].column = e % (Tile::OUTPUTS / 4) * 4;
      const bool there = at[i].index < work.owned;
      at[i].exist = there ? max(part.n - work.n0 - at[i].column, 0) : 0;
      at[i].row = there ? (lora ? shared.row_at[work.first + at[i].index] : work.first + at[i].index) : 0;
      if (part.bias != nullptr) {
        bias[i].load(part.bias, work.n0 + at[i].column, part.bias_f32, at[i].exist);
      }
      if (p.accumulate) {
        before[i].load(part.out, at[i].row * part.out_stride + work.n0 + at[i].column, part.out_f32, at[i].exist);
      }
    }
    if (!waited) {
      __syncwarp();
      cluster_wait();  // the sums of all blocks are there
      waited = true;
    }
    float4 values[TOGETHER][kStreamCluster];
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      float* const own = sums + at[i].row * Tile::SUMS_STRIDE + at[i].column;
#pragma unroll
      for (int block = 0; block < kStreamCluster; ++block) {
        values[i][block] = float4{};
        if (block < work.cluster && at[i].exist > 0) {
          values[i][block] = *reinterpret_cast<const float4*>(in_block(own, block));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      if (at[i].exist <= 0) {
        continue;
      }
      float y[4] = {};
#pragma unroll
      for (int block = 0; block < kStreamCluster; ++block) {
        y[0] += values[i][block].x, y[1] += values[i][block].y;
        y[2] += values[i][block].z, y[3] += values[i][block].w;
      }
      const int n = work.n0 + at[i].column;
      const LoraToken& token = shared.tokens[at[i].index];
      if (lora && token.rank != 0 && token.scale != 0.0f) {
        add_delta(p, token, deltas + at[i].index * Tile::SUMS_STRIDE + at[i].column, n, at[i].exist, y);
      }
      if (part.bias != nullptr) {
        bias[i].add_to(y, part.bias_f32);
      }
      if (p.accumulate) {
        before[i].add_to(y, part.out_f32);
      }
      store_four<VECTOR>(part.out, at[i].row * part.out_stride + n, part.out_f32, at[i].exist, y);
    }
  }
}

// Everything after the products, by the threads that multiply; the sums take the place of the ring.
template <int TOKENS, int WARPGROUPS>
__device__ __forceinline__ void finish_products(const Params& p, const StreamWork& work,
                                                const StreamShared<TOKENS>& shared, float* sums,
                                                const float (&acc)[TOKENS / 2]) {
  using Tile = StreamTile<TOKENS, WARPGROUPS>;
  constexpr int kAll = Tile::MULTIPLY_THREADS + Tile::LOOKUP_THREADS;
  const bool lora = p.num_modules > 0;
  barrier_sync(kProductsDone, lora ? kAll : Tile::MULTIPLY_THREADS);
  if (lora) {
    barrier_arrive(kRingFree, kAll);
  }
  float* const deltas = sums + Tile::SUMS_BYTES / 4;
  leave_stream_sums<TOKENS, WARPGROUPS>(sums, acc);
  __syncwarp();
  cluster_arrive();
  if (lora) {
    expand_owned<TOKENS, WARPGROUPS>(p, work, shared, deltas);
  } else {
    wait_for_previous();
  }
  if (in_fours(work.part)) {
    store_owned<TOKENS, WARPGROUPS, true, Tile::STORED_TOGETHER>(p, work, shared, sums, deltas);
  } else {
    store_owned<TOKENS, WARPGROUPS, false, 1>(p, work, shared, sums, deltas);
  }
}

// What the warps that look up do, thread `i` of them.
template <int TOKENS, int WARPGROUPS>
__device__ __forceinline__ void work_beside(const Params& p, const StreamWork& work, StreamShared<TOKENS>& shared,
                                            float* deltas, int i) {
  using Tile = StreamTile<TOKENS, WARPGROUPS>;
  constexpr int kAll = Tile::MULTIPLY_THREADS + Tile::LOOKUP_THREADS;
  look_up_tokens<TOKENS, WARPGROUPS>(p, work, shared, i);
  __syncwarp();
  barrier_arrive(kProductsDone, kAll);
  barrier_sync(kLookUps, Tile::LOOKUP_THREADS);  // the groups are there
  const StreamItem item = find_item<TOKENS, WARPGROUPS>(work, shared, i / 32);
  GroupDeltas held = {};
  expand_early<TOKENS, WARPGROUPS>(p, work, shared, i / 32, item, held);
  barrier_sync(kRingFree, kAll);
  if (item.has_outputs(work)) {
    leave_deltas<TOKENS, WARPGROUPS>(work, shared, item.start, item.n, held, deltas);
  }
  barrier_arrive(kDeltasThere, kAll);
}

// By the thread that asks for copies, once the ring is full of weights: x, and what is left.
template <int TOKENS, int WARPGROUPS>
__device__ __forceinline__ void follow_with_tokens(const Params& p, const StreamCopies<TOKENS, WARPGROUPS>& copies) {
  if (p.num_modules == 0) {
    wait_for_previous();
    copies.first_tokens();
  } else {
    wait_for_count(p.x_ready, 1);
    fence_for_copies();
    copies.first_tokens();
    clear_after_last(p.x_ready, leave(p.x_ready, gridDim.x), gridDim.x);
    __threadfence();
    let_next_start();  // not before the count is cleared: the next linear may begin while this one runs
  }
  copies.rest();
}

// Grid: [tile][block of the cluster]. With LoRA it begins as soon as the shrink has begun, which counts x_ready up when
// x is there.
template <int TOKENS, int WARPGROUPS>
__global__ void __launch_bounds__(StreamTile<TOKENS, WARPGROUPS>::REGISTER_THREADS, 1)
    linear_stream(const __grid_constant__ StreamParams params, int cluster, int stages) {
#ifdef MOELORA_SM90A
  using Tile = StreamTile<TOKENS, WARPGROUPS>;
  extern __shared__ uint4 dynamic_shared[];
  __shared__ StreamShared<TOKENS> shared;
  const Params& p = params.base;
  const bool lora = p.num_modules > 0;
  if (!lora) {
    let_next_start();
  }
  const int tile = static_cast<int>(blockIdx.x) / cluster;
  const int rank = static_cast<int>(blockIdx.x) % cluster;
  const int nth_part = part_of_tile(p, tile);
  const Part& part = p.parts[nth_part];
  const int blocks = (p.k + kBoxColumns - 1) / kBoxColumns;
  const int first = rank * p.num_rows / cluster;
  const StreamWork work{part,
                        (tile - part.first_tile) * Tile::OUTPUTS,
                        rank * blocks / cluster,
                        (rank + 1) * blocks / cluster,
                        first,
                        (rank + 1) * p.num_rows / cluster - first,
                        cluster};
  const uint32_t misaligned = shared_address(dynamic_shared) % kBoxAlignment;
  std::byte* const ring =
      reinterpret_cast<std::byte*>(dynamic_shared) + (misaligned == 0 ? 0 : kBoxAlignment - misaligned);
  float* const sums = reinterpret_cast<float*>(ring);
  const StreamCopies<TOKENS, WARPGROUPS> copies{params.weights[nth_part], params.x, shared, work,
                                                shared_address(ring),     stages};
  const bool multiplies = threadIdx.x < Tile::MULTIPLY_THREADS;
  const bool asks = threadIdx.x == Tile::MULTIPLY_THREADS;
  if (asks) {
    copies.begin();
  }
  if (threadIdx.x < Tile::MULTIPLY_THREADS + 32) {  // those that look up do not wait for it
    barrier_sync(kRingReady, Tile::MULTIPLY_THREADS + 32);
  }
  if (multiplies) {
    const int n = work.n0 + static_cast<int>(threadIdx.x) * 32;  // a line of the bias, or half of one
    if (part.bias != nullptr && static_cast<int>(threadIdx.x) * 32 < Tile::OUTPUTS && n < part.n) {
      prefetch_l2(static_cast<const std::byte*>(part.bias) + int64_t{n} * (part.bias_f32 ? 4 : 2));
    }
    float acc[TOKENS / 2] = {};
    multiply_stream<TOKENS, WARPGROUPS>(shared, copies.ring, stages, work.end - work.begin, acc);
    finish_products<TOKENS, WARPGROUPS>(p, work, shared, sums, acc);
  } else {
    if (asks) {
      follow_with_tokens(p, copies);
    }
    __syncwarp();
    cluster_arrive();
    if (threadIdx.x >= Tile::MULTIPLY_THREADS + 32 && lora) {
      work_beside<TOKENS, WARPGROUPS>(p, work, shared, sums + Tile::SUMS_BYTES / 4,
                                      static_cast<int>(threadIdx.x) - Tile::MULTIPLY_THREADS - 32);
    }
    __syncwarp();
    cluster_wait();
  }
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();  // nobody reads this block's sums any more
#endif
}

// Clusters of each size that run at once, a block a multiprocessor.
template <class Kernel>
std::array<int, kStreamCluster + 1> clusters_at_once(Kernel kernel, unsigned threads, int shared) {
  std::array<int, kStreamCluster + 1> result{};
  for (int size = 1; size <= kStreamCluster; ++size) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(size);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(size));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = static_cast<size_t>(shared);
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
      cudaGetLastError();
      clusters = 0;
    }
    result[static_cast<size_t>(size)] = clusters;
  }
  return result;
}

// How a product is cut: blocks of a cluster, which split K, and what that costs; 0 blocks: it cannot be.
struct StreamCut {
  int size = 0;
  int cost = 0;
};
// The cheapest cut of `tiles`. The cost is in KiB that a multiprocessor moves, about 50 a microsecond: of what a block
// does once x is there. From x to its outputs it takes 5 us besides; it brings x, and the weights that its ring does
// not hold before that. Blocks that wait for others to end start with an empty ring.
template <class Tile>
StreamCut stream_cut(int tiles, int blocks, const std::array<int, kStreamCluster + 1>& at_once) {
  constexpr int kFixed = 250;
  StreamCut best;
  for (int size = 1; size <= std::min(kStreamCluster, blocks); ++size) {
    const int clusters = at_once[static_cast<size_t>(size)];
    if (clusters > 0) {
      const int waves = (tiles + clusters - 1) / clusters;
      const int own = (blocks + size - 1) / size;
      const int first = own * Tile::TOKEN_BYTES + std::max(own - Tile::MAX_STAGES, 0) * Tile::WEIGHT_BYTES;
      const int later = own * Tile::STAGE_BYTES;
      const int cost = waves * kFixed + (first + (waves - 1) * later) / 1024;
      if (best.size == 0 || cost < best.cost) {
        best = {size, cost};
      }
    }
  }
  return best;
}

inline bool make_stream_maps(StreamParams& params, int tokens, int outputs) {
  const Params& p = params.base;
  bool made = make_tensor_map(params.x, p.x, p.num_rows, p.k, p.x_stride, tokens);
  for (int i = 0; i < p.num_parts; ++i) {
    made = made && make_tensor_map(params.weights[i], p.parts[i].weight, p.parts[i].n, p.k, p.k, outputs);
  }
  return made;
}

// Null where there is no code for the GPU.
template <int TOKENS, int WARPGROUPS>
const std::array<int, kStreamCluster + 1>* stream_clusters() {
  using Tile = StreamTile<TOKENS, WARPGROUPS>;
  const auto kernel = linear_stream<TOKENS, WARPGROUPS>;
  static const bool usable = has_code(kernel);
  if (!usable) {
    return nullptr;
  }
  constexpr int kAllShared = Tile::shared_bytes(Tile::MAX_STAGES);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kAllShared),
             "shared memory of linear");
  static const auto at_once = clusters_at_once(kernel, Tile::THREADS, kAllShared);
  return &at_once;
}
template <int TOKENS, int WARPGROUPS>
StreamCut stream_cut_of(const Launch& launch) {
  const auto* const at_once = stream_clusters<TOKENS, WARPGROUPS>();
  const int blocks = (launch.params.k + kBoxColumns - 1) / kBoxColumns;
  return at_once == nullptr ? StreamCut{}
                            : stream_cut<StreamTile<TOKENS, WARPGROUPS>>(launch.params.num_tiles, blocks, *at_once);
}

// A launch that is ready to go: nothing about it can be refused any more.
struct StreamLaunch {
  StreamParams params;
  void (*kernel)(StreamParams, int, int) = nullptr;
  int threads;
  int cluster;
  int stages;
  int shared;

  void go(const CudaStream& state) const {
    launch_dependent_clusters(kernel, static_cast<unsigned>(params.base.num_tiles * cluster),
                              static_cast<unsigned>(cluster), static_cast<unsigned>(threads),
                              static_cast<size_t>(shared), state, params, cluster, stages);
    check_launch("linear, streamed");
  }
};

template <int TOKENS, int WARPGROUPS>
bool prepare_stream_tile(const Launch& launch, int size, StreamLaunch& ready) {
  using Tile = StreamTile<TOKENS, WARPGROUPS>;
  ready.params.base = launch.params;
  if (size == 0 || !make_stream_maps(ready.params, TOKENS, Tile::OUTPUTS)) {
    return false;
  }
  const int blocks = (launch.params.k + kBoxColumns - 1) / kBoxColumns;
  const int most = launch.params.num_modules > 0 ? Tile::LORA_STAGES : Tile::MAX_STAGES;
  ready.kernel = linear_stream<TOKENS, WARPGROUPS>;
  ready.threads = Tile::THREADS;
  ready.cluster = size;
  ready.stages = std::clamp((blocks + size - 1) / size, Tile::MIN_STAGES, most);
  ready.shared = Tile::shared_bytes(ready.stages);
  return true;
}
template <int TOKENS>
bool prepare_stream_rows(const Launch& launch, int num_sms, StreamLaunch& ready) {
  const Launch narrow = launch.with_width(64);
  if (narrow.params.num_tiles * kStreamCluster <= num_sms) {
    return prepare_stream_tile<TOKENS, 1>(narrow, stream_cut_of<TOKENS, 1>(narrow).size, ready);
  }
  const Launch middle = launch.with_width(128);
  const Launch wide = launch.with_width(192);
  const StreamCut middle_cut = stream_cut_of<TOKENS, 2>(middle);
  const StreamCut wide_cut = stream_cut_of<TOKENS, 3>(wide);
  return wide_cut.size != 0 && wide_cut.cost < middle_cut.cost
             ? prepare_stream_tile<TOKENS, 3>(wide, wide_cut.size, ready)
             : prepare_stream_tile<TOKENS, 2>(middle, middle_cut.size, ready);
}
// Whether the code for sm_90a is there.
inline bool can_stream(const CudaStream& state) {
  static const bool usable = has_code(linear_stream<kStreamRows, 2>);
  return state.compute_capability == 90 && usable;
}
// False: it cannot be launched.
inline bool prepare_stream(const Launch& launch, const CudaStream& state, StreamLaunch& ready) {
  if (!can_stream(state) || (launch.params.num_modules > 0 && launch.params.x_ready == nullptr)) {
    return false;
  }
  return launch.params.num_rows <= 32 ? prepare_stream_rows<32>(launch, state.num_sms, ready)
                                      : prepare_stream_rows<64>(launch, state.num_sms, ready);
}

}  // namespace moelora::linear
