// SPDX-License-Identifier: Apache-2.0
// The experts' deltas B (A x) of few tokens in one launch without clusters, before the stream of weights reaches its
// epilogue, which adds them. Beside kernels/moe/expert_delta.cuh, for many adapters.
// A unit of work is one (expert, adapter, module) with all of its pairs; one block an SM takes every gridDim.x-th. The
// unit's A and then its B pass through the block once, in blocks of 64 inputs (of 64 outputs) by 32 ranks, 4 granules,
// which its 16 warps take in turn. Each warp fills a ring of its own by asynchronous copies, so that nothing but the
// sums over the inputs needs a barrier of the block, two a unit. Copies run ahead across A, B and units: memory does
// not wait for sums. Units so few that there are two blocks or more for each are cut by outputs, their A is multiplied
// by each of these blocks. Sums have an order fixed by k alone (a warp's blocks of inputs, then the warps); the shrunk
// values enter B's product as a bf16 high and low part; a token is a column of its own: a pair's delta depends on its
// row and its adapter. Pairs without an adapter get a delta, too, that changes no bit, so that the stream of weights
// can load deltas before it needs them, without asking who is adapted.
// H200, gpt-oss's shape (2880 x 2880), rank 32, 64 rows with 8 adapters, six layers as one graph: 2,239 us, by clusters
// 2,440; with 64 adapters 2,802 and 3,073. A unit is 2 x 180 KiB. A block has 16 x 3 x 4 KiB = 192 KiB on their way.
// Instructions: about 190 a warp and 4 KiB. Two kernels, shrink and expand, whose units are slices of a matrix, would
// be better balanced but for a second start, partial sums in memory, and rings that run empty where one ends. Takes
// more than 200 KiB of shared memory, as kernels/moe/expert_stream.cuh does: both run under the same split of an SM's
// L1, which need not run empty between them for that; but never side by side on one SM.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/lora/lora_expand.cuh"
#include "kernels/moe/expert_gemm.cuh"

