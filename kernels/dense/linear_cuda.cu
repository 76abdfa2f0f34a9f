// SPDX-License-Identifier: Apache-2.0
// linear on CUDA. LoRA's shrink runs first (kernels/lora/lora_shrink_cuda.cu), into scratch.
// Up to 8 rows: kernels/dense/linear_skinny.cuh; up to 64: kernels/dense/linear_stream.cuh where the GPU can,
// otherwise as up to 8; each one launch for all parts. One row's shrink is in the same launch
// (kernels/dense/linear_beside.cuh). A very wide part (lm_head) stays with the former up to 32 rows. More rows:
// cuBLASLt per part, with the bias if it takes it, then one launch adds LoRA to the rows that have adapters, and a bias
// that is left. A bf16 output is then rounded before they are added and once more after. Without cuBLASLt the kernel
// for few rows takes them in tiles. Sums over K are ordered by the shape of the op; whether a batch has adapters never
// matters. A row takes nothing from the adapters of others: a delta is added where the row has one, not multiplied by
// zero where it has none. H200, us: 64 rows of gpt-oss-20b q k v 22.4, o 16.0, of Qwen3-30B-A3B q k v 14.4, o 14.0; 1
// row of the latter q k v 12.2, o 9.3.
#include "kernels/dense/linear.h"

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/dense_gemm.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vec.cuh"
#include "kernels/dense/linear_beside.cuh"
#include "kernels/dense/linear_epilogue.cuh"
#include "kernels/dense/linear_params.cuh"
#include "kernels/dense/linear_path.h"
#include "kernels/dense/linear_skinny.cuh"
#include "kernels/dense/linear_stream.cuh"
#include "kernels/lora/lora_shrink_cuda.h"

namespace moelora {
namespace {

// Up to here kernels of our own, then cuBLASLt.
constexpr int SKINNY_ROWS = 64;
constexpr int SKINNY_ROWS_LARGE = 32;
constexpr int SKINNY_ROWS_ALONE = 8;  // beyond, linear_stream.cuh where the GPU can
// Rows whose shrink is beside the product (H200, six layers as one graph, the gpt-oss shape: 1 row 694 us, with the
// shrink before it 705; 2 rows 779 both; 4 rows 874 and 878; 8 rows 1,047 and 1,022; Qwen3-30B-A3B's, 1 row: 523 and
// 545). Products that start before the shrink has x, and read x behind it: 735 us and 532.
constexpr int BESIDE_ROWS = 1;
constexpr int WIDE_TILES = 2048;  // from so many tiles of 16 outputs on, a block takes two; without LoRA
constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr unsigned ALL = 0xffffffffu;

using linear::Launch;
using linear::Params;
using linear::Part;

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
      store_out(part, row0 + row, n,
                p.accumulate ? load_out(part, row0 + row, n).value(part.out_f32) + sum[row] : sum[row]);
    }
  }
}

void check_part(const LinearArgs& args, const LinearPart& part) {
  MOELORA_ASSERT(part.weight.cols == args.k && part.weight.dtype != Dtype::kF16 && part.out.dtype != Dtype::kF16);
  MOELORA_ASSERT(reinterpret_cast<uintptr_t>(part.weight.data) % 16 == 0);
  MOELORA_ASSERT(part.bias.empty() || part.bias.dtype != Dtype::kF16);
}

// The parts as the kernels see them, without LoRA. Returns their tiles of 16 outputs.
int fill_parts(const LinearArgs& args, Params& common) {
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
  return tiles;
}

// Fills what LoRA needs. Returns the shrink, without modules if there is none.
DenseShrinkArgs prepare_lora(const LinearArgs& args, uint32_t* x_ready, Params& p) {
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
    return shrink;
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
  p.x_ready = x_ready;
  p.table = args.lora->table;
  p.row_slot = args.lora->row_slot;
  p.sorted_rows = args.lora->sorted_rows;
  p.segment_begin = args.lora->segment_begin;
  p.segment_slot = args.lora->segment_slot;
  p.counts = args.lora->counts;
  p.row_scale = args.lora->row_scale;
  p.shrunk = shrink.out;
  p.num_modules = shrink.num_modules;
  p.rank_stride = shrink.rank_stride;
  p.layer = args.layer;
  return shrink;
}

