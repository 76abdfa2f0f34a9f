// SPDX-License-Identifier: Apache-2.0
// What the kernels of the expert products share: parameters, the ways to fetch weights as mma fragments, adapters, and
// the epilogue. A row tile is 16 rows of an mma operand: for gate_up 8 gate outputs and the same 8 of up, so that
// a thread ends up with gate and up of the same tokens and applies the activation itself; for down 16 outputs.
// Included by moe_gate_up_cuda.cu and moe_down_cuda.cu.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/lora/lora_expand.cuh"
#include "kernels/moe/expert_path.h"
#include "kernels/moe/mxfp4_expand.cuh"
#include "kernels/moe/mxfp4_tiles.h"

namespace moelora {

constexpr int kExpertThreads = 256;
constexpr int kMaxExperts = 1024;

struct ExpertLora {
  AdapterTable table;
  const int32_t* row_slot = nullptr;  // null: no adapters at all
  const float* row_scale = nullptr;
  // [P, modules, rank_stride]; modules are gate and up, or down alone. Bf16 for kernels/moe/expert_prefill_sm90.cuh.
  const float* shrunk = nullptr;
  int rank_stride = 0;
  int layer = 0;
  // Few tokens: the deltas themselves (kernels/moe/expert_delta.cuh, expert_expand.cuh).
  float* delta = nullptr;      // [P, modules, rows], of pairs and modules that are adapted
  int32_t* adapted = nullptr;  // [P, modules], 0 = not
  // A shrink beside the product (kernels/moe/expert_few_lora.cuh).
  const int32_t* max_rank = nullptr;  // of the batch's adapters, a multiple of 8
  uint32_t* counters = nullptr;       // CudaStream::counters
};

// One product of all experts, passed to kernels by value. "low" are rows 0-7 of a row tile, "high" rows 8-15.
struct ExpertGemm {
  const void* const* low = nullptr;        // [E] rows: gate or down; tiles: all of it
  const void* const* high = nullptr;       // [E] rows: up or down
  const uint8_t* const* scales = nullptr;  // [E] tiles
  const float* low_bias = nullptr;         // [E, rows] or null
  const float* high_bias = nullptr;
  int low_step = 1;
  int high_step = 1;
  int rows = 0;  // outputs: I of gate_up, H of down
  int k = 0;
  int row_tiles = 0;
  int k_blocks = 0;                  // of 64 inputs, the last one perhaps not full
  const __nv_bfloat16* x = nullptr;  // by batch row, or by pair
  int64_t x_stride = 0;
  bool x_by_pair = false;
  // Many tokens: scratch for the tokens as kernels/moe/expert_tokens.cuh arranges them, null = there is none.
  std::byte* token_room = nullptr;
  const std::byte* tokens = nullptr;  // they are there
  int token_places = 0;
  MoeOrder order;
  ExpertLora lora;
  MoeActivation activation = MoeActivation::kSilu;
  float limit = 0.0f;
  void* out = nullptr;  // [P, rows]
  int64_t out_stride = 0;
  bool out_f32 = false;
};

__device__ __forceinline__ int lane_index() {
  return static_cast<int>(threadIdx.x % 32);
}
__device__ __forceinline__ int warp_index() {
  return static_cast<int>(threadIdx.x / 32);
}

// --- Weights. A source is this lane's view of one row tile of one expert; a block is its share of 64 inputs. load()
// brings a block into registers; copy() starts its way into kStageBytes of shared memory of this warp, past the L1, and
// fetch() takes it from there: a lane finds what it copied itself, so that no barrier is needed.

// What the weights of an expert are found by.
struct WeightPointers {
  const void* low;
  const void* high;  // rows: second matrix; tiles: scales
};

// bf16 rows. Chunks past k, which belong to the next row or to nobody, read as zeros; rows past the end read as the
// last one, whose results there nobody stores.
template <bool GATE_UP>
struct RowsSource {
  struct Block {
    uint4 low[2];
    uint4 high[2];
  };
  static __device__ __forceinline__ WeightPointers pointers(const ExpertGemm& p, int expert) {
    return {p.low[expert], p.high[expert]};
  }
  __device__ __forceinline__ void locate(const ExpertGemm& p, const WeightPointers& pointers, int tile) {
    const int g = lane_index() / 4;
    const int t = lane_index() % 4;
    const int first = (GATE_UP ? 8 : 16) * tile + g;
    const int64_t n_low = min(first, p.rows - 1);
    const int64_t n_high = min(GATE_UP ? first : first + 8, p.rows - 1);
    const int64_t row_chunks = p.k / 8;
    low_ = static_cast<const uint4*>(pointers.low) + n_low * p.low_step * row_chunks + t;
    high_ = static_cast<const uint4*>(pointers.high) + n_high * p.high_step * row_chunks + t;
    chunks_ = p.k / 8 - t;
  }
  __device__ __forceinline__ void locate(const ExpertGemm& p, int expert, int tile) {
    locate(p, pointers(p, expert), tile);
  }
  __device__ __forceinline__ void load(Block& block, int b) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int at = 8 * b + 4 * c;
      block.low[c] = at < chunks_ ? __ldg(low_ + at) : zero_chunk();
      block.high[c] = at < chunks_ ? __ldg(high_ + at) : zero_chunk();
    }
  }
  static constexpr int kStageBytes = 4 * 512;
  __device__ __forceinline__ void copy(std::byte* stage, int b) const {
    uint4* to = reinterpret_cast<uint4*>(stage) + lane_index();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int at = 8 * b + 4 * c;
      async_copy16(to + 64 * c, at < chunks_ ? low_ + at : low_, at < chunks_);
      async_copy16(to + 64 * c + 32, at < chunks_ ? high_ + at : high_, at < chunks_);
    }
  }
  static __device__ __forceinline__ void fetch(Block& block, const std::byte* stage) {
    const uint4* from = reinterpret_cast<const uint4*>(stage) + lane_index();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      block.low[c] = from[64 * c];
      block.high[c] = from[64 * c + 32];
    }
  }
  static __device__ __forceinline__ void chunk(const Block& block, int c, uint4& low, uint4& high) {
    low = block.low[c];
    high = block.high[c];
  }

 private:
  const uint4* low_;
  const uint4* high_;
  int chunks_;  // of a row, from chunk t on
};

