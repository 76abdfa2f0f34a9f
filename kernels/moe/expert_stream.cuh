// SPDX-License-Identifier: Apache-2.0
// Expert products of few tokens an expert from MXFP4 tiles, from sm_90 on, where there are several tokens an expert: a
// stream of weights with a little arithmetic beside it. One block an SM takes a contiguous share of all (active expert,
// group of 8 row tiles), of about equal cost. Up to 16 neighbouring row tiles of an expert are worked on at once, a
// round, as strips of two; up to 32 of the expert's tokens pass with them, so that a weight is expanded once for all.
// Weights and tokens come through one ring of stages of 4 blocks of 64 inputs in shared memory, filled by four warps
// with bulk copies, which run ahead across rounds and experts. Two warps share a strip and take every other stage each;
// at the end of a round the one whose stages end first adds the deltas, gives its sums to the other and goes on, the
// other finishes the strip. What a warp loads of the tokens serves both tiles of its strip, and of a whole stage
// nothing branches. A token's bits do not depend on what else is in the batch.
// H200, gpt-oss's shape, 64 rows, gate_up and down alone: 32 experts 88 and 45 us (283 and 142 MB), 25 experts of
// unequal numbers of tokens 84 and 49 (221 and 111 MB); reading alone takes 62, 33, 49 and 26. Of up to 8 tokens an
// expert rounds run at the pace of memory; of more, instructions count: 60 a row tile and block of up to 8 tokens, 65
// of up to 16. Before, 107, 60, 101 and 61 us: the ring at a multiple of 16 bytes alone (a quarter more asked of the
// L2, its tags 75 % busy; aligned alone 101, 54, 90 and 55), warps that met at the end of each round (2 us of 14),
// shares cut at any row tile (a round of 10 takes as long as one of 16), 32 tokens' products for 17. What is left: 3 us
// until the first stage is there, and blocks that end 10 us after the median, by half a group more and by experts of
// many tokens.
// Tried: stages filled by cp.async, 98, 57, 104 and 62 us; half of the inner loop, the same.
// Tried beside the kernel before these (then 96 us, expert_decode.cuh 104): the products by wgmma, weights in
// registers, 209 us; each warp copying its own weights by cp.async, 106 us; shares of equal numbers of row tiles,
// whatever the experts' tokens, 133 us; ranges of k a warp, the tokens of up to 16 rows in registers as in
// expert_few.cuh (16 warps; a step of six layers 1,757 us, that one 1,721; with 8 adapters 2,427, that one 2,437).
// Up to 8 rows are faster by expert_few.cuh, which cuts k.
#pragma once

#include <algorithm>

#include "kernels/cuda/mbarrier.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/moe/expert_decode.cuh"

