// SPDX-License-Identifier: Apache-2.0
// Expert products of few tokens an expert: a stream of weights with a little arithmetic beside it. The grid stays on
// the device and walks the work: (active expert, row tile, up to 16 of its tokens). The four warps of a group share an
// item by ranges of k. Where k is short, so that their meeting would take as long as the work, a warp takes whole items
// for as many turns as there are items for all, and only what is left is shared, so that the last turn is short. Each
// warp runs its own ring of blocks of 64 inputs in shared memory, filled by asynchronous copies that run ahead across
// items, so that loads are in flight while others sum up, and no register waits for memory; a lane reads what it
// copied, in fragment order, without a barrier. Who is next (the order, pointers, the tokens' rows) is in shared memory
// from the start, and the tokens' chunks, from L1 or L2, come a block ahead, across items too: a look-up in memory at
// an item's begin would leave the ring to run empty.
// The inputs are four parts, summed one by one and then added in their order, whether one warp does that or four: a
// token's bits depend on its own row, k and its adapter.
// With LoRA the deltas are computed before (kernels/moe/expert_delta.cuh) and added at an item's end.
// H200, Qwen3-30B-A3B's shape, 64 rows, in a graph of six layers: gate_up 193 us for 797 MB, down 99 us for 398 MB (by
// whole items; shared 102; shared with look-ups in the L1 110, and past the L1 145). Tried for gate_up: whole items 198
// us; rings of 3 or 5 blocks the same; copies that ask 256 bytes into the L2 195.
// Tried for LoRA: an expand by mma in the finishing warp, adapter by adapter (64 rows of Qwen3-30B-A3B's shape, 8
// adapters: gate_up 656 us, 200 without adapters); one, then two warps of deltas beside the stream, look-ups three
// items ahead and B prefetched (gpt-oss shape: 347 and 288 us, 120 without); a launch of its own (200 us).
#pragma once

#include <algorithm>

#include "kernels/cuda/wgmma.cuh"
#include "kernels/moe/expert_gemm.cuh"

