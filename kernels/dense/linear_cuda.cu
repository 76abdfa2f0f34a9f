// SPDX-License-Identifier: Apache-2.0
// linear on CUDA. LoRA's shrink runs first (kernels/lora/lora_shrink_cuda.cu), into scratch.
// Few rows: one launch for all parts. A block owns 16 or 32 outputs of one part for up to 32 rows; its 8 warps split K
// into contiguous ranges of 64-input blocks and stream their weight rows straight into registers
// (kernels/cuda/mma_tile.cuh), and their sums are added in warp order. Limited by memory: each weight is read once.
// With LoRA a ninth warp looks up the rows' adapters meanwhile, waits for the shrink, beside which this kernel runs,
// and computes the deltas of up to 8 rows; deltas of more rows are computed by all warps with the last sum. Many rows:
// cuBLASLt per part, with the bias if it takes it, then one launch adds LoRA to the rows that have adapters, and a bias
// that is left. A bf16 output is then rounded before they are added and once more after. Without cuBLASLt the kernel
// for few rows takes them in tiles. Our own sums over K are ordered by K alone, those of cuBLASLt by the shape. A row
// takes nothing from the adapters of others: a delta is added where the row has one, not multiplied by zero where it
// has none. H200, between two events, read ceiling 4.5 TB/s. gpt-oss-20b: lm_head of 1 row 253 us for 1158 MB = 99 %,
// of 64 rows 305 us; q, k, v and o of 1 row 14.7 us for 29 MB and 12.0 us for 24 MB, with an adapter of rank 32 21.6
// and 16.8; of 64 rows 27.6 and 24.3 us (cuBLASLt 33.7 and 19.1), with 8 adapters 47.9 and 34.5 us; of 4096 rows 245
// and 186 us. Qwen3-30B-A3B, 1 row: 12.0 us for 21 MB and 9.9 us for 17 MB.
#include "kernels/dense/linear.h"

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/dense_gemm.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_tile.cuh"
#include "kernels/cuda/vec.cuh"
#include "kernels/dense/linear_epilogue.cuh"
#include "kernels/lora/lora_expand.cuh"
#include "kernels/lora/lora_shrink_cuda.h"

