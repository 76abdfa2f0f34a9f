// SPDX-License-Identifier: Apache-2.0
// The side of kernels/moe/expert_prefill_sm90.cuh that fills the ring: warps that bring weights, a warp that
// gathers tokens, and a warp that runs an item ahead of all others; and what they share with the warps that multiply.
#pragma once

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/moe/expert_prefill_tile.cuh"
#include "kernels/moe/expert_tokens.cuh"

namespace moelora::sm90 {

constexpr int kThreads = kMultiplyThreads + 128;
constexpr int kWeightWarps = 2;
constexpr int kTilesPerWarp = kRowTiles / kWeightWarps;
constexpr int kGatherWarp = kMultiplyWarps + kWeightWarps;

// Registers a thread, dealt out from those that the block was started with.
constexpr int kMultiplyRegisters = 176;
constexpr int kFillRegisters = 152;
static_assert(kMultiplyRegisters * kMultiplyThreads + kFillRegisters * 128 <= 65536 / kThreads / 8 * 8 * kThreads);

constexpr int kWidthStep = 16;  // of tiles
constexpr int kStages = 4;
constexpr int kRowBytes = 128;                            // 64 inputs
constexpr int kWeightBytes = 16 * kRowTiles * kRowBytes;  // of a stage, then its tokens
constexpr int kStageBytes = kWeightBytes + kMaxTokens * kRowBytes;
constexpr int kStageAlignment = 1024;
constexpr int kSharedBytes = kStageAlignment + kStages * kStageBytes;

struct Shared {
  ExpertTiles tiles;
  TileTokens tokens[2];  // of this item and of the next
  Work work[2];
  int32_t slots[kMaxTokens];  // of the warp that says which tokens and adapters there are
  int active;                 // experts
  int items;
  uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t described[2];  // tokens and work are there, by each lane of a warp
  uint64_t done[2];       // nobody needs them any more
};
// Arrivals that make a stage full: of all threads that bring weights or gather. A warp that writes its part itself
// arrives for its threads; copies arrive by themselves.
constexpr int kFullArrivals = 32 * kWeightWarps + 32;

using Place = RingPlace<kStages>;

// Phases of described and done of this block's nth item.
__device__ __forceinline__ uint32_t item_parity(uint32_t nth) {
  return nth / 2 % 2;
}
__device__ __forceinline__ const Work& wait_described(Shared& shared, uint32_t nth) {
  mbarrier_wait(&shared.described[nth % 2], item_parity(nth));
  return shared.work[nth % 2];
}
// By whole warps.
__device__ __forceinline__ void arrive_done(Shared& shared, uint32_t nth) {
  __syncwarp();
  if (lane_index() == 0) {
    mbarrier_arrive(&shared.done[nth % 2]);
  }
}

// The blocks of a cluster take an item together: the same tokens and neighbouring row blocks. Past the last one a block
// only keeps step with the others.
template <int BLOCKS>
__device__ __forceinline__ int first_item() {
  return static_cast<int>(blockIdx.x) / BLOCKS;
}
template <int BLOCKS>
__device__ __forceinline__ int item_step() {
  return static_cast<int>(gridDim.x) / BLOCKS;
}
template <int BLOCKS>
__device__ __forceinline__ int row_groups(const ExpertGemm& p) {
  return (p.row_tiles + BLOCKS * kRowTiles - 1) / (BLOCKS * kRowTiles);
}
template <int BLOCKS>
__device__ __forceinline__ Work find_tile(const ExpertGemm& p, const ExpertTiles& tiles, int active, int item) {
  const PrefillWork found = find_work(p, tiles, active, row_groups<BLOCKS>(p), item);
  const int least = (found.end - found.begin + found.token_tiles - 1) / found.token_tiles;
  const int width = (least + kWidthStep - 1) / kWidthStep * kWidthStep;
  Work work;
  work.expert = found.expert;
  work.row_block = found.row_block * BLOCKS + (BLOCKS == 1 ? 0 : cluster_block());
  work.pair = found.begin + found.token_tile * width;
  work.count = min(found.end - work.pair, width);
  work.place = token_place(work.pair, work.expert, found.begin);
  return work;
}

// Piece c, 16 bytes, of row r of an operand.
__device__ __forceinline__ int piece_place(int r, int c) {
  return r * kRowBytes + (c ^ r % 8) * 16;
}

// --- Warps that fill stages.

// Keeps an address in registers as it is, so that what is added to it is one instruction more for each copy.
__device__ __forceinline__ const uint4* as_base(const uint4* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// What they write becomes visible to wgmma by a fence of the warps that multiply, when a block has arrived: a writer's
// fence may wait for its copies of the next block, too.
struct RingWriter {
  Shared& shared;
  std::byte* stages;
  Place at;  // of the next block

  __device__ __forceinline__ std::byte* wait_empty() const {
    mbarrier_wait(&shared.empty[at.stage], at.parity ^ 1);
    return stages + at.stage * kStageBytes;
  }
  // Ends a block that this warp has written its part of.
  __device__ __forceinline__ void publish() {
    __syncwarp();  // all lanes' parts are there
    if (lane_index() == 0) {
      mbarrier_arrive(&shared.full[at.stage], 32);
    }
    at.advance();
  }
  // Ends a block that this thread has started to copy.
  __device__ __forceinline__ void publish_copies() {
    async_arrive(&shared.full[at.stage]);
    at.advance();
  }
  // Asks for a block's `count` tokens, which lie in one piece, in the stage that wait_empty() gave. By one thread, of
  // each block of the cluster: it brings its share to all of them. The stage is full after an arrival of it, too.
  template <int BLOCKS>
  __device__ __forceinline__ void ask_tokens(std::byte* to, const std::byte* from, int count) const {
    uint64_t* const full = &shared.full[at.stage];
    mbarrier_expect(full, static_cast<uint32_t>(count * kRowBytes));
    if constexpr (BLOCKS == 1) {
      bulk_copy(to, from, static_cast<uint32_t>(count * kRowBytes), full);
    } else {
      const int share = (count + BLOCKS - 1) / BLOCKS;
      const int first = share * cluster_block() * kRowBytes;
      const int bytes = min(share * kRowBytes, count * kRowBytes - first);
      if (bytes > 0) {
        bulk_copy_to_blocks(to + first, from + first, static_cast<uint32_t>(bytes), full, (1 << BLOCKS) - 1);
      }
    }
  }
};

// --- Weights. A filler of weights brings blocks of an item into stages, in turn: start() says which item comes next,
// while the one before it may still have a block to store.

// Writes a block of TILES row tiles into a stage, from the first one's rows on. Four rows' pieces would share banks two
// and two: lanes of odd rows take their second pieces first.
template <int TILES, class Block>
__device__ __forceinline__ void store_tiles(const Block (&block)[TILES], std::byte* rows) {
  const int g = lane_index() / 4;
  const bool odd = g % 2 != 0;
  const uint32_t order = odd ? 0x2301u : 0x3210u;
  std::byte* const to = rows + g * kRowBytes;
  const int first = (lane_index() % 4 ^ g ^ (odd ? 4 : 0)) * 16;
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const uint4 data = block[i].data;
    const Mxfp4Scales scales(__byte_perm(block[i].scales, 0, order));
    std::byte* low = to + i * 16 * kRowBytes;
    std::byte* high = low + 8 * kRowBytes;
    *reinterpret_cast<uint4*>(low + first) = expand_mxfp4(odd ? data.z : data.x, scales.pair(0));
    *reinterpret_cast<uint4*>(high + first) = expand_mxfp4(odd ? data.w : data.y, scales.pair(2));
    *reinterpret_cast<uint4*>(low + (first ^ 64)) = expand_mxfp4(odd ? data.x : data.z, scales.pair(1));
    *reinterpret_cast<uint4*>(high + (first ^ 64)) = expand_mxfp4(odd ? data.y : data.w, scales.pair(3));
  }
}

// MXFP4 tiles: a warp takes kTilesPerWarp row tiles. A lane's words are 8 inputs each, hence one piece of an operand's
// row.
template <bool GATE_UP>
struct TilesFiller {
  using Source = TilesSource<GATE_UP>;
  static constexpr bool kAhead = true;  // a block is loaded while the one before it is stored
  Source source[kTilesPerWarp];
  typename Source::Block next[kTilesPerWarp];

