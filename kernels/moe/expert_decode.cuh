// SPDX-License-Identifier: Apache-2.0
// Expert products of few tokens an expert: a stream of weights with a little arithmetic beside it. The grid stays on
// the device and walks the work: (active expert, RT neighbouring row tiles, up to 16 of its tokens). The 8 warps of a
// block cut the inputs into contiguous ranges of blocks of 64. Each warp runs its own ring of STAGES such blocks in
// shared memory, filled by asynchronous copies that run ahead across work items, so that loads are in flight while
// others sum up, and no register waits for memory; a lane reads what it copied, in fragment order, without a barrier.
// Token chunks come from L1 or L2. Partial sums meet in shared memory and are added in the order of the warps: a
// token's bits depend on its own row, k and its adapter alone.
// With LoRA two more warps compute the deltas of each item, half of its tokens each, while the others stream its
// weights. Their lanes look the tokens' adapters up three items ahead, one access of the chain (row, slot, record) an
// item, and ask the L2 for the next item's part of B, so that no item waits for a chain. This kernel then runs beside
// the shrink, for which those warps wait. One such warp, which waited for B itself, took three times as long as the
// weights (gpt-oss, 64 rows, 8 adapters on an H200: 347 us for gate_up, 120 us without adapters).
#pragma once

#include <algorithm>

#include "kernels/moe/expert_gemm.cuh"

namespace moelora {

constexpr int kDecodeBlocksPerSm = 2;
constexpr int kDecodeTokens = 16;  // of a work item, in two groups of 8
constexpr int kDeltaWarps = 2;

struct ExpertWork {
  int item;
  int expert;
  int tile;  // first row tile
  int pair;  // first sorted pair
  int end;   // end of the expert's pairs
};

// Items are ordered by expert, then by row tiles, so that blocks running together share tokens.
template <int RT>
struct ExpertWalk {
  int items;
  int tile_groups;

  __device__ __forceinline__ explicit ExpertWalk(const ExpertGemm& p)
      : items(__ldg(p.order.num_active) * ((p.row_tiles + RT - 1) / RT)), tile_groups((p.row_tiles + RT - 1) / RT) {}
  [[nodiscard]] __device__ __forceinline__ bool ended(const ExpertWork& work) const { return work.item >= items; }
  __device__ __forceinline__ void seek(const ExpertGemm& p, ExpertWork& work, int item) const {
    work.item = item;
    if (item < items) {
      work.expert = __ldg(p.order.active_experts + item / tile_groups);
      work.tile = item % tile_groups * RT;
      work.pair = __ldg(p.order.expert_begin + work.expert);
      work.end = __ldg(p.order.expert_begin + work.expert + 1);
    }
  }
  // More tokens of the same rows, or the next item of this block.
  __device__ __forceinline__ void advance(const ExpertGemm& p, ExpertWork& work) const {
    if (work.pair + kDecodeTokens < work.end) {
      work.pair += kDecodeTokens;
    } else {
      seek(p, work, work.item + static_cast<int>(gridDim.x));
    }
  }
};

// The copying end of a warp's ring. Every call of issue() closes one group of copies, so that groups count stages.
template <class Source, int RT, int STAGES>
struct WeightRing {
  static constexpr int kStage = RT * Source::kStageBytes;
  static constexpr int kBytes = STAGES * kStage;
  std::byte* memory;
  std::byte* write;  // the stage that issue() fills next
  std::byte* read;   // the oldest stage
  ExpertWork work;
  Source source[RT];
  int begin;
  int end;
  int b;

