// SPDX-License-Identifier: Apache-2.0
// Expert products of at most 8 rows, so that an expert has at most 8 tokens and they are one operand of an mma. A block
// takes a contiguous share of all (active expert, row tile). Its 8 warps are KW ranges of k beside 8 / KW row tiles;
// a warp keeps the tokens' part of its range in registers for as long as the expert stays the same, and has a place in
// shared memory for each block of its range, which is filled again, by asynchronous copies from the next row tile, as
// soon as it was read: nothing but weights is read on the way, and no warp waits for another but every kSlots row
// tiles, when the partial sums meet in shared memory and are added in the order of the warps. A token's bits depend on
// its own row, k and its adapter.
// Tables of pointers are read before the wait for the kernel ahead. LoRA: kernels/moe/expert_delta.cuh before it or, of
// one row of MXFP4, kernels/moe/expert_few_lora.cuh inside.
// H200, six layers of the gpt-oss shape as one graph, by this and by expert_decode.cuh: 1 row 598 us (677), with an
// adapter 705 (731), 8 rows with 8 adapters 1,023 (1,178); of Qwen3-30B-A3B 451 (474), with an adapter 548 (584).
// Tried: twice the shared memory for partial sums, so that one barrier is enough (1 row 752 us instead of 632: less L1
// is left beside it, and the SM has to run empty before it changes that share, see prefer_shared); moe_down's first
// weights asked into the L2 at the end of moe_gate_up (637 us instead of 632); the next weights in registers instead of
// shared memory (gpt-oss shape, 1 row, gate_up 26.6 us): loads share six scoreboards, so that a wait for one is a wait
// for younger ones.
#pragma once

#include <algorithm>

#include "kernels/moe/expert_decode.cuh"
#include "kernels/moe/expert_delta.cuh"
#include "kernels/moe/expert_few_lora.cuh"

namespace moelora {
namespace few {

// This lane's view of a warp's range of k of a row tile: copy() starts block i of it on its way.
template <bool GATE_UP>
struct RowsRange {
  using Source = RowsSource<GATE_UP>;
  static constexpr int kSlots = 4;  // row tiles between two barriers
  template <int KW>
  static constexpr int kBlocks = KW == 8 ? 4 : 3;  // that fit into registers
  static constexpr int kTileRows = GATE_UP ? 8 : 16;
  __device__ __forceinline__ void locate(const ExpertGemm& p, const WeightPointers& pointers, int tile, int begin) {
    const int g = lane_index() / 4;
    const int t = lane_index() % 4;
    const int64_t n_low = kTileRows * tile + g;
    const int64_t n_high = GATE_UP ? n_low : n_low + 8;
    const int64_t row_chunks = p.k / 8;
    const int chunk = 8 * begin + t;
    low_ = static_cast<const uint4*>(pointers.low) + n_low * p.low_step * row_chunks + chunk;
    high_ = static_cast<const uint4*>(pointers.high) + n_high * p.high_step * row_chunks + chunk;
  }
  __device__ __forceinline__ void advance(const ExpertGemm& p, int tiles) {
    low_ += static_cast<int64_t>(tiles * kTileRows * p.low_step) * (p.k / 8);
    high_ += static_cast<int64_t>(tiles * kTileRows * p.high_step) * (p.k / 8);
  }
  __device__ __forceinline__ void copy(std::byte* stage, int i) const {
    uint4* to = reinterpret_cast<uint4*>(stage) + lane_index();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      async_copy16(to + 64 * c, low_ + 8 * i + 4 * c);
      async_copy16(to + 64 * c + 32, high_ + 8 * i + 4 * c);
    }
  }