namespace moelora {
namespace stream {

constexpr int kWarpTiles = 2;  // row tiles of a warp: what it loads of the tokens serves both
constexpr int kStrips = 8;     // of kWarpTiles row tiles, at once
constexpr int kTiles = kStrips * kWarpTiles;
constexpr int kTurns = 2;  // warps of a strip: stages of the ring are theirs in turn
constexpr int kMultiplyWarps = kStrips * kTurns;
// Warps that fill: each every kFillWarps-th row tile and token, a copy a lane.
constexpr int kFillWarps = 4;
constexpr int kThreads = 32 * (kMultiplyWarps + kFillWarps);

// Of a thread. Together no more than all threads begin with.
constexpr int kMultiplyRegisters = 112;
constexpr int kFillRegisters = 32;

constexpr int kStageBlocks = 4;  // as many share a group of scales
constexpr int kStageInputs = kStageBlocks * 64;
constexpr int kMaxTokens = 32;
// Shares are cut between groups of row tiles: a strip for each of the SM's schedulers, fewer take as long.
constexpr int kGroupTiles = 4 * kWarpTiles;
constexpr int kTileStageBytes = kStageBlocks * kMxfp4TileBytes;
constexpr int kTokenBytes = kStageInputs * 2;
// Of a token in a stage: lanes of two tokens that load together fall into different banks.
constexpr int kTokenStride = kTokenBytes + 64;
constexpr int kScalesBegin = kTiles * kTileStageBytes;
constexpr int kTokensBegin = kScalesBegin + kTiles * kMxfp4ScaleGroupBytes;
constexpr int kStageBytes = kTokensBegin + kMaxTokens * kTokenStride;
constexpr int kStages = 4;

// Sums that a warp of a strip gives the other one, of up to kGroups groups of 8 tokens.
struct Exchange {
  static constexpr int kGroups = 2;
  float4 of[kStrips][kWarpTiles][kGroups][32];
};
constexpr int kSharedBytes = kStages * kStageBytes + static_cast<int>(sizeof(Exchange));

struct Shared {
  uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t sums_there[kStrips];
  uint64_t sums_read[kStrips];
  int share[2];  // groups of all experts, one after the other: the first of this block, and of the next
  uint16_t expert_begin[kMaxExperts + 1];
};
constexpr int kMaxPairs = (1 << 16) - 1;

__device__ __forceinline__ int groups_of(const ExpertGemm& p) {
  return (p.row_tiles + kGroupTiles - 1) / kGroupTiles;
}

// What a group of an expert of `tokens` tokens takes, measured: of up to 8 tokens limited by memory, of more by
// instructions.
__device__ __forceinline__ int group_cost(int tokens) {
  constexpr int kAll = 92;
  const int rest = tokens % kMaxTokens;
  return tokens / kMaxTokens * kAll + (rest == 0 ? 0 : rest <= 8 ? 58 : rest <= 16 ? 68 : rest <= 24 ? 79 : kAll);
}
// What a block that changes to another expert takes more.
constexpr int kStartCost = 15;

// Cuts the groups of all active experts into shares of about equal cost. By one warp, once the pairs' begins are known.
__device__ __forceinline__ void find_share(const ExpertGemm& p, int num_experts, Shared& shared) {
  const int groups = groups_of(p);
  const auto cost_of = [&](int expert) {
    return expert >= num_experts ? 0 : group_cost(shared.expert_begin[expert + 1] - shared.expert_begin[expert]);
  };
  const auto cost_of_all = [&](int group_costs, int starts) {
    return int64_t{group_costs} * groups + int64_t{starts} * kStartCost;
  };
  int64_t all = 0;
  for (int first = 0; first < num_experts; first += 32) {
    const int cost = cost_of(first + lane_index());
    all += cost_of_all(__reduce_add_sync(0xffffffffu, cost), __popc(__ballot_sync(0xffffffffu, cost != 0)));
  }
  const int64_t ends[2] = {all * blockIdx.x / gridDim.x, all * (blockIdx.x + 1) / gridDim.x};
  int64_t before = 0;
  for (int first = 0; first < num_experts; first += 32) {
    const int expert = first + lane_index();
    const int cost = cost_of(expert);
    const unsigned active = __ballot_sync(0xffffffffu, cost != 0);
    int sum = cost;  // inclusive scan
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, sum, offset);
      sum += lane_index() >= offset ? below : 0;
    }
    const int64_t begin = before + cost_of_all(sum - cost, __popc(active & ((1u << lane_index()) - 1)));
    const int64_t end = begin + cost_of_all(cost, 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (cost != 0 && begin <= ends[i] && (ends[i] < end || (ends[i] == end && end == all))) {
        const auto rest = static_cast<int>(ends[i] - begin) - kStartCost;
        shared.share[i] = expert * groups + (max(rest, 0) + cost / 2) / cost;
      }
    }
    before += cost_of_all(__shfl_sync(0xffffffffu, sum, 31), __popc(active));
  }
}
// Brings pointers that filling looks up first into the L1.
template <class T>
__device__ __forceinline__ void touch(const T* const* from, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    asm volatile("" ::"l"(__ldg(reinterpret_cast<const long long*>(from) + i)));
  }
}
// What is loaded passes the L1, which may hold what the same array said a layer ago.
__device__ __forceinline__ void load_order(const ExpertGemm& p, int num_experts, Shared& shared) {
  for (int i = static_cast<int>(threadIdx.x); i <= num_experts; i += kThreads) {
    shared.expert_begin[i] = static_cast<uint16_t>(__ldcg(p.order.expert_begin + i));
  }
}

