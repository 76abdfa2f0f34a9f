// SPDX-License-Identifier: Apache-2.0
// Expert products of many tokens an expert: a grouped GEMM over (expert, 128 rows of the weight operand, 128 tokens).
// 8 warps as 4 (rows) x 2 (tokens), a warp 32 rows x 64 tokens. Weights go straight from global memory to mma
// fragments, one block of 64 inputs ahead, and are expanded in registers; the other warp of the same rows and the other
// token tiles find them in L1 and L2. Tokens are gathered into shared memory by asynchronous copies, kStages blocks
// deep. The blocks of an expert's last, partly filled token tile share its groups of 8 tokens evenly between the two
// token warps and skip the rest. LoRA is added at the end, in registers, adapter by adapter.
// Limited by the tensor cores, and by how many mma.sync can be issued between the loads of their operands.
#pragma once

#include <algorithm>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/moe/expert_gemm.cuh"

namespace moelora {

constexpr int kPrefillTokens = 128;  // of a token tile
constexpr int kPrefillRowTiles = 8;  // of 16 rows, of a block
constexpr int kPrefillStages = 4;
constexpr int kPrefillSharedBytes = kPrefillStages * kPrefillTokens * 128;

// The order of work: active experts in turn; of an expert the row blocks in turn, and of a row block the token tiles,
// so that blocks running together read the same weights.
struct ExpertTiles {
  int begin[kMaxExperts + 1];  // token tiles before active expert a
};

// Tiles of at most TOKENS tokens. Called by the whole block; ends with a barrier.
template <int TOKENS>
__device__ __forceinline__ int count_tiles(const ExpertGemm& p, ExpertTiles& tiles) {
  const int active = __ldg(p.order.num_active);
  if (warp_index() == 0) {
    int total = 0;
    for (int first = 0; first < active; first += 32) {
      const int a = first + lane_index();
      int count = 0;
      if (a < active) {
        const int expert = __ldg(p.order.active_experts + a);
        const int pairs = __ldg(p.order.expert_begin + expert + 1) - __ldg(p.order.expert_begin + expert);
        count = (pairs + TOKENS - 1) / TOKENS;
      }
      int sum = count;  // inclusive scan
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, sum, offset);
        sum += lane_index() >= offset ? below : 0;
      }
      if (a < active) {
        tiles.begin[a] = total + sum - count;
      }
      total += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane_index() == 0) {
      tiles.begin[active] = total;
    }
  }
  __syncthreads();  // tiles.begin is there
  return active;
}

// One work item.
struct PrefillWork {
  int expert;
  int row_block;
  int token_tile;  // of token_tiles
  int token_tiles;
  int begin;  // of the expert's pairs
  int end;
  int pair;  // first of the tile, where tiles are of kPrefillTokens
};

__device__ __forceinline__ PrefillWork find_work(const ExpertGemm& p, const ExpertTiles& tiles, int active,
                                                 int row_blocks, int item) {
  int low = 0;  // the last active expert that begins at or before the item
  int high = active;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (tiles.begin[middle] * row_blocks <= item) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int of_expert = item - tiles.begin[low] * row_blocks;
  PrefillWork work;
  work.expert = __ldg(p.order.active_experts + low);
  work.token_tiles = tiles.begin[low + 1] - tiles.begin[low];
  work.row_block = of_expert / work.token_tiles;
  work.token_tile = of_expert % work.token_tiles;
  work.begin = __ldg(p.order.expert_begin + work.expert);
  work.end = __ldg(p.order.expert_begin + work.expert + 1);
  work.pair = work.begin + work.token_tile * kPrefillTokens;
  return work;
}

// Chunk c (of 8) of token row r in a stage. Four lanes of two neighbouring rows are one phase of a 16-byte access:
// odd rows swap their halves so that the phase covers all banks.
__device__ __forceinline__ int stage_index(int r, int c) {
  return r * 8 + (c ^ (r % 2 * 4));
}

// This thread's part of filling stages: chunk threadIdx % 8 of token rows threadIdx / 8 + 32 i.
struct StageFiller {
  static constexpr int kRows = kPrefillTokens / (kExpertThreads / 8);
  const uint4* row[kRows];
  bool present[kRows];
  int chunks;

  __device__ __forceinline__ void locate(const ExpertGemm& p, const PrefillWork& work) {
    chunks = p.k / 8;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int pair = work.pair + static_cast<int>(threadIdx.x) / 8 + i * (kExpertThreads / 8);
      present[i] = pair < work.end;
      row[i] = present[i] ? token_row(p, pair) : reinterpret_cast<const uint4*>(p.x);
    }
  }
  // Always closes a group, so that groups count stages.
  __device__ __forceinline__ void fill(uint4* stage, int b, int k_blocks) const {
    if (b < k_blocks) {
      const int c = static_cast<int>(threadIdx.x) % 8;
      const int at = 8 * b + c;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool there = present[i] && at < chunks;
        const int r = static_cast<int>(threadIdx.x) / 8 + i * (kExpertThreads / 8);
        async_copy16(stage + stage_index(r, c), there ? row[i] + at : row[i], there);
      }
    }
    async_commit();
  }
};