namespace moelora::delta_stream {

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 1;
constexpr int kPanels = 4;  // of a pass
constexpr int kRanks = kPanels * kTileRanks;
constexpr int kTokens = 16;                 // multiplied at once, in groups of 8
constexpr int kUnits = kThreads / kTokens;  // looked up at once
constexpr int kStages = 3;                  // of a warp's ring
constexpr int kCores = kTileColumns / 8;    // core matrices of a granule
constexpr int kMaxParts = 4;                // of a unit
constexpr int kGranule = static_cast<int>(kGranuleBytes);
constexpr int kStageBytes = kPanels * kGranule;
constexpr int kRingBytes = kStages * kStageBytes;
constexpr int kSharedBytes = kWarps * kRingBytes;
constexpr int kShrunkStride = kRanks + 4;  // floats: tokens fall into different banks
constexpr int kSums = kRanks * 8;          // of a group of tokens
// What is not adapted gets as its delta: whatever it is added to keeps its bits.
constexpr float kNoDelta = -0.0f;
static_assert(kSums <= kThreads);

struct Unit {
  int rank;  // 0: nothing to do
  int slot;
  int begin;  // sorted pairs
  int end;
  int module;  // of the product's modules
  float scale;
  int bias;
  int unused;
  PagedMatrix matrices[2];  // A and B
};

struct Shared {
  int num_units;  // of the table
  Unit units[kUnits];
  int rows[kUnits][kTokens];  // of a unit's tokens; -1 = none
  float row_scale[kUnits][kTokens];
  float partial[kWarps][kSums];  // [rank][token] of one group
  float shrunk[kTokens][kShrunkStride];
};
static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory");

// 32 ranks of up to kTokens tokens of one unit: a pass over A, then over B.
struct Job {
  int unit;   // kUnits: there are no more
  int first;  // sorted pair
  int panel;  // first
};

__device__ __forceinline__ int panels_of(const Unit& unit) {
  return (unit.rank + kTileRanks - 1) / kTileRanks;
}

// The first job of the first unit from `unit` on that has any.
__device__ __forceinline__ Job seek_job(const Shared& s, int unit) {
#pragma unroll 1
  while (unit < s.num_units && s.units[unit].rank == 0) {
    ++unit;
  }
  return unit < s.num_units ? Job{unit, s.units[unit].begin, 0} : Job{kUnits, 0, 0};
}
__device__ __forceinline__ Job next_job(const Shared& s, Job job) {
  const Unit& unit = s.units[job.unit];
  job.panel += kPanels;
  if (job.panel * kTileRanks < unit.rank) {
    return job;
  }
  job.panel = 0;
  job.first += kTokens;
  return job.first < unit.end ? job : seek_job(s, job.unit + 1);
}

// What a block does of all units.
struct Share {
  int units;         // in all
  int count;         // of the table, that this block alone is to mark, or less
  int first_output;  // blocks of 64 outputs of each of them
  int end_output;
};

// Fills the table with the units first, first + step, ..., a thread each. Entries of segments are asked for side by
// side with their number. Units so few that two blocks or more can have one are cut by outputs; each of the blocks
// multiplies all of A.
template <bool GATE_UP>
__device__ __forceinline__ Share find_units(const ExpertGemm& p, Shared& s, int first, int step, int num_pairs) {
  constexpr int kModules = GATE_UP ? 2 : 1;
  const AdapterTable& table = p.lora.table;
  const int u = static_cast<int>(threadIdx.x);
  // What is loaded passes the L1, which may hold what the same arrays said a layer ago.
  const int num_segments = __ldcg(p.order.num_segments);
  int index = first + u * step;
  Unit unit{};
  int expert = 0;
  const auto read_segment = [&] {
    const int segment = index / kModules;
    const bool inside = u < kUnits && segment < num_pairs;
    unit.begin = inside ? __ldcg(p.order.segment_begin + segment) : 0;
    unit.end = inside ? __ldcg(p.order.segment_begin + segment + 1) : 0;
    unit.slot = inside ? __ldcg(p.order.segment_slot + segment) : 0;
    expert = inside ? __ldcg(p.order.segment_expert + segment) : 0;
  };
  read_segment();
  Share share;
  share.units = num_segments * kModules;
  share.count = (share.units - first + step - 1) / step;
  const int outputs = (p.rows + kTileColumns - 1) / kTileColumns;
  const int parts = share.units > 0 ? max(min(step / share.units, min(kMaxParts, outputs)), 1) : 1;
  int part = 0;
  if (parts > 1) {
    part = first / share.units;
    index = u == 0 && part < parts ? first % share.units : share.units;
    read_segment();
  }
  share.first_output = min(part, parts) * outputs / parts;
  share.end_output = min(part + 1, parts) * outputs / parts;
  unit.module = index % kModules;
  if (index < share.units && unit.slot != 0) {
    const ExpertModule which = !GATE_UP           ? ExpertModule::kDown
                               : unit.module == 0 ? ExpertModule::kGate
                                                  : ExpertModule::kUp;
    const ResolvedLora* record = table.resolved_expert(unit.slot, p.lora.layer, expert, which);
    const int4 head = *reinterpret_cast<const int4*>(record);  // rank, scale, a, b
    unit.matrices[0] = paged_matrix(table, head.z, record->a_pages);
    unit.matrices[1] = paged_matrix(table, head.w, record->b_pages);
    unit.bias = record->bias;
    unit.rank = head.x;
    unit.scale = __int_as_float(head.y);
  }
  if (u < kUnits) {
    s.units[u] = unit;
  }
  if (u == 0) {
    s.num_units = parts > 1 ? 1 : min(max(share.count, 0), kUnits);
  }
  return share;
}

// The units' first tokens, token j of unit u by thread (u, j); and says which pairs are adapted. `count`: units of the
// table that there are.
template <bool GATE_UP>
__device__ __forceinline__ void find_rows(const ExpertGemm& p, Shared& s, int count) {
  constexpr int kModules = GATE_UP ? 2 : 1;
  const int u = static_cast<int>(threadIdx.x) / kTokens;
  const int j = static_cast<int>(threadIdx.x) % kTokens;
  const Unit& unit = s.units[u];
  int row = -1;
  float row_scale = 0.0f;
  if (unit.rank != 0 && unit.begin + j < unit.end) {
    row = __ldcg(p.order.pair_row + unit.begin + j);
    row_scale = p.lora.row_scale[row];
  }
  s.rows[u][j] = row;
  s.row_scale[u][j] = row_scale;
  if (u < count) {
#pragma unroll 1
    for (int pair = unit.begin + j; pair < unit.end; pair += kTokens) {
      if (unit.rank != 0 && pair != unit.begin + j) {
        row_scale = p.lora.row_scale[p.order.pair_row[pair]];
      }
      p.lora.adapted[pair * kModules + unit.module] = row_scale != 0.0f ? unit.rank : 0;
    }
  }
}

// The tokens of a job beyond the first kTokens of its unit take their place in the table.
__device__ __forceinline__ void find_tokens(const ExpertGemm& p, Shared& s, const Job& job) {
  __syncthreads();  // those before are read
  const int j = static_cast<int>(threadIdx.x);
  if (j < kTokens) {
    const bool there = job.first + j < s.units[job.unit].end;
    const int row = there ? p.order.pair_row[job.first + j] : -1;
    s.rows[job.unit][j] = row;
    s.row_scale[job.unit][j] = there ? p.lora.row_scale[row] : 0.0f;
  }
  __syncthreads();  // the tokens are there
}

// Where chunk i (of rank i of A, of output i of B) of core matrix c of panel q lies in a stage: at place(q, i) with
// turn_core(c), or, the same, at 128 c + place(c, i) with turn_panel(q). Lanes of two chunks and four cores fall into
// different banks, as do lanes of two chunks and four panels.
__device__ __forceinline__ int chunk_turn(int i, int of) {
  return 16 * (i ^ 2 * of);
}
__device__ __forceinline__ int turn_core(int place, int core) {
  return (place ^ 32 * (core % 4)) + core * 128;
}
__device__ __forceinline__ int turn_panel(int place, int panel) {
  return (place ^ 32 * panel) + panel * kGranule;
}

// A warp's blocks of A and B of all jobs, one after the other: every kWarps-th of the inputs, and of this block's
// outputs. Groups of copies count stages, whether there is anything in them or not. Of a stage lane (i, q) copies the
// chunks i of panel q.
class Ring {
 public:
  __device__ __forceinline__ Ring(const ExpertGemm& p, const Shared& s, const Share& share, std::byte* memory)
      : share_(share),
        inputs_((p.k + kTileColumns - 1) / kTileColumns),
        memory_(memory + warp_index() * kRingBytes),
        pool_(p.lora.table.pool + lane_index() / kPanels * 16),
        job_(seek_job(s, 0)),
        block_(warp_index()) {
    settle(s);
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) {
      refill(p, s);
    }
  }
  // The oldest stage, once it is there for all lanes.
  __device__ __forceinline__ const std::byte* wait() const {
    async_wait<kStages - 1>();
    __syncwarp();
    return memory_ + stage_ * kStageBytes;
  }
  // All lanes have read the oldest stage: it is filled again.
  __device__ __forceinline__ void refill(const ExpertGemm& p, const Shared& s) {
    __syncwarp();
    if (job_.unit < kUnits) {
      const Unit& unit = s.units[job_.unit];
      const int all = panels_of(unit);
      const int q = lane_index() % kPanels;
      const int panel = job_.panel + q;
      if (panel < all) {
        const std::byte* const from =
            pool_ + granule_offset(p, unit, of_b_ != 0 ? block_ * all + panel : panel * inputs_ + block_);
        std::byte* const to = memory_ + stage_ * kStageBytes;
        const int place = q * kGranule + chunk_turn(lane_index() / kPanels, q);
#pragma unroll
        for (int core = 0; core < kCores; ++core) {
          async_copy16(to + turn_core(place, core), from + core * 128);
        }
      }
      block_ += kWarps;
      settle(s);
    }
    async_commit();
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }

