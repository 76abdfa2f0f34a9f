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
  int active;  // experts
  int items;
  uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t described[2];  // tokens and work are there
  uint64_t done[2];       // nobody needs them any more
};
// Arrivals that make a stage full: of the warps that bring weights, or of their threads where copies arrive by
// themselves, and of the threads that gather.
constexpr int full_arrivals(bool weights_by_warps) {
  return (weights_by_warps ? kWeightWarps : 32 * kWeightWarps) + 32;
}

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
__device__ __forceinline__ Work find_tile(const ExpertGemm& p, const ExpertTiles& tiles, int active, int row_groups,
                                          int item) {
  const PrefillWork found = find_work(p, tiles, active, row_groups, item);
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
      mbarrier_arrive(&shared.full[at.stage]);
    }
    at.advance();
  }
  // Ends a block that this thread has started to copy (COPIES), or has written its part of.
  template <bool COPIES>
  __device__ __forceinline__ void publish_thread() {
    if constexpr (COPIES) {
      async_arrive(&shared.full[at.stage]);
    } else {
      mbarrier_arrive(&shared.full[at.stage]);
    }
    at.advance();
  }
  // Ends a block whose `count` tokens lie in one piece. By a whole warp, of which each block of the cluster brings its
  // share to all of them.
  template <int BLOCKS>
  __device__ __forceinline__ void publish_bulk(std::byte* to, const std::byte* from, int count) {
    uint64_t* const full = &shared.full[at.stage];
    if (lane_index() == 0) {
      mbarrier_arrive_expect(full, static_cast<uint32_t>(count * kRowBytes));
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
    } else {
      mbarrier_arrive(full);
    }
    at.advance();
  }
};

// --- Weights. A filler of weights brings blocks of an item into stages, in turn: start() says which item comes next,
// while the one before it may still have a block to store.

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
  // Four rows' pieces would share banks two and two: lanes of odd rows take their second pieces first.
  static __device__ __forceinline__ void store(const typename Source::Block (&block)[kTilesPerWarp], std::byte* stage,
                                               int thread) {
    const int g = lane_index() / 4;
    const bool odd = g % 2 != 0;
    const uint32_t order = odd ? 0x2301u : 0x3210u;
    std::byte* to = stage + thread / 32 * kTilesPerWarp * 16 * kRowBytes + g * kRowBytes;
    const int first = (lane_index() % 4 ^ g ^ (odd ? 4 : 0)) * 16;
#pragma unroll
    for (int i = 0; i < kTilesPerWarp; ++i) {
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

// Infinities and NaN as the largest finite number.
__device__ __forceinline__ uint32_t finite_pair(uint32_t pair) {
  constexpr uint32_t kLargest = 0x7F7F7F7Fu;
  constexpr uint32_t kLeast = 0xFF7FFF7Fu;
  const __nv_bfloat162 least =
      __hmax2(reinterpret_cast<const __nv_bfloat162&>(pair), reinterpret_cast<const __nv_bfloat162&>(kLeast));
  const __nv_bfloat162 result = __hmin2(least, reinterpret_cast<const __nv_bfloat162&>(kLargest));
  return reinterpret_cast<const uint32_t&>(result);
}

// This lane's part of B of a step: panel t of rows g and g + 8 of its warp's row tiles.
struct AdapterRows {
  uint4 low[kTilesPerWarp];
  uint4 high[kTilesPerWarp];
};
template <bool GATE_UP>
__device__ __forceinline__ void load_adapter_rows(AdapterRows& rows, const ExpertGemm& p, const TileTokens& tokens,
                                                  const Work& work, int entry, int step, int warp) {
  const ResolvedLora& record = entry_record<GATE_UP>(p, tokens, work.expert, entry);
  const int panels = tokens.panels[entry];
  const int panel = step * kStepPanels + lane_index() % 4;
  const bool is_low = !GATE_UP || entry % 2 == 0;
  const bool is_high = !GATE_UP || entry % 2 == 1;
  const auto load = [&](int n, bool present) {
    if (!present || panel >= panels) {
      return zero_chunk();
    }
    const std::byte* granule = p.lora.table.resolved_granule(tokens.slots[entry / (GATE_UP ? 2 : 1)], record.b,
                                                             record.b_pages, n / kTileColumns * panels + panel);
    const uint4 chunk =
        __ldg(reinterpret_cast<const uint4*>(granule + n % kTileColumns / 8 * 128 + lane_index() / 4 * 16));
    return make_uint4(finite_pair(chunk.x), finite_pair(chunk.y), finite_pair(chunk.z), finite_pair(chunk.w));
  };
#pragma unroll
  for (int i = 0; i < kTilesPerWarp; ++i) {
    const int tile = min(work.row_block * kRowTiles + kTilesPerWarp * warp + i, p.row_tiles - 1);
    const int n_low = (GATE_UP ? 8 : 16) * tile;
    rows.low[i] = load(n_low, is_low);
    rows.high[i] = load(GATE_UP ? n_low : n_low + 8, is_high);
  }
}
// Once for the high and once for the low parts of the tokens' values.
__device__ __forceinline__ void store_adapter_rows(const AdapterRows& rows, std::byte* stage, int warp) {
  const int g = lane_index() / 4;
#pragma unroll
  for (int i = 0; i < kTilesPerWarp; ++i) {
    std::byte* to = stage + (kTilesPerWarp * warp + i) * 16 * kRowBytes;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int piece = lane_index() % 4 + (part ^ g % 2) * 4;
      *reinterpret_cast<uint4*>(to + piece_place(g, piece)) = rows.low[i];
      *reinterpret_cast<uint4*>(to + piece_place(g + 8, piece)) = rows.high[i];
    }
  }
}

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
        ring.template publish_thread<true>();
      }
    }
  }
  __device__ __forceinline__ void fill_steps(const Work& work) {
    const TileTokens& tokens = shared.tokens[nth % 2];
    for (int entry = 0; entry < tokens.num_entries; ++entry) {
      const int steps = tokens.first_step[entry + 1] - tokens.first_step[entry];
      for (int step = 0; step < steps; ++step) {
        AdapterRows rows;
        load_adapter_rows<GATE_UP>(rows, p, tokens, work, entry, step, thread() / 32);
        store_adapter_rows(rows, ring.wait_empty(), thread() / 32);
        if constexpr (Filler::kAhead) {
          ring.publish();
        } else {
          ring.template publish_thread<false>();
        }
      }
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
        fill_steps(shared.work[nth % 2]);
      }
      arrive_done(shared, nth);
      ++nth;
    }
    async_wait<0>();
  }
};