// Group j (0 .. 7) of this warp's tokens is group 2 j + token warp of the tile; as [half][j % 4], so that the epilogue
// can take half of them at a time.
using PrefillAccumulators = float[2][2][4][4];  // [row tile][half][group][mma]

__device__ __forceinline__ int group_token(int half, int j) {
  return 8 * (2 * (4 * half + j) + warp_index() % 2);
}

template <class Source>
__device__ __forceinline__ void multiply_stage(PrefillAccumulators& acc, const typename Source::Block (&w)[2],
                                               const uint4* stage, int tokens) {
  const int g = lane_index() / 4;
  const int t = lane_index() % 4;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    uint4 low[2];
    uint4 high[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Source::chunk(w[i], c, low[i], high[i]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int first = group_token(half, j);
        if (first < tokens) {
          const uint4 x = stage[stage_index(first + g, 4 * c + t)];
          mma_chunk(acc[0][half][j], low[0], high[0], x);
          mma_chunk(acc[1][half][j], low[1], high[1], x);
        }
      }
    }
  }
}

template <bool GATE_UP>
__device__ __forceinline__ void finish_block(PrefillAccumulators& acc, const ExpertGemm& p, const PrefillWork& work,
                                             int first_tile) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (work.pair + group_token(half, 0) >= work.end) {
      continue;
    }
    TokenAdapters<4> tokens;
    if (p.lora.row_slot != nullptr) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int pair = work.pair + group_token(half, j) + lane_index() / 4;
        tokens.set(p.lora, j, pair, pair < work.end ? __ldg(p.order.pair_row + pair) : -1);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int tile = first_tile + i;
      if (tile >= p.row_tiles) {
        continue;
      }
      if (p.lora.row_slot != nullptr) {
        add_lora<GATE_UP, 4>(acc[i][half], p, tokens, work.expert, tile);
      }
      const float2 bias = tile_bias<GATE_UP>(p, work.expert, tile);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        finish_tile<GATE_UP>(acc[i][half][j], p, bias, tile, work.pair + group_token(half, j), work.end);
      }
    }
  }
}

template <bool GATE_UP, class Source>
__global__ void __launch_bounds__(kExpertThreads, 1) expert_prefill_kernel(const __grid_constant__ ExpertGemm p) {
  extern __shared__ uint4 stages[];  // [kPrefillStages][kPrefillTokens][8]
  __shared__ ExpertTiles tiles;
  constexpr int kStage = kPrefillTokens * 8;
  const int row_blocks = (p.row_tiles + kPrefillRowTiles - 1) / kPrefillRowTiles;
  const int active = count_tiles<kPrefillTokens>(p, tiles);
  const int items = tiles.begin[active] * row_blocks;
  for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
    const PrefillWork work = find_work(p, tiles, active, row_blocks, item);
    const int first_tile = work.row_block * kPrefillRowTiles + warp_index() / 2 * 2;
    const int tokens = min(work.end - work.pair, kPrefillTokens);
    StageFiller filler;
    filler.locate(p, work);
    __syncthreads();  // all warps have read the last stages of the item before
#pragma unroll
    for (int s = 0; s < kPrefillStages - 1; ++s) {
      filler.fill(stages + s * kStage, s, p.k_blocks);
    }
    Source source[2];
    typename Source::Block w[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      source[i].locate(p, work.expert, min(first_tile + i, p.row_tiles - 1));
      source[i].load(w[i], 0);
    }
    PrefillAccumulators acc = {};
    for (int b = 0; b < p.k_blocks; ++b) {
      async_wait<kPrefillStages - 2>();
      __syncthreads();  // block b is there for all, and all have read block b - 1, whose stage is filled next
      filler.fill(stages + (b + kPrefillStages - 1) % kPrefillStages * kStage, b + kPrefillStages - 1, p.k_blocks);
      typename Source::Block next[2];
      const int ahead = min(b + 1, p.k_blocks - 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        source[i].load(next[i], ahead);
      }
      multiply_stage<Source>(acc, w, stages + b % kPrefillStages * kStage, tokens);
      w[0] = next[0];
      w[1] = next[1];
    }
    finish_block<GATE_UP>(acc, p, work, first_tile);
  }
  async_wait<0>();
}

template <bool GATE_UP, class Source>
void launch_expert_prefill(const ExpertGemm& p, int64_t num_pairs, int max_active, const CudaStream& state) {
  check_cuda(cudaFuncSetAttribute(expert_prefill_kernel<GATE_UP, Source>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  kPrefillSharedBytes),
             "shared memory of the expert product");
  const int64_t row_blocks = (p.row_tiles + kPrefillRowTiles - 1) / kPrefillRowTiles;
  const int64_t items = (num_pairs / kPrefillTokens + max_active) * row_blocks;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(items, state.num_sms));
  expert_prefill_kernel<GATE_UP, Source><<<grid, kExpertThreads, kPrefillSharedBytes, state.stream>>>(p);
}

}  // namespace moelora
