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

#include "kernels/cuda/wgmma.cuh"
#include "kernels/moe/expert_prefill.cuh"

namespace moelora::sm90 {

constexpr int kMultiplyThreads = 256;  // two warpgroups
constexpr int kFillThreads = 128;
constexpr int kThreads = kMultiplyThreads + kFillThreads;
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
};

// A stage of a ring, and the parity of its use.
template <int STAGES>
struct RingPlaceOf {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  [[nodiscard]] __device__ __forceinline__ int previous() const { return stage == 0 ? STAGES - 1 : stage - 1; }
};

template <int W>
__device__ __forceinline__ Work find_tile(const ExpertGemm& p, const ExpertTiles& tiles, int active, int row_blocks,
                                          int item) {
  const PrefillWork found = find_work(p, tiles, active, row_blocks, item);
  Work work;
  work.expert = found.expert;
  work.row_block = found.row_block;
  work.pair = found.begin + found.token_tile * W;
  work.count = min(found.end - work.pair, W);
  return work;
}

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

// --- By the warpgroup that fills.

// By its first warp, once the slots are there.
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

// By the whole warpgroup; ends with its barrier.
template <bool GATE_UP, int W>
__device__ __forceinline__ void describe_tokens(const ExpertGemm& p, const Work& work, TileTokens& tokens, int thread) {
  const bool adapters = p.lora.row_slot != nullptr;
  for (int i = thread; i < W; i += kFillThreads) {
    describe_token(p, work, tokens, i);
  }
  if (adapters) {
    barrier_sync(1, kFillThreads);  // slots are there
    if (thread < 32) {
      list_entries<GATE_UP>(p, work, tokens);
    }
  }
  barrier_sync(1, kFillThreads);
}

// Where the words of chunk c (of 8) of token row go: words w of chunks 4h .. 4h + 3 are piece 4h + w. A warp's stores
// of one word cover all banks if its lanes are eight chunks of four rows, or four of eight.
__device__ __forceinline__ void store_chunk(std::byte* stage, int row, int c, const uint4& chunk) {
  const int first_piece = c / 4 * 4 ^ row % 8;  // of word 0
  auto* to = reinterpret_cast<uint32_t*>(stage + row * 128) + c % 4;
  to[(first_piece ^ 0) * 4] = chunk.x;
  to[(first_piece ^ 1) * 4] = chunk.y;
  to[(first_piece ^ 2) * 4] = chunk.z;
  to[(first_piece ^ 3) * 4] = chunk.w;
}

// The tokens' operand of step `step` of an entry: a thread takes one panel of every 32nd token.
template <bool GATE_UP, int W>
__device__ __forceinline__ void fill_step(const ExpertGemm& p, const Work& work, const TileTokens& tokens, int entry,
                                          int step, int thread, std::byte* stage) {
  constexpr int kModules = GATE_UP ? 2 : 1;
  constexpr int kBatch = 4;  // tokens a thread whose values are on their way together
  const int slot = tokens.slots[entry / kModules];
  const int panel = step * kStepPanels + thread % 4;
  const bool present = panel < tokens.panels[entry];
  const float* const shrunk =
      p.lora.shrunk + (static_cast<int64_t>(work.pair) * kModules + entry % kModules) * p.lora.rank_stride + 8 * panel;
  for (int first = thread / 4; first < W; first += 32 * kBatch) {
    float4 values[kBatch][2];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int token = first + 32 * i;
      const bool own = present && token < work.count && tokens.slot[token] == slot;
      const auto* from = reinterpret_cast<const float4*>(shrunk + token * kModules * p.lora.rank_stride);
      values[i][0] = own ? __ldg(from) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      values[i][1] = own ? __ldg(from + 1) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int token = first + 32 * i;
      if (token < W) {
        const SplitChunk split = split_chunk(&values[i][0].x);
        store_chunk(stage, token, thread % 4, split.high);
        store_chunk(stage, token, thread % 4 + 4, split.low);
      }
    }
  }
}

// --- By the warps that multiply.

