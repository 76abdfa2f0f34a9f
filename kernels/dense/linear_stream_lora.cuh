// SPDX-License-Identifier: Apache-2.0
// The adapters' part of kernels/dense/linear_stream.cuh, and what a block of it has in shared memory. Two warps (one
// for up to 32 rows) look up what the rows' adapters say, order the rows by them and ask B into the L2; then each
// computes the deltas of one group of up to 8 rows of one adapter, 64 outputs, while weights stream, and keeps them in
// registers until the ring is free. The other groups follow, by the warps that multiplied, at the same time if the
// shrink is late. B is in registers before anybody waits for the shrink.
// Included by linear_stream.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/cuda/tensor_copy.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/dense/linear_params.cuh"
#include "kernels/lora/lora_expand.cuh"

namespace moelora::linear {

constexpr int kStreamRows = 64;  // at most
constexpr int kStreamCluster = 8;
constexpr int kStreamStages = 16;           // at most
constexpr int kBoxBytes = 2 * kBoxColumns;  // of a row
constexpr int kBoxAlignment = 1024;
constexpr int kTokenGroup = 8;            // rows of one adapter whose deltas are one product
constexpr int kSharedOfAll = 228 * 1024;  // of a multiprocessor, with kSharedOfBlock for each of its blocks
constexpr int kSharedOfBlock = 1024;
constexpr int kStreamShared = kSharedOfAll - kSharedOfBlock;  // of a block that is alone
constexpr int kShrinkShared = 57 * 1024;  // of a block of the shrink, which is to fit beside one of the product

// Barriers of the block.
enum StreamBarrier : int {
  kDeltasThere = 1,
  kLookUps = 2,       // of the warps that look up
  kRingReady = 3,     // its barriers are there
  kProductsDone = 4,  // all stages are read, so that sums may take their place; the tokens are known
  kRingFree = 5,      // the same, for the deltas of the warps that look up
};

// The rows of an adapter: places [begin, end) of LoraBatch::sorted_rows.
struct AdapterRun {
  int slot;
  int begin;
  int end;
};

// In shared memory beside the ring. A row's position: those without an adapter first, then as LoraBatch sorts them.
template <int TOKENS>
struct StreamShared {
  uint64_t full[kStreamStages];   // weights and x of a stage are there
  uint64_t empty[kStreamStages];  // all warps have multiplied it
  AdapterRun runs[TOKENS];        // of each place of sorted_rows
  unsigned base_rows[2];          // bit i of word w: row 32 w + i has no adapter
  int row_at[TOKENS];             // of each position
  int group[TOKENS];              // of each owned position: rows of the group that begins there, 0: none begins
  LoraToken tokens[TOKENS];       // of each owned position
};

// Up to TOKENS rows, 64 WARPGROUPS outputs.
template <int TOKENS, int WARPGROUPS>
struct StreamTile {
  static constexpr int OUTPUTS = 64 * WARPGROUPS;
  static constexpr int STORED_TOGETHER = WARPGROUPS <= 2 ? 3 : 1;  // by a thread: more warps have fewer registers
  static constexpr int MULTIPLY_THREADS = 128 * WARPGROUPS;
  static constexpr int MULTIPLY_WARPS = MULTIPLY_THREADS / 32;
  static constexpr int LOOKUP_THREADS = TOKENS > 32 ? 64 : 32;  // after a warp that asks for copies
  static constexpr int THREADS = MULTIPLY_THREADS + 32 + LOOKUP_THREADS;
  static constexpr int LOOKUP_WARPS = LOOKUP_THREADS / 32;
  // Threads whose registers would fill a multiprocessor: what these leave is for a block of the shrink.
  static constexpr int REGISTER_THREADS = WARPGROUPS == 3 ? 640 : (WARPGROUPS == 2 ? 512 : THREADS);
  static_assert(LOOKUP_WARPS <= 2 && TOKENS <= LOOKUP_THREADS);
  static constexpr int WEIGHT_BYTES = OUTPUTS * kBoxBytes;  // of a stage; the tokens follow
  static constexpr int TOKEN_BYTES = TOKENS * kBoxBytes;
  static constexpr int STAGE_BYTES = WEIGHT_BYTES + TOKEN_BYTES;
  // Of sums, [token][output]: the lanes of a quad, two tokens apart each, store into different banks.
  static constexpr int SUMS_STRIDE = OUTPUTS + 4;
  static constexpr int SUMS_BYTES = TOKENS * SUMS_STRIDE * 4;
  static constexpr int MAX_STAGES = std::min(
      kStreamStages, (kStreamShared - kBoxAlignment - static_cast<int>(sizeof(StreamShared<TOKENS>))) / STAGE_BYTES);
  static constexpr int LORA_STAGES =  // at most, with a block of the shrink beside it
      std::min(MAX_STAGES, (kStreamShared - kSharedOfBlock - kShrinkShared - kBoxAlignment -
                            static_cast<int>(sizeof(StreamShared<TOKENS>))) /
                               STAGE_BYTES);
  static constexpr int MIN_STAGES = (2 * SUMS_BYTES + STAGE_BYTES - 1) / STAGE_BYTES;  // sums and deltas
  static_assert(TOKENS <= kStreamRows && STAGE_BYTES % kBoxAlignment == 0 && MIN_STAGES <= LORA_STAGES);
  static constexpr int shared_bytes(int stages) { return kBoxAlignment + stages * STAGE_BYTES; }
};

// What a block works on: outputs n0 .. of a part, 64-input blocks [begin, end) of K, and for the cluster the rows at
// positions [first, first + owned).
struct StreamWork {
  const Part& part;
  int n0;
  int begin;
  int end;
  int first;
  int owned;
  int cluster;  // blocks
};

// By the LOOKUP_THREADS, `i` each: the rows' positions and what the owned ones' adapters say about the part. What does
// not depend on each other is loaded side by side: loads wait behind the weights'.
template <int TOKENS, int WARPGROUPS>
__device__ __forceinline__ void look_up_tokens(const Params& p, const StreamWork& work, StreamShared<TOKENS>& shared,
                                               int i) {
  using Tile = StreamTile<TOKENS, WARPGROUPS>;
  const bool there = i < p.num_rows;
  const int slot_of_row = there ? p.row_slot[i] : 0;
  const int row = there ? p.sorted_rows[i] : 0;  // at place i of the adapters' rows, if there are so many
  const int segment_begin = there ? p.segment_begin[i] : 0;
  const int segment_end = there ? p.segment_begin[i + 1] : 0;
  const int segment_slot = there ? p.segment_slot[i] : 0;
  const int adapted = work.part.module >= 0 ? p.counts[0] : 0;
  if (work.part.module >= 0 && i < p.counts[1]) {
#pragma unroll 1
    for (int place = segment_begin; place < segment_end; ++place) {
      shared.runs[place] = AdapterRun{segment_slot, segment_begin, segment_end};
    }
  }
  const bool is_base = there && (work.part.module < 0 || slot_of_row == 0);
  const unsigned base_rows = __ballot_sync(0xffffffffu, is_base);
  const int lane = i % 32;
  if (lane == 0) {
    shared.base_rows[i / 32] = base_rows;
  }
  barrier_sync(kLookUps, Tile::LOOKUP_THREADS);
  int before = __popc(base_rows & ((1u << lane) - 1));
  int num_base = 0;
#pragma unroll
  for (int warp = 0; warp < Tile::LOOKUP_WARPS; ++warp) {
    const int count = __popc(shared.base_rows[warp]);
    before += warp < i / 32 ? count : 0;
    num_base += count;
  }
  if (is_base) {
    shared.row_at[before] = i;
    const int index = before - work.first;
    if (index >= 0 && index < work.owned) {
      shared.tokens[index] = LoraToken{};
      shared.group[index] = 0;
    }
  }
  if (i >= adapted) {
    return;
  }
  shared.row_at[num_base + i] = row;
  const int index = num_base + i - work.first;
  if (index < 0 || index >= work.owned) {
    return;
  }
  const AdapterRun run = shared.runs[i];
  // A row of scale 0 is none of those that get a delta, but it may be the first of a group.
  LoraToken token =
      lora_token(p.table.resolved_dense(run.slot, p.layer, static_cast<LoraModule>(work.part.module)), run.slot, 1.0f);
  token.scale *= p.row_scale[row];
  const int nth = min(i - run.begin, index);  // among the adapter's owned rows
  shared.tokens[index] = token;
  shared.group[index] =
      token.rank != 0 && nth % kTokenGroup == 0 ? min(min(run.end - i, work.owned - index), kTokenGroup) : 0;
}

// The deltas of a group of rows, 64 outputs: acc[i] of outputs 16 i .. 16 i + 15.
using GroupDeltas = float[4][4];

// B of 64 outputs from n on and four panels from `first` on, a panel a lane of four: rows 8 i + g.
struct GroupWeights {
  uint4 rows[8];
  __device__ __forceinline__ void load(const Params& p, const LoraToken& token, int n, int first) {
    const int g = static_cast<int>(threadIdx.x % 32 / 4);
    const int panels = (token.rank + kTileRanks - 1) / kTileRanks;
    const int panel = first + static_cast<int>(threadIdx.x % 4);
    const std::byte* granule = nullptr;
    if (panel < panels) {
      granule = paged_granule(p.table, token.slot, token.b, token.b_pages, n / kTileColumns * panels + panel) + g * 16;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      rows[i] = granule != nullptr ? *reinterpret_cast<const uint4*>(granule + i * 128) : zero_chunk();
    }
  }
};

// acc: of the group that begins at owned position `start`, outputs from n on; b: its first four panels. By a warp, once
// the shrink has ended.
template <int TOKENS>
__device__ __forceinline__ void expand_group(const Params& p, const StreamWork& work,
                                             const StreamShared<TOKENS>& shared, int start, int n, GroupWeights& b,
                                             GroupDeltas& acc) {
  const int g = static_cast<int>(threadIdx.x % 32 / 4);
  const int t = static_cast<int>(threadIdx.x % 4);
  const LoraToken& token = shared.tokens[start];
  const int panels = (token.rank + kTileRanks - 1) / kTileRanks;
  const float* shrunk = nullptr;
  if (g < shared.group[start]) {
    shrunk = shrunk_row(p, work.part, shared.row_at[work.first + start + g]);
  }
#pragma unroll 1
  for (int first = 0; first < panels; first += 4) {
    const int panel = first + t;
    if (first > 0) {
      b.load(p, token, n, first);
    }
    float values[8] = {};
    if (panel < panels && shrunk != nullptr) {
      *reinterpret_cast<float4*>(values) = *reinterpret_cast<const float4*>(shrunk + panel * kTileRanks);
      *reinterpret_cast<float4*>(values + 4) = *reinterpret_cast<const float4*>(shrunk + panel * kTileRanks + 4);
    }
    const SplitChunk x = split_chunk(values);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma_chunk(acc[i], b.rows[2 * i], b.rows[2 * i + 1], x.high);
      mma_chunk(acc[i], b.rows[2 * i], b.rows[2 * i + 1], x.low);
    }
  }
}