namespace moelora {
namespace {

// Up to here the kernel for few rows, then cuBLASLt. The second tile of 32 rows finds the weights in the L2.
constexpr int SKINNY_ROWS = 64;
constexpr int SKINNY_ROWS_LARGE = 32;
constexpr int WIDE_TILES = 2048;  // from so many tiles of 16 outputs on, a block takes two; without LoRA
constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int BLOCKS_PER_SM = 2;
// Blocks of 64 inputs whose weights a warp has in flight: as many as registers hold.
constexpr int unroll_of(int row_groups, int output_tiles, bool lora) {
  if (output_tiles == 2) {
    return row_groups == 1 ? 2 : 1;
  }
  return row_groups == 4 ? (lora ? 2 : 3) : (row_groups == 2 ? 3 : 4);
}
constexpr unsigned ALL = 0xffffffffu;

struct Part {
  const void* weight;
  const void* bias;  // may be null
  void* out;
  int64_t out_stride;
  int n;
  int first_tile;    // of this part in gridDim.x
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
  const float* shrunk;  // [T, num_modules, rank_stride], times the row's whole scale
  int num_modules;
  int rank_stride;
  int layer;
};

__device__ __forceinline__ int part_of_tile(const Params& p, int tile) {
  int part = 0;
  while (part + 1 < p.num_parts && tile >= p.parts[part + 1].first_tile) {
    ++part;
  }
  return part;
}

__device__ __forceinline__ float load_out(const Part& part, int64_t row, int n) {
  const int64_t index = row * part.out_stride + n;
  return part.out_f32 ? static_cast<const float*>(part.out)[index]
                      : to_f32(static_cast<const __nv_bfloat16*>(part.out)[index]);
}
__device__ __forceinline__ void store_out(const Part& part, int64_t row, int n, float value) {
  const int64_t index = row * part.out_stride + n;
  if (part.out_f32) {
    static_cast<float*>(part.out)[index] = value;
  } else {
    static_cast<__nv_bfloat16*>(part.out)[index] = from_f32<__nv_bfloat16>(value);
  }
}
__device__ __forceinline__ float load_bias(const Part& part, int n) {
  return part.bias_f32 ? static_cast<const float*>(part.bias)[n]
                       : to_f32(static_cast<const __nv_bfloat16*>(part.bias)[n]);
}

__device__ __forceinline__ const float* shrunk_row(const Params& p, const Part& part, int64_t row) {
  return p.shrunk + (row * p.num_modules + part.module_index) * p.rank_stride;
}

// By one warp, lane i for row i: what the rows' adapters say about a part, and their B asked into the L2 for a block's
// outputs, where it arrives while the weights stream.
__device__ __forceinline__ void find_tokens(const Params& p, const Part& part, int row0, int rows, int n0, int width,
                                            LoraToken* tokens) {
  const int lane = threadIdx.x % 32;
  const ResolvedLora* record = nullptr;
  int slot = 0;
  float scale = 0.0f;
  if (part.module >= 0 && lane < rows) {
    slot = p.row_slot[row0 + lane];
    scale = p.row_scale[row0 + lane];
    if (slot != 0) {
      record = p.table.resolved_dense(slot, p.layer, static_cast<LoraModule>(part.module));
    }
  }
  const LoraToken token = lora_token(record, slot, scale);
  if (lane < rows) {
    tokens[lane] = token;
  }
  const unsigned same = __match_any_sync(ALL, token.rank != 0 ? slot : 0);
  if (token.rank != 0 && __ffs(static_cast<int>(same)) - 1 == lane) {
    const int panels = (token.rank + kTileRanks - 1) / kTileRanks;
    for (int panel = 0; panel < panels; ++panel) {
      const std::byte* tile = paged_granule(p.table, slot, token.b, token.b_pages, n0 / kTileColumns * panels + panel);
      for (int n = n0; n < n0 + width && n < part.n; n += 8) {
        const std::byte* line = tile + n % kTileColumns / 8 * 128;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
      }
    }
  }
  __syncwarp();  // tokens are there for the warp
}

// This lane's rows of the operands, at its first chunk of the block that comes next.
template <int NT, int MT>
struct Operands {
  const __nv_bfloat16* weight[2 * MT];  // outputs n0 + g + 8 i
  const __nv_bfloat16* x[NT];           // rows row0 + g + 8 j
};

// acc += W x over UNROLL blocks of 64 inputs. TAIL: of these, inputs from `left` on are not there. Weights first: they
// need nothing that another kernel writes. WAIT: x does.
template <bool TAIL, bool WAIT, int UNROLL, int NT, int MT>
__device__ __forceinline__ void multiply_blocks(Operands<NT, MT>& at, int left, float (&acc)[MT][NT][4]) {
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
  if constexpr (WAIT) {
    wait_for_previous();
  }
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

// acc += W x over the 64-input blocks [begin, end) of K. Outputs and rows that are not there are read as the last
// there is: what they give is never stored. EARLY: wait for x after the first weights were asked for.
template <int NT, int MT, int UNROLL, bool EARLY>
__device__ __forceinline__ void multiply(const Params& p, const Part& part, int row0, int n0, int begin, int end,
                                         float (&acc)[MT][NT][4]) {
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
  int left = min(end * kTileColumns, p.k) - begin * kTileColumns;
  if (EARLY && left >= UNROLL * kTileColumns) {
    multiply_blocks<false, true, UNROLL>(at, left, acc);
    left -= UNROLL * kTileColumns;
  }
#pragma unroll 1
  for (; left >= UNROLL * kTileColumns; left -= UNROLL * kTileColumns) {
    multiply_blocks<false, false, UNROLL>(at, left, acc);
  }
  if (left > 0) {
    multiply_blocks<true, EARLY, UNROLL>(at, left, acc);
  }
}

// The delta of output n for row0 + token.
__device__ __forceinline__ float row_delta(const Params& p, const Part& part, int row0, const LoraToken* tokens,
                                           int token, int n) {
  return lora_delta(p.table, tokens[token], n, shrunk_row(p, part, row0 + token));
}

// Few rows: MT * 16 outputs of one part, rows 8 NT blockIdx.x and the following. LORA: launched right after the shrink,
// which passed its wait before this kernel began, so that x was complete; with a warp more.
template <int NT, int MT, bool LORA>
__global__ void __launch_bounds__(THREADS + (LORA ? 32 : 0), BLOCKS_PER_SM)
    linear_skinny(const __grid_constant__ Params p) {
  constexpr int ELEMENTS = MT * NT * 128;  // of a tile, in fragments of [4 registers][32 lanes]
  constexpr int WIDTH = 16 * MT;
  constexpr bool AHEAD = LORA && NT == 1;  // the ninth warp computes the deltas
  __shared__ float partial[WARPS * ELEMENTS];
  __shared__ float delta[AHEAD ? 8 * WIDTH : 1];  // [row][output]
  __shared__ LoraToken tokens[LORA ? 8 * NT : 1];
  let_next_start();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const Part& part = p.parts[part_of_tile(p, blockIdx.y)];
  const int n0 = (static_cast<int>(blockIdx.y) - part.first_tile) * WIDTH;
  const int row0 = static_cast<int>(blockIdx.x) * 8 * NT;
  const int rows = min(p.num_rows - row0, 8 * NT);
  if (LORA && warp == WARPS) {
    find_tokens(p, part, row0, rows, n0, WIDTH, tokens);
    wait_for_previous();
    if constexpr (AHEAD) {
      for (int i = lane; i < rows * WIDTH; i += 32) {
        if (tokens[i / WIDTH].rank != 0 && n0 + i % WIDTH < part.n) {
          delta[i] = row_delta(p, part, row0, tokens, i / WIDTH, n0 + i % WIDTH);
        }
      }
    }
  } else {
    constexpr bool EARLY = !LORA && NT <= 2;  // more rows leave no registers for it
    if (!LORA && !EARLY) {
      wait_for_previous();
    }
    const int blocks = (p.k + kTileColumns - 1) / kTileColumns;
    float acc[MT][NT][4] = {};
    multiply<NT, MT, unroll_of(NT, MT, LORA), EARLY>(p, part, row0, n0, warp * blocks / WARPS,
                                                     (warp + 1) * blocks / WARPS, acc);
#pragma unroll
    for (int e = 0; e < MT * NT * 4; ++e) {
      partial[warp * ELEMENTS + e * 32 + lane] = acc[e / 4 / NT][e / 4 % NT][e % 4];
    }
  }
  wait_for_previous();  // also of warps that had no weights
  __syncthreads();      // sums of all warps, tokens and deltas
#pragma unroll 1
  for (int e = threadIdx.x; e < ELEMENTS; e += THREADS + (LORA ? 32 : 0)) {
    float y = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      y += partial[w * ELEMENTS + e];
    }
    const int fragment = e / 128;  // mt * NT + j
    const int token = fragment % NT * 8 + e % 4 * 2 + e / 32 % 2;
    const int n = n0 + fragment / NT * 16 + e % 32 / 4 + e / 64 % 2 * 8;
    if (token >= rows || n >= part.n) {
      continue;
    }
    if constexpr (LORA) {
      if (tokens[token].rank != 0) {
        y += AHEAD ? delta[token * WIDTH + n - n0] : row_delta(p, part, row0, tokens, token, n);
      }
    }
    if (part.bias != nullptr) {
      y += load_bias(part, n);
    }
    if (p.accumulate) {
      y += load_out(part, row0 + token, n);
    }
    store_out(part, row0 + token, n, y);
  }
}

// fp32 weights (routers): a warp an output, 8 rows; the base alone.
__global__ void __launch_bounds__(THREADS) linear_f32(const __grid_constant__ Params p) {
  wait_for_previous();
  let_next_start();
  const int lane = threadIdx.x % 32;
  const Part& part = p.parts[part_of_tile(p, blockIdx.x)];
  const int n = (static_cast<int>(blockIdx.x) - part.first_tile) * WARPS + static_cast<int>(threadIdx.x / 32);
  const int row0 = static_cast<int>(blockIdx.y) * 8;
  if (n >= part.n) {
    return;
  }
  const float* weight = static_cast<const float*>(part.weight) + static_cast<int64_t>(n) * p.k;
  const __nv_bfloat16* x = p.x + row0 * p.x_stride;
  float sum[8] = {};
#pragma unroll 4
  for (int i = lane; i < p.k / 4; i += 32) {
    const Vec4<float> w = load4(weight, i);
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      if (row0 + row < p.num_rows) {
        const Vec4<__nv_bfloat16> values = load4(x + row * p.x_stride, i);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          sum[row] = fmaf(w.at[c], to_f32(values.at[c]), sum[row]);
        }
      }
    }
  }
#pragma unroll
  for (int row = 0; row < 8; ++row) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      sum[row] += __shfl_xor_sync(ALL, sum[row], offset);
    }
    if (lane == row && row0 + row < p.num_rows) {
      store_out(part, row0 + row, n, p.accumulate ? load_out(part, row0 + row, n) + sum[row] : sum[row]);
    }
  }
}

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
  [[nodiscard]] dim3 grid(int row_tile) const {
    return {static_cast<unsigned>(params.num_tiles),
            static_cast<unsigned>((params.num_rows + row_tile - 1) / row_tile)};
  }
};

