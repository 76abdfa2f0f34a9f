// SPDX-License-Identifier: Apache-2.0
// LoRA inside the expert products of at most 8 rows (kernels/moe/expert_few.cuh).
// Expand, as the tail of a row tile: the warp that finishes it adds B s to the sums it stores. Who its tokens' adapters
// are it looks up while its next weights come, and asks B into the L2 then; what is left for the end is one access of B
// and s side by side. A quad has the four panels of 32 ranks of one output, in fp32.
// Shrink, by blocks of the same grid before their share of the weights, whose first copies are on their way: an item is
// a panel of 8 ranks of one (expert, adapter, module) with all its tokens; the 8 warps cut the inputs, their sums are
// added in the order of the warps. The first blocks of the grid take the items in turn, and a smaller share of the
// weights. Whoever needs shrunk values waits until all items are counted (kernels/cuda/counter.cuh).
// A token's delta depends on its row, k and its adapter.
#pragma once

#include <cstdint>

#include "kernels/cuda/counter.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/lora/lora_expand.cuh"
#include "kernels/moe/expert_gemm.cuh"

namespace moelora::few {

constexpr int kRowsMax = 8;
constexpr int kPairsMax = 64;
constexpr int kExpertsMax = 256;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 2;

constexpr int kTilesPerItem = 3;  // row tiles that a block leaves to others for an item of the shrink

// Where the adapters' deltas come from: nowhere; memory, whole, from the kernel ahead; the tail, from values shrunk by
// blocks of this kernel.
enum class Lora : uint8_t { kNone, kDeltas, kBeside };

// --- Expand.

// Of the tokens of one expert: [token][module].
template <bool GATE_UP>
struct Adapters {
  static constexpr int kModules = GATE_UP ? 2 : 1;
  LoraToken of[kRowsMax * kModules];
  int expert;  // -1: none yet
};

// What a warp finds out for the row tiles that it finishes.
template <bool GATE_UP>
__device__ __forceinline__ void find_adapters(const ExpertGemm& p, int expert, int begin, int end,
                                              Adapters<GATE_UP>& found) {
  constexpr int kModules = Adapters<GATE_UP>::kModules;
  __syncwarp();  // what was found before is read
  if (lane_index() < kRowsMax * kModules) {
    const int pair = begin + lane_index() / kModules;
    const ResolvedLora* record = nullptr;
    int slot = 0;
    float scale = 0.0f;
    if (pair < end) {
      const int row = __ldcg(p.order.pair_row + pair);
      slot = p.lora.row_slot[row];
      scale = p.lora.row_scale[row];
      if (slot != 0) {
        const ExpertModule module =
            !GATE_UP ? ExpertModule::kDown : (lane_index() % 2 == 0 ? ExpertModule::kGate : ExpertModule::kUp);
        record = p.lora.table.resolved_expert(slot, p.lora.layer, expert, module);
      }
    }
    found.of[lane_index()] = lora_token(record, slot, scale);
  }
  if (lane_index() == 0) {
    found.expert = expert;
  }
  __syncwarp();  // all are found
}

// Output g of half 0 or 1 of a row tile.
template <bool GATE_UP>
__device__ __forceinline__ int output_of(int tile, int half) {
  return (GATE_UP ? 8 * tile : 16 * tile + 8 * half) + lane_index() / 4;
}

// Asks for the rows of B of a row tile: a line of 8 outputs, or two, of each token's panels.
template <bool GATE_UP>
__device__ __forceinline__ void prefetch_b(const ExpertGemm& p, int tile, const Adapters<GATE_UP>& adapters) {
  constexpr int kModules = Adapters<GATE_UP>::kModules;
  static_assert(kRowsMax == 8);  // a quad a token
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const LoraToken& token = adapters.of[lane_index() / 4 * kModules + (GATE_UP ? half : 0)];
    const int panels = (token.rank + kTileRanks - 1) / kTileRanks;
    const int n = GATE_UP ? 8 * tile : 16 * tile + 8 * half;
#pragma unroll 1
    for (int panel = lane_index() % 4; panel < panels && n < p.rows; panel += 4) {
      prefetch_l2(paged_granule(p.lora.table, token.slot, token.b, token.b_pages, n / kTileColumns * panels + panel) +
                  n % kTileColumns * 16);
    }
  }
}

