// SPDX-License-Identifier: Apache-2.0
// Expert products of few tokens an expert: a stream of weights with a little arithmetic beside it. The grid stays on
// the device and walks the work: (active expert, one or two neighbouring row tiles, up to 16 of its tokens). The warps
// of a unit cut the inputs of an item into contiguous ranges. Each warp runs its own ring of blocks of 64 inputs in
// shared memory (kernels/moe/expert_stream.cuh), filled by asynchronous copies that run ahead across work items, so
// that loads are in flight while others sum up, and no register waits for memory. Token chunks come from L1: the units
// of an SM work on neighbouring items. Partial sums meet in shared memory and are added in the order of the warps: a
// token's bits depend on its own row, k and its adapter alone.
// With LoRA the deltas are computed before the first items' end (kernels/moe/expert_expand.cuh) and added at an item's
// end.
// MXFP4 is limited by issuing instructions: 80 of them a row tile and block for 9 to 16 tokens, 61 of which expand and
// multiply; 16 to 24 warps an SM, by registers.
// Tried: items of 8 warps and one block of MXFP4 weights a step, two blocks an SM (156 instructions a row tile and
// block, a third of them of items as such; tokens from L2, more bytes than the weights; gpt-oss shape, 64 rows: 134 us
// of gate_up). For LoRA: an expand by mma in the finishing warp, adapter by adapter (64 rows of Qwen3-30B-A3B's shape,
// 8 adapters: gate_up 656 us, 200 without adapters); one, then two warps of deltas beside the stream, look-ups three
// items ahead and B prefetched (gpt-oss shape: 347 and 288 us, 120 without); a launch of its own (200 us).
#pragma once

#include <algorithm>

#include "kernels/cuda/wgmma.cuh"
#include "kernels/moe/expert_stream.cuh"

namespace moelora {

constexpr int kDecodeTokens = 16;  // of a work item, in two groups of 8

// Division of numbers below 2^31 by one that the host knows.
struct Divider {
  uint32_t divisor;
  uint32_t multiplier;
  uint32_t shift;
  explicit Divider(uint32_t by) : divisor(by), shift(0) {
    while ((uint64_t{1} << shift) < by) {
      ++shift;
    }
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - by) << 32) / by + 1);
  }
  [[nodiscard]] __device__ __forceinline__ int quotient(int n) const {
    const auto dividend = static_cast<uint32_t>(n);
    return static_cast<int>((__umulhi(dividend, multiplier) + dividend) >> shift);
  }
};

// What is known when the kernel is launched.
struct ExpertShares {
  Divider tile_groups;  // items of an expert
  Divider units;        // of the grid; a unit is the warps that share an item
  int units_of_block;
};

// A work item: kRowTiles row tiles of one expert times all of its tokens, kDecodeTokens at a time.
struct ExpertWork {
  int expert;
  int tile;  // first row tile
  int pair;  // first sorted pair
  int end;   // end of the expert's pairs
};

// Items are ordered by expert, then by row tiles. A unit (the warps that share an item) takes one item a round: in full
// rounds the units of a block neighbouring ones, which use the same tokens; in the last round they are spread over all
// blocks.
struct ExpertWalk {
  int items;
  int units;
  int full;       // items of full rounds
  int neighbour;  // this unit's place in full rounds
  int spread;     // and in the last one

  ExpertWalk() = default;
  __device__ __forceinline__ ExpertWalk(const ExpertGemm& p, const ExpertShares& shares, int unit)
      : items(__ldg(p.order.num_active) * static_cast<int>(shares.tile_groups.divisor)),
        units(static_cast<int>(shares.units.divisor)),
        full(shares.units.quotient(items) * units),
        neighbour(static_cast<int>(blockIdx.x) * shares.units_of_block + unit),
        spread(unit * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)) {}
  // This unit's item of the round that begins with item `round`.
  [[nodiscard]] __device__ __forceinline__ int item(int round) const {
    return round + (round < full ? neighbour : spread);
  }
  [[nodiscard]] __device__ __forceinline__ bool there(int round) const { return item(round) < items; }
};

template <class WeightStream>
__device__ __forceinline__ ExpertWork work_of(const ExpertGemm& p, const Divider& tile_groups, int item) {
  const int active = tile_groups.quotient(item);
  const int expert = __ldg(p.order.active_experts + active);
  return {expert, (item - active * static_cast<int>(tile_groups.divisor)) * WeightStream::kRowTiles,
          __ldg(p.order.expert_begin + expert), __ldg(p.order.expert_begin + expert + 1)};
}

