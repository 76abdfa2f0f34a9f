// SPDX-License-Identifier: Apache-2.0
// pack_mxfp4 on CUDA: one thread a 16-byte share of a tile, and one a scale word; each gathers its nibbles byte by byte
// (stored matrices are aligned to nothing) and writes once. Runs when a model is loaded; limited by its strided reads.
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/moe/mxfp4_tiles.h"

namespace moelora {
namespace {

constexpr int THREADS = 256;
constexpr int kStoredGroup = 32;  // inputs a stored scale covers
__constant__ const Mxfp4Encoder kEncoder = mxfp4_encoder();

// Stored row of row r (0 .. 15) of a row tile, -1 past the end.
__device__ __forceinline__ int64_t stored_row(const PackMxfp4Args& args, int64_t tile, int r) {
  const int64_t n = args.gate_up ? tile * 8 + r % 8 : tile * 16 + r;
  if (n >= args.rows) {
    return -1;
  }
  return args.gate_up ? 2 * n + r / 8 : n;
}

// Eight inputs from k on, of a stored row, as one word of a tile.
__device__ __forceinline__ uint32_t tile_word(const PackMxfp4Args& args, int64_t row, int k) {
  if (row < 0 || k >= args.cols) {
    return kEncoder.of(0);
  }
  const uint8_t* from = args.blocks + row * (args.cols / 2) + k / 2;
  uint32_t values = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values |= static_cast<uint32_t>(from[i]) << (8 * i);
  }
  return kEncoder.of(values);
}

__global__ void __launch_bounds__(THREADS) pack_data(const PackMxfp4Args args, const Mxfp4TileShape shape) {
  const int64_t i = int64_t{blockIdx.x} * THREADS + threadIdx.x;
  if (i >= int64_t{shape.row_tiles} * shape.k_blocks * 32) {
    return;
  }
  const int lane = static_cast<int>(i % 32);
  const int block = static_cast<int>(i / 32 % shape.k_blocks);
  const int64_t tile = i / 32 / shape.k_blocks;
  const int64_t low = stored_row(args, tile, lane / 4);
  const int64_t high = stored_row(args, tile, lane / 4 + 8);
  const int k = block * 64 + lane % 4 * 8;
  static_cast<uint4*>(args.tiles)[i] = make_uint4(tile_word(args, low, k), tile_word(args, high, k),
                                                  tile_word(args, low, k + 32), tile_word(args, high, k + 32));
}

__global__ void __launch_bounds__(THREADS) pack_scales(const PackMxfp4Args args, const Mxfp4TileShape shape) {
  const int64_t i = int64_t{blockIdx.x} * THREADS + threadIdx.x;
  if (i >= shape.scale_bytes() / 4) {
    return;
  }
  const int g = static_cast<int>(i / 4 % 8);
  const int block = static_cast<int>(i / 32 % shape.scale_groups()) * 4 + static_cast<int>(i % 4);
  const int64_t tile = i / 32 / shape.scale_groups();
  const int groups = args.cols / kStoredGroup;
  uint32_t word = 0;
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const int64_t row = stored_row(args, tile, g + part / 2 * 8);
    const int group = block * 2 + part % 2;
    if (row >= 0 && group < groups) {
      word |= static_cast<uint32_t>(args.scales[row * groups + group]) << (8 * part);
    }
  }
  static_cast<uint32_t*>(args.tile_scales)[i] = word;
}

}  // namespace

void pack_mxfp4_cuda(const PackMxfp4Args& args, Stream& stream) {
  MOELORA_ASSERT(args.cols % kStoredGroup == 0);
  MOELORA_ASSERT(reinterpret_cast<uintptr_t>(args.tiles) % 16 == 0);
  MOELORA_ASSERT(reinterpret_cast<uintptr_t>(args.tile_scales) % 16 == 0);
  const Mxfp4TileShape shape =
      args.gate_up ? mxfp4_gate_up_shape(args.rows, args.cols) : mxfp4_down_shape(args.rows, args.cols);
  if (shape.data_bytes() == 0) {
    return;
  }
  const auto blocks = [](int64_t threads) { return static_cast<unsigned>((threads + THREADS - 1) / THREADS); };
  pack_data<<<blocks(shape.data_bytes() / 16), THREADS, 0, cuda_stream(stream)>>>(args, shape);
  pack_scales<<<blocks(shape.scale_bytes() / 4), THREADS, 0, cuda_stream(stream)>>>(args, shape);
  check_launch("pack_mxfp4");
}

}  // namespace moelora