 private:
  const uint4* low_;
  const uint4* high_;
};

// LEAN: places of scales are found when they are needed, since the registers that would keep them are.
template <bool GATE_UP, bool LEAN = false>
struct TilesRange {
  using Source = TilesSource<GATE_UP>;
  static constexpr int kSlots = 8;
  template <int KW>
  static constexpr int kBlocks = KW == 8 ? 6 : 4;
  __device__ __forceinline__ void locate(const ExpertGemm& p, const WeightPointers& pointers, int tile, int begin) {
    const int64_t groups = (p.k_blocks + 3) / 4;
    data_ = static_cast<const uint4*>(pointers.low) + (int64_t{tile} * p.k_blocks + begin) * 32 + lane_index();
    scales_ = static_cast<const uint32_t*>(pointers.high) + tile * groups * 32 + lane_index() / 4 * 4;
    begin_ = static_cast<uint32_t>(begin);
  }
  __device__ __forceinline__ void advance(const ExpertGemm& p, int tiles) {
    data_ += tiles * p.k_blocks * 32;
    scales_ += tiles * ((p.k_blocks + 3) / 4) * 32;
  }
  __device__ __forceinline__ void copy(std::byte* stage, int i) const {
    uint32_t b = begin_ + static_cast<uint32_t>(i);
    if constexpr (LEAN) {
      asm volatile("" : "+r"(b));
    }
    async_copy16(stage + 16 * lane_index(), data_ + 32 * i);
    async_copy4(stage + 512 + 4 * lane_index(), scales_ + (b / 4 * 32 + b % 4));  // four blocks share a cache line
  }

 private:
  const uint4* data_;
  const uint32_t* scales_;
  uint32_t begin_;
};

// Beside the deltas of kernels/moe/expert_delta.cuh an SM has room for one block; the other begins when they are
// through, and has less to do for that: as many bytes of weights as an SM has of adapters, or a share of that. H200,
// gpt-oss's shape, 8 rows with 8 adapters, six layers as one graph: 954 us, with equal shares 969; of moe_gate_up, 0.25
// 960, 1 970.
constexpr double kLateShare = 0.5;
constexpr double kLateShareDown = 1.0;
struct Late {
  int first;    // of the late blocks, or 0: there are none
  float tiles;  // row tiles for each segment and rank of the deltas
  // The first row tile of a block's share of `total`; late blocks have up to `less` fewer than others.
  __device__ __forceinline__ int share_begin(uint32_t total, uint32_t less, uint32_t block) const {
    const auto early = static_cast<uint32_t>(first);
    if (early == 0) {
      return static_cast<int>(total * block / gridDim.x);
    }
    const uint32_t fewer = min(less, total / early);
    const uint32_t all = total + fewer * (gridDim.x - early);
    return static_cast<int>(all * block / gridDim.x - fewer * (block > early ? block - early : 0));
  }
};

// The pairs of a step, as moe_route left them.
struct Order {
  int num_active;
  int expert[kPairsMax];  // active ones
  int begin[kPairsMax];   // of their pairs
  int end[kPairsMax];
  int row[kPairsMax];  // of x
};

template <class Range, int KW>
struct Shared {
  static constexpr int kBlocks = Range::template kBlocks<KW>;
  alignas(16) std::byte weights[kWarps][kBlocks][Range::Source::kStageBytes];
  float4 partial[Range::kSlots][KW][32];
  WeightPointers pointers[kExpertsMax];
  int expert_begin[kExpertsMax + 1];
  Order order;
  int first;  // of the block's share
  int last;
};
template <class Range, int KW, bool GATE_UP>
struct SharedWithTail : Shared<Range, KW> {
  Adapters<GATE_UP> adapters[kWarps];
  uint32_t items;  // of the shrink beside
};
template <bool GATE_UP, class Range, int KW, Lora LORA>
using SharedOf = std::conditional_t<LORA == Lora::kBeside, SharedWithTail<Range, KW, GATE_UP>, Shared<Range, KW>>;

// By the whole block. What is loaded passes the L1, which may hold what the same arrays said a layer ago. kBeside: also
// the items of the shrink, of which each segment has so many.
template <Lora LORA, class Shared>
__device__ __forceinline__ void load_order(const ExpertGemm& p, int num_pairs, int num_experts, Shared& s,
                                           int items_of_segment, Items& items, const Late& late) {
  constexpr bool BESIDE = LORA == Lora::kBeside;
  const int i = static_cast<int>(threadIdx.x);
  int expert = 0;
  uint32_t less = 0;  // row tiles of late blocks
  if (i < num_pairs) {
    s.order.row[i] = p.x_by_pair ? i : __ldcg(p.order.pair_row + i);
  }
  if (i == kThreads - 1) {
    s.order.num_active = __ldcg(p.order.num_active);
  }
  if constexpr (BESIDE) {
    items.count = __ldcg(p.order.num_segments) * items_of_segment;
  }
  if (LORA == Lora::kDeltas && i == kThreads - 1) {
    const int ranks = __ldcg(p.order.num_segments) * __ldcg(p.lora.max_rank);
    less = static_cast<uint32_t>(late.tiles * static_cast<float>(ranks));
  }
  const bool may_be_active = i < min(num_pairs, num_experts);
  if (may_be_active) {
    expert = __ldcg(p.order.active_experts + i);
  }
  for (int e = i; e <= num_experts; e += kThreads) {
    s.expert_begin[e] = __ldcg(p.order.expert_begin + e);
  }
  __syncthreads();
  if (i == kThreads - 1) {
    const auto total = static_cast<uint32_t>(s.order.num_active * p.row_tiles);
    if constexpr (BESIDE) {
      s.first = share_begin(static_cast<int>(total), items, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
      s.last =
          share_begin(static_cast<int>(total), items, static_cast<int>(blockIdx.x) + 1, static_cast<int>(gridDim.x));
    } else {
      s.first = late.share_begin(total, less, blockIdx.x);
      s.last = late.share_begin(total, less, blockIdx.x + 1);
    }
  }
  if (may_be_active && i < s.order.num_active) {
    s.order.expert[i] = expert;
    s.order.begin[i] = s.expert_begin[expert];
    s.order.end[i] = s.expert_begin[expert + 1];
  }
  __syncthreads();
}

// A row tile of the share of a block.
struct Place {
  int index;  // of the active expert
  int tile;
  __device__ __forceinline__ Place(int at, int row_tiles) : index(at / row_tiles), tile(at - index * row_tiles) {}
};

// This lane's chunks of the tokens of an expert in the range of k that begins with block `begin`. Where there is no
// token the first one stands in: what that gives reaches its own column alone, and nobody stores that. Chunks past the
// last one repeat it: their weights are zeros.
template <int BLOCKS>
__device__ __forceinline__ void load_tokens(uint4 (&x)[BLOCKS][2], const ExpertGemm& p, const Order& order, int index,
                                            int begin) {
  const int pair = order.begin[index] + lane_index() / 4;
  const int64_t row = order.row[pair < order.end[index] ? pair : order.begin[index]];
  const auto* token = reinterpret_cast<const uint4*>(p.x + row * p.x_stride);
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      x[i][c] = __ldcg(token + min(8 * (begin + i) + 4 * c + lane_index() % 4, p.k / 8 - 1));
    }
  }
}