// Stages of a round.
__device__ __forceinline__ int stages_of(const ExpertGemm& p) {
  return (p.k_blocks + kStageBlocks - 1) / kStageBlocks;
}

// The share of this block, round by round: up to kTiles row tiles of one expert, and up to kMaxTokens of its tokens.
struct Walk {
  const Shared& shared;
  int item;  // group
  int items_end;
  int expert;
  int tile;   // the first
  int count;  // row tiles
  int pair;   // first sorted pair
  int end;    // end of the expert's pairs

  __device__ __forceinline__ Walk(const ExpertGemm& p, const Shared& s)
      : shared(s), item(s.share[0]), items_end(s.share[1]) {
    locate(p);
  }
  [[nodiscard]] __device__ __forceinline__ bool ended() const { return item >= items_end; }
  [[nodiscard]] __device__ __forceinline__ int tokens() const { return min(end - pair, kMaxTokens); }
  __device__ __forceinline__ void advance(const ExpertGemm& p) {
    if (pair + kMaxTokens < end) {
      pair += kMaxTokens;
    } else {
      item += (count + kGroupTiles - 1) / kGroupTiles;
      locate(p);
    }
  }
  __device__ __forceinline__ void locate(const ExpertGemm& p) {
    const int groups = groups_of(p);
    for (; !ended(); item = (expert + 1) * groups) {
      expert = item / groups;
      pair = shared.expert_begin[expert];
      end = shared.expert_begin[expert + 1];
      if (pair < end) {
        break;
      }
    }
    if (ended()) {
      return;
    }
    const int group = item % groups;
    tile = group * kGroupTiles;
    count = min(min(min(items_end - item, groups - group) * kGroupTiles, kTiles), p.row_tiles - tile);
  }
};

// --- The warps that fill.

// What a lane copies of every stage of a round.
struct Part {
  const std::byte* from = nullptr;  // null: nothing
  int to = 0;                       // in a stage
  uint32_t bytes = 0;
  uint32_t last_bytes = 0;  // of the last stage
  bool is_token = false;
};
__device__ __forceinline__ Part part_of(const ExpertGemm& p, const Walk& walk, int warp) {
  constexpr int kWarpTileCopies = (kTiles + kFillWarps - 1) / kFillWarps;
  constexpr int kWarpTokens = (kMaxTokens + kFillWarps - 1) / kFillWarps;
  static_assert(2 * kWarpTileCopies + kWarpTokens <= 32);
  const int full_stages = stages_of(p) - 1;
  const int lane = lane_index();
  Part part;
  if (lane < 2 * kWarpTileCopies) {
    const int i = lane % kWarpTileCopies * kFillWarps + warp;
    if (i < walk.count) {
      const int64_t tile = walk.tile + i;
      if (lane < kWarpTileCopies) {
        part.from = static_cast<const std::byte*>(p.low[walk.expert]) + tile * p.k_blocks * kMxfp4TileBytes;
        part.to = i * kTileStageBytes;
        part.bytes = kTileStageBytes;
        part.last_bytes = static_cast<uint32_t>((p.k_blocks - full_stages * kStageBlocks) * kMxfp4TileBytes);
      } else {
        part.from =
            reinterpret_cast<const std::byte*>(p.scales[walk.expert]) + tile * stages_of(p) * kMxfp4ScaleGroupBytes;
        part.to = kScalesBegin + i * kMxfp4ScaleGroupBytes;
        part.bytes = kMxfp4ScaleGroupBytes;
        part.last_bytes = kMxfp4ScaleGroupBytes;
      }
    }
  } else {
    const int token = (lane - 2 * kWarpTileCopies) * kFillWarps + warp;
    if (token < walk.tokens()) {
      const int pair = walk.pair + token;
      const int row = p.x_by_pair ? pair : __ldcg(p.order.pair_row + pair);
      part.from = reinterpret_cast<const std::byte*>(p.x + row * p.x_stride);
      part.is_token = true;
      part.to = kTokensBegin + token * kTokenStride;
      part.bytes = kTokenBytes;
      part.last_bytes = static_cast<uint32_t>((p.k - full_stages * kStageInputs) * 2);
    }
  }
  return part;
}