template <int TOKENS, int WARPGROUPS>
__device__ __forceinline__ void leave_deltas(const StreamWork& work, const StreamShared<TOKENS>& shared, int start,
                                             int n, const GroupDeltas& acc, float* deltas) {
  constexpr int STRIDE = StreamTile<TOKENS, WARPGROUPS>::SUMS_STRIDE;
  const int g = static_cast<int>(threadIdx.x % 32 / 4);
  const int t = static_cast<int>(threadIdx.x % 4);
  const int count = shared.group[start];
  float* const to = deltas + (start + 2 * t) * STRIDE + n - work.n0 + g;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (2 * t + i % 2 < count) {
      to[i % 2 * STRIDE + i / 4 * 16 + i % 4 / 2 * 8] = acc[i / 4][i % 4];
    }
  }
}

// A group of the owned rows and 64 outputs.
struct StreamItem {
  int start;  // -1: there is no such item
  int n;
  [[nodiscard]] __device__ __forceinline__ bool has_outputs(const StreamWork& work) const {
    return start >= 0 && n < work.part.n;
  }
};

// By a warp.
template <int TOKENS, int WARPGROUPS>
__device__ __forceinline__ StreamItem find_item(const StreamWork& work, const StreamShared<TOKENS>& shared, int item) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int nth = item / WARPGROUPS;
  StreamItem result = {-1, work.n0 + 64 * (item % WARPGROUPS)};