namespace moelora {
namespace decode {

constexpr int kParts = 4;  // of k, and warps of a group
constexpr int kGroups = 2;
constexpr int kWarps = kParts * kGroups;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 2;
constexpr int kTokens = 16;       // of an item, in two groups of 8
constexpr int kWholeBlocks = 16;  // of 64 inputs, up to which a warp takes whole items
constexpr int kHeldPairs = 4096;  // rows of more are looked up in memory

// How the work is cut: whether warps may take whole items, row tiles of an item, blocks of a ring. Expanding MXFP4
// takes so many instructions that two tiles share those for the tokens, and registers do not hold two sums of both
// then.
template <class Source>
struct Way {
  static constexpr bool kWhole = true;
  static constexpr int kRowTiles = 1;
  static constexpr int kStages = 4;
};
template <bool GATE_UP>
struct Way<TilesSource<GATE_UP>> {
  static constexpr bool kWhole = false;
  static constexpr int kRowTiles = 2;
  static constexpr int kStages = 6;
};

// Places in dynamic shared memory.
struct Places {
  int pointers;  // [E]
  int begin;     // [E + 1], sorted pairs
  int active;    // [max_active], experts
  int rows;      // [num_pairs], of x
  int rings;
  int bytes;
  __host__ __device__ Places(int num_experts, int max_active, int held_pairs, int ring_bytes) {
    pointers = 0;
    begin = pointers + num_experts * static_cast<int>(sizeof(WeightPointers));
    active = begin + (num_experts + 1) * 4;
    rows = active + max_active * 4;
    rings = (rows + held_pairs * 4 + 127) / 128 * 128;
    bytes = rings + kWarps * ring_bytes;
  }
};

// The tables, and the items and how the grid shares them. Items are ordered by expert, then by row tile, so that blocks
// running together share tokens.
struct Shared {
  const WeightPointers* pointers;
  const int* begin;
  const int* active;
  const int* rows;  // null: not held
  int turns;        // of whole items, of each warp
  int whole;        // items of these turns
  int rest;
  int item_tiles;  // items of an expert and up to kTokens tokens
  int k_blocks;
};

// By the whole block. What is loaded passes the L1, which may hold what the same arrays said a layer ago.
template <class Source>
__device__ __forceinline__ void load_tables(const ExpertGemm& p, const Places& places, std::byte* memory,
                                            int num_experts, int max_active, int num_pairs, Shared& s) {
  auto* const pointers = reinterpret_cast<WeightPointers*>(memory + places.pointers);
  auto* const begin = reinterpret_cast<int*>(memory + places.begin);
  auto* const active = reinterpret_cast<int*>(memory + places.active);
  auto* const rows = reinterpret_cast<int*>(memory + places.rows);
  const int num_active = threadIdx.x == 0 ? __ldcg(p.order.num_active) : 0;
  for (int e = static_cast<int>(threadIdx.x); e <= num_experts; e += kThreads) {
    begin[e] = __ldcg(p.order.expert_begin + e);
    if (e < max_active) {
      active[e] = __ldcg(p.order.active_experts + e);
    }
    if (e < num_experts) {
      pointers[e] = Source::pointers(p, e);
    }
  }
  const bool held = !p.x_by_pair && num_pairs <= kHeldPairs;
  for (int i = static_cast<int>(threadIdx.x); held && i < num_pairs; i += kThreads) {
    rows[i] = __ldcg(p.order.pair_row + i);
  }
  if (threadIdx.x == 0) {
    const int tiles = (p.row_tiles + Way<Source>::kRowTiles - 1) / Way<Source>::kRowTiles;
    const int items = num_active * tiles;
    const int warps = static_cast<int>(gridDim.x) * kWarps;
    const int turns = Way<Source>::kWhole && p.k_blocks <= kWholeBlocks ? items / warps : 0;
    s.pointers = pointers;
    s.begin = begin;
    s.active = active;
    s.rows = held ? rows : nullptr;
    s.turns = turns;
    s.whole = turns * warps;
    s.rest = items - s.whole;
    s.item_tiles = tiles;
    s.k_blocks = p.k_blocks;
  }
  __syncthreads();
}

// Where a warp is on its way.
struct Cursor {
  int turn;
  int expert;  // -1: at the end
  int tile;  // of the expert's items
  int pair;  // first of the item's
  int end;   // of the expert's
  int b;     // blocks [b, b_end) of k
  int b_end;

  __device__ __forceinline__ bool ended() const { return expert < 0; }
  __device__ __forceinline__ void seek(const Shared& s, int to) {
    turn = to;
    int item;
    if (turn < s.turns) {
      item = turn * static_cast<int>(gridDim.x) * kWarps + static_cast<int>(blockIdx.x) * kWarps + warp_index();
      b = 0;
      b_end = s.k_blocks;
    } else {
      const int group = static_cast<int>(blockIdx.x) * kGroups + warp_index() / kParts;
      const int nth = (turn - s.turns) * static_cast<int>(gridDim.x) * kGroups + group;
      if (nth >= s.rest) {
        expert = -1;
        return;
      }
      item = s.whole + nth;
      const int part = warp_index() % kParts;
      b = s.k_blocks * part / kParts;
      b_end = s.k_blocks * (part + 1) / kParts;
    }
    const int index = item / s.item_tiles;
    tile = item - index * s.item_tiles;
    expert = s.active[index];
    pair = s.begin[expert];
    end = s.begin[expert + 1];
  }
  // More tokens of the same rows, or the next item.
  __device__ __forceinline__ void advance(const Shared& s) {
    if (pair + kTokens < end) {
      pair += kTokens;
      b = is_whole(s) ? 0 : s.k_blocks * (warp_index() % kParts) / kParts;
    } else {
      seek(s, turn + 1);
    }
  }
  __device__ __forceinline__ bool is_whole(const Shared& s) const { return turn < s.turns; }
};

// The copying end of a warp's ring. Every call of issue() closes one group of copies, so that groups count stages.
template <class Source>
struct Ring {
  static constexpr int kRowTiles = Way<Source>::kRowTiles;
  static constexpr int kStageBytes = kRowTiles * Source::kStageBytes;
  static constexpr int kStages = Way<Source>::kStages;
  static constexpr int kBytes = kStages * kStageBytes;
  std::byte* memory;
  std::byte* write;  // the stage that issue() fills next
  std::byte* read;   // the oldest stage
  Cursor at;
  Source source[kRowTiles];

