// SPDX-License-Identifier: Apache-2.0
// What linear adds to a product of many rows once it is in memory: out += delta + bias, in one pass over the rows that
// get any of it. A warp takes 16 rows by 256 outputs in bf16 or 128 in fp32: the rows' shrunk values are the 16-row
// operand of the tensor cores, an adapter's B the other (kernels/cuda/mma_tile.cuh, its roles exchanged). Columns are
// dealt out so that a lane ends up with 16 bytes of neighbouring outputs of two rows. All of the warp's outputs are on
// their way to shared memory while the deltas are computed, 32 outputs at a time, B a step ahead. Rows of several
// adapters take them one after the other; each row takes the deltas of its own by selection. Outputs that are not all
// of one type in whole, aligned groups of 16 bytes go one by one. Blocks begin with the last rows: what the product
// wrote last is still in the L2, and whoever reads the outputs next begins with what was written here last. Limited by
// reading and writing the outputs. Included by linear_cuda.cu.
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
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kBlocksPerSm = 3;  // of more registers a thread
#else
constexpr int kBlocksPerSm = 4;
#endif
constexpr int kRows = 16;         // of a warp
constexpr int kStepOutputs = 32;  // whose deltas are computed together
constexpr int kGroups = 8;        // of outputs that wait in shared memory, 16 bytes a lane and row

// How the outputs of all parts are read and written.
enum class Access : uint8_t { kOnes, kFp32, kBf16 };

template <Access ACCESS>
struct Width {
  static constexpr int kLane = ACCESS == Access::kBf16 ? 8 : 4;  // neighbouring outputs of a lane
  static constexpr int kGroup = 4 * kLane;
  static constexpr int kStepGroups = kStepOutputs / kGroup;
  static constexpr int kOutputs = kGroups * kGroup;  // of a warp
  static_assert(kOutputs % kTileColumns == 0 && kTileColumns == 2 * kStepOutputs);
};

using linear::Part;  // `out` holds the product; the weight is not looked at

struct Params {
  Part parts[3];
  int num_parts = 0;
  int num_rows = 0;
  AdapterTable table;
  const int32_t* row_slot = nullptr;
  const float* row_scale = nullptr;
  const float* shrunk = nullptr;  // [T, num_modules, rank_stride], times the row's whole scale
  int num_modules = 0;
  int rank_stride = 0;
  int layer = 0;

