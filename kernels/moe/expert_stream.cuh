// SPDX-License-Identifier: Apache-2.0
// Expert products of few tokens an expert from MXFP4 tiles, from sm_90 on, where there are several tokens an expert: a
// stream of weights with a little arithmetic beside it. One block an SM takes a contiguous share of all (active expert,
// row tile), of about equal cost. Up to 16 neighbouring row tiles of an expert are worked on at once, one a warp, over
// all of k, so that no sums have to meet; up to 32 of the expert's tokens pass with them, so that a weight is expanded
// once for all. Weights and tokens come through one ring of stages of 4 blocks of 64 inputs in shared memory, filled by
// four warps with bulk copies, which run ahead across tiles and experts. A token's bits do not depend on what else is
// in the batch. Limited by the latency of four warps a scheduler, about 95 instructions a row tile and block each.
// Tried (gate_up of gpt-oss shape, 64 rows, 21 experts; this 96 us, expert_decode.cuh 104): the products by wgmma,
// weights in registers, 209 us; each warp copying its own weights by cp.async, 106 us; shares of equal numbers of row
// tiles, whatever the experts' tokens, 133 us; ranges of k a warp, the tokens of up to 16 rows in registers as in
// expert_few.cuh (16 warps; a step of six layers 1,757 us, this 1,721; with 8 adapters 2,427, this 2,437). Fewer tokens
// an expert are faster by expert_decode.cuh (8 rows: 43 us against 47), which cuts k. Tried for moe_down: weights asked
// for before the wait for moe_gate_up, by the routing that was complete when that began: base rows of small models were
// wrong at times; why was not found out.
#pragma once

#include <algorithm>

#include "kernels/cuda/mbarrier.cuh"
#include "kernels/moe/expert_decode.cuh"

namespace moelora {
namespace stream {

constexpr int kTiles = 16;  // at once, one a warp
constexpr int kMultiplyThreads = 32 * kTiles;
// Warps that fill, each by single lanes: two for the weights, two for the tokens.
constexpr int kTokenWarps = 2;
constexpr int kFillWarps = 2 + kTokenWarps;
constexpr int kThreads = kMultiplyThreads + 32 * kFillWarps;

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

using Place = RingPlace<kStages>;

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

// --- The warps that fill.

// Data (or scales) of the row tiles, by one thread: a copy takes it about 16 instructions, one after the other.
template <bool DATA>
__device__ __forceinline__ void fill_weights(const ExpertGemm& p, Shared& shared, std::byte* stages) {
  Place at;
  const int scale_groups = (p.k_blocks + kStageBlocks - 1) / kStageBlocks;
  const int64_t stride = DATA ? int64_t{p.k_blocks} * kMxfp4TileBytes : int64_t{scale_groups} * kMxfp4ScaleGroupBytes;
  constexpr int kBytes = DATA ? kTileStageBytes : kMxfp4ScaleGroupBytes;
  for (Walk walk(p, shared); !walk.ended(); walk.advance(p)) {
    const auto* from = static_cast<const std::byte*>(DATA ? p.low[walk.expert] : p.scales[walk.expert]);
    from += walk.tile * stride;
    for (int s = 0; s < scale_groups; ++s) {
      const auto bytes = static_cast<uint32_t>(DATA ? min(kStageBlocks, p.k_blocks - s * kStageBlocks) * kMxfp4TileBytes
                                                    : kMxfp4ScaleGroupBytes);
      std::byte* const to = stages + at.stage * kStageBytes + (DATA ? 0 : kScalesBegin);
      uint64_t* const full = &shared.full[at.stage];
      mbarrier_wait(&shared.empty[at.stage], at.parity ^ 1);
      mbarrier_arrive_expect(full, static_cast<uint32_t>(walk.count) * bytes);
#pragma unroll 4
      for (int i = 0; i < walk.count; ++i) {
        bulk_copy(to + i * kBytes, from + i * stride, bytes, full);
      }
      from += kBytes;
      at.advance();
    }
  }
}

// Every kTokenWarps-th token, by a lane each.
__device__ __forceinline__ void fill_tokens(const ExpertGemm& p, Shared& shared, std::byte* stages, int warp) {
  Place at;
  const int token = lane_index();
  for (Walk walk(p, shared); !walk.ended(); walk.advance(p)) {
    const int tokens = walk.tokens();
    const bool own = token < tokens && token % kTokenWarps == warp;
    const int copies = (tokens + kTokenWarps - 1 - warp) / kTokenWarps;
    const auto* from = reinterpret_cast<const std::byte*>(token_row(p, walk.pair + min(token, tokens - 1)));
    for (int left = p.k * 2; left > 0; left -= kTokenBytes) {
      const auto bytes = static_cast<uint32_t>(min(left, kTokenBytes));
      uint64_t* const full = &shared.full[at.stage];
      mbarrier_wait(&shared.empty[at.stage], at.parity ^ 1);
      if (lane_index() == 0) {
        mbarrier_arrive_expect(full, static_cast<uint32_t>(copies) * bytes);
      }
      __syncwarp();
      if (own) {
        bulk_copy(stages + at.stage * kStageBytes + kTokensBegin + token * kTokenStride, from, bytes, full);
      }
      from += kTokenBytes;
      at.advance();
    }
  }
}

// --- The warps that multiply.

// The deltas of adapters that the kernel ahead computes.
enum class Deltas : uint8_t {
  kNone,
  kMarked,  // where they are marked as adapted (ExpertLora::adapted)
  kAll,     // of every pair and module, as something that changes no bit where it is not adapted
};

// Those of this lane's outputs and tokens.
template <bool GATE_UP, int NT>
__device__ __forceinline__ void load_deltas(float (&delta)[NT][4], const ExpertGemm& p, const Walk& walk, int tile) {
  constexpr int kModules = GATE_UP ? 2 : 1;
  const int n_low = (GATE_UP ? 8 : 16) * tile + lane_index() / 4;
  const int n_high = GATE_UP ? n_low : n_low + 8;
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t pair = walk.pair + 8 * j + 2 * (lane_index() % 4) + i;
      const float* const low = p.lora.delta + pair * kModules * p.rows;
      const float* const high = low + (kModules - 1) * p.rows;
      delta[j][i] = pair < walk.end && n_low < p.rows ? low[n_low] : 0.0f;
      delta[j][2 + i] = pair < walk.end && n_high < p.rows ? high[n_high] : 0.0f;
    }
  }
}

