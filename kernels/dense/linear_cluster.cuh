// SPDX-License-Identifier: Apache-2.0
// linear of 9 to 64 rows on sm_90a, one launch for all parts. A cluster of up to 8 blocks owns 128 outputs (64 where
// there are few) of one part for all rows, so that x is read once for so many; its blocks split K into ranges of
// 64-input blocks. Weights and x pass through a ring of stages in shared memory, to which two warps copy the weights
// and two more x (cp.async); wgmma takes a warp's 16 rows of weights in registers and the tokens from shared memory.
// Weights depend on no other kernel: the ring is full of them, and what follows has been asked into the L2, before
// anybody waits for the kernel ahead. At the end each block leaves its sums in its shared memory, and a token's outputs
// are added up over the cluster, in the order of the blocks, by one warp of one block, which before that computes the
// token's deltas in fp32, so that it makes no difference how many adapters there are. Limited by memory: each weight is
// read once, x once for 128 outputs, from the L2. Included by linear_cuda.cu.
#pragma once

#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/cuda/shared_tile.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/dense/linear_params.cuh"

namespace moelora::linear {

constexpr int kClusterRows = 64;  // at most
constexpr int kMaxCluster = 8;
constexpr int kCopyThreads = 64;             // of the weights, and as many of x
constexpr int kRowBytes = 2 * kTileColumns;  // of a row of 64 inputs in a stage
constexpr int kStageAlignment = 1024;

// Up to TOKENS rows, 64 WARPGROUPS outputs.
template <int TOKENS, int WARPGROUPS>
struct ClusterTile {
  static constexpr int OUTPUTS = 64 * WARPGROUPS;
  static constexpr int MULTIPLY_THREADS = 128 * WARPGROUPS;
  static constexpr int THREADS = MULTIPLY_THREADS + 2 * kCopyThreads;
  static constexpr int WARPS = THREADS / 32;
  static constexpr int WEIGHT_BYTES = OUTPUTS * kRowBytes;  // of a stage; the tokens follow
  static constexpr int STAGE_BYTES = WEIGHT_BYTES + TOKENS * kRowBytes;
  // Two blocks share a multiprocessor's shared memory.
  static constexpr int STAGES = WARPGROUPS == 2 ? 4 : 6;
  static constexpr int SHARED_BYTES = kStageAlignment + STAGES * STAGE_BYTES;
  // Of sums, [token][output]: the lanes of a quad, two tokens apart each, store into different banks.
  static constexpr int SUMS_STRIDE = OUTPUTS + 4;
  static_assert(TOKENS <= kClusterRows && TOKENS <= kCopyThreads && STAGE_BYTES % kStageAlignment == 0);
  static_assert(TOKENS * SUMS_STRIDE * 4 <= STAGES * STAGE_BYTES);
};

// What a block works on: outputs n0 .. of a part, 64-input blocks [begin, end) of K.
struct ClusterWork {
  const Part& part;
  int n0;
  int outputs;  // that exist
  int begin;
  int end;
  int rank;     // of the block in its cluster
  int cluster;  // blocks
};

// 64 inputs of ROWS rows to where wgmma and ldmatrix read them: 16-byte piece u of row r at place u ^ (r % 8). Rows
// from `rows` on and inputs from k on become zeros. By THREADS threads.
template <int ROWS, int THREADS>
__device__ __forceinline__ void copy_rows(uint32_t shared, const __nv_bfloat16* from, int64_t stride, int rows,
                                          int column, int k, int thread) {
  static_assert(ROWS * 8 % THREADS == 0 && THREADS % 64 == 0);
  const int piece = thread % 8;
  const int row = thread / 8;
  const bool inside = column + 8 * piece < k;
  const __nv_bfloat16* source = from + row * stride + column + 8 * piece;
  const uint32_t target = shared + static_cast<uint32_t>(row * kRowBytes + (piece ^ row % 8) * 16);
#pragma unroll
  for (int i = 0; i < ROWS * 8 / THREADS; ++i) {
    const int further = i * (THREADS / 8);  // a multiple of 8 rows
    const bool there = inside && row + further < rows;
    copy_async_16(target + static_cast<uint32_t>(further * kRowBytes), there ? source : from, there);
    source += stride * (THREADS / 8);
  }
}

// How the ring is filled, a block of K at a time.
template <int TOKENS, int WARPGROUPS>
struct ClusterPipe {
  using Tile = ClusterTile<TOKENS, WARPGROUPS>;
  const Params& p;
  const ClusterWork& work;
  const __nv_bfloat16* weight;  // row n0
  uint32_t stages;
  int thread;  // that copies weights, or from kCopyThreads on x; negative: neither

