// SPDX-License-Identifier: Apache-2.0
// Expert products of few tokens an expert: a stream of weights with a little arithmetic beside it. The grid stays on
// the device and walks the work: (active expert, RT neighbouring row tiles, up to 16 of its tokens). The 4 or 8 warps
// of a block cut the inputs into contiguous ranges of blocks of 64. Each warp runs its own ring of STAGES such blocks
// in shared memory, filled by asynchronous copies that run ahead across work items, so that loads are in flight while
// others sum up, and no register waits for memory; a lane reads what it copied, in fragment order, without a barrier.
// Token chunks come from L1 or L2. Partial sums meet in shared memory and are added in the order of the warps: a
// token's bits depend on its own row, k, its adapter and, through the number of warps, the number of rows.
// With LoRA the deltas are computed beside the first items (kernels/moe/expert_expand.cuh) and added at an item's end.
// Tried for LoRA: an expand by mma in the finishing warp, adapter by adapter (64 rows of Qwen3-30B-A3B's shape, 8
// adapters: gate_up 656 us, 200 without adapters); one, then two warps of deltas beside the stream, look-ups three
// items ahead and B prefetched (gpt-oss shape: 347 and 288 us, 120 without); a launch of its own (200 us).
// Tried without: one block of 16 or 24 warps an SM, items of four warps, rings of four blocks at fixed places, tokens
// loaded a chunk ahead (103 instructions a tile and block against 156, but gate_up of 64 rows 131 us against 113).
#pragma once

#include <algorithm>

#include "kernels/moe/expert_gemm.cuh"

namespace moelora {

constexpr int kDecodeWarpsPerSm = 16;
constexpr int kDecodeTokens = 16;  // of a work item, in two groups of 8

struct ExpertWork {
  int item;
  int expert;
  int tile;  // first row tile
  int pair;  // first sorted pair
  int end;   // end of the expert's pairs
};

// Items are ordered by expert, then by row tiles, so that blocks running together share tokens.
template <int RT>
struct ExpertWalk {
  int items;
  int tile_groups;

  __device__ __forceinline__ explicit ExpertWalk(const ExpertGemm& p)
      : items(__ldg(p.order.num_active) * ((p.row_tiles + RT - 1) / RT)), tile_groups((p.row_tiles + RT - 1) / RT) {}
  [[nodiscard]] __device__ __forceinline__ bool ended(const ExpertWork& work) const { return work.item >= items; }
  __device__ __forceinline__ void seek(const ExpertGemm& p, ExpertWork& work, int item) const {
    work.item = item;
    if (item < items) {
      work.expert = __ldg(p.order.active_experts + item / tile_groups);
      work.tile = item % tile_groups * RT;
      work.pair = __ldg(p.order.expert_begin + work.expert);
      work.end = __ldg(p.order.expert_begin + work.expert + 1);
    }
  }
  // More tokens of the same rows, or the next item of this block.
  __device__ __forceinline__ void advance(const ExpertGemm& p, ExpertWork& work) const {
    if (work.pair + kDecodeTokens < work.end) {
      work.pair += kDecodeTokens;
    } else {
      seek(p, work, work.item + static_cast<int>(gridDim.x));
    }
  }
};

// The copying end of a warp's ring. Every call of issue() closes one group of copies, so that groups count stages.
template <class Source, int RT, int STAGES>
struct WeightRing {
  static constexpr int kStage = RT * Source::kStageBytes;
  static constexpr int kBytes = STAGES * kStage;
  std::byte* memory;
  std::byte* write;  // the stage that issue() fills next
  std::byte* read;   // the oldest stage
  ExpertWork work;
  Source source[RT];
  int begin;
  int end;
  int b;

  __device__ __forceinline__ void locate(const ExpertGemm& p, const ExpertWalk<RT>& walk) {
    if (!walk.ended(work)) {
#pragma unroll
      for (int i = 0; i < RT; ++i) {
        source[i].locate(p, work.expert, min(work.tile + i, p.row_tiles - 1));
      }
    }
  }
  __device__ __forceinline__ void issue(const ExpertGemm& p, const ExpertWalk<RT>& walk) {
    if (!walk.ended(work)) {
#pragma unroll
      for (int i = 0; i < RT; ++i) {
        source[i].copy(write + i * Source::kStageBytes, b);
      }
      if (++b == end) {
        b = begin;
        walk.advance(p, work);
        locate(p, walk);
      }
    }
    async_commit();
    write = after(write);
  }
  [[nodiscard]] __device__ __forceinline__ std::byte* after(std::byte* stage) const {
    return stage == memory + (STAGES - 1) * kStage ? memory : stage + kStage;
  }
};

// This lane's chunks of block b of its tokens. Chunks past the last one repeat it: their weights are zeros.
template <int NT>
__device__ __forceinline__ void load_tokens(uint4 (&x)[NT][2], const uint4* const (&token)[2], int chunks, int b) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const auto at = static_cast<uint32_t>(min(8 * b + 4 * c + lane_index() % 4, chunks - 1));
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      x[j][c] = __ldg(token[j] + at);
    }
  }
}