 private:
  // From past the end of a matrix to the next one with a block for this warp.
  __device__ __forceinline__ void settle(const Shared& s) {
#pragma unroll 1
    while (job_.unit < kUnits && block_ >= (of_b_ != 0 ? share_.end_output : inputs_)) {
      if (of_b_ != 0) {
        job_ = next_job(s, job_);
      }
      of_b_ ^= 1;
      block_ = warp_index() + (of_b_ != 0 ? share_.first_output : 0);
    }
  }
  // Of granule `index` of the matrix, in the pool.
  [[nodiscard]] __device__ __forceinline__ int64_t granule_offset(const ExpertGemm& p, const Unit& unit,
                                                                  int index) const {
    const AdapterTable& table = p.lora.table;
    const PagedMatrix& matrix = unit.matrices[of_b_];
    const auto page_granules = static_cast<unsigned>(table.page_granules);
    const auto at = static_cast<unsigned>(matrix.first + index);
    const unsigned page_of = at / page_granules;
    const int page = pool_page(table, unit.slot, matrix, page_of);
    return (static_cast<int64_t>(page) * table.page_granules + (at - page_of * page_granules)) *
           static_cast<int64_t>(kGranuleBytes);
  }

  const Share& share_;
  const int inputs_;  // blocks
  std::byte* memory_;
  const std::byte* pool_;  // chunks i of its first granule
  int stage_ = 0;          // the oldest
  Job job_;                // of the next copy
  int of_b_ = 0;           // it is of B, not of A
  int block_;
};