template <int NT, int MT>
void launch_skinny_tile(const Launch& launch, const CudaStream& state) {
  const dim3 tiles = launch.grid(8 * NT);
  const dim3 grid(tiles.y, tiles.x);  // the tiles of rows side by side, so that weights are read once
  if (MT == 1 && launch.params.num_modules > 0) {
    launch_dependent(linear_skinny<NT, 1, true>, grid, THREADS + 32, 0, state, launch.params);
  } else {
    launch_dependent(linear_skinny<NT, MT, false>, grid, THREADS, 0, state, launch.params);
  }
  check_launch("linear");
}
template <int MT>
void launch_skinny(const Launch& launch, const CudaStream& state) {
  if (launch.params.num_rows <= 8) {
    launch_skinny_tile<1, MT>(launch, state);
  } else if (launch.params.num_rows <= 16) {
    launch_skinny_tile<2, MT>(launch, state);
  } else {
    launch_skinny_tile<4, MT>(launch, state);
  }
}

void check_part(const LinearArgs& args, const LinearPart& part) {
  MOELORA_ASSERT(part.weight.cols == args.k && part.weight.dtype != Dtype::kF16 && part.out.dtype != Dtype::kF16);
  MOELORA_ASSERT(reinterpret_cast<uintptr_t>(part.weight.data) % 16 == 0);
  MOELORA_ASSERT(part.bias.empty() || part.bias.dtype != Dtype::kF16);
}