struct Multiplier {
  const ExpertGemm& p;
  Shared& shared;
  const std::byte* stages;
  Place at;
  bool waited = false;  // for the deltas

  __device__ __forceinline__ void leave() {
    __syncwarp();
    if (lane_index() == 0) {
      mbarrier_arrive(&shared.empty[at.stage]);
    }
    at.advance();
  }

  // acc += one block: this lane's words and scales, and its chunks of the tokens' inputs, `second` bytes apart.
  template <int NT>
  __device__ __forceinline__ void multiply_block(float (&acc)[NT][4], const uint4& words, uint32_t scale,
                                                 const std::byte* tokens, int first, int second) const {
    const TilesSource<true>::Block block{words, scale};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      uint4 low;
      uint4 high;
      TilesSource<true>::chunk(block, c, low, high);
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const uint4 x = *reinterpret_cast<const uint4*>(tokens + 8 * j * kTokenStride + (c == 0 ? first : second));
        mma_chunk(acc[j], low, high, x);
      }
    }
  }

  // acc += all of k.
  template <int NT>
  __device__ __forceinline__ void multiply(float (&acc)[NT][4]) {
    const int t = lane_index() % 4;
    const std::byte* const data = stages + warp_index() * kTileStageBytes + lane_index() * 16;
    const std::byte* const scales =
        stages + kScalesBegin + warp_index() * kMxfp4ScaleGroupBytes + lane_index() / 4 * 16;
    const std::byte* const tokens = stages + kTokensBegin + lane_index() / 4 * kTokenStride;
    // Chunks past the end of k, whose weights are zeros, repeat the last one: what lies there may be no number.
    const int last_chunk = (p.k - 1) / 8 % 8;
    for (int left = p.k_blocks; left > 0; left -= kStageBlocks) {
      mbarrier_wait(&shared.full[at.stage], at.parity);
      const int stage = at.stage * kStageBytes;
      const uint4 scale = *reinterpret_cast<const uint4*>(scales + stage);
#pragma unroll
      for (int j = 0; j < kStageBlocks; ++j) {
        if (j >= left) {
          break;
        }
        const uint4 words = *reinterpret_cast<const uint4*>(data + stage + j * kMxfp4TileBytes);
        const int end = j + 1 == left ? last_chunk : 7;
        multiply_block<NT>(acc, words,
                           j == 0   ? scale.x
                           : j == 1 ? scale.y
                           : j == 2 ? scale.z
                                    : scale.w,
                           tokens + stage + j * 128, 16 * min(t, end), 16 * min(4 + t, end));
      }
      leave();
    }
  }
  // What a warp without a row tile does in the meantime.
  __device__ __forceinline__ void skip() {
    for (int left = p.k_blocks; left > 0; left -= kStageBlocks) {
      mbarrier_wait(&shared.full[at.stage], at.parity);
      leave();
    }
  }

  template <bool GATE_UP, Deltas DELTAS, int NT>
  __device__ __forceinline__ void run(const Walk& walk) {
    if (warp_index() >= walk.count) {
      return skip();
    }
    const int tile = walk.tile + warp_index();
    const float2 bias = tile_bias<GATE_UP>(p, walk.expert, tile);
    // Registers are short for more: then they are loaded where they are added.
    const bool ahead = DELTAS == Deltas::kAll && NT <= 2 && waited;
    float delta[NT][4];
    if (ahead) {
      load_deltas<GATE_UP, NT>(delta, p, walk, tile);
    }
    float acc[NT][4] = {};
    multiply<NT>(acc);
    if (DELTAS != Deltas::kNone) {
      wait_for_previous();  // the deltas are there
      waited = true;
    }
    if (DELTAS == Deltas::kAll) {
      if (!ahead) {
        load_deltas<GATE_UP, NT>(delta, p, walk, tile);
      }
#pragma unroll
      for (int j = 0; j < NT; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          acc[j][i] += delta[j][i];
        }
      }
    }
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const int pair = walk.pair + 8 * j;
      if (pair < walk.end) {
        if (DELTAS == Deltas::kMarked) {
          add_deltas<GATE_UP>(acc[j], p, tile, pair, walk.end);
        }
        finish_tile<GATE_UP>(acc[j], p, bias, tile, pair, walk.end);
      }
    }
  }
  template <bool GATE_UP, Deltas DELTAS>
  __device__ __forceinline__ void run_all() {
    for (Walk walk(p, shared); !walk.ended(); walk.advance(p)) {
      const int tokens = walk.tokens();
      if (tokens <= 8) {
        run<GATE_UP, DELTAS, 1>(walk);
      } else if (tokens <= 16) {
        run<GATE_UP, DELTAS, 2>(walk);
      } else {
        run<GATE_UP, DELTAS, 4>(walk);
      }
    }
  }
};