// This lane's chunks of its tokens' x of a block of inputs; zeros past k and where there is no token.
template <int NT>
__device__ __forceinline__ void load_x(uint4 (&values)[NT][2], const ExpertGemm& p, const __nv_bfloat16* const (&x)[NT],
                                       int block) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = block * kTileColumns + half * 32 + lane_index() % 4 * 8;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      values[j][half] = zero_chunk();
      if (x[j] != nullptr && column < p.k) {
        values[j][half] = __ldg(reinterpret_cast<const uint4*>(x[j] + column));
      }
    }
  }
}

// acc += A x over this warp's blocks of inputs: tiles of two panels, groups of tokens.
template <int NT>
__device__ __forceinline__ void multiply_inputs(float (&acc)[kPanels / 2][NT][4], const ExpertGemm& p, const Shared& s,
                                                const Job& job, Ring& ring) {
  const int g = lane_index() / 4;
  const int t = lane_index() % 4;
  const int panels = panels_of(s.units[job.unit]) - job.panel;  // or more
  const __nv_bfloat16* x[NT];
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const int row = s.rows[job.unit][8 * j + g];
    x[j] = row >= 0 ? p.x + (p.x_by_pair ? int64_t{job.first} + 8 * j + g : row) * p.x_stride : nullptr;
  }
  const int place = t * 128 + chunk_turn(g, t);  // of chunk t of rank g; 512 bytes on: chunk t + 4
  uint4 values[NT][2];
  load_x(values, p, x, warp_index());
#pragma unroll 1
  for (int block = warp_index(); block * kTileColumns < p.k; block += kWarps) {
    const std::byte* const a = ring.wait();
#pragma unroll
    for (int tile = 0; tile < kPanels / 2; ++tile) {
      if (2 * tile < panels) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const std::byte* const at = a + half * 512;
          const uint4 low = *reinterpret_cast<const uint4*>(at + turn_panel(place, 2 * tile));
          const uint4 high = 2 * tile + 1 < panels
                                 ? *reinterpret_cast<const uint4*>(at + turn_panel(place, 2 * tile + 1))
                                 : zero_chunk();
#pragma unroll
          for (int j = 0; j < NT; ++j) {
            mma_chunk(acc[tile][j], low, high, values[j][half]);
          }
        }
      }
    }
    load_x(values, p, x, block + kWarps);  // of the next block, while its A is on its way
    ring.refill(p, s);
  }
}