// Starts the first row tile's blocks on their way. Every block closes a group of copies, so that groups count blocks.
template <class Range, int BLOCKS>
__device__ __forceinline__ void start_copies(std::byte (&stages)[BLOCKS][Range::Source::kStageBytes],
                                             const Range& range, int count) {
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i) {
    if (i < count) {
      range.copy(stages[i], i);
    }
    async_commit();
  }
}

// One row tile's share of this warp: its sums over the blocks of its range. Where there is `more`, a block's place is
// filled again once it was read, from `range`, which is a row tile ahead.
template <class Range, int BLOCKS>
__device__ __forceinline__ float4 multiply(std::byte (&stages)[BLOCKS][Range::Source::kStageBytes],
                                           const uint4 (&x)[BLOCKS][2], const Range& range, int count, bool more) {
  float acc[2][4] = {};
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i) {
    async_wait<BLOCKS - 1>();  // the oldest is there
    if (i < count) {
      typename Range::Source::Block w;
      Range::Source::fetch(w, stages[i]);
      uint4 low[2];
      uint4 high[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        Range::Source::chunk(w, c, low[c], high[c]);
      }
      if (more) {
        range.copy(stages[i], i);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        mma_chunk(acc[c], low[c], high[c], x[i][c]);
      }
    }
    async_commit();
  }
  return make_float4(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1], acc[0][2] + acc[1][2], acc[0][3] + acc[1][3]);
}

