// SPDX-License-Identifier: Apache-2.0
// What the two sides of kernels/moe/expert_prefill_sm90.cuh know about a tile of tokens, and the adapters of a tile.
//
// A tile's LoRA is further inputs of its products: after the blocks of k come steps of 64 inputs, eight panels of 8
// ranks. The panels of all entries (a module of an adapter) are packed one after the other, so that short entries share
// a step. The weight operand of a panel is B, zeros in the rows of the other module; the tokens' are the shrunk values
// in bf16 of the tokens of that adapter, zeros for all others. An entry begins at an even panel: 16 inputs are what one
// product of the tensor cores adds up at once, so a token's bits do not depend on what other adapters the tile has.
// That a zero adds nothing holds because B is finite (kernels/lora/adapter_layout.h); whatever becomes of a token's own
// shrunk values stays in its column.
#pragma once

#include <climits>

#include "kernels/moe/expert_prefill.cuh"

namespace moelora::sm90 {

constexpr int kMultiplyThreads = 256;  // two warpgroups
constexpr int kMultiplyWarps = kMultiplyThreads / 32;
constexpr int kRowTiles = kMultiplyWarps;  // of 16 rows, of a block
constexpr int kMaxTokens = 256;            // of a tile
constexpr int kSlotTokens = 64;            // whose slots are looked at together
constexpr int kStepPanels = 8;             // panels of 8 ranks, of a step
constexpr int kEntryPanels = 2;            // entries begin at multiples of it

// One work item: a tile of an expert.
struct Work {
  int expert;
  int row_block;
  int pair;   // first sorted pair of the token tile
  int count;  // tokens, > 0
  int place;  // of the first pair among arranged tokens
};

// A module of an adapter of a tile, with at least one panel.
struct alignas(16) LoraEntry {
  int32_t slot;
  int32_t first;    // panel of the tile's steps, a multiple of kEntryPanels
  uint32_t shape;   // see entry_shape
  int32_t granule;  // of the pool, where B of the item's rows begins: [column tile][panel]
};
// Granules from the first one to its page's end, panels, and the module: 0 gate or down, 1 up.
__device__ __forceinline__ uint32_t entry_shape(int run, int panels, int module) {
  return static_cast<uint32_t>(min(run, 0xFFFF)) << 16 | static_cast<uint32_t>(panels * 2 + module);
}
__device__ __forceinline__ int entry_run(const LoraEntry& entry) {
  return static_cast<int>(entry.shape >> 16);
}
__device__ __forceinline__ int entry_panels(const LoraEntry& entry) {
  return static_cast<int>(entry.shape % 0x10000u / 2);
}
__device__ __forceinline__ int entry_module(const LoraEntry& entry) {
  return static_cast<int>(entry.shape % 2);
}
// With those that only fill up.
__device__ __forceinline__ int padded_panels(int panels) {
  return (panels + kEntryPanels - 1) / kEntryPanels * kEntryPanels;
}

// What a block must know about the tokens of a tile.
struct TileTokens {
  alignas(16) int32_t first_chunk[kMaxTokens];  // of the token's row in x; tokens past the end repeat the last
  // With adapters only:
  alignas(16) int32_t slot[kMaxTokens];  // 0 = none
  float scale[kMaxTokens];
  LoraEntry entries[2 * kMaxTokens];  // by slot, then module
  int32_t next_page[2 * kMaxTokens];  // of the entries: pool granule where the page after the first begins
  int32_t num_entries;
  int32_t num_steps;
  int32_t has_bias;  // of any entry
};

template <bool GATE_UP>
__device__ __forceinline__ const ResolvedLora& entry_record(const ExpertGemm& p, int expert, int slot, int module) {
  const auto of = GATE_UP ? static_cast<ExpertModule>(module) : ExpertModule::kDown;
  return *p.lora.table.resolved_expert(slot, p.lora.layer, expert, of);
}

// --- B of the rows of an item: column tiles of 64 outputs, each `panels` granules of 64 pieces (16 bytes: 8 ranks of
// an output).

template <bool GATE_UP>
constexpr int kItemColumnTiles = GATE_UP ? 1 : 2;
static_assert(kRowTiles * 8 == kTileColumns, "gate_up: an item's gate rows, and its up rows, are one column tile");

// Column tiles of the item that B has.
template <bool GATE_UP>
__device__ __forceinline__ int item_column_tiles(const ExpertGemm& p, const Work& work) {
  const int first = kItemColumnTiles<GATE_UP> * work.row_block;
  return min((p.rows + kTileColumns - 1) / kTileColumns - first, kItemColumnTiles<GATE_UP>);
}

// Finds granule, run and next page of an entry, and asks B into the L2.
template <bool GATE_UP>
__device__ __forceinline__ void locate_entry(const ExpertGemm& p, const Work& work, const ResolvedLora& record,
                                             int module, LoraEntry& entry, int& next_page) {
  const AdapterTable& table = p.lora.table;
  const int panels = (record.rank + kTileRanks - 1) / kTileRanks;
  const int first = record.b + kItemColumnTiles<GATE_UP> * work.row_block * panels;
  const int count = panels * item_column_tiles<GATE_UP>(p, work);
  if (count <= 0) {  // a block without rows: its stages get zeros
    entry.shape = entry_shape(0, panels, module);
    return;
  }
  const int page = first / table.page_granules;
  const auto page_begin = [&](int index) {
    const int nth = index - record.b / table.page_granules;
    const int id = nth < ResolvedLora::kPages
                       ? record.b_pages[nth]
                       : table.page_table[static_cast<int64_t>(entry.slot) * table.pages_per_slot + index];
    return id * table.page_granules;
  };
  const int inside = first - page * table.page_granules;
  const int run = table.page_granules - inside;
  entry.granule = page_begin(page) + inside;
  entry.shape = entry_shape(run, panels, module);
  next_page = count > run ? page_begin(page + 1) : 0;
  prefetch_l2_bulk(table.pool + entry.granule * static_cast<int64_t>(kGranuleBytes),
                   static_cast<uint32_t>(min(run, count)) * static_cast<uint32_t>(kGranuleBytes));
}

// Granule `index` of the item's part of an entry's B.
template <bool GATE_UP>
__device__ __forceinline__ const std::byte* entry_granule(const ExpertGemm& p, const Work& work, const LoraEntry& entry,
                                                          int next_page, int index) {
  const AdapterTable& table = p.lora.table;
  const int run = entry_run(entry);
  if (index < run + table.page_granules) {
    const int granule = index < run ? entry.granule + index : next_page + (index - run);
    return table.pool + granule * static_cast<int64_t>(kGranuleBytes);
  }
  const ResolvedLora& record = entry_record<GATE_UP>(p, work.expert, entry.slot, entry_module(entry));
  const int first = kItemColumnTiles<GATE_UP> * work.row_block * entry_panels(entry);
  return table.resolved_granule(entry.slot, record.b, record.b_pages, first + index);
}

// A thread's panel of the steps of a tile, looked up with `at` ascending.
struct StepPanel {
  int entry = 0;
  LoraEntry of{};
  int index = -1;  // panel of the entry, -1 = there is none