// Fills what LoRA needs and queues the shrink.
void prepare_lora(const LinearArgs& args, Params& p, Stream& stream) {
  DenseShrinkArgs shrink;
  for (int i = 0; i < args.num_parts; ++i) {
    p.parts[i].module = -1;
    if (args.lora != nullptr && args.parts[i].module != LoraModule::kNone) {
      p.parts[i].module = static_cast<int>(args.parts[i].module);
      p.parts[i].module_index = shrink.num_modules;
      shrink.modules[shrink.num_modules++] = args.parts[i].module;
    }
  }
  if (shrink.num_modules == 0) {
    return;
  }
  shrink.x = args.x;
  shrink.num_rows = args.num_rows;
  shrink.k = args.k;
  shrink.layer = args.layer;
  shrink.lora = args.lora;
  shrink.out = reinterpret_cast<float*>(args.scratch);
  shrink.rank_stride = args.lora->rank_stride;
  const size_t shrunk_bytes = static_cast<size_t>(args.num_rows) * static_cast<size_t>(shrink.num_modules) *
                              static_cast<size_t>(shrink.rank_stride) * sizeof(float);
  MOELORA_ASSERT(args.scratch_bytes >= shrunk_bytes);
  lora_shrink_dense_cuda(shrink, stream);
  p.table = args.lora->table;
  p.row_slot = args.lora->row_slot;
  p.row_scale = args.lora->row_scale;
  p.shrunk = shrink.out;
  p.num_modules = shrink.num_modules;
  p.rank_stride = shrink.rank_stride;
  p.layer = args.layer;
}