// With LoRA the kernel ahead computes the deltas, and all else was complete before this kernel began.
template <bool GATE_UP, Deltas DELTAS>
__global__ void __launch_bounds__(kThreads, 1) expert_stream(const __grid_constant__ ExpertGemm p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ uint4 dynamic_shared[];
  __shared__ Shared shared;
  auto* const stages = reinterpret_cast<std::byte*>(dynamic_shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.full[i], kFillWarps);
      mbarrier_init(&shared.empty[i], kTiles);
    }
    publish_barriers();
  }
  if (DELTAS == Deltas::kNone) {
    wait_for_previous();
  }
  let_next_start();
  if (warp_index() == 1) {
    find_share(p, shared);
  }
  __syncthreads();
  const int fill_warp = warp_index() - kTiles;
  if (fill_warp < 0) {
    Multiplier{p, shared, stages, {}}.template run_all<GATE_UP, DELTAS>();
  } else if (fill_warp < kTokenWarps) {
    fill_tokens(p, shared, stages, fill_warp);
  } else if (lane_index() == 0) {
    if (fill_warp == kTokenWarps) {
      fill_weights<true>(p, shared, stages);
    } else {
      fill_weights<false>(p, shared, stages);
    }
  }
  wait_for_previous();  // in every block: its end must mean that all before it has ended
#endif
}

template <bool GATE_UP, Deltas DELTAS>
bool launch_of(const ExpertGemm& p, const CudaStream& state) {
  constexpr auto kKernel = expert_stream<GATE_UP, DELTAS>;
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

// False where the GPU or its code has no bulk copies, or too little shared memory: nothing was launched. `all_deltas`:
// with adapters there is a delta for every pair and module.
template <bool GATE_UP>
bool launch_expert_stream(const ExpertGemm& p, bool all_deltas, const CudaStream& state) {
  using stream::Deltas;
  if (state.compute_capability < 90) {
    return false;
  }
  if (p.lora.row_slot == nullptr) {
    return stream::launch_of<GATE_UP, Deltas::kNone>(p, state);
  }
  return all_deltas ? stream::launch_of<GATE_UP, Deltas::kAll>(p, state)
                    : stream::launch_of<GATE_UP, Deltas::kMarked>(p, state);
}

}  // namespace moelora