  __device__ __forceinline__ void find(const TileTokens& tokens, int at) {
    index = -1;
    for (; entry < tokens.num_entries; ++entry) {
      of = tokens.entries[entry];
      const int panels = entry_panels(of);
      if (at - of.first < padded_panels(panels)) {
        index = at - of.first < panels ? at - of.first : -1;
        return;
      }
    }
  }
};

// --- By the warp that runs an item ahead of all others.

// The different slots of the tile's tokens, ascending; returns how many.
__device__ __forceinline__ int list_slots(const Work& work, const TileTokens& tokens, int32_t* slots) {
  int slot = 0;
  int count = 0;
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
      slots[count] = slot;
    }
    ++count;
  }
  __syncwarp();
  return count;
}

// Once the slots of the tokens are there. `slots`: room for kMaxTokens.
template <bool GATE_UP>
__device__ __forceinline__ void list_entries(const ExpertGemm& p, const Work& work, TileTokens& tokens,
                                             int32_t* slots) {
  constexpr int kModules = GATE_UP ? 2 : 1;
  const int candidates = list_slots(work, tokens, slots) * kModules;
  int entries = 0;
  int total = 0;  // panels
  bool any_bias = false;
  for (int base = 0; base < candidates; base += 32) {
    const int candidate = base + lane_index();
    LoraEntry entry{};
    int next_page = 0;
    int panels = 0;
    if (candidate < candidates) {
      entry.slot = slots[candidate / kModules];
      const int module = candidate % kModules;
      const ResolvedLora& record = entry_record<GATE_UP>(p, work.expert, entry.slot, module);
      panels = (record.rank + kTileRanks - 1) / kTileRanks;
      if (panels > 0) {
        locate_entry<GATE_UP>(p, work, record, module, entry, next_page);
        any_bias = any_bias || record.bias >= 0;
      }
    }
    const unsigned present = __ballot_sync(0xffffffffu, panels > 0);
    int sum = padded_panels(panels);  // inclusive scan
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, sum, offset);
      sum += lane_index() >= offset ? below : 0;
    }
    if (panels > 0) {
      const int at = entries + __popc(present & ((1u << lane_index()) - 1));
      entry.first = total + sum - padded_panels(panels);
      tokens.entries[at] = entry;
      tokens.next_page[at] = next_page;
    }
    entries += __popc(present);
    total += __shfl_sync(0xffffffffu, sum, 31);
  }
  any_bias = __ballot_sync(0xffffffffu, any_bias) != 0;
  if (lane_index() == 0) {
    tokens.num_entries = entries;
    tokens.num_steps = (total + kStepPanels - 1) / kStepPanels;
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
    const int slot = tokens.entries[entry].slot;
    const int module = entry_module(tokens.entries[entry]);
    const ResolvedLora& record = entry_record<GATE_UP>(p, work.expert, slot, module);
    if (record.bias < 0) {
      continue;
    }
    const float record_scale = record.scale;
    const bool is_low = !GATE_UP || module == 0;
    const bool is_high = !GATE_UP || module == 1;
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
