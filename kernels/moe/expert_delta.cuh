// SPDX-License-Identifier: Apache-2.0
// The experts' deltas B (A x) of few tokens in one launch, before the stream of weights reaches its epilogue, which
// adds them. sm_90 and later; elsewhere lora_shrink and kernels/moe/expert_expand.cuh.
// A unit of work is one (expert, adapter, module) with all of its pairs; a cluster of 4 blocks takes units in turn.
// Each block has a quarter of A's inputs in shared memory, then, in the same place, a quarter of B's outputs, by bulk
// copies; a cluster's next unit, and B where x is not there yet, were asked into the L2 before. So blocks are small: 64
// units of gpt-oss's shape, 8 rows of an adapter each, run at once and beside the first blocks of the product. The
// blocks' sums over their inputs meet in everybody's shared memory and are added in the order of the blocks; then each
// block multiplies them with its share of B. A block looks up its next 32 units at once, a thread a token. Every sum
// has an order fixed by k alone: a pair's delta depends on its row and its adapter, not on its neighbours. Limited by
// the latency of segment, record and A for few pairs, by reading A and B, once each, for many.
// H200, gpt-oss's shape, rank 32, 8 rows with 8 adapters. Tried: clusters of 8 blocks with both A and B in shared
// memory, 16 bytes a copy: 19 us from x to the last delta, since 45 clusters ran at once, and to look up, to ask for
// copies, to wait for A, to meet and to expand took 1.5, 2, 3, 1.5 and 1 us of each unit. The same by clusters of 4
// and bulk copies: 62 of 64 ran at once (two SMs were the router's), for 12 us, and the last two behind them. A bulk
// copy for each granule (1 KiB): 60 cycles each, on an SM one after the other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mbarrier.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/lora/lora_expand.cuh"
#include "kernels/moe/expert_gemm.cuh"