#pragma unroll 1
  for (int base = 0; base < work.owned && result.start < 0; base += 32) {
    unsigned begins = __ballot_sync(0xffffffffu, base + lane < work.owned && shared.group[base + lane] != 0);
    for (; begins != 0 && nth > 0; begins &= begins - 1) {
      --nth;
    }
    if (begins != 0) {
      result.start = base + __ffs(static_cast<int>(begins)) - 1;
    }
  }
  return result;
}

// B of an item into the L2, a line a lane: a bulk copy would wait behind those of the weights.
__device__ __forceinline__ void prefetch_group(const Params& p, const LoraToken& token, int n) {
  const int panels = (token.rank + kTileRanks - 1) / kTileRanks;
#pragma unroll 1
  for (int line = static_cast<int>(threadIdx.x % 32); line < panels * 8; line += 32) {
    prefetch_l2(paged_granule(p.table, token.slot, token.b, token.b_pages, n / kTileColumns * panels + line / 8) +
                line % 8 * 128);
  }
}

// The first items, one a warp of the LOOKUP_THREADS, while weights stream; they wait for the shrink. B of the others is
// asked into the L2 before.
template <int TOKENS, int WARPGROUPS>
__device__ __forceinline__ void expand_early(const Params& p, const StreamWork& work,
                                             const StreamShared<TOKENS>& shared, int warp, const StreamItem& item,
                                             GroupDeltas& acc) {
  using Tile = StreamTile<TOKENS, WARPGROUPS>;
  GroupWeights b;
  if (item.has_outputs(work)) {
    b.load(p, shared.tokens[item.start], item.n, 0);
  }
#pragma unroll 1
  for (int nth = Tile::LOOKUP_WARPS + warp;; nth += Tile::LOOKUP_WARPS) {
    const StreamItem other = find_item<TOKENS, WARPGROUPS>(work, shared, nth);
    if (other.start < 0) {
      break;
    }
    if (other.has_outputs(work)) {
      prefetch_group(p, shared.tokens[other.start], other.n);
    }
  }
  wait_for_previous();
  if (item.has_outputs(work)) {
    expand_group<TOKENS>(p, work, shared, item.start, item.n, b, acc);
  }
}