// Adds up the partial sums of a row tile and stores it, by a warp. `adapters`: of a tail, what this warp found.
template <bool GATE_UP, int KW, Lora LORA>
__device__ __forceinline__ void finish(const float4 (&partial)[KW][32], const ExpertGemm& p, const Order& order,
                                       const Place& place, const float2& bias, const Adapters<GATE_UP>* adapters) {
  float sum[4] = {};
#pragma unroll
  for (int part = 0; part < KW; ++part) {
    const float4 added = partial[part][lane_index()];
    sum[0] += added.x;
    sum[1] += added.y;
    sum[2] += added.z;
    sum[3] += added.w;
  }
  const int pair = order.begin[place.index];
  const int end = order.end[place.index];
  if constexpr (LORA == Lora::kDeltas) {
    add_deltas<GATE_UP>(sum, p, place.tile, pair, end);
  } else if constexpr (LORA == Lora::kBeside) {
    expand_tile<GATE_UP>(sum, p, place.tile, pair, end, *adapters);
  }
  finish_tile<GATE_UP>(sum, p, bias, place.tile, pair, end);
}

// Before this warp looks for adapters; thread 0 keeps the number of items for itself.
template <class Shared>
__device__ __forceinline__ void begin_tail(Shared& s, const Items& items) {
  if (lane_index() == 0) {
    s.adapters[warp_index()].expert = -1;
  }
  if (threadIdx.x == 0) {
    s.items = static_cast<uint32_t>(items.count);
  }
}

// Looks ahead to the row tile `own` that this warp finishes next.
template <bool GATE_UP>
__device__ __forceinline__ void prepare_tail(const ExpertGemm& p, const Order& order, int own,
                                             Adapters<GATE_UP>& adapters) {
  const Place place(own, p.row_tiles);
  const int expert = order.expert[place.index];
  __syncwarp();  // what was found last, or that nothing was
  if (expert != adapters.expert) {
    find_adapters<GATE_UP>(p, expert, order.begin[place.index], order.end[place.index], adapters);
  }
  prefetch_b<GATE_UP>(p, place.tile, adapters);
}

// Where a warp is in its block's share of row tiles, and how it reads its range of k there.
template <class Range>
struct Walk {
  int begin;  // blocks of the range
  int count;
  int last;   // of the share
  int group;  // first row tile of those until the next barrier
  int at;
  int index = -1;     // of the active expert whose weights come
  uint32_t left = 0;  // kBeside, by thread 0: blocks that have left the counters
  Range range;
  // To row tile `to`, of another expert perhaps.
  template <class Shared>
  __device__ __forceinline__ void locate(const ExpertGemm& p, const Shared& s, int to) {
    const Place place(to, p.row_tiles);
    index = place.index;
    range.locate(p, s.pointers[s.order.expert[index]], place.tile, begin);
  }
};

// This warp's tiles of a group. `x` has the tokens of expert `index_of_x`.
template <bool GATE_UP, int KW, Lora LORA, class Range, class Shared, class Stages, int BLOCKS>
__device__ __forceinline__ void multiply_group(const ExpertGemm& p, Shared& s, Stages& stages, Walk<Range>& walk,
                                               uint4 (&x)[BLOCKS][2], int& index_of_x) {
  constexpr int kTileWarps = kWarps / KW;
  const int end = min(walk.group + Range::kSlots, walk.last);
#pragma unroll 1
  for (; walk.at < end; walk.at += kTileWarps) {
    if (walk.index != index_of_x) {
      index_of_x = walk.index;
      load_tokens(x, p, s.order, walk.index, walk.begin);
    }
    const int next = walk.at + kTileWarps;
    const bool more = next < walk.last;
    if (next < (walk.index + 1) * p.row_tiles) {
      walk.range.advance(p, kTileWarps);
    } else if (more) {
      walk.locate(p, s, next);
    }
    bool counted = true;  // unless the shrunk values are wanted for the first time, and are not there
    if constexpr (LORA == Lora::kBeside) {
      if (threadIdx.x == 0 && walk.group == s.first && next >= end) {
        counted = has_count(p.lora.counters, s.items);  // while the last weights before the barrier come
      }
      __syncwarp();
    }
    s.partial[walk.at - walk.group][warp_index() % KW][lane_index()] =
        multiply<Range>(stages, x, walk.range, walk.count, more);
    if constexpr (LORA == Lora::kBeside) {
      if (threadIdx.x == 0 && walk.group == s.first && next >= end) {
        if (!counted) {
          wait_for_count(p.lora.counters, s.items);
        }
        walk.left = leave(p.lora.counters, gridDim.x);
      }
      __syncwarp();
    }
    if constexpr (LORA == Lora::kBeside) {
      if (walk.at < walk.group + kTileWarps && warp_index() < end - walk.group) {  // while the next weights come
        prepare_tail<GATE_UP>(p, s.order, walk.group + warp_index(), s.adapters[warp_index()]);
      }
    }
  }
}