// LoRA, and bias where the product left it out, of parts whose products are in memory.
void launch_epilogue(linear_epilogue::Params& epilogue, const Params& common, const CudaStream& state) {
  epilogue.num_rows = common.num_rows;
  epilogue.table = common.table;
  epilogue.row_slot = common.row_slot;
  epilogue.row_scale = common.row_scale;
  epilogue.shrunk = common.shrunk;
  epilogue.num_modules = common.num_modules;
  epilogue.rank_stride = common.rank_stride;
  epilogue.layer = common.layer;
  linear_epilogue::launch(epilogue, state);
}

}  // namespace

void linear_cuda(const LinearArgs& args, Stream& stream) {
  MOELORA_ASSERT(args.x.dtype == Dtype::kBf16 && args.k % 8 == 0 && args.x.stride % 8 == 0);
  MOELORA_ASSERT(reinterpret_cast<uintptr_t>(args.x.data) % 16 == 0);
  if (args.num_rows == 0) {
    return;
  }
  Params common{};
  common.x = static_cast<const __nv_bfloat16*>(args.x.data);
  common.x_stride = args.x.stride;
  common.num_rows = args.num_rows;
  common.k = args.k;
  common.accumulate = args.accumulate;
  int tiles = 0;
  for (int i = 0; i < args.num_parts; ++i) {
    const LinearPart& part = args.parts[i];
    check_part(args, part);
    Part& own = common.parts[i];
    own.weight = part.weight.data;
    own.bias = part.bias.data;
    own.bias_f32 = part.bias.dtype == Dtype::kF32;
    own.out = part.out.data;
    own.out_f32 = part.out.dtype == Dtype::kF32;
    own.out_stride = part.out.stride;
    own.n = part.weight.rows;
    tiles += (own.n + 15) / 16;
  }
  prepare_lora(args, common, stream);
  const bool large = tiles >= WIDE_TILES;
  const bool wide = large && common.num_modules == 0;
  const int skinny_rows = large ? SKINNY_ROWS_LARGE : SKINNY_ROWS;
  const CudaStream& state = cuda_state(stream);
  DenseGemm* const gemm = args.num_rows > skinny_rows ? state.dense_gemm : nullptr;
  Launch skinny(common);
  Launch f32(common);
  linear_epilogue::Params epilogue;
  for (int i = 0; i < args.num_parts; ++i) {
    const LinearPart& part = args.parts[i];
    const Part& own = common.parts[i];
    auto done = DenseGemm::Done::kNothing;
    if (part.weight.dtype == Dtype::kF32) {
      f32.add(own, WARPS);
    } else {
      if (gemm != nullptr) {
        done = gemm->run(part.weight, part.bias, args.x, args.num_rows, part.out, args.accumulate, cuda_stream(stream));
      }
      if (done == DenseGemm::Done::kNothing) {
        skinny.add(own, wide ? 32 : 16);
        continue;
      }
    }
    const void* const bias = done == DenseGemm::Done::kProductAndBias ? nullptr : own.bias;
    if (own.module >= 0 || bias != nullptr) {
      epilogue.add({bias, own.out, own.out_stride, own.n, 0, own.module, own.module_index, own.bias_f32, own.out_f32});
    }
  }
  if (skinny.params.num_parts > 0) {
    wide ? launch_skinny<2>(skinny, state) : launch_skinny<1>(skinny, state);
  }
  if (f32.params.num_parts > 0) {
    launch_dependent(linear_f32, f32.grid(8), THREADS, 0, state, f32.params);
    check_launch("linear, fp32 weights");
  }
  if (epilogue.num_parts > 0) {
    launch_epilogue(epilogue, common, state);
  }
}

}  // namespace moelora