  __device__ __forceinline__ void start(const ExpertGemm& p, const Work& work, int thread) {
#pragma unroll
    for (int i = 0; i < kTilesPerWarp; ++i) {
      source[i].locate(p, work.expert,
                       min(work.row_block * kRowTiles + thread / 32 * kTilesPerWarp + i, p.row_tiles - 1));
    }
    load(0);
  }
  __device__ __forceinline__ void load(int b) {
#pragma unroll
    for (int i = 0; i < kTilesPerWarp; ++i) {
      source[i].load(next[i], b);
    }
  }
  static __device__ __forceinline__ void store(const typename Source::Block (&block)[kTilesPerWarp], std::byte* stage,
                                               int thread) {
    store_tiles(block, stage + thread / 32 * kTilesPerWarp * 16 * kRowBytes);
  }
};

// bf16 rows: a thread copies one piece of row r, and of row r + 8, of every row tile.
template <bool GATE_UP>
struct RowsFiller {
  static constexpr bool kAhead = false;
  const uint4* low;
  const uint4* high;
  int low_offset[kRowTiles];  // of the rows
  int high_offset[kRowTiles];
  int chunks;  // of a row, from this piece on

  __device__ __forceinline__ void start(const ExpertGemm& p, const Work& work, int thread) {
    const int row_chunks = p.k / 8;
    low = static_cast<const uint4*>(p.low[work.expert]);
    high = static_cast<const uint4*>(p.high[work.expert]);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const int n_low = (GATE_UP ? 8 : 16) * (work.row_block * kRowTiles + i) + thread / 8;
      const int n_high = GATE_UP ? n_low : n_low + 8;
      low_offset[i] = min(n_low, p.rows - 1) * p.low_step * row_chunks;
      high_offset[i] = min(n_high, p.rows - 1) * p.high_step * row_chunks;
    }
    chunks = row_chunks - thread % 8;
  }
  __device__ __forceinline__ void copy(int b, std::byte* stage, int thread) const {
    const bool inside = 8 * b < chunks;
    const int at = inside ? 8 * b + thread % 8 : 0;
    const uint4* const from_low = as_base(low + at);
    const uint4* const from_high = as_base(high + at);
    std::byte* const to = stage + piece_place(thread / 8, thread % 8);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      async_copy16(to + i * 16 * kRowBytes, from_low + low_offset[i], inside);
      async_copy16(to + (i * 16 + 8) * kRowBytes, from_high + high_offset[i], inside);
    }
  }
};