// By the whole block: the row tiles of a group, a warp each.
template <bool GATE_UP, int KW, Lora LORA, int SLOTS, class Shared>
__device__ __forceinline__ void finish_group(const ExpertGemm& p, Shared& s, int group, int last) {
  const int own = group + warp_index();
  const bool finishes = warp_index() < SLOTS && own < last;
  const Place place(min(own, last - 1), p.row_tiles);
  const float2 bias = tile_bias<GATE_UP>(p, s.order.expert[place.index], place.tile);
  if (LORA == Lora::kDeltas) {
    wait_for_previous();  // the deltas are there
  }
  __syncthreads();  // the partial sums of all warps are there
  if (finishes) {
    const Adapters<GATE_UP>* adapters = nullptr;
    if constexpr (LORA == Lora::kBeside) {
      adapters = &s.adapters[warp_index()];
    }
    finish<GATE_UP, KW, LORA>(s.partial[warp_index()], p, s.order, place, bias, adapters);
  }
  if (group + SLOTS < last) {
    __syncthreads();  // the sums are read
  }
}

// kDeltas: the kernel ahead, which computes the deltas, passed its wait before this one began, so that all but what it
// computes was complete then. kBeside: the first `producers` blocks shrink.
template <bool GATE_UP, class Range, int KW, Lora LORA>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    expert_few_kernel(const __grid_constant__ ExpertGemm p, int num_pairs, int num_experts, int producers, Late late) {
  extern __shared__ __align__(128) uint4 dynamic_shared[];
  auto& s = *reinterpret_cast<SharedOf<GATE_UP, Range, KW, LORA>*>(dynamic_shared);
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += kThreads) {
    s.pointers[e] = Range::Source::pointers(p, e);
  }
  Items items{0, producers};
  const int panels = LORA == Lora::kBeside ? *p.lora.max_rank / kTileRanks : 0;
  // The order was complete before moe_gate_up began, which is ahead of moe_down: its first weights do not wait.
  constexpr bool kWaitsLate = !GATE_UP && LORA != Lora::kDeltas;
  if (GATE_UP && LORA != Lora::kDeltas) {
    wait_for_previous();
  }
  if (!kWaitsLate) {
    let_next_start();
  }
  load_order<LORA>(p, num_pairs, num_experts, s, (GATE_UP ? 2 : 1) * panels, items, late);
  if constexpr (LORA == Lora::kBeside) {
    begin_tail(s, items);
  }
  Walk<Range> walk;
  const int part = warp_index() % KW;
  walk.begin = p.k_blocks * part / KW;
  walk.count = p.k_blocks * (part + 1) / KW - walk.begin;
  walk.last = s.last;
  walk.group = s.first;
  walk.at = walk.group + warp_index() / KW;
  const bool has_tiles = walk.at < walk.last;
  if (has_tiles) {
    walk.locate(p, s, walk.at);
  }
  auto& stages = s.weights[warp_index()];
  start_copies(stages, walk.range, has_tiles ? walk.count : 0);
  if (kWaitsLate) {
    wait_for_previous();
    let_next_start();
  }
  if constexpr (LORA == Lora::kBeside) {
    static_assert(sizeof(s.partial) >= kWarps * kTileRanks * kRowsMax * sizeof(float));
    shrink_items<GATE_UP, Range::template kBlocks<8>>(p, items, panels, reinterpret_cast<float*>(s.partial));
  }
  uint4 x[Range::template kBlocks<KW>][2];
  int index_of_x = -1;
#pragma unroll 1
  for (; walk.group < walk.last; walk.group += Range::kSlots) {
    multiply_group<GATE_UP, KW, LORA>(p, s, stages, walk, x, index_of_x);
    if constexpr (LORA == Lora::kBeside) {
      asm volatile("" : "+r"(walk.group));  // nothing that follows from it is kept in registers
    }
    finish_group<GATE_UP, KW, LORA, Range::kSlots>(p, s, walk.group, walk.last);
  }
  if (LORA == Lora::kDeltas) {
    wait_for_previous();  // also in a block without a share: its end must mean that all before it has ended
  }
  if (LORA == Lora::kBeside && threadIdx.x == 0) {
    if (s.first >= s.last) {
      walk.left = leave(p.lora.counters, gridDim.x);
    }
    clear_after_last(p.lora.counters, walk.left, gridDim.x);
  }
  async_wait<0>();
}