// shrunk = A x of all tokens of the job, times their scales.
template <int NT>
__device__ __forceinline__ void shrink(const ExpertGemm& p, Shared& s, const Job& job, Ring& ring) {
  const Unit& unit = s.units[job.unit];
  float acc[kPanels / 2][NT][4] = {};
  multiply_inputs<NT>(acc, p, s, job, ring);
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int tile = 0; tile < kPanels / 2; ++tile) {
      float* const to = s.partial[warp_index()] + (tile * 16 + lane_index() / 4) * 8 + lane_index() % 4 * 2;
      *reinterpret_cast<float2*>(to) = make_float2(acc[tile][j][0], acc[tile][j][1]);
      *reinterpret_cast<float2*>(to + 8 * 8) = make_float2(acc[tile][j][2], acc[tile][j][3]);
    }
    __syncthreads();  // all warps' sums are there, and what was shrunk before is read
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kSums) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        sum += s.partial[warp][thread];
      }
      const int rank = thread / 8;
      const int token = 8 * j + thread % 8;
      const float scale = s.row_scale[job.unit][token] * unit.scale;
      s.shrunk[token][rank] = job.panel * kTileRanks + rank < unit.rank && scale != 0.0f ? sum * scale : 0.0f;
    }
    __syncthreads();  // shrunk is there, and the sums are read
  }
}

// The shrunk values of token g of each group, ranks 8t .. 8t + 7.
template <int NT>
__device__ __forceinline__ void load_shrunk(SplitChunk (&shrunk)[NT], const Shared& s) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const auto* const from =
        reinterpret_cast<const float4*>(&s.shrunk[8 * j + lane_index() / 4][lane_index() % 4 * kTileRanks]);
    const float4 low = from[0];
    const float4 high = from[1];
    const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    shrunk[j] = split_chunk(values);
  }
}

// Stores a block's sums: output g of each core, tokens 2t and 2t + 1 of each group; kNoDelta where a token is not
// adapted. The first pass begins a delta, others add to it; the last one adds the bias.
template <bool GATE_UP, int NT>
__device__ __forceinline__ void store_sums(const float (&sum)[kCores / 2][NT][4], const ExpertGemm& p, const Shared& s,
                                           const Job& job, int block) {
  constexpr int kModules = GATE_UP ? 2 : 1;
  constexpr int kBlocksPerGranule = kGranule / static_cast<int>(sizeof(float)) / kTileColumns;
  const Unit& unit = s.units[job.unit];
  const int n = block * kTileColumns + lane_index() / 4;
  const bool first = job.panel == 0;
  const float* bias = nullptr;
  if (unit.bias >= 0 && job.panel + kPanels >= panels_of(unit)) {
    const std::byte* const granule = p.lora.table.granule(unit.slot, unit.bias + block / kBlocksPerGranule);
    bias = reinterpret_cast<const float*>(granule) + block % kBlocksPerGranule * kTileColumns + lane_index() / 4;
  }
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 8 * j + lane_index() % 4 * 2 + i;
      if (token >= unit.end - job.first) {
        continue;
      }
      const float scale = s.row_scale[job.unit][token];
      float* const to = p.lora.delta + ((int64_t{job.first} + token) * kModules + unit.module) * p.rows + n;
      const bool adds = scale != 0.0f && (!first || bias != nullptr);
#pragma unroll
      for (int core = 0; core < kCores; ++core) {
        if (n + core * 8 >= p.rows) {
          continue;
        }
        const float own = sum[core / 2][j][core % 2 * 2 + i];
        if (!adds) {
          if (first) {
            to[core * 8] = scale != 0.0f ? own : kNoDelta;
          }
          continue;
        }
        const float value = first ? own : own + to[core * 8];
        to[core * 8] = bias != nullptr ? fmaf(unit.scale * scale, bias[core * 8], value) : value;
      }
    }
  }
}

// delta += B shrunk of all tokens of the job, this block's outputs.
template <bool GATE_UP, int NT>
__device__ __forceinline__ void expand(const ExpertGemm& p, const Shared& s, const Job& job, const Share& share,
                                       Ring& ring) {
  const int g = lane_index() / 4;
  const int t = lane_index() % 4;
  const bool there = t < panels_of(s.units[job.unit]) - job.panel;
  const int place = t * kGranule + chunk_turn(g, t);  // of output g of the first core of panel t
  SplitChunk shrunk[NT];
  load_shrunk<NT>(shrunk, s);
#pragma unroll 1
  for (int block = share.first_output + warp_index(); block < share.end_output; block += kWarps) {
    float sum[kCores / 2][NT][4] = {};
    const std::byte* const b = ring.wait();
#pragma unroll
    for (int tile = 0; tile < kCores / 2; ++tile) {
      const uint4 low = there ? *reinterpret_cast<const uint4*>(b + turn_core(place, 2 * tile)) : zero_chunk();
      const uint4 high = there ? *reinterpret_cast<const uint4*>(b + turn_core(place, 2 * tile + 1)) : zero_chunk();
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        mma_chunk(sum[tile][j], low, high, shrunk[j].high);
        mma_chunk(sum[tile][j], low, high, shrunk[j].low);
      }
    }
    ring.refill(p, s);
    store_sums<GATE_UP, NT>(sum, p, s, job, block);
  }
}