// This lane's part of a token's deltas of its outputs of both halves of a row tile: panels t, t + 4, ... of each.
template <bool GATE_UP>
__device__ __forceinline__ void expand_panels(const ExpertGemm& p, int tile, int pair, const LoraToken* token,
                                              float (&delta)[2]) {
  constexpr int kModules = Adapters<GATE_UP>::kModules;
  int panels[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    delta[half] = 0.0f;
    const bool there = output_of<GATE_UP>(tile, half) < p.rows;
    panels[half] = there ? (token[GATE_UP ? half : 0].rank + kTileRanks - 1) / kTileRanks : 0;
  }
#pragma unroll 1
  for (int panel = lane_index() % 4; panel < max(panels[0], panels[1]); panel += 4) {
    uint4 b[2];
    float4 s[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // loads of both before the first is used
      if (panel < panels[half]) {
        const int module = GATE_UP ? half : 0;
        const int n = output_of<GATE_UP>(tile, half);
        const std::byte* granule = paged_granule(p.lora.table, token[module].slot, token[module].b,
                                                 token[module].b_pages, n / kTileColumns * panels[half] + panel);
        const float* shrunk =
            p.lora.shrunk + (int64_t{pair} * kModules + module) * p.lora.rank_stride + panel * kTileRanks;
        b[half] = __ldg(reinterpret_cast<const uint4*>(granule + n % kTileColumns * 16));
        s[half][0] = __ldcg(reinterpret_cast<const float4*>(shrunk));
        s[half][1] = __ldcg(reinterpret_cast<const float4*>(shrunk) + 1);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (panel < panels[half]) {
        const uint32_t pairs[4] = {b[half].x, b[half].y, b[half].z, b[half].w};
        const float values[8] = {s[half][0].x, s[half][0].y, s[half][0].z, s[half][0].w,
                                 s[half][1].x, s[half][1].y, s[half][1].z, s[half][1].w};
#pragma unroll
        for (int r = 0; r < 4; ++r) {  // a bf16 is the high half of an fp32
          delta[half] = fmaf(__uint_as_float(pairs[r] << 16), values[2 * r], delta[half]);
          delta[half] = fmaf(__uint_as_float(pairs[r] & 0xffff0000u), values[2 * r + 1], delta[half]);
        }
      }
    }
  }
}

// Adds what a token's adapter gives to output n, if it has one, to the sum of an even or an odd token.
__device__ __forceinline__ void add_delta(float& even, float& odd, const ExpertGemm& p, const LoraToken& token, int n,
                                          float delta, bool is_even) {
  if (token.rank == 0 || n >= p.rows) {
    return;
  }
  if (token.bias >= 0) {
    constexpr int kPerGranule = kGranuleBytes / sizeof(float);
    const std::byte* bias = p.lora.table.granule(token.slot, token.bias + n / kPerGranule);
    delta = fmaf(token.scale, reinterpret_cast<const float*>(bias)[n % kPerGranule], delta);
  }
  if (is_even) {
    even += delta;
  } else {
    odd += delta;
  }
}

// Adds the deltas of the expert's tokens [pair, end) to a row tile's sums, by the warp that finishes it.
template <bool GATE_UP>
__device__ __forceinline__ void expand_tile(float (&sum)[4], const ExpertGemm& p, int tile, int pair, int end,
                                            const Adapters<GATE_UP>& adapters) {
  constexpr int kModules = Adapters<GATE_UP>::kModules;
#pragma unroll 1
  for (int j = 0; pair + j < end; ++j) {
    const LoraToken* const token = adapters.of + j * kModules;
    if (token[0].rank == 0 && token[kModules - 1].rank == 0) {
      continue;  // the whole warp
    }
    float delta[2];
    expand_panels<GATE_UP>(p, tile, pair + j, token, delta);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) {
        delta[half] += __shfl_xor_sync(0xffffffffu, delta[half], lanes);
      }
    }
    if (lane_index() % 4 == j / 2) {
      add_delta(sum[0], sum[1], p, token[0], output_of<GATE_UP>(tile, 0), delta[0], j % 2 == 0);
      add_delta(sum[2], sum[3], p, token[kModules - 1], output_of<GATE_UP>(tile, 1), delta[1], j % 2 == 0);
    }
  }
}

// --- Shrink.

// The items of a step and who takes them: block b < producers the items b, b + producers, ...
struct Items {
  int count;
  int producers;
  __device__ __forceinline__ int of_block(int block) const {
    return block < producers ? count / producers + (block < count % producers ? 1 : 0) : 0;
  }
  __device__ __forceinline__ int before_block(int block) const {
    return block < producers ? count / producers * block + min(block, count % producers) : count;
  }
};

// The first of `tiles` row tiles of a block's share: blocks with items of the shrink have fewer of them, as long as
// that leaves none of them less than nothing.
__device__ __forceinline__ int share_begin(int tiles, const Items& items, int block, int blocks) {
  const int most = (items.count + items.producers - 1) / items.producers;  // of a block
  const int spare = most * blocks - items.count;
  const int each = spare > 0 ? min(kTilesPerItem, tiles / spare) : kTilesPerItem;
  const auto all = static_cast<uint32_t>(tiles + each * items.count);
  return static_cast<int>(all * static_cast<uint32_t>(block) / static_cast<uint32_t>(blocks)) -
         each * items.before_block(block);
}

// A panel of one expert's adapter, and its tokens.
struct Item {
  int begin;  // pairs
  int end;
  int slot;
  int expert;
  int module;
  int panel;
};
template <bool GATE_UP>
__device__ __forceinline__ Item item_at(const ExpertGemm& p, int index, int panels) {
  constexpr int kModules = Adapters<GATE_UP>::kModules;
  const int segment = index / panels / kModules;
  return {__ldcg(p.order.segment_begin + segment),
          __ldcg(p.order.segment_begin + segment + 1),
          __ldcg(p.order.segment_slot + segment),
          __ldcg(p.order.segment_expert + segment),
          index / panels % kModules,
          index % panels};
}