// TOKENS_LATE: the kernel ahead makes the tokens. The weights of the first stages do not wait for it.
template <bool TOKENS_LATE>
__device__ __forceinline__ void fill(const ExpertGemm& p, Shared& shared, std::byte* stages, int warp) {
  RingPlace<kStages> at;
  bool first_round = true;
  for (Walk walk(p, shared); !walk.ended(); walk.advance(p)) {
    Part part = part_of(p, walk, warp);
    const auto sum_of = [&](bool tokens) {
      const bool mine = part.is_token == tokens;
      return uint2{__reduce_add_sync(0xffffffffu, mine ? part.bytes : 0),
                   __reduce_add_sync(0xffffffffu, mine ? part.last_bytes : 0)};
    };
    const uint2 weight_bytes = sum_of(false);
    const uint2 token_bytes = sum_of(true);
    const int num_stages = stages_of(p);
    const auto copy = [&](int nth, int stage) {
      const bool last = nth == num_stages - 1;
      bulk_copy(stages + stage * kStageBytes + part.to, part.from + static_cast<int64_t>(nth) * part.bytes,
                last ? part.last_bytes : part.bytes, &shared.full[stage]);
    };
    int early = 0;  // stages whose weights are on their way
    if (TOKENS_LATE && first_round) {
      early = min(num_stages, kStages);
      for (int nth = 0; nth < early; ++nth) {
        if (lane_index() == 0) {
          mbarrier_expect(&shared.full[nth], nth < num_stages - 1 ? weight_bytes.x : weight_bytes.y);
        }
        __syncwarp();
        if (part.from != nullptr && !part.is_token) {
          copy(nth, nth);
        }
      }
      wait_for_previous();
      let_next_start();
      first_round = false;
    }
    for (int nth = 0; nth < num_stages; ++nth) {
      mbarrier_wait(&shared.empty[at.stage], at.parity ^ 1);
      if (lane_index() == 0) {
        const bool last = nth == num_stages - 1;
        mbarrier_arrive_expect(&shared.full[at.stage], (last ? token_bytes.y : token_bytes.x) +
                                                           (nth < early ? 0 : last ? weight_bytes.y : weight_bytes.x));
      }
      __syncwarp();
      if (part.from != nullptr && (part.is_token || nth >= early)) {
        copy(nth, at.stage);
      }
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

// Of this lane's outputs and tokens: bit 4j + i, whether there is delta[j][i].
template <bool GATE_UP, Deltas DELTAS, int NT>
__device__ __forceinline__ uint32_t deltas_there(const ExpertGemm& p, const Walk& walk) {
  constexpr int kModules = GATE_UP ? 2 : 1;
  uint32_t there = 0;
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pair = walk.pair + 8 * j + 2 * (lane_index() % 4) + i;
      if (pair >= walk.end) {
        continue;
      }
      const int32_t* const adapted = p.lora.adapted + int64_t{pair} * kModules;
      const bool low = DELTAS == Deltas::kAll || adapted[0] != 0;
      const bool high = GATE_UP && DELTAS == Deltas::kMarked ? adapted[1] != 0 : low;
      there |= (low ? 1u : 0u) << (4 * j + i) | (high ? 1u : 0u) << (4 * j + 2 + i);
    }
  }
  return there;
}
// Where there is none, or no output, something that changes no bit.
template <bool GATE_UP, int NT>
__device__ __forceinline__ void load_deltas(float (&delta)[NT][4], const ExpertGemm& p, const Walk& walk, int tile,
                                            uint32_t there) {
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
      delta[j][i] = (there >> (4 * j + i) & 1) != 0 && n_low < p.rows ? low[n_low] : -0.0f;
      delta[j][2 + i] = (there >> (4 * j + 2 + i) & 1) != 0 && n_high < p.rows ? high[n_high] : -0.0f;
    }
  }
}