namespace moelora::expert_delta {

constexpr int kCluster = 4;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 4;
constexpr int kPanels = 4;  // of a pass
constexpr int kRanks = kPanels * kTileRanks;
constexpr int kTokens = 8;                  // multiplied at once
constexpr int kUnits = kThreads / kTokens;  // looked up at once
constexpr int kInputParts = kWarps / 2;     // half of the warps take panels 0 and 1, half 2 and 3
constexpr int kTogether = 3;                // blocks of inputs whose x a warp has in registers
constexpr int kShrunkStride = kRanks + 4;   // floats: tokens fall into different banks
constexpr int kSums = kRanks * kTokens;     // one a thread
static_assert(kSums == kThreads && kSums == 128 * kWarps / kCluster);

struct Unit {
  int rank;  // 0: nothing to do
  int slot;
  int begin;  // sorted pairs
  int end;
  int module;  // of the product's modules
  float scale;
  int bias;
  int unused;
  PagedMatrix a;
  PagedMatrix b;
};

struct Shared {
  uint64_t there;       // the block's share of A or B of a pass
  ClusterBarrier full;  // the sums of all blocks have come
  ClusterBarrier free;  // all blocks have read theirs
  int num_units;        // of the table
  Unit units[kUnits];
  int rows[kUnits][kTokens];  // of the first tokens of each unit; -1 = none
  float row_scale[kUnits][kTokens];
  float partial[kInputParts][kSums];  // [rank][token]
  float exchange[kCluster][kSums];    // what each block of the cluster sums to
  float shrunk[kTokens][kShrunkStride];
};

// This block's share of a product.
struct Share {
  int blocks;      // of 64 inputs, in all
  int input;       // first of them
  int num_inputs;  // blocks
  int output;      // first block of 64 outputs
  int num_outputs;
};

// 32 ranks of up to kTokens tokens of one unit.
struct Pass {
  int unit;   // kUnits: there are no more
  int first;  // sorted pair
  int panel;  // first
};

__device__ __forceinline__ Share share_of(const ExpertGemm& p) {
  const int block = cluster_block();
  Share share;
  share.blocks = (p.k + kTileColumns - 1) / kTileColumns;
  share.input = block * share.blocks / kCluster;
  share.num_inputs = (block + 1) * share.blocks / kCluster - share.input;
  const int outputs = (p.rows + kTileColumns - 1) / kTileColumns;
  share.output = block * outputs / kCluster;
  share.num_outputs = (block + 1) * outputs / kCluster - share.output;
  return share;
}

__device__ __forceinline__ int panels_of(const Unit& unit) {
  return (unit.rank + kTileRanks - 1) / kTileRanks;
}

// What thread (u, j) found of token j of unit u.
struct Found {
  int row;  // -1: none
  int rank;
  int begin;
  int end;
  int units;  // of the whole launch
};

// Token j of unit u by thread (u, j): fills the table with the units first, first + step, ... Entries of segments are
// asked for side by side with their number.
template <bool GATE_UP>
__device__ __forceinline__ Found find_units(const ExpertGemm& p, Shared& s, int first, int step, int num_pairs) {
  constexpr int kModules = GATE_UP ? 2 : 1;
  const int u = static_cast<int>(threadIdx.x) / kTokens;
  const int j = static_cast<int>(threadIdx.x) % kTokens;
  const int segment = (first + u * step) / kModules;
  const int module = (first + u * step) % kModules;
  // What is loaded passes the L1, which may hold what the same arrays said a layer ago.
  const int num_segments = __ldcg(p.order.num_segments);
  const bool inside = segment < num_pairs;
  const int begin = inside ? __ldcg(p.order.segment_begin + segment) : 0;
  const int end = inside ? __ldcg(p.order.segment_begin + segment + 1) : 0;
  const int slot = inside ? __ldcg(p.order.segment_slot + segment) : 0;
  const int expert = inside ? __ldcg(p.order.segment_expert + segment) : 0;
  const bool there = segment < num_segments;
  Unit unit{};
  int row = -1;
  if (there && slot != 0) {
    const ExpertModule which = !GATE_UP ? ExpertModule::kDown : module == 0 ? ExpertModule::kGate : ExpertModule::kUp;
    const ResolvedLora* record = p.lora.table.resolved_expert(slot, p.lora.layer, expert, which);
    const int4 head = *reinterpret_cast<const int4*>(record);  // rank, scale, a, b
    row = begin + j < end ? __ldcg(p.order.pair_row + begin + j) : -1;
    unit.a = paged_matrix(p.lora.table, head.z, record->a_pages);
    unit.b = paged_matrix(p.lora.table, head.w, record->b_pages);
    unit.bias = record->bias;
    unit.rank = head.x;
    unit.scale = __int_as_float(head.y);
  }
  unit.slot = slot;
  unit.begin = begin;
  unit.end = there ? end : begin;
  unit.module = module;
  if (j == 0) {
    s.units[u] = unit;
  }
  s.rows[u][j] = row;
  if (threadIdx.x == 0) {
    s.num_units = min(max((num_segments * kModules - first + step - 1) / step, 0), kUnits);
  }
  return {row, unit.rank, unit.begin, unit.end, num_segments * kModules};
}

// The tokens' scales, which nobody needs before the sums of A meet; and says which pairs are adapted.
template <bool GATE_UP>
__device__ __forceinline__ void find_scales(const ExpertGemm& p, Shared& s, const Found& found, int first, int step) {
  constexpr int kModules = GATE_UP ? 2 : 1;
  const int u = static_cast<int>(threadIdx.x) / kTokens;
  const int j = static_cast<int>(threadIdx.x) % kTokens;
  const int module = (first + u * step) % kModules;
  const float row_scale = found.row >= 0 ? p.lora.row_scale[found.row] : 0.0f;
  s.row_scale[u][j] = row_scale;
  if (cluster_block() == 0) {
#pragma unroll 1
    for (int pair = found.begin + j; pair < found.end; pair += kTokens) {
      const bool adapted = found.rank != 0 && (pair == found.begin + j
                                                   ? row_scale
                                                   : p.lora.row_scale[__ldcg(p.order.pair_row + pair)]) != 0.0f;
      p.lora.adapted[pair * kModules + module] = adapted ? found.rank : 0;
    }
  }
}

// Tokens `first` .. `first + 7` of a unit with more than the table holds.
__device__ __forceinline__ void find_tokens(const ExpertGemm& p, Shared& s, int u, int first) {
  const int j = static_cast<int>(threadIdx.x);
  if (j < kTokens) {
    const bool there = first + j < s.units[u].end;
    const int row = there ? p.order.pair_row[first + j] : -1;
    s.rows[u][j] = row;
    s.row_scale[u][j] = there ? p.lora.row_scale[row] : 0.0f;
  }
  __syncthreads();  // the tokens are there
}

// The first pass of the first unit from `unit` on that has any.
__device__ __forceinline__ Pass seek_pass(const Shared& s, int unit) {
#pragma unroll 1
  while (unit < s.num_units && s.units[unit].rank == 0) {
    ++unit;
  }
  return unit < s.num_units ? Pass{unit, s.units[unit].begin, 0} : Pass{kUnits, 0, 0};
}
__device__ __forceinline__ Pass next_pass(const Shared& s, Pass pass) {
  const Unit& unit = s.units[pass.unit];
  pass.panel += kPanels;
  if (pass.panel * kTileRanks < unit.rank) {
    return pass;
  }
  pass.panel = 0;
  pass.first += kTokens;
  return pass.first < unit.end ? pass : seek_pass(s, pass.unit + 1);
}

enum class Of : uint8_t { kA, kB };

// Passes to visit(place, address, granules) this block's share of A or B of a pass, in runs that lie in one page, a
// thread a run. In their places they are one behind the other: of A by (panel, block of inputs), of B by (block of
// outputs, panel). Returns how many granules there are.
template <Of OF, class Visit>
__device__ __forceinline__ int visit_runs(const ExpertGemm& p, const Shared& s, const Share& share, const Pass& pass,
                                          int thread, const Visit& visit) {
  if (pass.unit == kUnits) {
    return 0;
  }
  const AdapterTable& table = p.lora.table;
  const Unit& unit = s.units[pass.unit];
  const PagedMatrix& matrix = OF == Of::kA ? unit.a : unit.b;
  const int all = panels_of(unit);
  const int panels = min(all - pass.panel, kPanels);
  int runs;
  int length;
  int index;  // of this thread's granules in the matrix
  if constexpr (OF == Of::kA) {
    runs = panels;
    length = share.num_inputs;
    index = (pass.panel + thread) * share.blocks + share.input;
  } else {
    runs = panels == all ? 1 : share.num_outputs;
    length = panels == all ? share.num_outputs * all : panels;
    index = (share.output + thread) * all + pass.panel;
  }
  if (thread < runs) {
    const auto page_granules = static_cast<unsigned>(table.page_granules);
    auto at = static_cast<unsigned>(matrix.first + index);
    unsigned page_of = at / page_granules;
    at -= page_of * page_granules;
    int place = thread * length;
#pragma unroll 1
    for (int left = length; left > 0;) {
      const int page = pool_page(table, unit.slot, matrix, page_of);
      const int count = min(left, static_cast<int>(page_granules - at));
      visit(place,
            table.pool + (static_cast<int64_t>(page) * table.page_granules + at) * static_cast<int64_t>(kGranuleBytes),
            count);
      place += count;
      left -= count;
      at = 0;
      ++page_of;
    }
  }
  return runs * length;
}
// Asks for them. What was in their place is read.
template <Of OF>
__device__ __forceinline__ void copy(const ExpertGemm& p, Shared& s, const Share& share, const Pass& pass,
                                     std::byte* memory) {
  const int thread = static_cast<int>(threadIdx.x);
  const int count =
      visit_runs<OF>(p, s, share, pass, thread, [&](int place, const std::byte* granules, int number) {
        bulk_copy(memory + place * static_cast<int>(kGranuleBytes), granules,
                  static_cast<uint32_t>(number) * kGranuleBytes, &s.there);
      });
  if (thread == 0 && pass.unit != kUnits) {
    mbarrier_arrive_expect(&s.there, static_cast<uint32_t>(count) * kGranuleBytes);
  }
}
// Asks them into the L2, by threads from `first` on.
template <Of OF>
__device__ __forceinline__ void prefetch(const ExpertGemm& p, const Shared& s, const Share& share, const Pass& pass,
                                         int first) {
  const int thread = static_cast<int>(threadIdx.x) - first;
  if (thread >= 0) {
    visit_runs<OF>(p, s, share, pass, thread, [](int, const std::byte* granules, int number) {
      prefetch_l2_bulk(granules, static_cast<uint32_t>(number) * kGranuleBytes);
    });
  }
}

// Lane (g, t) takes the words of a chunk from word t on, of A and of x alike: then the lanes of a chunk's 8 ranks and
// of 4 chunks fall into different banks.
__device__ __forceinline__ uint4 turn_words(const uint4& chunk) {
  const bool one = lane_index() % 2 != 0;
  const bool two = lane_index() / 2 % 2 != 0;
  const uint4 once = one ? make_uint4(chunk.y, chunk.z, chunk.w, chunk.x) : chunk;
  return two ? make_uint4(once.z, once.w, once.x, once.y) : once;
}
__device__ __forceinline__ uint4 load_turned(const std::byte* chunk) {
  const int t = lane_index() % 4;
  const auto word = [&](int i) { return *reinterpret_cast<const uint32_t*>(chunk + (t + i) % 4 * 4); };
  return make_uint4(word(0), word(1), word(2), word(3));
}

// This lane's chunks of its token's x in kTogether blocks of the share from b on, kInputParts apart; turned.
__device__ __forceinline__ void load_x(const ExpertGemm& p, const Share& share, const __nv_bfloat16* x, int b,
                                       uint4 (&values)[kTogether][2]) {
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int block = b + i * kInputParts;
      const int column = (share.input + block) * kTileColumns + lane_index() % 4 * 8 + half * 32;
      values[i][half] = zero_chunk();
      if (x != nullptr && block < share.num_inputs && column < p.k) {
        values[i][half] = __ldg(reinterpret_cast<const uint4*>(x + column));
      }
    }
  }
}