  __device__ __forceinline__ void begin(const ExpertGemm& p, const Shared& s, std::byte* room) {
    memory = room;
    write = room;
    read = room;
    at.seek(s, 0);
    locate(p, s);
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) {
      issue(p, s);
    }
  }
  __device__ __forceinline__ void issue(const ExpertGemm& p, const Shared& s) {
    if (!at.ended()) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        source[i].copy(write + i * Source::kStageBytes, at.b);
      }
      if (++at.b == at.b_end) {
        at.advance(s);
        locate(p, s);
      }
    }
    async_commit();
    write = after(write);
  }
  [[nodiscard]] __device__ __forceinline__ std::byte* after(std::byte* stage) const {
    return stage == memory + (kStages - 1) * kStageBytes ? memory : stage + kStageBytes;
  }

 private:
  __device__ __forceinline__ void locate(const ExpertGemm& p, const Shared& s) {
    while (!at.ended() && at.b == at.b_end) {  // a part of few blocks may have none
      at.advance(s);
    }
    if (!at.ended()) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        source[i].locate(p, s.pointers[at.expert], min(at.tile * kRowTiles + i, p.row_tiles - 1));
      }
    }
  }
};

// This lane's tokens of an item: rows of x. Where there is no token the first one stands in: what that gives reaches
// its own column alone, and nobody stores that.
struct Tokens {
  const uint4* row[2];
  bool two;  // groups of 8
  __device__ __forceinline__ void find(const ExpertGemm& p, const Shared& s, const Cursor& at) {
    two = at.pair + 8 < at.end;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int own = at.pair + 8 * j + lane_index() / 4;
      const int pair = own < at.end ? own : at.pair;
      const int64_t of_x = p.x_by_pair               ? pair
                           : s.rows != nullptr ? s.rows[pair]
                                                     : __ldcg(p.order.pair_row + pair);
      row[j] = reinterpret_cast<const uint4*>(p.x + of_x * p.x_stride);
    }
  }
  // Its chunks of block b, of NT groups. Chunks past the last one repeat it: their weights are zeros.
  template <int NT>
  __device__ __forceinline__ void load(uint4 (&x)[2][2], int chunks, int b) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const auto at = static_cast<uint32_t>(min(8 * b + 4 * c + lane_index() % 4, chunks - 1));
      x[0][c] = __ldg(row[0] + at);
      if (NT == 2) {
        x[1][c] = __ldg(row[1] + at);
      }
    }
  }
  __device__ __forceinline__ void load_first(uint4 (&x)[2][2], int chunks, int b) const {
    two ? load<2>(x, chunks, b) : load<1>(x, chunks, b);
  }
};

// The sums of an item's row tiles and two groups of tokens: over one part after the other where a warp has all of them.
template <class Source>
struct Sums {
  static constexpr int kRowTiles = Way<Source>::kRowTiles;
  float part[kRowTiles][2][4] = {};
  float all[Way<Source>::kWhole ? 2 : 1][4] = {};
  __device__ __forceinline__ void close_part() {
    if constexpr (Way<Source>::kWhole) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        all[i / 4][i % 4] += part[0][i / 4][i % 4];
        part[0][i / 4][i % 4] = 0.0f;
      }
    }
  }
};

}  // namespace decode

// Adds the deltas of this lane's tokens and outputs.
template <bool GATE_UP>
__device__ __forceinline__ void add_deltas(float (&sum)[4], const ExpertGemm& p, int tile, int pair, int end) {
  constexpr int kModules = GATE_UP ? 2 : 1;
  const int n_low = (GATE_UP ? 8 : 16) * tile + lane_index() / 4;
  const int n_high = GATE_UP ? n_low : n_low + 8;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t at = pair + 2 * (lane_index() % 4) + i;
    if (at >= end) {
      continue;
    }
    const int64_t low = at * kModules;
    const int64_t high = low + kModules - 1;
    if (p.lora.adapted[low] != 0 && n_low < p.rows) {
      sum[i] += p.lora.delta[low * p.rows + n_low];
    }
    if (p.lora.adapted[high] != 0 && n_high < p.rows) {
      sum[2 + i] += p.lora.delta[high * p.rows + n_high];
    }
  }
}