  void add(const Part& part) { parts[num_parts++] = part; }
  [[nodiscard]] Access access() const {
    bool fp32 = true;
    bool bf16 = true;
    for (int i = 0; i < num_parts; ++i) {
      const Part& part = parts[i];
      const bool aligned = reinterpret_cast<uintptr_t>(part.out) % 16 == 0;
      fp32 = fp32 && aligned && part.out_f32 && part.out_stride % 4 == 0 && part.n % 4 == 0;
      bf16 = bf16 && aligned && !part.out_f32 && part.out_stride % 8 == 0 && part.n % 8 == 0;
    }
    return fp32 ? Access::kFp32 : (bf16 ? Access::kBf16 : Access::kOnes);
  }
  // Numbers the tiles of all parts.
  int number_tiles(int width) {
    int tiles = 0;
    for (int i = 0; i < num_parts; ++i) {
      parts[i].first_tile = tiles;
      tiles += (parts[i].n + width - 1) / width;
    }
    return tiles;
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

  // n0: a multiple of kOutputs.
  __device__ __forceinline__ void read(const Params& p, const ResolvedLora* record, int n0) {
    constexpr int kPerGranule = kGranuleBytes / sizeof(float);
    static_assert(kPerGranule % Width<Access::kFp32>::kOutputs == 0);
    static_assert(kPerGranule % Width<Access::kBf16>::kOutputs == 0);
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

// Where this lane's share of B begins for one panel and the 64 outputs of n; null beyond the rank. A granule has a run
// of 16 bytes for each output. Column c of a step's product i is output L (c / 2) + 2 i + c % 2 of the step where a
// lane has L = 8 neighbouring outputs, and 16 (i / 2) + L (c / 2) + 2 (i % 2) + c % 2 where L = 4, so that columns 2t
// and 2t + 1 of L / 2 products are the lane's neighbouring outputs.
template <int LANE>
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
  return reinterpret_cast<const uint4*>(p.table.pool + at * static_cast<int64_t>(kGranuleBytes)) + g / 2 * LANE + g % 2;
}
// Of step `half` of the 64 outputs.
template <int LANE>
__device__ __forceinline__ void load_b(const uint4* from, int half, uint4 (&b)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    b[i] = from != nullptr ? from[kStepOutputs * half + (LANE == 8 ? 2 * i : i / 2 * 16 + i % 2 * 2)] : zero_chunk();
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

// The warp's tile of outputs as this lane sees it: its kLane outputs of each group q, of its two rows. What comes in
// vectors waits in shared memory, where each lane reads what it copied itself.
template <Access ACCESS>
struct Tile {
  static constexpr int kLane = Width<ACCESS>::kLane;
  static constexpr int kGroup = Width<ACCESS>::kGroup;
  static constexpr int kBytes = ACCESS == Access::kBf16 ? 2 : 4;  // of an output, if in vectors
  const Part& part;
  uint4* waiting;  // [row of the lane][group][lane]
  int n0;
  int left;           // outputs of the part from this lane's first on
  std::byte* out[2];  // this lane's first output of its rows

  __device__ __forceinline__ Tile(const Part& of, uint4* waits, int first, const int (&row)[2])
      : part(of), waiting(waits), n0(first) {
    const int n = n0 + kLane * static_cast<int>(threadIdx.x % 4);
    left = part.n - n;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      out[i] = static_cast<std::byte*>(part.out) + (row[i] * part.out_stride + n) * (part.out_f32 ? 4 : 2);
    }
  }
  __device__ __forceinline__ uint4* at(int i, int q) const { return waiting + (i * kGroups + q) * 32; }

  // Asks for the lane's row i.
  __device__ __forceinline__ void fetch(int i) const {
    if constexpr (ACCESS != Access::kOnes) {
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        if (q * kGroup < left) {
          async_copy16(at(i, q), out[i] + q * kGroup * kBytes);
        }
      }
    }
  }
  // out += delta + bias, after a wait for what was fetched.
  __device__ __forceinline__ void add(int i, int q, const float (&delta)[kLane]) const {
    const int n = q * kGroup;  // from the lane's first
    if constexpr (ACCESS == Access::kFp32) {
      if (n < left) {
        const auto from = *reinterpret_cast<const float4*>(at(i, q));
        *reinterpret_cast<float4*>(out[i] + n * kBytes) =
            make_float4(biased(from.x + delta[0], n), biased(from.y + delta[1], n + 1),
                        biased(from.z + delta[2], n + 2), biased(from.w + delta[3], n + 3));
      }
    } else if constexpr (ACCESS == Access::kBf16) {
      if (n < left) {
        uint4 all = *at(i, q);
        uint32_t* const pair = &all.x;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float low = biased(__uint_as_float(pair[e] << 16) + delta[2 * e], n + 2 * e);
          const float high = biased(__uint_as_float(pair[e] & 0xffff0000u) + delta[2 * e + 1], n + 2 * e + 1);
          const __nv_bfloat162 sum = __floats2bfloat162_rn(low, high);
          pair[e] = reinterpret_cast<const uint32_t&>(sum);
        }
        *reinterpret_cast<uint4*>(out[i] + n * kBytes) = all;
      }
    } else {
#pragma unroll
      for (int e = 0; e < kLane; ++e) {
        if (n + e < left) {
          if (part.out_f32) {
            float& y = reinterpret_cast<float*>(out[i])[n + e];
            y = biased(y + delta[e], n + e);
          } else {
            __nv_bfloat16& y = reinterpret_cast<__nv_bfloat16*>(out[i])[n + e];
            y = from_f32<__nv_bfloat16>(biased(to_f32(y) + delta[e], n + e));
          }
        }
      }
    }
  }

 private:
  // `n` from the lane's first output.
  __device__ __forceinline__ float biased(float y, int n) const {
    if (part.bias == nullptr) {
      return y;
    }
    n += part.n - left;
    return y + (part.bias_f32 ? static_cast<const float*>(part.bias)[n]
                              : to_f32(static_cast<const __nv_bfloat16*>(part.bias)[n]));
  }
};

