// SPDX-License-Identifier: Apache-2.0
// linear of few rows in one launch for all parts. A block owns 16 or 32 outputs of one part for up to 32 rows; its
// warps split K into contiguous ranges of 64-input blocks and stream their weight rows straight into registers
// (kernels/cuda/mma_tile.cuh), and their sums are added in warp order. Weights depend on no other kernel: before the
// wait for the one ahead a warp has its first blocks in flight and has asked the next into the L2. Up to 8 rows three
// blocks share a multiprocessor, so that the tiles of a decode step's linears are all resident; where there are so few
// tiles that each has one to itself, 16 warps split K.
// With LoRA a further warp looks up the rows' adapters meanwhile, waits for the shrink, beside which this kernel runs,
// and computes the deltas of up to 2 rows; those of up to 8 are computed by everybody when the weights are through, a
// thread each, those of more with the last sum.
// Limited by memory: each weight is read once. Included by linear_cuda.cu, and for the order of its sums, which
// kernels/moe/moe_router_few.cuh repeats.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/dense/linear_params.cuh"

namespace moelora::linear {

constexpr int kWarps = 8;
constexpr int kWarpsAlone = 16;     // of a block that has a multiprocessor to itself
constexpr int kPrefetchBlocks = 6;  // of 64 inputs and a warp, beyond those in flight; all warps' fit the L2

// More shared memory than these kernels use, since their neighbours in a step use more: with what CUDA chooses (six
// layers of the gpt-oss shape on an H200) a step of 1 row takes 632 us instead of 598, of 8 rows with 8 adapters 1,177
// instead of 1,023; with 64 percent 604 and 1,037; all kernels at 100 percent 779 and 1,263, since weights on their way
// lack L1.
constexpr int kSharedPercent = 32;

constexpr int skinny_threads(int warps, bool lora) {
  return 32 * (warps + (lora ? 1 : 0));
}
constexpr int skinny_blocks_per_sm(int row_groups, int output_tiles, int warps) {
  return warps == kWarpsAlone ? 1 : (row_groups == 1 && output_tiles == 1 ? 3 : 2);
}
// Blocks of 64 inputs whose weights a warp has in flight: as many as registers hold.
constexpr int skinny_unroll(int row_groups, int output_tiles, int warps, bool lora) {
  if (output_tiles == 2) {
    return row_groups == 1 ? 2 : 1;
  }
  return warps == kWarpsAlone ? (lora ? 3 : 4) : (row_groups == 4 ? 1 : 2);
}

// This lane's rows of the operands, at its first chunk of the block that comes next.
template <int NT, int MT>
struct Operands {
  const __nv_bfloat16* weight[2 * MT];  // outputs n0 + g + 8 i
  const __nv_bfloat16* x[NT];           // rows row0 + g + 8 j
};

// acc += W x over UNROLL blocks of 64 inputs. TAIL: of these, inputs from `left` on are not there. Weights first: they
// need nothing that another kernel writes; `ready` returns when x is there.
template <bool TAIL, int UNROLL, int NT, int MT, class Ready>
__device__ __forceinline__ void multiply_blocks(Operands<NT, MT>& at, int left, float (&acc)[MT][NT][4],
                                                const Ready& ready) {
  const int chunk = threadIdx.x % 4 * 8;
  uint4 w[2 * UNROLL][2 * MT];
#pragma unroll
  for (int half = 0; half < 2 * UNROLL; ++half) {
    const bool inside = !TAIL || half * 32 + chunk < left;
#pragma unroll
    for (int i = 0; i < 2 * MT; ++i) {
      w[half][i] = inside ? load_streaming(at.weight[i] + half * 32) : zero_chunk();
    }
  }
  ready();
#pragma unroll
  for (int half = 0; half < 2 * UNROLL; ++half) {
    const bool inside = !TAIL || half * 32 + chunk < left;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const uint4 x = inside ? *reinterpret_cast<const uint4*>(at.x[j] + half * 32) : zero_chunk();
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        mma_chunk(acc[mt][j], w[half][2 * mt], w[half][2 * mt + 1], x);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * MT; ++i) {
    at.weight[i] += UNROLL * kTileColumns;
  }
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    at.x[j] += UNROLL * kTileColumns;
  }
}

// Asks 16 outputs' weights of blocks [begin, end) into the L2, by a warp.
__device__ __forceinline__ void prefetch_weights(const Params& p, const Part& part, int n0, int begin, int end) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t n = min(n0 + lane % 16, part.n - 1);
  const auto* weight = static_cast<const __nv_bfloat16*>(part.weight) + n * p.k;
#pragma unroll 1
  for (int block = begin + lane / 16; block < end; block += 2) {
    prefetch_l2(weight + block * kTileColumns);
  }
}

