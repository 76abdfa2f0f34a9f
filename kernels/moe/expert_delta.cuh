// SPDX-License-Identifier: Apache-2.0
// The experts' deltas B (A x) of few tokens in one launch, before the stream of weights reaches its epilogue, which
// adds them. sm_90 and later; elsewhere lora_shrink and kernels/moe/expert_expand.cuh.
// A unit of work is one (expert, adapter, module) with all of its pairs; a cluster of 8 blocks takes units in turn.
// Each block holds an eighth of A's inputs and an eighth of B's outputs in shared memory, filled by asynchronous copies
// that are asked for together and run one pass (32 ranks) ahead: A of the next pass while B of this one is used. The
// blocks' sums over their inputs meet in everybody's shared memory and are added in the order of the blocks; then each
// block multiplies them with its share of B. A block looks up its next 32 units at once, a thread a token. Every sum
// has an order fixed by k alone: a pair's delta depends on its row and its adapter, not on its neighbours. Limited by
// the latency of segment, record and A for few pairs, by reading A and B, once each, for many.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/lora/lora_expand.cuh"
#include "kernels/moe/expert_gemm.cuh"

namespace moelora::expert_delta {

constexpr int kCluster = 8;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 4;
constexpr int kPanels = 4;  // of a pass
constexpr int kRanks = kPanels * kTileRanks;
constexpr int kTokens = 8;                  // multiplied at once
constexpr int kUnits = kThreads / kTokens;  // looked up at once
constexpr int kInputParts = kWarps / 2;     // half of the warps take panels 0 and 1, half 2 and 3
constexpr int kShrunkStride = kRanks + 4;   // floats: tokens fall into different banks
constexpr int kSums = kRanks * kTokens;     // one a thread
constexpr unsigned kAll = 0xffffffffu;
static_assert(kSums == kThreads && kCluster == kWarps);

struct Unit {
  int rank;  // 0: nothing to do
  int slot;
  int begin;  // sorted pairs
  int end;
  int module;  // of the product's modules
  float scale;
  int a;
  int b;
  int4 a_pages;
  int4 b_pages;
  int bias;
  int unused[3];
};

struct Shared {
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

// 32 ranks of one unit.
struct Pass {
  int unit;
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

// Token j of unit u by thread (u, j): fills the table with the units first, first + step, ... and says which pairs are
// adapted. Entries of segments are asked for side by side with their number. Returns the number of all units.
template <bool GATE_UP>
__device__ __forceinline__ int find_units(const ExpertGemm& p, Shared& s, int first, int step, int num_pairs) {
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
  float row_scale = 0.0f;
  if (there && slot != 0) {
    const ExpertModule which = !GATE_UP ? ExpertModule::kDown : module == 0 ? ExpertModule::kGate : ExpertModule::kUp;
    const ResolvedLora* record = p.lora.table.resolved_expert(slot, p.lora.layer, expert, which);
    const int4 head = *reinterpret_cast<const int4*>(record);  // rank, scale, a, b
    row = begin + j < end ? __ldcg(p.order.pair_row + begin + j) : -1;
    unit.a_pages = *reinterpret_cast<const int4*>(record->a_pages);
    unit.b_pages = *reinterpret_cast<const int4*>(record->b_pages);
    unit.bias = record->bias;
    unit.rank = head.x;
    unit.scale = __int_as_float(head.y);
    unit.a = head.z;
    unit.b = head.w;
    row_scale = row >= 0 ? p.lora.row_scale[row] : 0.0f;
  }
  unit.slot = slot;
  unit.begin = begin;
  unit.end = end;
  unit.module = module;
  if (j == 0) {
    s.units[u] = unit;
  }
  s.rows[u][j] = row;
  s.row_scale[u][j] = row_scale;
  if (threadIdx.x == 0) {
    s.num_units = min(max((num_segments * kModules - first + step - 1) / step, 0), kUnits);
  }
  if (!GATE_UP) {
    wait_for_previous();  // x is there, and nobody reads what is written here
  }
  if (there && cluster_block() == 0) {
    for (int pair = begin + j; pair < end; pair += kTokens) {
      const bool adapted =
          unit.rank != 0 && (pair == begin + j ? row_scale : p.lora.row_scale[p.order.pair_row[pair]]) != 0.0f;
      p.lora.adapted[pair * kModules + module] = adapted ? unit.rank : 0;
    }
  }
  return num_segments * kModules;
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

// The first pass at or after this one; beyond the table: kUnits.
__device__ __forceinline__ void seek(const Shared& s, Pass& pass) {
  const int count = s.num_units;
  while (pass.unit < count && pass.panel * kTileRanks >= s.units[pass.unit].rank) {
    ++pass.unit;
    pass.panel = 0;
  }
  if (pass.unit >= count) {
    pass.unit = kUnits;
  }
}

// A rectangle of a matrix of granules: `rows` of `width`, from (row, column) on, of a matrix `pitch` wide.
struct Granules {
  int first;  // of the matrix
  int4 pages;
  int row;
  int column;
  int rows;
  int width;
  int pitch;
  int place_pitch;  // granules between the rows in shared memory
};

// Asks for them. Of each 128 bytes, the 8 ranks of chunk j (A) or the 8 outputs of core j (B) are turned by 2 j, so
// that the lanes of a fragment fall into different banks. Always closes a group of copies.
__device__ __forceinline__ void copy_granules(const AdapterTable& table, int slot, const Granules& what,
                                              std::byte* to) {
  const int lane = lane_index();
  const int count = what.rows * what.width;
  std::byte* const turned = to + lane / 8 * 128 + (lane % 8 + 2 * (lane / 8)) % 8 * 16;
#pragma unroll 1
  for (int g = 0; g < count; g += 32) {
    unsigned long long granule = 0;  // lane i finds the i-th
    int place = 0;
    if (g + lane < count) {
      const int row = (g + lane) / what.width;
      const int column = (g + lane) - row * what.width;
      place = row * what.place_pitch + column;
      granule = reinterpret_cast<unsigned long long>(
          paged_granule(table, slot, what.first, what.pages, (what.row + row) * what.pitch + what.column + column));
    }
#pragma unroll
    for (int i = 0; i < 32 / kWarps; ++i) {
      const int nth = i * kWarps + warp_index();
      if (g + nth < count) {
        const auto* from = reinterpret_cast<const std::byte*>(__shfl_sync(kAll, granule, nth)) + lane * 16;
        std::byte* const at = turned + __shfl_sync(kAll, place, nth) * kGranuleBytes;
        async_copy16(at, from);
        async_copy16(at + 512, from + 512);
      }
    }
  }
  async_commit();
}

// This block's share of A of a pass: granules by (panel, block of inputs).
__device__ __forceinline__ void copy_a(const ExpertGemm& p, const Shared& s, const Share& share, const Pass& pass,
                                       std::byte* to) {
  const Unit& unit = s.units[min(pass.unit, kUnits - 1)];
  const int panels = pass.unit < kUnits ? min(panels_of(unit) - pass.panel, kPanels) : 0;
  copy_granules(
      p.lora.table, unit.slot,
      {unit.a, unit.a_pages, pass.panel, share.input, panels, share.num_inputs, share.blocks, share.num_inputs}, to);
}
// Of B: granules by (block of outputs, panel), kPanels of each block.
__device__ __forceinline__ void copy_b(const ExpertGemm& p, const Shared& s, const Share& share, const Pass& pass,
                                       std::byte* to) {
  const Unit& unit = s.units[min(pass.unit, kUnits - 1)];
  const int all = panels_of(unit);
  const int panels = pass.unit < kUnits ? min(all - pass.panel, kPanels) : 0;
  copy_granules(p.lora.table, unit.slot,
                {unit.b, unit.b_pages, share.output, pass.panel, share.num_outputs, panels, all, kPanels}, to);
}

// This lane's chunks of its token's x in blocks b and b + kInputParts of the share.
__device__ __forceinline__ void load_x(const ExpertGemm& p, const Share& share, const __nv_bfloat16* x, int b,
                                       uint4 (&values)[2][2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
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

// partial[part of the inputs] = A x of this warp's 16 ranks and 8 tokens. Waits for A, unless it was there before.
__device__ __forceinline__ void shrink(const ExpertGemm& p, Shared& s, const Share& share, const Pass& pass, int first,
                                       const std::byte* a, bool wait) {
  const int g = lane_index() / 4;
  const int t = lane_index() % 4;
  const int part = warp_index() / 2;
  const int low_panel = warp_index() % 2 * 2;
  const int panels = panels_of(s.units[pass.unit]) - pass.panel;
  const int row = s.rows[pass.unit][g];
  const __nv_bfloat16* const x = row >= 0 ? p.x + (p.x_by_pair ? int64_t{first} + g : row) * p.x_stride : nullptr;
  const int offset = t * 128 + (g + 2 * t) % 8 * 16;
  float acc[4] = {};
  uint4 values[2][2];
  load_x(p, share, x, part, values);
  if (wait) {
    async_wait<1>();  // all but B
    __syncthreads();  // A is there
  }
  for (int b = part; b < share.num_inputs; b += 2 * kInputParts) {
    if (b != part) {
      load_x(p, share, x, b, values);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int block = b + i * kInputParts;
      if (block < share.num_inputs) {
        const std::byte* const low = a + (low_panel * share.num_inputs + block) * kGranuleBytes + offset;
        const std::byte* const high = low + share.num_inputs * kGranuleBytes;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 a_low = low_panel < panels ? *reinterpret_cast<const uint4*>(low + half * 512) : zero_chunk();
          const uint4 a_high =
              low_panel + 1 < panels ? *reinterpret_cast<const uint4*>(high + half * 512) : zero_chunk();
          mma_chunk(acc, a_low, a_high, values[i][half]);
        }
      }
    }
  }
  float* const to = s.partial[part] + (low_panel * kTileRanks + g) * kTokens + 2 * t;
  *reinterpret_cast<float2*>(to) = make_float2(acc[0], acc[1]);
  *reinterpret_cast<float2*>(to + kTileRanks * kTokens) = make_float2(acc[2], acc[3]);
  __syncthreads();  // the sums of all warps; A is read
}

// shrunk = the cluster's sums of all inputs, times the scale; the nth exchange. `last` of the pass: copies of the next
// A are on their way. Warp w sends this block's sums to block w.
__device__ __forceinline__ void exchange_sums(Shared& s, const Pass& pass, bool last, uint32_t nth) {
  const int thread = static_cast<int>(threadIdx.x);
  s.free.wait(nth % 2 ^ 1);  // all blocks have read what was here before
  if (thread == 0) {
    s.full.arrive_and_expect(kCluster * kSums * static_cast<int>(sizeof(float)));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = half * 128 + lane_index() * 4;
    float4 own = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int part = 0; part < kInputParts; ++part) {
      const float4 value = *reinterpret_cast<const float4*>(&s.partial[part][i]);
      own.x += value.x;
      own.y += value.y;
      own.z += value.z;
      own.w += value.w;
    }
    s.full.send(reinterpret_cast<float4*>(&s.exchange[cluster_block()][i]), warp_index(), own);
  }
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
  if (last) {
    async_wait<1>();  // B is there
  } else {
    async_wait<0>();
  }
  __syncthreads();  // shrunk and all warps' B; the sums are read
  if (thread < kCluster) {
    s.free.arrive_at(thread);
  }
}

// delta += B shrunk of this block's outputs, a thread an output; the first pass begins them, the last adds the bias.
template <bool GATE_UP>
__device__ __forceinline__ void expand(const ExpertGemm& p, const Shared& s, const Share& share, const Pass& pass,
                                       int first, const std::byte* b) {
  constexpr int kModules = GATE_UP ? 2 : 1;
  const Unit& unit = s.units[pass.unit];
  const int panels = panels_of(unit) - pass.panel;
  const bool with_bias = unit.bias >= 0 && panels <= kPanels;
  const int begin = share.output * kTileColumns;
  const int end = min((share.output + share.num_outputs) * kTileColumns, p.rows);
  for (int n = begin + static_cast<int>(threadIdx.x); n < end; n += kThreads) {
    const int core = (n - begin) % kTileColumns / 8;
    const std::byte* const at =
        b + (n - begin) / kTileColumns * kPanels * kGranuleBytes + core * 128 + ((n - begin) % 8 + 2 * core) % 8 * 16;
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
    for (int j = 0; j < min(unit.end - first, kTokens); ++j) {
      const float row_scale = s.row_scale[pass.unit][j];
      if (row_scale == 0.0f) {
        continue;
      }
      float* const to = p.lora.delta + ((int64_t{first} + j) * kModules + unit.module) * p.rows + n;
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

// All passes of the units in the table. `a` and `b`: this block's shares in shared memory; `exchanges`: how many there
// have been.
template <bool GATE_UP>
__device__ __forceinline__ void run_units(const ExpertGemm& p, Shared& s, const Share& share, std::byte* a,
                                          std::byte* b, uint32_t& exchanges) {
  Pass pass{0, 0};
  Pass next{0, 0};
  seek(s, next);
  int first = 0;     // of the tokens
  bool last = true;  // of the pass: its A is not needed any more after these tokens
#pragma unroll 1
  for (bool begun = false;; begun = true) {
    const Unit& unit = s.units[pass.unit];
    if (begun) {
      if (unit.end - unit.begin > kTokens) {
        find_tokens(p, s, pass.unit, first);
      }
      shrink(p, s, share, pass, first, a, first == unit.begin);
    }
    if (last) {
      copy_a(p, s, share, next, a);
    }
    if (begun) {
      exchange_sums(s, pass, last, exchanges++);
      expand<GATE_UP>(p, s, share, pass, first, b);
    }
    first += kTokens;
    if (last) {
      copy_b(p, s, share, next, b);
      if (next.unit == kUnits) {
        break;
      }
      pass = next;
      next.panel += kPanels;
      seek(s, next);
      first = s.units[pass.unit].begin;
    }
    last = first + kTokens >= s.units[pass.unit].end;
  }
  async_wait<0>();
}

inline int share_bytes(int width) {
  const int blocks = (width + kTileColumns - 1) / kTileColumns;
  return (blocks + kCluster - 1) / kCluster * kPanels * static_cast<int>(kGranuleBytes);
}

// Grid: clusters of 8 blocks, which take every gridDim.x / 8-th unit.
template <bool GATE_UP>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    expert_delta_kernel(const __grid_constant__ ExpertGemm p, int num_pairs, int a_bytes) {
#ifdef MOELORA_CLUSTERS
  extern __shared__ __align__(128) uint4 dynamic_shared[];
  __shared__ Shared s;
  std::byte* const a = reinterpret_cast<std::byte*>(dynamic_shared);
  if (threadIdx.x == 0) {
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
  uint32_t exchanges = 0;
  int units;
  int first = static_cast<int>(blockIdx.x) / kCluster;
  do {
    units = find_units<GATE_UP>(p, s, first, clusters, num_pairs);
    __syncthreads();  // the table is there
    if (!GATE_UP) {
      let_next_start();
    }
    run_units<GATE_UP>(p, s, share, a, a + a_bytes, exchanges);
    __syncthreads();  // the table is read
    first += kUnits * clusters;
  } while (first < units);
  s.free.wait(exchanges % 2 ^ 1);  // nobody writes here any more
#endif
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
  const int a_bytes = share_bytes(p.k);
  const int shared = a_bytes + share_bytes(p.rows);
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
                            static_cast<size_t>(shared), state, p, static_cast<int>(num_pairs), a_bytes);
  check_launch("the experts' deltas");
  return true;
}

}  // namespace moelora