// partial[part of the inputs] = A x of this warp's 16 ranks and 8 tokens, once A is there: `parity` of the barrier.
__device__ __forceinline__ void shrink(const ExpertGemm& p, Shared& s, const Share& share, const Pass& pass,
                                       const std::byte* a, uint32_t parity) {
  const int g = lane_index() / 4;
  const int t = lane_index() % 4;
  const int part = warp_index() / 2;
  const int low_panel = warp_index() % 2 * 2;
  const int panels = panels_of(s.units[pass.unit]) - pass.panel;
  const int row = s.rows[pass.unit][g];
  const __nv_bfloat16* const x = row >= 0 ? p.x + (p.x_by_pair ? int64_t{pass.first} + g : row) * p.x_stride : nullptr;
  const int offset = t * 128 + g * 16;
  float acc[4] = {};
  uint4 values[kTogether][2];
  load_x(p, share, x, part, values);
  mbarrier_wait(&s.there, parity);
#pragma unroll 1
  for (int b = part; b < share.num_inputs; b += kTogether * kInputParts) {
    if (b != part) {
      load_x(p, share, x, b, values);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int block = b + i * kInputParts;
      if (block < share.num_inputs) {
        const std::byte* const low =
            a + (low_panel * share.num_inputs + block) * static_cast<int>(kGranuleBytes) + offset;
        const std::byte* const high = low + share.num_inputs * static_cast<int>(kGranuleBytes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 a_low = low_panel < panels ? load_turned(low + half * 512) : zero_chunk();
          const uint4 a_high = low_panel + 1 < panels ? load_turned(high + half * 512) : zero_chunk();
          mma_chunk(acc, a_low, a_high, turn_words(values[i][half]));
        }
      }
    }
  }
  float* const to = s.partial[part] + (low_panel * kTileRanks + g) * kTokens + 2 * t;
  *reinterpret_cast<float2*>(to) = make_float2(acc[0], acc[1]);
  *reinterpret_cast<float2*>(to + kTileRanks * kTokens) = make_float2(acc[2], acc[3]);
  __syncthreads();  // the sums of all warps and the scales; A is read
}