// MXFP4 tiles, whole by their definition.
template <bool GATE_UP>
struct TilesSource {
  struct Block {
    uint4 data;
    uint32_t scales;
  };
  static __device__ __forceinline__ WeightPointers pointers(const ExpertGemm& p, int expert) {
    return {p.low[expert], p.scales[expert]};
  }
  __device__ __forceinline__ void locate(const ExpertGemm& p, const WeightPointers& pointers, int tile) {
    const int64_t groups = (p.k_blocks + 3) / 4;
    data_ = static_cast<const uint4*>(pointers.low) + int64_t{tile} * p.k_blocks * 32 + lane_index();
    scales_ = static_cast<const uint32_t*>(pointers.high) + tile * groups * 32 + lane_index() / 4 * 4;
  }
  __device__ __forceinline__ void locate(const ExpertGemm& p, int expert, int tile) {
    locate(p, pointers(p, expert), tile);
  }
  __device__ __forceinline__ void load(Block& block, int b) const {
    block.data = __ldg(data_ + static_cast<uint32_t>(b) * 32);
    block.scales = __ldg(scales_ + scale_at(b));
  }
  static constexpr int kStageBytes = 512 + 128;
  __device__ __forceinline__ void copy(std::byte* stage, int b) const {
    async_copy16(stage + 16 * lane_index(), data_ + static_cast<uint32_t>(b) * 32);
    async_copy4(stage + 512 + 4 * lane_index(), scales_ + scale_at(b));  // four blocks share a cache line
  }
  static __device__ __forceinline__ void fetch(Block& block, const std::byte* stage) {
    block.data = *reinterpret_cast<const uint4*>(stage + 16 * lane_index());
    block.scales = *reinterpret_cast<const uint32_t*>(stage + 512 + 4 * lane_index());
  }
  static __device__ __forceinline__ void chunk(const Block& block, int c, uint4& low, uint4& high) {
    const Mxfp4Scales scales(block.scales);
    low = expand_mxfp4(c == 0 ? block.data.x : block.data.z, scales.pair(c));
    high = expand_mxfp4(c == 0 ? block.data.y : block.data.w, scales.pair(2 + c));
  }