struct Multiplier {
  const ExpertGemm& p;
  Shared& shared;
  const std::byte* stages;
  Exchange& exchange;
  int strip = warp_index() % kStrips;
  int turn = warp_index() / kStrips;
  uint32_t begun = 0;  // stages before this round
  uint32_t sums_parity = 0;

  // acc += one block: this lane's words and scales, and its chunks of the tokens' inputs, `second` bytes apart.
  template <int NT>
  static __device__ __forceinline__ void multiply_block(float (&acc)[kWarpTiles][NT][4],
                                                        const TilesSource<true>::Block (&blocks)[kWarpTiles],
                                                        const std::byte* tokens, int first, int second) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      uint4 low[kWarpTiles];
      uint4 high[kWarpTiles];
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) {
        TilesSource<true>::chunk(blocks[i], c, low[i], high[i]);
      }
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const uint4 x = *reinterpret_cast<const uint4*>(tokens + 8 * j * kTokenStride + (c == 0 ? first : second));
#pragma unroll
        for (int i = 0; i < kWarpTiles; ++i) {
          mma_chunk(acc[i][j], low[i], high[i], x);
        }
      }
    }
  }
  // acc += a whole stage. Nothing in it branches, so that blocks overlap.
  template <int NT>
  __device__ __forceinline__ void multiply_stage(float (&acc)[kWarpTiles][NT][4], const std::byte* stage) const {
    const std::byte* const data = stage + strip * kWarpTiles * kTileStageBytes + lane_index() * 16;
    const std::byte* const tokens = stage + kTokensBegin + lane_index() / 4 * kTokenStride + lane_index() % 4 * 16;
#pragma unroll
    for (int j = 0; j < kStageBlocks; ++j) {
      TilesSource<true>::Block blocks[kWarpTiles];
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) {
        blocks[i].data = *reinterpret_cast<const uint4*>(data + i * kTileStageBytes + j * kMxfp4TileBytes);
        blocks[i].scales = *reinterpret_cast<const uint32_t*>(scales(stage, i) + 4 * j);
      }
      multiply_block<NT>(acc, blocks, tokens + j * 128, 0, 64);
    }
  }
  // acc += the last stage, of `inputs` inputs. Chunks past the end of k, whose weights are zeros, repeat the last one:
  // what lies there may be no number.
  template <int NT>
  __device__ __forceinline__ void multiply_rest(float (&acc)[kWarpTiles][NT][4], const std::byte* stage,
                                                int inputs) const {
    const int t = lane_index() % 4;
    const std::byte* data = stage + strip * kWarpTiles * kTileStageBytes + lane_index() * 16;
    const std::byte* tokens = stage + kTokensBegin + lane_index() / 4 * kTokenStride;
#pragma unroll 1
    for (int j = 0; 64 * j < inputs; ++j) {
      TilesSource<true>::Block blocks[kWarpTiles];
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) {
        blocks[i].data = *reinterpret_cast<const uint4*>(data + i * kTileStageBytes);
        blocks[i].scales = *reinterpret_cast<const uint32_t*>(scales(stage, i) + 4 * j);
      }
      const int end = min((inputs - 1 - 64 * j) / 8, 7);
      multiply_block<NT>(acc, blocks, tokens, 16 * min(t, end), 16 * min(4 + t, end));
      data += kMxfp4TileBytes;
      tokens += 128;
    }
  }
  // This lane's of a row tile of the strip.
  [[nodiscard]] __device__ __forceinline__ const std::byte* scales(const std::byte* stage, int i) const {
    return stage + kScalesBegin + (strip * kWarpTiles + i) * kMxfp4ScaleGroupBytes + lane_index() / 4 * 16;
  }

  // use(stage, inputs) for every stage of this warp's, when it is there. Afterwards it may be filled again. A place of
  // the ring is always the same warps': others could take its last use for the one that they wait for. Which half of a
  // round's stages a warp has may change with the round; their sum does not.
  template <class Use>
  __device__ __forceinline__ void each_stage(const Use& use) {
    static_assert(kStages % kTurns == 0 && kTurns == 2);
    const int count = stages_of(p);
    for (int s = static_cast<int>((begun + static_cast<uint32_t>(turn)) % kTurns); s < count; s += kTurns) {
      const uint32_t at = begun + static_cast<uint32_t>(s);
      const uint32_t place = at % kStages;
      mbarrier_wait(&shared.full[place], at / kStages % 2);
      use(stages + place * kStageBytes, p.k - s * kStageInputs);
      __syncwarp();
      if (lane_index() == 0) {
        mbarrier_arrive(&shared.empty[place]);
      }
    }
    begun += static_cast<uint32_t>(count);
  }

  // The warp whose stages end first gives its sums to the other one, which finishes the strip while the giver goes on.
  // In parts of kGroups groups of tokens; part n of all is the n-th phase of both barriers.
  template <int NT>
  __device__ __forceinline__ void give(const float (&acc)[kWarpTiles][NT][4]) {
#pragma unroll
    for (int first = 0; first < NT; first += Exchange::kGroups) {
      mbarrier_wait(&shared.sums_read[strip], sums_parity ^ 1);
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) {
#pragma unroll
        for (int j = 0; j < Exchange::kGroups && first + j < NT; ++j) {
          const float(&sum)[4] = acc[i][first + j];
          exchange.of[strip][i][j][lane_index()] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        }
      }
      mbarrier_arrive(&shared.sums_there[strip]);
      sums_parity ^= 1;
    }
  }
  template <int NT>
  __device__ __forceinline__ void take(float (&acc)[kWarpTiles][NT][4]) {
#pragma unroll
    for (int first = 0; first < NT; first += Exchange::kGroups) {
      mbarrier_wait(&shared.sums_there[strip], sums_parity);
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) {
#pragma unroll
        for (int j = 0; j < Exchange::kGroups && first + j < NT; ++j) {
          const float4 part = exchange.of[strip][i][j][lane_index()];
          float(&sum)[4] = acc[i][first + j];
          sum[0] += part.x;
          sum[1] += part.y;
          sum[2] += part.z;
          sum[3] += part.w;
        }
      }
      mbarrier_arrive(&shared.sums_read[strip]);
      sums_parity ^= 1;
    }
  }

  // By the warp that gives: the other one finishes a stage later and does not wait for the deltas.
  template <bool GATE_UP, Deltas DELTAS, int NT>
  __device__ __forceinline__ void add_deltas(float (&acc)[kWarpTiles][NT][4], const Walk& walk) const {
    const uint32_t there = deltas_there<GATE_UP, DELTAS, NT>(p, walk);
    constexpr int kTogether = NT <= 2 ? kWarpTiles : 1;
#pragma unroll
    for (int first = 0; first < kWarpTiles; first += kTogether) {
      float delta[kTogether][NT][4];
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        load_deltas<GATE_UP, NT>(delta[t], p, walk, walk.tile + kWarpTiles * strip + first + t, there);
      }
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            acc[first + t][j][i] += delta[t][j][i];
          }
        }
      }
    }
  }

  template <bool GATE_UP, Deltas DELTAS, int NT>
  __device__ __forceinline__ void run(const Walk& walk) {
    if (kWarpTiles * strip >= walk.count) {
      // A warp without a row tile says that it has read what it waited for.
      return each_stage([](const std::byte*, int) {});
    }
    const bool finishes = (begun + static_cast<uint32_t>(stages_of(p) - 1)) % kTurns == static_cast<uint32_t>(turn);
    float acc[kWarpTiles][NT][4] = {};
    each_stage([&](const std::byte* stage, int inputs) {
      if (inputs >= kStageInputs) {
        multiply_stage<NT>(acc, stage);
      } else {
        multiply_rest<NT>(acc, stage, inputs);
      }
    });
    if (!finishes) {
      if constexpr (DELTAS != Deltas::kNone) {
        wait_for_previous();  // the deltas are there
        add_deltas<GATE_UP, DELTAS, NT>(acc, walk);
      }
      return give<NT>(acc);
    }
    take<NT>(acc);
#pragma unroll
    for (int t = 0; t < kWarpTiles; ++t) {
      const int own = kWarpTiles * strip + t;
      if (own >= walk.count) {
        break;
      }
      const float2 bias = tile_bias<GATE_UP>(p, walk.expert, walk.tile + own);
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const int pair = walk.pair + 8 * j;
        if (pair < walk.end) {
          finish_tile<GATE_UP>(acc[t][j], p, bias, walk.tile + own, pair, walk.end);
        }
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
      } else if (tokens <= 24) {
        run<GATE_UP, DELTAS, 3>(walk);
      } else {
        run<GATE_UP, DELTAS, 4>(walk);
      }
    }
  }
};

