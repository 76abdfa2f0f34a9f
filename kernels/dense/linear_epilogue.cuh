// SPDX-License-Identifier: Apache-2.0
// What linear adds to a product of many rows once it is in memory: out += delta + bias, in one pass. A warp takes 16
// rows by 256 outputs, 32 at a time: the rows' shrunk values are the 16-row operand of the tensor cores, an adapter's B
// the other (kernels/cuda/mma_tile.cuh, its roles exchanged). Columns are dealt out so that a lane ends up with eight
// neighbouring outputs of two rows, which it reads and writes as 16 or 32 bytes. Rows of several adapters take them one
// after the other; each row takes the deltas of its own by selection.
// Limited by reading and writing the outputs. Included by linear_cuda.cu.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/base/tensor.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/cuda/vec.cuh"
#include "kernels/lora/adapter_layout.h"

namespace moelora::linear_epilogue {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 16;      // of a warp
constexpr int kOutputs = 256;  // of a warp
constexpr int kGroup = 32;     // outputs at a time

struct Part {
  const void* bias;  // may be null
  void* out;
  int64_t out_stride;
  int n;
  int first_tile;    // of this part in gridDim.x
  int module;        // -1: never adapted
  int module_index;  // in `shrunk`
  bool bias_f32;
  bool out_f32;
  bool aligned;  // eight outputs from a multiple of eight on, in bytes
};

struct Params {
  Part parts[3];
  int num_parts = 0;
  int num_tiles = 0;
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
    const int64_t bytes = part.out_f32 ? 4 : 2;
    added.aligned = reinterpret_cast<uintptr_t>(part.out) % 16 == 0 && part.out_stride * bytes % 16 == 0;
    added.first_tile = num_tiles;
    num_tiles += (part.n + kOutputs - 1) / kOutputs;
  }
};

// Outputs n .. n + 7 of a row, those that exist.
__device__ __forceinline__ void load_outputs(const Part& part, int64_t row, int n, float (&y)[8]) {
  const int64_t index = row * part.out_stride + n;
  if (part.aligned && n + 8 <= part.n) {
    if (part.out_f32) {
      const auto* from = reinterpret_cast<const float4*>(static_cast<const float*>(part.out) + index);
      *reinterpret_cast<float4*>(y) = from[0];
      *reinterpret_cast<float4*>(y + 4) = from[1];
    } else {
      const uint4 chunk = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(part.out) + index);
      const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&chunk);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[2 * i] = __low2float(pairs[i]);
        y[2 * i + 1] = __high2float(pairs[i]);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    y[i] = 0.0f;
    if (n + i < part.n) {
      y[i] = part.out_f32 ? static_cast<const float*>(part.out)[index + i]
                          : to_f32(static_cast<const __nv_bfloat16*>(part.out)[index + i]);
    }
  }
}

__device__ __forceinline__ void store_outputs(const Part& part, int64_t row, int n, const float (&y)[8]) {
  const int64_t index = row * part.out_stride + n;
  if (part.aligned && n + 8 <= part.n) {
    if (part.out_f32) {
      auto* to = reinterpret_cast<float4*>(static_cast<float*>(part.out) + index);
      to[0] = make_float4(y[0], y[1], y[2], y[3]);
      to[1] = make_float4(y[4], y[5], y[6], y[7]);
    } else {
      uint4 chunk;
      auto* pairs = reinterpret_cast<__nv_bfloat162*>(&chunk);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs[i] = __floats2bfloat162_rn(y[2 * i], y[2 * i + 1]);
      }
      *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(part.out) + index) = chunk;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (n + i < part.n) {
      if (part.out_f32) {
        static_cast<float*>(part.out)[index + i] = y[i];
      } else {
        static_cast<__nv_bfloat16*>(part.out)[index + i] = from_f32<__nv_bfloat16>(y[i]);
      }
    }
  }
}

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
  const ResolvedLora* record;
  int slot;
  int panels;
  bool own[2];  // this lane's rows use it
};

// delta[i][e] += what the adapter adds to output n + e of row i, n this lane's first output of the group from n0 on.
// Rows that do not use it get nothing of use. `first` are the shrunk values of the first 32 ranks.
__device__ __forceinline__ void expand(const Params& p, const Part& part, const Adapter& adapter,
                                       const ShrunkChunks& first, const int (&row)[2], int n0, float (&delta)[2][8]) {
  const int g = static_cast<int>(threadIdx.x % 32 / 4);
  const int t = static_cast<int>(threadIdx.x % 4);
  float acc[4][4] = {};
  for (int p0 = 0; p0 < adapter.panels; p0 += 4) {
    const int panel = p0 + t;
    ShrunkChunks s = first;
    if (p0 > 0) {
      s.load(p, part, row, adapter.own, panel, adapter.panels);
    }
    // Column c of product j is output 8 (c / 2) + 2 j + c % 2 of the group, so that columns 2t and 2t + 1 of the four
    // products are outputs 8t .. 8t + 7.
    uint4 b[4] = {};
    if (panel < adapter.panels) {
      const std::byte* granule = p.table.resolved_granule(adapter.slot, adapter.record->b, adapter.record->b_pages,
                                                          n0 / kTileColumns * adapter.panels + panel);
      const auto* runs = reinterpret_cast<const uint4*>(granule) + n0 % kTileColumns + g / 2 * 8 + g % 2;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        b[j] = runs[2 * j];
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      mma_chunk(acc[j], s.of_row[0].high, s.of_row[1].high, b[j]);
      mma_chunk(acc[j], s.of_row[0].low, s.of_row[1].low, b[j]);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      delta[i][e] = acc[e / 2][2 * i + e % 2];
    }
  }
}