// shrunk = the cluster's sums of all inputs, times the scale; the nth exchange. Warps w and w + kCluster send this
// block's sums to block w.
__device__ __forceinline__ void exchange_sums(Shared& s, const Pass& pass, uint32_t nth) {
  const int thread = static_cast<int>(threadIdx.x);
  s.free.wait(nth % 2 ^ 1);  // all blocks have read what was here before
  if (thread == 0) {
    s.full.arrive_and_expect(kCluster * kSums * static_cast<int>(sizeof(float)));
  }
  const int i = warp_index() / kCluster * 128 + lane_index() * 4;
  float4 own = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int part = 0; part < kInputParts; ++part) {
    const float4 value = *reinterpret_cast<const float4*>(&s.partial[part][i]);
    own.x += value.x;
    own.y += value.y;
    own.z += value.z;
    own.w += value.w;
  }
  s.full.send(reinterpret_cast<float4*>(&s.exchange[cluster_block()][i]), warp_index() % kCluster, own);
  s.full.wait(nth % 2);  // all blocks' sums are there
  float sum = 0.0f;
#pragma unroll
  for (int block = 0; block < kCluster; ++block) {
    sum += s.exchange[block][thread];
  }
  const Unit& unit = s.units[pass.unit];
  const int rank = thread / kTokens;
  const int token = thread % kTokens;
  const float scale = s.row_scale[pass.unit][token] * unit.scale;
  s.shrunk[token][rank] = pass.panel * kTileRanks + rank < unit.rank && scale != 0.0f ? sum * scale : 0.0f;
  __syncthreads();  // shrunk is there; the sums are read
  if (thread < kCluster) {
    s.free.arrive_at(thread);
  }
}