// With LoRA the kernel ahead computes the deltas, and all else was complete before this kernel began. Without it the
// kernel ahead of moe_down is moe_gate_up, which passed its wait before this kernel began, so that the order was
// complete then and the tokens alone are to come.
template <bool GATE_UP, Deltas DELTAS>
__global__ void __launch_bounds__(kThreads, 1)
    expert_stream(const __grid_constant__ ExpertGemm p, int num_experts) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr bool kTokensLate = !GATE_UP && DELTAS == Deltas::kNone;
  // Copies whose source and place differ by no multiple of 32 bytes ask the L2 for a quarter more.
  extern __shared__ __align__(128) uint4 dynamic_shared[];
  __shared__ Shared shared;
  auto* const stages = reinterpret_cast<std::byte*>(dynamic_shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.full[i], kFillWarps);
      mbarrier_init(&shared.empty[i], kStrips);
    }
    for (int i = 0; i < kStrips; ++i) {
      mbarrier_init(&shared.sums_there[i], 32);
      mbarrier_init(&shared.sums_read[i], 32);
    }
    publish_barriers();
  }
  touch(p.low, num_experts);
  touch(p.scales, num_experts);
  if (GATE_UP && DELTAS == Deltas::kNone) {
    wait_for_previous();
  }
  if (!kTokensLate) {
    let_next_start();
  }
  load_order(p, num_experts, shared);
  __syncthreads();
  if (warp_index() == 0) {
    find_share(p, num_experts, shared);
  }
  __syncthreads();
  if (warp_index() < kMultiplyWarps) {
    take_registers<kMultiplyRegisters>();
    auto& exchange = *reinterpret_cast<Exchange*>(stages + kStages * kStageBytes);
    Multiplier{p, shared, stages, exchange}.template run_all<GATE_UP, DELTAS>();
  } else {
    give_registers<kFillRegisters>();
    fill<kTokensLate>(p, shared, stages, warp_index() - kMultiplyWarps);
  }
  wait_for_previous();  // in every block: its end must mean that all before it has ended