 private:
  static __device__ __forceinline__ uint32_t scale_at(int b) {
    const auto block = static_cast<uint32_t>(b);
    return block / 4 * 32 + block % 4;
  }
  const uint4* data_;
  const uint32_t* scales_;
};

// --- Adapters.

// What lane (g, t) knows about token g of each of NT groups of 8 tokens.
template <int NT>
struct TokenAdapters {
  int pair[NT];  // sorted position
  int slot[NT];  // 0 = none
  float scale[NT];

  // `row`: the batch's row of the pair, -1 = there is no such token. A scale of zero counts as no adapter.
  __device__ __forceinline__ void set(const ExpertLora& lora, int j, int sorted_pair, int row) {
    pair[j] = sorted_pair;
    slot[j] = row >= 0 ? __ldg(lora.row_slot + row) : 0;
    scale[j] = slot[j] != 0 ? __ldg(lora.row_scale + row) : 0.0f;
    if (scale[j] == 0.0f) {
      slot[j] = 0;
    }
  }
};

// delta[j] += B s and scale lora_bias of the tokens of `slot` for one module; what other tokens of the groups get is
// to be dropped. n_low, n_high: first outputs of rows g and g + 8, -1 = not of this module. False: nothing is adapted.
template <int NT>
__device__ __forceinline__ bool module_delta(float (&delta)[NT][4], const ExpertGemm& p,
                                             const TokenAdapters<NT>& tokens, int slot, int expert, ExpertModule module,
                                             int index, int num_modules, int n_low, int n_high) {
  const ResolvedLora* stored = p.lora.table.resolved_expert(slot, p.lora.layer, expert, module);
  LoraRecord record;
  record.rank = stored->rank;
  record.scale = stored->scale;
  record.b = stored->b;
  record.bias = stored->bias;
  if (record.rank == 0) {
    return false;
  }
  const float* s[NT];
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    s[j] = tokens.slot[j] == slot ? p.lora.shrunk + (int64_t{tokens.pair[j]} * num_modules + index) * p.lora.rank_stride
                                  : nullptr;
  }
  lora_expand<NT>(delta, p.lora.table, slot, record, n_low, n_high, s);
  if (record.bias >= 0) {
    const int g = lane_index() / 4;
    const bool has_low = n_low >= 0 && n_low + g < p.rows;
    const bool has_high = n_high >= 0 && n_high + g < p.rows;
    const float low = has_low ? lora_bias(p.lora.table, slot, record, n_low + g) : 0.0f;
    const float high = has_high ? lora_bias(p.lora.table, slot, record, n_high + g) : 0.0f;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Token 2t + i is the token g of lanes 4 (2t + i) and following.
        const float scale = __shfl_sync(0xffffffffu, tokens.scale[j], 8 * (lane_index() % 4) + 4 * i) * record.scale;
        delta[j][i] = fmaf(scale, low, delta[j][i]);
        delta[j][2 + i] = fmaf(scale, high, delta[j][2 + i]);
      }
    }
  }
  return true;
}