// --- Tokens.

// The tokens' operand of step `step` of an entry: a lane takes one panel of every 8th token.
template <bool GATE_UP>
__device__ __forceinline__ void fill_step(const ExpertGemm& p, const Work& work, const TileTokens& tokens, int entry,
                                          int step, int thread, std::byte* operand) {
  constexpr int kModules = GATE_UP ? 2 : 1;
  constexpr int kBatch = 8;  // tokens a thread whose values are on their way together
  constexpr int kStep = 32 / kStepPanels;
  const int slot = tokens.slots[entry / kModules];
  const int panel = step * kStepPanels + thread % kStepPanels;
  const bool present = panel < tokens.panels[entry];
  const float* const shrunk =
      p.lora.shrunk + (static_cast<int64_t>(work.pair) * kModules + entry % kModules) * p.lora.rank_stride + 8 * panel;
  for (int first = thread / kStepPanels; first < work.count; first += kStep * kBatch) {
    float4 values[kBatch][2];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int token = first + kStep * i;
      const bool own = present && token < work.count && tokens.slot[token] == slot;
      const auto* from = reinterpret_cast<const float4*>(shrunk + token * kModules * p.lora.rank_stride);
      values[i][0] = own ? __ldg(from) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      values[i][1] = own ? __ldg(from + 1) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int token = first + kStep * i;
      if (token < work.count) {
        const SplitChunk split = split_chunk(&values[i][0].x);
        *reinterpret_cast<uint4*>(operand + piece_place(token, thread % kStepPanels)) = split.high;
        *reinterpret_cast<uint4*>(operand + piece_place(token, thread % kStepPanels + 4)) = split.low;
      }
    }
  }
}

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
      ring.publish_thread<true>();
    }
  }
  // The same, of arranged tokens.
  __device__ __forceinline__ void copy_arranged(const Work& work) {
    const std::byte* from = p.tokens + int64_t{work.place} * kRowBytes;
    for (int b = 0; b < p.k_blocks; ++b) {
      std::byte* const to = ring.wait_empty() + kWeightBytes;
      ring.template publish_bulk<BLOCKS>(to, from, work.count);
      from += int64_t{p.token_places} * kRowBytes;
    }
  }
  __device__ __forceinline__ void fill_steps(const Work& work) {
    const TileTokens& tokens = shared.tokens[nth % 2];
    for (int entry = 0; entry < tokens.num_entries; ++entry) {
      const int steps = tokens.first_step[entry + 1] - tokens.first_step[entry];
      for (int step = 0; step < steps; ++step) {
        fill_step<GATE_UP>(p, work, tokens, entry, step, lane_index(), ring.wait_empty() + kWeightBytes);
        ring.publish_thread<false>();
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
        fill_steps(work);
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
__device__ __forceinline__ void describe_items(const ExpertGemm& p, Shared& shared, int row_groups) {
  uint32_t nth = 0;
  for (int item = first_item<BLOCKS>(); item < shared.items; item += item_step<BLOCKS>()) {
    const Work work = find_tile<BLOCKS>(p, shared.tiles, shared.active, row_groups, item);
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
      list_entries<GATE_UP>(p, work, tokens);
      __syncwarp();
    }
    if (lane_index() == 0) {
      mbarrier_arrive(&shared.described[nth % 2]);
    }
    ++nth;
  }
}

}  // namespace moelora::sm90