template <bool GATE_UP, class Range, int KW, Lora LORA>
void launch_of(const ExpertGemm& p, int num_pairs, int num_experts, const CudaStream& state) {
  constexpr auto kKernel = expert_few_kernel<GATE_UP, Range, KW, LORA>;
  constexpr size_t kSharedBytes = sizeof(SharedOf<GATE_UP, Range, KW, LORA>);
  check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
             "shared memory of the expert product");
  const int64_t tiles = int64_t{std::min(num_pairs, num_experts)} * p.row_tiles;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(tiles, int64_t{state.num_sms} * kBlocksPerSm));
  const int producers = std::min(static_cast<int>(grid), state.num_sms);  // one an SM
  Late late{0, 0.0f};
  if (LORA == Lora::kDeltas && expert_delta::leave_room<GATE_UP>(num_pairs, state)) {
    late.first = std::min(static_cast<int>(grid), state.num_sms);
    const double tile = 16.0 * p.k * (p.scales != nullptr ? 17.0 / 32.0 : 2.0);
    const double rank = (GATE_UP ? 2.0 : 1.0) * 2.0 * (p.k + p.rows);  // of a segment's A and B, in bytes
    late.tiles = static_cast<float>((GATE_UP ? kLateShare : kLateShareDown) * rank / (tile * state.num_sms));
  }
  launch_dependent(kKernel, dim3(grid), kThreads, kSharedBytes, state, p, num_pairs, num_experts, producers, late);
}
// How a kernel with a tail reads the weights.
template <class Range>
struct WithTail {
  using Type = Range;
};
template <bool GATE_UP>
struct WithTail<TilesRange<GATE_UP, false>> {
  using Type = TilesRange<GATE_UP, true>;
};
template <bool GATE_UP, class Range, int KW>
void launch(const ExpertGemm& p, Lora lora, int num_pairs, int num_experts, const CudaStream& state) {
  switch (lora) {
    case Lora::kNone:
      return launch_of<GATE_UP, Range, KW, Lora::kNone>(p, num_pairs, num_experts, state);
    case Lora::kDeltas:
      return launch_of<GATE_UP, Range, KW, Lora::kDeltas>(p, num_pairs, num_experts, state);
    case Lora::kBeside:
      return launch_of<GATE_UP, typename WithTail<Range>::Type, KW, Lora::kBeside>(p, num_pairs, num_experts, state);
  }
}

// Whether this kernel can.
template <bool GATE_UP, bool TILES>
bool fits(const ExpertGemm& p, int num_rows, int num_pairs, int num_experts) {
  using Range = std::conditional_t<TILES, TilesRange<GATE_UP>, RowsRange<GATE_UP>>;
  return num_rows <= kRowsMax && num_pairs <= kPairsMax && num_experts <= kExpertsMax &&
         (TILES || (p.k % 64 == 0 && p.rows % 16 == 0)) && p.k_blocks <= 8 * Range::template kBlocks<8>;
}

}  // namespace few

// False where this kernel cannot: nothing was launched. `lora`: where the deltas come from, if there are adapters.
template <bool GATE_UP, bool TILES>
bool launch_expert_few(const ExpertGemm& p, few::Lora lora, int num_rows, int num_pairs, int num_experts,
                       const CudaStream& state) {
  using Range = std::conditional_t<TILES, few::TilesRange<GATE_UP>, few::RowsRange<GATE_UP>>;
  if (!few::fits<GATE_UP, TILES>(p, num_rows, num_pairs, num_experts)) {
    return false;
  }
  if (p.lora.row_slot == nullptr) {
    lora = few::Lora::kNone;
  }
  if (p.k_blocks <= 4 * Range::template kBlocks<4>) {
    few::launch<GATE_UP, Range, 4>(p, lora, num_pairs, num_experts, state);
  } else {
    few::launch<GATE_UP, Range, 8>(p, lora, num_pairs, num_experts, state);
  }
  return true;
}

}  // namespace moelora