  __device__ __forceinline__ void locate(const ExpertGemm& p, const ExpertWalk<RT>& walk) {
    if (!walk.ended(work)) {
#pragma unroll
      for (int i = 0; i < RT; ++i) {
        source[i].locate(p, work.expert, min(work.tile + i, p.row_tiles - 1));
      }
    }
  }
  __device__ __forceinline__ void issue(const ExpertGemm& p, const ExpertWalk<RT>& walk) {
    if (!walk.ended(work)) {
#pragma unroll
      for (int i = 0; i < RT; ++i) {
        source[i].copy(write + i * Source::kStageBytes, b);
      }
      if (++b == end) {
        b = begin;
        walk.advance(p, work);
        locate(p, walk);
      }
    }
    async_commit();
    write = after(write);
  }
  [[nodiscard]] __device__ __forceinline__ std::byte* after(std::byte* stage) const {
    return stage == memory + (STAGES - 1) * kStage ? memory : stage + kStage;
  }
};

// This lane's chunks of block b of its tokens. Chunks past the last one repeat it: their weights are zeros.
template <int NT>
__device__ __forceinline__ void load_tokens(uint4 (&x)[NT][2], const uint4* const (&token)[2], int chunks, int b) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const auto at = static_cast<uint32_t>(min(8 * b + 4 * c + lane_index() % 4, chunks - 1));
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      x[j][c] = __ldg(token[j] + at);
    }
  }
}

// One work item's share of this warp.
template <int NT, class Source, int RT, int STAGES>
__device__ __forceinline__ void multiply(float (&acc)[RT][2][4], const ExpertGemm& p, const ExpertWalk<RT>& walk,
                                         WeightRing<Source, RT, STAGES>& ring, const uint4* const (&token)[2]) {
  const int chunks = p.k / 8;
  const int begin = ring.begin;
  const int end = ring.end;
  uint4 x[NT][2];
  load_tokens<NT>(x, token, chunks, begin);
#pragma unroll 2
  for (int b = begin; b < end; ++b) {
    uint4 next_x[NT][2];
    load_tokens<NT>(next_x, token, chunks, b + 1);
    async_wait<STAGES - 2>();  // the oldest stage is there
    ring.issue(p, walk);       // into the stage that was read before it
#pragma unroll
    for (int i = 0; i < RT; ++i) {
      typename Source::Block w;
      Source::fetch(w, ring.read + i * Source::kStageBytes);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        uint4 low;
        uint4 high;
        Source::chunk(w, c, low, high);
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          mma_chunk(acc[i][j], low, high, x[j][c]);
        }
      }
    }
    ring.read = ring.after(ring.read);
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      x[j][0] = next_x[j][0];
      x[j][1] = next_x[j][1];
    }
  }
}

// The part of a work item that one warp finishes: row tile `tile` (i of the item) and token group j. Roles move from
// turn to turn, so that no warp is always the late one.
struct ExpertRole {
  bool active;
  int i;
  int j;
};
template <int RT>
__device__ __forceinline__ ExpertRole role_of(const ExpertGemm& p, const ExpertWork& work, int turn) {
  const int index = (warp_index() + turn * RT) % kExpertWarps;
  const int groups = work.pair + 8 < work.end ? 2 : 1;
  return {index < RT * groups && work.tile + index % RT < p.row_tiles, index % RT, index / RT};
}

// The deltas of an item, from the warp that computes them to those that finish the item: two in turn.
template <int RT>
struct ItemDeltas {
  static constexpr int kRow = 20;     // floats; 16 used, so that the lanes of a fragment meet no bank twice
  float at[RT][kDecodeTokens][kRow];  // [row tile][token][row of the tile]
  unsigned adapted;                   // bit of a token: its low rows have a delta; bit 16 + of a token: its high rows
};

// What the warp of the deltas knows of the items to come. Lane (module, token): token lane % 16 of an item, its gate or
// only module in the lower lanes, its up module in the upper ones.
template <bool GATE_UP, int RT>
struct TokenPipeline {
  struct Found {  // first access
    int row;      // -1: there is no such token
    int expert;
  };
  struct Adapter {  // second access
    int slot;
    float scale;
    int expert;
  };
  struct Record {  // third access
    int4 head;     // rank, scale, a, b
    int4 pages;
    int bias;
    int slot;
    float scale;  // the row's
  };
  ExpertWork ahead;  // the first item of which nothing is known
  Found found;       // of the item before it
  Adapter adapter;   // of the item before that

