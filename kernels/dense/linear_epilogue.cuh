// SPDX-License-Identifier: Apache-2.0
// What linear adds to a product of many rows once it is in memory: out += delta + bias, in one pass over the rows that
// get any of it. A warp takes 16 rows by 128 outputs: the rows' shrunk values are the 16-row operand of the tensor
// cores, an adapter's B the other (kernels/cuda/mma_tile.cuh, its roles exchanged). Columns are dealt out so that a
// lane ends up with four neighbouring outputs of two rows. All of the warp's outputs are on their way to shared memory
// while the deltas are computed, 32 outputs at a time. Rows of several adapters take them one after the other; each row
// takes the deltas of its own by selection. Outputs that are no whole, aligned groups of four fp32 go one by one.
// Limited by reading and writing the outputs. Included by linear_cuda.cu.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/base/tensor.h"
#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/cuda/vec.cuh"
#include "kernels/dense/linear_params.cuh"
#include "kernels/lora/adapter_layout.h"
#include "kernels/lora/lora_expand.cuh"

namespace moelora::linear_epilogue {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 4;
constexpr int kRows = 16;               // of a warp
constexpr int kOutputs = 128;           // of a warp
constexpr int kGroups = kOutputs / 16;  // of 16 outputs, four a lane
static_assert(kOutputs % kTileColumns == 0);

using linear::Part;  // `out` holds the product; the weight is not looked at

struct Params {
  Part parts[3];
  int num_parts = 0;
  int num_tiles = 0;
  bool vectors = true;  // all outputs are fp32, in whole and aligned groups of four
  int num_rows = 0;
  AdapterTable table;
  const int32_t* row_slot = nullptr;
  const float* row_scale = nullptr;
  const float* shrunk = nullptr;  // [T, num_modules, rank_stride], times the row's whole scale
  int num_modules = 0;
  int rank_stride = 0;
  int layer = 0;

  void add(const Part& part) {
    Part& added = parts[num_parts++];
    added = part;
    vectors = vectors && part.out_f32 && reinterpret_cast<uintptr_t>(part.out) % 16 == 0 && part.out_stride % 4 == 0 &&
              part.n % 4 == 0;
    added.first_tile = num_tiles;
    num_tiles += (part.n + kOutputs - 1) / kOutputs;
  }
};

// This lane's two rows, g and g + 8 of the warp's.
struct LaneRows {
  int row[2];
  int slot[2];     // 0: the row takes the bias alone
  float scale[2];  // row's
};

// The rows' shrunk values of 32 ranks as the 16-row operand: high parts and what is left.
struct ShrunkChunks {
  SplitChunk of_row[2];

  __device__ __forceinline__ void load(const Params& p, const Part& part, const int (&row)[2], const bool (&own)[2],
                                       int panel, int panels) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float values[8] = {};
      if (own[i] && panel < panels) {
        const int64_t index = static_cast<int64_t>(row[i]) * p.num_modules + part.module_index;
        const auto* from = reinterpret_cast<const float4*>(p.shrunk + index * p.rank_stride + 8 * panel);
        *reinterpret_cast<float4*>(values) = from[0];
        *reinterpret_cast<float4*>(values + 4) = from[1];
      }
      of_row[i] = split_chunk(values);
    }
  }
};

// One adapter of a part for the warp's rows.
struct Adapter {
  int slot;
  int panels;
  int b_page;         // of the stream
  int b_offset;       // granules into it
  const float* bias;  // lora_B's, of the tile; null: none
  float scale;
  int4 b_pages;
  bool own[2];  // this lane's rows use it

  __device__ __forceinline__ void read(const Params& p, const ResolvedLora* record, int n0) {
    constexpr int kPerGranule = kGranuleBytes / sizeof(float);
    static_assert(kPerGranule % kOutputs == 0);
    const int4 head = *reinterpret_cast<const int4*>(record);  // rank, scale, a, b
    b_pages = *reinterpret_cast<const int4*>(record->b_pages);
    const int first = record->bias;
    bias = first < 0
               ? nullptr
               : reinterpret_cast<const float*>(p.table.granule(slot, first + n0 / kPerGranule)) + n0 % kPerGranule;
    panels = (head.x + kTileRanks - 1) / kTileRanks;
    scale = __int_as_float(head.y);
    b_page = head.w / p.table.page_granules;
    b_offset = head.w - b_page * p.table.page_granules;
  }
};