// One work item's share of this warp.
template <int NT, class Source, int RT, int STAGES>
__device__ __forceinline__ void multiply(float (&acc)[RT][2][4], const ExpertGemm& p, const ExpertWalk<RT>& walk,
                                         WeightRing<Source, RT, STAGES>& ring, const uint4* const (&token)[2]) {
  const int chunks = p.k / 8;
  const int begin = ring.begin;
  const int end = ring.end;
  uint4 x[NT][2];
  load_tokens<NT>(x, token, chunks, begin);
#pragma unroll 2
  for (int b = begin; b < end; ++b) {
    uint4 next_x[NT][2];
    load_tokens<NT>(next_x, token, chunks, b + 1);
    async_wait<STAGES - 2>();  // the oldest stage is there
    ring.issue(p, walk);       // into the stage that was read before it
#pragma unroll
    for (int i = 0; i < RT; ++i) {
      typename Source::Block w;
      Source::fetch(w, ring.read + i * Source::kStageBytes);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        uint4 low;
        uint4 high;
        Source::chunk(w, c, low, high);
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          mma_chunk(acc[i][j], low, high, x[j][c]);
        }
      }
    }
    ring.read = ring.after(ring.read);
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      x[j][0] = next_x[j][0];
      x[j][1] = next_x[j][1];
    }
  }
}

// The part of a work item that one warp finishes: row tile `tile` (i of the item) and token group j. Roles move from
// turn to turn, so that no warp is always the late one.
struct ExpertRole {
  bool active;
  int i;
  int j;
};
template <int RT, int WARPS>
__device__ __forceinline__ ExpertRole role_of(const ExpertGemm& p, const ExpertWork& work, int turn) {
  const int index = (warp_index() + turn * RT) % WARPS;
  const int groups = work.pair + 8 < work.end ? 2 : 1;
  return {index < RT * groups && work.tile + index % RT < p.row_tiles, index % RT, index / RT};
}

// Sums of all warps over the inputs: [warp][row tile][group][lane].
template <int RT, int WARPS>
struct PartialSums {
  float4 at[WARPS][RT][2][32];
};

// Adds the deltas of this lane's tokens and outputs.
template <bool GATE_UP>
__device__ __forceinline__ void add_deltas(float (&sum)[4], const ExpertGemm& p, int tile, int pair, int end) {
  constexpr int kModules = GATE_UP ? 2 : 1;
  const int n_low = (GATE_UP ? 8 : 16) * tile + lane_index() / 4;
  const int n_high = GATE_UP ? n_low : n_low + 8;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t at = pair + 2 * (lane_index() % 4) + i;
    if (at >= end) {
      continue;
    }
    const int64_t low = at * kModules;
    const int64_t high = low + kModules - 1;
    if (p.lora.adapted[low] != 0 && n_low < p.rows) {
      sum[i] += p.lora.delta[low * p.rows + n_low];
    }
    if (p.lora.adapted[high] != 0 && n_high < p.rows) {
      sum[2 + i] += p.lora.delta[high * p.rows + n_high];
    }
  }
}

template <bool GATE_UP, int RT, int WARPS, bool LORA>
__device__ __forceinline__ void finish_role(const PartialSums<RT, WARPS>& partial, const ExpertGemm& p,
                                            const ExpertWork& work, const ExpertRole& role, const float2& bias) {
  float sum[4] = {};
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) {
    const float4 part = partial.at[warp][role.i][role.j][lane_index()];
    sum[0] += part.x;
    sum[1] += part.y;
    sum[2] += part.z;
    sum[3] += part.w;
  }
  if (LORA) {
    add_deltas<GATE_UP>(sum, p, work.tile + role.i, work.pair + 8 * role.j, work.end);
  }
  finish_tile<GATE_UP>(sum, p, bias, work.tile + role.i, work.pair + 8 * role.j, work.end);
}

// This warp's ring, its first stages on their way.
template <class Source, int RT, int STAGES, int WARPS>
__device__ __forceinline__ WeightRing<Source, RT, STAGES> begin_ring(const ExpertGemm& p, const ExpertWalk<RT>& walk,
                                                                     const ExpertWork& work, std::byte* memory) {
  WeightRing<Source, RT, STAGES> ring;
  ring.memory = memory;
  ring.write = ring.memory;
  ring.read = ring.memory;
  ring.begin = p.k_blocks * warp_index() / WARPS;
  ring.end = p.k_blocks * (warp_index() + 1) / WARPS;
  ring.b = ring.begin;
  ring.work = work;
  if (ring.begin < ring.end) {
    ring.locate(p, walk);
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; ++s) {
      ring.issue(p, walk);
    }
  }
  return ring;
}