namespace decode {

// Stores group j of row tile i of an item.
template <bool GATE_UP, class Source, bool LORA>
__device__ __forceinline__ void finish(float (&sum)[4], const ExpertGemm& p, const Cursor& at, const float2& bias,
                                       int i, int j) {
  const int tile = at.tile * Way<Source>::kRowTiles + i;
  if (LORA) {
    add_deltas<GATE_UP>(sum, p, tile, at.pair + 8 * j, at.end);
  }
  finish_tile<GATE_UP>(sum, p, bias, tile, at.pair + 8 * j, at.end);
}

// Of an item that the warps of a group share: [part][row tile][group of tokens][lane].
template <class Source>
using Partial = float4[kParts][Way<Source>::kRowTiles][2][32];

// A warp of the group adds up and stores a row tile of a group of tokens.
template <class Source>
struct Role {
  static constexpr int kRowTiles = Way<Source>::kRowTiles;
  static_assert(2 * kRowTiles <= kParts);
  static __device__ __forceinline__ int tile() { return warp_index() % kParts % kRowTiles; }
  static __device__ __forceinline__ int group() { return warp_index() % kParts / kRowTiles; }
};
template <bool GATE_UP, class Source, bool LORA>
__device__ __forceinline__ void finish_shared(Partial<Source>& partial, const Sums<Source>& sums, const ExpertGemm& p,
                                              const Cursor& at, const float2& bias, bool two) {
  constexpr int kRowTiles = Way<Source>::kRowTiles;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float(&own)[4] = sums.part[i][j];
      partial[warp_index() % kParts][i][j][lane_index()] = make_float4(own[0], own[1], own[2], own[3]);
    }
  }
  barrier_sync(1 + warp_index() / kParts, 32 * kParts);  // the sums of all parts are there
  const int i = Role<Source>::tile();
  const int j = Role<Source>::group();
  if (j < (two ? 2 : 1) && at.tile * kRowTiles + i < p.row_tiles) {
    float sum[4] = {};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float4 added = partial[part][i][j][lane_index()];
      sum[0] += added.x;
      sum[1] += added.y;
      sum[2] += added.z;
      sum[3] += added.w;
    }
    finish<GATE_UP, Source, LORA>(sum, p, at, bias, i, j);
  }
}

// This warp's blocks of the item `at`, of NT groups of tokens. `x` and `tokens`: its tokens and their chunks of the
// first of them; the next item's, `next`, when it returns.
template <int NT, class Source>
__device__ __forceinline__ void multiply(Sums<Source>& sums, const ExpertGemm& p, const Shared& s, Ring<Source>& ring,
                                         const Cursor& at, Cursor& next, Tokens& tokens, uint4 (&x)[2][2]) {
  const int chunks = p.k / 8;
  const auto load_next = [&](uint4(&to)[2][2]) {
    next = at;
    next.advance(s);
    if (!next.ended()) {
      tokens.find(p, s, next);
      tokens.load_first(to, chunks, next.b);
    }
  };
  if (at.b == at.b_end) {
    load_next(x);
  }
  int part = 0;  // whose end closes it, of a whole item
  int part_end = at.is_whole(s) ? p.k_blocks / kParts : INT_MAX;
#pragma unroll 2
  for (int b = at.b; b < at.b_end; ++b) {
    uint4 next_x[2][2];
    if (b + 1 < at.b_end) {
      tokens.load<NT>(next_x, chunks, b + 1);
    } else {
      load_next(next_x);
    }
    async_wait<Ring<Source>::kStages - 2>();  // the oldest stage is there
    ring.issue(p, s);                         // into the stage that was read before it
#pragma unroll
    for (int i = 0; i < Way<Source>::kRowTiles; ++i) {
      typename Source::Block w;
      Source::fetch(w, ring.read + i * Source::kStageBytes);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        uint4 low;
        uint4 high;
        Source::chunk(w, c, low, high);
        mma_chunk(sums.part[i][0], low, high, x[0][c]);
        if (NT == 2) {
          mma_chunk(sums.part[i][1], low, high, x[1][c]);
        }
      }
    }
    ring.read = ring.after(ring.read);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i / 2][i % 2] = next_x[i / 2][i % 2];
    }
    while (part < kParts && part_end <= b + 1) {
      sums.close_part();
      ++part;
      part_end = part < kParts ? p.k_blocks * (part + 1) / kParts : 0;
    }
  }
}