  __device__ __forceinline__ uint32_t stage(int block) const {
    return stages + static_cast<uint32_t>((block - work.begin) % Tile::STAGES * Tile::STAGE_BYTES);
  }
  __device__ __forceinline__ void copy(int block) const {
    const int column = block * kTileColumns;
    if (block < work.end) {
      if (thread < kCopyThreads) {
        copy_rows<Tile::OUTPUTS, kCopyThreads>(stage(block), weight, p.k, work.outputs, column, p.k, thread);
      } else {
        copy_rows<TOKENS, kCopyThreads>(stage(block) + Tile::WEIGHT_BYTES, p.x, p.x_stride, p.num_rows, column, p.k,
                                        thread - kCopyThreads);
      }
    }
    commit_copies();  // always, so that groups count blocks
  }
  __device__ __forceinline__ void begin() const {
#pragma unroll 1
    for (int i = 0; i < Tile::STAGES; ++i) {
      copy(work.begin + i);
    }
  }
  // The weights behind the ring into the L2, a row a thread of those that multiply.
  __device__ __forceinline__ void prefetch() const {
    const int column = (work.begin + Tile::STAGES) * kTileColumns;
    const int inputs = min(work.end * kTileColumns, p.k) - column;
    if (static_cast<int>(threadIdx.x) < work.outputs && inputs > 0) {
      prefetch_l2_bulk(weight + static_cast<int64_t>(threadIdx.x) * p.k + column, static_cast<uint32_t>(inputs) * 2);
    }
  }
  // Until all copies of a block are there, by the whole thread block. Then the block before it is done with.
  __device__ __forceinline__ void wait(int block) const {
    if (thread >= 0) {
      if (block == work.begin) {
        wait_copies<Tile::STAGES - 1>();
      } else {
        wait_copies<Tile::STAGES - 2>();
      }
    }
    __syncthreads();
    if (thread >= 0 && block > work.begin) {
      copy(block - 1 + Tile::STAGES);
    }
  }
};

// acc += W x of a stage: 16 outputs of the warp, all tokens. The fence, which makes the copies known to wgmma, comes
// from here: threads that copy would wait in it for everything they have asked for.
template <int TOKENS, int WARPGROUPS>
__device__ __forceinline__ void multiply_stage(uint32_t stage, float (&acc)[TOKENS / 2]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int row = static_cast<int>(threadIdx.x / 32) * 16 + lane % 16;
  const uint32_t weights = stage + static_cast<uint32_t>(row * kRowBytes);
  const uint64_t tokens = wgmma_descriptor(stage + ClusterTile<TOKENS, WARPGROUPS>::WEIGHT_BYTES);
  uint32_t a[4][4];
  fence_for_wgmma();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    load_matrices(a[step], weights + static_cast<uint32_t>(((2 * step + lane / 16) ^ row % 8) * 16));
  }
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    wgmma_m64k16<TOKENS>(acc, a[step], tokens + static_cast<uint64_t>(2 * step));
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_hold(acc);
}

