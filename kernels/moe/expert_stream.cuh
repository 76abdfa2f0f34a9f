// SPDX-License-Identifier: Apache-2.0
// Expert products of few tokens an expert from MXFP4 tiles, from sm_90 on: a stream of weights with a little arithmetic
// beside it. One block an SM takes a contiguous share of all (active expert, row tile), of about equal cost. Up to 15
// neighbouring row tiles of an expert are worked on at once, one a warp, over all of k, so that no sums have to meet;
// up to 32 of the expert's tokens pass with them, so that a weight is expanded once for all. Weights and tokens come
// through a ring of stages of 4 blocks of 64 inputs in shared memory, which runs ahead across tiles and experts: a warp
// copies its own weights, one more the tokens for all. Weights that the routing has named are on their way before the
// kernel ahead has ended where that one wrote the tokens (moe_down). A token's bits do not depend on what else is in
// the batch. Limited by reading the weights, and by expanding them: about 70 instructions a row tile and block.
// Tried: the products by wgmma, weights in registers (64 rows, gpt-oss shape, 11 experts: 65 us, the same without any
// copies); weights and tokens by bulk copies of 2 KiB and 512 bytes: a thread takes 160 to 200 cycles to start one (64
// rows, 21 experts: 96 us).
#pragma once

#include <algorithm>

#include "kernels/cuda/mbarrier.cuh"
#include "kernels/moe/expert_decode.cuh"

namespace moelora {
namespace stream {

constexpr int kTiles = 15;  // at once, one a warp; another warp brings the tokens
constexpr int kThreads = 32 * (kTiles + 1);

constexpr int kStageBlocks = 4;  // as many share a group of scales
constexpr int kMaxTokens = 32;
constexpr int kTileStageBytes = kStageBlocks * kMxfp4TileBytes;
constexpr int kTokenBytes = kStageBlocks * 128;
// Of a token in a stage: lanes of two tokens that load together fall into different banks.
constexpr int kTokenStride = kTokenBytes + 64;
constexpr int kScalesBegin = kTiles * kTileStageBytes;
constexpr int kTokensBegin = kScalesBegin + kTiles * kMxfp4ScaleGroupBytes;
constexpr int kStageBytes = kTokensBegin + kMaxTokens * kTokenStride;
constexpr int kStages = 4;
constexpr int kSharedBytes = kStages * kStageBytes;

struct Shared {
  uint64_t full[kStages];
  uint64_t empty[kStages];
  int share[2];  // row tiles of all active experts, one after the other: the first of this block, and of the next
};

// What a row tile of an expert of `tokens` tokens takes, in instructions of a block of 64 inputs.
__device__ __forceinline__ int tile_cost(int tokens) {
  constexpr int kAll = 97;
  const int rest = tokens % kMaxTokens;
  return tokens / kMaxTokens * kAll + (rest == 0 ? 0 : rest <= 8 ? 72 : rest <= 16 ? 80 : kAll);
}
// Cuts the row tiles of all active experts into shares of about equal cost. By one warp.
__device__ __forceinline__ void find_share(const ExpertGemm& p, Shared& shared) {
  const int active = __ldg(p.order.num_active);
  const auto cost_of = [&](int index) {
    const int expert = __ldg(p.order.active_experts + index);
    return tile_cost(__ldg(p.order.expert_begin + expert + 1) - __ldg(p.order.expert_begin + expert));
  };
  int total = 0;
  for (int first = 0; first < active; first += 32) {
    const int index = first + lane_index();
    total += __reduce_add_sync(0xffffffffu, index < active ? cost_of(index) : 0);
  }
  // Both ends, in cost of row tiles.
  const int64_t all = int64_t{total} * p.row_tiles;
  const int64_t ends[2] = {all * blockIdx.x / gridDim.x, all * (blockIdx.x + 1) / gridDim.x};
  int64_t before = 0;
  for (int first = 0; first < active; first += 32) {
    const int index = first + lane_index();
    const int cost = index < active ? cost_of(index) : 0;
    int sum = cost;  // inclusive scan
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, sum, offset);
      sum += lane_index() >= offset ? below : 0;
    }
    const int64_t begin = before + int64_t{sum - cost} * p.row_tiles;
    const int64_t end = before + int64_t{sum} * p.row_tiles;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (index < active && begin <= ends[i] && (ends[i] < end || (index + 1 == active && ends[i] == end))) {
        shared.share[i] = index * p.row_tiles + static_cast<int>((ends[i] - begin + cost - 1) / cost);
      }
    }
    before += int64_t{__shfl_sync(0xffffffffu, sum, 31)} * p.row_tiles;
  }
}