// acc += W x over the 64-input blocks [begin, end) of K. Outputs and rows that are not there are read as the last
// there is: what they give is never stored. `ready` is called once, after the first weights were asked for.
template <int NT, int MT, int UNROLL, class Ready>
__device__ __forceinline__ void multiply(const Params& p, const Part& part, int row0, int n0, int begin, int end,
                                         float (&acc)[MT][NT][4], const Ready& ready) {
  const int g = threadIdx.x % 32 / 4;
  const int first = begin * kTileColumns + threadIdx.x % 4 * 8;
  Operands<NT, MT> at;
#pragma unroll
  for (int i = 0; i < 2 * MT; ++i) {
    const int64_t n = min(n0 + g + 8 * i, part.n - 1);
    at.weight[i] = static_cast<const __nv_bfloat16*>(part.weight) + n * p.k + first;
  }
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const int64_t row = min(row0 + g + 8 * j, p.num_rows - 1);
    at.x[j] = p.x + row * p.x_stride + first;
  }
  const auto nothing = [] {};
  int left = min(end * kTileColumns, p.k) - begin * kTileColumns;
  if constexpr (NT <= 2) {
    const auto after_weights = [&] {
      if constexpr (NT == 1 && MT == 1) {
        prefetch_weights(p, part, n0, begin + UNROLL, min(end, begin + UNROLL + kPrefetchBlocks));
      }
      ready();
    };
    if (left >= UNROLL * kTileColumns) {
      multiply_blocks<false, UNROLL>(at, left, acc, after_weights);
      left -= UNROLL * kTileColumns;
    } else {
      multiply_blocks<true, UNROLL>(at, left, acc, after_weights);
      left = 0;
    }
  } else {
    ready();
  }
#pragma unroll 1
  for (; left >= UNROLL * kTileColumns; left -= UNROLL * kTileColumns) {
    multiply_blocks<false, UNROLL>(at, left, acc, nothing);
  }
  if (left > 0) {
    multiply_blocks<true, UNROLL>(at, left, acc, nothing);
  }
}

// The delta of output n for row0 + token.
__device__ __forceinline__ float row_delta(const Params& p, const Part& part, int row0, const LoraToken* tokens,
                                           int token, int n) {
  return lora_delta(p.table, tokens[token], n, shrunk_row(p, part, row0 + token));
}

// The output that element e of a block's sums, fragments of [4 registers][32 lanes], belongs to.
template <int NT>
struct Place {
  int token;
  int n;
  __device__ __forceinline__ explicit Place(unsigned e) {
    const unsigned fragment = e / 128;  // mt * NT + j
    token = static_cast<int>(fragment % NT * 8 + e % 4 * 2 + e / 32 % 2);
    n = static_cast<int>(fragment / NT * 16 + e % 32 / 4 + e / 64 % 2 * 8);
  }
};

// A block's outputs and rows, and what it knows of them.
struct Tile {
  const Part& part;
  int n0;
  int row0;
  int rows;
};

// `partial` in fragments as Place tells.
template <int NT, int MT, int WARPS, bool LORA>
struct SkinnyShared {
  static constexpr int ELEMENTS = MT * NT * 128;
  static constexpr int WIDTH = 16 * MT;
  static constexpr bool DELTAS = LORA && NT == 1;           // are left in shared memory before the last sum
  static constexpr bool ONE_EACH = ELEMENTS <= WARPS * 32;  // element a thread, whose bias and old output come early
  float partial[WARPS * ELEMENTS];
  float delta[DELTAS ? 8 * WIDTH : 1];  // [row][WIDTH]
  LoraToken tokens[LORA ? 8 * NT : 1];
};

// The deltas of up to two rows by the further warp alone, as soon as the shrink has ended; those of more by everybody,
// a thread each. By the whole block.
template <class Shared>
__device__ __forceinline__ void find_deltas(const Params& p, const Tile& tile, bool is_further, Shared& shared) {
  const auto& [part, n0, row0, rows] = tile;
  wait_for_previous();
  const bool alone = rows * Shared::WIDTH <= 32;
  if (!alone) {
    __syncthreads();  // the tokens are there
  }
  const int i = static_cast<int>(alone ? threadIdx.x % 32 : threadIdx.x);
  const int token = i / Shared::WIDTH;
  const int n = n0 + i % Shared::WIDTH;
  if ((is_further || !alone) && token < rows && n < part.n && shared.tokens[token].rank != 0) {
    shared.delta[i] = row_delta(p, part, row0, shared.tokens, token, n);
  }
}