// Starts the way of this lane's part of B for a step to 1 KiB of shared memory.
template <bool GATE_UP>
__device__ __forceinline__ void copy_step(const ExpertGemm& p, const TileTokens& tokens, int expert, int tile, int step,
                                          std::byte* stage) {
  int low = 0;  // the last entry that begins at or before the step: those without steps come before it
  int high = tokens.num_entries;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (tokens.first_step[middle] <= step ? low : high) = middle;
  }
  const int entry = low;
  const ResolvedLora& record = entry_record<GATE_UP>(p, tokens, expert, entry);
  const int panels = tokens.panels[entry];
  const int panel = (step - tokens.first_step[entry]) * kStepPanels + lane_index() % 4;
  const bool is_low = !GATE_UP || entry % 2 == 0;
  const bool is_high = !GATE_UP || entry % 2 == 1;
  const auto b_chunk = [&](int n) {
    const std::byte* granule =
        p.lora.table.resolved_granule(tokens.slots[entry / (GATE_UP ? 2 : 1)], record.b, record.b_pages,
                                      n / kTileColumns * panels + min(panel, panels - 1));
    return granule + n % kTileColumns / 8 * 128 + lane_index() / 4 * 16;
  };
  const int n_low = (GATE_UP ? 8 : 16) * tile;
  const int n_high = GATE_UP ? n_low : n_low + 8;
  async_copy16(stage + 16 * lane_index(), b_chunk(n_low), is_low && panel < panels);
  async_copy16(stage + 512 + 16 * lane_index(), b_chunk(n_high), is_high && panel < panels);
}

__device__ __forceinline__ uint32_t finite_pair(uint32_t pair) {
  constexpr uint32_t kLargest = 0x7F7F7F7Fu;
  constexpr uint32_t kLeast = 0xFF7FFF7Fu;
  const __nv_bfloat162 least =
      __hmax2(reinterpret_cast<const __nv_bfloat162&>(pair), reinterpret_cast<const __nv_bfloat162&>(kLeast));
  const __nv_bfloat162 result = __hmin2(least, reinterpret_cast<const __nv_bfloat162&>(kLargest));
  return reinterpret_cast<const uint32_t&>(result);
}
// The registers of the first 32 inputs, and again those of the others.
__device__ __forceinline__ void fetch_step(uint32_t (&a)[8], const std::byte* stage) {
  const uint4 low = *reinterpret_cast<const uint4*>(stage + 16 * lane_index());
  const uint4 high = *reinterpret_cast<const uint4*>(stage + 512 + 16 * lane_index());
  a[0] = finite_pair(low.x);
  a[1] = finite_pair(high.x);
  a[2] = finite_pair(low.y);
  a[3] = finite_pair(high.y);
  a[4] = finite_pair(low.z);
  a[5] = finite_pair(high.z);
  a[6] = finite_pair(low.w);
  a[7] = finite_pair(high.w);
}

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

// --- The end of an item.

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

// Eight outputs from n on of eight tokens from `token` on; values of output g and tokens 2t, 2t + 1. Stored as pairs of
// outputs of token g where the rows allow it.
__device__ __forceinline__ void store_group(const ExpertGemm& p, const Work& work, int token, int n, float first,
                                            float second, bool in_pairs) {
  const int g = lane_index() / 4;
  const int t = lane_index() % 4;
  if (in_pairs) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
    const uint32_t outputs = transpose8(reinterpret_cast<const uint32_t&>(both));
    if (token + g < work.count) {
      auto* to =
          static_cast<__nv_bfloat16*>(p.out) + static_cast<int64_t>(work.pair + token + g) * p.out_stride + n + 2 * t;
      if (n + 2 * t + 1 < p.rows) {
        *reinterpret_cast<uint32_t*>(to) = outputs;
      } else if (n + 2 * t < p.rows) {
        *to = reinterpret_cast<const __nv_bfloat162&>(outputs).x;
      }
    }
    return;
  }
  if (n + g < p.rows) {
    if (token + 2 * t < work.count) {
      store_output(p, work.pair + token + 2 * t, n + g, first);
    }
    if (token + 2 * t + 1 < work.count) {
      store_output(p, work.pair + token + 2 * t + 1, n + g, second);
    }
  }
}

// Bias, activation and store.
template <bool GATE_UP, int COUNT>
__device__ __forceinline__ void store_tile(const float (&acc)[COUNT], const ExpertGemm& p, const Work& work, int tile) {
  const int n_low = (GATE_UP ? 8 : 16) * tile;
  const int n_high = GATE_UP ? n_low : n_low + 8;
  const float2 bias = tile_bias<GATE_UP>(p, work.expert, tile);
  const bool in_pairs = !p.out_f32 && (reinterpret_cast<uintptr_t>(p.out) % 4 | p.out_stride % 2) == 0;
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    const int token = 2 * i;
    if (token >= work.count) {
      continue;
    }
    const float low[2] = {acc[i] + bias.x, acc[i + 1] + bias.x};
    const float high[2] = {acc[i + 2] + bias.y, acc[i + 3] + bias.y};
    if constexpr (GATE_UP) {
      store_group(p, work, token, n_low, activate(p.activation, p.limit, low[0], high[0]),
                  activate(p.activation, p.limit, low[1], high[1]), in_pairs);
    } else {
      store_group(p, work, token, n_low, low[0], low[1], in_pairs);
      store_group(p, work, token, n_high, high[0], high[1], in_pairs);
    }
  }
}

}  // namespace moelora::sm90