// What a warp needs once an item or pass, in shared memory: registers are what limits the warps an SM.
struct WarpState {
  ExpertWalk walk;
  int begin;   // this warp's share of k: first group of blocks,
  int blocks;  // and how many blocks
  // The item that copies have come to.
  struct Copies {
    int round;
    int passes;  // over it that are still to come after this one
  } copies;
  // That of the products.
  struct Products {
    ExpertWork work;
    int round;
    int turn;  // number of the pass
  } products;
};
template <class T>
__device__ __forceinline__ void keep(T& shared, const T& value) {
  __syncwarp();  // what was there before was read
  if (lane_index() == 0) {
    shared = value;
  }
  __syncwarp();
}

// A warp's ring. Copies refill a block's place as soon as it was read, with the block that many groups further on,
// across work items. Every refill closes one group of copies, so that groups count blocks.
template <class WeightStream>
struct WeightRing {
  static constexpr int kBytes = WeightStream::kStages * WeightStream::kStageBytes;
  static constexpr int kDepth = WeightStream::kStages * WeightStream::kGroup;
  using Place = typename WeightStream::Place;
  Place first;
  Place stage;          // read and refilled next
  WeightStream stream;  // of the copies
  int todo;             // blocks of their pass from this group on, 0 = no more items

  // The first pass over the item of `round`, or the end.
  __device__ __forceinline__ void enter(const ExpertGemm& p, const Divider& tile_groups, WarpState& state, int round) {
    todo = 0;
    if (state.blocks > 0 && state.walk.there(round)) {
      const ExpertWork work = work_of<WeightStream>(p, tile_groups, state.walk.item(round));
      keep(state.copies, {round, (work.end - work.pair - 1) / kDecodeTokens});
      stream.locate(p, work.expert, work.tile, state.begin);
      todo = state.blocks;
    }
  }
  // Refills block q of the stage.
  __device__ __forceinline__ void refill(int q) const {
    if (q < todo) {
      stream.copy(stage, q);
    }
    async_commit();
  }
  // After the last block of a stage.
  __device__ __forceinline__ void next_stage(const ExpertGemm& p, const Divider& tile_groups, WarpState& state) {
    if constexpr (WeightStream::kStages > 1) {
      stage = stage == first + (kBytes - WeightStream::kStageBytes) ? first : stage + WeightStream::kStageBytes;
    }
    if (todo > WeightStream::kGroup) {
      todo -= WeightStream::kGroup;
      stream.advance();
    } else if (todo > 0) {
      const WarpState::Copies copies = state.copies;
      if (copies.passes > 0) {
        keep(state.copies, {copies.round, copies.passes - 1});
        todo = state.blocks;
        stream.rewind((todo - 1) / WeightStream::kGroup);
      } else {
        enter(p, tile_groups, state, copies.round + state.walk.units);
      }
    }
  }
};

template <int NT>
__device__ __forceinline__ void load_chunk(uint4 (&x)[NT], const uint4* const (&token)[2], int at) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    x[j] = __ldg(token[j] + at);
  }
}

// Block q of a group. x: this lane's token chunks from the block's first one on, replaced by those that follow;
// `last`: the largest place of a chunk, from token[] on, that exists. WHOLE: those of the whole group exist.
template <bool WHOLE, int NT, class WeightStream>
__device__ __forceinline__ void multiply_block(float (&acc)[WeightStream::kRowTiles][2][4],
                                               uint4 (&x)[WeightStream::kChunksAhead][NT],
                                               typename WeightStream::Shared& shared, WeightRing<WeightStream>& ring,
                                               const uint4* const (&token)[2], int q, int last) {
  constexpr int kAhead = WeightStream::kChunksAhead;
  async_wait<WeightRing<WeightStream>::kDepth - 1>();  // the block is there
  if (q == 0) {
    WeightStream::open(shared, ring.stage);
  }
  typename WeightStream::Block block;
  WeightStream::fetch(block, ring.stage, q);
  ring.refill(q);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    uint4(&values)[NT] = x[c % kAhead];
#pragma unroll
    for (int i = 0; i < WeightStream::kRowTiles; ++i) {
      uint4 low;
      uint4 high;
      WeightStream::chunk(block, shared, i, c, low, high);
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        mma_chunk(acc[i][j], low, high, values[j]);
      }
    }
    const int at = 8 * q + 4 * (c + kAhead);
    load_chunk<NT>(values, token, WHOLE && at < 8 * WeightStream::kGroup ? at : min(at, last));
  }
  WeightStream::next_block(shared);
}