#endif
}

template <bool GATE_UP, Deltas DELTAS>
bool launch_of(const ExpertGemm& p, int num_experts, const CudaStream& state) {
  constexpr auto kKernel = expert_stream<GATE_UP, DELTAS>;
  static const bool has_it = has_code(kKernel);
  if (!has_it) {
    return false;
  }
  if (cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes) != cudaSuccess) {
    cudaGetLastError();  // a GPU with less
    return false;
  }
  launch_dependent(kKernel, dim3(static_cast<unsigned>(state.num_sms)), kThreads, kSharedBytes, state, p, num_experts);
  return true;
}

}  // namespace stream

// False where the GPU or its code has no bulk copies, or too little shared memory: nothing was launched. `all_deltas`:
// with adapters there is a delta for every pair and module.
template <bool GATE_UP>
bool launch_expert_stream(const ExpertGemm& p, bool all_deltas, int num_experts, int num_pairs,
                          const CudaStream& state) {
  using stream::Deltas;
  if (state.compute_capability < 90 || num_pairs > stream::kMaxPairs) {
    return false;
  }
  if (p.lora.row_slot == nullptr) {
    return stream::launch_of<GATE_UP, Deltas::kNone>(p, num_experts, state);
  }
  return all_deltas ? stream::launch_of<GATE_UP, Deltas::kAll>(p, num_experts, state)
                    : stream::launch_of<GATE_UP, Deltas::kMarked>(p, num_experts, state);
}

}  // namespace moelora