// A stage of the ring, and the parity of its use.
struct Place {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The share of this block, group by group: up to kTiles row tiles of one expert, and up to kMaxTokens of its tokens.
struct Walk {
  int item;
  int items_end;
  int expert;
  int tile;   // the first
  int count;  // row tiles
  int pair;   // first sorted pair
  int end;    // end of the expert's pairs

  __device__ __forceinline__ Walk(const ExpertGemm& p, const Shared& shared)
      : item(shared.share[0]), items_end(shared.share[1]) {
    locate(p);
  }
  [[nodiscard]] __device__ __forceinline__ bool ended() const { return item >= items_end; }
  [[nodiscard]] __device__ __forceinline__ int tokens() const { return min(end - pair, kMaxTokens); }
  __device__ __forceinline__ void advance(const ExpertGemm& p) {
    if (pair + kMaxTokens < end) {
      pair += kMaxTokens;
    } else {
      item += count;
      locate(p);
    }
  }
  __device__ __forceinline__ void locate(const ExpertGemm& p) {
    if (ended()) {
      return;
    }
    expert = __ldg(p.order.active_experts + item / p.row_tiles);
    tile = item % p.row_tiles;
    const int rest = min(items_end - item, p.row_tiles - tile);
    const int rounds = (rest + kTiles - 1) / kTiles;
    count = (rest + rounds - 1) / rounds;  // rounds of about equal size
    pair = __ldg(p.order.expert_begin + expert);
    end = __ldg(p.order.expert_begin + expert + 1);
  }
};

// --- The warp that brings tokens: a token's inputs of a stage are one copy of all lanes. Inputs past the end of k are
// zeros.

__device__ __forceinline__ void fill_tokens(const ExpertGemm& p, Shared& shared, std::byte* stages) {
  Place at;
  for (Walk walk(p, shared); !walk.ended(); walk.advance(p)) {
    const int tokens = walk.tokens();
    const auto row = reinterpret_cast<uint64_t>(token_row(p, walk.pair + min(lane_index(), tokens - 1)));
    for (int chunk = lane_index(); chunk - lane_index() < p.k / 8; chunk += kTokenBytes / 16) {
      mbarrier_wait(&shared.empty[at.stage], at.parity ^ 1);
      std::byte* const to = stages + at.stage * kStageBytes + kTokensBegin + lane_index() * 16;
      const bool inside = chunk < p.k / 8;
#pragma unroll 4
      for (int token = 0; token < tokens; ++token) {
        const auto* from = reinterpret_cast<const uint4*>(__shfl_sync(0xffffffffu, row, token));
        async_copy16(to + token * kTokenStride, from + (inside ? chunk : 0), inside);
      }
      async_arrive(&shared.full[at.stage]);
      at.advance();
    }
  }
}

// --- The warps that multiply.

// The copying end of a warp's ring of weights. Every issue() closes one group of copies, so that groups count stages.
struct WeightFill {
  const ExpertGemm& p;
  std::byte* to;         // of this lane, in stage 0
  std::byte* scales_to;  // by lanes 0 to 7
  Walk walk;
  const std::byte* data = nullptr;
  const std::byte* scales = nullptr;
  int left = 0;  // blocks of the group
  int stage = 0;