// Where this lane's share of B begins for one panel and the 64 outputs of n; null beyond the rank. Column c of product
// 2 q + j is output 16 q + 4 (c / 2) + 2 j + c % 2, so that columns 2t and 2t + 1 of two products are four neighbouring
// outputs.
__device__ __forceinline__ const uint4* find_b(const Params& p, const Adapter& adapter, int n, int panel) {
  if (panel >= adapter.panels) {
    return nullptr;
  }
  const int granule = adapter.b_offset + n / kTileColumns * adapter.panels + panel;
  const int nth = granule / p.table.page_granules;
  const int4& pages = adapter.b_pages;
  int page;
  if (nth < ResolvedLora::kPages) {
    page = nth < 2 ? (nth == 0 ? pages.x : pages.y) : (nth == 2 ? pages.z : pages.w);
  } else {
    page = p.table.page_table[static_cast<int64_t>(adapter.slot) * p.table.pages_per_slot + adapter.b_page + nth];
  }
  const int64_t at = static_cast<int64_t>(page) * p.table.page_granules + (granule - nth * p.table.page_granules);
  const int g = static_cast<int>(threadIdx.x % 32 / 4);
  return reinterpret_cast<const uint4*>(p.table.pool + at * static_cast<int64_t>(kGranuleBytes)) + g / 2 * 4 + g % 2;
}
__device__ __forceinline__ void load_b(const uint4* from, int half, uint4 (&b)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    b[i] = from != nullptr ? from[32 * half + i / 2 * 16 + i % 2 * 2] : zero_chunk();
  }
}

// acc += B s, products of 8 columns each.
__device__ __forceinline__ void multiply(float (&acc)[4][4], const ShrunkChunks& s, const uint4 (&b)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    mma_chunk(acc[i], s.of_row[0].high, s.of_row[1].high, b[i]);
    mma_chunk(acc[i], s.of_row[0].low, s.of_row[1].low, b[i]);
  }
}

// The warp's tile of outputs as this lane sees it: outputs 16 q + 4 t .. + 3 of its two rows, for each group q. Vectors
// wait in shared memory, where each lane reads what it copied itself.
template <bool VECTORS>
struct Tile {
  const Part& part;
  float4* waiting;  // [row of the lane][group][lane]
  int n0;

  __device__ __forceinline__ int first(int q) const { return n0 + 16 * q + 4 * static_cast<int>(threadIdx.x % 4); }
  __device__ __forceinline__ float4* at(int i, int q) const { return waiting + (i * kGroups + q) * 32; }

  // Asks for row i of the lane, which is row `row` of all.
  __device__ __forceinline__ void fetch(int i, int64_t row) const {
    if constexpr (VECTORS) {
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        if (first(q) < part.n) {
          async_copy16(at(i, q), static_cast<const float*>(part.out) + row * part.out_stride + first(q));
        }
      }
    }
  }
  // out += delta + bias, after a wait for what was fetched.
  __device__ __forceinline__ void add(int i, int64_t row, int q, const float (&delta)[4]) const {
    const int n = first(q);
    const int64_t index = row * part.out_stride + n;
    if constexpr (VECTORS) {
      if (n < part.n) {
        const float4 from = *at(i, q);
        *reinterpret_cast<float4*>(static_cast<float*>(part.out) + index) =
            make_float4(biased(from.x + delta[0], n), biased(from.y + delta[1], n + 1),
                        biased(from.z + delta[2], n + 2), biased(from.w + delta[3], n + 3));
      }
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (n + e < part.n) {
          if (part.out_f32) {
            float& y = static_cast<float*>(part.out)[index + e];
            y = biased(y + delta[e], n + e);
          } else {
            __nv_bfloat16& y = static_cast<__nv_bfloat16*>(part.out)[index + e];
            y = from_f32<__nv_bfloat16>(biased(to_f32(y) + delta[e], n + e));
          }
        }
      }
    }
  }

 private:
  __device__ __forceinline__ float biased(float y, int n) const {
    if (part.bias == nullptr) {
      return y;
    }
    return y + (part.bias_f32 ? static_cast<const float*>(part.bias)[n]
                              : to_f32(static_cast<const __nv_bfloat16*>(part.bias)[n]));
  }
};

// Adds what the adapter gives to the products of groups q and q + 1 to the rows that use it.
template <bool VECTORS>
__device__ __forceinline__ void add_products(const Adapter& adapter, const LaneRows& rows, const Tile<VECTORS>& tile,
                                             int q, const float (&acc)[4][4]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float bias[4] = {};
    if (adapter.bias != nullptr) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int n = tile.first(q + j) + e;
        bias[e] = n < tile.part.n ? adapter.scale * adapter.bias[n - tile.n0] : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (adapter.own[i]) {
        float delta[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          delta[e] = acc[2 * j + e / 2][2 * i + e % 2];
          delta[e] = adapter.bias != nullptr ? delta[e] + rows.scale[i] * bias[e] : delta[e];
        }
        tile.add(i, rows.row[i], q + j, delta);
      }
    }
  }
}