bool has_bf16_weights(const LinearArgs& args) {
  bool all = true;
  for (int i = 0; i < args.num_parts; ++i) {
    all = all && args.parts[i].weight.dtype != Dtype::kF32;
  }
  return all;
}

// One launch of all parts, in tiles of 16 outputs.
Launch launch_of_all(const LinearArgs& args, const Params& common) {
  Launch all(common);
  for (int i = 0; i < args.num_parts; ++i) {
    all.add(common.parts[i], 16);
  }
  return all;
}

// The whole of an op of few rows in one launch. False: nothing was launched.
bool launch_few_rows(LinearPath path, const LinearArgs& args, const Params& common, const DenseShrinkArgs& shrink,
                     Stream& stream) {
  const bool wanted = path == LinearPath::kShrinkBeside || (path == LinearPath::kAuto && args.num_rows <= BESIDE_ROWS);
  if (!wanted || shrink.num_modules == 0 || args.num_rows > SKINNY_ROWS_ALONE || !has_bf16_weights(args)) {
    return false;
  }
  return linear::launch_beside(launch_of_all(args, common), shrink, args.scratch_bytes, cuda_state(stream));
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

// Whether products of `rows` rows are streamed where the GPU can.
bool is_streamed(int rows, bool large) {
  return !large && rows > SKINNY_ROWS_ALONE && rows <= linear::kStreamRows;
}

// The shrink and the products of all parts, which start side by side. False: nothing was launched.
bool launch_streamed(const LinearArgs& args, const Params& common, DenseShrinkArgs shrink, Stream& stream) {
  const CudaStream& state = cuda_state(stream);
  linear::StreamLaunch products;
  if (!has_bf16_weights(args) || !linear::prepare_stream(launch_of_all(args, common), state, products)) {
    return false;
  }
  if (shrink.num_modules > 0) {
    shrink.x_ready = state.x_ready;
    lora_shrink_dense_cuda(shrink, stream);
  }
  products.go(state);
  return true;
}

}  // namespace

void linear_cuda_by(LinearPath path, const LinearArgs& args, Stream& stream) {
  MOELORA_ASSERT(args.x.dtype == Dtype::kBf16 && args.k % 8 == 0 && args.x.stride % 8 == 0);
  MOELORA_ASSERT(reinterpret_cast<uintptr_t>(args.x.data) % 16 == 0);
  if (args.num_rows == 0) {
    return;
  }
  Params common{};
  const int tiles = fill_parts(args, common);
  const DenseShrinkArgs shrink = prepare_lora(args, cuda_state(stream).x_ready, common);
  if (launch_few_rows(path, args, common, shrink, stream)) {
    return;
  }
  const bool large = tiles >= WIDE_TILES;
  if (is_streamed(args.num_rows, large) && launch_streamed(args, common, shrink, stream)) {
    return;
  }
  if (shrink.num_modules > 0) {
    lora_shrink_dense_cuda(shrink, stream);
  }
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
    Part rest = own;
    rest.bias = done == DenseGemm::Done::kProductAndBias ? nullptr : own.bias;
    if (rest.module >= 0 || rest.bias != nullptr) {
      epilogue.add(rest);
    }
  }
  if (skinny.params.num_parts > 0) {
    if (wide) {
      linear::launch_skinny<2>(skinny, state);
    } else {
      linear::launch_skinny<1>(skinny, state);
    }
  }
  if (f32.params.num_parts > 0) {
    launch_dependent(linear_f32, f32.grid(8), THREADS, 0, state, f32.params);
    check_launch("linear, fp32 weights");
  }
  if (epilogue.num_parts > 0) {
    launch_epilogue(epilogue, common, state);
  }
}

void linear_cuda(const LinearArgs& args, Stream& stream) {
  linear_cuda_by(LinearPath::kAuto, args, stream);
}

}  // namespace moelora