  __device__ __forceinline__ WeightFill(const ExpertGemm& product, const Shared& shared, std::byte* stages)
      : p(product),
        to(stages + warp_index() * kTileStageBytes + lane_index() * 16),
        scales_to(stages + kScalesBegin + warp_index() * kMxfp4ScaleGroupBytes + lane_index() * 16),
        walk(product, shared) {
    locate();
    for (int i = 0; i + 1 < kStages; ++i) {
      issue();
    }
  }
  __device__ __forceinline__ void locate() {
    left = p.k_blocks;
    if (!walk.ended()) {
      const int64_t tile = min(walk.tile + warp_index(), p.row_tiles - 1);
      const int scale_groups = (p.k_blocks + kStageBlocks - 1) / kStageBlocks;
      data =
          static_cast<const std::byte*>(p.low[walk.expert]) + tile * p.k_blocks * kMxfp4TileBytes + lane_index() * 16;
      scales = reinterpret_cast<const std::byte*>(p.scales[walk.expert]) + tile * scale_groups * kMxfp4ScaleGroupBytes +
               lane_index() * 16;
    }
  }
  __device__ __forceinline__ void issue() {
    if (!walk.ended()) {
      if (warp_index() < walk.count) {
#pragma unroll
        for (int j = 0; j < kStageBlocks; ++j) {
          if (j < left) {
            async_copy16(to + stage * kStageBytes + j * kMxfp4TileBytes, data + j * kMxfp4TileBytes);
          }
        }
        if (lane_index() < 8) {
          async_copy16(scales_to + stage * kStageBytes, scales);
        }
        data += kTileStageBytes;
        scales += kMxfp4ScaleGroupBytes;
      }
      left -= kStageBlocks;
      if (left <= 0) {
        walk.advance(p);
        locate();
      }
    }
    async_commit();
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
};

struct Multiplier {
  const ExpertGemm& p;
  Shared& shared;
  const std::byte* stages;
  WeightFill weights;
  Place at;

  // The oldest stage, of weights and tokens. The copies of one more begin, to where the one before it was.
  __device__ __forceinline__ void enter() {
    async_wait<kStages - 2>();
    __syncwarp();  // the other lanes' copies of scales, and all lanes have left the stage before
    weights.issue();
    mbarrier_wait(&shared.full[at.stage], at.parity);
  }
  __device__ __forceinline__ void leave() {
    __syncwarp();
    if (lane_index() == 0) {
      mbarrier_arrive(&shared.empty[at.stage]);
    }
    at.advance();
  }

  // acc += one block: this lane's words and scales, and its first chunk of the tokens' inputs.
  template <int NT>
  __device__ __forceinline__ void multiply_block(float (&acc)[NT][4], const uint4& words, uint32_t scale,
                                                 const std::byte* tokens) const {
    const TilesSource<true>::Block block{words, scale};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      uint4 low;
      uint4 high;
      TilesSource<true>::chunk(block, c, low, high);
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const uint4 x = *reinterpret_cast<const uint4*>(tokens + 8 * j * kTokenStride + 64 * c);
        mma_chunk(acc[j], low, high, x);
      }
    }
  }

  // acc += all of k.
  template <int NT>
  __device__ __forceinline__ void multiply(float (&acc)[NT][4]) {
    const std::byte* const data = stages + warp_index() * kTileStageBytes + lane_index() * 16;
    const std::byte* const scales =
        stages + kScalesBegin + warp_index() * kMxfp4ScaleGroupBytes + lane_index() / 4 * 16;
    const std::byte* const tokens = stages + kTokensBegin + lane_index() / 4 * kTokenStride + lane_index() % 4 * 16;
    for (int left = p.k_blocks; left > 0; left -= kStageBlocks) {
      enter();
      const int stage = at.stage * kStageBytes;
      const uint4 scale = *reinterpret_cast<const uint4*>(scales + stage);
#pragma unroll
      for (int j = 0; j < kStageBlocks; ++j) {
        if (j >= left) {
          break;
        }
        const uint4 words = *reinterpret_cast<const uint4*>(data + stage + j * kMxfp4TileBytes);
        const uint32_t exponents = j == 0 ? scale.x : j == 1 ? scale.y : j == 2 ? scale.z : scale.w;
        multiply_block<NT>(acc, words, exponents, tokens + stage + j * 128);
      }
      leave();
    }
  }
  // What a warp without a row tile does in the meantime.
  __device__ __forceinline__ void skip() {
    for (int left = p.k_blocks; left > 0; left -= kStageBlocks) {
      enter();
      leave();
    }
  }