  __device__ __forceinline__ Found find(const ExpertGemm& p, const ExpertWalk<RT>& walk) {
    Found result{-1, 0};
    if (!walk.ended(ahead)) {
      const int pair = ahead.pair + lane_index() % kDecodeTokens;
      if (pair < ahead.end && (GATE_UP || lane_index() < kDecodeTokens)) {
        result.row = __ldg(p.order.pair_row + pair);
        result.expert = ahead.expert;
      }
      walk.advance(p, ahead);
    }
    return result;
  }
  static __device__ __forceinline__ Adapter load_adapter(const ExpertGemm& p, const Found& of) {
    return {of.row >= 0 ? __ldg(p.lora.row_slot + of.row) : 0, of.row >= 0 ? __ldg(p.lora.row_scale + of.row) : 0.0f,
            of.expert};
  }
  static __device__ __forceinline__ Record load_record(const ExpertGemm& p, const Adapter& of) {
    Record result{};
    result.slot = of.slot;
    result.scale = of.scale;
    if (of.slot != 0) {
      const ExpertModule module =
          !GATE_UP ? ExpertModule::kDown : (lane_index() < kDecodeTokens ? ExpertModule::kGate : ExpertModule::kUp);
      const ResolvedLora* record = p.lora.table.resolved_expert(of.slot, p.lora.layer, of.expert, module);
      result.head = *reinterpret_cast<const int4*>(record);
      result.pages = *reinterpret_cast<const int4*>(record->b_pages);
      result.bias = record->bias;
    }
    return result;
  }
  static __device__ __forceinline__ void store(const Record& from, LoraToken* tokens) {
    LoraToken token{};
    if (from.slot != 0 && from.scale != 0.0f) {
      token.rank = from.head.x;
      token.slot = from.slot;
      token.b = from.head.w;
      token.bias = from.bias;
      token.scale = __int_as_float(from.head.y) * from.scale;
      token.b_pages = from.pages;
    }
    tokens[lane_index()] = token;
    __syncwarp();  // tokens are there for the warp
  }
};

// Asks the L2 for what item_deltas will read of B: lane (token, half, panel) a line of 8 outputs.
template <bool GATE_UP, int RT>
__device__ __forceinline__ void prefetch_deltas(const ExpertGemm& p, const ExpertWork& work, const LoraToken* tokens,
                                                int delta_warp) {
  const int half = lane_index() / 4 % 2;
  const int count = min(work.end - work.pair, kDecodeTokens);
#pragma unroll 1
  for (int i = 0; i < RT; ++i) {
    const int n = GATE_UP ? 8 * (work.tile + i) : 16 * (work.tile + i) + 8 * half;
#pragma unroll 1
    for (int token = 4 * delta_warp + lane_index() / 8; token < count; token += 4 * kDeltaWarps) {
      const LoraToken& adapter = tokens[(GATE_UP ? half * kDecodeTokens : 0) + token];
      const int panels = (adapter.rank + kTileRanks - 1) / kTileRanks;
#pragma unroll 1
      for (int panel = lane_index() % 4; panel < panels && n < p.rows; panel += 4) {
        const std::byte* granule =
            paged_granule(p.lora.table, adapter.slot, adapter.b, adapter.b_pages, n / kTileColumns * panels + panel);
        asm volatile("prefetch.global.L2 [%0];" ::"l"(granule + n % kTileColumns / 8 * 128));
      }
    }
  }
}

// The deltas of one item, of the tokens that are this warp's.
template <bool GATE_UP, int RT>
__device__ __forceinline__ void item_deltas(ItemDeltas<RT>& deltas, const ExpertGemm& p, const ExpertWork& work,
                                            const LoraToken* tokens, int delta_warp) {
  constexpr int kModules = GATE_UP ? 2 : 1;
  const int row = lane_index() % 16;  // of a row tile
  const int module = GATE_UP ? row / 8 : 0;
  const int count = min(work.end - work.pair, kDecodeTokens);
  const unsigned adapted = __ballot_sync(0xffffffffu, tokens[lane_index()].rank != 0);
  if (lane_index() == 0 && delta_warp == 0) {
    deltas.adapted = adapted;
  }
  if (adapted == 0) {
    return;
  }
#pragma unroll 1
  for (int i = 0; i < RT; ++i) {
    const int n = GATE_UP ? 8 * (work.tile + i) + row % 8 : 16 * (work.tile + i) + row;
#pragma unroll 1
    // Groups of four tokens by turns, as prefetch_deltas has them.
    for (int token = 4 * delta_warp + lane_index() / 16; token < count;
         token += token % 4 < 2 ? 2 : 4 * kDeltaWarps - 2) {
      const LoraToken& adapter = tokens[module * kDecodeTokens + token];
      if (adapter.rank != 0 && n < p.rows) {
        const int64_t shrunk = int64_t{work.pair + token} * kModules + module;
        deltas.at[i][token][row] = lora_delta(p.lora.table, adapter, n, p.lora.shrunk + shrunk * p.lora.rank_stride);
      }
    }
  }
}