// Sums of the warps, in their order, and everything that comes on top.
template <int NT, int MT, int WARPS, bool LORA>
__device__ __forceinline__ void store_sums(const Params& p, const Tile& tile,
                                           const SkinnyShared<NT, MT, WARPS, LORA>& shared, const Stored& bias,
                                           const Stored& before) {
  using Shared = SkinnyShared<NT, MT, WARPS, LORA>;
  const auto& [part, n0, row0, rows] = tile;
#pragma unroll 1
  for (unsigned e = threadIdx.x; e < Shared::ELEMENTS; e += skinny_threads(WARPS, LORA)) {
    float y = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      y += shared.partial[w * Shared::ELEMENTS + e];
    }
    const Place<NT> place(e);
    const int token = place.token;
    const int n = n0 + place.n;
    if (token >= rows || n >= part.n) {
      continue;
    }
    if constexpr (LORA) {
      if (shared.tokens[token].rank != 0) {
        y += Shared::DELTAS ? shared.delta[token * Shared::WIDTH + place.n]
                            : row_delta(p, part, row0, shared.tokens, token, n);
      }
    }
    if (part.bias != nullptr) {
      y += (Shared::ONE_EACH ? bias : load_bias(part, n)).value(part.bias_f32);
    }
    if (p.accumulate) {
      y += (Shared::ONE_EACH ? before : load_out(part, row0 + token, n)).value(part.out_f32);
    }
    store_out(part, row0 + token, n, y);
  }
}

// MT * 16 outputs of one part, rows 8 NT blockIdx.x and the following. LORA: launched right after the shrink, which
// passed its wait before this kernel began, so that x, and out before this op, were complete; with a warp more.
template <int NT, int MT, int WARPS, bool LORA>
__global__ void __launch_bounds__(skinny_threads(WARPS, LORA), skinny_blocks_per_sm(NT, MT, WARPS))
    linear_skinny(const __grid_constant__ Params p) {
  using Shared = SkinnyShared<NT, MT, WARPS, LORA>;
  __shared__ Shared shared;
  let_next_start();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const Part& part = p.parts[part_of_tile(p, blockIdx.y)];
  const int n0 = (static_cast<int>(blockIdx.y) - part.first_tile) * Shared::WIDTH;
  const int row0 = static_cast<int>(blockIdx.x) * 8 * NT;
  const Tile tile{part, n0, row0, min(p.num_rows - row0, 8 * NT)};
  Stored bias;
  Stored before;
  if (LORA && warp == WARPS) {
    const LoraToken token = find_token(p, part, row0 + lane, lane < tile.rows, n0, Shared::WIDTH);
    if (lane < tile.rows) {
      shared.tokens[lane] = token;
    }
    __syncwarp();  // the tokens are there for the warp
  } else {
    const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
    float acc[MT][NT][4] = {};
    multiply<NT, MT, skinny_unroll(NT, MT, WARPS, LORA)>(
        p, part, row0, n0, warp * blocks / WARPS, (warp + 1) * blocks / WARPS, acc, [&] {
          const Place<NT> place(threadIdx.x);
          const int n = n0 + place.n;
          const bool mine = Shared::ONE_EACH && threadIdx.x < Shared::ELEMENTS && place.token < tile.rows && n < part.n;
          if (mine && part.bias != nullptr) {
            bias = load_bias(part, n);
          }
          if constexpr (!LORA) {
            wait_for_previous();
          }
          if (mine && p.accumulate) {
            before = load_out(part, row0 + place.token, n);
          }
        });
#pragma unroll
    for (int e = 0; e < MT * NT * 4; ++e) {
      shared.partial[warp * Shared::ELEMENTS + e * 32 + lane] = acc[e / 4 / NT][e / 4 % NT][e % 4];
    }
  }
  if constexpr (Shared::DELTAS) {
    find_deltas(p, tile, warp == WARPS, shared);
  }
  wait_for_previous();
  __syncthreads();  // sums of all warps, tokens and deltas
  store_sums(p, tile, shared, bias, before);
}

template <int NT, int MT, int WARPS>
void launch_skinny_tile(const Launch& launch, const CudaStream& state) {
  const dim3 tiles = launch.grid(8 * NT);
  const dim3 grid(tiles.y, tiles.x);  // the tiles of rows side by side, so that weights are read once
  const auto launch_one = [&](auto kernel, bool lora) {
    prefer_shared(kernel, kSharedPercent);
    launch_dependent(kernel, grid, skinny_threads(WARPS, lora), 0, state, launch.params);
  };
  if (MT == 1 && launch.params.num_modules > 0) {
    launch_one(linear_skinny<NT, 1, WARPS, true>, true);
  } else {
    launch_one(linear_skinny<NT, MT, WARPS, false>, false);
  }
  check_launch("linear");
}
// Tiles of 16 MT outputs.
template <int MT>
void launch_skinny(const Launch& launch, const CudaStream& state) {
  const bool alone = MT == 1 && launch.params.num_tiles <= state.num_sms;
  if (launch.params.num_rows <= 8) {
    alone ? launch_skinny_tile<1, MT, MT == 1 ? kWarpsAlone : kWarps>(launch, state)
          : launch_skinny_tile<1, MT, kWarps>(launch, state);
  } else if (launch.params.num_rows <= 16) {
    launch_skinny_tile<2, MT, kWarps>(launch, state);
  } else {
    launch_skinny_tile<4, MT, kWarps>(launch, state);
  }
}

}  // namespace moelora::linear