template <int TOKENS, int WARPGROUPS>
__device__ __forceinline__ void leave_sums(float* sums, const float (&acc)[TOKENS / 2]) {
  constexpr int STRIDE = ClusterTile<TOKENS, WARPGROUPS>::SUMS_STRIDE;
  const int lane = static_cast<int>(threadIdx.x % 32);
  float* const to = sums + lane % 4 * 2 * STRIDE + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < TOKENS / 2; ++i) {
    to[(i / 4 * 8 + i % 2) * STRIDE + i % 4 / 2 * 8] = acc[i];
  }
}

// A warp's share of a token's outputs: n + lane and n + lane + 32, as far as they exist.
struct ClusterOutputs {
  int n;
  int exist;  // of 64

  [[nodiscard]] __device__ __forceinline__ bool has(int c) const {
    return static_cast<int>(threadIdx.x % 32) + 32 * c < exist;
  }
  [[nodiscard]] __device__ __forceinline__ int at(int c) const {
    return n + static_cast<int>(threadIdx.x % 32) + 32 * c;
  }
};

// The delta of a token that has one, with the loads of TOGETHER panels in flight. By a warp.
template <int TOGETHER>
__device__ __forceinline__ void token_delta(const Params& p, const Part& part, const ClusterOutputs& outputs,
                                            const LoraToken& token, int row, float (&delta)[2]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int panels = (token.rank + kTileRanks - 1) / kTileRanks;
  const auto* shrunk = reinterpret_cast<const float4*>(shrunk_row(p, part, row));
#pragma unroll 1
  for (int first = 0; first < panels; first += 32) {
    const std::byte* granule = nullptr;  // of panel first + lane
    if (first + lane < panels && outputs.exist > 0) {
      granule =
          paged_granule(p.table, token.slot, token.b, token.b_pages, outputs.n / kTileColumns * panels + first + lane);
    }
#pragma unroll 1
    for (int panel = first; panel < min(panels, first + 32); panel += TOGETHER) {
      uint4 b[TOGETHER][2];
      float4 s[TOGETHER][2];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const bool there = panel + i < panels;
        const auto address = __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(granule), panel - first + i);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          b[i][c] = there && outputs.has(c) ? reinterpret_cast<const uint4*>(address)[lane + 32 * c] : zero_chunk();
          s[i][c] = there ? shrunk[2 * (panel + i) + c] : float4{};
        }
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const float values[8] = {s[i][0].x, s[i][0].y, s[i][0].z, s[i][0].w,
                                 s[i][1].x, s[i][1].y, s[i][1].z, s[i][1].w};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const uint32_t pairs[4] = {b[i][c].x, b[i][c].y, b[i][c].z, b[i][c].w};
#pragma unroll
          for (int r = 0; r < 4; ++r) {  // a bf16 is the high half of an fp32
            delta[c] = fmaf(__uint_as_float(pairs[r] << 16), values[2 * r], delta[c]);
            delta[c] = fmaf(__uint_as_float(pairs[r] & 0xffff0000u), values[2 * r + 1], delta[c]);
          }
        }
      }
    }
  }
  if (token.bias >= 0) {
    constexpr int kPerGranule = kGranuleBytes / sizeof(float);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (outputs.has(c)) {
        const int n = outputs.at(c);
        const std::byte* bias = p.table.granule(token.slot, token.bias + n / kPerGranule);
        delta[c] = fmaf(token.scale, reinterpret_cast<const float*>(bias)[n % kPerGranule], delta[c]);
      }
    }
  }
}

// y[c] = sum over the cluster's blocks, in their order.
__device__ __forceinline__ void add_blocks(float* sums, int cluster, float (&y)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const auto blocks = cooperative_groups::this_cluster();
  float values[kMaxCluster][2];
#pragma unroll
  for (int block = 0; block < kMaxCluster; ++block) {
    const float* from = blocks.map_shared_rank(sums, min(block, cluster - 1));
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      values[block][c] = block < cluster ? from[32 * c] : 0.0f;
    }
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    y[c] = 0.0f;
#pragma unroll
    for (int block = 0; block < kMaxCluster; ++block) {
      y[c] += values[block][c];
    }
  }