// Adds what the adapter gives to the products of a step to the rows that use it.
template <Access ACCESS>
__device__ __forceinline__ void add_products(const Adapter& adapter, const LaneRows& rows, const Tile<ACCESS>& tile,
                                             int step, const float (&acc)[4][4]) {
  constexpr int kLane = Width<ACCESS>::kLane;
  constexpr int kStepGroups = Width<ACCESS>::kStepGroups;
#pragma unroll
  for (int j = 0; j < kStepGroups; ++j) {
    const int q = step * kStepGroups + j;
    float bias[kLane] = {};
    if (adapter.bias != nullptr) {
#pragma unroll
      for (int e = 0; e < kLane; ++e) {
        const int n = q * Width<ACCESS>::kGroup + e;
        bias[e] = n < tile.left ? adapter.scale * adapter.bias[tile.part.n - tile.left - tile.n0 + n] : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (adapter.own[i]) {
        float delta[kLane];
#pragma unroll
        for (int e = 0; e < kLane; ++e) {
          delta[e] = acc[(j * kLane + e) / 2][2 * i + e % 2];
          delta[e] = adapter.bias != nullptr ? delta[e] + rows.scale[i] * bias[e] : delta[e];
        }
        tile.add(i, q, delta);
      }
    }
  }
}

// Adds to the rows that use the adapter.
template <Access ACCESS>
__device__ __forceinline__ void add_delta(const Params& p, const Adapter& adapter, const LaneRows& rows,
                                          const Tile<ACCESS>& tile) {
  constexpr int kLane = Width<ACCESS>::kLane;
  const int t = static_cast<int>(threadIdx.x % 4);
  const int end = min(tile.n0 + Width<ACCESS>::kOutputs, tile.part.n);
  uint4 ahead[4];  // of the next step
  const uint4* first_b = find_b<kLane>(p, adapter, tile.n0, t);
  load_b<kLane>(first_b, 0, ahead);
  ShrunkChunks first;
  first.load(p, tile.part, rows.row, adapter.own, t, adapter.panels);
#pragma unroll 1
  for (int n0 = tile.n0; n0 < end; n0 += kTileColumns) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        b[i] = ahead[i];
      }
      if (half == 0) {
        load_b<kLane>(first_b, 1, ahead);
      } else if (n0 + kTileColumns < end) {
        first_b = find_b<kLane>(p, adapter, n0 + kTileColumns, t);
        load_b<kLane>(first_b, 0, ahead);
      }
      float acc[4][4] = {};
      multiply(acc, first, b);
#pragma unroll 1
      for (int p0 = 4; p0 < adapter.panels; p0 += 4) {
        ShrunkChunks s;
        load_b<kLane>(find_b<kLane>(p, adapter, n0, p0 + t), half, b);
        s.load(p, tile.part, rows.row, adapter.own, p0 + t, adapter.panels);
        multiply(acc, s, b);
      }
      async_wait<0>();  // the outputs are there
      add_products(adapter, rows, tile, (n0 - tile.n0) / kStepOutputs + half, acc);
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
template <Access ACCESS>
__device__ __forceinline__ void add_deltas(const Params& p, LaneRows& rows, const Tile<ACCESS>& tile) {
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

template <Access ACCESS>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) add_to_outputs(const __grid_constant__ Params p) {
  constexpr int kOutputs = Width<ACCESS>::kOutputs;
  constexpr int kWaiting = ACCESS == Access::kOnes ? 0 : 2 * kGroups * 32;  // of a warp
  __shared__ uint4 waiting[kWaiting > 0 ? kWarps * kWaiting : 1];
  wait_for_previous();
  let_next_start();
  int nth = 0;
  while (nth + 1 < p.num_parts && static_cast<int>(blockIdx.x) >= p.parts[nth + 1].first_tile) {
    ++nth;
  }
  const Part& part = p.parts[nth];
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int row_block = static_cast<int>(gridDim.y - 1 - blockIdx.y);
  LaneRows rows = find_rows(p, part, (row_block * kWarps + warp) * kRows);
  const Tile<ACCESS> tile(part, waiting + (kWaiting > 0 ? warp * kWaiting + static_cast<int>(threadIdx.x % 32) : 0),
                          (static_cast<int>(blockIdx.x) - part.first_tile) * kOutputs, rows.row);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (rows.slot[i] != 0 || (part.bias != nullptr && rows.row[i] < p.num_rows)) {
      tile.fetch(i);
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
        tile.add(i, q, {});
      }
    }
  }
}

template <Access ACCESS>
void launch(Params& p, const CudaStream& state) {
  constexpr int kBlockRows = kWarps * kRows;
  const int tiles = p.number_tiles(Width<ACCESS>::kOutputs);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>((p.num_rows + kBlockRows - 1) / kBlockRows));
  launch_dependent(add_to_outputs<ACCESS>, grid, kThreads, 0, state, p);
  check_launch("linear, LoRA and bias");
}
inline void launch(Params& p, const CudaStream& state) {
  switch (p.access()) {
    case Access::kFp32:
      return launch<Access::kFp32>(p, state);
    case Access::kBf16:
      return launch<Access::kBf16>(p, state);
    case Access::kOnes:
      return launch<Access::kOnes>(p, state);
  }
}

}  // namespace moelora::linear_epilogue