  template <bool GATE_UP, bool LORA, int NT>
  __device__ __forceinline__ void run(const Walk& walk) {
    if (warp_index() >= walk.count) {
      return skip();
    }
    const int tile = walk.tile + warp_index();
    const float2 bias = tile_bias<GATE_UP>(p, walk.expert, tile);
    float acc[NT][4] = {};
    multiply<NT>(acc);
    if (LORA) {
      wait_for_previous();  // the deltas are there
    }
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const int pair = walk.pair + 8 * j;
      if (pair < walk.end) {
        if (LORA) {
          add_deltas<GATE_UP>(acc[j], p, tile, pair, walk.end);
        }
        finish_tile<GATE_UP>(acc[j], p, bias, tile, pair, walk.end);
      }
    }
  }
  template <bool GATE_UP, bool LORA>
  __device__ __forceinline__ void run_all() {
    for (Walk walk(p, shared); !walk.ended(); walk.advance(p)) {
      const int tokens = walk.tokens();
      if (tokens <= 8) {
        run<GATE_UP, LORA, 1>(walk);
      } else if (tokens <= 16) {
        run<GATE_UP, LORA, 2>(walk);
      } else {
        run<GATE_UP, LORA, 4>(walk);
      }
    }
  }
};

// With LoRA the kernel ahead computes the deltas, and all else was complete before this kernel began. Without, that may
// be so for the routing (order_is_early), but not for the tokens.
template <bool GATE_UP, bool LORA>
__global__ void __launch_bounds__(kThreads, 1) expert_stream(const __grid_constant__ ExpertGemm p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ uint4 dynamic_shared[];
  __shared__ Shared shared;
  auto* const stages = reinterpret_cast<std::byte*>(dynamic_shared);
  const bool tokens_are_late = !LORA && p.order_is_early;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.full[i], 32);
      mbarrier_init(&shared.empty[i], kTiles);
    }
  }
  if (!LORA && !tokens_are_late) {
    wait_for_previous();
  }
  if (!tokens_are_late) {
    let_next_start();
  }
  if (warp_index() == 1) {
    find_share(p, shared);
  }
  __syncthreads();
  if (warp_index() < kTiles) {
    Multiplier{p, shared, stages, WeightFill(p, shared, stages), {}}.template run_all<GATE_UP, LORA>();
    async_wait<0>();
  } else {
    if (tokens_are_late) {
      wait_for_previous();
      let_next_start();
    }
    fill_tokens(p, shared, stages);
    async_wait<0>();
  }
  wait_for_previous();  // in every block: its end must mean that all before it has ended
#endif
}

template <bool GATE_UP, bool LORA>
bool launch_of(const ExpertGemm& p, const CudaStream& state) {
  constexpr auto kKernel = expert_stream<GATE_UP, LORA>;
  static const bool has_it = has_code(kKernel);
  if (!has_it) {
    return false;
  }
  if (cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes) != cudaSuccess) {
    cudaGetLastError();  // a GPU with less
    return false;
  }
  launch_dependent(kKernel, dim3(static_cast<unsigned>(state.num_sms)), kThreads, kSharedBytes, state, p);
  return true;
}

}  // namespace stream

// False where the GPU or its code has no bulk copies, or too little shared memory: nothing was launched.
template <bool GATE_UP>
bool launch_expert_stream(const ExpertGemm& p, const CudaStream& state) {
  if (state.compute_capability < 90) {
    return false;
  }
  return p.lora.row_slot != nullptr ? stream::launch_of<GATE_UP, true>(p, state)
                                    : stream::launch_of<GATE_UP, false>(p, state);
}

}  // namespace moelora