// The deltas of units that adapt nothing: base rows, modules that an adapter does not have.
template <bool GATE_UP>
__device__ __forceinline__ void fill_idle_units(const ExpertGemm& p, const Shared& s, int count) {
  constexpr int kModules = GATE_UP ? 2 : 1;
#pragma unroll 1
  for (int u = 0; u < min(count, kUnits); ++u) {
    const Unit& unit = s.units[u];
    if (unit.rank != 0) {
      continue;
    }
#pragma unroll 1
    for (int pair = unit.begin + warp_index(); pair < unit.end; pair += kWarps) {
      float* const to = p.lora.delta + (int64_t{pair} * kModules + unit.module) * p.rows;
#pragma unroll 4
      for (int n = lane_index(); n < p.rows; n += 32) {
        to[n] = kNoDelta;
      }
    }
  }
}

// All jobs of the units in the table.
template <bool GATE_UP>
__device__ __forceinline__ void run_jobs(const ExpertGemm& p, Shared& s, const Share& share, Ring& ring) {
#pragma unroll 1
  for (Job job = seek_job(s, 0); job.unit < kUnits; job = next_job(s, job)) {
    const Unit& unit = s.units[job.unit];
    if (job.panel == 0 && job.first != unit.begin) {
      find_tokens(p, s, job);
    }
    if (unit.end - job.first <= 8) {
      shrink<1>(p, s, job, ring);
      expand<GATE_UP, 1>(p, s, job, share, ring);
    } else {
      shrink<2>(p, s, job, ring);
      expand<GATE_UP, 2>(p, s, job, share, ring);
    }
  }
}

template <bool GATE_UP>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    expert_delta_stream(const __grid_constant__ ExpertGemm p, int num_pairs) {
  extern __shared__ __align__(128) uint4 dynamic_shared[];
  __shared__ Shared s;
  // The order was complete before moe_gate_up began, which is ahead of moe_down.
  bool waited = GATE_UP;
  if (GATE_UP) {
    wait_for_previous();
    let_next_start();
  }
  const int blocks = static_cast<int>(gridDim.x);
  int first = static_cast<int>(blockIdx.x);
  Share share;
  do {
    share = find_units<GATE_UP>(p, s, first, blocks, num_pairs);
    __syncthreads();  // the units are there
    Ring ring(p, s, share, reinterpret_cast<std::byte*>(dynamic_shared));
    if (!waited) {
      wait_for_previous();  // x is there, and nobody reads what is written here
      let_next_start();
      waited = true;
    }
    find_rows<GATE_UP>(p, s, share.count);
    fill_idle_units<GATE_UP>(p, s, share.count);
    __syncthreads();  // their tokens are there
    run_jobs<GATE_UP>(p, s, share, ring);
    async_wait<0>();
    __syncthreads();  // the table is read
    first += kUnits * blocks;
  } while (first < share.units);
}

}  // namespace moelora::delta_stream

namespace moelora {

// False where the GPU has too little shared memory: nothing was launched.
template <bool GATE_UP>
bool launch_expert_delta_stream(const ExpertGemm& p, int64_t num_pairs, const CudaStream& state) {
  using namespace delta_stream;
  constexpr auto kKernel = expert_delta_stream<GATE_UP>;
  if (cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes) != cudaSuccess) {
    cudaGetLastError();  // a GPU with less
    return false;
  }
  const int64_t units = num_pairs * (GATE_UP ? 2 : 1);  // at most
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(units * kMaxParts, kBlocksPerSm * state.num_sms));
  launch_dependent(kKernel, dim3(blocks), kThreads, kSharedBytes, state, p, static_cast<int>(num_pairs));
  check_launch("the experts' deltas");
  return true;
}

}  // namespace moelora