// One pass over a work item, this warp's share of k. token[j]: this lane's first chunk of its token in group j. Chunks
// past the last one repeat it: their weights are zeros.
template <int NT, class WeightStream>
__device__ __forceinline__ void multiply(float (&acc)[WeightStream::kRowTiles][2][4], const ExpertGemm& p,
                                         const Divider& tile_groups, WarpState& state, WeightRing<WeightStream>& ring,
                                         const uint4* (&token)[2]) {
  constexpr int kGroup = WeightStream::kGroup;
  constexpr int kUnroll = kGroup == 1 ? 2 : 1;
  const int begin = kGroup * state.begin;
  const int blocks = state.blocks;
  const bool whole = blocks % kGroup == 0 && 64 * (begin + blocks) <= p.k;  // the last group, too
  int last = p.k / 8 - 1 - lane_index() % 4 - 8 * begin;
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    token[j] += 8 * begin;
  }
  uint4 x[WeightStream::kChunksAhead][NT];
#pragma unroll
  for (int c = 0; c < WeightStream::kChunksAhead; ++c) {
    load_chunk<NT>(x[c], token, min(4 * c, last));
  }
#pragma unroll kUnroll
  for (int todo = blocks; todo > 0; todo -= kGroup) {
    typename WeightStream::Shared shared;
    if (kGroup > 1 && (todo > kGroup || whole)) {
#pragma unroll
      for (int q = 0; q < kGroup; ++q) {
        if (q >= todo) {
          break;  // never, but without branches the compiler fetches all blocks at once and runs out of registers
        }
        multiply_block<true, NT>(acc, x, shared, ring, token, q, last);
      }
    } else {
#pragma unroll 1
      for (int q = 0; q < kGroup; ++q) {
        if (q < todo) {
          multiply_block<false, NT>(acc, x, shared, ring, token, q, last);
        } else {
          ring.refill(q);
        }
      }
    }
    ring.next_stage(p, tile_groups, state);
    last -= 8 * kGroup;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      token[j] += 8 * kGroup;
    }
  }
}

// The part of a work item that one warp finishes: row tile i of the item and token group j. Roles move from turn to
// turn, so that no warp is always the late one.
struct ExpertRole {
  bool active;
  int i;
  int j;
};
template <class WeightStream>
__device__ __forceinline__ ExpertRole role_of(const ExpertGemm& p, const ExpertWork& work, int warp, int turn) {
  constexpr int kRowTiles = WeightStream::kRowTiles;
  const int index = (warp + turn * kRowTiles) % WeightStream::kItemWarps;
  const int groups = work.pair + 8 < work.end ? 2 : 1;
  return {index < kRowTiles * groups && work.tile + index % kRowTiles < p.row_tiles, index % kRowTiles,
          index / kRowTiles};
}