// scale times lora_B.bias of output n, 0 if there is none.
__device__ __forceinline__ float scaled_bias(const Params& p, const Part& part, const Adapter& adapter, float scale,
                                             int n) {
  constexpr int kPerGranule = kGranuleBytes / sizeof(float);
  if (n >= part.n) {
    return 0.0f;
  }
  const std::byte* granule = p.table.granule(adapter.slot, adapter.record->bias + n / kPerGranule);
  return scale * adapter.record->scale * reinterpret_cast<const float*>(granule)[n % kPerGranule];
}

// All outputs of the warp's tile, of the rows that use the adapter and, with `base_rows`, of those that use none: delta
// and bias, and one rounding.
__device__ __forceinline__ void add_to_tile(const Params& p, const Part& part, const Adapter& adapter,
                                            const LaneRows& rows, int n_begin, bool base_rows) {
  const int t = static_cast<int>(threadIdx.x % 4);
  ShrunkChunks first;
  first.load(p, part, rows.row, adapter.own, t, adapter.panels);
  const bool lora_bias = adapter.panels > 0 && adapter.record->bias >= 0;
  for (int n0 = n_begin; n0 < min(n_begin + kOutputs, part.n); n0 += kGroup) {
    const int n = n0 + 8 * t;
    float y[2][8];
    bool touched[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool takes = adapter.own[i] || (base_rows && rows.slot[i] == 0 && part.bias != nullptr);
      touched[i] = takes && rows.row[i] < p.num_rows && n < part.n;
      if (touched[i]) {
        load_outputs(part, rows.row[i], n, y[i]);
      }
    }
    float delta[2][8];
    expand(p, part, adapter, first, rows.row, n0, delta);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!touched[i]) {
        continue;
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (adapter.own[i]) {
          y[i][e] += lora_bias ? delta[i][e] + scaled_bias(p, part, adapter, rows.scale[i], n + e) : delta[i][e];
        }
        if (part.bias != nullptr && n + e < part.n) {
          y[i][e] += part.bias_f32 ? static_cast<const float*>(part.bias)[n + e]
                                   : to_f32(static_cast<const __nv_bfloat16*>(part.bias)[n + e]);
        }
      }
      store_outputs(part, rows.row[i], n, y[i]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) add_to_outputs(const __grid_constant__ Params p) {
  wait_for_previous();
  let_next_start();
  int nth = 0;
  while (nth + 1 < p.num_parts && static_cast<int>(blockIdx.x) >= p.parts[nth + 1].first_tile) {
    ++nth;
  }
  const Part& part = p.parts[nth];
  const int n_begin = (static_cast<int>(blockIdx.x) - part.first_tile) * kOutputs;
  const int first_row = (static_cast<int>(blockIdx.y) * kWarps + static_cast<int>(threadIdx.x / 32)) * kRows;
  LaneRows rows;
  int last_slot = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    rows.row[i] = first_row + static_cast<int>(threadIdx.x % 32 / 4) + 8 * i;
    rows.slot[i] = 0;
    rows.scale[i] = 0.0f;
    if (part.module >= 0 && rows.row[i] < p.num_rows) {
      const int slot = p.row_slot[rows.row[i]];
      rows.scale[i] = p.row_scale[rows.row[i]];
      // A scale of zero counts as no adapter, and so does an adapter without this module.
      if (slot != 0 && rows.scale[i] != 0.0f &&
          p.table.resolved_dense(slot, p.layer, static_cast<LoraModule>(part.module))->rank != 0) {
        rows.slot[i] = slot;
      }
    }
    last_slot = max(last_slot, rows.slot[i]);
  }
  last_slot = __reduce_max_sync(0xffffffffu, last_slot);
  Adapter adapter = {nullptr, 0, 0, {false, false}};
  if (last_slot == 0 && part.bias != nullptr) {
    add_to_tile(p, part, adapter, rows, n_begin, true);
  }
  bool base_rows = true;  // with the first adapter
  while (adapter.slot < last_slot) {
    int next = last_slot;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      next = rows.slot[i] > adapter.slot ? min(next, rows.slot[i]) : next;
    }
    adapter.slot = __reduce_min_sync(0xffffffffu, next);
    adapter.record = p.table.resolved_dense(adapter.slot, p.layer, static_cast<LoraModule>(part.module));
    adapter.panels = (adapter.record->rank + kTileRanks - 1) / kTileRanks;
    adapter.own[0] = rows.slot[0] == adapter.slot;
    adapter.own[1] = rows.slot[1] == adapter.slot;
    add_to_tile(p, part, adapter, rows, n_begin, base_rows);
    base_rows = false;
  }
}

inline void launch(const Params& p, const CudaStream& state) {
  constexpr int kBlockRows = kWarps * kRows;
  const dim3 grid(static_cast<unsigned>(p.num_tiles),
                  static_cast<unsigned>((p.num_rows + kBlockRows - 1) / kBlockRows));
  launch_dependent(add_to_outputs, grid, kThreads, 0, state, p);
  check_launch("linear, LoRA and bias");
}

}  // namespace moelora::linear_epilogue