#endif
}

// Everything after the products, by the whole block: its tokens are every cluster-th, a warp takes one at a time, or
// half of its outputs. `tokens` are their adapters, null without LoRA.
template <int TOKENS, int WARPGROUPS>
__device__ __forceinline__ void store_tokens(const Params& p, const ClusterWork& work, float* sums,
                                             const LoraToken* tokens, const ClusterOutputs& outputs,
                                             const Stored (&bias)[2]) {
  using Tile = ClusterTile<TOKENS, WARPGROUPS>;
  const Part& part = work.part;
  const int warp = static_cast<int>(threadIdx.x / 32);
  bool waited = false;
#pragma unroll 1
  for (int nth = warp / WARPGROUPS; nth < TOKENS; nth += Tile::WARPS / WARPGROUPS) {
    const int row = work.rank + nth * work.cluster;
    if (row >= p.num_rows) {
      break;
    }
    Stored before[2];
    float delta[2] = {};
    const bool adapted = tokens != nullptr && tokens[nth].rank != 0;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (p.accumulate && outputs.has(c)) {
        before[c] = load_out(part, row, outputs.at(c));
      }
    }
    if (adapted) {
      token_delta<WARPGROUPS == 1 ? 4 : 2>(p, part, outputs, tokens[nth], row, delta);
    }
    if (!waited) {
      __syncwarp();
      cluster_wait();  // the sums of all blocks are there
      waited = true;
    }
    float y[2];
    add_blocks(sums + row * Tile::SUMS_STRIDE + outputs.at(0) - work.n0, work.cluster, y);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (outputs.has(c)) {
        y[c] += adapted ? delta[c] : 0.0f;
        if (part.bias != nullptr) {
          y[c] += bias[c].value(part.bias_f32);
        }
        if (p.accumulate) {
          y[c] += before[c].value(part.out_f32);
        }
        store_out(part, row, outputs.at(c), y[c]);
      }
    }
  }
  if (!waited) {
    cluster_wait();
  }
}

// Grid: [tile][block of the cluster]. With LoRA it is launched right after the shrink, which passed its wait before
// this kernel began, so that x was complete.
template <int TOKENS, int WARPGROUPS>
__global__ void __launch_bounds__(ClusterTile<TOKENS, WARPGROUPS>::THREADS, 2)
    linear_cluster(const __grid_constant__ Params p, int cluster) {
#ifdef MOELORA_SM90A
  using Tile = ClusterTile<TOKENS, WARPGROUPS>;
  extern __shared__ uint4 dynamic_shared[];
  __shared__ LoraToken tokens[TOKENS];
  let_next_start();
  const int tile = static_cast<int>(blockIdx.x) / cluster;
  const int rank = static_cast<int>(blockIdx.x) % cluster;
  const Part& part = p.parts[part_of_tile(p, tile)];
  const int n0 = (tile - part.first_tile) * Tile::OUTPUTS;
  const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
  const ClusterWork work{
      part, n0, min(part.n - n0, Tile::OUTPUTS), rank * blocks / cluster, (rank + 1) * blocks / cluster, rank, cluster};
  const bool lora = p.num_modules > 0;
  const bool multiplies = threadIdx.x < Tile::MULTIPLY_THREADS;
  const uint32_t misaligned = shared_address(dynamic_shared) % kStageAlignment;
  std::byte* const ring =
      reinterpret_cast<std::byte*>(dynamic_shared) + (misaligned == 0 ? 0 : kStageAlignment - misaligned);
  const auto* weight = static_cast<const __nv_bfloat16*>(part.weight) + int64_t{n0} * p.k;
  const int copier = static_cast<int>(threadIdx.x) - Tile::MULTIPLY_THREADS;
  const ClusterPipe<TOKENS, WARPGROUPS> pipe{p, work, weight, shared_address(ring), copier};
  const bool copies_x = copier >= kCopyThreads;
  if (copies_x && !lora) {
    wait_for_previous();
  }
  if (multiplies) {
    pipe.prefetch();
  } else {
    pipe.begin();
  }
  if (copies_x && lora) {
    const int nth = copier - kCopyThreads;
    const int row = rank + nth * cluster;
    const LoraToken token = find_token(p, part, row, row < p.num_rows, n0, Tile::OUTPUTS);
    if (nth < TOKENS) {
      tokens[nth] = token;
    }
  }
  const int column = static_cast<int>(threadIdx.x) / 32 % WARPGROUPS * 64;
  const ClusterOutputs outputs{n0 + column, min(work.outputs - column, 64)};
  Stored bias[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    if (part.bias != nullptr && outputs.has(c)) {
      bias[c] = load_bias(part, outputs.at(c));
    }
  }
  float acc[TOKENS / 2] = {};
#pragma unroll 1
  for (int block = work.begin; block < work.end; ++block) {
    pipe.wait(block);
    if (multiplies) {
      multiply_stage<TOKENS, WARPGROUPS>(pipe.stage(block), acc);
    }
  }
  __syncthreads();  // all stages are read, sums take their place
  auto* const sums = reinterpret_cast<float*>(ring);
  if (multiplies) {
    leave_sums<TOKENS, WARPGROUPS>(sums, acc);
  }
  cluster_arrive();
  wait_for_previous();
  store_tokens<TOKENS, WARPGROUPS>(p, work, sums, lora ? tokens : nullptr, outputs, bias);
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();  // nobody reads this block's sums any more
#endif
}