// delta += B shrunk of this block's outputs, a thread an output; the first pass begins them, the last adds the bias.
template <bool GATE_UP>
__device__ __forceinline__ void expand(const ExpertGemm& p, const Shared& s, const Share& share, const Pass& pass,
                                       const std::byte* b) {
  constexpr int kModules = GATE_UP ? 2 : 1;
  const Unit& unit = s.units[pass.unit];
  const int panels = panels_of(unit) - pass.panel;
  const bool with_bias = unit.bias >= 0 && panels <= kPanels;
  const int begin = share.output * kTileColumns;
  const int end = min((share.output + share.num_outputs) * kTileColumns, p.rows);
  for (int n = begin + static_cast<int>(threadIdx.x); n < end; n += kThreads) {
    const std::byte* const at =
        b + (n - begin) / kTileColumns * min(panels, kPanels) * kGranuleBytes + (n - begin) % kTileColumns * 16;
    uint4 chunk[kPanels];
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
      chunk[i] = i < panels ? *reinterpret_cast<const uint4*>(at + i * kGranuleBytes) : zero_chunk();
    }
    float bias = 0.0f;
    if (with_bias) {
      constexpr int kPerGranule = kGranuleBytes / sizeof(float);
      const std::byte* const granule = p.lora.table.granule(unit.slot, unit.bias + n / kPerGranule);
      bias = reinterpret_cast<const float*>(granule)[n % kPerGranule];
    }
    for (int j = 0; j < min(unit.end - pass.first, kTokens); ++j) {
      const float row_scale = s.row_scale[pass.unit][j];
      if (row_scale == 0.0f) {
        continue;
      }
      float* const to = p.lora.delta + ((int64_t{pass.first} + j) * kModules + unit.module) * p.rows + n;
      float sum = pass.panel != 0 ? *to : 0.0f;
#pragma unroll
      for (int i = 0; i < kPanels; ++i) {
        const uint32_t pair[4] = {chunk[i].x, chunk[i].y, chunk[i].z, chunk[i].w};
        const auto* const shrunk = reinterpret_cast<const float4*>(&s.shrunk[j][i * kTileRanks]);
        const float4 low = shrunk[0];
        const float4 high = shrunk[1];
        const float value[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int r = 0; r < 4; ++r) {  // a bf16 is the high half of an fp32
          sum = fmaf(__uint_as_float(pair[r] << 16), value[2 * r], sum);
          sum = fmaf(__uint_as_float(pair[r] & 0xffff0000u), value[2 * r + 1], sum);
        }
      }
      if (with_bias) {
        sum = fmaf(unit.scale * row_scale, bias, sum);
      }
      *to = sum;
    }
  }
  __syncthreads();  // B, shrunk and the tokens are read
}

// What of a block goes on from table to table.
struct Progress {
  uint32_t exchanges = 0;
  uint32_t copies = 0;  // that have come
};

// All passes of the units in the table, the first one's A on its way to `memory`.
template <bool GATE_UP>
__device__ __forceinline__ void run_units(const ExpertGemm& p, Shared& s, const Share& share, std::byte* memory,
                                          Pass pass, Progress& progress) {
#pragma unroll 1
  while (pass.unit != kUnits) {
    if (pass.panel == 0 && pass.first != s.units[pass.unit].begin) {
      find_tokens(p, s, pass.unit, pass.first);
    }
    shrink(p, s, share, pass, memory, progress.copies++ % 2);
    copy<Of::kB>(p, s, share, pass, memory);
    const Pass next = next_pass(s, pass);
    exchange_sums(s, pass, progress.exchanges++);
    prefetch<Of::kA>(p, s, share, next, kThreads / 4);
    prefetch<Of::kB>(p, s, share, next, kThreads / 2);
    mbarrier_wait(&s.there, progress.copies++ % 2);
    expand<GATE_UP>(p, s, share, pass, memory);
    copy<Of::kA>(p, s, share, next, memory);
    pass = next;
  }
}