// All other deltas of the owned rows, [owned position][SUMS_STRIDE], by the threads that multiply. Comes back when all
// deltas are there.
template <int TOKENS, int WARPGROUPS>
__device__ __forceinline__ void expand_owned(const Params& p, const StreamWork& work,
                                             const StreamShared<TOKENS>& shared, float* deltas) {
  using Tile = StreamTile<TOKENS, WARPGROUPS>;
  int nth = Tile::LOOKUP_WARPS + static_cast<int>(threadIdx.x / 32);
  StreamItem item = find_item<TOKENS, WARPGROUPS>(work, shared, nth);
  GroupWeights b;
  if (item.has_outputs(work)) {
    b.load(p, shared.tokens[item.start], item.n, 0);
  }
  wait_for_previous();
#pragma unroll 1
  while (item.start >= 0) {
    if (item.has_outputs(work)) {
      GroupDeltas acc = {};
      expand_group<TOKENS>(p, work, shared, item.start, item.n, b, acc);
      leave_deltas<TOKENS, WARPGROUPS>(work, shared, item.start, item.n, acc, deltas);
    }
    nth += Tile::MULTIPLY_WARPS;
    item = find_item<TOKENS, WARPGROUPS>(work, shared, nth);
    if (item.has_outputs(work)) {
      b.load(p, shared.tokens[item.start], item.n, 0);
    }
  }
  barrier_sync(kDeltasThere, Tile::MULTIPLY_THREADS + Tile::LOOKUP_THREADS);
}

}  // namespace moelora::linear