// Sums of a unit's warps over the inputs: [warp][row tile][group][lane].
template <class WeightStream>
struct PartialSums {
  static constexpr int kBuffers =
      WeightStream::kRowTiles == 1 ? 2 : 1;  // two in turn, where there is room: one barrier
  float4 at[WeightStream::kItemWarps][WeightStream::kRowTiles][2][32];
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

// So that the bias is near when the role is finished.
template <bool GATE_UP>
__device__ __forceinline__ void prefetch_bias(const ExpertGemm& p, const ExpertWork& work, const ExpertRole& role) {
  const int n = (GATE_UP ? 8 : 16) * (work.tile + role.i) + lane_index() / 4;
  if (!role.active || n >= p.rows) {
    return;
  }
  const int64_t at = int64_t{work.expert} * p.rows + n;
  if (p.low_bias != nullptr) {
    prefetch_l2(p.low_bias + at);
  }
  if (GATE_UP && p.high_bias != nullptr) {
    prefetch_l2(p.high_bias + at);
  }
}

template <bool GATE_UP, class WeightStream, bool LORA>
__device__ __forceinline__ void finish_role(const PartialSums<WeightStream>& partial, const ExpertGemm& p,
                                            const ExpertWork& work, const ExpertRole& role) {
  float sum[4] = {};
#pragma unroll
  for (int warp = 0; warp < WeightStream::kItemWarps; ++warp) {
    const float4 part = partial.at[warp][role.i][role.j][lane_index()];
    sum[0] += part.x;
    sum[1] += part.y;
    sum[2] += part.z;
    sum[3] += part.w;
  }
  if (LORA) {
    add_deltas<GATE_UP>(sum, p, work.tile + role.i, work.pair + 8 * role.j, work.end);
  }
  finish_tile<GATE_UP>(sum, p, work.expert, work.tile + role.i, work.pair + 8 * role.j, work.end);
}

// Of the warps that share an item.
template <class WeightStream>
__device__ __forceinline__ void sync_unit() {
  if constexpr (WeightStream::kItemWarps == WeightStream::kWarps) {
    __syncthreads();
  } else {
    barrier_sync(1 + warp_index() / WeightStream::kItemWarps, 32 * WeightStream::kItemWarps);
  }
}

// One pass: the products of this warp's share of k, and what it finishes of the sums.
template <bool GATE_UP, class WeightStream, bool LORA>
__device__ __forceinline__ void run_pass(PartialSums<WeightStream>* partial, const ExpertGemm& p,
                                         const Divider& tile_groups, WarpState& state, WeightRing<WeightStream>& ring) {
  constexpr int kBuffers = PartialSums<WeightStream>::kBuffers;
  float acc[WeightStream::kRowTiles][2][4] = {};
  {
    const auto [work, round, turn] = state.products;
    prefetch_bias<GATE_UP>(p, work, role_of<WeightStream>(p, work, warp_index() % WeightStream::kItemWarps, turn));
    const uint4* token[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      // Where there is no token, the first one stands in: what that gives reaches its own column alone, and nobody
      // stores that.
      const int pair = work.pair + 8 * j + lane_index() / 4;
      token[j] = token_row(p, pair < work.end ? pair : work.pair) + lane_index() % 4;
    }
    if (work.pair + 8 < work.end) {
      multiply<2>(acc, p, tile_groups, state, ring, token);
    } else {
      multiply<1>(acc, p, tile_groups, state, ring, token);
    }
  }
  const auto [work, round, turn] = state.products;
  const int warp = warp_index() % WeightStream::kItemWarps;
  PartialSums<WeightStream>& sums = partial[turn % kBuffers];
  if (kBuffers == 1) {
    sync_unit<WeightStream>();  // the sums of the pass before were read
  }
#pragma unroll
  for (int i = 0; i < WeightStream::kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (j == 0 || work.pair + 8 < work.end) {
        sums.at[warp][i][j][lane_index()] = make_float4(acc[i][j][0], acc[i][j][1], acc[i][j][2], acc[i][j][3]);
      }
    }
  }
  if (LORA && turn == 0) {
    wait_for_previous();  // the deltas are there
  }
  sync_unit<WeightStream>();  // the sums of all warps are there
  const ExpertRole role = role_of<WeightStream>(p, work, warp, turn);
  if (role.active) {
    finish_role<GATE_UP, WeightStream, LORA>(sums, p, work, role);
  }
}

// Bytes of shared memory of a unit: its sums and its warps' rings.
template <class WeightStream>
constexpr int kUnitBytes = PartialSums<WeightStream>::kBuffers * static_cast<int>(sizeof(PartialSums<WeightStream>)) +
                           WeightStream::kItemWarps * WeightRing<WeightStream>::kBytes;