template <bool GATE_UP, class Source, int RT, int STAGES, int WARPS, bool LORA>
__global__ void __launch_bounds__(32 * WARPS, kDecodeWarpsPerSm / WARPS)
    expert_decode_kernel(const __grid_constant__ ExpertGemm p) {
  using Ring = WeightRing<Source, RT, STAGES>;
  // Two PartialSums in turn (one barrier an item is enough), then the rings.
  extern __shared__ __align__(128) uint4 dynamic_shared[];
  if (!LORA) {
    wait_for_previous();  // with LoRA all but the deltas was complete before this kernel began
  }
  let_next_start();
  auto* const partial = reinterpret_cast<PartialSums<RT, WARPS>*>(dynamic_shared);
  const ExpertWalk<RT> walk(p);
  ExpertWork work{};
  walk.seek(p, work, static_cast<int>(blockIdx.x));
  Ring ring = begin_ring<Source, RT, STAGES, WARPS>(
      p, walk, work, reinterpret_cast<std::byte*>(partial + 2) + warp_index() * Ring::kBytes);
  for (int turn = 0; !walk.ended(work); ++turn) {
    const uint4* token[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      // Where there is no token, the first one stands in: what that gives reaches its own column alone, and nobody
      // stores that.
      const int pair = work.pair + 8 * j + lane_index() / 4;
      token[j] = token_row(p, pair < work.end ? pair : work.pair);
    }
    float acc[RT][2][4] = {};
    if (work.pair + 8 < work.end) {
      multiply<2>(acc, p, walk, ring, token);
    } else {
      multiply<1>(acc, p, walk, ring, token);
    }
#pragma unroll
    for (int i = 0; i < RT; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        partial[turn % 2].at[warp_index()][i][j][lane_index()] =
            make_float4(acc[i][j][0], acc[i][j][1], acc[i][j][2], acc[i][j][3]);
      }
    }
    const ExpertRole role = role_of<RT, WARPS>(p, work, turn);
    float2 bias{};
    if (role.active) {
      bias = tile_bias<GATE_UP>(p, work.expert, work.tile + role.i);  // on its way while the warps meet
    }
    if (LORA && turn == 0) {
      wait_for_previous();  // the deltas are there
    }
    __syncthreads();  // the partial sums of all warps are there
    if (role.active) {
      finish_role<GATE_UP, RT, WARPS, LORA>(partial[turn % 2], p, work, role, bias);
    }
    walk.advance(p, work);
  }
  if (LORA) {
    wait_for_previous();  // also in a block without an item: its end must mean that all before it has ended
  }
  async_wait<0>();
}

template <bool GATE_UP, class Source, int RT, int STAGES, int WARPS, bool LORA>
void launch_expert_decode_of(const ExpertGemm& p, int64_t items, const CudaStream& state) {
  constexpr size_t kSharedBytes = 2 * sizeof(PartialSums<RT, WARPS>) + WARPS * WeightRing<Source, RT, STAGES>::kBytes;
  constexpr auto kKernel = expert_decode_kernel<GATE_UP, Source, RT, STAGES, WARPS, LORA>;
  check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
             "shared memory of the expert product");
  const auto grid = static_cast<unsigned>(std::min<int64_t>(items, int64_t{state.num_sms} * kDecodeWarpsPerSm / WARPS));
  launch_dependent(kKernel, dim3(grid), 32 * WARPS, kSharedBytes, state, p);
}
// Items are shared by four warps where there are many of them, so that what an item costs besides its weights is paid
// half as often, and by eight otherwise, so that the last round of items is short.
template <bool GATE_UP, class Source, int RT, int STAGES>
void launch_expert_decode(const ExpertGemm& p, int max_active, const CudaStream& state) {
  constexpr int kManyRounds = 4;
  const int64_t items = int64_t{max_active} * ((p.row_tiles + RT - 1) / RT);
  const bool many = items >= int64_t{kManyRounds} * state.num_sms * kDecodeWarpsPerSm / 4;
  const bool lora = p.lora.row_slot != nullptr;
  const auto launch = many ? (lora ? launch_expert_decode_of<GATE_UP, Source, RT, STAGES, 4, true>
                                   : launch_expert_decode_of<GATE_UP, Source, RT, STAGES, 4, false>)
                           : (lora ? launch_expert_decode_of<GATE_UP, Source, RT, STAGES, 8, true>
                                   : launch_expert_decode_of<GATE_UP, Source, RT, STAGES, 8, false>);
  launch(p, items, state);
}

}  // namespace moelora