// Adds to each token's accumulators of a row tile what its adapter says, adapter by adapter. Called by whole warps. A
// delta reaches only its own tokens, by selection: neither an adapter's infinities nor a zero times them get into
// another token.
template <bool GATE_UP, int NT>
__device__ __forceinline__ void add_lora(float (&acc)[NT][4], const ExpertGemm& p, const TokenAdapters<NT>& tokens,
                                         int expert, int tile) {
  const int t = lane_index() % 4;
  int slot = 0;
  while (true) {
    int next = INT_MAX;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      if (tokens.slot[j] > slot) {
        next = min(next, tokens.slot[j]);
      }
    }
    slot = __reduce_min_sync(0xffffffffu, next);
    if (slot == INT_MAX) {
      return;
    }
    float delta[NT][4] = {};
    bool any;
    if constexpr (GATE_UP) {
      any = module_delta<NT>(delta, p, tokens, slot, expert, ExpertModule::kGate, 0, 2, 8 * tile, -1);
      any |= module_delta<NT>(delta, p, tokens, slot, expert, ExpertModule::kUp, 1, 2, -1, 8 * tile);
    } else {
      any = module_delta<NT>(delta, p, tokens, slot, expert, ExpertModule::kDown, 0, 1, 16 * tile, 16 * tile + 8);
    }
    if (!any) {
      continue;
    }
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const unsigned members = __ballot_sync(0xffffffffu, tokens.slot[j] == slot);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if ((members >> (8 * t + 4 * i) & 1u) != 0) {
          acc[j][i] += delta[j][i];
          acc[j][2 + i] += delta[j][2 + i];
        }
      }
    }
  }
}

// --- Epilogue.

__device__ __forceinline__ float activate(MoeActivation activation, float limit, float g, float u) {
  if (activation == MoeActivation::kSilu) {
    return g / (1.0f + __expf(-g)) * u;
  }
  g = fminf(g, limit);
  u = fminf(fmaxf(u, -limit), limit);
  return (u + 1.0f) * g / (1.0f + __expf(-1.702f * g));
}

__device__ __forceinline__ void store_output(const ExpertGemm& p, int64_t pair, int n, float value) {
  const int64_t at = pair * p.out_stride + n;
  if (p.out_f32) {
    static_cast<float*>(p.out)[at] = value;
  } else {
    static_cast<__nv_bfloat16*>(p.out)[at] = __float2bfloat16_rn(value);
  }
}

// This lane's biases of a row tile: of its output of rows 0-7, and of rows 8-15.
template <bool GATE_UP>
__device__ __forceinline__ float2 tile_bias(const ExpertGemm& p, int expert, int tile) {
  const int n_low = (GATE_UP ? 8 : 16) * tile + lane_index() / 4;
  const int n_high = GATE_UP ? n_low : n_low + 8;
  const int64_t bias = int64_t{static_cast<uint32_t>(expert)} * p.rows;  // no sign to keep in a register
  return {p.low_bias != nullptr && n_low < p.rows ? __ldg(p.low_bias + bias + n_low) : 0.0f,
          p.high_bias != nullptr && n_high < p.rows ? __ldg(p.high_bias + bias + n_high) : 0.0f};
}

// Bias, activation and store of one row tile of one group of 8 tokens, from sorted pair `pair` on, up to `end`.
template <bool GATE_UP>
__device__ __forceinline__ void finish_tile(const float (&acc)[4], const ExpertGemm& p, const float2& bias, int tile,
                                            int pair, int end) {
  const int n_low = (GATE_UP ? 8 : 16) * tile + lane_index() / 4;
  const int n_high = GATE_UP ? n_low : n_low + 8;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = pair + 2 * (lane_index() % 4) + i;
    if (at >= end) {
      continue;
    }
    const float low = acc[i] + bias.x;
    const float high = acc[2 + i] + bias.y;
    if constexpr (GATE_UP) {
      if (n_low < p.rows) {
        store_output(p, at, n_low, activate(p.activation, p.limit, low, high));
      }
    } else {
      if (n_low < p.rows) {
        store_output(p, at, n_low, low);
      }
      if (n_high < p.rows) {
        store_output(p, at, n_high, high);
      }
    }
  }
}

// Row of x of a sorted pair.
__device__ __forceinline__ const uint4* token_row(const ExpertGemm& p, int pair) {
  const int row = p.x_by_pair ? pair : __ldg(p.order.pair_row + pair);
  return reinterpret_cast<const uint4*>(p.x + row * p.x_stride);
}

}  // namespace moelora