template <bool GATE_UP, class Source>
struct FillerOf;
template <bool GATE_UP>
struct FillerOf<GATE_UP, TilesSource<GATE_UP>> {
  using Filler = TilesFiller<GATE_UP>;
};
template <bool GATE_UP>
struct FillerOf<GATE_UP, RowsSource<GATE_UP>> {
  using Filler = RowsFiller<GATE_UP>;
};

// B of a step: this thread copies one piece, of panel thread / 8, of every row with r % 8 == thread % 8. A granule has
// the pieces of 64 outputs one after the other.
template <bool GATE_UP>
struct AdapterRows {
  const uint4* from[kItemColumnTiles<GATE_UP>];
  bool present[2];  // gate_up: of gate and up; down: of the column tiles

  __device__ __forceinline__ void find(const ExpertGemm& p, const Work& work, const TileTokens& tokens,
                                       const StepPanel& panel, int thread) {
    const int tiles = panel.index >= 0 ? item_column_tiles<GATE_UP>(p, work) : 0;
#pragma unroll
    for (int i = 0; i < kItemColumnTiles<GATE_UP>; ++i) {
      from[i] = reinterpret_cast<const uint4*>(p.x);
      if (i < tiles) {
        const int index = i * entry_panels(panel.of) + panel.index;
        const std::byte* granule = entry_granule<GATE_UP>(p, work, panel.of, tokens.next_page[panel.entry], index);
        from[i] = reinterpret_cast<const uint4*>(granule) + thread % 8;
      }
    }
    const int module = entry_module(panel.of);
    present[0] = GATE_UP ? tiles > 0 && module == 0 : tiles > 0;
    present[1] = GATE_UP ? tiles > 0 && module == 1 : tiles > 1;
  }
  __device__ __forceinline__ void copy(std::byte* stage, int thread) const {
    std::byte* const to = stage + piece_place(thread % 8, thread / 8);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      std::byte* const low = to + i * 16 * kRowBytes;
      std::byte* const high = low + 8 * kRowBytes;
      if constexpr (GATE_UP) {
        async_copy16(low, from[0] + 8 * i, present[0]);
        async_copy16(high, from[0] + 8 * i, present[1]);
      } else {
        constexpr int kHalf = kRowTiles / 2;  // row tiles of a column tile
        const uint4* const tile = from[i / kHalf] + i % kHalf * 16;
        async_copy16(low, tile, present[i / kHalf]);
        async_copy16(high, tile + 8, present[i / kHalf]);
      }
    }
  }
};