template <bool GATE_UP, class WeightStream, bool LORA>
__global__ void __launch_bounds__(32 * WeightStream::kWarps, WeightStream::kBlocksPerSm)
    expert_decode_kernel(const __grid_constant__ ExpertGemm p, const __grid_constant__ ExpertShares shares) {
  const Divider& tile_groups = shares.tile_groups;
  constexpr int kItemWarps = WeightStream::kItemWarps;
  using Ring = WeightRing<WeightStream>;
  using Sums = PartialSums<WeightStream>;
  __shared__ WarpState states[WeightStream::kWarps];
  extern __shared__ uint4 dynamic_shared[];
  WeightStream::prefetch_pointers(p);  // what the host wrote can be read at any time
  if (!LORA) {
    wait_for_previous();  // with LoRA all but the deltas was complete before this kernel began
  }
  let_next_start();
  // Look-ups one after the other find these near.
  for_lines(p.order.active_experts, p.num_experts, prefetch_l1);
  for_lines(p.order.expert_begin, p.num_experts + 1, prefetch_l1);
  const int unit = warp_index() / kItemWarps;
  const int warp = warp_index() % kItemWarps;
  const int k_groups = (p.k_blocks + WeightStream::kGroup - 1) / WeightStream::kGroup;
  const int begin = k_groups * warp / kItemWarps;
  const int end = k_groups * (warp + 1) / kItemWarps;
  WarpState& state = states[warp_index()];
  const int blocks = min(WeightStream::kGroup * (end - begin), p.k_blocks - WeightStream::kGroup * begin);
  keep(state, {ExpertWalk(p, shares, unit), begin, blocks, {}, {}});
  std::byte* const unit_memory = reinterpret_cast<std::byte*>(dynamic_shared) + unit * kUnitBytes<WeightStream>;
  auto* const partial = reinterpret_cast<Sums*>(unit_memory);
  Ring ring;
  ring.first = WeightStream::place(unit_memory + Sums::kBuffers * sizeof(Sums) + warp * Ring::kBytes);
  ring.stage = ring.first;
  ring.enter(p, tile_groups, state, 0);
#pragma unroll 1
  for (int s = 0; s < WeightStream::kStages; ++s) {
#pragma unroll
    for (int q = 0; q < WeightStream::kGroup; ++q) {
      ring.refill(q);
    }
    ring.next_stage(p, tile_groups, state);
  }
  WarpState::Products now{};
  while (state.walk.there(now.round)) {
    now.work = work_of<WeightStream>(p, tile_groups, state.walk.item(now.round));
    while (now.work.pair < now.work.end) {
      keep(state.products, now);
      run_pass<GATE_UP, WeightStream, LORA>(partial, p, tile_groups, state, ring);
      now = state.products;
      now.work.pair += kDecodeTokens;
      ++now.turn;
    }
    now.round += state.walk.units;
  }
  if (LORA) {
    wait_for_previous();  // also in a block without an item: its end must mean that all before it has ended
  }
  async_wait<0>();
}

// Units of a block: as many as a stream wants and this GPU's shared memory holds.
template <class WeightStream>
int decode_units() {
  int device = 0;
  int bytes = 0;
  check_cuda(cudaGetDevice(&device), "device of the expert product");
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "shared memory of the device");
  bytes -= WeightStream::kWarps * static_cast<int>(sizeof(WarpState));
  return std::min(WeightStream::kWarps / WeightStream::kItemWarps, bytes / kUnitBytes<WeightStream>);
}

template <bool GATE_UP, class WeightStream, bool LORA>
void launch_expert_decode_of(const ExpertGemm& p, int max_active, const CudaStream& state) {
  constexpr auto kKernel = expert_decode_kernel<GATE_UP, WeightStream, LORA>;
  const int units = decode_units<WeightStream>();
  const int shared_bytes = units * kUnitBytes<WeightStream>;
  check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
             "shared memory of the expert product");
  const int tile_groups = (p.row_tiles + WeightStream::kRowTiles - 1) / WeightStream::kRowTiles;
  // With few items all SMs have some before one has two.
  const auto grid = static_cast<unsigned>(
      std::min<int64_t>(int64_t{max_active} * tile_groups, int64_t{state.num_sms} * WeightStream::kBlocksPerSm));
  const ExpertShares shares{Divider(static_cast<uint32_t>(tile_groups)), Divider(grid * static_cast<unsigned>(units)),
                            units};
  launch_dependent(kKernel, dim3(grid), static_cast<unsigned>(32 * WeightStream::kItemWarps * units),
                   static_cast<size_t>(shared_bytes), state, p, shares);
}
template <bool GATE_UP, class WeightStream>
void launch_expert_decode(const ExpertGemm& p, int max_active, const CudaStream& state) {
  if (p.lora.row_slot != nullptr) {
    launch_expert_decode_of<GATE_UP, WeightStream, true>(p, max_active, state);
  } else {
    launch_expert_decode_of<GATE_UP, WeightStream, false>(p, max_active, state);
  }
}

}  // namespace moelora
