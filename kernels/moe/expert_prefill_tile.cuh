// SPDX-License-Identifier: Apache-2.0
// What the two sides of kernels/moe/expert_prefill_sm90.cuh know about a tile of tokens, and the adapters of a tile.
//
// A tile's LoRA is further inputs of its products: after the blocks of k come steps, one for every adapter of the tile,
// module and 32 ranks. The weight operand of a step is B, the tokens' are the shrunk values of the tokens of that
// adapter, their bf16 high parts as the first 32 inputs, what is left as the other 32 (so B comes twice), and zeros for
// all other tokens. That a zero adds nothing must hold for any B: infinities and NaN in it count as the largest finite
// number.
#pragma once

#include <climits>

#include "kernels/moe/expert_prefill.cuh"

namespace moelora::sm90 {

constexpr int kMultiplyThreads = 256;  // two warpgroups
constexpr int kMultiplyWarps = kMultiplyThreads / 32;
constexpr int kRowTiles = kMultiplyWarps;  // of 16 rows, of a block
constexpr int kMaxTokens = 256;            // of a tile
constexpr int kStepPanels = 4;             // panels of 8 ranks, of a step

// One work item: a tile of an expert.
struct Work {
  int expert;
  int row_block;
  int pair;   // first sorted pair of the token tile
  int count;  // tokens, > 0
  int place;  // of the first pair among arranged tokens
};

// What a block must know about the tokens of a tile. An entry is a module of an adapter: entry MODULES i + m is module
// m of adapter slots[i].
struct TileTokens {
  alignas(16) int32_t first_chunk[kMaxTokens];  // of the token's row in x; tokens past the end repeat the last
  // With adapters only:
  int32_t slot[kMaxTokens];  // 0 = none
  float scale[kMaxTokens];
  int32_t slots[kMaxTokens];  // different ones, ascending
  int32_t panels[2 * kMaxTokens];
  int32_t first_step[2 * kMaxTokens + 1];
  int32_t num_entries;
  int32_t num_steps;
  int32_t has_bias;  // of any entry
};

template <bool GATE_UP>
__device__ __forceinline__ const ResolvedLora& entry_record(const ExpertGemm& p, const TileTokens& tokens, int expert,
                                                            int entry) {
  constexpr int kModules = GATE_UP ? 2 : 1;
  const auto module = GATE_UP ? static_cast<ExpertModule>(entry % kModules) : ExpertModule::kDown;
  return *p.lora.table.resolved_expert(tokens.slots[entry / kModules], p.lora.layer, expert, module);
}

// --- By the warp that runs an item ahead of all others.

// Once the slots are there.
template <bool GATE_UP>
__device__ __forceinline__ void list_entries(const ExpertGemm& p, const Work& work, TileTokens& tokens) {
  int slot = 0;
  int slots = 0;
  while (true) {
    int next = INT_MAX;
    for (int i = lane_index(); i < work.count; i += 32) {
      const int other = tokens.slot[i];
      next = other > slot ? min(next, other) : next;
    }
    slot = __reduce_min_sync(0xffffffffu, next);
    if (slot == INT_MAX) {
      break;
    }
    if (lane_index() == 0) {
      tokens.slots[slots] = slot;
    }
    ++slots;
  }
  __syncwarp();
  const int entries = slots * (GATE_UP ? 2 : 1);
  int total = 0;
  bool any_bias = false;
  for (int first = 0; first < entries; first += 32) {
    const int entry = first + lane_index();
    int panels = 0;
    if (entry < entries) {
      const ResolvedLora& record = entry_record<GATE_UP>(p, tokens, work.expert, entry);
      panels = (record.rank + kTileRanks - 1) / kTileRanks;
      any_bias = any_bias || (panels > 0 && record.bias >= 0);
    }
    const int steps = (panels + kStepPanels - 1) / kStepPanels;
    int sum = steps;  // inclusive scan
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, sum, offset);
      sum += lane_index() >= offset ? below : 0;
    }
    if (entry < entries) {
      tokens.panels[entry] = panels;
      tokens.first_step[entry] = total + sum - steps;
    }
    total += __shfl_sync(0xffffffffu, sum, 31);
  }
  any_bias = __ballot_sync(0xffffffffu, any_bias) != 0;
  if (lane_index() == 0) {
    tokens.first_step[entries] = total;
    tokens.num_entries = entries;
    tokens.num_steps = total;
    tokens.has_bias = any_bias ? 1 : 0;
  }
}

// Token i of the tile; those past the end repeat the last.
__device__ __forceinline__ void describe_token(const ExpertGemm& p, const Work& work, TileTokens& tokens, int i) {
  const bool adapters = p.lora.row_slot != nullptr;
  const int pair = work.pair + min(i, work.count - 1);
  const int row = p.x_by_pair && !adapters ? 0 : __ldg(p.order.pair_row + pair);
  tokens.first_chunk[i] = (p.x_by_pair ? pair : row) * static_cast<int>(p.x_stride / 8);
  if (adapters) {
    const int slot = i < work.count ? __ldg(p.lora.row_slot + row) : 0;
    const float scale = slot != 0 ? __ldg(p.lora.row_scale + row) : 0.0f;
    tokens.slot[i] = scale != 0.0f ? slot : 0;  // a scale of zero counts as no adapter
    tokens.scale[i] = scale;
  }
}

// --- By the warps that multiply.

// lora_B.bias of output n + g, 0 if there is none.
__device__ __forceinline__ float load_lora_bias(const ExpertGemm& p, int slot, const ResolvedLora& record, int n) {
  constexpr int kPerGranule = kGranuleBytes / sizeof(float);
  const int output = n + lane_index() / 4;
  if (output >= p.rows) {
    return 0.0f;
  }
  const std::byte* granule = p.lora.table.granule(slot, record.bias + output / kPerGranule);
  return reinterpret_cast<const float*>(granule)[output % kPerGranule];
}

// scale times lora_B.bias of every entry.
template <bool GATE_UP, int COUNT>
__device__ __forceinline__ void add_lora_bias(float (&acc)[COUNT], const ExpertGemm& p, const TileTokens& tokens,
                                              const Work& work, int tile) {
  for (int entry = 0; entry < tokens.num_entries; ++entry) {
    const ResolvedLora& record = entry_record<GATE_UP>(p, tokens, work.expert, entry);
    if (tokens.panels[entry] == 0 || record.bias < 0) {
      continue;
    }
    const int slot = tokens.slots[entry / (GATE_UP ? 2 : 1)];
    const float record_scale = record.scale;
    const bool is_low = !GATE_UP || entry % 2 == 0;
    const bool is_high = !GATE_UP || entry % 2 == 1;
    const int n_low = (GATE_UP ? 8 : 16) * tile;
    const float low = is_low ? load_lora_bias(p, slot, record, n_low) : 0.0f;
    const float high = is_high ? load_lora_bias(p, slot, record, GATE_UP ? n_low : n_low + 8) : 0.0f;
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int token = 2 * i + lane_index() % 4 * 2 + side;
        if (token < work.count && tokens.slot[token] == slot) {
          const float scale = tokens.scale[token] * record_scale;
          acc[i + side] = fmaf(scale, low, acc[i + side]);
          acc[i + 2 + side] = fmaf(scale, high, acc[i + 2 + side]);
        }
      }
    }
  }
}

}  // namespace moelora::sm90