inline int share_bytes(int width) {
  const int blocks = (width + kTileColumns - 1) / kTileColumns;
  return (blocks + kCluster - 1) / kCluster * kPanels * static_cast<int>(kGranuleBytes);
}

// Grid: clusters, which take every gridDim.x / kCluster-th unit.
template <bool GATE_UP>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    expert_delta_kernel(const __grid_constant__ ExpertGemm p, int num_pairs) {
#ifdef MOELORA_CLUSTERS
  extern __shared__ __align__(128) uint4 dynamic_shared[];
  __shared__ Shared s;
  std::byte* const memory = reinterpret_cast<std::byte*>(dynamic_shared);
  if (threadIdx.x == 0) {
    mbarrier_init(&s.there, 1);
    publish_barriers();
    s.full.init(1);
    s.free.init(kCluster);
  }
  cluster_sync();
  // The order was complete before moe_gate_up began, which is ahead of moe_down.
  if (GATE_UP) {
    wait_for_previous();
    let_next_start();
  }
  const Share share = share_of(p);
  const int clusters = static_cast<int>(gridDim.x) / kCluster;
  Progress progress;
  Found found;
  int first = static_cast<int>(blockIdx.x) / kCluster;
  do {
    found = find_units<GATE_UP>(p, s, first, clusters, num_pairs);
    __syncthreads();  // the units are there
    const Pass pass = seek_pass(s, 0);
    copy<Of::kA>(p, s, share, pass, memory);
    if (!GATE_UP && first < clusters) {
      prefetch<Of::kB>(p, s, share, pass, kThreads / 2);
      wait_for_previous();  // x is there, and nobody reads what is written here
      let_next_start();
    }
    find_scales<GATE_UP>(p, s, found, first, clusters);
    run_units<GATE_UP>(p, s, share, memory, pass, progress);
    __syncthreads();  // the table is read
    first += kUnits * clusters;
  } while (first < found.units);
  s.free.wait(progress.exchanges % 2 ^ 1);  // nobody writes here any more
#endif
}

// Whether an SM has registers and shared memory for a block of the product beside its two of these.
template <bool GATE_UP>
bool leave_room(int64_t num_pairs, const CudaStream& state) {
  return num_pairs * (GATE_UP ? 2 : 1) * kCluster <= int64_t{2} * state.num_sms;
}

// Clusters that run at once.
template <class Kernel>
int resident_clusters(Kernel kernel, int shared, const CudaStream& state) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = kCluster;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kCluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = state.stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  check_cuda(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "clusters of the experts' deltas");
  return std::max(clusters, 1);
}

}  // namespace moelora::expert_delta

namespace moelora {

// False where the GPU has no clusters or the layer is too wide: nothing was launched.
template <bool GATE_UP>
bool launch_expert_delta(const ExpertGemm& p, int64_t num_pairs, const CudaStream& state) {
  using namespace expert_delta;
  constexpr auto kKernel = expert_delta_kernel<GATE_UP>;
  constexpr int kSharedMax = 227 * 1024 - static_cast<int>(sizeof(Shared)) - 64;
  static const bool compiled = has_code(kKernel);
  const int shared = std::max(share_bytes(p.k), share_bytes(p.rows));
  if (state.compute_capability < 90 || !compiled || shared > kSharedMax) {
    return false;
  }
  check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
             "shared memory of the experts' deltas");
  const int64_t units = num_pairs * (GATE_UP ? 2 : 1);  // at most
  int64_t clusters = units;
  if (units * kCluster > state.num_sms) {
    clusters = std::min<int64_t>(units, resident_clusters(kKernel, shared, state));
  }
  launch_dependent_clusters(kKernel, static_cast<unsigned>(clusters * kCluster), kCluster, kThreads,
                            static_cast<size_t>(shared), state, p, static_cast<int>(num_pairs));
  check_launch("the experts' deltas");
  return true;
}

}  // namespace moelora
