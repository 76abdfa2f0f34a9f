// SPDX-License-Identifier: Apache-2.0
// Expert products of up to 64 rows from MXFP4 tiles. One block an SM takes a contiguous share of all (unit, row tile),
// where a unit is an active expert with up to 16 of its tokens. Its 16 warps cut k into ranges of at most 3 blocks of
// 64 inputs; a warp keeps the tokens' part of its range in registers for as long as the unit stays the same, and a ring
// of its blocks of two row tiles in shared memory, each filled again, by asynchronous copies, as soon as it was read:
// nothing but weights is read on the way. The partial sums of kSlots row tiles meet in shared memory and are added in
// the order of the warps while the next ones are multiplied. A token's bits depend on its own row, k and its adapter.
#pragma once

#include <algorithm>

#include "kernels/moe/expert_few.cuh"

namespace moelora {
namespace several {

constexpr int kRowsMax = 64;
constexpr int kPairsMax = 512;
constexpr int kExpertsMax = 256;
constexpr int kUnitsMax = 192;
constexpr int kTokens = 16;  // of a unit, in two groups of 8
constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocks = 3;  // of 64 inputs, of a warp
constexpr int kRing = 2;    // row tiles
constexpr int kSlots = 4;   // row tiles between two barriers
static_assert(2 * kSlots <= kWarps);

struct Unit {
  int expert;
  int begin;  // of its sorted pairs
  int end;
};

struct Shared {
  std::byte weights[kWarps][kRing][kBlocks][TilesSource<true>::kStageBytes];
  float4 partial[2][kSlots][kWarps][2][32];  // [group parity][row tile][warp][group of 8 tokens][lane]
  few::Pointers pointers[kExpertsMax];
  int expert_begin[kExpertsMax + 1];
  int active[kExpertsMax];
  int row[kPairsMax];  // of x
  Unit units[kUnitsMax];
  int num_active;
  int num_units;
};

// By the whole block: the units of all active experts. What is loaded passes the L1, which may hold what the same
// arrays said a layer ago.
__device__ __forceinline__ void find_units(const ExpertGemm& p, int num_pairs, int num_experts, Shared& s) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < num_pairs) {
    s.row[thread] = p.x_by_pair ? thread : __ldcg(p.order.pair_row + thread);
  }
  if (thread < min(num_pairs, num_experts)) {
    s.active[thread] = __ldcg(p.order.active_experts + thread);
  }
  if (thread <= num_experts) {
    s.expert_begin[thread] = __ldcg(p.order.expert_begin + thread);
  }
  if (thread == kThreads - 1) {
    s.num_active = __ldcg(p.order.num_active);
  }
  __syncthreads();
  if (warp_index() == 0) {
    int before = 0;
    for (int first = 0; first < s.num_active; first += 32) {
      const int index = first + lane_index();
      const int expert = index < s.num_active ? s.active[index] : 0;
      const int begin = s.expert_begin[expert];
      const int end = index < s.num_active ? s.expert_begin[expert + 1] : begin;
      const int units = (end - begin + kTokens - 1) / kTokens;
      int inclusive = units;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int lower = __shfl_up_sync(0xffffffffu, inclusive, offset);
        inclusive += lane_index() >= offset ? lower : 0;
      }
      for (int i = 0; i < units; ++i) {
        s.units[before + inclusive - units + i] = {expert, begin + i * kTokens, min(begin + (i + 1) * kTokens, end)};
      }
      before += __shfl_sync(0xffffffffu, inclusive, 31);
    }
    if (lane_index() == 0) {
      s.num_units = before;
    }
  }
  __syncthreads();
}

// This lane's chunks of a unit's tokens in the range of k that begins with block `begin`. Where there is no token the
// first one of the unit stands in: what that gives reaches its own column alone, and nobody stores that. Chunks past
// the last one repeat it: their weights are zeros.
__device__ __forceinline__ void load_tokens(uint4 (&x)[2][kBlocks][2], const ExpertGemm& p, const Shared& s,
                                            const Unit& unit, int begin) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int pair = unit.begin + 8 * j + lane_index() / 4;
    const int64_t row = s.row[pair < unit.end ? pair : unit.begin];
    const auto* token = reinterpret_cast<const uint4*>(p.x + row * p.x_stride);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        x[j][i][c] = __ldcg(token + min(8 * (begin + i) + 4 * c + lane_index() % 4, p.k / 8 - 1));
      }
    }
  }
}

// One row tile's share of this warp; its places in the ring are filled again if there is `more`.
template <bool GATE_UP, int NT>
__device__ __forceinline__ void multiply(float4 (&partial)[2][32],
                                         std::byte (&stages)[kBlocks][TilesSource<true>::kStageBytes],
                                         const uint4 (&x)[2][kBlocks][2], const few::TilesRange<GATE_UP>& range,
                                         int count, bool more) {
  float acc[NT][4] = {};
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    async_wait<kRing * kBlocks - 1>();  // the oldest is there
    if (i < count) {
      typename TilesSource<GATE_UP>::Block w;
      TilesSource<GATE_UP>::fetch(w, stages[i]);
      uint4 low[2];
      uint4 high[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        TilesSource<GATE_UP>::chunk(w, c, low[c], high[c]);
      }
      if (more) {
        range.copy(stages[i], i);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          mma_chunk(acc[j], low[c], high[c], x[j][i][c]);
        }
      }
    }
    async_commit();
  }
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    partial[j][lane_index()] = make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]);
  }
}