// Adds to the rows that use the adapter.
template <bool VECTORS>
__device__ __forceinline__ void add_delta(const Params& p, const Adapter& adapter, const LaneRows& rows,
                                          const Tile<VECTORS>& tile) {
  const int t = static_cast<int>(threadIdx.x % 4);
  ShrunkChunks first;
  first.load(p, tile.part, rows.row, adapter.own, t, adapter.panels);
#pragma unroll 1
  for (int n0 = tile.n0; n0 < min(tile.n0 + kOutputs, tile.part.n); n0 += kTileColumns) {
    const uint4* const first_b = find_b(p, adapter, n0, t);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float acc[4][4] = {};
      uint4 b[4];
      load_b(first_b, half, b);
      multiply(acc, first, b);
#pragma unroll 1
      for (int p0 = 4; p0 < adapter.panels; p0 += 4) {
        ShrunkChunks s;
        load_b(find_b(p, adapter, n0, p0 + t), half, b);
        s.load(p, tile.part, rows.row, adapter.own, p0 + t, adapter.panels);
        multiply(acc, s, b);
      }
      async_wait<0>();  // the outputs are there
      add_products(adapter, rows, tile, (n0 - tile.n0) / 16 + 2 * half, acc);
    }
  }
}

__device__ __forceinline__ LaneRows find_rows(const Params& p, const Part& part, int first_row) {
  LaneRows rows;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    rows.row[i] = first_row + static_cast<int>(threadIdx.x % 32 / 4) + 8 * i;
    rows.slot[i] = 0;
    rows.scale[i] = 0.0f;
    if (part.module >= 0 && rows.row[i] < p.num_rows) {
      rows.scale[i] = p.row_scale[rows.row[i]];
      rows.slot[i] = p.row_slot[rows.row[i]];
      rows.slot[i] = rows.scale[i] != 0.0f ? rows.slot[i] : 0;  // a scale of zero counts as no adapter
    }
  }
  return rows;
}

// By the adapters of the rows, in order of their slots. Rows whose adapter lacks the module lose their slot.
template <bool VECTORS>
__device__ __forceinline__ void add_deltas(const Params& p, LaneRows& rows, const Tile<VECTORS>& tile) {
  const auto module = static_cast<LoraModule>(tile.part.module);
  const int last_slot = __reduce_max_sync(0xffffffffu, max(rows.slot[0], rows.slot[1]));
  Adapter adapter;
  adapter.slot = 0;
  while (adapter.slot < last_slot) {
    int next = last_slot;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      next = rows.slot[i] > adapter.slot ? min(next, rows.slot[i]) : next;
    }
    adapter.slot = __reduce_min_sync(0xffffffffu, next);
    adapter.read(p, p.table.resolved_dense(adapter.slot, p.layer, module), tile.n0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      adapter.own[i] = rows.slot[i] == adapter.slot;
      rows.slot[i] = adapter.own[i] && adapter.panels == 0 ? 0 : rows.slot[i];
    }
    if (adapter.panels > 0) {
      add_delta(p, adapter, rows, tile);
    }
  }
}

template <bool VECTORS>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) add_to_outputs(const __grid_constant__ Params p) {
  __shared__ float4 waiting[VECTORS ? kWarps * 2 * kGroups * 32 : 1];
  wait_for_previous();
  let_next_start();
  int nth = 0;
  while (nth + 1 < p.num_parts && static_cast<int>(blockIdx.x) >= p.parts[nth + 1].first_tile) {
    ++nth;
  }
  const Part& part = p.parts[nth];
  const int warp = static_cast<int>(threadIdx.x / 32);
  const Tile<VECTORS> tile = {part, waiting + (VECTORS ? warp * 2 * kGroups * 32 + threadIdx.x % 32 : 0),
                              (static_cast<int>(blockIdx.x) - part.first_tile) * kOutputs};
  LaneRows rows = find_rows(p, part, (static_cast<int>(blockIdx.y) * kWarps + warp) * kRows);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (rows.slot[i] != 0 || (part.bias != nullptr && rows.row[i] < p.num_rows)) {
      tile.fetch(i, rows.row[i]);
    }
  }
  async_commit();
  add_deltas(p, rows, tile);
  if (part.bias == nullptr) {
    return;
  }
  async_wait<0>();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (rows.slot[i] == 0 && rows.row[i] < p.num_rows) {
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        tile.add(i, rows.row[i], q, {0.0f, 0.0f, 0.0f, 0.0f});
      }
    }
  }
}

inline void launch(const Params& p, const CudaStream& state) {
  constexpr int kBlockRows = kWarps * kRows;
  const dim3 grid(static_cast<unsigned>(p.num_tiles),
                  static_cast<unsigned>((p.num_rows + kBlockRows - 1) / kBlockRows));
  launch_dependent(p.vectors ? add_to_outputs<true> : add_to_outputs<false>, grid, kThreads, 0, state, p);
  check_launch("linear, LoRA and bias");
}

}  // namespace moelora::linear_epilogue