// All of a warp of deltas; `tokens`, its own, and `deltas` are two in turn, deltas are read after the item's barrier.
template <bool GATE_UP, int RT>
__device__ __forceinline__ void run_delta_warp(const ExpertGemm& p, const ExpertWalk<RT>& walk, ExpertWork work,
                                               ItemDeltas<RT>* deltas, LoraToken (*tokens)[32], int delta_warp) {
  using Pipeline = TokenPipeline<GATE_UP, RT>;
  Pipeline pipeline;
  pipeline.ahead = work;
  const auto first = pipeline.find(p, walk);
  const auto second = pipeline.find(p, walk);
  pipeline.found = pipeline.find(p, walk);
  const auto adapter = Pipeline::load_adapter(p, first);
  pipeline.adapter = Pipeline::load_adapter(p, second);
  Pipeline::store(Pipeline::load_record(p, adapter), tokens[0]);
  if (!walk.ended(work)) {
    prefetch_deltas<GATE_UP, RT>(p, work, tokens[0], delta_warp);
  }
  wait_for_previous();  // the shrunk values are there
  for (int turn = 0; !walk.ended(work); ++turn) {
    const auto next_record = Pipeline::load_record(p, pipeline.adapter);
    const auto next_adapter = Pipeline::load_adapter(p, pipeline.found);
    const auto next_found = pipeline.find(p, walk);
    item_deltas<GATE_UP, RT>(deltas[turn % 2], p, work, tokens[turn % 2], delta_warp);
    Pipeline::store(next_record, tokens[(turn + 1) % 2]);
    pipeline.adapter = next_adapter;
    pipeline.found = next_found;
    walk.advance(p, work);
    if (!walk.ended(work)) {
      prefetch_deltas<GATE_UP, RT>(p, work, tokens[(turn + 1) % 2], delta_warp);
    }
    __syncthreads();  // the deltas of this item are there
  }
}

// Sums of all warps over the inputs: [warp][row tile][group][lane].
template <int RT>
struct PartialSums {
  float4 at[kExpertWarps][RT][2][32];
};

template <bool GATE_UP, int RT>
__device__ __forceinline__ void finish_role(const PartialSums<RT>& partial, const ExpertGemm& p, const ExpertWork& work,
                                            const ExpertRole& role, const ItemDeltas<RT>* deltas) {
  float sum[4] = {};
#pragma unroll
  for (int warp = 0; warp < kExpertWarps; ++warp) {
    const float4 part = partial.at[warp][role.i][role.j][lane_index()];
    sum[0] += part.x;
    sum[1] += part.y;
    sum[2] += part.z;
    sum[3] += part.w;
  }
  if (deltas != nullptr) {
    const unsigned adapted = deltas->adapted;
    const int g = lane_index() / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 8 * role.j + 2 * (lane_index() % 4) + i;
      if ((adapted >> token & 1u) != 0) {
        sum[i] += deltas->at[role.i][token][g];
      }
      if ((adapted >> (GATE_UP ? kDecodeTokens + token : token) & 1u) != 0) {
        sum[2 + i] += deltas->at[role.i][token][g + 8];
      }
    }
  }
  finish_tile<GATE_UP>(sum, p, work.expert, work.tile + role.i, work.pair + 8 * role.j, work.end);
}

