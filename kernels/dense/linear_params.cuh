// SPDX-License-Identifier: Apache-2.0
// What the kernels of linear for few rows share: the parts of a launch, and how one output is read and written.
// Included by linear_cuda.cu.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/cuda/vec.cuh"
#include "kernels/lora/adapter_layout.h"
#include "kernels/lora/lora_expand.cuh"

namespace moelora::linear {

struct Part {
  const void* weight;
  const void* bias;  // may be null
  void* out;
  int64_t out_stride;
  int n;
  int first_tile;    // of this part among the launch's
  int module;        // -1: never adapted
  int module_index;  // in `shrunk`
  bool bias_f32;
  bool out_f32;
};

struct Params {
  Part parts[3];
  int num_parts;
  int num_tiles;
  const __nv_bfloat16* x;
  int64_t x_stride;
  int num_rows;
  int k;
  bool accumulate;
  // LoRA; unused if every module is -1.
  AdapterTable table;
  const int32_t* row_slot;
  const float* row_scale;
  const int32_t* sorted_rows;  // these and the next: LoraBatch
  const int32_t* segment_begin;
  const int32_t* segment_slot;
  const int32_t* counts;
  const float* shrunk;  // [T, num_modules, rank_stride], times the row's whole scale
  int num_modules;
  int rank_stride;
  int layer;
  uint32_t* x_ready;  // CudaStream's: what lora_shrink counts up
};

// The parts of one launch, `width` outputs a tile.
struct Launch {
  Params params;
  explicit Launch(const Params& common) : params(common) { params.num_parts = params.num_tiles = 0; }
  void add(const Part& part, int width) {
    Part& added = params.parts[params.num_parts++];
    added = part;
    added.first_tile = params.num_tiles;
    params.num_tiles += (part.n + width - 1) / width;
  }
  // The same parts in tiles of another width.
  [[nodiscard]] Launch with_width(int width) const {
    Launch result(params);
    for (int i = 0; i < params.num_parts; ++i) {
      result.add(params.parts[i], width);
    }
    return result;
  }
  [[nodiscard]] dim3 grid(int row_tile) const {
    return {static_cast<unsigned>(params.num_tiles),
            static_cast<unsigned>((params.num_rows + row_tile - 1) / row_tile)};
  }
};

__device__ __forceinline__ int part_of_tile(const Params& p, int tile) {
  int part = 0;
  while (part + 1 < p.num_parts && tile >= p.parts[part + 1].first_tile) {
    ++part;
  }
  return part;
}

// An element of a stored type as it lies in memory, so that nobody waits for it before it is used.
struct Stored {
  uint32_t bits = 0;
  __device__ __forceinline__ void load(const void* values, int64_t index, bool f32) {
    if (f32) {
      bits = static_cast<const uint32_t*>(values)[index];
    } else {
      bits = static_cast<const uint16_t*>(values)[index];
    }
  }
  [[nodiscard]] __device__ __forceinline__ float value(bool f32) const {
    return __uint_as_float(f32 ? bits : bits << 16);
  }
};
__device__ __forceinline__ Stored load_out(const Part& part, int64_t row, int n) {
  Stored result;
  result.load(part.out, row * part.out_stride + n, part.out_f32);
  return result;
}
__device__ __forceinline__ Stored load_bias(const Part& part, int n) {
  Stored result;
  result.load(part.bias, n, part.bias_f32);
  return result;
}
__device__ __forceinline__ void store_out(const Part& part, int64_t row, int n, float value) {
  const int64_t index = row * part.out_stride + n;
  if (part.out_f32) {
    static_cast<float*>(part.out)[index] = value;
  } else {
    static_cast<__nv_bfloat16*>(part.out)[index] = from_f32<__nv_bfloat16>(value);
  }
}
__device__ __forceinline__ const float* shrunk_row(const Params& p, const Part& part, int64_t row) {
  return p.shrunk + (row * p.num_modules + part.module_index) * p.rank_stride;
}

// By one warp, each lane for a row of its own if it has one (`there`): what the row's adapter says about a part, and B
// of the warp's adapters asked into the L2 for outputs n0 .. n0 + width - 1, where it arrives while the weights stream.
__device__ __forceinline__ LoraToken find_token(const Params& p, const Part& part, int row, bool there, int n0,
                                                int width) {
  const ResolvedLora* record = nullptr;
  int slot = 0;
  float scale = 0.0f;
  if (part.module >= 0 && there) {
    slot = p.row_slot[row];
    scale = p.row_scale[row];
    if (slot != 0) {
      record = p.table.resolved_dense(slot, p.layer, static_cast<LoraModule>(part.module));
    }
  }
  const LoraToken token = lora_token(record, slot, scale);
  const unsigned same = __match_any_sync(0xffffffffu, token.rank != 0 ? slot : 0);
  if (token.rank != 0 && __ffs(static_cast<int>(same)) - 1 == static_cast<int>(threadIdx.x % 32)) {
    const int panels = (token.rank + kTileRanks - 1) / kTileRanks;
    for (int n = n0; n < min(n0 + width, part.n); n = n - n % kTileColumns + kTileColumns) {
      const int lines = (min(min(n0 + width, part.n) - n, kTileColumns - n % kTileColumns) + 7) / 8;
      for (int panel = 0; panel < panels; ++panel) {
        const std::byte* tile = paged_granule(p.table, slot, token.b, token.b_pages, n / kTileColumns * panels + panel);
        for (int i = 0; i < lines; ++i) {
          prefetch_l2(tile + (n % kTileColumns / 8 + i) * 128);
        }
      }
    }
  }
  return token;
}

}  // namespace moelora::linear