// Blocks that split K. A block costs about as much as three of its 64-input blocks by beginning and by its sums.
inline int cluster_size(int tiles, int blocks, int num_sms) {
  constexpr int kFixed = 3;
  int best = 1;
  int least = 0;
  for (int size = 1; size <= std::min(kMaxCluster, blocks); ++size) {
    const int rounds = (tiles * size + num_sms - 1) / num_sms;
    const int cost = rounds * ((blocks + size - 1) / size + kFixed);
    if (size == 1 || cost < least) {
      best = size;
      least = cost;
    }
  }
  return best;
}

template <int TOKENS, int WARPGROUPS>
bool launch_cluster_tile(const Launch& launch, const CudaStream& state) {
  using Tile = ClusterTile<TOKENS, WARPGROUPS>;
  const auto kernel = linear_cluster<TOKENS, WARPGROUPS>;
  static const bool usable = has_code(kernel);
  if (!usable) {
    return false;
  }
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::SHARED_BYTES),
             "shared memory of linear");
  const int tiles = launch.params.num_tiles;
  const int size = cluster_size(tiles, (launch.params.k + kTileColumns - 1) / kTileColumns, state.num_sms);
  launch_dependent_clusters(kernel, static_cast<unsigned>(tiles * size), static_cast<unsigned>(size), Tile::THREADS,
                            Tile::SHARED_BYTES, state, launch.params, size);
  check_launch("linear, clusters");
  return true;
}
// False where the code for sm_90a is not there: nothing was launched.
inline bool launch_cluster(const Launch& launch, const CudaStream& state) {
  if (state.compute_capability != 90) {
    return false;
  }
  const bool few_tokens = launch.params.num_rows <= 32;
  const Launch narrow = launch.with_width(64);
  if (narrow.params.num_tiles * kMaxCluster <= state.num_sms) {
    return few_tokens ? launch_cluster_tile<32, 1>(narrow, state) : launch_cluster_tile<64, 1>(narrow, state);
  }
  const Launch wide = launch.with_width(128);
  return few_tokens ? launch_cluster_tile<32, 2>(wide, state) : launch_cluster_tile<64, 2>(wide, state);
}

}  // namespace moelora::linear