template <bool GATE_UP, class Source, int BLOCKS>
struct WeightWarps {
  using Filler = typename FillerOf<GATE_UP, Source>::Filler;
  const ExpertGemm& p;
  Shared& shared;
  RingWriter ring;
  Filler filler;
  uint32_t nth = 0;

  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x) - kMultiplyThreads; }

  // An item's blocks of k. The last one starts the next item, if there is one.
  __device__ __forceinline__ void fill_blocks(bool last) {
    for (int b = 0; b < p.k_blocks; ++b) {
      if constexpr (Filler::kAhead) {
        typename Source::Block block[kTilesPerWarp];
#pragma unroll
        for (int i = 0; i < kTilesPerWarp; ++i) {
          block[i] = filler.next[i];
        }
        if (b + 1 < p.k_blocks) {
          filler.load(b + 1);
        } else if (!last) {
          filler.start(p, wait_described(shared, nth + 1), thread());
        }
        Filler::store(block, ring.wait_empty(), thread());
        ring.publish();
      } else {
        filler.copy(b, ring.wait_empty(), thread());
        ring.publish_copies();
      }
    }
  }
  __device__ __forceinline__ void copy_steps(const Work& work) {
    const TileTokens& tokens = shared.tokens[nth % 2];
    StepPanel panel;
    for (int step = 0; step < tokens.num_steps; ++step) {
      panel.find(tokens, step * kStepPanels + thread() / 8);
      AdapterRows<GATE_UP> rows;
      rows.find(p, work, tokens, panel, thread());
      rows.copy(ring.wait_empty(), thread());
      ring.publish_copies();
    }
  }
  __device__ __forceinline__ void fill_all() {
    const int step = item_step<BLOCKS>();
    int item = first_item<BLOCKS>();
    if (Filler::kAhead && item < shared.items) {
      filler.start(p, wait_described(shared, 0), thread());
    }
    for (; item < shared.items; item += step) {
      if (!Filler::kAhead) {
        filler.start(p, wait_described(shared, nth), thread());
      }
      fill_blocks(item + step >= shared.items);
      if (p.lora.row_slot != nullptr) {
        copy_steps(shared.work[nth % 2]);
      }
      arrive_done(shared, nth);
      ++nth;
    }
    async_wait<0>();
  }
};

// --- Tokens.

// Copies of 16 bytes, or zeros, to four places, as one instruction each and no branch.
struct CopyRows {
  uint32_t to[4];
  int bytes;
  __device__ __forceinline__ void go(bool present, int offset, const uint4* from, const int4& chunks) const {
    const auto at = static_cast<uint32_t>(offset);
    asm volatile(
        "{.reg .pred present; setp.ne.b32 present, %9, 0;"
        "@present cp.async.cg.shared.global.L2::128B [%0], [%4], 16, %8;"
        "@present cp.async.cg.shared.global.L2::128B [%1], [%5], 16, %8;"
        "@present cp.async.cg.shared.global.L2::128B [%2], [%6], 16, %8;"
        "@present cp.async.cg.shared.global.L2::128B [%3], [%7], 16, %8;}" ::"r"(to[0] + at),
        "r"(to[1] + at), "r"(to[2] + at), "r"(to[3] + at), "l"(from + chunks.x), "l"(from + chunks.y),
        "l"(from + chunks.z), "l"(from + chunks.w), "r"(bytes), "r"(static_cast<int>(present))
        : "memory");
  }
};