// Adds up the partial sums of a row tile and one group of tokens and stores it, by a warp.
template <bool GATE_UP, bool LORA>
__device__ __forceinline__ void finish(const float4 (&partial)[kWarps][2][32], const ExpertGemm& p, const Unit& unit,
                                       int tile, int j, const float2& bias) {
  float sum[4] = {};
#pragma unroll 4
  for (int warp = 0; warp < kWarps; ++warp) {
    const float4 added = partial[warp][j][lane_index()];
    sum[0] += added.x;
    sum[1] += added.y;
    sum[2] += added.z;
    sum[3] += added.w;
  }
  if (LORA) {
    add_deltas<GATE_UP>(sum, p, tile, unit.begin + 8 * j, unit.end);
  }
  finish_tile<GATE_UP>(sum, p, bias, tile, unit.begin + 8 * j, unit.end);
}

// LORA: the kernel ahead, which computes the deltas, passed its wait before this one began, so that all but the deltas
// was complete then.
template <bool GATE_UP, bool LORA>
__global__ void __launch_bounds__(kThreads, 1)
    expert_several(const __grid_constant__ ExpertGemm p, int num_pairs, int num_experts) {
  extern __shared__ uint4 dynamic_shared[];
  auto& s = *reinterpret_cast<Shared*>(dynamic_shared);
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += kThreads) {
    s.pointers[e] = few::TilesRange<GATE_UP>::pointers(p, e);
  }
  if (!LORA) {
    wait_for_previous();
  }
  let_next_start();
  find_units(p, num_pairs, num_experts, s);
  const int begin = p.k_blocks * warp_index() / kWarps;
  const int count = p.k_blocks * (warp_index() + 1) / kWarps - begin;
  const auto total = static_cast<uint32_t>(s.num_units * p.row_tiles);
  const auto first = static_cast<int>(total * blockIdx.x / gridDim.x);
  const auto last = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  const int slot = warp_index() / 2;
  const int j = warp_index() % 2;
  few::TilesRange<GATE_UP> range;
  few::Place copied(first, p.row_tiles);  // the row tile whose weights come
  const auto locate = [&] { range.locate(p, s.pointers[s.units[copied.index].expert], copied.tile, begin); };
  const auto advance = [&] {
    if (++copied.tile < p.row_tiles) {
      range.advance(p, 1);
    } else {
      copied.tile = 0;
      ++copied.index;
      locate();
    }
  };
  // Every block of a range closes a group of copies, so that groups count blocks.
#pragma unroll
  for (int r = 0; r < kRing; ++r) {
    const bool there = first + r < last;
    if (there) {
      r == 0 ? locate() : advance();
    }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (there && i < count) {
        range.copy(s.weights[warp_index()][r][i], i);
      }
      async_commit();
    }
  }
  uint4 x[2][kBlocks][2];
  few::Place place(first, p.row_tiles);
  bool is_new = true;
  int parity = 0;
#pragma unroll 1
  for (int group = first; group < last; group += kSlots, parity ^= 1) {
#pragma unroll 1
    for (int at = group; at < min(group + kSlots, last); ++at) {
      const Unit unit = s.units[place.index];
      if (is_new) {
        load_tokens(x, p, s, unit, begin);
      }
      const bool more = at + kRing < last;
      if (more) {
        advance();
      }
      auto& partial = s.partial[parity][at - group][warp_index()];
      auto& stages = s.weights[warp_index()][(at - first) % kRing];
      if (unit.end - unit.begin > 8) {
        multiply<GATE_UP, 2>(partial, stages, x, range, count, more);
      } else {
        multiply<GATE_UP, 1>(partial, stages, x, range, count, more);
      }
      is_new = ++place.tile == p.row_tiles;
      if (is_new) {
        place.tile = 0;
        ++place.index;
      }
    }
    const int own = group + slot;
    const few::Place finished(min(own, last - 1), p.row_tiles);
    const Unit& unit = s.units[finished.index];
    const bool finishes = slot < kSlots && own < last && unit.begin + 8 * j < unit.end;
    float2 bias{};
    if (finishes) {
      bias = tile_bias<GATE_UP>(p, unit.expert, finished.tile);
    }
    if (LORA && group == first) {
      wait_for_previous();  // the deltas are there
    }
    __syncthreads();  // the partial sums of all warps are there
    if (finishes) {
      finish<GATE_UP, LORA>(s.partial[parity][slot], p, unit, finished.tile, j, bias);
    }
  }
  if (LORA) {
    wait_for_previous();  // also in a block without a share: its end must mean that all before it has ended
  }
  async_wait<0>();
}

template <bool GATE_UP, bool LORA>
void launch_of(const ExpertGemm& p, int num_pairs, int num_experts, const CudaStream& state) {
  constexpr auto kKernel = expert_several<GATE_UP, LORA>;
  check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)),
             "shared memory of the expert product");
  launch_dependent(kKernel, dim3(static_cast<unsigned>(state.num_sms)), kThreads, sizeof(Shared), state, p, num_pairs,
                   num_experts);
}

}  // namespace several

// False where this kernel cannot: nothing was launched.
template <bool GATE_UP>
bool launch_expert_several(const ExpertGemm& p, int num_rows, int num_pairs, int num_experts, const CudaStream& state) {
  using namespace several;
  if (state.compute_capability < 90 || num_rows > kRowsMax || num_pairs > kPairsMax || num_experts > kExpertsMax ||
      p.k_blocks > kWarps * kBlocks || std::min(num_experts, num_pairs) + num_pairs / kTokens > kUnitsMax) {
    return false;
  }
  p.lora.row_slot != nullptr ? launch_of<GATE_UP, true>(p, num_pairs, num_experts, state)
                             : launch_of<GATE_UP, false>(p, num_pairs, num_experts, state);
  return true;
}

}  // namespace moelora