template <bool GATE_UP, class Source, int RT, int STAGES, bool LORA>
__global__ void __launch_bounds__(kExpertThreads + (LORA ? 32 * kDeltaWarps : 0), kDecodeBlocksPerSm)
    expert_decode_kernel(const __grid_constant__ ExpertGemm p) {
  using Ring = WeightRing<Source, RT, STAGES>;
  extern __shared__ uint4 dynamic_shared[];  // two PartialSums in turn (one barrier an item is enough), then the rings
  __shared__ ItemDeltas<RT> deltas[LORA ? 2 : 1];
  __shared__ LoraToken tokens[LORA ? kDeltaWarps : 1][2][32];
  if (!LORA) {
    wait_for_previous();  // with LoRA all but the shrunk values was complete before this kernel began
  }
  let_next_start();
  auto* const partial = reinterpret_cast<PartialSums<RT>*>(dynamic_shared);
  const ExpertWalk<RT> walk(p);
  ExpertWork work{};
  walk.seek(p, work, static_cast<int>(blockIdx.x));
  if (LORA && warp_index() >= kExpertWarps) {
    const int delta_warp = warp_index() - kExpertWarps;
    run_delta_warp<GATE_UP, RT>(p, walk, work, deltas, tokens[delta_warp], delta_warp);
    return;
  }
  Ring ring;
  ring.memory = reinterpret_cast<std::byte*>(partial + 2) + warp_index() * Ring::kBytes;
  ring.write = ring.memory;
  ring.read = ring.memory;
  ring.begin = p.k_blocks * warp_index() / kExpertWarps;
  ring.end = p.k_blocks * (warp_index() + 1) / kExpertWarps;
  ring.b = ring.begin;
  ring.work = work;
  if (ring.begin < ring.end) {
    ring.locate(p, walk);
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; ++s) {
      ring.issue(p, walk);
    }
  }
  for (int turn = 0; !walk.ended(work); ++turn) {
    const uint4* token[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      // Where there is no token, the first one stands in: what that gives reaches its own column alone, and nobody
      // stores that.
      const int pair = work.pair + 8 * j + lane_index() / 4;
      token[j] = token_row(p, pair < work.end ? pair : work.pair);
    }
    float acc[RT][2][4] = {};
    if (work.pair + 8 < work.end) {
      multiply<2>(acc, p, walk, ring, token);
    } else {
      multiply<1>(acc, p, walk, ring, token);
    }
#pragma unroll
    for (int i = 0; i < RT; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        partial[turn % 2].at[warp_index()][i][j][lane_index()] =
            make_float4(acc[i][j][0], acc[i][j][1], acc[i][j][2], acc[i][j][3]);
      }
    }
    __syncthreads();  // the partial sums of all warps, and the deltas, are there
    const ExpertRole role = role_of<RT>(p, work, turn);
    if (role.active) {
      finish_role<GATE_UP>(partial[turn % 2], p, work, role, LORA ? &deltas[turn % 2] : nullptr);
    }
    walk.advance(p, work);
  }
  async_wait<0>();
}

template <bool GATE_UP, class Source, int RT, int STAGES, bool LORA>
void launch_expert_decode_of(const ExpertGemm& p, int max_active, const CudaStream& state) {
  constexpr size_t kSharedBytes = 2 * sizeof(PartialSums<RT>) + kExpertWarps * WeightRing<Source, RT, STAGES>::kBytes;
  constexpr auto kKernel = expert_decode_kernel<GATE_UP, Source, RT, STAGES, LORA>;
  check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
             "shared memory of the expert product");
  const int64_t items = int64_t{max_active} * ((p.row_tiles + RT - 1) / RT);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(items, int64_t{state.num_sms} * kDecodeBlocksPerSm));
  launch_dependent(kKernel, dim3(grid), kExpertThreads + (LORA ? 32 * kDeltaWarps : 0), kSharedBytes, state, p);
}
template <bool GATE_UP, class Source, int RT, int STAGES>
void launch_expert_decode(const ExpertGemm& p, int max_active, const CudaStream& state) {
  if (RT == 1 && p.lora.row_slot != nullptr) {
    launch_expert_decode_of<GATE_UP, Source, 1, STAGES, true>(p, max_active, state);
  } else {
    launch_expert_decode_of<GATE_UP, Source, RT, STAGES, false>(p, max_active, state);
  }
}

}  // namespace moelora