template <bool GATE_UP, int BLOCKS>
struct GatherWarp {
  const ExpertGemm& p;
  Shared& shared;
  RingWriter ring;
  uint32_t nth = 0;

  // The blocks of k. Lanes 8q .. 8q + 7 copy the pieces of tokens 16 j + 4q .. 16 j + 4q + 3, one after the other. What
  // lies in rows past the last token goes into sums that nobody stores.
  __device__ __forceinline__ void copy_blocks(const Work& work) {
    constexpr int kGroups = kMaxTokens / 16;
    constexpr int kTogether = 4;  // groups looked up at once
    const int piece = lane_index() % 8;
    const int row = lane_index() / 8 * 4;
    const auto* const first_chunks = reinterpret_cast<const int4*>(shared.tokens[nth % 2].first_chunk + row);
    const int groups = (work.count + 15) / 16;
    for (int b = 0; b < p.k_blocks; ++b) {
      const uint32_t to = shared_address(ring.wait_empty()) + kWeightBytes;
      const bool inside = 8 * b + piece < p.k / 8;
      const uint4* const from = as_base(reinterpret_cast<const uint4*>(p.x) + (inside ? 8 * b + piece : 0));
      const CopyRows copy{{to + piece_place(row, piece), to + piece_place(row + 1, piece),
                           to + piece_place(row + 2, piece), to + piece_place(row + 3, piece)},
                          inside ? 16 : 0};
#pragma unroll
      for (int first = 0; first < kGroups; first += kTogether) {
        int4 chunks[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          chunks[i] = first_chunks[4 * (first + i)];
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          copy.go(first + i < groups, (first + i) * 16 * kRowBytes, from, chunks[i]);
        }
      }
      ring.publish_copies();
    }
  }
  // The same, of arranged tokens.
  __device__ __forceinline__ void copy_arranged(const Work& work) {
    const std::byte* from = p.tokens + int64_t{work.place} * kRowBytes;
    for (int b = 0; b < p.k_blocks; ++b) {
      std::byte* const to = ring.wait_empty() + kWeightBytes;
      if (lane_index() == 0) {
        ring.template ask_tokens<BLOCKS>(to, from, work.count);
      }
      ring.publish();
      from += int64_t{p.token_places} * kRowBytes;
    }
  }
  // The steps. A lane's piece is the same panel for all tokens: its own adapter's shrunk values, zeros of the others,
  // whose addresses are of no matter.
  __device__ __forceinline__ void copy_steps(const Work& work) {
    constexpr int kModules = GATE_UP ? 2 : 1;
    const TileTokens& tokens = shared.tokens[nth % 2];
    int lane = lane_index();
    asm volatile("" : "+r"(lane));  // so that no register keeps across items what follows from it
    const int piece = lane % 8;
    const int row = lane / 8 * 4;
    const int stride = p.lora.rank_stride / 8;  // chunks
    const auto* const shrunk =
        reinterpret_cast<const uint4*>(p.lora.shrunk) + int64_t{work.pair + row} * kModules * stride;
    StepPanel panel;
    for (int step = 0; step < tokens.num_steps; ++step) {
      panel.find(tokens, step * kStepPanels + piece);
      const bool there = panel.index >= 0;
      const int slot = there ? panel.of.slot : -1;
      const uint4* from[4];
      from[0] = as_base(shrunk + (there ? entry_module(panel.of) * stride + panel.index : 0));
#pragma unroll
      for (int j = 1; j < 4; ++j) {
        from[j] = as_base(from[0] + j * kModules * stride);
      }
      std::byte* const to = ring.wait_empty() + kWeightBytes + row * kRowBytes;
#pragma unroll
      for (int first = 0; first < kMaxTokens; first += kSlotTokens) {
        if (first < work.count) {
          copy_values(to, piece, row, tokens.slot + row, first, slot, from, 16 * kModules * stride);
        }
      }
      ring.publish_copies();
    }
  }
  // Tokens first .. first + kSlotTokens - 1 of the tile, one of 16 by this lane; `group`: chunks from 16 tokens to the
  // next.
  static __device__ __forceinline__ void copy_values(std::byte* to, int piece, int row, const int32_t* slots, int first,
                                                     int slot, const uint4* const (&from)[4], int group) {
    int4 of[kSlotTokens / 16];
#pragma unroll
    for (int i = 0; i < kSlotTokens / 16; ++i) {
      of[i] = *reinterpret_cast<const int4*>(slots + first + 16 * i);
    }
#pragma unroll
    for (int i = 0; i < kSlotTokens / 16; ++i) {
      const int at = first + 16 * i;
      const int own[4] = {of[i].x, of[i].y, of[i].z, of[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int place = piece_place(row + j, piece) - row * kRowBytes;
        async_copy16(to + place + at * kRowBytes, from[j] + at / 16 * group, own[j] == slot);
      }
    }
  }
  __device__ __forceinline__ void fill_all() {
    for (int item = first_item<BLOCKS>(); item < shared.items; item += item_step<BLOCKS>()) {
      const Work work = wait_described(shared, nth);
      if (p.tokens != nullptr) {
        copy_arranged(work);
      } else {
        copy_blocks(work);
      }
      if (p.lora.row_slot != nullptr) {
        copy_steps(work);
      }
      arrive_done(shared, nth);
      ++nth;
    }
    async_wait<0>();
  }
};

// --- The warp that runs an item ahead of all others.

// Row tiles of an item lie one after the other.
template <bool GATE_UP>
__device__ __forceinline__ void ask_weights_into_l2(const ExpertGemm& p, const Work& work) {
  if (lane_index() >= kRowTiles) {
    return;
  }
  const int64_t tile = work.row_block * kRowTiles + lane_index();
  if (tile >= p.row_tiles) {
    return;
  }
  const auto* const data = static_cast<const std::byte*>(p.low[work.expert]);
  const auto tile_bytes = static_cast<uint32_t>(p.k_blocks * kMxfp4TileBytes);
  prefetch_l2_bulk(data + tile * tile_bytes, tile_bytes);
  const auto scale_bytes = static_cast<uint32_t>((p.k_blocks + 3) / 4 * kMxfp4ScaleGroupBytes);
  prefetch_l2_bulk(p.scales[work.expert] + tile * scale_bytes, scale_bytes);
}

template <bool GATE_UP, class Source, int BLOCKS>
__device__ __forceinline__ void describe_items(const ExpertGemm& p, Shared& shared) {
  uint32_t nth = 0;
  for (int item = first_item<BLOCKS>(); item < shared.items; item += item_step<BLOCKS>()) {
    const Work work = find_tile<BLOCKS>(p, shared.tiles, shared.active, item);
    if constexpr (FillerOf<GATE_UP, Source>::Filler::kAhead) {
      ask_weights_into_l2<GATE_UP>(p, work);
    }
    TileTokens& tokens = shared.tokens[nth % 2];
    mbarrier_wait(&shared.done[nth % 2], item_parity(nth) ^ 1);
    const int described = (work.count + 15) / 16 * 16;  // tokens are copied in groups of 16
    for (int i = lane_index(); i < described; i += 32) {
      describe_token(p, work, tokens, i);
    }
    if (lane_index() == 0) {
      shared.work[nth % 2] = work;
    }
    __syncwarp();
    if (p.lora.row_slot != nullptr) {
      const int looked_at = (work.count + kSlotTokens - 1) / kSlotTokens * kSlotTokens;
      for (int i = described + lane_index(); i < looked_at; i += 32) {
        tokens.slot[i] = 0;
      }
      list_entries<GATE_UP>(p, work, tokens, shared.slots);
      __syncwarp();
    }
    mbarrier_arrive(&shared.described[nth % 2]);  // each lane for what it wrote
    ++nth;
  }
}

}  // namespace moelora::sm90