// partial[rank][token] = this warp's share of A x. BLOCKS: at most so many blocks of 64 inputs.
template <int BLOCKS>
__device__ __forceinline__ void shrink_range(const ExpertGemm& p, const Item& item, int a, const int4& pages,
                                             float* partial) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  constexpr int kTogether = BLOCKS / 2;  // blocks in flight: all, where registers hold them
#else
  constexpr int kTogether = BLOCKS;
#endif
  static_assert(BLOCKS % kTogether == 0);
  const int g = lane_index() / 4;
  const int t = lane_index() % 4;
  const int begin = p.k_blocks * warp_index() / kWarps;
  const int count = p.k_blocks * (warp_index() + 1) / kWarps - begin;
  const bool there = item.begin + g < item.end;
  const int pair = there ? item.begin + g : item.begin;
  const int64_t row = p.x_by_pair ? pair : __ldcg(p.order.pair_row + pair);
  const __nv_bfloat16* const x = p.x + row * p.x_stride;
  unsigned long long granules = 0;  // lane i finds the i-th
  if (lane_index() < count) {
    granules = reinterpret_cast<unsigned long long>(
        paged_granule(p.lora.table, item.slot, a, pages, item.panel * p.k_blocks + begin + lane_index()));
  }
  float acc[4] = {};
#pragma unroll
  for (int first = 0; first < BLOCKS; first += kTogether) {
    uint4 weight[kTogether][2];
    uint4 value[kTogether][2];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int block = first + i;
      const auto* granule = reinterpret_cast<const std::byte*>(__shfl_sync(0xffffffffu, granules, block));
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = (begin + block) * kTileColumns + c * 32 + t * 8;
        weight[i][c] = zero_chunk();
        value[i][c] = zero_chunk();
        if (block < count) {
          weight[i][c] = load_streaming(granule + c * 512 + t * 128 + g * 16);
          if (there && column < p.k) {
            value[i][c] = __ldcg(reinterpret_cast<const uint4*>(x + column));
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        mma_chunk(acc, weight[i][c], zero_chunk(), value[i][c]);
      }
    }
  }
  *reinterpret_cast<float2*>(partial + g * kRowsMax + 2 * t) = make_float2(acc[0], acc[1]);
}

// By the whole block: the shrunk values of one item. `partial`: [kWarps][8 ranks][8 tokens].
template <bool GATE_UP, int BLOCKS>
__device__ __forceinline__ void shrink_item(const ExpertGemm& p, const Item& item, float* partial) {
  constexpr int kModules = Adapters<GATE_UP>::kModules;
  constexpr int kSums = kTileRanks * kRowsMax;
  if (item.slot == 0) {
    return;
  }
  const ExpertModule module =
      !GATE_UP ? ExpertModule::kDown : (item.module == 0 ? ExpertModule::kGate : ExpertModule::kUp);
  const ResolvedLora* record = p.lora.table.resolved_expert(item.slot, p.lora.layer, item.expert, module);
  const int4 head = __ldcg(reinterpret_cast<const int4*>(record));  // rank, scale, a, b
  const int4 pages = __ldcg(reinterpret_cast<const int4*>(record->a_pages));
  if (item.panel * kTileRanks >= head.x) {
    return;
  }
  const int thread = static_cast<int>(threadIdx.x);
  const int pair = item.begin + thread % kRowsMax;
  const bool stores = thread < kSums && pair < item.end;
  const float scale = stores ? p.lora.row_scale[__ldcg(p.order.pair_row + pair)] * __int_as_float(head.y) : 0.0f;
  shrink_range<BLOCKS>(p, item, head.z, pages, partial + warp_index() * kSums);
  __syncthreads();  // the sums of all warps are there
  if (stores) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      sum += partial[warp * kSums + thread];
    }
    const int rank = item.panel * kTileRanks + thread / kRowsMax;
    float* const to = const_cast<float*>(p.lora.shrunk);
    to[(int64_t{pair} * kModules + item.module) * p.lora.rank_stride + rank] =
        rank < head.x && scale != 0.0f ? sum * scale : 0.0f;
  }
  __syncthreads();  // the sums are read
}

// By the whole block: its items, counted when they are there.
template <bool GATE_UP, int BLOCKS>
__device__ __forceinline__ void shrink_items(const ExpertGemm& p, const Items& items, int panels, float* partial) {
  const int block = static_cast<int>(blockIdx.x);
  const int own = items.of_block(block);
  if (own == 0) {
    return;
  }
#pragma unroll 1
  for (int i = 0; i < own; ++i) {
    shrink_item<GATE_UP, BLOCKS>(p, item_at<GATE_UP>(p, block + i * items.producers, panels), partial);
  }
  __syncthreads();  // written by all warps, also where the last item had nothing to do
  if (threadIdx.x == 0) {
    count_up(p.lora.counters, static_cast<uint32_t>(own));
  }
}

}  // namespace moelora::few
