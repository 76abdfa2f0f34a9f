// SPDX-License-Identifier: Apache-2.0
// How kernels/moe/expert_prefill_sm90.cuh is filled where weights are MXFP4 and tokens are arranged: three warps expand
// the weights, since two would take longer than the tensor cores, and the last of them asks for the tokens, a bulk copy
// a block. Weights are loaded two blocks ahead, across items: a block takes the tensor cores some 800 cycles, a load
// from a busy L2 may take more.
#pragma once

#include "kernels/moe/expert_prefill_fill_sm90.cuh"

namespace moelora::sm90 {

// Row tiles of a warp.
constexpr int kExpandTiles = 3;
constexpr int kLastExpandTiles = kRowTiles - kWeightWarps * kExpandTiles;
static_assert(kLastExpandTiles > 0);

// A warp of TILES row tiles. `Steps` fills the warp's part of the blocks of adapters: the tokens' (TOKENS) or the
// weights'.
template <bool GATE_UP, int BLOCKS, int TILES, bool TOKENS, class Steps>
struct TileWarp {
  using Source = TilesSource<GATE_UP>;
  struct Block {
    typename Source::Block tiles[TILES];
  };
  const ExpertGemm& p;
  Shared& shared;
  Steps steps;
  int first_tile;  // of a row block
  // The next block to load.
  int load_item = first_item<BLOCKS>();
  int load_block = 0;
  uint32_t load_nth = 0;
  Source source[TILES];

  __device__ __forceinline__ void load(Block& block) {
    if (load_item >= shared.items) {
      return;
    }
    if (load_block == 0) {
      const Work& work = wait_described(shared, load_nth);
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        source[i].locate(p, work.expert, min(work.row_block * kRowTiles + first_tile + i, p.row_tiles - 1));
      }
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      source[i].load(block.tiles[i], load_block);
    }
    if (++load_block == p.k_blocks) {
      load_block = 0;
      load_item += item_step<BLOCKS>();
      ++load_nth;
    }
  }
  // Block b of an item. The tokens are asked for as soon as the stage is empty.
  __device__ __forceinline__ void store(const Block& block, const Work& work, int b) {
    std::byte* const stage = steps.ring.wait_empty();
    if (TOKENS && lane_index() == 0) {
      const int64_t place = int64_t{b} * p.token_places + work.place;
      steps.ring.template ask_tokens<BLOCKS>(stage + kWeightBytes, p.tokens + place * kRowBytes, work.count);
    }
    store_tiles(block.tiles, stage + first_tile * 16 * kRowBytes);
    steps.ring.publish();
  }
  __device__ __forceinline__ void fill_all() {
    // An item is described when everybody is done with the one before the last: of items of a single block, the next
    // but one must not be waited for before this one is done.
    const bool single = p.k_blocks == 1;
    Block ahead[2];
    load(ahead[0]);
    load(ahead[1]);
    // Loads into the registers that it has stored from: were a copy stored, the compiler would rather copy what it has
    // loaded, and wait for that.
    const auto fill = [&](Block& block, const Work& work, int b) {
      store(block, work, b);
      if (!single) {
        load(block);
      }
    };
    for (int item = first_item<BLOCKS>(); item < shared.items; item += item_step<BLOCKS>()) {
      const Work work = shared.work[steps.nth % 2];
      for (int b = 0; b < p.k_blocks; b += 2) {
        fill(ahead[0], work, b);
        if (b + 1 < p.k_blocks) {
          fill(ahead[1], work, b + 1);
        }
      }
      if (p.k_blocks % 2 != 0) {  // waits for the loads, with a ring ahead of the tensor cores
        const Block other = ahead[0];
        ahead[0] = ahead[1];
        ahead[1] = other;
      }
      if (p.lora.row_slot != nullptr) {
        steps.copy_steps(work);
      }
      arrive_done(shared, steps.nth);
      ++steps.nth;
      if (single) {
        load(ahead[1]);
      }
    }
    async_wait<0>();
  }
};

template <bool GATE_UP, int BLOCKS>
__device__ __forceinline__ void fill_tiles(const ExpertGemm& p, Shared& shared, std::byte* stages) {
  const RingWriter ring{shared, stages};
  const int warp = warp_index() - kMultiplyWarps;
  if (warp < kWeightWarps) {
    using Steps = WeightWarps<GATE_UP, TilesSource<GATE_UP>, BLOCKS>;
    TileWarp<GATE_UP, BLOCKS, kExpandTiles, false, Steps> expand{p, shared, Steps{p, shared, ring},
                                                                 warp * kExpandTiles};
    expand.fill_all();
  } else {
    using Steps = GatherWarp<GATE_UP, BLOCKS>;
    TileWarp<GATE_UP, BLOCKS, kLastExpandTiles, true, Steps> expand{p, shared, Steps{p, shared, ring},
                                                                    warp * kExpandTiles};
    expand.fill_all();
  }
}

}  // namespace moelora::sm90