template <bool GATE_UP, class Source, bool LORA>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    expert_decode_kernel(const __grid_constant__ ExpertGemm p, int num_experts, int max_active, int num_pairs,
                         int held_pairs) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  __shared__ Partial<Source> partial[kGroups][2];  // in turn, so that one barrier is enough
  __shared__ Shared s;
  // With LoRA all but the deltas was complete before this kernel began. The order was before moe_gate_up did, which is
  // ahead of moe_down: its first weights do not wait.
  constexpr bool kWaitsLate = !GATE_UP && !LORA;
  if (GATE_UP && !LORA) {
    wait_for_previous();
  }
  if (!kWaitsLate) {
    let_next_start();
  }
  const Places places(num_experts, max_active, held_pairs, Ring<Source>::kBytes);
  load_tables<Source>(p, places, dynamic_shared, num_experts, max_active, num_pairs, s);
  Ring<Source> ring;
  ring.begin(p, s, dynamic_shared + places.rings + warp_index() * Ring<Source>::kBytes);
  if (kWaitsLate) {
    wait_for_previous();
    let_next_start();
  }
  Cursor at;
  at.seek(s, 0);
  Tokens tokens;
  uint4 x[2][2];
  if (!at.ended()) {
    tokens.find(p, s, at);
    tokens.load_first(x, p.k / 8, at.b);
  }
  bool waited = !LORA;
  int shared_turn = 0;
  while (!at.ended()) {
    const bool two = tokens.two;
    Sums<Source> sums;
    Cursor next;
    if (two) {
      multiply<2>(sums, p, s, ring, at, next, tokens, x);
    } else {
      multiply<1>(sums, p, s, ring, at, next, tokens, x);
    }
    if (!waited) {
      wait_for_previous();  // the deltas are there
      waited = true;
    }
    const bool whole = at.is_whole(s);
    const int tile = at.tile * Way<Source>::kRowTiles + (whole ? 0 : Role<Source>::tile());  // that this warp stores
    const float2 bias = tile_bias<GATE_UP>(p, at.expert, min(tile, p.row_tiles - 1));
    if (!whole) {
      finish_shared<GATE_UP, Source, LORA>(partial[warp_index() / kParts][shared_turn++ % 2], sums, p, at, bias, two);
    } else if constexpr (Way<Source>::kWhole) {
      finish<GATE_UP, Source, LORA>(sums.all[0], p, at, bias, 0, 0);
      if (two) {
        finish<GATE_UP, Source, LORA>(sums.all[1], p, at, bias, 0, 1);
      }
    }
    at = next;
  }
  wait_for_previous();  // also in a warp without an item: the block's end must mean that all before it has ended
  async_wait<0>();
}

}  // namespace decode

template <bool GATE_UP, class Source>
void launch_expert_decode(const ExpertGemm& p, int num_experts, int max_active, int64_t num_pairs,
                          const CudaStream& state) {
  using namespace decode;
  const bool lora = p.lora.row_slot != nullptr;
  const auto kernel = lora ? expert_decode_kernel<GATE_UP, Source, true> : expert_decode_kernel<GATE_UP, Source, false>;
  const int held_pairs = !p.x_by_pair && num_pairs <= kHeldPairs ? static_cast<int>(num_pairs) : 0;
  const int shared = Places(num_experts, max_active, held_pairs, Ring<Source>::kBytes).bytes;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
             "shared memory of the expert product");
  const int64_t items = int64_t{max_active} * p.row_tiles;  // or half of them
  const auto grid =
      static_cast<unsigned>(std::min<int64_t>((items + kGroups - 1) / kGroups, int64_t{kBlocksPerSm} * state.num_sms));
  launch_dependent(kernel, dim3(grid), kThreads, static_cast<size_t>(shared), state, p, num_experts, max_active,
                   static_cast<int>(num_pairs), held_pairs);
}

}  // namespace moelora
